"""`python -m specviz.record`: records the runs that come with the program, from a list of prompts and methods.

It knows nothing of screens; a recording is what the service gives any caller.
"""
from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import settle
from .errors import InputError, SpecvizError
from .trace import Trace, save

if TYPE_CHECKING:
    from .service import Service

__all__ = ["Recording", "main", "read_list", "record"]

ASSETS = Path(__file__).resolve().parents[1] / "assets"


@dataclass(frozen=True, slots=True)
class Recording:
    """One run to record. file: its name in the folder, without ".json"; the page offers them in the order of these names."""
    file: str
    title: str
    method: str
    prompt: str
    k: int = 5
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    verification: str = "rejection"


def read_list(path: Path) -> list[Recording]:
    """The runs listed in a TOML file. Raises InputError naming what is wrong."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["recording"]
        return [Recording(**{**entry, "prompt": entry["prompt"].strip()}) for entry in entries]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path.name} is no list of recordings ({error}); expected [[recording]] tables with "
                         f"{', '.join(Recording.__dataclass_fields__)}.") from error


def record(service: Service, recording: Recording) -> Trace:
    """Answer the prompt, then measure plain decoding over the whole answer. A first, unrecorded run warms everything up."""
    from .engine.sampling import SamplingParams
    from .service import ChatRequest
    messages = ({"role": "user", "content": recording.prompt},)

    def answer(name: str, max_new_tokens: int) -> Any:
        sampling = SamplingParams(temperature=recording.temperature, seed=recording.seed, max_new_tokens=max_new_tokens)
        run = service.submit(ChatRequest(messages, sampling, recording.method, recording.k, conversation=name,
                                         verification=recording.verification))
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
    parser.add_argument("--list", type=Path, default=ASSETS / "recordings.toml", metavar="FILE", help="what to record (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ASSETS / "traces", metavar="FOLDER", help="where the traces go (default: %(default)s)")
    parser.add_argument("--target", help="model to record with (default: the default model)")
    parser.add_argument("--quantization", default="auto", help="its quantization (default: auto)")
    given = parser.parse_args(argv)
    from .options import Options
    from .service import open_service
    service = None
    try:
        recordings = [r for r in read_list(given.list) if not given.names or any(name in r.file for name in given.names)]
        service = open_service(Options(target=given.target, quantization=given.quantization, browser=False))
        while (status := service.status()).state == "loading":
            time.sleep(0.1)
        if status.state == "failed":
            raise SpecvizError(status.message)
        given.out.mkdir(parents=True, exist_ok=True)
        for recording in recordings:
            trace = record(service, recording)
            save(trace, given.out / f"{recording.file}.json")
            stats = trace.stats
            print(f"{recording.file}: {stats['num_tokens']} tokens, {stats['tokens_per_step']:.2f} per step, {stats['tokens_per_s']:.1f} tokens/s, "
                  f"plain {stats['plain_tokens_per_s']:.1f}, speed-up {stats['speed_up']:.2f}, identical: {trace.compare.get('identical')}")
        return 0
    except SpecvizError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if service is not None:
            service.close()


if __name__ == "__main__":
    settle()
    sys.exit(main())
