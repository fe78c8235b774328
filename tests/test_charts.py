"""The figures that Python hands to the browser: series, words, colours, size. No browser here."""
from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from specviz.ui import charts
from specviz.ui.script import viewer_script, viewer_style

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("acceptance", "latency", "progress")              # under the stage; the others belong to views
MORE = ("by_depth", "histogram", "prediction", "verify_cost", "memory", "what_if")


@pytest.fixture(scope="module")
def figures():
    return charts.figures()


def test_figures_in_two_palettes_that_differ_only_in_colour(figures):
    """Light and dark have the same traces, titles and axes: nothing but colours changes with the theme."""
    assert set(figures) == {"light", "dark"}
    assert all(tuple(figures[theme]) == NAMES + MORE for theme in figures)
    assert json.dumps(figures["light"]) != json.dumps(figures["dark"])
    colour = re.compile(r"#[0-9A-Fa-f]{6}|rgba\([^)]*\)")
    assert colour.sub("", json.dumps(figures["light"])) == colour.sub("", json.dumps(figures["dark"]))


def test_every_trace_names_its_series_and_is_empty(figures):
    """`meta` tells the browser which numbers belong into which trace; the numbers themselves never come from Python."""
    for theme in figures.values():
        for name, figure in theme.items():
            assert tuple(trace["meta"] for trace in figure["data"]) == charts.SERIES[name]
            assert all(trace.get("x", []) == [] and trace.get("y", []) == [] and trace["type"] in ("scatter", "bar") for trace in figure["data"])


def test_series_are_those_that_the_viewer_can_fill(figures):
    """Every series name occurs in the viewer's script; a renamed one would stay an empty chart."""
    script = viewer_script()
    for names in charts.SERIES.values():
        assert all(re.search(rf"\b{name}\b", script) for name in names)


def test_titles_axes_and_labels_are_words(figures):
    """Titles are given as objects (plotly.js 4 ignores strings), both axes are labelled, and every annotation says what it stands for."""
    for figure in figures["light"].values():
        layout = figure["layout"]
        assert layout["title"]["text"] and layout["xaxis"]["title"]["text"]
        assert layout["yaxis"]["title"]["text"] or figure["data"][0].get("orientation") == "h", "bars on their side have words for ticks"
        assert all(note["name"] and note["visible"] is False for note in layout.get("annotations", ()))
    assert [figures["light"][name]["layout"]["meta"] for name in NAMES + MORE] == ["per step", "per step", "whole run", *["charts"] * 5, "what if"]
    speed_up = [note for note in figures["light"]["progress"]["layout"]["annotations"] if note["name"] == "speed_up"]
    assert len(speed_up) == 1 and "{}" in speed_up[0]["text"] and "measured" in speed_up[0]["text"]


def test_one_look(figures):
    """Equal heights and margins, no legend of Plotly's own, and a view that survives redraws."""
    looks = {json.dumps([figures["light"][name]["layout"][key] for key in ("height", "margin", "showlegend", "uirevision", "hovermode", "font")])
             for name in NAMES}
    assert len(looks) == 1 and json.loads(looks.pop())[2] is False
    assert {figures["light"][name]["layout"]["height"] for name in NAMES + MORE[:-1]} == {200}
    assert not any(figure["layout"]["showlegend"] for figure in figures["light"].values())


def test_stacks_carry_a_second_cue(figures):
    """Within a stack no two layers share pattern and strength: colour alone never tells them apart."""
    for theme in figures.values():
        for name in ("acceptance", "latency"):
            cues = [((trace.get("fillpattern") or {}).get("shape", ""), trace["fillcolor"].rsplit(",", 1)[1])
                    for trace in theme[name]["data"] if trace.get("stackgroup")]
            assert len(set(cues)) == len(cues) == 3


def test_palette_equals_the_style_sheet():
    """Charts and text use the same colours: each palette entry is the value of the CSS variable of its name."""
    css = (ROOT / "assets" / "viewer" / "00_viewer.css").read_text(encoding="utf-8")
    selectors = {"light": r"\.sv", "dark": r"\.dark \.sv"}
    blocks = {theme: re.search(rf"^{selector} \{{(.*?)^\}}", css, re.S | re.M)[1] for theme, selector in selectors.items()}
    for theme, palette in charts.PALETTES.items():
        variables = dict(re.findall(r"--sv-([a-z]+): (#[0-9A-Fa-f]{3,6})", blocks[theme]))
        for name in ("accepted", "rejected", "correction", "bonus", "unjudged", "draft", "text", "quiet"):
            assert variables[name] == palette[name], (theme, name)


def test_figures_are_small(figures):
    """All together stay under 40 kB: without `template="none"` they would be over 150."""
    assert len(json.dumps(figures, separators=(",", ":"))) < 40_000


def test_charts_import_no_gradio():
    """The figures can be used where Gradio is not installed, for example in an exported page."""
    tree = ast.parse((ROOT / "specviz" / "ui" / "charts.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(("gradio", "torch", "transformers")) for name in names)


def test_script_asks_no_other_machine_and_writes_no_markup():
    """The script names no outside address that it could ask (the SVG namespace is a name; the other says which page around a Space may hear
    its links) and has no way to turn text into markup."""
    script, style = viewer_script(with_style=False).encode(), viewer_style().encode()
    assert re.findall(rb"https?://[^'\"]+", script + style) == [b"http://www.w3.org/2000/svg", b"https://huggingface.co"]
    assert re.search(rb"postMessage\([^;]*https://huggingface\.co", script)
    assert not any(word in script for word in (b"innerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"outerHTML"))
