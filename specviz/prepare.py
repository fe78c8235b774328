"""`python app.py --prepare`: fetches what a later start without a network needs, and loads nothing. It knows nothing of engines."""
from __future__ import annotations

import time
from collections.abc import Callable

from .catalog import Catalog
from .head_source import find_heads
from .options import Options
from .sources import describe, fetch

__all__ = ["prepare"]

_EVERY_S = 2.0


def prepare(options: Options, say: Callable[[str], None]) -> None:
    """Fetch target and draft model or heads, or check that local ones are readable. Raises SpecvizError children; may be
    interrupted and repeated."""
    catalog = Catalog(cache_dir=options.cache_dir)
    for name in filter(None, (options.target or "default", options.draft)):
        card = catalog.card(name)
        if name == options.draft and card is None and (heads := find_heads(name, progress=_reporter(say))) is not None:
            say(f"{heads.name} is ready for use without a network.")
            continue
        described = describe(card.source if card is not None else name, cache_dir=options.cache_dir, progress=_reporter(say))
        described.config()                        # a model that cannot run is refused before its weights are fetched
        described.tokenizer()
        fetch(described, progress=_reporter(say))
        say(f"{described.name} is ready for use without a network.")


def _reporter(say: Callable[[str], None]) -> Callable[[str, float | None], None]:
    """Progress as lines: each message once, then a percentage every other second."""
    shown, shown_at = "", 0.0

    def report(message: str, fraction: float | None) -> None:
        nonlocal shown, shown_at
        now = time.monotonic()
        if message != shown or (fraction is not None and now - shown_at > _EVERY_S):
            say(message if fraction is None else f"{message} {100 * fraction:.0f} %")
            shown, shown_at = message, now
    return report
