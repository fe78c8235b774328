"""From the JSON that an OpenAI client sends to a `ChatRequest`; nothing that was asked for is changed in silence.

It knows no HTTP. A field that this engine has no answer to is refused unless its value is the one that changes nothing.
"""
from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import randbelow
from typing import Any

from ..engine.sampling import SamplingParams
from ..errors import InputError
from ..service import ChatRequest

__all__ = ["ApiRequest", "BadRequest", "parsed"]

DEFAULT_TEMPERATURE = 1.0              # OpenAI's
MAX_STOPS = 4
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls", "cache_salt",
           "request_id", "priority"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None), "best_of": (1, None), "logprobs": (False, 0, None), "top_logprobs": (0, None), "frequency_penalty": (0, None),
    "presence_penalty": (0, None), "logit_bias": ({}, None), "echo": (False, None), "suffix": ("", None), "tools": ([], None),
    "tool_choice": ("none", "auto", None), "functions": ([], None), "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None), "modalities": (["text"], None), "audio": (None,), "stop_token_ids": ([], None),
    "skip_special_tokens": (True, None), "reasoning_effort": (None,)}
COMMON = {"model", "stream", "stream_options", "temperature", "top_p", "seed", "stop", "max_tokens", "max_completion_tokens", "top_k",
          "min_p", "repetition_penalty", "ignore_eos", "return_token_ids", "speculative", "prompt_cache_key"}


class BadRequest(InputError):
    """A field of a request is not what it must be. param: its name, as OpenAI's errors give it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What one HTTP request asks for. chat: of /v1/chat/completions. usage_always, usage_last: which chunks carry token counts.
    comes_back: it has a `prompt_cache_key`, so what is read of it may be of use again."""
    request: ChatRequest
    model: str
    chat: bool
    stream: bool = False
    usage_last: bool = False
    usage_always: bool = False
    token_ids: bool = False
    comes_back: bool = False


def parsed(body: Any, *, chat: bool, methods: tuple[str, ...], default_method: str, most_tokens: int = 4096,
           client: str = "") -> ApiRequest:
    """body: the decoded JSON. methods: the drafting methods that can run now. most_tokens: the longest answer that may be asked for.
    client: whose request it is; texts are reused within one client's `prompt_cache_key`, never across.

    Beyond OpenAI's fields, `top_k`, `min_p`, `repetition_penalty`, `ignore_eos` and `return_token_ids` mean what they mean in vLLM, and
    `speculative` is {"method": name, "k": 1 to 64 or "auto", "verification": rule, "options": {the method's own}}. Raises BadRequest.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("The body is not a JSON object.")
    for name, value in body.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise BadRequest(f"{name} is {_short(value)}; this server supports only {_short(NEUTRAL[name][0])}.", name)
        elif name not in COMMON | IGNORED | {"messages" if chat else "prompt"}:
            raise BadRequest(f"Unrecognized request argument supplied: {name}", name)
    model = _checked(body, "model", str, "")
    if not model:
        raise BadRequest("model is missing; it is one of /v1/models.", "model")
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise BadRequest("stream_options must be an object.", "stream_options")
    cache_key = _checked(body, "prompt_cache_key", str, "") or uuid.uuid4().hex
    content = {"messages": _messages(body)} if chat else {"messages": (), "prompt": _prompt(body)}
    speculative = _checked(body, "speculative", dict, {})
    method = speculative.get("method", default_method)
    if method not in methods:
        raise BadRequest(f"speculative.method is {_short(method)}; expected one of {', '.join(methods)}.", "speculative")
    if extra := set(speculative) - {"method", "k", "verification", "options"}:
        raise BadRequest(f"speculative.{sorted(extra)[0]} is not known; expected method, k, verification and options.", "speculative")
    if not isinstance(speculative.get("options", {}), dict):
        raise BadRequest("speculative.options must be an object of the method's own options.", "speculative")
    k = speculative.get("k", 5)
    if k != "auto" and (not isinstance(k, int) or isinstance(k, bool)):
        raise BadRequest(f'speculative.k is {_short(k)}; expected a whole number from 1 to 64, or "auto".', "speculative")
    request = ChatRequest(**content, sampling=_sampling(body, most_tokens), method=method, k=5 if k == "auto" else k, auto_k=k == "auto", keep_probs=False,
                          conversation=f"api:{client}:{cache_key}",
                          verification=str(speculative.get("verification", "rejection")), options=tuple(speculative.get("options", {}).items()))
    stream = _checked(body, "stream", bool, False)
    return ApiRequest(request, model, chat, stream, bool(options.get("include_usage")), bool(options.get("continuous_usage_stats")),
                      _checked(body, "return_token_ids", bool, False), bool(body.get("prompt_cache_key")))


def _sampling(body: Mapping[str, Any], most_tokens: int) -> SamplingParams:
    temperature = _number(body, "temperature", DEFAULT_TEMPERATURE, 0, 2)
    limit = body.get("max_completion_tokens") if body.get("max_completion_tokens") is not None else body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise BadRequest(f"max_tokens is {_short(limit)}; expected a whole number from 1.", "max_tokens")
    if limit is not None and limit > most_tokens:
        raise BadRequest(f"max_tokens is {limit}; this server writes at most {most_tokens} tokens.", "max_tokens")
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise BadRequest(f"seed is {_short(seed)}; expected a whole number.", "seed")
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(stops, (list, tuple)) or len(stops) > MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest(f"stop must be a text or a list of at most {MAX_STOPS} texts, none of them empty.", "stop")
    if seed is None:
        seed = randbelow(2**31)
    return SamplingParams(
        temperature=0.0 if temperature < 0.001 else temperature, top_p=_number(body, "top_p", 1.0, 1e-6, 1),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 1_000_000))), min_p=_number(body, "min_p", 0.0, 0, 0.999),
        repetition_penalty=_number(body, "repetition_penalty", 1.0, 0.01, 10), seed=seed,
        max_new_tokens=limit if limit is not None else most_tokens, stop=tuple(stops),
        ignore_eos=_checked(body, "ignore_eos", bool, False))


def _messages(body: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message.", "messages")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadRequest(f"messages[{index}] must be an object.", "messages")
        role = {"developer": "system"}.get(message.get("role"), message.get("role"))
        if role not in ("system", "user", "assistant"):
            raise BadRequest(f"messages[{index}].role is {_short(message.get('role'))}; expected system, user or assistant.", "messages")
        checked.append({"role": role, "content": _content(message.get("content"), index)})
    if checked[-1]["role"] == "assistant":
        raise BadRequest("The last message must come from the user; continuing an assistant's message is not supported.", "messages")
    return tuple(checked)


def _content(content: Any, index: int) -> str:
    """A text, or the texts of a list of parts; pictures and sounds are refused."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"messages[{index}].content must be a text or a list of text parts.", "messages")
    return "".join(part["text"] for part in parts)


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise BadRequest("prompt must be one text that is not empty; token ids and several prompts are not supported.", "prompt")
    return prompt


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise BadRequest(f"{name} is {_short(value)}; expected a number from {low:g} to {high:g}.", name)
    return value


def _checked(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise BadRequest(f"{name} is {_short(value)}; expected {kind.__name__}.", name)
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
