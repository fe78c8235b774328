"""`python -m specviz.ui.static OUT`: a folder that plays recorded runs and lessons with no server, or one HTML file of one run.

It knows nothing of models or Gradio and needs neither; Plotly's file is taken from the installed package, and without it there are no
charts. Data stands in scripts, not in JSON files: a page opened by double click may not fetch.
"""
from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import InputError, SpecvizError
from ..trace import Trace, load
from .bodies import look, trace_file
from .library import Library
from .lessons import LESSONS
from .recordings import TRACES
from .script import ASSETS, PAGE, script_safe, viewer_script, viewer_style
from .slicer import encode

__all__ = ["main", "run_page", "write_site"]

TITLE = "specviz: a recorded run"
PLOTLY = "plotly.min.js"


def run_page(trace: Trace, *, charts: bool = True, note: str = "") -> str:
    """One run as one HTML file that makes no request. charts: with Plotly inside, 4.8 MB more. Raises InputError if it is not installed."""
    plotly = _plotly().read_text(encoding="utf-8") if charts else ""
    if re.search(r"</script|<!--", plotly, re.IGNORECASE):
        raise InputError("The installed plotly cannot stand inside a page; leave the charts out.")
    title = trace.meta.get("title")
    status = f"recorded: {title}" if isinstance(title, str) and title else "recorded"
    message = {"v": 1, "type": "trace", "run": "export", "seq": 0, "status": status, "trace": trace_file(trace),
               **look(PLOTLY if charts else None), **({"note": note} if note else {})}
    return _page(TITLE, "", [plotly, viewer_script(with_style=False), f"SpecViz.open({_data(message)});"])


def write_site(out: Path, *, recordings: Path = TRACES, lessons: Path = LESSONS) -> list[Path]:
    """Write the whole site into `out`; its files. Raises SpecvizError where a trace or lesson is broken or `out` is not writable."""
    try:
        plotly: Path | None = _plotly()
    except InputError:
        plotly = None
    library = Library(look(PLOTLY if plotly else None), recordings=recordings, lessons=lessons)
    runs = library.course["runs"]
    files = {"viewer.js": viewer_script(with_style=False), "site.js": (ASSETS / "site.js").read_text(encoding="utf-8")}
    data = {"course": library.course, "museum": library.museum, **{name: trace_file(trace) for name, trace in library.traces.items()}}
    files |= {f"data/{name}.js": f"specvizData({json.dumps(name)}, {_data(value)});\n" for name, value in data.items()}
    needed = ("site.js", "viewer.js", *(f"data/{run['name']}.js" for run in runs[:1]))       # the first view waits for these only
    files["index.html"] = _page("specviz: watch speculative decoding", (ASSETS / "site.html").read_text(encoding="utf-8"),
                                [f"specvizData('runs', {_data(runs)});"],
                                tail="".join(f'<script src="{quote(name)}"></script>\n' for name in needed))
    try:
        (out / "data").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
        if plotly:
            shutil.copyfile(plotly, out / PLOTLY)
    except OSError as error:
        raise InputError(f"The site could not be written to {out}: {error.strerror}. Choose another folder.") from error
    return [out / name for name in files] + ([out / PLOTLY] if plotly else [])


def _data(value: Any) -> str:
    return script_safe(encode(value))


def _page(title: str, body: str, scripts: Sequence[str], tail: str = "") -> str:
    """The page with its places filled in one pass, so that no text of a trace is taken for a place."""
    parts = {"title": title, "style": viewer_style(), "body": body,
             "scripts": tail + "\n".join(f"<script>{text}</script>" for text in scripts if text)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], PAGE)


def _plotly() -> Path:
    """Plotly's script in the installed package, found without importing it."""
    from importlib.util import find_spec
    spec = find_spec("plotly")
    file = Path(spec.origin).parent / "package_data" / PLOTLY if spec and spec.origin else None
    if file is None or not file.is_file():
        raise InputError("Charts need the package plotly, which is not installed. Install it, or give --no-charts.")
    return file


def main(argv: Sequence[str] | None = None) -> int:
    """Write the site, or one run's page. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specviz.ui.static",
                                     description="Write recorded runs and lessons as pages that need no server.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of the site, or with --trace the HTML file")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write this one run as one self-contained HTML file")
    parser.add_argument("--no-charts", action="store_true", help="with --trace: leave Plotly out; the file is small then")
    given = parser.parse_args(argv)
    try:
        if given.trace:
            page = run_page(load(given.trace), charts=not given.no_charts)
            try:
                given.out.write_text(page, encoding="utf-8")
            except OSError as error:
                raise InputError(f"{given.out} cannot be written: {error.strerror}. Choose another place.") from error
            print(f"{given.out}: {len(page.encode()) / 1e6:.2f} MB")
        else:
            files = write_site(given.out)
            print(f"{len(files)} files in {given.out}; open {given.out / 'index.html'}")
        return 0
    except SpecvizError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
