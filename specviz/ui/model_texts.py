"""Every sentence of the Models panel. It knows nothing of Gradio, and treats all that comes from cards, files and hubs as plain text."""
from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import Inspection, Line, Offer, Status

__all__ = ["CONSENT", "MAKE_ROOM", "NO_DRAFT", "READ_ONLY", "TITLE", "card", "consent", "draft", "notices_html", "problem", "report_html",
           "size", "state_html", "suggestion", "waiting_html"]

TITLE = "Models: what answers, and what drafts"
READ_ONLY = "This page is shared with others, so only its operator chooses the model, with --target and --draft."
NO_DRAFT = "No drafter"
CONSENT = "Download it"
MAKE_ROOM = "Unload the model in use first: both together do not fit"
_MARKS = {"good": "✓", "note": "·", "bad": "✕"}


def size(num_bytes: float) -> str:
    """Decimal units, as disks and downloads are labelled."""
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e9:.1f} GB"


def card(offer: Offer, is_used: bool) -> str:
    """One target as it stands in the list; its first line is its title."""
    memory = "memory unknown" if offer.memory_bytes is None else f"{size(offer.memory_bytes)} memory"
    fit = f"✕ {offer.fit.rstrip('.')}" if offer.fit else f"✓ fits: {memory}"
    download = f"{size(offer.download_bytes)} to download" if offer.download_bytes else "on this machine"
    facts = [offer.licence + (", needs an account" if offer.gated else ""), download, f"context {offer.context_length:,} tokens"]
    return "\n".join([_line(offer.name), f"{'in use · ' if is_used else ''}{_line(fit)}", _line(" · ".join(facts)), _line(offer.summary)])


def draft(source: str, name: str) -> str:
    """A drafter in its menu: a known model by name, anything else by the address that is loaded."""
    return _line(name or source)


def suggestion(offer: Offer) -> str:
    """The button of the first start on a machine with CUDA."""
    download = f": {size(offer.download_bytes)} to download" if offer.download_bytes else ""
    return f"Load {_line(offer.name)}{download}"


def consent(download_bytes: int | None) -> str:
    """The confirmation without which nothing large is fetched."""
    return f"{CONSENT}: {size(download_bytes)}" if download_bytes is not None else f"{CONSENT}: its size is not known"


def problem(inspection: Inspection, has_consent: bool, has_room: bool) -> str:
    """Why this choice is not loaded now, "" if nothing stands against it."""
    if bad := [line.text for line in inspection.lines if line.level == "bad"]:
        return bad[0]
    if inspection.download_bytes != 0 and not has_consent:
        amount = "an unknown amount" if inspection.download_bytes is None else size(inspection.download_bytes)
        return f"This would download {amount}. Tick “{CONSENT}” first."
    if not inspection.fits_beside and not has_room:
        return f"Both models together do not fit into memory. Tick “{MAKE_ROOM}”."
    return ""


def report_html(inspection: Inspection) -> str:
    """Markup around escaped text."""
    rows = "".join(f'<li data-level="{line.level if line.level in _MARKS else "note"}">'
                   f'<span aria-hidden="true">{_MARKS.get(line.level, "·")}</span>'
                   f"<span>{html.escape(_line(line.text))}</span></li>" for line in inspection.lines)
    return f'<ul class="page-report">{rows}</ul>' if rows else ""


def notices_html(lines: Iterable[Line]) -> str:
    """What this machine should be told before anything else."""
    return "".join(f'<p class="page-notice" role="note">{html.escape(line.text)}</p>' for line in lines)


def waiting_html(text: str) -> str:
    return f'<p class="page-models-state" data-kind="busy" role="status">{html.escape(text)}</p>'


def state_html(status: Status, refusal: str = "") -> str:
    """How loading goes, or why it came to nothing."""
    if status.is_loading:
        percent = "" if status.fraction is None else f" {100 * status.fraction:.0f} %"
        value = "" if status.fraction is None else f' value="{status.fraction:.3f}"'
        beside = " The model in use goes on answering." if status.state == "ready" else ""
        sentence = f"{status.message.rstrip('.')}{percent}.{beside}"
        return (f'<div class="page-models-state" data-kind="busy" role="status"><p>{html.escape(sentence)}</p>'
                f'<progress max="1"{value} aria-label="Loading"></progress></div>')
    if sentence := refusal or status.last_error:
        stays = " The model in use stays." if status.state == "ready" else ""
        return f'<p class="page-models-state" data-kind="failed" role="alert">{html.escape(sentence)}{stays}</p>'
    return ""


def _line(text: str) -> str:
    """On one line: a line break in a name must not look like the next fact."""
    return " ".join(text.split())
