"""The Space's entry: on ZeroGPU every answer is one call of a `@spaces.GPU` generator, on other hardware app.py runs as it is.

It knows nothing of decoding. SPECVIZ_TARGET and SPECVIZ_DRAFT, variables of the Space, name other models than the default one.
"""
from __future__ import annotations

import spaces  # first: it prepares CUDA before torch is imported

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from specviz.environment import ENVIRONMENT
from specviz.options import parse

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
ARGUMENTS = [part for option in ("target", "draft") if (value := os.environ.get(f"SPECVIZ_{option.upper()}")) for part in (f"--{option}", value)]
IS_ZERO = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "true", "yes")

if IS_ZERO:
    from specviz.inline import InlineService, answer, seconds_needed
    from specviz.service import ChatRequest
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import opening
    from specviz.ui.strings import not_kept

    DEVICE = os.environ.get("SPECVIZ_DEVICE", "cuda")
    OPTIONS = parse([*ARGUMENTS, "--device", DEVICE, *(["--dtype", "bfloat16"] if DEVICE == "cuda" else ["--threads", "1"])])

    @spaces.GPU(duration=seconds_needed)
    def gpu_answer(prompt: list[int], request: ChatRequest, k: int, options: tuple[tuple[str, Any], ...], alone: bool) -> Iterator[str]:
        """Runs in a forked process, where the model that is loaded below lies on the GPU."""
        yield from answer(SERVICE.opened, prompt, request, k, options, alone)

    SERVICE = InlineService(OPTIONS, gpu_answer)       # at module level: what is on "cuda" now is what the forked processes get


def main() -> int:
    """Serve until the Space is stopped."""
    import app
    if not IS_ZERO:
        return app.main(ARGUMENTS)
    recording = opening(None)
    page = build(SERVICE, recording, read_only=True, measure_plain=False, not_kept=not_kept(True, False), one_at_a_time=True)
    address, _ = launch(page, OPTIONS, app.free_port(OPTIONS.host, OPTIONS.port))
    print(f"specviz: {address}: {SERVICE.status().message}", flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
