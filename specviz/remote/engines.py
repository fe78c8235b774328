"""The engines that can be attached: what each is asked, how its stream is read, and what it can tell. It knows no network.

Where evidence is "documentation", no stream of a live server of that kind has been recorded yet; the screen says so.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .chunks import ChunkReader
from .client import Client
from .reading import Reader, RemoteError
from .timings import TimingsReader

__all__ = ["ENGINES", "EngineKind", "detect"]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One kind of server. extra: fields added to a chat request. reader: makes the reader of an answer. evidence: "run" (read from
    recorded streams of a live server) or "documentation". unknown: what it never tells. switch: the request field that turns
    speculation on for one request, so that the same server gives the baseline. samplers: fields beyond OpenAI's that it takes. start: flags that switch speculation on."""
    name: str
    label: str
    reader: Callable[[], Reader]
    extra: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = "documentation"
    unknown: str = "Rejected tokens and draft probabilities are not told by this server."
    switch: str = ""
    samplers: tuple[str, ...] = ()
    start: str = ""


USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
MORE = ("top_k", "min_p", "repetition_penalty")
ENGINES: dict[str, EngineKind] = {kind.name: kind for kind in (
    EngineKind("specviz", "specviz", ChunkReader, {**USAGE, "return_token_ids": True}, "run", samplers=MORE,
               start="python app.py --api-only"),
    EngineKind("vllm", "vLLM", ChunkReader, {**USAGE, "return_token_ids": True, "logprobs": True}, "run", samplers=MORE,
               start="vllm serve MODEL --per-request-spec-decode-metrics detailed --speculative-config "
                     "'{\"method\": \"ngram\", \"num_speculative_tokens\": 4, \"prompt_lookup_max\": 4, \"prompt_lookup_min\": 2}'"),
    EngineKind("llamacpp", "llama.cpp", TimingsReader, {"timings_per_token": True, "stream_options": {"include_usage": True}}, "run",
               samplers=("top_k", "min_p", "repeat_penalty"), start="llama-server -m MODEL.gguf --spec-type ngram-simple --metrics"),
    EngineKind("sglang", "SGLang", ChunkReader, {**USAGE, "return_spec_tokens_details": True}, samplers=MORE,
               start="python -m sglang.launch_server --model-path MODEL --speculative-algorithm NGRAM --enable-metrics"),
    EngineKind("tensorrt_llm", "TensorRT-LLM", ChunkReader, USAGE,
               start="trtllm-serve MODEL --config speculative.yaml   # speculative_config: {decoding_type: NGram, max_draft_len: 4}"),
    EngineKind("lm_studio", "LM Studio", ChunkReader, {"stream_options": {"include_usage": True}}, switch="draft_model",
               start="choose a draft model in LM Studio, or send \"draft_model\" with the request"),
    EngineKind("openai", "OpenAI-compatible server", ChunkReader, {"stream_options": {"include_usage": True}}),
)}

OWNERS = {"specviz": "specviz", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "tensorrt_llm",
          "tensorrt-llm": "tensorrt_llm"}


def detect(client: Client, models: list[dict[str, Any]]) -> EngineKind:
    """Which kind of server this is: by the owner of its models, else by addresses that only one kind has.

    A gateway in front may hide the kind; the user can name it instead.
    """
    for entry in models:
        if kind := OWNERS.get(str(entry.get("owned_by", "")).lower()):
            return ENGINES[kind]
    for path, kind in (("/api/v0/models", "lm_studio"), ("/props", "llamacpp"), ("/server_info", "sglang"), ("/version", "vllm")):
        try:
            if isinstance(client.get(path, at_root=True), dict):
                return ENGINES[kind]
        except RemoteError:
            continue
    return ENGINES["openai"]
