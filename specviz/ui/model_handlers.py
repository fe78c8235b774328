"""What happens in the Models panel: choosing, the report on a choice, loading with its progress, cancelling, unloading.

It knows nothing of layout, engines or files. Where the page is shared it refuses everything, whatever the browser sends.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..errors import InputError
from . import model_texts as texts
from . import strings
from .handlers import Handlers
from .turns import POLL_S, sentence_of
from .visits import SKIP

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import Choice, Inspection, Offer, Service

__all__ = ["ModelHandlers", "Update"]

OFF = gr.update(interactive=False)


class Update(tuple):
    """One update of what the panel's events write to, in the order of `FIELDS`; what is not named stays as it is."""
    FIELDS = ("status", "method", "note", "panel", "notices", "suggest", "cards", "own", "draft", "quantization", "report", "consent",
              "room", "load", "cancel", "unload", "state")

    def __new__(cls, **changes: Any) -> Update:
        assert changes.keys() <= set(cls.FIELDS)
        return super().__new__(cls, (changes.get(name, SKIP) for name in cls.FIELDS))


class ModelHandlers:
    """Event functions of the panel. A form is (card, own, draft, quantization, device, dtype) as the components hold them."""

    def __init__(self, service: Service, page: Handlers, read_only: bool) -> None:
        self.service, self.read_only, self._page = service, read_only, page
        self._reported: Choice | None = None      # what the report on the screen is about; the panel has one operator

    def opened(self, method: str | None) -> Iterator[Update]:
        """The page was opened and its model is there, or failed: fill the panel, and follow a load that somebody else began."""
        yield Update(**self._everything())
        if self.service.status().is_loading:
            yield from self._follow(method)

    def expanded(self) -> Update:
        """Free memory may be another by now."""
        return Update(**self._list(), **self._buttons())

    def choose(self, card: str | None, device: str, dtype: str) -> Iterator[Update]:
        """A card was clicked: its own drafters and quantizations, then the report."""
        offer = self._offer(card)
        quantization = offer.quantizations[0] if offer else "auto"
        yield Update(own="", draft=gr.update(choices=self._drafts(offer), value=""), quantization=gr.update(value=quantization),
                     **self._looking(card))
        yield self._report(self._choice(card, "", "", quantization, device, dtype))

    def edited(self, *form: Any) -> Iterator[Update]:
        """Something else than the card was changed. A target that was typed takes the place of the card."""
        card, own, *_ = form
        target = (own or "").strip() or card
        if not target:
            yield Update(**self._nothing(), **self._buttons())
            return
        if self._choice(*form) == self._reported:
            yield Update()                        # a click elsewhere left the text box: what was ticked since stays ticked
            return
        yield Update(cards=gr.update(value=None) if (own or "").strip() else SKIP, **self._looking(target))
        yield self._report(self._choice(*form))

    def load(self, method: str | None, consent: bool, room: bool, *form: Any) -> Iterator[Update]:
        """Load what the form says, with progress; nothing is fetched and nothing unloaded that was not agreed to."""
        try:
            self._operator_only()
            choice = self._choice(*form)
            yield Update(**self._looking(choice.target))
            inspection = self.service.inspect(choice)
            yield Update(report=texts.report_html(inspection), **self._agreements(inspection, keep=True))
            if refusal := texts.problem(inspection, consent, room):
                yield Update(**self._buttons(refusal))
                return
            self.service.load(choice, unload_first=not inspection.fits_beside)
        except Exception as error:
            yield Update(**self._buttons(sentence_of(error)))
            return
        yield from self._follow(method)

    def take_suggestion(self, method: str | None) -> Iterator[Update]:
        """One click on a machine with CUDA. The button told the size, so the click agrees to it."""
        try:
            self._operator_only()
            offer = self.service.suggestion()
            if offer is None:
                raise InputError("There is nothing to suggest any more; choose a model below.")
            choice = self._choice(offer.source, "", "", offer.quantizations[0], "auto", "auto")
            self.service.load(choice, unload_first=not self.service.inspect(choice).fits_beside)
        except Exception as error:
            yield Update(**self._buttons(sentence_of(error)))
            return
        yield from self._follow(method)

    def cancel(self) -> Update:
        """What follows the load says how it ended and lets Load be clicked again: a click before that end would be lost."""
        if not self.read_only:
            self.service.cancel_load()
        return Update(cancel=OFF)

    def unload(self) -> Update:
        if not self.read_only:
            self.service.unload()
        return Update(status=self._status(), **self._list(), **self._buttons())

    # ---- helpers ----------------------------------------------------------------------------------------------------------------

    def _follow(self, method: str | None) -> Iterator[Update]:
        """Progress until loading has ended, then the page of whatever pair is in use. method: in the menu, kept if it still runs."""
        shown, number = None, self.service.status().number
        while (status := self.service.status()).is_loading:
            state = texts.state_html(status)
            if state != shown:
                line = strings.status_html(strings.loading(status.message, status.fraction)) if status.state == "loading" else SKIP
                yield Update(status=line, load=OFF, unload=OFF, cancel=gr.update(interactive=True), suggest=OFF, state=state)
                shown = state
            time.sleep(POLL_S)
        if status.number == number:               # it failed or was cancelled: the form stays, to be corrected
            yield Update(status=self._status(), **self._list(), **self._buttons())
            return
        menu = self._page.method_menu(method)
        yield Update(status=self._status(), method=gr.update(**menu), note=self._page.method_note(menu["value"]), **self._everything())

    def _everything(self) -> dict[str, Any]:
        """The form as the pair in use was chosen."""
        choice = self.service.choice()
        changes = {**self._list(), **self._nothing(), **self._buttons()}
        if choice is not None:
            offer = self._offer(choice.target)
            changes["cards"] = gr.update(**changes["cards"] | {"value": offer.source if offer else None})
            changes |= {"own": "" if offer else choice.target, "quantization": gr.update(value=choice.quantization),
                        "draft": gr.update(choices=self._drafts(offer), value=choice.draft or "")}
        return changes

    def _list(self) -> dict[str, Any]:
        """The cards, and what this machine has to say."""
        offers, choice = self.service.offers(), self.service.choice()
        used = choice.target if choice else None
        wish = None if self.read_only else self.service.suggestion()
        button = gr.update(value=texts.suggestion(wish), visible=True, interactive=True) if wish else gr.update(visible=False)
        panel = {"panel": gr.update(open=True)} if wish and self.service.status().number <= 1 else {}
        notices = texts.notices_html(self.service.advice())
        return panel | {"notices": gr.update(value=notices, visible=bool(notices)), "suggest": button,
                        "cards": gr.update(choices=[(texts.card(offer, offer.source == used), offer.source) for offer in offers])}

    def _looking(self, target: Any) -> dict[str, Any]:
        """What was ticked stays on the screen meanwhile: hidden and shown again at once, a box may stay hidden."""
        return {"report": texts.waiting_html(f"Looking at {target} …"), "load": OFF, "state": ""}

    def _nothing(self) -> dict[str, Any]:
        self._reported = None
        hidden = gr.update(visible=False, value=False)
        return {"report": "", "consent": hidden, "room": hidden}

    def _report(self, choice: Choice) -> Update:
        try:
            inspection = self.service.inspect(choice)
        except Exception as error:
            return Update(**self._nothing(), **self._buttons(sentence_of(error)))
        self._reported = choice
        fresh = {"state": ""} if not self.service.status().is_loading else {}        # an earlier failure says nothing of this choice
        return Update(report=texts.report_html(inspection), **self._agreements(inspection), **self._buttons() | fresh)

    def _agreements(self, inspection: Inspection, keep: bool = False) -> dict[str, Any]:
        """The two things to be agreed to, where they are due. keep: what is ticked stays ticked."""
        value = {} if keep else {"value": False}
        download = inspection.is_possible and inspection.download_bytes != 0
        room = inspection.is_possible and not inspection.fits_beside
        return {"consent": gr.update(visible=download, label=texts.consent(inspection.download_bytes), **value),
                "room": gr.update(visible=room, **value)}

    def _buttons(self, refusal: str = "") -> dict[str, Any]:
        status = self.service.status()
        can = not status.is_loading and not self.read_only
        return {"load": gr.update(interactive=can), "cancel": gr.update(interactive=status.is_loading and not self.read_only),
                "unload": gr.update(interactive=can and status.state == "ready"), "state": texts.state_html(status, refusal)}

    def _status(self) -> str:
        return strings.status_html(self._page.resting_line())

    def _choice(self, card: str | None, own: str | None, draft: str | None, quantization: str, device: str, dtype: str) -> Choice:
        from ..service import Choice
        target = (own or "").strip() or card
        if not target:
            raise InputError("No model is chosen; click one in the list, or name a hub repository, a folder or a GGUF file.")
        return Choice(target, (draft or "").strip() or None, quantization or "auto", device or "auto", dtype or "auto")

    def _offer(self, source: str | None) -> Offer | None:
        return next((offer for offer in self.service.offers() if offer.source == source), None)

    def _drafts(self, offer: Offer | None) -> list[tuple[str, str]]:
        names = {each.source: each.name for each in self.service.offers()}
        return [(texts.NO_DRAFT, ""), *((texts.draft(source, names.get(source, "")), source) for source in (offer.drafts if offer else ()))]

    def _operator_only(self) -> None:
        if self.read_only:
            raise InputError(texts.READ_ONLY)
