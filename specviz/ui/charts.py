"""The viewer's three Plotly figures in two palettes: layout, colours, words. The browser fills in the numbers.

It knows nothing of Gradio, of traces or of how they travel. Every trace names its series in `meta`; every annotation names the
value that it stands for in `name`, and `{}` in its text marks the place of the number.
"""
from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go

__all__ = ["PALETTES", "SERIES", "acceptance", "figures", "latency", "progress"]

# Okabe-Ito, darkened or lightened until it stands out from its ground; assets/viewer.css has the same values (a test compares them).
PALETTES: dict[str, dict[str, str]] = {
    "light": {"accepted": "#009E73", "rejected": "#D55E00", "correction": "#0072B2", "bonus": "#CC79A7", "unjudged": "#8a919e",
              "draft": "#E69F00", "text": "#1f2328", "quiet": "#59636e", "grid": "rgba(110,118,129,.16)", "veil": "rgba(255,255,255,.82)", "ground": "#ffffff"},
    "dark": {"accepted": "#2fc79a", "rejected": "#ff8a3d", "correction": "#56B4E9", "bonus": "#e39fc6", "unjudged": "#8d96a3",
             "draft": "#F0C04a", "text": "#e8eaed", "quiet": "#a7afba", "grid": "rgba(160,170,185,.16)", "veil": "rgba(17,21,29,.82)", "ground": "#11151d"},
}

SERIES = {"acceptance": ("accepted", "rejected", "unjudged", "tokens_per_step"),
          "latency": ("draft_ms", "verify_ms", "other_ms", "plain_ms"),
          "progress": ("plain", "speculative")}


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


def figures(lossy: bool = False) -> dict[str, dict[str, Any]]:
    """{"light": {name: figure}, "dark": {name: figure}} as JSON-ready dicts with empty series, about 9 kB altogether.

    lossy: the run's verification does not keep the target's distribution; every title says so.
    """
    def data(figure: go.Figure) -> dict[str, Any]:
        if lossy:
            figure.layout.title.text += " · lossy verification"
        return json.loads(figure.to_json())
    return {theme: {make.__name__: data(make(colours)) for make in (acceptance, latency, progress)} for theme, colours in PALETTES.items()}
