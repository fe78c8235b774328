"""The registry of drafting methods: a method is one file here and one row below.

It knows nothing of the decoding loop; the loop knows no method by name.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.drafting import Drafter
from . import draft_model, early_exit, plain, prompt_lookup
from .parts import Parts

__all__ = ["DRAFTERS", "Method", "Parts"]


@dataclass(frozen=True, slots=True)
class Method:
    """One row. create: builds the drafter from what is loaded. missing: why it cannot run with that ("" if it can).

    untrained: it would run, but nothing was trained for this target; never the default then.
    """
    name: str
    label: str
    summary: str
    needs: str
    source: str
    create: Callable[[Parts], Drafter]
    missing: Callable[[Parts], str] = lambda parts: ""
    untrained: Callable[[Parts], bool] = lambda parts: False


DRAFTERS: dict[str, Method] = {method.name: method for method in (
    Method("plain", "Plain decoding", "No draft: one token per step. The baseline, on the same engine.", "nothing", "",
           plain.Plain),
    Method("prompt_lookup", "Prompt lookup", "Copies what followed the last time the same words appeared.", "nothing",
           "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding", prompt_lookup.PromptLookup),
    Method("draft_model", "Draft model", "A small model with the same tokenizer guesses ahead.", "a second model",
           "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318", draft_model.DraftModel, draft_model.missing),
    Method("early_exit", "Early exit", "The target's own first layers guess, all its layers check.", "a target trained for it, to pay",
           "Zhang et al. 2023, arXiv 2309.08168; Elhoushi et al. 2024, arXiv 2404.16710", early_exit.EarlyExit, early_exit.missing,
           early_exit.untrained),
)}
