"""The viewer's Plotly figures in two palettes: layout, colours, words. The browser fills in the numbers.

It knows nothing of Gradio, of traces or of how they travel. Every trace names its series in `meta`; every annotation names the
value that it stands for in `name`, and `{}` in its text marks the place of the number. A figure's `layout.meta` says where it stands:
"per step" and "whole run" under the stage, "charts" in the view of that name, "what if" beside its sliders.
"""
from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import plotly.graph_objects as go

__all__ = ["FIGURES", "PALETTES", "SERIES", "figures"]

# Okabe-Ito, darkened or lightened until it stands out from its ground; assets/viewer/00_viewer.css has the same values (a test compares them).
PALETTES: dict[str, dict[str, str]] = {
    "light": {"accepted": "#009E73", "rejected": "#D55E00", "correction": "#0072B2", "bonus": "#CC79A7", "unjudged": "#8a919e",
              "draft": "#E69F00", "text": "#1f2328", "quiet": "#59636e", "grid": "rgba(110,118,129,.16)", "veil": "rgba(255,255,255,.82)", "ground": "#ffffff"},
    "dark": {"accepted": "#2fc79a", "rejected": "#ff8a3d", "correction": "#56B4E9", "bonus": "#e39fc6", "unjudged": "#8d96a3",
             "draft": "#F0C04a", "text": "#e8eaed", "quiet": "#a7afba", "grid": "rgba(160,170,185,.16)", "veil": "rgba(17,21,29,.82)", "ground": "#11151d"},
}

SERIES = {"acceptance": ("accepted", "rejected", "unjudged", "tokens_per_step"),
          "latency": ("draft_ms", "verify_ms", "other_ms", "plain_ms"),
          "progress": ("plain", "speculative"),
          "by_depth": ("alpha", "survival"),
          "histogram": ("num_steps",),
          "verify_cost": ("all_accepted", "verify", "break_even", "this_run"),
          "prediction": ("speed_ups",),
          "memory": ("held_mb",),
          "what_if": ("as_recorded", "with_changes", "measured", "chosen")}


def _figure(colours: dict[str, str], title: str, x: str, y: str, scope: str) -> go.Figure:
    """An empty figure in the common look. `template="none"` keeps it at a tenth of the size."""
    axis = {"gridcolor": colours["grid"], "zeroline": False, "showline": False, "ticks": "", "tickfont": {"color": colours["quiet"]},
            "automargin": False, "fixedrange": False}
    label = {"font": {"size": 11, "color": colours["quiet"]}}
    return go.Figure(layout={
        "template": "none", "meta": scope, "font": {"size": 11, "color": colours["text"], "family": "system-ui, sans-serif"},
        "title": {"text": title, "font": {"size": 13, "color": colours["text"]}, "x": 0, "xref": "paper", "xanchor": "left",
                  "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 8}},
        "xaxis": {"title": {"text": x, "standoff": 6, **label}, "showgrid": False, **axis},
        "yaxis": {"title": {"text": y, "standoff": 4, **label}, "rangemode": "tozero", **axis},
        "margin": {"l": 42, "r": 14, "t": 12, "b": 36}, "height": 200,
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "showlegend": False,
        "hovermode": "x unified", "hoverlabel": {"bgcolor": colours["ground"], "font": {"color": colours["text"]}}, "uirevision": "run", "dragmode": "zoom",
    })


def _fade(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i:i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _layer(figure: go.Figure, name: str, series: str, colour: str, pattern: str, unit: str, alpha: float = 0.55) -> None:
    """One layer of a stack, as a step-shaped area: one path per trace, where bars are one path per step and redraw far slower."""
    fill = {"shape": pattern, "fgcolor": colour, "bgcolor": _fade(colour, 0.12), "size": 5, "solidity": 0.35} if pattern else None
    figure.add_scatter(name=name, meta=series, x=[], y=[], mode="lines", stackgroup="stack", fillcolor=_fade(colour, alpha),
                       fillpattern=fill, line={"color": colour, "width": 0, "shape": "hvh"}, hovertemplate="%{y}" + unit)


def _line(figure: go.Figure, name: str, series: str, colour: str, template: str, *, width: float = 2, dash: str = "solid",
          shape: str = "linear") -> None:
    figure.add_scatter(name=name, meta=series, x=[], y=[], mode="lines", connectgaps=False, hovertemplate=template,
                       line={"color": colour, "width": width, "dash": dash, "shape": shape})


def _label(figure: go.Figure, name: str, text: str, colour: str, veil: str, anchor: str = "bottom") -> None:
    """A label written at the end of its line; the browser gives it place and number, and leaves it out while there is none."""
    figure.add_annotation(name=name, text=text, showarrow=False, xanchor="right", yanchor=anchor, x=0, y=0, visible=False,
                          bgcolor=veil, borderpad=1, font={"size": 11, "color": colour})


def acceptance(colours: dict[str, str]) -> go.Figure:
    """Drafted tokens per step by verdict, with the running tokens per step."""
    figure = _figure(colours, "Drafts per step", "step", "tokens", "per step")
    _layer(figure, "accepted", "accepted", colours["accepted"], "", "")
    _layer(figure, "rejected", "rejected", colours["rejected"], "/", "")
    _layer(figure, "unjudged", "unjudged", colours["unjudged"], "", "", 0.16)
    _line(figure, "tokens per step, so far", "tokens_per_step", colours["text"], "%{y:.2f}")
    _label(figure, "tokens_per_step", "{} tokens per step", colours["text"], colours["veil"])
    return figure


def latency(colours: dict[str, str]) -> go.Figure:
    """Milliseconds per step by phase, with what plain decoding took for as many tokens at the same place."""
    figure = _figure(colours, "Time per step", "step", "ms", "per step")
    _layer(figure, "draft", "draft_ms", colours["draft"], "", " ms")
    _layer(figure, "verify", "verify_ms", colours["correction"], "\\", " ms")
    _layer(figure, "other", "other_ms", colours["unjudged"], "", " ms", 0.5)
    _line(figure, "plain, same tokens", "plain_ms", colours["text"], "%{y:.1f} ms", width=1.5, shape="hvh")
    _label(figure, "plain_ms", "plain decoding", colours["text"], colours["veil"])
    return figure


def progress(colours: dict[str, str]) -> go.Figure:
    """Tokens over seconds of decoding, speculative and plain, with the measured speed-up."""
    figure = _figure(colours, "Tokens over time", "seconds of decoding", "tokens", "whole run")
    _line(figure, "plain", "plain", colours["quiet"], "%{y} tokens at %{x:.2f} s", dash="dash")
    _line(figure, "speculative", "speculative", colours["accepted"], "%{y} tokens at %{x:.2f} s", width=2.5)
    _label(figure, "speculative", "speculative", colours["accepted"], colours["veil"])
    _label(figure, "plain", "plain", colours["quiet"], colours["veil"], "top")
    figure.add_annotation(name="speed_up", text="<b>{}×</b> measured", showarrow=False, xref="paper", yref="paper", x=0.99, y=0.05,
                          xanchor="right", yanchor="bottom", visible=False, bgcolor=colours["veil"],
                          font={"size": 14, "color": colours["text"]})
    return figure


def _marks(figure: go.Figure, name: str, series: str, colour: str, symbol: str, template: str, size: int = 10) -> None:
    figure.add_scatter(name=name, meta=series, x=[], y=[], mode="markers", hovertemplate=template,
                       marker={"color": colour, "size": size, "symbol": symbol, "line": {"width": 2, "color": colour}})


def _unit_line(figure: go.Figure, colours: dict[str, str], axis: str) -> None:
    """A thin line at 1, where speculation neither gains nor loses."""
    other = "y" if axis == "x" else "x"
    figure.add_shape(type="line", name="one", line={"color": colours["quiet"], "width": 1, "dash": "dot"},
                     **{f"{axis}ref": axis, f"{axis}0": 1, f"{axis}1": 1, f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1})


def by_depth(colours: dict[str, str]) -> go.Figure:
    """How often a guess is accepted at each depth of the draft, once it is judged and in all."""
    figure = _figure(colours, "Acceptance by depth", "depth in the draft", "share", "charts")
    _line(figure, "accepted once the ones before were", "alpha", colours["accepted"], "%{y:.2f}", width=2.5)
    _line(figure, "accepted in all", "survival", colours["correction"], "%{y:.2f}", dash="dash")
    figure.data[0].mode = figure.data[1].mode = "lines+markers"
    figure.data[1].marker.symbol = "square-open"
    figure.update_layout(yaxis={"range": [0, 1.04], "tickformat": ".0%"}, xaxis={"tickformat": "d"})
    return figure


def histogram(colours: dict[str, str]) -> go.Figure:
    """Steps by the number of tokens that they emitted."""
    figure = _figure(colours, "Steps by tokens emitted", "tokens in one step", "steps", "charts")
    figure.add_bar(name="steps", meta="num_steps", x=[], y=[], hovertemplate="%{y} steps<extra></extra>",
                   marker={"color": _fade(colours["accepted"], 0.5), "line": {"color": colours["accepted"], "width": 1}})
    figure.update_layout(bargap=0.25, xaxis={"tickformat": "d"}, hovermode="x")
    _label(figure, "mean_tokens", "{} tokens per step", colours["text"], colours["veil"])
    return figure


def verify_cost(colours: dict[str, str]) -> go.Figure:
    """What verifying M tokens costs, the tokens per step that pay for it, and where this run is."""
    figure = _figure(colours, "Cost of verifying and break-even", "tokens verified together, M", "plain steps; tokens", "charts")
    _line(figure, "most possible: all accepted", "all_accepted", colours["quiet"], "at most %{y} tokens", width=1, dash="dot")
    _line(figure, "cost of verifying, v(M)", "verify", colours["correction"], "verifying: %{y:.2f} plain steps", width=2.5)
    _line(figure, "break-even: tokens a step must give", "break_even", colours["rejected"], "break-even: %{y:.2f} tokens", dash="dash")
    _marks(figure, "this run", "this_run", colours["accepted"], "diamond", "this run: %{y:.2f} tokens per step<extra></extra>", 12)
    return figure


def prediction(colours: dict[str, str]) -> go.Figure:
    """The measured speed-up beside what the formulas say."""
    figure = _figure(colours, "Speed-up, measured and predicted", "times plain decoding", "", "charts")
    figure.add_bar(name="speed-up", meta="speed_ups", x=[], y=[], orientation="h", textposition="outside", texttemplate="%{x:.2f}×",
                   hovertemplate="%{y}: %{x:.2f}×<extra></extra>", cliponaxis=False, marker={
                       "color": [_fade(colours["accepted"], 0.6), _fade(colours["correction"], 0.25), _fade(colours["unjudged"], 0.25)],
                       "pattern": {"shape": ["", "/", "/"], "fgcolor": [colours["accepted"], colours["correction"], colours["unjudged"]], "size": 6,
                                   "solidity": 0.3},
                       "line": {"color": [colours["accepted"], colours["correction"], colours["unjudged"]], "width": 1}})
    _unit_line(figure, colours, "x")
    figure.update_layout(hovermode="closest", bargap=0.35, margin={"l": 106, "r": 44}, yaxis={"autorange": "reversed", "showgrid": False, "fixedrange": True},
                         xaxis={"showgrid": True, "rangemode": "tozero"})
    return figure


def memory(colours: dict[str, str]) -> go.Figure:
    """Bytes of target, drafter and cache at the end of the run."""
    figure = _figure(colours, "Memory", "MB", "", "charts")
    figure.add_bar(name="memory", meta="held_mb", x=[], y=[], orientation="h", textposition="outside", texttemplate="%{x:,.3~r} MB",
                   hovertemplate="%{y}: %{x:,.1f} MB<extra></extra>", cliponaxis=False,
                   marker={"color": _fade(colours["correction"], 0.45), "line": {"color": colours["correction"], "width": 1}})
    figure.update_layout(hovermode="closest", bargap=0.35, margin={"l": 106, "r": 64}, yaxis={"autorange": "reversed", "showgrid": False, "fixedrange": True},
                         xaxis={"showgrid": True})
    return figure


def what_if(colours: dict[str, str]) -> go.Figure:
    """The speed-up over the draft length, as recorded and with the changes of the sliders."""
    figure = _figure(colours, "Speed-up by draft length", "draft length K", "times plain decoding", "what if")
    _line(figure, "costs as recorded", "as_recorded", colours["quiet"], "%{y:.2f}× as recorded", dash="dash")
    _line(figure, "with your changes", "with_changes", colours["correction"], "%{y:.2f}× with your changes", width=2.5)
    _marks(figure, "measured", "measured", colours["accepted"], "diamond", "%{y:.2f}× measured")
    _marks(figure, "your K", "chosen", colours["correction"], "circle-open", "%{y:.2f}×", 13)
    _label(figure, "best", "best: K = {}", colours["text"], colours["veil"])
    _unit_line(figure, colours, "y")
    figure.update_layout(height=260, xaxis={"tickformat": "d"})
    return figure


FIGURES = (acceptance, latency, progress, by_depth, histogram, prediction, verify_cost, memory, what_if)


@lru_cache(maxsize=2)
def figures(lossy: bool = False) -> dict[str, dict[str, Any]]:
    """{"light": {name: figure}, "dark": {name: figure}} as JSON-ready dicts with empty series, about 36 kB altogether; not to be changed.

    lossy: the run's verification does not keep the target's distribution; every title says so.
    """
    def data(figure: go.Figure) -> dict[str, Any]:
        if lossy:
            figure.layout.title.text += " · lossy verification"
        return json.loads(figure.to_json())
    return {theme: {make.__name__: data(make(colours)) for make in FIGURES} for theme, colours in PALETTES.items()}
