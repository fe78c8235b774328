"""A benchmark as a Markdown table and as one self-contained HTML page with charts. It knows nothing of how it was measured."""
from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .analysis import Figure, Run, factors, rows

__all__ = ["OURS", "REFERENCE", "markdown", "page"]

REFERENCE, OURS = "transformers", ("specviz, unquantized", "specviz, INT8")
_COLOURS = ("#0f766e", "#b45309", "#4338ca", "#be123c", "#15803d", "#7c3aed", "#0369a1", "#a16207", "#64748b", "#334155")


def markdown(data: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The headline, one line per way of decoding, and speed-ups by category."""
    lines = [f"# {data['title']}", "", _conditions(data), "", *_headline(runs), "",
             "| system | decoding | tokens/s | speed-up over its own plain | tokens per step | drafts accepted | prefill s | same tokens as plain |",
             "|---|---|---|---|---|---|---|---|"]
    table = rows(runs)
    for row in table:
        lines.append(f"| {row['system']} | {row['arm']} | {_figure(row['tokens_per_s'], 1)} | {_figure(row['speed_up'])} | "
                     f"{_number(row['tokens_per_step'])} | {_percent(row['acceptance'])} | {_figure(row['prefill_s'])} | {_percent(row['same_tokens'])} |")
    categories = list(dict.fromkeys(run.category for run in runs))
    lines += ["", "Speed-up over the same system's plain decoding, medians by category:", "",
              "| system | decoding | " + " | ".join(categories) + " |", "|---|---|" + "---|" * len(categories)]
    for row in table:
        if row["by_category"]:
            lines.append(f"| {row['system']} | {row['arm']} | " + " | ".join(
                _number(each.median if (each := row["by_category"].get(name)) else None) for name in categories) + " |")
    if data.get("skipped"):
        lines += ["", "Not measured: " + "; ".join(data["skipped"])]
    return "\n".join(lines) + "\n"


def page(data: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """One HTML file that needs no network: the same tables, and four charts."""
    import plotly.io
    table = rows(runs)
    figures = [_by_category(table, runs), _tokens_against_speed(table), _cost_split(table), _memory(data)]
    parts = []
    for chart in figures:
        if chart is not None:
            parts.append("<section>" + plotly.io.to_html(chart, full_html=False, include_plotlyjs=not parts, config={"displaylogo": False}) + "</section>")
    style = ("body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1240px;padding:24px 16px;color:#1f2937;background:#fff}"
             "h1{font-size:24px}table{border-collapse:collapse;font-size:13px;margin:16px 0;display:block;overflow-x:auto}"
             "td,th{padding:5px 10px;border-bottom:1px solid #e5e7eb;text-align:left;white-space:nowrap}"
             "section{margin:24px 0;overflow-x:auto}")
    return (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{html.escape(data['title'])}</title>"
            f"<style>{style}</style>{_html_of(markdown(data, runs))}{''.join(parts)}</html>")


def _conditions(data: Mapping[str, Any]) -> str:
    systems = "; ".join(f"{name}: {facts.get('version') or (facts.get('versions') or {}).get('torch', '')}, "
                        f"{facts.get('quantization', '')}, {facts.get('threads') or '-'} thread(s)" for name, facts in data["systems"].items())
    machine = next((facts["machine"] for facts in data["systems"].values() if facts.get("machine")), {})
    return (f"{data['created']}, {machine.get('processor', '')} {machine.get('isa', '')}. {data['num_prompts']} prompts, {data['num_tokens']} greedy tokens "
            f"each, {data['num_rounds']} round(s), all systems in turns on every prompt; decoding without prefill and warm-up; medians with 95 % "
            f"intervals. {systems}. Command: `{data['command']}`")


def _headline(runs: Sequence[Run]) -> list[str]:
    found = factors(runs, REFERENCE, *OURS)
    names = {"engine": "engine (unquantized, over transformers' plain `generate`)", "quantization": "quantization (INT8 over unquantized)",
             "speculation": f"speculation ({found['best_arm'][1] if found['best_arm'] else 'no method'} over plain)"}
    known = [(words, found[name]) for name, words in names.items() if found[name]]
    lines = ["Headline, as its factors: " + " × ".join(f"{value.median:.2f} {words}" for words, value in known)] if known else []
    if found["measured"]:
        lines.append(f"Measured at once: {found['measured']} times transformers' plain `generate`.")
    best = found["best_arm"]
    llama = [row for row in rows(runs) if row["system"] == "llama.cpp"]
    if best and llama:
        mine = next(row for row in rows(runs) if (row["system"], row["arm"]) == best)
        lines.append("Beside llama.cpp: " + "; ".join(f"{mine['tokens_per_s'].median / row['tokens_per_s'].median:.2f} of its {row['arm']}" for row in llama) + ".")
    return ["\n\n".join(lines)]


def _by_category(table: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> Any:
    import plotly.graph_objects as go
    categories = list(dict.fromkeys(run.category for run in runs))
    chart = go.Figure()
    for number, row in enumerate(row for row in table if row["by_category"]):
        each = [row["by_category"].get(name) for name in categories]
        chart.add_bar(name=f"{row['system']}: {row['arm']}", x=categories, y=[f and f.median for f in each], marker_color=_COLOURS[number % len(_COLOURS)],
                      error_y={"type": "data", "symmetric": False, "array": [f and f.high - f.median for f in each],
                               "arrayminus": [f and f.median - f.low for f in each], "thickness": 1})
    chart.add_hline(y=1, line_dash="dot", annotation_text="plain")
    return _dressed(chart, "Speed-up over the same system's plain decoding, by category", "", "speed-up")


def _tokens_against_speed(table: Sequence[Mapping[str, Any]]) -> Any:
    import plotly.graph_objects as go
    chart = go.Figure()
    for number, row in enumerate(row for row in table if row["per_prompt"]):
        points = row["per_prompt"]
        chart.add_scatter(name=f"{row['system']}: {row['arm']}", x=[x for x, _, _ in points], y=[y for _, y, _ in points], mode="markers",
                          text=[name for _, _, name in points], marker={"size": 8, "opacity": 0.7, "color": _COLOURS[number % len(_COLOURS)]})
    most = max((x for row in table for x, _, _ in row["per_prompt"]), default=1)
    chart.add_scatter(name="if checking cost nothing more", x=[1, most], y=[1, most], mode="lines", line={"dash": "dot", "color": "#94a3b8"})
    return _dressed(chart, "Tokens per step against speed-up, one point per answer", "tokens per step", "speed-up")


def _cost_split(table: Sequence[Mapping[str, Any]]) -> Any:
    import plotly.graph_objects as go
    known = [row for row in table if row["ms_per_token"]]
    if not known:
        return None
    chart = go.Figure()
    for number, name in enumerate(("draft", "verify", "other")):
        chart.add_bar(name=name, y=[f"{row['system']}: {row['arm']}" for row in known], x=[row["ms_per_token"][name] for row in known], orientation="h",
                      marker_color=_COLOURS[number])
    chart.update_layout(barmode="stack", yaxis={"autorange": "reversed"})
    return _dressed(chart, "Where the time of a token goes", "milliseconds per token", "")


def _memory(data: Mapping[str, Any]) -> Any:
    import plotly.graph_objects as go
    known = {name: facts["memory_bytes"] for name, facts in data["systems"].items() if facts.get("memory_bytes")}
    if not known:
        return None
    chart = go.Figure(go.Bar(y=list(known), x=[value / 2 ** 20 for value in known.values()], orientation="h", marker_color=_COLOURS[0]))
    return _dressed(chart, "Memory of each process after the runs", "MiB", "")


def _dressed(chart: Any, title: str, x: str, y: str) -> Any:
    chart.update_layout(title=title, xaxis_title=x, yaxis_title=y, template="plotly_white", height=440, margin={"l": 60, "r": 20, "t": 60, "b": 60},
                        legend={"orientation": "h", "y": -0.2})
    chart.update_yaxes(automargin=True)
    return chart


def _html_of(text: str) -> str:
    """The few forms of Markdown that `markdown` writes."""
    out, table = [], False
    for line in text.splitlines():
        is_row = line.startswith("|")
        if table and not is_row:
            out.append("</table>")
        if is_row and not table:
            out.append("<table>")
        cells = [html.escape(cell.strip()) for cell in line.strip("|").split(" | ")] if is_row else []
        if is_row and not set(line) <= set("|- "):
            tag = "td" if table else "th"
            out.append("<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>")
        elif line.startswith("# "):
            out.append(f"<h1>{html.escape(line[2:])}</h1>")
        elif line and not is_row:
            out.append(f"<p>{html.escape(line)}</p>")
        table = is_row
    return "".join(out) + ("</table>" if table else "")


def _figure(value: Figure | None, digits: int = 2) -> str:
    return f"{value.median:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})" if value else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
