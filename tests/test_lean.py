"""The lean decoder: the same model as transformers', whatever the family, and rows that do not know of each other."""
import pytest
import torch
from tiny import tiny_model
from torch.nn import functional as F

from specviz.engine import lean
from specviz.engine.attention import one_query_attention, view_length
from specviz.engine.lean import LeanDecoder
from specviz.engine.linear import make_linear

CASES = [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}), ("mistral", {}), ("qwen2", {}),
         ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}), ("qwen3", {}), ("qwen3", {"head_dim": 16}),
         ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
         ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
         ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}})]


class Store:
    """The simplest cache: one sequence, entries appended; `attend` is what the decoder calls."""

    def __init__(self, decoder, capacity=512):
        self.keys, self.values = {}, {}
        self.length, self.capacity = 0, capacity

    def attend(self, layer, query, key, value, scaling, window):
        num_tokens = query.shape[0]
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = (key.new_zeros(key.shape[1], self.capacity, key.shape[2]) for _ in range(2))
        end = self.length + num_tokens
        self.keys[layer][:, self.length:end] = key.transpose(0, 1)
        self.values[layer][:, self.length:end] = value.transpose(0, 1)
        view = view_length(end)
        limit, slots = torch.arange(self.length, end)[:, None], torch.arange(view)
        visible = (slots <= limit) if window is None else (slots <= limit) & (slots > limit - window)
        mask = torch.where(visible, 0.0, float("-inf")).to(query.dtype)
        return one_query_attention(query, self.keys[layer][:, :view], self.values[layer][:, :view], mask, scaling, end)

    def feed(self, decoder, tokens, **options):
        with torch.inference_mode():
            output = decoder(tokens, torch.arange(self.length, self.length + len(tokens)), self.attend, **options)
        self.length += len(tokens)
        return output


def tokens_for(model, count=40):
    return torch.randint(3, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("family, overrides", CASES)
def test_equals_transformers(family, overrides, dtype, bound):
    """Logits and every layer's input are those of the unmodified model, in one pass and token by token."""
    model = tiny_model(family, dtype=dtype, **overrides)
    tokens = tokens_for(model)
    with torch.inference_mode():
        expected = model(tokens[None], output_hidden_states=True)
    assert LeanDecoder.supports(model)
    decoder = LeanDecoder(model)
    layers = range(model.config.num_hidden_layers)
    output = Store(decoder).feed(decoder, tokens, taps=tuple(layers))
    scale = expected.logits.abs().max()
    assert (decoder.logits(output.hidden) - expected.logits[0]).abs().max() <= bound * scale
    for layer in layers:
        assert (output.taps[layer] - expected.hidden_states[layer][0]).abs().max() <= bound * expected.hidden_states[layer].abs().max()
    store = Store(decoder)
    single = torch.cat([decoder.logits(store.feed(decoder, token[None]).hidden) for token in tokens])
    assert (single - expected.logits[0]).abs().max() <= bound * scale


def test_early_exit_runs_the_first_layers_then_the_norm():
    """num_layers=E gives the final norm of layer E's input, taps[E] is that input, and later layers are not touched."""
    model = tiny_model("llama")
    decoder, tokens = LeanDecoder(model), tokens_for(model)
    whole = Store(decoder).feed(decoder, tokens, taps=(2, 3))
    store = Store(decoder)
    early = store.feed(decoder, tokens, num_layers=2, taps=(0, 2))
    assert set(store.keys) == {0, 1} and set(early.taps) == {0, 2} and set(whole.taps) == {2, 3}
    assert torch.equal(early.taps[2], whole.taps[2])
    norm = model.model.norm.weight
    for output, tap in ((early, 2), (whole, 3)):
        assert torch.allclose(output.hidden, F.rms_norm(output.taps[tap], norm.shape, norm, model.config.rms_norm_eps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("precision, head", [("fp32", "fp32"), ("int8", "fp32"), ("int8", "int8")])
def test_chains_are_bitwise_equal_to_single_tokens(precision, head, num_threads):
    """Fed one at a time, in chunks of mixed length or at once, a token gets bitwise the same logits: greedy text cannot depend on drafts.

    hidden sizes as in a real small model, so that the real kernels run; the inner dimension 1536 is where they differ most.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = tiny_model("llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3)
        tokens = tokens_for(model, 90)
        decoder = LeanDecoder(model, precision, head)
        if not decoder.describe()["row_independent"]:
            pytest.skip("no row-independent kernel on this processor")
        reference = None
        for chunks in ([1] * 90, [6] * 15, [1, 2, 3, 4, 5, 6, 7, 8, 16, 13, 25], [90]):
            store = Store(decoder)
            logits = torch.cat([decoder.logits(store.feed(decoder, part).hidden) for part in tokens.split(chunks)])
            reference = logits if reference is None else reference
            assert torch.equal(logits, reference), chunks
    finally:
        torch.set_num_threads(before)


def test_consume_leaves_one_copy():
    """With consume, the model's own linears are gone and the decoder still works; without, the model is untouched."""
    model = tiny_model("qwen3", tie_word_embeddings=True)
    tokens = tokens_for(model)
    kept = LeanDecoder(model)
    expected = kept.logits(Store(kept).feed(kept, tokens).hidden)
    assert sum(isinstance(module, torch.nn.Linear) for module in model.modules()) > 0
    decoder = LeanDecoder(model, consume=True)
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert torch.equal(decoder.logits(Store(decoder).feed(decoder, tokens).hidden), expected)


def test_smoothing_changes_nothing_but_int8_rounding(monkeypatch):
    """Smoothed weights and norms compute the same model: kept in fp32 they equal it; the model given is not changed."""
    model = tiny_model("llama", mlp_bias=True, attention_bias=True)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.2, 3.0, generator=torch.Generator().manual_seed(4))
    tokens = tokens_for(model)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(lean, "make_linear", lambda linear, precision: make_linear(linear, "fp32"))
    decoder = LeanDecoder(model, "int8", calibration=tokens)
    assert not torch.equal(decoder.layers[0].input_norm(torch.ones(1, 64)), LeanDecoder(model, "fp32").layers[0].input_norm(torch.ones(1, 64)))
    logits = decoder.logits(Store(decoder).feed(decoder, tokens).hidden)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rotary_table_grows():
    """Positions far beyond the first table get the model's own angles."""
    model = tiny_model("llama")
    decoder = LeanDecoder(model)
    for positions in (torch.tensor([3, 5]), torch.tensor([5000, 2])):
        cos, sin = decoder.rotary.at(positions)
        expected_cos, expected_sin = model.model.rotary_emb(torch.zeros(1), positions[None])
        half = expected_sin.shape[-1] // 2
        assert torch.equal(cos[:, 0], expected_cos[0]) and torch.equal(sin[:, 0, half:], expected_sin[0, :, half:])
        assert torch.equal(sin[:, 0, :half], -expected_sin[0, :, :half])


@pytest.mark.parametrize("family, overrides", [("gemma2", {}), ("phi", {}), ("smollm3", {}), ("llama", {"hidden_act": "gelu"}), (
    "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}})])
def test_other_models_are_refused(family, overrides):
    """Families and rotary types that this decoder would compute wrongly are not claimed."""
    assert not LeanDecoder.supports(tiny_model(family, **overrides))
