"""`python -m specviz.record`: records the runs that come with the program, from a list of prompts and methods.

It knows nothing of screens; a recording is what the service gives any caller.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import settle
from .errors import InputError, SpecvizError
from .trace import Trace, save

if TYPE_CHECKING:
    from .local_service import LocalService

__all__ = ["Recording", "main", "read_list", "record"]

ASSETS = Path(__file__).resolve().parents[1] / "assets"


@dataclass(frozen=True, slots=True)
class Recording:
    """One run to record. file: its name in the folder, without ".json"; the page offers them in the order of these names.

    folder: where below the assets it goes. quantization: "auto" is what a user gets. draft_without_layers: draft with a copy of the target
    in which these layers are left out (`thin.thin_copy`). options: the method's own, by name.
    """
    file: str
    title: str
    method: str
    prompt: str
    k: int = 5
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    verification: str = "rejection"
    folder: str = "traces"
    quantization: str = "auto"
    draft_without_layers: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


def read_list(path: Path) -> list[Recording]:
    """The runs listed in a TOML file. Raises InputError naming what is wrong."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["recording"]
        return [Recording(**{**entry, "prompt": entry["prompt"].strip(),
                             "draft_without_layers": tuple(entry.get("draft_without_layers", ())),
                             "options": tuple(entry.get("options", {}).items())}) for entry in entries]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path.name} is no list of recordings ({error}); expected [[recording]] tables with "
                         f"{', '.join(Recording.__dataclass_fields__)}.") from error


def record(service: LocalService, recording: Recording) -> Trace:
    """Answer the prompt, then measure plain decoding over the whole answer. A first, unrecorded run warms everything up.

    Waits until it is measured what a step costs on this machine, where that is not known yet: the trace carries the table.
    """
    from .engine.sampling import SamplingParams
    from .service import ChatRequest
    while service.is_measuring:
        time.sleep(0.1)
    messages = ({"role": "user", "content": recording.prompt},)

    def answer(name: str, max_new_tokens: int) -> Any:
        sampling = SamplingParams(temperature=recording.temperature, seed=recording.seed, max_new_tokens=max_new_tokens)
        run = service.submit(ChatRequest(messages, sampling, recording.method, recording.k, conversation=name,
                                         verification=recording.verification, options=recording.options))
        for _ in run:
            pass
        return run
    answer("warm-up", 16)
    run = answer(recording.file, recording.max_new_tokens)
    for _ in run.measure_plain(recording.max_new_tokens):
        pass
    run.meta["title"] = recording.title
    return run.trace()


def main(argv: Sequence[str] | None = None) -> int:
    """Record all listed runs, or those named. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specviz.record", description="Record the bundled traces again, on this machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only recordings whose file name contains one of these")
    parser.add_argument("--list", type=Path, default=ASSETS / "recordings.toml", metavar="FILE",
                        help="what to record (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ASSETS, metavar="FOLDER",
                        help="traces go into folders below this one (default: %(default)s)")
    parser.add_argument("--target", help="model to record with (default: the default model)")
    parser.add_argument("--quantization", help="its quantization, for all (default: what the list says)")
    given = parser.parse_args(argv)
    try:
        recordings = [r for r in read_list(given.list) if not given.names or any(name in r.file for name in given.names)]
        models = groupby(sorted(recordings, key=_model), _model)         # sorting is stable: one load for all runs of one pair
        for (quantization, leave_out), group in models:
            _record_all(list(group), given.target, given.quantization or quantization, leave_out, given.out)
        return 0
    except SpecvizError as error:
        print(error, file=sys.stderr)
        return 1


def _model(recording: Recording) -> tuple[str, tuple[int, ...]]:
    return recording.quantization, recording.draft_without_layers


def _record_all(recordings: Sequence[Recording], target: str | None, quantization: str, leave_out: tuple[int, ...], out: Path) -> None:
    """Record runs of one pair of models, one after the other."""
    from .local_service import LocalService
    from .options import Options
    from .sources import describe
    from .thin import thin_copy
    with tempfile.TemporaryDirectory(prefix="specviz-") as work:
        draft = str(thin_copy(describe(target or "default").path, leave_out, Path(work))) if leave_out else None
        # not as the page opens it: what was chosen there last would take the default model's place
        service = LocalService(Options(target=target, draft=draft, quantization=quantization, browser=False))
        try:
            while (status := service.status()).state == "loading":
                time.sleep(0.1)
            if status.state == "failed":
                raise SpecvizError(status.message)
            for recording in recordings:
                trace = record(service, recording)
                (out / recording.folder).mkdir(parents=True, exist_ok=True)
                save(trace, out / recording.folder / f"{recording.file}.json")
                print(_said(recording, trace), flush=True)
        finally:
            service.close()


def _said(recording: Recording, trace: Trace) -> str:
    stats = trace.stats or {}

    def number(name: str, digits: int) -> str:
        return "–" if stats.get(name) is None else f"{stats[name]:.{digits}f}"
    return (f"{recording.file}: {stats['num_tokens']} tokens, {number('tokens_per_step', 2)} per step, "
            f"{number('tokens_per_s', 1)} tokens/s, plain {number('plain_tokens_per_s', 1)}, speed-up {number('speed_up', 2)}, "
            f"identical: {(trace.compare or {}).get('identical')}")


if __name__ == "__main__":
    settle()
    sys.exit(main())
