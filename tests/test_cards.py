"""The shipped model cards: every figure on them is worked out again, every name on them leads somewhere."""
from __future__ import annotations

import re

import pytest
from transformers import AutoConfig

from specviz.catalog import Catalog
from specviz.drafters import DRAFTERS
from specviz.hub import is_hub_id
from specviz.memory import sizes_of
from specviz.placement import QUANTIZATIONS

CATALOG = Catalog()
CARDS = pytest.mark.parametrize("card", CATALOG.targets, ids=[card.id for card in CATALOG.targets])
HEAD_KINDS = {"medusa", "eagle", "eagle3"}
GIBIBYTE = 1 << 30


@CARDS
def test_a_cards_shape_is_the_model_that_transformers_builds(card):
    """Number of weights, quantizable part and cache per token come out the same from the card's shape and from the real model class."""
    shape = card.shape
    config = AutoConfig.for_model(
        card.model_type, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, max_position_embeddings=card.context_length, pad_token_id=0)
    by_formula, built = sizes_of(shape), sizes_of(config)
    assert by_formula.num_parameters == built.num_parameters == card.num_parameters
    assert (by_formula.linear, by_formula.head, by_formula.tied, by_formula.cache_per_token) == (
        built.linear, built.head, built.tied, built.cache_per_token)
    if card.model_type != "phi3":               # its fused projections have the same outputs, counted in fewer rows of the formula
        assert by_formula == built


@CARDS
def test_a_cards_names_lead_somewhere(card):
    """Draft models are cards themselves with the same family and, but for padding, vocabulary; other names are hub repositories."""
    assert re.fullmatch(r"[a-z0-9.-]+", card.id) and card.summary and card.licence
    assert card.source == "default" or is_hub_id(card.source) and card.source in card.origin
    for source in card.draft_sources:
        draft = CATALOG.card(source)
        assert draft is not None and draft.model_type == card.model_type and draft.num_parameters < card.num_parameters / 2
        assert draft.chat.template.startswith(card.chat.template) and abs(draft.shape.vocab_size - card.shape.vocab_size) < 1024
    assert all(is_hub_id(packed.source) and packed.quantization in QUANTIZATIONS["cuda"] for packed in card.packed)
    assert all(is_hub_id(heads.source) and heads.kind in HEAD_KINDS for heads in card.heads)
    assert card.gated == (card.source.split("/")[0] in ("meta-llama", "google"))


@CARDS
def test_a_cards_graphics_card_holds_it(card):
    """vram_gb is true: with 4,096 tokens of context one quantization fits, and the next smaller common card would not hold it in INT8."""
    if not card.vram_gb:
        assert card.source == "default"
        return
    needed = {each: card.estimate(each, device="cuda", context=4096).peak_bytes for each in QUANTIZATIONS["cuda"]}
    assert card.vram_gb in (8, 12, 16, 24)
    assert min(needed.values()) < 0.95 * card.vram_gb * GIBIBYTE
    smaller = [size for size in (8, 12, 16) if size < card.vram_gb]
    assert not smaller or needed["int8"] > 0.9 * smaller[-1] * GIBIBYTE


def test_there_is_a_choice_for_every_card():
    """At least ten targets for graphics cards, some for each common size, some of them without an account; all begin with prompt lookup."""
    gpu = [card for card in CATALOG.targets if card.vram_gb]
    assert len(gpu) >= 10 and {card.vram_gb for card in gpu} == {8, 12, 16, 24}
    assert all(any(card.vram_gb == size and not card.gated for card in gpu) for size in (8, 12, 16, 24))
    assert all(card.default_method == "prompt_lookup" in DRAFTERS for card in CATALOG.targets)
    assert len({card.source for card in CATALOG.targets}) == len(CATALOG.targets)
