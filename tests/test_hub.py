"""Models from the hub: the real client against a small server on this machine. What is refused, what is kept, what is asked for again."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fake_hub import COMMIT, FakeHub
from head_files import eagle, medusa, write
from tiny import save_tiny, tiny_model

from specviz import hub, hub_download, loading
from specviz.default_model import silent
from specviz.drafters.checkpoints import load_heads
from specviz.engine.model import LanguageModel
from specviz.errors import LoadError, NotEnoughMemory
from specviz.head_source import find_heads
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
    monkeypatch.setattr(hub_download, "_BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(hub_download, "_PAUSE_S", 0.01)
    yield start
    for each in hubs:
        each.close()


def weights_asked(server: FakeHub) -> list[tuple[str, str]]:
    return [(wanted, path) for method, path, wanted in server.requests if method == "GET" and path.startswith("store/")]


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


def test_a_broken_connection_is_taken_up_again(tmp_path, serve):
    """A connection that ends in the middle of the weights, twice, costs only the rest, and nobody notices. No token leaves for the store."""
    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")}, cut_after=100_000, num_cuts=2)
    loaded = load_target("owner/tiny", device="cpu")
    ids = torch.tensor([[5, 60, 100, 7]])
    assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
    first, *others = weights_asked(server)
    assert first[0] == "" and len(others) == 2 and all(wanted.startswith("bytes=") and wanted != "bytes=0-" for wanted, _ in others)
    assert not server.tokens


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path, serve):
    """The hub is gone in the middle: one sentence. What one attempt received the next does not ask for again; until then no model is there."""
    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")}, cut_after=300_000)
    server.leaves = True
    with pytest.raises(LoadError, match="The connection broke while owner/tiny was being fetched .* what has arrived is kept, try again"):
        load_target("owner/tiny", device="cpu")
    with pytest.raises(LoadError, match="damaged|missing|no weights|not on this machine"):
        load_target("owner/tiny", device="cpu", offline=True)
    [part] = (tmp_path / "hub-cache").rglob("*.part")
    received, num_asked, server.has_left = part.stat().st_size, len(weights_asked(server)), False
    seen: list[float | None] = []
    load_target("owner/tiny", device="cpu", progress=lambda message, fraction: seen.append(fraction))
    assert [wanted for wanted, _ in weights_asked(server)[num_asked:]] == [f"bytes={received}-"] and received > 200_000
    assert min(fraction for fraction in seen if fraction is not None) > 0.3
    assert not list((tmp_path / "hub-cache").rglob("*.part"))


def test_what_arrived_wrong_is_not_kept(tmp_path, serve):
    """Weights that do not hash to their name are refused and deleted; the next attempt fetches them all."""
    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")})
    server.corrupt = True
    with pytest.raises(LoadError, match="model.safetensors arrived with other contents than the hub announced"):
        load_target("owner/tiny", device="cpu")
    server.corrupt = False
    assert load_target("owner/tiny", device="cpu").name == "owner/tiny" and [wanted for wanted, _ in weights_asked(server)] == ["", ""]


def test_cancelling_does_not_wait_for_a_silent_hub(tmp_path, serve):
    """While the hub sends nothing, giving up takes effect at the next look; what was left behind writes no more, and the rest comes later."""
    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")}, silent_after=1 << 17)

    class Cancelled(Exception):
        pass

    def cancel(message: str, fraction: float | None) -> None:
        if server.is_silent.is_set():
            raise Cancelled

    with pytest.raises(Cancelled):
        load_target("owner/tiny", device="cpu", progress=cancel)
    assert server.is_silent.is_set() and not server.go_on.is_set()
    [part] = (tmp_path / "hub-cache").rglob("*.part")
    num_bytes = part.stat().st_size
    server.silent_after = None
    server.go_on.set()
    assert load_target("owner/tiny", device="cpu").name == "owner/tiny"
    assert weights_asked(server)[1][0] == f"bytes={num_bytes}-"


def test_a_model_is_judged_before_its_weights_are_fetched(tmp_path, serve, monkeypatch):
    """An unreadable architecture, a lying config, too little memory and too little disk are refused without one byte of weights."""
    changes = {
        "owner/t5": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "is not a model that writes"),
        "owner/liar": ({"num_attention_heads": 7, "head_dim": None}, "config.json"),
        "owner/awq": ({"quantization_config": {"quant_method": "awq"}}, "packed as awq"),
        "owner/nf4": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
                      "packed as nf4 by bitsandbytes, which needs a CUDA device")}
    origin = save_tiny(tmp_path / "origin")
    folders = {name: Path(shutil.copytree(origin, tmp_path / name)) for name in ("owner/tiny", *changes)}
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


def test_heads_fetched_earlier_serve_offline(tmp_path, serve):
    """Drafting heads come once; afterwards --offline asks nobody, and a hub that is gone is no obstacle. What never came is told."""
    target = LanguageModel(tiny_model("llama"))
    server = serve({"owner/heads": write(tmp_path / "origin", medusa(target)), "owner/others": write(tmp_path / "others", eagle(target))})
    first = find_heads("owner/heads", progress=silent)
    assert first.kind == "medusa" and len(weights_asked(server)) == 1
    num_asked = len(server.requests)
    again = find_heads("owner/heads", offline=True, progress=silent)
    assert (again.kind, again.folder) == (first.kind, first.folder) and len(server.requests) == num_asked
    assert load_heads(again.folder, again.name, target, "tiny").kind == "medusa"
    with pytest.raises(LoadError, match="owner/others is not on this machine and --offline forbids fetching it"):
        find_heads("owner/others", offline=True, progress=silent)
    server.close()
    assert find_heads("owner/heads", progress=silent).folder == first.folder


@pytest.mark.parametrize("moment", ["Looking for", "Fetching"])
def test_cancelling_passes_through(tmp_path, serve, moment):
    """What `progress` raises to cancel a load, before or while bytes arrive, is no failed load; the next attempt succeeds."""
    class Cancelled(Exception):
        pass

    server = serve({"owner/tiny": save_tiny(tmp_path / "origin")})

    def cancel(message: str, fraction: float | None) -> None:
        if message.startswith(moment):
            raise Cancelled

    with pytest.raises(Cancelled):
        load_target("owner/tiny", device="cpu", progress=cancel)
    assert moment == "Fetching" or not weights_asked(server)
    assert load_target("owner/tiny", device="cpu").name == "owner/tiny"


def test_describing_fetches_small_files_only(tmp_path, serve):
    """Configuration and tokenizer are enough to know a model; the size of the rest is told."""
    folder = save_tiny(tmp_path / "origin")
    server = serve({"owner/tiny": folder})
    described = describe("owner/tiny")
    assert described.download_bytes == (folder / "model.safetensors").stat().st_size and not weights_asked(server)
    assert described.config().model_type == "llama" and len(described.tokenizer()) == 384
