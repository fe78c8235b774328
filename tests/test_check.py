"""The compatibility check: every finding, from small files alone, and that it agrees with what the engine does."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoConfig

from specviz import check, machine
from specviz.catalog import MODELS_DIR, Catalog
from specviz.check import check_pair, main
from specviz.drafters import DRAFTERS, Parts
from specviz.engine.model import LanguageModel


@pytest.fixture
def catalog(tmp_path) -> Catalog:
    (tmp_path / "cards").mkdir()
    return Catalog(tmp_path / "cards", cache_dir=tmp_path / "cache", offline=True)


def without_weights(folder: Path) -> Path:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    return folder


def rows(report) -> dict[str, tuple[str, str]]:
    return {row.what: (row.verdict, row.sentence) for row in report.rows}


def change_tokenizer(folder: Path, old: str, new: str) -> None:
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(json.dumps(old), json.dumps(new)), encoding="utf-8")


def test_a_good_pair_needs_no_weights(tmp_path, catalog):
    """Target and draft model with no weight file at all are judged completely: every method has a row, and the pair can be used."""
    target = without_weights(save_tiny(tmp_path / "large", "llama"))
    draft = without_weights(save_tiny(tmp_path / "small", "qwen2", num_hidden_layers=1))
    report = check_pair(str(target), str(draft), catalog=catalog)
    found = rows(report)
    assert report.is_possible and (report.target, report.drafter, report.download_bytes) == ("large", "small", 0)
    assert found["vocabulary"] == ("ok", "Both mean the same text by every token.")
    assert found["end of answer"][1] == "Both end with '<|im_end|>'." and found["memory"][0] == "ok"
    assert found["target"][1].startswith("llama, ") and "3 layers" in found["target"][1]
    assert [what for what in found if what.startswith("method: ")] == [f"method: {method.label}" for method in DRAFTERS.values()]
    assert report.text().endswith("This pair can be used.")


def test_the_default_model_is_judged_with_what_opens_beside_it(tmp_path, monkeypatch):
    """Methods whose drafters come with a target's card are possible without naming one, and what is no drafter by itself says so."""
    catalog = Catalog(cache_dir=tmp_path)
    shipped = MODELS_DIR / "smollm2-135m-instruct"
    side = check._side
    bare = without_weights(save_tiny(tmp_path / "large", "llama", hidden_size=576, num_hidden_layers=30, vocab_size=49152,
                                     tie_word_embeddings=True))
    monkeypatch.setattr(check, "_side", lambda catalog, name, placement: side(catalog, str(bare), placement))
    found = rows(check_pair("default", catalog=catalog))
    assert found["drafters"][0] == "ok" and "Medusa heads, an EAGLE head" in found["drafters"][1]
    assert all(found[f"method: {name}"] == ("ok", "Possible.") for name in ("Draft model", "Medusa", "EAGLE-2", "Early exit, trained"))
    report = check_pair("default", str(shipped / "draft_model"), catalog=catalog)
    assert not report.is_possible and "opens by itself beside that target" in rows(report)["drafter"][1]


def test_methods_are_judged_as_with_loaded_models(tmp_path, catalog):
    """For every method of the registry the check says exactly what the registry says of the really loaded pair."""
    target, draft = save_tiny(tmp_path / "large", "llama"), save_tiny(tmp_path / "small", "llama", num_hidden_layers=1)
    loaded = LanguageModel(tiny_model("llama"))
    for name in (None, str(draft)):
        found = rows(check_pair(str(target), name, catalog=catalog))
        parts = Parts(loaded, loaded.new_cache(), LanguageModel(tiny_model("llama", num_hidden_layers=1)) if name else None)
        for method in DRAFTERS.values():
            verdict, sentence = found[f"method: {method.label}"]
            assert (verdict == "no") == bool(method.missing(parts)) and method.missing(parts) in sentence and method.note(parts) in sentence


def test_one_differing_token_is_named(tmp_path, catalog):
    """A tokenizer that differs in a single token makes the pair impossible, and the sentence shows both spellings."""
    target, draft = save_tiny(tmp_path / "large", "llama"), save_tiny(tmp_path / "small", "llama")
    change_tokenizer(draft, "<|im_start|>", "<|begin|>")
    report = check_pair(str(target), str(draft), catalog=catalog)
    assert not report.is_possible
    assert rows(report)["vocabulary"] == ("no", "The two differ: token 1 is '<|im_start|>' for the target and '<|begin|>' for the draft "
                                                "model. Choose a draft model of the target's family.")


def test_padded_vocabularies_are_fine(tmp_path, catalog):
    """Tables of different length behind the same tokenizer are no obstacle; the padding is told."""
    target, draft = save_tiny(tmp_path / "large", vocab_size=512), save_tiny(tmp_path / "small", vocab_size=448)
    report = check_pair(str(target), str(draft), catalog=catalog)
    found = rows(report)
    assert report.is_possible and found["vocabulary"][0] == "ok" and "padded to 512 and 448 rows" in found["vocabulary"][1]
    assert f"The model's table has {512 - len(tiny_tokenizer())} rows more" in found["target's tokenizer"][1]


def test_ends_templates_and_lengths_are_warnings(tmp_path, catalog):
    """Another EOS list, a missing chat template and a shorter context are told but do not forbid the pair."""
    target, draft = save_tiny(tmp_path / "large"), save_tiny(tmp_path / "small", max_position_embeddings=256)
    (draft / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (target / "chat_template.jinja").unlink()
    report = check_pair(str(target), str(draft), catalog=catalog)
    found = rows(report)
    assert report.is_possible
    assert found["end of answer"][0] == "warn" and "differs by '<|endoftext|>'" in found["end of answer"][1]
    assert found["chat template"][0] == "warn" and found["context"] == (
        "warn", "The drafter reads 256 tokens, the target 512: beyond the shorter, nothing is drafted.")


@pytest.mark.parametrize("change", [
    dict(num_attention_heads=7), dict(num_attention_heads=0), dict(num_key_value_heads=3), dict(num_key_value_heads=0),
    dict(hidden_size=-4), dict(num_hidden_layers=0), dict(vocab_size=5), dict(num_attention_heads=64, head_dim=None),
    dict(hidden_size=10**7, vocab_size=10**7)])
def test_a_config_that_lies_never_crashes(tmp_path, catalog, change):
    """Whatever numbers a config.json holds, the answer is a report that either refuses in one line or goes on."""
    folder = without_weights(save_tiny(tmp_path / "liar"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "head_dim": None, **change}))
    report = check_pair(str(folder), catalog=catalog)
    assert all("\n" not in row.sentence for row in report.rows)
    if not report.is_possible:
        assert any(row.verdict == "no" and row.sentence for row in report.rows)


def test_layers_that_cannot_be_rolled_back_are_refused_by_name(tmp_path, catalog):
    """A recurrent model is refused from its config alone, in the engine's own words."""
    config = AutoConfig.for_model("mamba", vocab_size=384, hidden_size=32, num_hidden_layers=2, state_size=4)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path / "mamba")
    tiny_tokenizer().save_pretrained(tmp_path / "mamba")
    report = check_pair(str(tmp_path / "mamba"), catalog=catalog)
    sentence = rows(report)["target"][1]
    assert not report.is_possible and "cannot be rolled back" in sentence and "linear_attention" in sentence


def test_sliding_layers_are_explained(tmp_path, catalog):
    """The cache row names how many layers have a window, and how long it is."""
    found = rows(check_pair(str(without_weights(save_tiny(tmp_path / "g", "gemma3_text"))), catalog=catalog))
    assert found["target's cache"][0] == "ok" and "2 of 3 layers look back 8 tokens" in found["target's cache"][1]


def test_heads_are_checked_against_the_target(tmp_path, catalog):
    """Medusa heads of the target's width make Medusa possible; heads of another width are refused and change nothing else."""
    target = without_weights(save_tiny(tmp_path / "large"))
    for size, possible in ((64, True), (32, False)):
        folder = tmp_path / f"heads{size}"
        folder.mkdir()
        (folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
        shapes = {"weight": (size, size), "bias": (size,)}
        tensors = {f"{i}.0.linear.{part}": torch.zeros(shape) for i in range(2) for part, shape in shapes.items()}
        tensors |= {f"{i}.1.weight": torch.zeros(384, size) for i in range(2)}
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        report = check_pair(str(target), str(folder), catalog=catalog)
        assert report.is_possible == possible and rows(report)["method: Medusa"][0] == ("ok" if possible else "no"), report.text()
        assert rows(report)["method: Prompt lookup"][0] == "ok"


def test_short_memory_is_told_with_numbers(tmp_path, catalog, monkeypatch):
    """Too little memory forbids the pair and names what is needed and what is there."""
    monkeypatch.setattr(check, "available", lambda device: 1_000_000)
    report = check_pair(str(without_weights(save_tiny(tmp_path / "large"))), catalog=catalog)
    verdict, sentence = rows(report)["memory"]
    assert verdict == "no" and not report.is_possible and "large needs about" in sentence and "1.0 MB are free" in sentence


def test_what_is_not_there_is_a_row_not_an_error(tmp_path, catalog, monkeypatch):
    """A missing target, a missing drafter, a damaged tokenizer and an idle NVIDIA card each give a row."""
    folder = without_weights(save_tiny(tmp_path / "large"))
    assert rows(check_pair("./nowhere", catalog=catalog))["target"][0] == "no"
    report = check_pair(str(folder), "owner/name", catalog=catalog)
    assert rows(report)["drafter"][1].startswith("owner/name is not on this machine and --offline") and not report.is_possible
    assert rows(report)["method: Prompt lookup"][0] == "ok"
    assert "has not been fetched yet" in rows(check_pair("default", catalog=Catalog(cache_dir=tmp_path / "empty")))["target"][1]
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer of large cannot be read" in rows(check_pair(str(folder), catalog=catalog))["target"][1]
    monkeypatch.setattr(machine, "driver_present", lambda: True)
    monkeypatch.setattr(machine.torch.version, "cuda", None)
    assert rows(check_pair(str(folder), catalog=catalog))["machine"][0] == "warn"


def test_a_card_speaks_for_files_that_cannot_be_had():
    """Offline, a known target that was never fetched is refused, but its memory is told from the card."""
    found = rows(check_pair("qwen3-8b", "qwen3-0.6b", catalog=Catalog(offline=True)))
    assert found["target"][0] == "no" and "GB (cpu, int8: weights" in found["memory by its card"][1]


def test_the_command(tmp_path, capsys):
    """Exit code 0 for a pair that can be used, 1 for one that cannot, 2 for a setting that does not exist."""
    folder = str(without_weights(save_tiny(tmp_path / "large")))
    assert main([folder, folder, "--offline"]) == 0 and "+ vocabulary" in capsys.readouterr().out
    assert main([folder, "./nowhere", "--offline"]) == 1 and "x drafter" in capsys.readouterr().out
    assert main([folder, "--quantization", "int3"]) == 2 and "int3" in capsys.readouterr().err
