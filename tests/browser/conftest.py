"""A page with nothing but the viewer on it, in headless Chromium, with every request and console message watched."""
from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from specviz.ui.script import viewer_script, viewer_style

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><link rel="stylesheet" href="/viewer.css">
<style>body { margin: 12px } body.dark { background: #0b0f19 }</style>
<body><div id="viewer"></div><script src="/viewer.js"></script><script>
window.asked = [];
window.answer = null;
window.viewer = SpecViz.mount(document.getElementById("viewer"), {
  onResync: (run, from) => { asked.push([run, from]); return answer && answer(run, from); },
});
</script>"""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = {"/": (PAGE.encode(), "text/html"), "/viewer.js": (viewer_script(with_style=False).encode(), "text/javascript"),
                 "/viewer.css": (viewer_style().encode(), "text/css"), "/plotly.min.js": (_plotly(), "text/javascript")}.get(self.path)
        if not found:
            self.send_error(404)
            return
        body, kind = found
        body = body.read_bytes() if isinstance(body, Path) else body
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@functools.lru_cache
def _plotly() -> Path:
    import plotly
    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A browser on a busy machine may miss a moment that a test waits for: such a test is tried again, and the report says so."""
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.flaky(reruns=2))


@pytest.fixture(scope="session")
def address():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium on this machine (looked for chromium, chromium-browser, google-chrome)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--headless", "--no-sandbox", "--disable-gpu",
                                                                            "--disable-background-networking"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, address):
    """The viewer, mounted and empty. Afterwards: no console error, no page error, no request to another host.

    A test that provokes a failed request names the address in `page.expected_failures`.
    """
    context = chromium.new_context(viewport={"width": 1400, "height": 1000}, reduced_motion="reduce", accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(15_000)
    page.expected_failures = []
    problems, hosts = [], set()
    page.on("console", lambda said: problems.append((said.text, said.location.get("url", ""))) if said.type == "error" else None)
    page.on("pageerror", lambda error: problems.append((str(error), "")))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc) if request.url.startswith("http") else None)
    page.goto(address)
    page.wait_for_selector("#viewer[data-ready='1']")
    yield page
    context.close()
    assert [text for text, url in problems if not any(url.endswith(name) for name in page.expected_failures)] == []
    assert hosts <= {urlsplit(address).netloc}, "the viewer asked a machine other than its own server"
