"""The registry of drafting methods: a method is one file here and one row below.

It knows nothing of the decoding loop; the loop knows no method by name.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.drafting import Drafter
from . import draft_model, draft_tree, eagle, early_exit, hybrid, lookahead, medusa, plain, prompt_lookup, suffix
from .parts import Heads, Parts

__all__ = ["DRAFTERS", "Heads", "Method", "Parts"]


@dataclass(frozen=True, slots=True)
class Method:
    """One row. create: builds the drafter from what is loaded. missing: why it cannot run with that ("" if it can).

    untrained: it would run, but nothing was trained for this target; never the default then. heads: the kind of trained heads it drafts
    with, a key of `Parts.heads`.
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
           "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding", prompt_lookup.PromptLookup),
    Method("suffix", "Suffix decoding", "Follows what came most often after the same words in this chat.", "nothing",
           "Oliaro et al. 2024, arXiv 2411.04975", suffix.Suffix),
    Method("lookahead", "Lookahead", "The target guesses several places in parallel and tries what it guessed before.", "nothing",
           "Fu et al. 2024, arXiv 2402.02057", lookahead.Lookahead),
    Method("draft_model", "Draft model", "A small model with the same tokenizer guesses ahead.", "a second model",
           "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318", draft_model.DraftModel, draft_model.missing),
    Method("draft_tree", "Draft tree", "A small model guesses several continuations as a tree.", "a second model",
           "Miao et al. 2023, arXiv 2305.09781; Jeon et al. 2024, arXiv 2402.14160", draft_tree.DraftTree, draft_model.missing),
    Method("early_exit", "Early exit", "The target's own first layers guess, all its layers check.", "a target trained for it, to pay",
           "Zhang et al. 2023, arXiv 2309.08168; Elhoushi et al. 2024, arXiv 2404.16710", early_exit.EarlyExit, early_exit.missing,
           early_exit.untrained),
    Method("medusa", "Medusa", "Extra heads on the target's last state guess several tokens at once.", "Medusa heads for the target",
           "Cai et al. 2024, arXiv 2401.10774", medusa.Medusa, medusa.missing, heads="medusa"),
    Method("eagle", "EAGLE", "A one-layer head guesses the target's next states; a tree of fixed shape.", "an EAGLE head for the target",
           "Li et al. 2024, arXiv 2401.15077", eagle.Eagle, eagle.missing("eagle"), heads="eagle"),
    Method("eagle2", "EAGLE-2", "The same head; the tree grows where the head is sure.", "an EAGLE head for the target",
           "Li et al. 2024, arXiv 2406.16858", eagle.Eagle2, eagle.missing("eagle"), heads="eagle"),
    Method("eagle3", "EAGLE-3", "A head that reads a low, a middle and a high layer; the tree grows where it is sure.",
           "an EAGLE-3 head for the target", "Li et al. 2025, arXiv 2503.01840", eagle.Eagle3, eagle.missing("eagle3"), heads="eagle3"),
    Method("hybrid", "Hybrid", "Suffix decoding where the text repeats; a draft model or heads, if there are any, where it does not.", "nothing",
           "Oliaro et al. 2024, arXiv 2411.04975", hybrid.hybrid),
)}
