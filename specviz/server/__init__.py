"""This engine for other programs: OpenAI's routes, and Prometheus counters, on the page's own port."""
