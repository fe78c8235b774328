"""Should speculation be on at my load? Many requests at a time against a server, with and without it: TTFT, ITL, tokens/s, acceptance.

It knows no engine: everything goes through the API that any client uses, so that our own engine and others are measured alike.

    python -m specviz.bench load --remote URL [--baseline URL] --prompts FILE --concurrency 1,4,16
    python -m specviz.bench load --concurrency 1,2,4,8                     # our own engine, its default method against plain decoding
"""
from __future__ import annotations

import argparse
import html
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import InputError, SpecvizError
from ..limits import Limits
from ..metrics import draft_counts
from ..remote.client import Client, Endpoint
from ..remote.engines import ENGINES, EngineKind, detect
from ..remote.reading import RemoteError
from .own_server import own_server

__all__ = ["Arm", "Level", "Sample", "main", "measured", "read_prompts", "table"]

MOST_ERRORS_SHOWN = 3
COLOURS = ("#0072B2", "#E69F00", "#009E73")
STYLE = """body { max-width: 1360px; margin: 20px auto; padding: 0 16px; font: 15px/1.4 system-ui, sans-serif; color: #1f2328; }
h1 { margin: 0 0 6px; font-size: 22px; } p { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 12px; }
i { display: inline-block; width: 12px; height: 12px; margin-right: 8px; border-radius: 3px; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); gap: 12px; }
section { min-width: 0; border: 1px solid #dfe3e8; border-radius: 10px; overflow: hidden; }"""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of answering that is compared: a server, or the same one with another request. extra: fields of the request."""
    label: str
    endpoint: Endpoint
    kind: EngineKind
    model: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times in seconds on the client's clock. itl_s: step times over the tokens of each step, first token apart. error: ""
    where it was answered."""
    ttft_s: float = 0.0
    took_s: float = 0.0
    num_tokens: int = 0
    itl_s: tuple[float, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """One arm at one number of concurrent requests; medians over requests. tokens_per_s: all tokens over the wall-clock time of the level.

    acceptance and tokens_per_step are None where the server does not tell.
    """
    arm: str
    concurrency: int
    num_requests: int
    num_failed: int
    tokens_per_s: float | None
    tokens_per_s_each: float | None
    ttft_s: float | None
    ttft_s_p95: float | None
    itl_s: float | None
    acceptance: float | None
    tokens_per_step: float | None
    errors: tuple[str, ...] = ()


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: JSON with "prompt" or "turns" (the first is taken), or plain text. Raises InputError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The prompts {path} cannot be read: {error}.") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.lstrip().startswith("{") else {"prompt": line}
            prompts.append(record["prompt"] if "prompt" in record else record["turns"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InputError(f"{path}, line {number}, is no prompt: expected {{\"prompt\": ...}}, {{\"turns\": [...]}} or a plain text.") from error
    if not prompts:
        raise InputError(f"{path} holds no prompt.")
    return prompts


def ask(client: Client, arm: Arm, prompt: str, num_tokens: int) -> Sample:
    """One request, read to its end; a failure is a sample too."""
    body = {"model": arm.model, "messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0,
            "max_tokens": num_tokens, **arm.kind.extra, **arm.extra}
    reader, begin_s, first_s = arm.kind.reader(), time.perf_counter(), 0.0
    try:
        for event, arrival_s in client.stream("/chat/completions", body):
            if reader.feed(event, arrival_s) and not first_s:
                first_s = arrival_s
    except RemoteError as error:
        return Sample(error=str(error))
    ending = reader.finish()
    steps = ending.steps
    decode = [step for step in steps if step.kind != "prefill"]
    counts = ending.counted or [draft_counts(step) for step in decode]
    sizes = [sum(token.num_tokens for token in step.emitted) for step in decode]
    took_s = time.perf_counter() - begin_s
    return Sample(first_s or took_s, took_s, sum(token.num_tokens for step in steps for token in step.emitted),
                  tuple(step.verify_ms / 1000 / n for step, n in zip(decode, sizes) if n and step.source != "aggregate"),
                  sum(drafted for drafted, _ in counts), sum(accepted for _, accepted in counts),
                  0 if any(step.source == "aggregate" for step in decode) else len(decode))


def measured(arm: Arm, prompts: Sequence[str], concurrency: int, num_tokens: int,
             transport: Callable[[], Any] = lambda: None) -> Level:
    """All prompts through `concurrency` clients that each send the next one as soon as theirs is answered."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    samples: list[Sample] = []

    def client_work() -> None:
        client = Client(arm.endpoint, transport())
        try:
            while True:
                samples.append(ask(client, arm, waiting.get_nowait(), num_tokens))
        except queue.Empty:
            pass
        finally:
            client.close()
    threads = [threading.Thread(target=client_work, daemon=True) for _ in range(min(concurrency, len(prompts)))]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summarized(arm.label, concurrency, samples, time.perf_counter() - begin_s)


def summarized(label: str, concurrency: int, samples: Sequence[Sample], wall_s: float) -> Level:
    good = [sample for sample in samples if not sample.error]
    drafted, accepted = sum(s.num_drafted for s in good), sum(s.num_accepted for s in good)
    num_steps, later = sum(s.num_steps for s in good), sum(s.num_tokens - 1 for s in good if s.num_steps)
    gaps = [gap for sample in good for gap in sample.itl_s]
    errors = tuple(dict.fromkeys(sample.error for sample in samples if sample.error))[:MOST_ERRORS_SHOWN]
    return Level(
        label, concurrency, len(samples), len(samples) - len(good),
        tokens_per_s=sum(s.num_tokens for s in good) / wall_s if good else None,
        tokens_per_s_each=statistics.median(s.num_tokens / s.took_s for s in good) if good else None,
        ttft_s=statistics.median(s.ttft_s for s in good) if good else None,
        ttft_s_p95=sorted(s.ttft_s for s in good)[min(len(good) - 1, int(0.95 * len(good)))] if good else None,
        itl_s=statistics.median(gaps) if gaps else None, acceptance=accepted / drafted if drafted else None,
        tokens_per_step=later / num_steps if num_steps else None, errors=errors)


def table(levels: Sequence[Level]) -> str:
    """Markdown: a row per level, with the speed-up over the second arm where there is one."""
    arms = list(dict.fromkeys(level.arm for level in levels))
    head = ("| at a time | way | tokens/s in all | tokens/s each | TTFT median / p95 | ITL median | tokens per step | drafts accepted | "
            "speed-up in all | failed |")
    lines = [head, "|" + "---|" * 10]
    def number(value: float | None, digits: int = 1, unit: str = "", scale: float = 1) -> str:
        return "–" if value is None else f"{scale * value:.{digits}f}{unit}"
    for level in levels:
        base = next((each for each in levels if each.concurrency == level.concurrency and len(arms) > 1 and each.arm == arms[1]), None)
        gain = level.tokens_per_s / base.tokens_per_s if base and base is not level and level.tokens_per_s and base.tokens_per_s else None
        lines.append(f"| {level.concurrency} | {level.arm} | {number(level.tokens_per_s)} | {number(level.tokens_per_s_each)} | "
                     f"{number(level.ttft_s, 0, ' ms', 1000)} / {number(level.ttft_s_p95, 0, ' ms', 1000)} | "
                     f"{number(level.itl_s, 1, ' ms', 1000)} | {number(level.tokens_per_step, 2)} | "
                     f"{number(level.acceptance, 0, ' %', 100)} | {number(gain, 2, '×')} | {level.num_failed} of {level.num_requests} |")
    return "\n".join(lines)


def page(levels: Sequence[Level]) -> str:
    """A whole HTML page: tokens per second in all, their ratio where there is a baseline, TTFT and ITL against the number of concurrent
    requests, side by side or, on a narrow screen, below each other."""
    import plotly.graph_objects as go
    arms = list(dict.fromkeys(level.arm for level in levels))
    at = sorted({level.concurrency for level in levels})
    known = {(level.arm, level.concurrency): level for level in levels}
    panels = [("tokens/s in all", {arm: [known[arm, n].tokens_per_s for n in at] for arm in arms}),
              ("TTFT, median, ms", {arm: [_ms(known[arm, n].ttft_s) for n in at] for arm in arms}),
              ("ITL, median, ms", {arm: [_ms(known[arm, n].itl_s) for n in at] for arm in arms})]
    if len(arms) > 1:
        pairs = [(known[arms[0], n].tokens_per_s, known[arms[1], n].tokens_per_s) for n in at]
        panels.insert(1, ("speed-up in all, ×", {arms[0]: [ours / base if ours and base else None for ours, base in pairs]}))
    divs = []
    for title, series in panels:
        chart = go.Figure([go.Scatter(x=[str(n) for n in at], y=values, name=arm, mode="lines+markers", line={"color": COLOURS[arms.index(arm) % 3]})
                           for arm, values in series.items()])
        chart.update_xaxes(title={"text": "requests at a time"}, type="category")
        chart.update_yaxes(rangemode="tozero")
        chart.update_layout(template="plotly_white", height=320, margin={"l": 56, "r": 16, "t": 48, "b": 48}, title={"text": title, "font": {"size": 15}},
                            showlegend=False)
        if "speed-up" in title:
            chart.add_hline(1, line={"color": "#59636e", "dash": "dot", "width": 1})
        divs.append(chart.to_html(full_html=False, include_plotlyjs=not divs, default_width="100%", config={"responsive": True}))
    keys = "".join(f'<span><i style="background:{COLOURS[i % 3]}"></i>{html.escape(arm)}</span>' for i, arm in enumerate(arms))
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>Speed against load</title><style>{STYLE}</style><h1>Speed against load</h1><p>{keys}</p><main>"
            + "".join(f"<section>{div}</section>" for div in divs) + "</main></html>")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def arm_of(label: str, url: str, model: str, kind: str, extra: dict[str, Any] | None = None, *, api_key: str = "") -> Arm:
    """Asks the server what it is. Raises RemoteError, InputError."""
    endpoint = Endpoint(url, api_key=api_key)
    client = Client(endpoint)
    try:
        models = client.models()
        found = ENGINES[kind] if kind in ENGINES else detect(client, models)
    finally:
        client.close()
    name = model or next((entry["id"] for entry in models), "")
    if not name:
        raise RemoteError("no-model", f"{endpoint.root} serves no model at present.")
    return Arm(f"{label} ({found.label})", endpoint, found, name, extra or {})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write JSON and HTML where asked for. Returns the process's exit code."""
    given = _parser().parse_args(argv)
    try:
        given.levels = [int(text) for text in given.concurrency.split(",")]
        if min(given.levels) < 1:
            raise ValueError
    except ValueError:
        print(f"specviz: --concurrency is {given.concurrency!r}; expected numbers such as 1,4,16.", file=sys.stderr)
        return 2
    try:
        prompts = read_prompts(given.prompts)[:given.limit]
        with _arms(given) as arms:
            levels = _levels(arms, prompts, given.levels, given.tokens)
    except SpecvizError as error:
        print(f"specviz: {error}", file=sys.stderr)
        return 1
    print(table(levels))
    for level in levels:
        for error in level.errors:
            print(f"\n{level.arm}, {level.concurrency} at a time: {error}")
    print("\nTo switch speculation on elsewhere:")
    for kind in ("vllm", "sglang", "llamacpp"):
        print(f"  {ENGINES[kind].label}: {ENGINES[kind].start}")
    if given.json:
        record = {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "tokens": given.tokens, "num_prompts": len(prompts),
                  "levels": [asdict(level) for level in levels]}
        given.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    if given.html:
        given.html.write_text(page(levels), encoding="utf-8")
    return 0


def _levels(arms: Sequence[Arm], prompts: Sequence[str], concurrencies: Sequence[int], num_tokens: int) -> list[Level]:
    for arm in arms:                                     # warm up, not counted
        measured(arm, prompts[:1], 1, min(8, num_tokens))
    levels = []
    for concurrency in concurrencies:
        for arm in arms:
            levels.append(measured(arm, prompts, concurrency, num_tokens))
            print(f"specviz: {concurrency} at a time, {arm.label}: done", file=sys.stderr, flush=True)
    return levels


@contextmanager
def _arms(given: argparse.Namespace) -> Iterator[list[Arm]]:
    """The arms of a command line; without --remote our own engine is served for the time of the measurement."""
    if given.remote:
        arms = [arm_of("speculative", given.remote, given.model, given.kind)]
        yield [*arms, arm_of("baseline", given.baseline, given.model, given.kind)] if given.baseline else arms
        return
    with own_server(given.target, Limits(at_once=max(8, *given.levels), waiting=max(given.levels))) as own:
        method = given.method or own.service.default_method()
        if given.k == "auto":
            _wait_for_costs(own.service)
        yield [arm_of(f"{method}, K {given.k}", own.url, "", "specviz", {"speculative": {"method": method, "k": given.k}}, api_key=own.key),
               arm_of("plain", own.url, "", "specviz", {"speculative": {"method": "plain"}}, api_key=own.key)]


def _wait_for_costs(service: Any) -> None:
    """The autopilot needs what a step costs here; that is measured while nobody asks."""
    while "Measuring" in service.status().message:
        time.sleep(0.2)


def _length(text: str) -> int | str:
    return "auto" if text == "auto" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specviz.bench load", description=__doc__.splitlines()[0])
    parser.add_argument("--remote", metavar="URL", help="the server with speculation; without it our own engine is measured")
    parser.add_argument("--baseline", metavar="URL", help="the same model served without speculation")
    parser.add_argument("--model", default="", metavar="NAME")
    parser.add_argument("--kind", default="auto", metavar="NAME", help=f"{', '.join(ENGINES)} (default: found by asking)")
    parser.add_argument("--target", metavar="MODEL", help="our own engine's model (default: the default model)")
    parser.add_argument("--method", metavar="NAME", help="our own engine's drafting method (default: its own choice)")
    parser.add_argument("--k", type=_length, default=5, metavar="N", help="draft length, or auto (default: 5)")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).resolve().parents[2] / "assets" / "prompts" / "bench.jsonl", metavar="FILE")
    parser.add_argument("--limit", type=int, default=32, metavar="N", help="prompts at most (default: 32)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens per answer at most (default: 96)")
    parser.add_argument("--concurrency", default="1,4,16", metavar="LIST")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a chart of speed against load")
    return parser
