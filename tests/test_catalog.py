"""Model cards and the check that draft and target share a vocabulary."""
from __future__ import annotations

import pytest
from tiny import save_tiny, tiny_tokenizer

from specviz.catalog import Catalog, check_vocabulary
from specviz.default_model import DEFAULT
from specviz.errors import LoadError, VocabularyMismatch

CARD = """[target]
id = "tiny"
name = "Tiny"
source = "{source}"
licence = "Apache-2.0"
origin = "made here"
model_type = "llama"
num_parameters = 1
context_length = 512
{extra}
[target.shape]
vocab_size = 384
hidden_size = 64
intermediate_size = 128
num_layers = 3
num_heads = 8
num_kv_heads = 2
head_dim = 8
tied = false
[target.chat]
template = "ChatML"
"""


def test_shipped_cards_read_and_default_agrees_with_the_download():
    """Every shipped card is valid, ids are unique, and the default card names the files that are really fetched."""
    catalog = Catalog()
    assert len({card.id for card in catalog.targets}) == len(catalog.targets) > 0
    card = catalog.card("default")
    assert (card.weights_sha256, card.download_bytes, card.name) == (DEFAULT.gguf_sha256, DEFAULT.wheel_bytes, DEFAULT.name)
    assert card.disk_bytes <= DEFAULT.disk_bytes
    assert DEFAULT.requirement.replace("==", " ") in card.origin


def test_target_opens_by_card_and_draft_is_checked(tmp_path):
    """A card's id leads to its source; a draft with the same tokens opens, one with others is refused by name."""
    folder = save_tiny(tmp_path / "model", "llama")
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "tiny.toml").write_text(CARD.format(source=folder.as_posix(), extra=""))
    catalog = Catalog(tmp_path / "cards", cache_dir=tmp_path / "cache", offline=True)
    target = catalog.open_target("tiny", device="cpu")
    draft = catalog.open_draft(str(save_tiny(tmp_path / "draft", "qwen2", num_hidden_layers=1)), target)
    assert draft.placement.dtype == target.placement.dtype and draft.name == "draft"
    assert catalog.reason(catalog.card("tiny")) == ""
    other = save_tiny(tmp_path / "other", "llama")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"content": "<|im_start|>"', '"content": "<|begin|>"')
                                          .replace('"<|im_start|>": 1', '"<|begin|>": 1'), encoding="utf-8")
    with pytest.raises(VocabularyMismatch, match=r"token 1 is '<\|im_start\|>' for the target and '<\|begin\|>'"):
        catalog.open_draft(str(other), target)


def test_reason_names_what_is_missing(tmp_path):
    """A target that needs more memory than there is, or a download that is forbidden, says so."""
    (tmp_path / "a.toml").write_text(CARD.format(source="default", extra=""))
    (tmp_path / "b.toml").write_text(CARD.format(source="x/y", extra="").replace("hidden_size = 64", "hidden_size = 64_000_000_000"))
    catalog = Catalog(tmp_path, cache_dir=tmp_path / "cache", offline=True)
    assert "--offline" in catalog.reason(catalog.targets[0])
    assert "Tiny needs about 616,192 GB (cpu, int8: weights" in catalog.reason(catalog.targets[1])
    assert "cpu, none" in catalog.reason(catalog.targets[1], quantization="none")


@pytest.mark.parametrize(("text", "message"), [
    ("[target", "cannot be read"),
    ("[other]\n", "no \\[target\\]"),
    (CARD.format(source="x", extra="licens = 'x'"), "does not know the entry 'licens'"),
    (CARD.format(source="x", extra="").replace('name = "Tiny"\n', ""), "lacks the entry 'name'"),
    (CARD.format(source="x", extra="").replace("512", '"512"'), "context_length is '512', expected int"),
    (CARD.format(source="x", extra="").partition("[target.chat]")[0], "target.chat\\] is missing"),
])
def test_broken_cards_are_named(tmp_path, text, message):
    """A card with a typing error says which file and which entry."""
    (tmp_path / "broken.toml").write_text(text)
    with pytest.raises(LoadError, match="broken.toml") as caught:
        Catalog(tmp_path)
    assert caught.match(message)


def test_longer_vocabulary_with_added_tokens_is_no_mismatch():
    """Tokens added behind the common end are no difference, in either role; a regular token that differs is."""
    plain, longer = tiny_tokenizer(), tiny_tokenizer()
    longer.add_tokens(["<tool>", "</tool>"])
    check_vocabulary(plain, longer)
    check_vocabulary(longer, plain)
    third = tiny_tokenizer()
    third.add_tokens(["<other>"])
    with pytest.raises(VocabularyMismatch, match=f"token {len(plain)} is '<tool>'"):
        check_vocabulary(longer, third)


def test_order_matters_not_only_the_set_of_tokens():
    """The same tokens under exchanged ids are another vocabulary."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    content = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    first, second = (next(token for token, i in vocab.items() if i == token_id) for token_id in (100, 101))
    vocab[first], vocab[second] = 101, 100
    exchanged = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    with pytest.raises(VocabularyMismatch, match="token 100 is"):
        check_vocabulary(tiny_tokenizer(), exchanged)
