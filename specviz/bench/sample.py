"""What one run of a benchmark measured, and what a system under test offers. It knows nothing of any system."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

__all__ = ["Sample", "System"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of a fixed number of tokens.

    num_decoded, decode_s: tokens after the first, and the wall-clock time they took; prefill_s: until the first token. num_steps and the
    three parts of the decode time are None where a system does not tell. tokens: the answer's ids, None likewise.
    """
    num_decoded: int
    decode_s: float
    prefill_s: float
    num_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    other_s: float | None = None
    tokens: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        return cls(**{**data, "tokens": None if data.get("tokens") is None else tuple(data["tokens"])})


class System(Protocol):
    """One loaded model in one program. arms: the ways in which it can decode, by name; "plain" is one of them."""
    arms: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """What is loaded and how it runs, for the report."""

    def encode(self, text: str) -> list[int]:
        """A chat prompt as token ids."""

    def run(self, arm: str, prompt: Sequence[int], num_tokens: int) -> Sample:
        """Answer greedily with exactly so many tokens, whatever ends the text."""
