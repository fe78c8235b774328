"""`python -m specviz.museum.worker`: runs one experiment per line of input and answers with its states, one JSON line each.

It knows nothing of who asked. A process of its own, at a low priority, keeps an answer that is being written undisturbed; it ends when its
input does.
"""
from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from ..errors import InputError, SpecvizError

__all__ = ["experiment", "serve"]


def experiment(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The states of what a request asks for: {"fault": "", or the name of one, "rule", "shape", "num_texts", "seed"} or {"fault":
    "no_rollback"}; a text without a fault is asked for by {"kind": "text"}. Raises InputError."""
    from .faults import TEXT_FAULTS
    from .trial import Trial, run
    fault = request.get("fault", "")
    if request.get("kind") == "text" or fault in TEXT_FAULTS:
        from .writing import write
        return write(fault)
    known = {"rule", "shape", "fault", "num_texts", "seed"}
    if unknown := sorted(set(request) - known):
        raise InputError(f"The request has {unknown[0]!r}; expected {', '.join(sorted(known))} only.")
    return run(Trial(**request))


def serve(lines: TextIO, out: TextIO) -> None:
    """Answer every line {"id": ..., request} with lines {"id": ..., "state" or "error" or "done"}."""
    for line in lines:
        request = json.loads(line)
        number = request.pop("id")

        def say(**body: Any) -> None:
            out.write(json.dumps({"id": number} | body) + "\n")
            out.flush()
        try:
            for state in experiment(request):
                say(state=state)
        except SpecvizError as error:
            say(error=str(error))
        except BrokenPipeError:                          # whoever asked has gone
            os._exit(0)
        except Exception as error:
            traceback.print_exc()
            say(error=f"The experiment failed ({type(error).__name__}: {error}). The terminal shows where.")
        say(done=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # Ctrl-C is for the program that asks; the end of the input ends this one
    if hasattr(os, "nice"):
        os.nice(10)
    import torch
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    answers, sys.stdout = sys.stdout, sys.stderr         # whatever a library prints must not come between the answers
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
