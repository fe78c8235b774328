"""What `start` and `trace` messages hold, besides the envelope that numbers them.

It knows nothing of Gradio: an exported page uses the same.
"""
from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .. import metrics
from .. import trace as records
from ..trace import FORMAT, VERSION, Trace

__all__ = ["formulas", "look", "trace_file"]


def formulas() -> dict[str, dict[str, str]]:
    """{name: {label, formula, source, note}} from `specviz.metrics.FORMULAS`, JSON-ready; empty texts are left out."""
    return {name: {key: text for key, text in asdict(entry).items() if text} for name, entry in metrics.FORMULAS.items()}


def look(plotly: str | None, *, lossy: bool = False) -> dict[str, Any]:
    """Figures and formulas, and where the browser finds Plotly; None: no charts, and then Plotly need not be installed here."""
    if plotly is None:
        return {"formulas": formulas()}
    from . import charts
    return {"figures": charts.figures(lossy=lossy), "plotly": plotly, "formulas": formulas()}


def trace_file(trace: Trace) -> dict[str, Any]:
    """A recording in the shape of its file, as data."""
    return {"format": FORMAT, "version": VERSION, "steps": [], "plain": []} | records.to_dict(trace)
