"""The prompts that the empty chat offers, with a caption that says what to watch for. It knows nothing of models."""
from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXAMPLES", "Example"]


@dataclass(frozen=True, slots=True)
class Example:
    """title and caption stand on the card, prompt is what is sent."""
    title: str
    caption: str
    prompt: str

    @property
    def card(self) -> str:
        return f"{self.title}\n{self.caption}"


# Chosen by reading what the default model answers, greedy; a small model gets most tasks wrong, so others were tried and dropped.
EXAMPLES = (
    Example("Add commas", "Most of the answer is a copy, so whole drafts are accepted",
            "Add the missing commas to this text. Write only the text.\n\n"
            "The lighthouse stood at the end of the long stone pier. Every evening the keeper climbed the narrow stairs, lit the lamp and "
            "wrote the weather into his book. In autumn the storms came early, and the fishing boats stayed in the harbour for weeks. "
            "The keeper did not mind the storms. He had his lamp, his book and a small radio that played music from the other side of the "
            "sea."),
    Example("Ask a question", "Little to copy here, so hardly a draft is made or accepted",
            "What is the capital of France, and what is it known for?"),
    Example("Change a name", "A rewrite: long stretches are copied, the changes are not",
            "Rewrite this text and change Anna to Maria. Write only the new text.\n\n"
            "Anna lives in a small house near the river. Every morning Anna walks to the market and buys bread and fruit. In the afternoon "
            "Anna works in the garden, and in the evening Anna reads a book by the window. On Sundays Anna visits her brother in the "
            "city."),
    Example("Explain something", "Ordinary chat: compare the methods on it",
            "What is photosynthesis? Answer in two sentences."),
    Example("Run into a loop", "A small model may repeat itself, and that flatters every draft",
            "Tell me a joke about a cat."),
)
