"""Text to token ids and back: chat templates, single pieces, streaming, stop strings. It knows nothing of models or requests."""
from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .errors import InputError

__all__ = ["StopText", "StreamDecoder", "TextCodec", "end_of_turn_id"]

UNFINISHED = "\ufffd"            # what every decoder writes for bytes that are no character (yet)
MAX_UNFINISHED = 3               # a UTF-8 character has at most 4 bytes, so at most 3 of them can be waiting
MAX_WINDOW = 48                  # tokens decoded at once when a model writes nothing but broken bytes
ROLES = ("system", "user", "assistant")


def byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies spell the 256 bytes (GPT-2, Radford et al. 2019): printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = byte_alphabet()


class TextCodec:
    """One tokenizer's way between messages, text and ids.

    template_options: extra variables for the chat template, such as {"enable_thinking": False}.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.template_options = tokenizer, dict(template_options or {})
        self.special = special_ids(tokenizer)
        self.pieces: dict[int, str] = {}
        anchor = self.encode("a")
        self.anchor = anchor[-1:]
        self.anchor_text = self.decode(self.anchor)
        self.byte_tokens = byte_tokens(tokenizer)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the model to answer.

        messages: OpenAI style, "role" is system, user or assistant, "content" a text or a list of {"type": "text", "text": ...} parts.
        An assistant message may hold "reasoning_content", what the model thought before that answer: it is handed to templates that speak of
        it, which mostly leave it out of earlier turns, and to no others. Words in a message that look like control tokens are read as plain
        text. A template that refuses a system message gets it in front
        of the first user message. A tokenizer without a template gets "System: ", "User: " and "Assistant: " paragraphs, which suits
        base models passably. Raises InputError for anything else.
        """
        conversation = [{"role": checked_role(message), "content": flat_text(message.get("content"))} | self.reasoning(message)
                        for message in messages]
        if not conversation:
            raise InputError("The conversation is empty; send at least one message.")
        if not self.tokenizer.chat_template:
            return self.encode(plain_conversation(conversation), add_special_tokens=True)
        try:
            return self.apply_template(conversation)
        except TemplateError as error:
            merged = system_into_user(conversation)
            if merged == conversation:
                raise InputError(f"The model's chat template refuses this conversation: {error}.") from error
        try:
            return self.apply_template(merged)
        except TemplateError as error:
            raise InputError(f"The model's chat template refuses this conversation: {error}.") from error

    def reasoning(self, message: Mapping[str, Any]) -> dict[str, str]:
        thought = message.get("reasoning_content")
        return {"reasoning_content": flat_text(thought)} if thought and "reasoning_content" in str(self.tokenizer.chat_template) else {}

    def apply_template(self, conversation: list[dict[str, str]]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False,
                                                       sanitize_control_tokens=True, **self.template_options))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of plain text; `add_special_tokens` adds what the tokenizer puts around a whole document (often one BOS)."""
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out, spaces as they are."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def is_special(self, token_id: int) -> bool:
        """Whether a token controls the conversation and is not part of the text."""
        return token_id in self.special

    def piece(self, token_id: int) -> str:
        """One token as it can be shown alone: leading space kept, broken bytes as <0xE2>, special tokens by name, ids without a token (the
        padding of a vocabulary) as <id 151950>."""
        if token_id not in self.pieces:
            self.pieces[token_id] = self.make_piece(token_id)
        return self.pieces[token_id]

    def make_piece(self, token_id: int) -> str:
        token = self.tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(self.tokenizer) else None
        if token is None:
            return f"<id {token_id}>"
        if token_id in self.special:
            return token
        text = self.decode([*self.anchor, token_id])
        if text.startswith(self.anchor_text) and UNFINISHED not in text:
            return text[len(self.anchor_text):]   # behind an anchor, a decoder does not strip the leading space
        raw = self.byte_tokens.get(token_id) or bytes_of_token(token)
        return token if raw is None else show_bytes(raw)

    def stream(self) -> StreamDecoder:
        """A fresh decoder for one answer."""
        return StreamDecoder(self)


class StreamDecoder:
    """Ids in, text out, as soon as it is certain. All pushes and the flush together are the decoded whole, without special tokens.

    Decodes a short window at a time, so the work per token does not grow with the text. One exception to "the decoded whole": where a
    vocabulary spells unknown characters as byte tokens, decoding a whole run of them that is broken anywhere loses its good characters too;
    here they stay.
    """

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.window: list[int] = []
        self.num_shown = 0           # characters of the window's text that are out already
        self.boundary = 0            # tokens of the window at the last moment when nothing was held back
        self.utf8 = getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes: often "", never half a character."""
        if self.codec.is_special(token_id):
            return ""
        byte = self.codec.byte_tokens.get(token_id)
        if byte is not None:
            released = self.flush_window() + self.utf8.decode(byte)
            self.window, self.num_shown = list(self.codec.anchor), len(self.codec.anchor_text)
            self.boundary = len(self.window)
            return released
        return self.utf8.decode(b"", final=True) + self.push_text(token_id)

    def push_text(self, token_id: int) -> str:
        self.window.append(token_id)
        text = self.codec.decode(self.window)
        num_held = min(MAX_UNFINISHED, len(text) - len(text.rstrip(UNFINISHED)))
        released = text[self.num_shown:len(text) - num_held]
        self.num_shown = max(self.num_shown, len(text) - num_held)
        if num_held == 0 and released:
            self.shorten(self.window[self.boundary:], 0)
            self.boundary = len(self.window)
        elif len(self.window) - self.boundary > MAX_WINDOW:
            self.shorten(self.window[-8:], num_held)
        return released

    def shorten(self, window: list[int], num_held: int) -> None:
        self.window, self.boundary = window, 0
        self.num_shown = max(0, len(self.codec.decode(window)) - num_held)

    def flush_window(self) -> str:
        released = self.codec.decode(self.window)[self.num_shown:]
        self.window, self.num_shown, self.boundary = [], 0, 0
        return released

    def flush(self) -> str:
        """What is still held back, at the end of the answer: the mark for a broken character where the answer broke off inside one."""
        return self.flush_window() + self.utf8.decode(b"", final=True)


class StopText:
    """Looks for stop strings in text that arrives in parts; holds back what may be the beginning of one.

    The result does not depend on how the text is cut: the stop string that is complete first counts, of several that end together the
    longest. Text from its beginning on is never released. Raises InputError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise InputError("A stop string is empty; remove it or write at least one character.")
        self.stops = tuple(stops)
        self.held = ""
        self.stop: str | None = None     # the one that was found

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain to be part of the answer, whether a stop string is complete)."""
        if self.stop is not None:
            return "", True
        text = self.held + text
        found = [(start + len(stop), start, stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stop = min(found)
            self.held = ""
            return text[:start], True
        num_held = self.longest_beginning(text)
        self.held = text[len(text) - num_held:]
        return text[:len(text) - num_held], False

    def flush(self) -> str:
        """What is still held back, once the answer has ended without a stop string."""
        held, self.held = self.held, ""
        return held

    def longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self.stops), default=0))
        for num in range(longest, 0, -1):
            if any(stop.startswith(text[-num:]) for stop in self.stops):
                return num
        return 0


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes right after an answer; None if there is no template or no such token."""
    if not tokenizer.chat_template:
        return None
    mark = "specviz-answer"
    try:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": mark}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, TypeError):
        return None
    after = text.rpartition(mark)[2].lstrip()
    names = {str(tokenizer.convert_ids_to_tokens(token_id)): token_id for token_id in special_ids(tokenizer)}
    found = [name for name in names if after.startswith(name)]
    return names[max(found, key=len)] if found else None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that decoding with `skip_special_tokens` leaves out."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def byte_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The tokens <0x00> to <0xFF> of vocabularies that fall back to bytes (SentencePiece); empty for all others."""
    ids = {token_id: bytes([byte]) for byte in range(256) if (token_id := tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")) is not None}
    letter = tokenizer.convert_tokens_to_ids("<0x41>")
    is_fallback = len(ids) == 256 and tokenizer.decode([letter], clean_up_tokenization_spaces=False) == "A"
    return ids if is_fallback else {}


def bytes_of_token(token: str) -> bytes | None:
    """The bytes that an entry of a byte-level vocabulary spells, None if it is not spelled in that alphabet."""
    return bytes(BYTE_OF[character] for character in token) if all(character in BYTE_OF for character in token) else None


def show_bytes(raw: bytes) -> str:
    """Whole characters as they are, every other byte as <0xE2>."""
    text = raw.decode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)


def checked_role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"A message has the role {role!r}; expected one of {', '.join(ROLES)}.")
    return role


def flat_text(content: Any) -> str:
    """A text, or the text of a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        parts = [part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise InputError("A message's content is neither text nor a list of text parts; images and files cannot be read here.")


def system_into_user(conversation: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same conversation with leading system text in front of the first user message."""
    system = [message["content"] for message in conversation if message["role"] == "system"]
    others = [dict(message) for message in conversation if message["role"] != "system"]
    if not system or not others or others[0]["role"] != "user":
        return conversation
    others[0]["content"] = "\n\n".join([*system, others[0]["content"]])
    return others


def plain_conversation(conversation: list[dict[str, str]]) -> str:
    paragraphs = [f"{message['role'].capitalize()}: {message['content']}" for message in conversation]
    return "\n\n".join([*paragraphs, "Assistant:"])
