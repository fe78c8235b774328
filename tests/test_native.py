"""The compiled kernel: exact products, the plain form's results, bits that depend on a token's own text alone, life without a compiler."""
from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from torch.nn import functional as F

from specviz.engine import linear
from specviz.engine.linear import Int8Linear
from specviz.engine.model import FINAL, LanguageModel, Row
from specviz.engine.native import kernel
from specviz.engine.native.build import NoKernel, load
from specviz.engine.native.kernel import CompiledProduct, Kernel, find_kernel, why_not

needs_kernel = pytest.mark.skipif(find_kernel() is None, reason=f"no compiled kernel here: {why_not()}")
SIZES = dict(hidden_size=128, intermediate_size=192, num_attention_heads=8, num_key_value_heads=2)
FAMILIES = [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}), ("mistral", {}),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}), ("qwen3", {"head_dim": 24}),
            ("llama", {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1}),
            ("llama", {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}),
            ("qwen2", {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 12,
                       "max_window_layers": 1}),
            ("qwen3", {"hidden_size": 160, "head_dim": 128, "num_attention_heads": 5, "num_key_value_heads": 1})]
VARIANTS = {"this processor": ("-march=native",), "without tiles": ("-march=native", "-mno-amx-int8"),
            "AVX VNNI": ("-mavx2", "-mfma", "-mavxvnni"), "AVX2": ("-mavx2", "-mfma"), "any of its kind": (),
            "plain C": ("-march=native", "-DSPECVIZ_PLAIN")}
FLAGS = {"AVX VNNI": "avx_vnni", "AVX2": "fma", "without tiles": "avx2"}


@pytest.fixture(autouse=True)
def restored_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def processor() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def integers(num_out: int, num_in: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-127, 128, (num_out, num_in), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@needs_kernel
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_kernel_adds_exactly(variant, tmp_path):
    """Whatever instructions a machine has: scaled sums are those of exact integers, at the largest values too, and of a row alone."""
    if variant in FLAGS and FLAGS[variant] not in processor().split():
        pytest.skip(f"this processor has no {variant}")
    try:
        ours = Kernel(load(tmp_path, [VARIANTS[variant]]))
    except NoKernel as problem:
        pytest.skip(f"not built: {problem}")
    for num_out, num_in in ((64, 64), (200, 100), (16, 1536)):
        largest = torch.full((num_out, num_in), 127, dtype=torch.int8)
        for weights in (integers(num_out, num_in), largest, -largest):
            rows = integers(37, num_in, 1).float()
            rows[:, 0], rows[3], rows[4] = 127, 127, -127          # so that every row's scale is one
            rows[5] = 0
            scales = torch.rand(num_out, generator=torch.Generator().manual_seed(2)) + 0.5
            product = CompiledProduct(ours, weights, scales)
            expected = (rows.double() @ weights.double().t()).float() * scales
            got = product(rows)
            assert torch.equal(got, expected), (variant, num_out, num_in)
            for start, count in ((0, 1), (3, 2), (5, 3), (7, 6), (11, 17)):
                assert torch.equal(product(rows[start:start + count]), got[start:start + count])


@needs_kernel
def test_int8_layers_are_compiled_and_as_exact_as_torch_s(monkeypatch):
    """The compiled layer and torch's operators differ by last bits only; what is no number stays visible; threads change nothing."""
    layer = torch.nn.Linear(576, 320)
    rows = torch.randn(40, 576, generator=torch.Generator().manual_seed(3))
    ours = Int8Linear(layer.weight, layer.bias)
    monkeypatch.setenv("SPECVIZ_KERNEL", "off")
    theirs = Int8Linear(layer.weight, layer.bias)
    assert ours.compiled is not None and ours.kernel.startswith("compiled, ") and theirs.compiled is None
    if linear._int8_kernel("")[1] == 127:
        close = (ours(rows) - theirs(rows)).abs().amax(1) / theirs(rows).abs().amax(1)
        assert close.max() < 0.01 and close.median() < 1e-5          # a rounding of an activation may tip over
    alone = ours(rows)
    torch.set_num_threads(2)
    assert torch.equal(ours(rows), alone) and torch.equal(ours(rows[7:8]), alone[7:8])
    rows[2, 5] = float("nan")
    rows[3, 5] = float("inf")
    got = ours(rows)
    assert not got[2].isfinite().any() and not got[3].isfinite().any() and torch.equal(got[4:], alone[4:])


@needs_kernel
def test_callers_do_not_disturb_each_other():
    """Several threads that ask for one, two and three workers at the same time, and a forked child, all get the same bits."""
    product, rows = CompiledProduct(find_kernel(), integers(300, 256), torch.rand(300)), torch.randn(24, 256)
    expected, wrong = product(rows), []

    def call(num_threads):
        torch.set_num_threads(num_threads)
        for count in range(1, 25):
            if not torch.equal(product(rows[:count]), expected[:count]):
                wrong.append((num_threads, count))
    callers = [threading.Thread(target=call, args=(count,)) for count in (1, 2, 3, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)
    if hasattr(os, "fork"):
        torch.set_num_threads(2)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(product(rows), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0


def opened(family: str, overrides: dict, **options) -> LanguageModel:
    return LanguageModel(tiny_model(family, **{**SIZES, **overrides}), precision="int8", **options)


def tokens_of(count: int, seed: int = 5) -> list[int]:
    return torch.randint(3, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@needs_kernel
@pytest.mark.parametrize("family, overrides", FAMILIES)
def test_the_stack_computes_the_plain_form(family, overrides):
    """Logits, taps and early exits of the compiled layers equal those of the same int8 layers run one by one with torch, up to rounding."""
    target = opened(family, overrides)
    assert target.linears["layers"] == "compiled", target._runner.decoder.why_not
    prompt = tokens_of(150)

    def outputs():
        cache = target.new_cache(256)
        row = cache.allocate()
        whole = target.forward([Row(row, prompt)], cache, hidden=(0, 2, 3, FINAL))[0]
        cache.keep(row, range(len(prompt)))
        early = target.forward([Row(row, [7, 8, 9], [-1, -1, 1])], cache, num_layers=2)[0]
        return whole.logits, *whole.hidden.chunk(4, -1), early.logits
    ours = outputs()
    stack, target._runner.decoder.stack = target._runner.decoder.stack, None
    theirs = outputs()
    target._runner.decoder.stack = stack
    for mine, plain in zip(ours, theirs, strict=True):
        assert (mine - plain).norm() < 0.02 * plain.norm()
    assert torch.equal(ours[1], theirs[1])
    assert (ours[0].argmax(-1) == theirs[0].argmax(-1)).float().mean() > 0.9


@needs_kernel
@pytest.mark.parametrize("family, overrides", FAMILIES)
def test_bits_depend_on_a_token_s_own_text_alone(family, overrides):
    """One by one, in chunks, as a tree grown over two forwards, beside other rows, after a rollback, on two threads: the same bits."""
    target = opened(family, overrides)
    prompt, cache = tokens_of(70), target.new_cache(256)

    def read(row, parts):
        logits = []
        for part in parts:
            logits.append(target.forward([Row(row, part)], cache)[0].logits)
            cache.keep(row, range(len(part)))
        return torch.cat(logits)
    reference = read(cache.allocate(), [[token] for token in prompt])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cuts in ([70], [1, 2, 3, 4, 5, 6, 7, 17, 25], [64, 6]):
            parts = [part.tolist() for part in torch.tensor(prompt).split(cuts)]
            assert torch.equal(read(cache.allocate(), parts), reference), (threads, cuts)
    row, other = cache.allocate(), cache.allocate()
    read(row, [prompt[:30]])
    first, _ = target.forward([Row(row, [prompt[30], 5, prompt[31], 9], [-1, 0, 0, 1]), Row(other, tokens_of(9, 1))], cache)
    assert torch.equal(first.logits[[0, 2]], reference[30:32])
    second = target.forward([Row(row, [8, prompt[32], 3, prompt[33]], [1, 2, 3, 5])], cache)[0].logits
    assert torch.equal(second[[1, 3]], reference[32:34])
    cache.keep(row, (0, 2, 5))
    assert torch.equal(read(row, [prompt[33:50]]), reference[33:50])
    target.forward([Row(row, [4, 4, 4])], cache, num_layers=1)
    cache.keep(row, ())
    assert torch.equal(read(row, [prompt[50:]]), reference[50:])


@needs_kernel
def test_long_texts_grow_the_cache_and_the_scratch():
    """Past several growths of a row, beyond one block of tokens, the stack still reads what the plain form does."""
    target = opened("llama", {"num_hidden_layers": 1, "max_position_embeddings": 2048})
    cache, prompt = target.new_cache(2048), tokens_of(1100)
    whole = target.forward([Row(cache.allocate(), prompt, num_logits=1)], cache)[0].logits
    row = cache.allocate()
    for part in torch.tensor(prompt).split(300):
        logits = target.forward([Row(row, part.tolist(), num_logits=1)], cache)[0].logits
        cache.keep(row, range(len(part)))
    assert torch.equal(whole, logits)
    target._runner.decoder.stack = None
    plain = target.forward([Row(cache.allocate(), prompt, num_logits=1)], cache)[0].logits
    assert (whole - plain).norm() < 0.02 * plain.norm()


def attend_in_pairs(layer, query, key, value, scaling, window=None, softcap=None):
    query, key, value = (each.transpose(0, 1) for each in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


@needs_kernel
def test_those_who_attend_in_their_own_way_still_can():
    """`run` with a foreign step goes layer by layer and agrees with the compiled stack."""
    target, prompt = opened("llama", {}), tokens_of(20)
    step = type("Step", (), {"attend": staticmethod(attend_in_pairs)})()
    logits, states = target.run(torch.tensor(prompt), torch.arange(20), step, [3, 19], (1, FINAL))
    cache = target.new_cache(64)
    own = target.forward([Row(cache.allocate(), prompt)], cache, hidden=(1, FINAL))[0]
    assert (logits - own.logits[[3, 19]]).norm() < 0.02 * logits.norm() and (states - own.hidden).norm() < 0.02 * states.norm()


def test_without_a_compiler_everything_is_as_before(monkeypatch, tmp_path):
    """No compiler: torch's own operators, decoded layer by layer, and a sentence that says why."""
    monkeypatch.delenv("SPECVIZ_KERNEL", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "default_cache_dir", lambda: tmp_path)
    assert find_kernel() is None and "no C compiler" in why_not()
    target = opened("llama", {})
    assert target._runner.decoder.stack is None and not target.linears["kernel"].startswith("compiled")
    assert "no C compiler" in target.linears["not_compiled"]
    cache = target.new_cache(64)
    assert target.forward([Row(cache.allocate(), tokens_of(9))], cache)[0].logits.isfinite().all()


def test_a_stack_that_fails_its_trial_is_not_used(monkeypatch):
    """Where the compiled layers compute something else than torch, the layers run one by one."""
    if find_kernel() is None:
        pytest.skip("no compiled kernel here")
    from specviz.engine.native.stack import CompiledStack
    right = CompiledStack.run

    def wrong(self, hidden, *arguments):
        normed, tapped = right(self, hidden, *arguments)
        return normed * 1.1, tapped
    monkeypatch.setattr(CompiledStack, "run", wrong)
    target = opened("llama", {})
    assert target.linears["layers"] == "one by one" and "trial" in target.linears["not_compiled"]


@needs_kernel
def test_a_broken_library_is_built_anew(tmp_path):
    """Half a file, a file without its hash, or no file: each start ends with a library that works; a whole one is not compiled again. Those
    of other versions go when nobody has loaded them for months."""
    old, recent = (tmp_path / f"kernel-{name}.so" for name in ("old", "recent"))
    for path in (old, recent):
        path.touch()
        path.with_suffix(".sha256").touch()
    os.utime(old, (0, 0))
    Kernel(load(tmp_path))
    assert not old.exists() and not old.with_suffix(".sha256").exists() and recent.exists()
    recent.unlink(), recent.with_suffix(".sha256").unlink()
    [library] = tmp_path.glob("*.so")
    whole, stamp = library.read_bytes(), library.stat().st_ino
    os.utime(library, (0, 0))
    Kernel(load(tmp_path))
    assert library.stat().st_ino == stamp and library.stat().st_mtime > 0

    def cut():
        library.unlink()                       # not in place: this process has the file mapped
        library.write_bytes(whole[:5000])
    for spoil in (cut, lambda: library.with_suffix(".sha256").unlink(), library.unlink):
        spoil()
        assert Kernel(load(tmp_path)).name == find_kernel().name
        assert len(library.read_bytes()) > 5000 and library.with_suffix(".sha256").is_file()
    assert {path.suffix for path in tmp_path.iterdir()} == {".so", ".sha256"}


def test_a_compiler_that_fails_is_a_sentence(monkeypatch, tmp_path):
    """Its first complaint is passed on; nothing is left in the folder. A folder that cannot be written serves this process."""
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'error: no such flag' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(NoKernel, match="could not build it .*no such flag"):
        load(tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()
    monkeypatch.delenv("CC")
    if find_kernel() is not None:
        (tmp_path / "file").write_text("")
        assert Kernel(load(tmp_path / "file")).name == find_kernel().name


@needs_kernel
@pytest.mark.parametrize("shape, scales", [((64, 30), 64), ((64, 0), 64), ((0, 64), 0), ((64, 64), 60), ((16, 65540), 16)])
def test_sizes_are_checked_before_pointers_are_passed(shape, scales):
    """Layers whose sizes the library is not made for are refused in Python."""
    with pytest.raises(RuntimeError, match="does not fit"):
        CompiledProduct(find_kernel(), torch.zeros(shape, dtype=torch.int8), torch.ones(scales))
