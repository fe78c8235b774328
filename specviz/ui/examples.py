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


EXAMPLES = (
    Example("Correct a text", "Most of the answer is a copy, so whole drafts are accepted",
            "Repeat the following text and correct the spelling mistakes. Write only the corrected text.\n\n"
            "The lighthouse stood at the end of the long stone pier. Every evening the keeper climbed the narow stairs, lit the lamp and "
            "wrote the wether into his book. In autumn the storms came early, and the fishing boats stayed in the harbour for weeks. The "
            "keeper did not mind the storms. He had his lamp, his book and a small radio that played music from the other side of the sea."),
    Example("Tell a story", "Little to copy here, so drafts are short or wrong",
            "Tell me a short story about a robot that learns to bake bread."),
    Example("Rename a variable", "Code is repeated with small changes",
            "Rewrite this function and rename the variable x to total. Write only the code.\n\n"
            "def mean(values):\n    x = 0\n    count = 0\n    for value in values:\n        x = x + value\n        count = count + 1\n"
            "    if count == 0:\n        return 0\n    return x / count"),
    Example("Count", "A pattern that repeats itself",
            "Write the numbers from 1 to 30, one per line."),
    Example("Explain", "Ordinary chat: some phrases are easy to guess",
            "Explain in three sentences why the sky is blue."),
)
