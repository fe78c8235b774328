"""The registry of drafting methods: a method is one file here and one row below.

It knows nothing of the decoding loop; the loop knows no method by name.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..engine.drafting import Drafter
from ..engine.option import Option
from . import draft_model, draft_tree, eagle, early_exit, exit_adapter, hybrid, lookahead, medusa, plain, prompt_lookup, suffix
from .parts import Heads, Parts

__all__ = ["DRAFTERS", "Heads", "Method", "Parts"]


@dataclass(frozen=True, slots=True)
class Method:
    """One row. create: builds the drafter from what is loaded. missing: why it cannot run with that ("" if it can).

    untrained: it would run, but nothing was trained for this target; never the default then. heads: the kind of trained heads it drafts
    with, a key of `Parts.heads`. options: what can be set for each request, with defaults and ranges for what is loaded.
    by_text: each guess depends on the text before it alone, not on where the draft began or how long it may be, so that a recorded run tells
    what drafts of another length would have come to (`what_if.py`).
    """
    name: str
    label: str
    summary: str
    needs: str
    source: str
    create: Callable[[Parts], Drafter]
    missing: Callable[[Parts], str] = lambda parts: ""
    untrained: Callable[[Parts], bool] = lambda parts: False
    heads: str = ""
    options: Callable[[Parts], Sequence[Option]] = lambda parts: ()
    by_text: bool = False

    def note(self, parts: Parts) -> str:
        """What is worth knowing before choosing it, "" if nothing is, or if it cannot run."""
        if self.missing(parts):
            return ""
        if self.untrained(parts):
            return "untrained: expect few accepted"
        return parts.heads[self.heads].warning if self.heads else ""


DRAFTERS: dict[str, Method] = {method.name: method for method in (
    Method("plain", "Plain decoding", "No draft: one token per step. The baseline, on the same engine.", "nothing", "",
           plain.Plain),
    Method("prompt_lookup", "Prompt lookup", "Copies what followed the last time the same words appeared.", "nothing",
           "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding", prompt_lookup.PromptLookup, options=prompt_lookup.options),
    Method("suffix", "Suffix decoding", "Follows what came most often after the same words in this chat.", "nothing",
           "Oliaro et al. 2024, arXiv 2411.04975", suffix.Suffix, options=suffix.options),
    Method("lookahead", "Lookahead", "The target guesses several places in parallel and tries what it guessed before.", "nothing",
           "Fu et al. 2024, arXiv 2402.02057", lookahead.Lookahead, options=lookahead.options),
    Method("draft_model", "Draft model", "A small model with the same tokenizer guesses ahead.", "a second model",
           "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318", draft_model.DraftModel, draft_model.missing,
           options=draft_model.options, by_text=True),
    Method("draft_tree", "Draft tree", "A small model guesses several continuations as a tree.", "a second model",
           "Miao et al. 2023, arXiv 2305.09781; Jeon et al. 2024, arXiv 2402.14160", draft_tree.DraftTree, draft_model.missing,
           options=draft_tree.options),
    Method("early_exit", "Early exit", "The target's own first layers guess, all its layers check.", "a target trained for it, to pay",
           "Zhang et al. 2023, arXiv 2309.08168; Elhoushi et al. 2024, arXiv 2404.16710", early_exit.EarlyExit, early_exit.missing,
           early_exit.untrained, options=early_exit.options, by_text=True),
    Method("exit_adapter", "Early exit, trained", "The target's first layers and a small trained layer guess, all its layers check.",
           "an exit adapter for the target", "Liu et al. 2024 (Kangaroo), arXiv 2404.18911", exit_adapter.ExitAdapter, exit_adapter.missing,
           heads="exit_adapter", options=exit_adapter.options, by_text=True),
    Method("medusa", "Medusa", "Extra heads on the target's last state guess several tokens at once.", "Medusa heads for the target",
           "Cai et al. 2024, arXiv 2401.10774", medusa.Medusa, medusa.missing, heads="medusa", options=medusa.options),
    Method("eagle", "EAGLE", "A one-layer head guesses the target's next states; a tree of fixed shape.", "an EAGLE head for the target",
           "Li et al. 2024, arXiv 2401.15077", eagle.Eagle, eagle.missing("eagle"), heads="eagle", options=eagle.fixed_options),
    Method("eagle2", "EAGLE-2", "The same head; the tree grows where the head is sure.", "an EAGLE head for the target",
           "Li et al. 2024, arXiv 2406.16858", eagle.Eagle2, eagle.missing("eagle"), heads="eagle", options=eagle.grown_options),
    Method("eagle3", "EAGLE-3", "A head that reads a low, a middle and a high layer; the tree grows where it is sure.",
           "an EAGLE-3 head for the target", "Li et al. 2025, arXiv 2503.01840", eagle.Eagle3, eagle.missing("eagle3"), heads="eagle3",
           options=eagle.grown_options),
    Method("hybrid", "Hybrid", "Suffix decoding where the text repeats; a draft model or heads, if there are any, where it does not.", "nothing",
           "Oliaro et al. 2024, arXiv 2411.04975", hybrid.hybrid, options=hybrid.options),
)}
