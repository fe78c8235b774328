"""The options that the chosen drafting method declares, as controls: which there are, what they show, and what they say.

It knows no method and no option by name. Controls are made once, some of each kind, and lent to whatever the chosen method has.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gradio as gr

from . import strings
from .visits import SKIP

if TYPE_CHECKING:                # the service imports torch; the page opens without waiting for it
    from ..service import MethodInfo, Service

__all__ = ["MethodOptions", "OptionsPanel"]

POOL = {"number": 12, "flag": 4, "choice": 4, "text": 3}             # controls of each kind
_KIND = {"whole": "number"}                                          # whole numbers are sliders, too


class MethodOptions:
    """What the page knows of the options in use. start: (name, value) given at the start, for the method that the page begins with."""

    def __init__(self, service: Service, start: Sequence[tuple[str, str]] = (), method: Callable[[], str | None] = lambda: None) -> None:
        self._service, self._start, self._method = service, dict(start), method

    def fresh(self, method: str | None) -> list[Any]:
        """Updates of the panel for a method that has just been chosen: hint, key, and every control."""
        info, given = self._info(method), self._given(method)
        lent = _lent(info)
        hint = strings.OPTIONS_HINT if lent else strings.NO_OPTIONS
        return [gr.update(value=hint), self._key(method), *(self._update(lent.get(slot), given) for slot in _slots())]

    def again(self, method: str | None, key: str) -> list[Any]:
        """The same when the panel is unfolded: what was set stays, unless another pair of models is in use by now or defaults have changed, which
        follow from costs that are measured soon after the start."""
        return [SKIP] * (2 + sum(POOL.values())) if key == self._key(method) else self.fresh(method)

    def read(self, method: str | None, values: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
        """What differs from the defaults. values: key and controls, as the page hands them over; what they show may be another method's
        still, and then counts for nothing."""
        if not values or (defaults := self._shown_defaults(method, values[0])) is None:
            return tuple(self._given(method).items())
        shown = dict(zip(_slots(), values[1:]))
        return tuple((option.name, shown[slot]) for slot, option in _lent(self._info(method)).items()
                     if shown[slot] not in (option.default, defaults.get(option.name, option.default)))

    def _update(self, option: Any, given: Mapping[str, Any]) -> Any:
        if option is None:
            return gr.update(visible=False)
        value = given.get(option.name, option.default)
        update: dict[str, Any] = {"label": option.label, "info": option.help, "value": value, "visible": True}
        if option.kind in ("whole", "number"):
            step = 1 if option.kind == "whole" else 0.01 if option.high - option.low <= 1 else 0.25
            update |= {"value": float(value), "minimum": option.low, "maximum": option.high, "step": step}
        if option.kind == "flag":
            update["value"] = option.read(value)
        if option.kind == "choice":
            update["choices"] = [(words, name) for name, words in option.choices]
        return gr.update(**update)

    def _given(self, method: str | None) -> dict[str, str]:
        if not method or method != self._method() or not (info := self._info(method)):
            return {}
        declared = {option.name for option in info.options}      # another pair may have brought another default method
        return {name: value for name, value in self._start.items() if name in declared}

    def _key(self, method: str | None) -> str:
        """What the controls are for: the method, the pair of models, and the defaults that they were given."""
        info = self._info(method)
        return json.dumps([method, self._service.status().number, {option.name: option.default for option in info.options} if info else {}])

    def _shown_defaults(self, method: str | None, key: Any) -> dict[str, Any] | None:
        """The defaults when the controls were made, from their key; None where they are another method's or another pair's."""
        try:
            shown_method, number, defaults = json.loads(key)
        except (TypeError, ValueError):
            return None
        return defaults if [shown_method, number] == [method, self._service.status().number] and isinstance(defaults, dict) else None

    def _info(self, method: str | None) -> MethodInfo | None:
        return next((info for info in self._service.methods() if info.name == method), None)


class OptionsPanel:
    """Draws the controls where it is made, folded; `wire` connects them. inputs: what `MethodOptions.read` takes."""

    def __init__(self, options: MethodOptions, visible: bool = True) -> None:
        self._options = options
        with gr.Accordion(strings.OPTIONS_TITLE, open=False, elem_id="method-options", visible=visible) as self.panel:
            self._hint = gr.Markdown(strings.NO_OPTIONS, elem_id="method-options-hint")
            self._key = gr.Textbox("", visible=False)
            controls = [_control(kind, number) for kind, number in _slots()]
        self.inputs = [self._key, *controls]

    def wire(self, method: gr.Dropdown, **quiet: Any) -> None:
        """method: the menu. quiet: how events run."""
        outputs = [self._hint, *self.inputs]
        method.change(self._options.fresh, method, outputs, **quiet)
        self.panel.expand(self._options.again, [method, self._key], outputs, **quiet)


def _control(kind: str, number: int) -> Any:
    common = {"visible": False, "elem_id": f"option-{kind}-{number}"}
    if kind == "number":
        return gr.Slider(0, 1, value=0, step=1, min_width=140, buttons=[], **common)      # its reset would know one method's default only
    if kind == "flag":
        return gr.Checkbox(False, **common)
    if kind == "choice":
        return gr.Dropdown([], value=None, filterable=False, **common)
    return gr.Textbox("", lines=1, max_lines=3, **common)


def _slots() -> list[tuple[str, int]]:
    return [(kind, number) for kind, count in POOL.items() for number in range(count)]


def _lent(info: MethodInfo | None) -> dict[tuple[str, int], Any]:
    """Which control shows which option: the first of its kind that is free, in the order of declaration."""
    used = dict.fromkeys(POOL, 0)
    lent = {}
    for option in info.options if info else ():
        kind = _KIND.get(option.kind, option.kind)
        assert used[kind] < POOL[kind], f"{info.name} has more options of kind {kind} than the page has controls"
        lent[kind, used[kind]] = option
        used[kind] += 1
    return lent
