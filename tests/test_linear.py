"""CPU linears: rows that do not know of each other, bounded error, and nothing of the original left behind."""
import pytest
import torch
from tiny import tiny_model
from torch import nn

from specviz.engine.linear import Int8Linear, PackedLinear, PlainLinear, describe, describe_machine, fuse, make_linear, replace_linears
from specviz.errors import InputError

SHAPES = [(64, 32), (960, 576), (576, 1536), (3072, 576), (100, 1500)]       # outputs, inputs


def linear(num_out, num_in, bias=False, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(num_out)
        layer = nn.Linear(num_in, num_out, bias, dtype=dtype)
        layer.weight.data.normal_(0, 0.03)
    return layer.requires_grad_(False)


def rows_for(num_in, count=256):
    rows = torch.randn(max(count, 16), num_in, generator=torch.Generator().manual_seed(0))
    rows[3] *= 8                 # a loud row, an outlier and an empty row must not disturb their neighbours
    rows[5, 7] = 40
    rows[9] = 0
    return rows[:count]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_independent(shape, precision, num_threads):
    """Bitwise: a row alone equals the row among 2 to 16 and among 256 others."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        module = make_linear(linear(*shape, bias=True), precision)
        if not module.row_independent:
            pytest.skip("no row-independent kernel on this processor")
        rows = rows_for(shape[1])
        together = module(rows)
        assert torch.isfinite(together).all()
        assert torch.equal(together[:40], torch.cat([module(row[None]) for row in rows[:40]]))
        for count in range(2, 17):
            assert torch.equal(module(rows[:count]), together[:count]), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-6), ("bf16", 6e-3), ("int8", 2e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_bounded(shape, precision, bound):
    """Relative error against float64, with a bias, also for input of three dimensions."""
    layer = linear(*shape, bias=True)
    rows = torch.randn(2, 8, shape[1], generator=torch.Generator().manual_seed(2))
    expected = torch.nn.functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
    got = make_linear(layer, precision)(rows)
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert (got - expected).norm() <= bound * expected.norm()


def test_int8_error_of_a_row_is_its_own():
    """Each output is off by at most half a step of its weights and of its row's activations, summed over the inner dimension."""
    layer, rows = linear(96, 64), rows_for(64, 16)
    error = (Int8Linear(layer.weight, None)(rows) - rows @ layer.weight.t()).abs()
    weight_step = layer.weight.abs().amax(1) / 63            # 63: the coarser of the two ranges
    row_step = rows.abs().amax(1, keepdim=True) / 127
    bound = rows.abs().sum(1, keepdim=True) * weight_step / 2 + row_step / 2 * layer.weight.abs().sum(1) + 64 * row_step * weight_step / 4
    assert (error <= bound * 1.001 + 1e-6).all()
    assert (error[9] == 0).all()


def test_fuse_is_the_layers_side_by_side():
    """The outputs of a fused layer are those of its parts, biases of some of them included."""
    parts = [linear(64, 32, bias=True), linear(16, 32), linear(16, 32, bias=True)]
    rows = rows_for(32, 8)
    assert torch.allclose(fuse(parts)(rows), torch.cat([part(rows) for part in parts], -1), atol=1e-5)
    assert fuse(parts[1:2]).bias is None


def test_float64_is_left_to_torch():
    """Layers of other dtypes compute as before, bit for bit, whatever precision is asked for."""
    layer = linear(64, 32, bias=True, dtype=torch.float64)
    rows = rows_for(32, 4).double()
    for precision in ("fp32", "int8"):
        module = make_linear(layer, precision)
        assert isinstance(module, PlainLinear) and torch.equal(module(rows), layer(rows))


def test_unknown_precision_is_refused():
    """A misspelt precision is an error that names the ones there are."""
    with pytest.raises(InputError, match="int8"):
        make_linear(linear(64, 32), "int7")


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2", "olmo2"])
def test_replace_linears_in_any_model(family):
    """All linears of a model are swapped and freed, logits stay, and `describe` tells what runs."""
    model = tiny_model(family, tie_word_embeddings=True)
    tokens = torch.arange(3, 23)[None]
    with torch.inference_mode():
        expected = model(tokens).logits
        replace_linears(model, "fp32")
        assert not any(isinstance(module, nn.Linear) for module in model.modules())
        assert (model(tokens).logits - expected).abs().max() < 1e-4
    assert describe(model)["precision"] == "fp32"
    mixed = tiny_model(family, tie_word_embeddings=True)
    replace_linears(mixed, "int8", "fp32")
    with torch.inference_mode():
        assert (mixed(tokens).logits - expected).norm() < 0.2 * expected.norm()
    facts = describe(mixed)
    assert (facts["precision"], facts["head_precision"]) == ("int8", "fp32") and facts["isa"] == describe_machine()["isa"]
    assert facts["row_independent"] is all(module.row_independent for module in mixed.modules()
                                           if isinstance(module, (PackedLinear, Int8Linear, PlainLinear)))


def test_without_the_private_operators_torch_takes_over(monkeypatch):
    """Where packing fails, the layer still computes and says that its rows are not independent."""
    import specviz.engine.linear as module_under_test

    def broken(*_):
        raise RuntimeError("no such operator")
    monkeypatch.setattr(module_under_test, "_pack", broken)
    module_under_test._row_limits.cache_clear()
    layer, rows = linear(64, 32), rows_for(32, 4)
    module = make_linear(layer, "fp32")
    module_under_test._row_limits.cache_clear()
    assert isinstance(module, PlainLinear) and not module.row_independent and torch.equal(module(rows), layer(rows))
