"""`python tests/browser/viewer_times.py`: what the viewer takes per frame and seek at 200, 1000 and 3000 steps. Asserts nothing.

Times are of this machine and of software rendering where there is no GPU; read ratios rather than absolutes.
"""
from __future__ import annotations

import argparse
import http.server
import json
import shutil
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from conftest import _Handler  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402
from synthetic import make_trace  # noqa: E402

from specviz import trace as records  # noqa: E402

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# A live run: the steps in slices as they come from the server, one slice a frame.
LIVE = """async ([data, slice]) => {
  viewer.take({type: 'start', run: 'live', seq: 0, meta: data.meta, status: 'active'});
  const frames = [];
  let seq = 0, last = performance.now();
  for (let i = 0; i < data.steps.length; i += slice) {
    viewer.take({type: 'steps', run: 'live', seq: ++seq, steps: data.steps.slice(i, i + slice)});
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const now = performance.now();
    frames.push(now - last); last = now;
  }
  return frames;
}"""
# Jumps to far places; the layout they cause is part of them.
SEEK = """([n, count]) => {
  const strip = document.querySelector('.sv-strip'), times = [];
  for (let k = 0; k < count; k++) {
    const to = (k * 0.618034 % 1) * n | 0, start = performance.now();
    viewer.visit(to);
    strip.getBoundingClientRect(); strip.scrollHeight;
    times.push(performance.now() - start);
  }
  return times;
}"""
OPEN = """text => {
  const data = JSON.parse(text), start = performance.now();
  viewer.take({type: 'trace', run: 't', seq: 0, trace: data});
  document.querySelector('.sv-strip').scrollHeight;
  return [performance.now() - start];
}"""
STEP = """count => {
  const strip = document.querySelector('.sv-strip'), times = [];
  for (let k = 0; k < count; k++) {
    const start = performance.now();
    viewer.visit(viewer.state().at + 1);
    strip.scrollHeight;
    times.push(performance.now() - start);
  }
  return times;
}"""


class Clock:
    """The renderer's own account of its main thread: milliseconds of processor time, so that a busy machine counts less."""

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read(self) -> dict[str, float]:
        metrics = {one["name"]: one["value"] for one in self._session.send("Performance.getMetrics")["metrics"]}
        return {name: 1000 * metrics[f"{name}Duration"] for name in ("Script", "RecalcStyle", "Layout", "Task")}


def measure(page: Page, clock: Clock, num_steps: int) -> Iterator[tuple[str, list[float], dict[str, float]]]:
    """(what, wall milliseconds of each, processor milliseconds per one) for: opening a trace at once, far jumps and steps to the next in
    each view, and frames of a live run in slices of four steps."""
    data = {"steps": [], "plain": []} | json.loads(records.dumps(make_trace(num_steps, plain=False)))

    def timed(name: str, script: str, argument: object) -> tuple[str, list[float], dict[str, float]]:
        before = clock.read()
        times = page.evaluate(script, argument)
        return name, times, {key: (value - before[key]) / len(times) for key, value in clock.read().items()}

    yield timed("open", OPEN, json.dumps(data))
    for view in ("tokens", "why", "tree"):
        page.evaluate("view => { viewer.openView(view); viewer.visit(0); }", view)
        yield timed(f"seek, {view}", SEEK, [num_steps, 16])
        page.evaluate("n => viewer.visit(n)", num_steps // 2)
        yield timed(f"next step, {view}", STEP, 16)
    page.evaluate("viewer.openView('tokens')")
    yield timed("frame, live", LIVE, [{"meta": data["meta"], "steps": data["steps"][:400]}, 4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", type=int, default=[200, 1000, 3000])
    given = parser.parse_args()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = next(path for name in PROGRAMS if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--headless", "--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_selector("#viewer[data-ready='1']")
        clock = Clock(page)
        print("ms each. wall: median, p95, worst. processor: mean of script, style, layout and all tasks of the main thread")
        for num_steps in given.steps:
            for name, times, busy in measure(page, clock, num_steps):
                times = sorted(times)
                wall = (statistics.median(times), times[int(.95 * (len(times) - 1))], times[-1])
                print(f"{num_steps:>6}  {name:<18} wall " + " ".join(f"{x:7.1f}" for x in wall) + "   processor "
                      + " ".join(f"{x:6.1f}" for x in busy.values()), flush=True)
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
