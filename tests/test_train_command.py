"""`python -m specviz.train` from the first text to a model that transformers opens, on a tiny target and as a user calls it."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from specviz.train.command import main

CATEGORIES = ("chat", "code", "math", "qa", "summarise", "rewrite")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    save_tiny(folder / "target", "llama")
    rows = [{"category": category, "prompt": f"{category} number {i}: guess, check, keep what was right.", "source": "test"}
            for category in CATEGORIES for i in range(60)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def run(work: Path, command: str, *more: str) -> int:
    return main([command, *more, "--target", str(work / "target"), "--threads", "1", "--offline"])


def test_the_four_commands(work, capsys):
    """Texts, a drafter, its table, and an ordinary checkpoint with the target's tokenizer; each command says what it did."""
    prompts = ["--prompts", str(work / "prompts.jsonl"), "--batch", "8", "--limit", "16", "--taps", "1"]
    assert run(work, "generate", "--out", str(work / "data"), "--tokens", "150", *prompts) == 0
    assert run(work, "generate", "--out", str(work / "test"), "--part", "test", "--per-category", "2", *prompts) == 0
    settings = [word for pair in ("steps=3", "vocabulary=128", "width=64", "num_heads=4", "inner=64", "num_negatives=32") for word in ("--set", pair)]
    assert run(work, "fit", "draft_model", "--data", str(work / "data"), "--out", str(work / "run"), *settings) == 0
    assert "answer tokens" in capsys.readouterr().out
    assert run(work, "evaluate", str(work / "run"), "--data", str(work / "test"), "--depth", "2", "--json", str(work / "rows.json")) == 0
    assert "tokens per step" in capsys.readouterr().out
    assert {row["drafter"] for row in json.loads((work / "rows.json").read_text())} >= {"run", "suffix", "suffix + run"}
    assert run(work, "export", str(work / "run"), "--out", str(work / "full"), "--full") == 0
    ours, theirs = AutoTokenizer.from_pretrained(work / "full"), AutoTokenizer.from_pretrained(work / "target")
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert AutoModelForCausalLM.from_pretrained(work / "full").config.num_hidden_layers == 2


@pytest.mark.parametrize("command, words", [
    (("fit", "medusa", "--data", "nowhere", "--out", "run"), "holds no training texts"),
    (("fit", "no_such", "--data", "data", "--out", "run"), "cannot be read"),
    (("generate", "--out", "more", "--prompts", "nowhere.jsonl"), "nowhere.jsonl")])
def test_what_cannot_work_is_one_sentence(work, command, words, capsys, monkeypatch):
    """A missing folder, an unknown drafter, a missing file: exit code 1 and a sentence, no traceback."""
    monkeypatch.chdir(work)
    assert run(work, *command) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft_model"])
def test_training_goes_on_from_an_export(work, kind, capsys):
    """A shipped folder is enough to go on: before its first step a run guesses among the same tokens with the same weights, up to how they were
    stored; then they move. A folder with neither is named."""
    data = work / f"data-{kind}"
    assert run(work, "generate", "--out", str(data), "--tokens", "120", "--prompts", str(work / "prompts.jsonl"), "--batch", "8", "--limit", "16",
               "--taps", "1") == 0
    few = ["vocabulary=96", "width=64", "num_heads=4", "inner=64", "num_negatives=32"] if kind == "draft_model" else ["vocabulary=96"]
    settings = [word for pair in (*few, "steps=4") for word in ("--set", pair)]

    def fitted(name: str, *more: str) -> dict:
        folder = work / f"{kind}-{name}"
        assert run(work, "fit", kind, "--data", str(data), "--out", str(folder), *settings, *more) == 0
        assert run(work, "export", str(folder), "--out", str(folder / "export")) == 0
        return load_file(folder / "export" / "model.safetensors")
    first, begin = fitted("first"), ("--begin-with", str(work / f"{kind}-first" / "export"))
    unmoved, moved = fitted("unmoved", *begin, "--stop-at", "0"), fitted("moved", *begin, "--set", "rate=0.02")
    assert all(torch.allclose(unmoved[name].float(), tensor.float(), atol=1e-3, rtol=1e-2) for name, tensor in first.items())
    assert any(not torch.allclose(moved[name].float(), tensor.float(), atol=1e-3, rtol=1e-2) for name, tensor in first.items())
    assert run(work, "fit", kind, "--data", str(data), "--out", str(work / "none"), "--begin-with", str(work)) == 1
    assert "neither trained.pt nor model.safetensors" in capsys.readouterr().err
