"""What the engine and a drafter say to each other, so that neither imports the other."""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .draft import Draft
from .verify import Verdict

if TYPE_CHECKING:
    from .sequence import Sequence

__all__ = ["Budget", "DraftSettings", "Drafter", "Outcome", "limits_of", "parts_of"]


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What the user asked of the drafter. k: draft tokens per step at most. options: what one method alone understands, by name."""
    k: int = 5
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str, default: Any) -> Any:
        """The value of one option; `default` where the request says nothing of it."""
        return next((value for key, value in self.options if key == name), default)


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be drafted now: the least of what the user asked, the token budget, the tokens left and the cache's room.

    window: how many nodes may be fed beside them that are never judged; they are no guesses, so only the cache limits them.
    parts: nodes for each part of a drafter that has several (`parts_of`); empty where `nodes` holds for all.
    """
    nodes: int
    depth: int
    window: int = 0
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything a drafter may learn from one step.

    verdict: None while the prompt is still being read in chunks. logits: [1 + n, V], row 0 judged the root's children, row 1 + i node
    i's; None while the prompt is being read. hidden: [pending + n, H'] for the layers in `needs`, for every fed chunk.
    """
    sequence: Sequence
    draft: Draft
    verdict: Verdict | None
    logits: Tensor | None
    hidden: Tensor | None


class Drafter(Protocol):
    """A drafting method. Holds weights and cache; what differs per request lives in `Sequence.drafting`.

    name: its key in the registry. needs: the target layers whose hidden states `observe` wants (i is the input of layer i, `FINAL` the
    output of the last norm).
    """
    name: str
    needs: tuple[int, ...]

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[Draft]:
        """One draft for each sequence, within its budget."""

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Learn what became of the drafts. Only stores; catching up happens in `propose`."""

    def fork(self, source: Sequence, target: Sequence, length: int) -> int:
        """Let a new sequence take over state for its first `length` tokens; returns how many it could take."""

    def release(self, sequence: Sequence) -> None:
        """Free what the sequence held."""


def parts_of(drafter: Drafter) -> tuple[str, ...]:
    """Names of what a drafter asks in turn, as `Draft.by` has them; one without a name for a drafter that is not made of others."""
    return getattr(drafter, "part_names", ("",))


def limits_of(drafter: Drafter, settings: DraftSettings) -> dict[str, int]:
    """By names of `parts_of`: the most nodes of a part that proposes only what is worth judging, under these settings, and 0 for one that a
    request with these settings leaves out. Parts of any length are not named."""
    limits = getattr(drafter, "limits", None)
    return limits(settings) if limits else {}
