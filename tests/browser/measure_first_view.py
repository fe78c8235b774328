"""How soon the static site can be read on a phone with a slow line. A report, not a test: times belong to a machine.

    python tests/browser/measure_first_view.py [--rounds 5] [--plain]

A 390 px screen on Lighthouse's "slow 4G" (1.6 Mbit/s, 150 ms) with the processor slowed four times. Files are sent with gzip, as hosts
of static pages do; --plain sends them as they are.
"""
from __future__ import annotations

import argparse
import functools
import gzip
import http.server
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from specviz.ui.static import write_site  # noqa: E402

READABLE = "() => document.querySelectorAll('.sv-strip .sv-tok').length > 20 && performance.now()"


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    plain = False

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        body = path.read_bytes() if self.plain else gzip.compress(path.read_bytes(), 6)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        if not self.plain:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> int:
    from playwright.sync_api import sync_playwright
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    rounds, Quiet.plain = given.rounds, given.plain
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_site(Path(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=program, args=["--headless", "--no-sandbox", "--disable-gpu"])
        times, paints, sizes = [], [], []
        for _ in range(rounds):
            context = browser.new_context(viewport={"width": 390, "height": 844}, device_scale_factor=2, is_mobile=True)
            page = context.new_page()
            line = context.new_cdp_session(page)
            line.send("Network.enable")
            line.send("Network.emulateNetworkConditions", {"offline": False, "latency": 150, "downloadThroughput": 1_638_400 / 8,
                                                           "uploadThroughput": 750_000 / 8})
            line.send("Emulation.setCPUThrottlingRate", {"rate": 4})
            page.goto(f"http://127.0.0.1:{server.server_port}/index.html", wait_until="commit")
            times.append(page.wait_for_function(READABLE, polling=20, timeout=60_000).json_value() / 1000)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000)
            sizes.append(page.evaluate("performance.getEntriesByType('navigation')[0].transferSize + "
                                       "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.transferSize, 0)") / 1000)
            context.close()
        browser.close()
        server.shutdown()
    print(f"coloured text after {median(times):.2f} s (median of {rounds}: {', '.join(f'{t:.2f}' for t in times)}), "
          f"first paint {median(paints):.2f} s, {median(sizes):.0f} kB so far")
    return 0


if __name__ == "__main__":
    sys.exit(main())
