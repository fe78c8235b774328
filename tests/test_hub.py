"""Models from the hub: the real client against a small server on this machine. What is refused, what is kept, what is asked for again."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_hub import COMMIT, FakeHub
from tiny import save_tiny, tiny_model

from specviz import hub, loading
from specviz.errors import LoadError, NotEnoughMemory
from specviz.loading import load_target
from specviz.sources import describe


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts a hub with these folders and points the loader at it, with a cache of its own."""
    hubs: list[FakeHub] = []

    def start(folders: dict[str, Path], **options) -> FakeHub:
        hubs.append(FakeHub(folders, **options))
        monkeypatch.setattr(hub, "ENDPOINT", hubs[-1].url)
        return hubs[-1]

    monkeypatch.setattr(hub, "CACHE", tmp_path / "hub-cache")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield start
    for each in hubs:
        each.close()


def weights_asked(server: FakeHub) -> list[tuple[str, str]]:
    return [(wanted, path) for method, path, wanted in server.requests if method == "GET" and path.endswith(".safetensors")]


def test_a_repository_is_fetched_once_and_serves_offline(tmp_path, serve):
    """The fetched model computes the original's logits; its commit is a fact of it; afterwards no network is needed."""
    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")})
    seen: list[tuple[str, float | None]] = []
    loaded = load_target("owner/tiny", device="cpu", progress=lambda *report: seen.append(report))
    ids = torch.tensor([[5, 60, 100, 7]])
    assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
    assert (loaded.name, loaded.facts["revision"]) == ("owner/tiny", COMMIT)
    assert any(message.startswith("Fetching owner/tiny from the hub (0.6 MB)") for message, _ in seen)
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in seen)
    num_asked = len(weights_asked(server))
    assert load_target("owner/tiny", device="cpu").facts["revision"] == COMMIT and len(weights_asked(server)) == num_asked == 1
    server.close()
    assert load_target("owner/tiny", device="cpu", offline=True).name == "owner/tiny"
    assert load_target("owner/tiny@main", device="cpu").name == "owner/tiny"                   # unreachable, but it lies here


def test_an_interrupted_download_goes_on(tmp_path, serve, monkeypatch):
    """A connection that ends in the middle of the weights costs only the rest: the next request asks from there on."""
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 15)        # what is received is written in pieces of this size
    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")}, cut_after=100_000)
    loaded = None
    for _ in range(2):                          # the client may retry by itself, or the user does
        try:
            loaded = load_target("owner/tiny", device="cpu")
            break
        except LoadError as error:
            assert "what has arrived is kept" in str(error)
    ids = torch.tensor([[5, 60, 100, 7]])
    assert loaded is not None and torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
    first, *others = weights_asked(server)
    assert first[0] == "" and others and all(wanted.startswith("bytes=") and wanted != "bytes=0-" for wanted, _ in others)


def test_a_model_is_judged_before_its_weights_are_fetched(tmp_path, serve, monkeypatch):
    """An unreadable architecture, a lying config, too little memory and too little disk are refused without one byte of weights."""
    changes = {
        "owner/t5": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "is not a model that writes"),
        "owner/liar": ({"num_attention_heads": 7, "head_dim": None}, "config.json"),
        "owner/awq": ({"quantization_config": {"quant_method": "awq"}}, "packed as awq"),
        "owner/nf4": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
                      "packed as nf4 by bitsandbytes, which needs a CUDA device")}
    folders = {name: save_tiny(tmp_path / name) for name in ("owner/tiny", *changes)}
    for name, (change, _) in changes.items():
        config = folders[name] / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    server = serve(folders)
    for name, (_, message) in changes.items():
        with pytest.raises(LoadError, match=message):
            load_target(name, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "available", lambda device: 1000)
        with pytest.raises(NotEnoughMemory, match=r"owner/tiny needs about 0.15 GB .cpu, float32: weights 0.6 MB, .* and 0.0 MB are free"):
            load_target("owner/tiny", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(hub, "free_disk", lambda folder: 1000)
        with pytest.raises(NotEnoughMemory, match=r"Fetching owner/tiny needs 0.6 MB in .* only 0.0 MB are free; .*HF_HUB_CACHE"):
            load_target("owner/tiny", device="cpu")
    assert not weights_asked(server)


@pytest.mark.parametrize(("source", "message"), [
    ("owner/closed", r"owner/closed is gated: open https://huggingface.co/owner/closed, accept its terms .* `hf auth login`"),
    ("owner/nothing", "no file, folder or hub model owner/nothing, or it is private"),
    ("owner/tiny@other", "owner/tiny has no revision 'other'"),
    ("owner/pickled", "owner/pickled has no safetensors weights at its top level"),
])
def test_refusals_of_the_hub_are_explained(tmp_path, serve, source, message):
    """Gated, unknown, wrong revision, only pickled weights: one sentence each that says what to do."""
    pickled = save_tiny(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    folder = save_tiny(tmp_path / "origin")
    serve({"owner/closed": folder, "owner/tiny": folder, "owner/pickled": pickled}, gated=frozenset({"owner/closed"}))
    with pytest.raises(LoadError, match=message) as caught:
        load_target(source, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_cancelling_a_download_passes_through(tmp_path, serve, in_the_middle):
    """What `progress` raises to cancel a load, before or while bytes arrive, is no failed load; the next attempt succeeds."""
    class Cancelled(Exception):
        pass

    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")})

    def cancel(message: str, fraction: float | None) -> None:
        if message.startswith("Fetching") and (fraction is not None or not in_the_middle):
            raise Cancelled

    with pytest.raises(Cancelled):
        load_target("owner/tiny", device="cpu", progress=cancel)
    assert bool(weights_asked(server)) == in_the_middle and load_target("owner/tiny", device="cpu").name == "owner/tiny"


def test_describing_fetches_small_files_only(tmp_path, serve):
    """Configuration and tokenizer are enough to know a model; the size of the rest is told."""
    folder = save_tiny(tmp_path / "origin")
    server = serve({"owner/tiny": folder})
    described = describe("owner/tiny")
    assert described.download_bytes == (folder / "model.safetensors").stat().st_size and not weights_asked(server)
    assert described.config().model_type == "llama" and len(described.tokenizer()) == 384
