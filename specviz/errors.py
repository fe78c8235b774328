"""Every error that a user can act on. It knows nothing of where it is shown.

SpecvizError
 +-- InputError         a value the user typed or passed is out of range
 |    +-- PromptTooLong the prompt does not fit the context
 +-- TraceError         a trace file is broken, too large or of another version
 +-- LoadError          weights or tokenizer cannot be had
 |    +-- ChecksumError a download is not the file that was expected
 +-- UnsupportedModel   the model loads, but this engine cannot run it losslessly
 +-- VocabularyMismatch target and drafter do not share a tokenizer
 +-- NotEnoughMemory    a cache or a model does not fit
 +-- Busy               the model is not ready yet, or busy with something else
      +-- TooManyRequests  the queue is full, or one visitor asks too often
"""

__all__ = ["Busy", "ChecksumError", "InputError", "LoadError", "NotEnoughMemory", "PromptTooLong", "SpecvizError",
           "TooManyRequests", "TraceError", "UnsupportedModel", "VocabularyMismatch"]


class SpecvizError(Exception):
    """Base class. The message says what was given, what was expected and what to do; it can be shown as it is."""


class InputError(SpecvizError):
    """A value that the user typed or passed is out of range."""


class PromptTooLong(InputError):
    """The prompt, or prompt plus answer, does not fit the context."""


class TraceError(SpecvizError):
    """A trace file is broken, too large, or of a version this program does not read."""


class LoadError(SpecvizError):
    """Weights or tokenizer cannot be found, fetched or read."""


class ChecksumError(LoadError):
    """A downloaded file is not the one that was expected."""


class UnsupportedModel(SpecvizError):
    """The model can be read, but this engine cannot run it without losing exactness."""


class VocabularyMismatch(SpecvizError):
    """Target and drafter do not share a tokenizer."""


class NotEnoughMemory(SpecvizError):
    """A model or a cache does not fit into memory."""


class Busy(SpecvizError):
    """The model is not ready yet, or busy with something else."""


class TooManyRequests(Busy):
    """The queue is full, or one visitor asks too often. code: which, as OpenAI's errors say it. retry_s: when to try again."""

    def __init__(self, message: str, code: str = "queue_full", retry_s: int = 5) -> None:
        super().__init__(message)
        self.code, self.retry_s = code, retry_s
