"""Tiny random transformers models and a tiny tokenizer, built in memory in well under a second.

They know nothing of specviz: tests of any module may import them. The weights are random, so only structure can be tested with them.
"""
from __future__ import annotations

import json
import time
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "EOS", "FAMILIES", "save_tiny", "slow_steps", "swap_tokens", "tiny_model", "tiny_tokenizer"]

VOCAB_SIZE = 384
BASE: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
                            vocab_size=VOCAB_SIZE, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8,
                    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "phi3": {"sliding_window": None},
    "phi": {},
    "smollm3": {},
    "granite": {},
    "olmo2": {},
    "starcoder2": {},
}

CHAT_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
                 "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2                              # id of <|im_end|>
LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A small model guesses the next tokens; the large model checks them all at once.",
    "Guess, check, keep what was right, correct what was wrong, and go on from there.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Ein kleines Modell schlägt vor, das große prüft. Où est la bibliothèque? Там, за углом.",
    "user system assistant user system assistant You are a helpful assistant.\n",
]


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A random three-layer model of one of `FAMILIES`, in eval mode, without gradients. The global random state is left as it was.

    overrides: config values, such as `num_hidden_layers=2`, `vocab_size=199` or `tie_word_embeddings=True`.
    """
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in model.parameters():       # the default init is so small that every token looks alike
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE with at most 384 tokens, ChatML template and `EOS` = <|im_end|>. Every call returns a fresh object."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json()), bos_token="<|im_start|>",
                                        eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(path: str | Path, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a tiny model and its tokenizer as a folder that `from_pretrained` reads; returns the folder."""
    folder = Path(path)
    tiny_model(family, seed, dtype, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def swap_tokens(folder: Path, one: int = 40, other: int = 41) -> None:
    """Make a saved model's tokenizer differ from the others' in two tokens."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (one, other)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))


@contextmanager
def slow_steps(engine, seconds: float = 0.02):
    """While it is open no answer ends soon, however late another thread gets its turn."""
    step = engine.step
    engine.step = lambda: (time.sleep(seconds), step())[1]
    try:
        yield
    finally:
        del engine.step
