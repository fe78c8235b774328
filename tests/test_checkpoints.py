"""Published heads in every spelling load, draft and lose nothing; what does not fit is refused with tensor, shapes and target."""
from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import head_files
import pytest
import torch
from engine_helpers import Lab, repeating_prompt
from tiny import save_tiny, tiny_model
from torch.nn import functional as F

from specviz import head_source
from specviz.drafters import DRAFTERS, Heads, Parts
from specviz.drafters.checkpoints import checked_heads, head_kind, load_heads
from specviz.drafters.eagle_head import EagleHead
from specviz.drafters.self_check import checked, measure
from specviz.engine.model import FINAL, LanguageModel, Row
from specviz.errors import LoadError, SpecvizError
from specviz.head_source import find_heads
from specviz.opening import open_engine
from specviz.options import Options


def nested(checkpoint, key: str, **outer):
    """The layer's settings inside another table, as conversions write them."""
    config, tensors = checkpoint
    return {key: {**config, "architectures": ["LlamaForCausalLM"]}, **outer}, tensors


def without(checkpoint, *names: str, **changes):
    config, tensors = checkpoint
    return config | changes, {name: tensor for name, tensor in tensors.items() if name not in names}


def vllm_medusa(target: LanguageModel, num_own: int = 90):
    """As abhigoyal/vllm-medusa-vicuna-7b-v1.3."""
    new = head_files._Random(5)
    tensors = {"token_map": torch.arange(num_own) * 4}
    for i in range(3):
        tensors |= {f"blocks.{i}.layers.0.weight": new(64, 64), f"lm_heads.{i}.weight": new(num_own, 64)}
    return {"model_type": "medusa", "hidden_size": 64, "vocab_size": 384, "num_heads": 3, "num_hidden_layers": 1,
            "truncated_vocab_size": num_own}, tensors


def whole_medusa(target: LanguageModel):
    """As Medusa-1.0 and Medusa-2: heads inside a whole model's shards."""
    config, tensors = head_files.medusa(target)
    model = tiny_model("llama").state_dict()
    return {**config, "architectures": ["MedusaLlamaModel"], "num_hidden_layers": 3}, {
        **{name: tensor for name, tensor in model.items()}, **{f"medusa_head.{name}": tensor for name, tensor in tensors.items()}}


def wider(target: LanguageModel):
    """As the Llama-3.3-70B head: its own hidden size, so with embeddings of its own."""
    config, tensors = head_files.eagle3(target)
    new, size = head_files._Random(7), 48
    tensors |= {"fc.weight": new(size, 3 * 64), **head_files.layer_tensors("midlayer.", size, 2 * size, new),
                "midlayer.input_layernorm.weight": new(size), "midlayer.hidden_norm.weight": new(size), "norm.weight": new(size),
                "lm_head.weight": new(100, size), "embed_tokens.weight": new(384, size)}
    return config | {"hidden_size": size, "target_hidden_size": 64}, tensors


def biased(checkpoint):
    config, tensors = checkpoint
    layer = next(name for name in tensors if name.endswith("q_proj.weight")).removesuffix("q_proj.weight")
    biases = {f"{layer}{x}_proj.bias": torch.ones(len(tensors[f"{layer}{x}_proj.weight"])) for x in "qkv"}
    return config | {"attention_bias": True}, tensors | biases


SPECULATORS = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 100,
               "norm_before_residual": True}
CHECKPOINTS: dict[str, tuple[str, Callable, dict]] = {
    "EAGLE, yuhuili, bias": ("eagle", head_files.eagle, dict(file="pytorch_model.bin")),
    "EAGLE, yuhuili, no bias": ("eagle", lambda t: head_files.eagle(t, bias=False), {}),
    "EAGLE for Qwen2": ("eagle", lambda t: biased(head_files.eagle(t)), {}),
    "EAGLE, vLLM": ("eagle", lambda t: nested(head_files.eagle(t), "model", model_type="eagle", eagle_fc_bias=True), {}),
    "EAGLE, speculators": ("eagle", lambda t: nested(head_files.eagle(t), "transformer_layer_config", speculators_model_type="eagle"),
                           dict(rename={"fc.": "fusion_fc.", "layers.0.": "transformer."})),
    "EAGLE-3, yuhuili": ("eagle3", head_files.eagle3, dict(file="pytorch_model.bin")),
    "EAGLE-3, AngelSlim": ("eagle3", lambda t: without(head_files.eagle3(t), tie_word_embeddings=True), {}),
    "EAGLE-3, SGLang": ("eagle3", lambda t: head_files.eagle3(t, prefix="layers.0."), {}),
    "EAGLE-3, NVIDIA": ("eagle3", lambda t: without(head_files.eagle3(t, prefix="layers.0."), eagle_config={
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 0]}), dict(rename={"": "model."})),
    "EAGLE-3, speculators": ("eagle3", lambda t: nested(head_files.eagle3(t, prefix="layers.0."), "transformer_layer_config", **SPECULATORS), {}),
    "EAGLE-3, target's vocabulary": ("eagle3", lambda t: without(head_files.eagle3(t), "d2t", "t2d", "lm_head.weight", draft_vocab_size=None), {}),
    "EAGLE-3, other size": ("eagle3", wider, {}),
    "Medusa, FasterDecoding": ("medusa", head_files.medusa, dict(file="medusa_lm_head.pt")),
    "Medusa, version 2": ("medusa", lambda t: head_files.medusa(t, lm_heads=False), dict(file="medusa_lm_head.safetensors")),
    "Medusa, whole model": ("medusa", whole_medusa, {}),
    "Medusa, vLLM": ("medusa", vllm_medusa, {}),
}


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_published_spellings_load_and_lose_nothing(lab, tmp_path, checkpoint):
    """A folder with these names and shapes is recognised, drafts in the engine, and the text is the target's."""
    kind, make, options = CHECKPOINTS[checkpoint]
    folder = head_files.write(tmp_path / "heads", make(lab.target), **options)
    assert head_kind(folder, "heads") == kind
    heads = load_heads(folder, "heads", lab.target, "tiny")
    parts = Parts(lab.target, lab.cache, heads={kind: heads})
    prompt = repeating_prompt(15)
    expected = lab.run(prompt, max_new_tokens=14, scope="plain").tokens
    for method in DRAFTERS.values():
        if method.heads == kind:
            result = lab.run(prompt, method.create(parts), k=9, max_new_tokens=14, scope=f"{checkpoint} {method.name}")
            assert result.tokens == expected
            assert max(len(step.nodes) for step in result.steps) == 9
    lab.engine.forget()


def test_spellings_mean_the_same_head(lab, tmp_path):
    """The same weights under other names are the same heads, tensor by tensor."""
    def tensors(kind: str, folder: str, checkpoint, **options) -> dict[str, torch.Tensor]:
        return dict(load_heads(head_files.write(tmp_path / kind / folder, checkpoint, **options), "heads", lab.target, "tiny").tensors)
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    groups = [[tensors("eagle", "a", head_files.eagle(lab.target)), tensors("eagle", "b", head_files.eagle(lab.target), rename=names),
               tensors("eagle", "c", head_files.eagle(lab.target), file="weights.bin")],
              [tensors("eagle3", "a", head_files.eagle3(lab.target)),
               tensors("eagle3", "b", head_files.eagle3(lab.target, prefix="layers.0."), rename={"": "model."})],
              [tensors("medusa", "a", head_files.medusa(lab.target)),
               tensors("medusa", "b", head_files.medusa(lab.target), rename={"": "medusa_head."}),
               tensors("medusa", "c", head_files.medusa(lab.target), file="weights.pt")]]
    for first, *others in groups:
        for other in others:
            assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [list, torch.tensor], ids=["list", "tensor"])
def test_a_list_of_tokens_beside_an_eagle_head(lab, tmp_path, file, content):
    """FR-Spec's file of frequent tokens, whatever it is called: the head guesses among these, by the target's own rows for them. Files of another
    kind are left alone, and a list that names tokens the target does not have is refused."""
    ids = sorted(torch.randperm(384, generator=torch.Generator().manual_seed(3))[:60].tolist())
    folder = head_files.write(tmp_path / "heads", head_files.eagle(lab.target), file)
    if file.endswith(".safetensors"):
        torch.save({"step": torch.ones(3)}, folder / "a_training_state.pt")
    torch.save(content(ids), folder / "any name.pt")
    heads = load_heads(folder, "heads", lab.target, "tiny")
    assert heads.kind == "eagle" and (torch.arange(60) + heads.tensors["d2t"]).tolist() == ids
    parts, prompt = Parts(lab.target, lab.cache, heads={"eagle": heads}), repeating_prompt(15)
    result = lab.run(prompt, DRAFTERS["eagle2"].create(parts), k=9, max_new_tokens=14, scope=f"hot {file} {content}")
    assert result.tokens == lab.run(prompt, max_new_tokens=14, scope="plain").tokens
    drafted = {node.id for step in result.steps for node in step.nodes}
    assert len(drafted) > 5 and drafted <= set(ids)
    torch.save(content([5, 384]), folder / "any name.pt")
    with pytest.raises(LoadError, match="names token 384, the target has 384"):
        load_heads(folder, "heads", lab.target, "tiny")


def test_files_and_folders_may_be_called_anything(lab, tmp_path):
    """What a checkpoint is, is in its tensors: Medusa heads in a file that says eagle3 are Medusa heads."""
    assert head_kind(head_files.write(tmp_path / "eagle3", head_files.medusa(lab.target), "eagle3.safetensors"), "heads") == "medusa"
    assert head_kind(head_files.write(tmp_path / "medusa", head_files.eagle(lab.target), "medusa_lm_head.pt"), "heads") == "eagle"


def test_heads_are_counted_and_layers_too(lab):
    """The configuration says 2 heads; 4 are stored. Two layers of a head are two, each with its own weights."""
    config, tensors = head_files.medusa(lab.target)
    assert config["medusa_num_heads"] == 2
    assert checked_heads(tensors, config, "heads", lab.target, "tiny").facts["num_heads"] == 4
    deeper = {name.replace(".1.weight", ".2.weight"): tensor for name, tensor in tensors.items()}
    deeper |= {name.replace(".0.linear", ".1.linear"): tensor + 1 for name, tensor in tensors.items() if ".0.linear" in name}
    facts = checked_heads(deeper, config, "heads", lab.target, "tiny").facts
    assert (facts["num_heads"], facts["num_layers"]) == (4, 2)


def test_taps_follow_the_reference_or_the_configuration():
    """Low, middle and high by default, counted as inputs of layers; ids that begin with 1 count outputs, so one is added."""
    target = LanguageModel(tiny_model("llama", num_hidden_layers=12))
    config, tensors = head_files.eagle3(target)

    def taps(**changes) -> tuple[int, ...]:
        return checked_heads(tensors, config | changes, "heads", target, "tiny").facts["taps"]
    assert taps() == (2, 6, 9)
    assert taps(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}) == (2, 6, 9)
    assert taps(eagle_aux_hidden_state_layer_ids=[2, 6, 9]) == (2, 6, 9)
    assert taps(eagle_aux_hidden_state_layer_ids=[1, 5, 11]) == (2, 6, 12)
    with pytest.raises(LoadError, match="layers 2, 6, 13, and the target has 12"):
        taps(eagle_aux_hidden_state_layer_ids=[2, 6, 13])


def changed(make: Callable, **tensors):
    """A checkpoint with some tensors replaced or added."""
    def build(target):
        config, found = make(target)
        return config, found | tensors
    return build


def narrow(make: Callable, **changes):
    """Heads for a target of another shape than the one they are loaded for."""
    return lambda _target: make(LanguageModel(tiny_model("llama", **(changes or {"hidden_size": 32}))))


REFUSALS: dict[str, tuple[Callable, str]] = {
    "another target": (narrow(head_files.eagle), r"does not fit the tiny one: the tensor fc.weight is \[32, 64\], expected \[64, 128\] "
                                                 r"\(the target's hidden size is 64"),
    "another target, EAGLE-3": (narrow(head_files.eagle3), r"fc.weight is \[32, 96\], expected \[32, 192\]"),
    "another target, Medusa": (narrow(head_files.medusa), r"layers.0.weight is \[32, 32\], expected \[64, 64\]"),
    "a smaller vocabulary": (narrow(head_files.medusa, vocab_size=200), r"lm_head.weight is \[200, 64\], expected \[384, 64\]"),
    "a bias that is not there": (lambda t: without(head_files.eagle(t, bias=False), bias=True), r"fc.bias is missing, expected \[64\]"),
    "a tensor missing": (lambda t: without(head_files.eagle3(t), "norm.weight"), r"norm.weight is missing, expected \[64\]"),
    "heads that lie about their number": (lambda t: without(head_files.eagle3(t), head_dim=8),
                                          r"q_proj.weight is \[64, 128\], expected \[32, 128\]"),
    "a vocabulary map of another length": (lambda t: without(head_files.eagle3(t), draft_vocab_size=99),
                                           r"lm_head.weight is \[100, 64\], expected \[99, 64\]"),
    "a vocabulary map to nowhere": (changed(head_files.eagle3, d2t=torch.full((100,), 384)), "names token 483, the target has 384"),
    "two layers, SGLang's spelling": (changed(head_files.eagle3, **head_files.layer_tensors("additional_layers.0.", 64, 128, head_files._Random(0))),
                                      "no place in a one-layer EAGLE-3 head, first additional_layers.0"),
    "half of HASS's norms": (changed(head_files.eagle, **{"embedding_layernorm.weight": torch.ones(64)}), "expected both or none"),
    "YaRN without its factor": (lambda t: without(head_files.eagle(t), rope_scaling={"rope_type": "yarn"}), "factor = None; expected a positive"),
    "taps that are no list": (lambda t: without(head_files.eagle3(t), eagle_aux_hidden_state_layer_ids="2"), "expected a list of layer numbers"),
    "ReDrafter": (lambda t: ({}, {"rnn_u.weight": torch.ones(4, 4)}), "ReDrafter heads"),
    "two layers": (changed(head_files.eagle3, **head_files.layer_tensors("layers.1.", 64, 128, head_files._Random(0))),
                   "no place in a one-layer EAGLE-3 head, first layers.1"),
    "rotary positions": (lambda t: without(head_files.eagle(t), rope_scaling={"rope_type": "longrope", "factor": 4.0}),
                         "'longrope'; expected default, linear, llama3, yarn"),
    "an activation": (lambda t: without(head_files.eagle(t), hidden_act="gelu"), "'gelu'; expected silu"),
    "a number that is none": (lambda t: without(head_files.eagle(t), num_attention_heads="many"), "num_attention_heads = 'many'"),
    "P-EAGLE": (changed(head_files.eagle3, mask_hidden=torch.ones(1, 192)), "P-EAGLE heads, a method that specviz does not have"),
    "DFlash": (lambda t: ({"num_hidden_layers": 1}, {"fc.weight": torch.ones(64, 192), "hidden_norm.weight": torch.ones(64)}),
               "DFlash or DSpark heads"),
    "Hydra": (lambda t: ({}, {"hydra_mlp.0.weight": torch.ones(4, 4)}), "Hydra heads"),
    "MLP speculator": (lambda t: ({"n_predict": 3}, {"speculator.emb.0.weight": torch.ones(4, 4)}), "MLP speculator heads"),
    "something else": (lambda t: ({}, {"a.weight": torch.ones(4)}), "holds no drafting heads that specviz knows"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_in_one_sentence(lab, tmp_path, case):
    """The sentence names tensor or setting, what was found and what was expected."""
    make, sentence = REFUSALS[case]
    folder = head_files.write(tmp_path / "heads", make(lab.target))
    with pytest.raises(LoadError, match=sentence):
        load_heads(folder, "heads", lab.target, "the tiny one")


class Danger:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_files_run_nothing(lab, tmp_path):
    """A .pt file with code in it is refused and the code does not run; a damaged one and a truncated safetensors file are refused too."""
    folder = head_files.write(tmp_path / "heads", head_files.medusa(lab.target), "heads.pt")
    (folder / "heads.pt").write_bytes(pickle.dumps(Danger(tmp_path / "ran"), protocol=2))
    with pytest.raises(LoadError, match="more than tensors"):
        head_kind(folder, "heads")
    torch.save({"0.0.linear.weight": Danger(tmp_path / "ran")}, folder / "heads.pt")
    with pytest.raises(LoadError, match="more than tensors"):
        head_kind(folder, "heads")
    assert not (tmp_path / "ran").exists()
    (folder / "heads.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(LoadError, match="cannot be read"):
        head_kind(folder, "heads")


@pytest.mark.parametrize("content", ["[1]", "{", "{}"])
def test_a_broken_configuration_never_crashes(lab, tmp_path, content):
    """Whatever config.json holds, the outcome is a sentence."""
    folder = head_files.write(tmp_path / "heads", head_files.eagle3(lab.target))
    (folder / "config.json").write_text(content)
    with pytest.raises(SpecvizError):
        load_heads(folder, "heads", lab.target, "tiny")


# ---- finding them ------------------------------------------------------------------------------------------------------
def silent(_message: str, _fraction: float | None = None) -> None:
    pass


def test_ordinary_models_are_no_heads(tmp_path):
    """A model's folder, a one-layer model, a GGUF file, a card's name and nonsense are left to the reader of models."""
    sources = [save_tiny(tmp_path / "model"), save_tiny(tmp_path / "small", num_hidden_layers=1), tmp_path / "x.gguf", tmp_path / "nothing",
               "default"]
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert [find_heads(str(source), offline=True, progress=silent) for source in sources] == [None] * 5


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_hub_repositories_are_judged_by_their_configuration_first(lab, tmp_path, monkeypatch, file):
    """Weights of an ordinary model are not fetched to find out; pickled files are fetched only where there is nothing else."""
    repos = {"who/heads": head_files.write(tmp_path / "repo", head_files.eagle3(lab.target), file), "who/model": save_tiny(tmp_path / "model")}
    asked = []

    def fetch(source, offline, patterns, progress=None):
        asked.append((source, tuple(patterns)))
        folder = tmp_path / "cache" / source
        folder.mkdir(parents=True, exist_ok=True)
        for path in (path for pattern in patterns for path in repos[source].glob(pattern)):
            shutil.copy(path, folder)
        return folder
    monkeypatch.setattr(head_source, "fetch_files", fetch)
    found = find_heads("who/heads", progress=silent)
    assert (found.kind, found.name) == ("eagle3", "who/heads")
    assert any("*.bin" in patterns for _, patterns in asked) == (file == "pytorch_model.bin")
    assert find_heads("who/model", progress=silent) is None
    assert [patterns for source, patterns in asked if source == "who/model"] == [("config.json",)]


# ---- the self-check ----------------------------------------------------------------------------------------------------
def knowing(lab: Lab, tokens: list[int], kind: str = "eagle3", wrong_every: int = 1000) -> Heads:
    """Heads whose LM head is solved so that the first guess on this text is the target's choice, but for every so many-th place."""
    config, tensors = head_files.eagle3(lab.target, num_own=384) if kind == "eagle3" else head_files.medusa(lab.target)
    tensors |= {"d2t": torch.zeros(384, dtype=torch.long)} if kind == "eagle3" else {}
    heads = checked_heads(tensors, config, "heads", lab.target, "tiny")
    head = EagleHead(heads, lab.target) if kind == "eagle3" else None
    cache = lab.target.new_cache(256)
    output = lab.target.forward([Row(cache.allocate(), tokens)], cache, hidden=head.needs if head else (FINAL,))[0]
    feed = cache.stage(cache.allocate(), len(tokens) - 1)
    wanted = output.logits[1:].argmax(-1)
    wanted[::wrong_every] = (wanted[::wrong_every] + 1) % 384
    with torch.inference_mode():
        if head:
            _, read = head.read([feed], torch.tensor(tokens[1:]), head.fuse(output.hidden[:-1]))
        else:
            state = output.hidden[:-1]
            read = state + F.silu(F.linear(state, tensors["0.0.linear.weight"].double(), tensors["0.0.linear.bias"].double()))
        solved = torch.linalg.lstsq(read, F.one_hot(wanted, 384).double()).solution.T.clone()
    tensors["lm_head.weight" if head else "0.1.weight"] = solved
    return checked_heads(tensors, config, "heads", lab.target, "tiny")


def test_the_self_check_tells_good_heads_from_bad_ones():
    """Heads that agree everywhere pass; random ones get a warning with both shares and the usual causes; a modest promise lowers the bar."""
    lab = Lab()
    prompt, answer = repeating_prompt(9), repeating_prompt(40, period=40, seed=5)
    good, bad = knowing(lab, prompt + answer, wrong_every=50), lab.parts.heads["eagle3"]
    assert measure(good, lab.target, prompt, answer).share == 1 and not checked(good, lab.target, prompt, answer).warning
    warned = checked(bad, lab.target, prompt, answer)
    assert "50% were expected" in warned.warning and "chat template" in warned.warning
    agreement = measure(bad, lab.target, prompt, answer)
    assert agreement.num_places == len(answer) and f"of {len(answer)} first guesses {agreement.share:.0%}" in warned.warning
    modest = Heads(bad.kind, bad.name, bad.tensors, {**bad.facts, "expected_agreement": agreement.share})
    assert not checked(modest, lab.target, prompt, answer).warning
    assert DRAFTERS["eagle3"].note(Parts(lab.target, lab.cache, heads={"eagle3": warned})) == warned.warning


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_the_self_check_compares_the_right_places(kind):
    """What it counts is what the drafter's first guess would be at every place of the answer, one proposal at a time."""
    lab = Lab()
    prompt, answer = repeating_prompt(6), repeating_prompt(12, period=12, seed=5)
    tokens = prompt + answer
    heads = knowing(lab, tokens, kind, wrong_every=3)
    agreement, right = measure(heads, lab.target, prompt, answer), 0
    drafter = DRAFTERS[kind].create(Parts(lab.target, lab.cache, heads={kind: heads}))
    row = lab.cache.allocate()
    choices = lab.target.forward([Row(row, tokens)], lab.cache)[0].logits.argmax(-1).tolist()
    lab.cache.free(row)
    for length in range(len(prompt) - 1, len(tokens) - 1):
        asked = lab.add(tokens[:length], drafter, k=1, max_new_tokens=9, scope=str(length))
        lab.step()
        sequence = asked.sequence
        sequence.tokens[-1] = tokens[length]                 # go on with the text, not with the target's own choice
        lab.step()
        right += asked.steps[-1].nodes[0].id == choices[length]
        lab.engine.cancel(sequence.id)
    assert (agreement.num_agreeing, agreement.num_places) == (right, len(answer)) and 6 <= right <= 10


# ---- from the command line ---------------------------------------------------------------------------------------------
def test_draft_may_name_heads(tmp_path):
    """--draft with a folder of heads opens the target with them: their methods run, the rest says what is missing, the warning is shown."""
    target = save_tiny(tmp_path / "target")
    heads = head_files.write(tmp_path / "my heads", head_files.eagle(LanguageModel(tiny_model("llama"))), "pytorch_model.bin")
    opened = open_engine(Options(target=str(target), draft=str(heads), quantization="none", threads=1, cache_dir=tmp_path), silent)
    missing = {name: method.missing(opened.parts) for name, method in DRAFTERS.items()}
    assert not missing["eagle"] and not missing["eagle2"] and all("--draft" in missing[name] for name in ("eagle3", "medusa", "draft_model"))
    assert opened.config["drafter"] == "my heads" == opened.drafter_name("eagle2") and opened.drafter_name("prompt_lookup") is None
    assert any("my heads: few accepted" in note for note in opened.config["notes"]) and "few accepted" in DRAFTERS["eagle"].note(opened.parts)
    with pytest.raises(LoadError, match=r"my heads does not fit other: the tensor fc.weight is \[64, 128\], expected \[32, 64\]"):
        open_engine(Options(target=str(save_tiny(tmp_path / "other", hidden_size=32)), draft=str(heads), quantization="none", threads=1), silent)


def test_layerskip_checkpoints_are_ordinary_models_with_trained_exits(tmp_path, monkeypatch):
    """A configuration may say where the model was trained to exit; of LayerSkip's repositories it is known. Early exit is then no longer "untrained"."""
    folder = save_tiny(tmp_path / "plain", num_hidden_layers=8)
    opened = open_engine(Options(target=str(folder), quantization="none", threads=1), silent)
    assert opened.parts.trained_exits == () and DRAFTERS["early_exit"].untrained(opened.parts)
    (tmp_path / "facebook").mkdir()
    known = save_tiny(tmp_path / "facebook" / "layerskip-llama3.2-1B", num_hidden_layers=8)
    opened = open_engine(Options(target=str(known), quantization="none", threads=1), silent)
    assert opened.parts.trained_exits == (2,) and not DRAFTERS["early_exit"].untrained(opened.parts)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"trained_exits": [3, 5],', 1))
    assert open_engine(Options(target=str(folder), quantization="none", threads=1), silent).parts.trained_exits == (3, 5)
