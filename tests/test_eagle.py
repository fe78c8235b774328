"""EAGLE's heads against a plain implementation, its trees against brute force, and its states against the target's own."""
from __future__ import annotations

import math
from dataclasses import replace

import head_files
import pytest
import torch
from engine_helpers import Lab, repeating_prompt
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specviz.drafters import DRAFTERS, Parts
from specviz.drafters.checkpoints import checked_heads
from specviz.drafters.decoder_layer import rope_frequencies
from specviz.drafters.eagle import Eagle, Eagle2, Eagle3
from specviz.drafters.eagle_head import EagleHead
from specviz.drafters.hybrid import Hybrid, hybrid
from specviz.drafters.static_tree import chain_tree
from specviz.drafters.suffix import Suffix
from specviz.drafters.worth import least_node, least_path
from specviz.engine.cache import KVCache
from specviz.engine.draft import ROOT
from specviz.engine.engine import Engine
from specviz.engine.model import FINAL, LanguageModel, Row
from specviz.engine.record import Recorder

METHODS = {"eagle": Eagle, "eagle2": Eagle2, "eagle3": Eagle3}
FLAGS = {"as yuhuili's": {}, "as RedHat's": {"norm_before_residual": True}, "as 3.1": {"norm_output": True},
         "as gpt-oss's": {"norm_before_fc": True}, "norm for each tap": {"fc_norm": True}}


def plain_head(kind: str, tensors, config, target: LanguageModel, tokens: list[int], states: torch.Tensor, carried: list[torch.Tensor] = ()):
    """The published forward over a whole text without cache, tree or batch: (carried states, log-probabilities over the target's ids).

    states: the target's, one for each of the first tokens; behind them come `carried` ones.
    """
    t = {name.replace("midlayer.", "layers.0."): tensor.double() for name, tensor in tensors.items()}

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * t[name + ".weight"]

    def linear(x, name):
        return x @ t[name + ".weight"].T + t.get(name + ".bias", 0)
    embedded = target.embed(torch.tensor(tokens))
    if kind == "eagle3":
        if config.get("norm_before_fc"):
            states = norm(states, "input_norm")
        if config.get("fc_norm"):
            states = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(states.chunk(3, -1))], -1)
        features = torch.cat([linear(states, "fc"), *(each[None] for each in carried)])
        normed = norm(features, "layers.0.hidden_norm")
        residual = normed if config.get("norm_before_residual") else features
        inner = torch.cat([norm(embedded, "layers.0.input_layernorm"), normed], -1)
    else:
        states = torch.cat([states, *(each[None] for each in carried)])
        if "embedding_layernorm.weight" in t:                # HASS
            embedded, states = norm(embedded, "embedding_layernorm"), norm(states, "hidden_states_layernorm")
        residual = inner = linear(torch.cat([embedded, states], -1), "fc")
    num_tokens, heads, groups, size = len(tokens), head_files.NUM_HEADS, head_files.NUM_KV_HEADS, head_files.HEAD_DIM
    query, key, value = (linear(inner, f"layers.0.self_attn.{x}_proj").view(1, num_tokens, -1, size).transpose(1, 2) for x in "qkv")
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=heads, head_dim=size, rope_theta=config["rope_theta"]))
    query, key = apply_rotary_pos_emb(query, key, *rotary(query, torch.arange(num_tokens)[None]))
    key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) / math.sqrt(size)).masked_fill(torch.ones(num_tokens, num_tokens).triu(1).bool(), float("-inf"))
    hidden = residual + linear((scores.softmax(-1) @ value).transpose(1, 2).reshape(num_tokens, -1), "layers.0.self_attn.o_proj")
    x = norm(hidden, "layers.0.post_attention_layernorm")
    hidden = hidden + linear(F.silu(linear(x, "layers.0.mlp.gate_proj")) * linear(x, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj")
    if kind == "eagle":
        return hidden, target.head(hidden).log_softmax(-1)
    read = norm(hidden, "norm")
    own = linear(read, "lm_head").log_softmax(-1)
    probs = torch.full((num_tokens, target.num_tokens), float("-inf"), dtype=torch.float64)
    for i, offset in enumerate(tensors["d2t"].tolist()):
        probs[:, i + offset] = own[:, i]
    return read if config.get("norm_output") else hidden, probs


def checkpoint(kind: str, target: LanguageModel, flags=None):
    config, tensors = head_files.eagle(target) if kind == "eagle" else head_files.eagle3(target)
    new = head_files._Random(9)
    if (flags or {}).get("add_para_norm"):
        tensors["embedding_layernorm.weight"], tensors["hidden_states_layernorm.weight"] = new(64), new(64)
    if (flags or {}).get("norm_before_fc"):
        tensors["input_norm.weight"] = new(3 * 64)
    if (flags or {}).get("fc_norm"):
        tensors.update((f"fc_norm.{i}.weight", new(64)) for i in range(3))
    return config | (flags or {}), tensors


def true_states(lab: Lab, tokens: list[int], needs: tuple[int, ...]) -> torch.Tensor:
    cache = lab.target.new_cache(256)
    return lab.target.forward([Row(cache.allocate(), tokens)], cache, hidden=needs)[0].hidden


@pytest.mark.parametrize("kind, flags", [("eagle", {}), ("eagle", {"add_para_norm": True}), *(("eagle3", flags) for flags in FLAGS.values())],
                         ids=["eagle", "as HASS's", *FLAGS])
def test_a_head_computes_what_its_paper_says(kind, flags):
    """Two forwards through the cache equal the plain implementation over the whole text, for every norm setting that is in use."""
    lab = Lab()
    config, tensors = checkpoint(kind, lab.target, flags)
    head = EagleHead(checked_heads(tensors, config, "heads", lab.target, "target"), lab.target)
    text = repeating_prompt(14, period=14)
    states = true_states(lab, text[:-1], head.needs)
    carried, expected = plain_head(kind, tensors, config, lab.target, text[1:], states)
    cache = KVCache(64)
    row = cache.allocate()
    for start, end in ((0, 8), (8, 13)):
        guess = head.guess([cache.stage(row, end - start)], text[1:][start:end], head.fuse(states[start:end]), range(end - start), 5)
        ours = guess.logits.log_softmax(-1)
        ids = head.token_ids if head.token_ids is not None else torch.arange(lab.target.num_tokens)
        torch.testing.assert_close(ours, expected[start:end, ids], rtol=0, atol=1e-6)     # the rotary angles are float32 in both
        torch.testing.assert_close(guess.carried, carried[start:end], rtol=0, atol=1e-6)
        best = expected[start:end].topk(5, -1)
        assert guess.tokens == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(guess.log_probs).double(), best.values, rtol=0, atol=1e-5)
        cache.keep(row, range(end - start))


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_products_along_paths_with_states_fed_back(name):
    """A node's score is the product of the plain head's probabilities along its path, each deeper token read with the state guessed before it."""
    lab = Lab()
    drafter = lab.drafters[name]
    config, tensors = head_files.eagle(lab.target, 0) if name != "eagle3" else head_files.eagle3(lab.target, 1)
    result = lab.add(repeating_prompt(11), drafter, k=40, max_new_tokens=16)
    lab.step()
    text = list(result.sequence.tokens)
    lab.step()
    nodes = result.steps[-1].nodes
    states = true_states(lab, text[:-1], drafter.needs)
    assert len(nodes) == 40 and max(len(path_of(nodes, i)) for i in range(40)) >= 3
    for i, node in enumerate(nodes):
        tokens, carried, score = text[1:], [], 0.0
        for at in path_of(nodes, i):
            fed_back, guess = plain_head(drafter.kind, tensors, config, lab.target, tokens, states, carried)
            score += guess[-1, nodes[at].id].item()
            carried.append(fed_back[-1])
            tokens = [*tokens, nodes[at].id]
        assert node.score == pytest.approx(math.exp(score), rel=1e-4)
        assert node.q is None and node.score == pytest.approx(math.prod(nodes[at].q_t1 for at in path_of(nodes, i)), rel=1e-6)


def path_of(nodes, i: int) -> list[int]:
    path = []
    while i != ROOT:
        path.append(i)
        i = nodes[i].parent
    return path[::-1]


def test_reranking_takes_the_best_connected_nodes():
    """EAGLE-2's proposal is the best of all paths of two tokens, found by brute force; a smaller budget takes the best of these."""
    lab = Lab()
    heads = lab.parts.heads["eagle"]
    config, tensors = head_files.eagle(lab.target, 0)
    prompt = repeating_prompt(11)
    for budget in (1, 4, 9):
        drafter = Eagle2(lab.parts, depth=2)
        result = lab.add(prompt, drafter, k=budget, scope=str(budget))
        lab.step()
        text = list(result.sequence.tokens)
        lab.step()
        states = true_states(lab, text[:-1], (FINAL,))
        fed_back, first = plain_head("eagle", tensors, config, lab.target, text[1:], states)
        found = {}
        for a in range(lab.target.num_tokens) if budget > 1 else ():
            if first[-1, a] > first[-1].topk(11).values[-1]:
                _, second = plain_head("eagle", tensors, config, lab.target, [*text[1:], a], states, [fed_back[-1]])
                found.update({(a, b): (first[-1, a] + second[-1, b]).item() for b in range(lab.target.num_tokens)})
        found.update({(a,): first[-1, a].item() for a in range(lab.target.num_tokens)})
        best = sorted(found, key=lambda path: -found[path])[:budget]
        nodes = result.steps[-1].nodes
        assert {tuple(nodes[at].id for at in path_of(nodes, i)) for i in range(len(nodes))} == set(best)
        scores = [node.score for node in nodes]
        assert scores == sorted(scores, reverse=True)
    assert heads.warning == ""


def test_trees_keep_to_their_budget():
    """Nodes and depth never exceed the budget; a chain is one branch; the fixed tree has the same shape in every step."""
    lab = Lab()
    prompt = repeating_prompt(11)
    for k in (1, 2, 7, 30, 64):
        for name, method in METHODS.items():
            steps = lab.run(prompt, method(lab.parts), k=k, max_new_tokens=14, scope=f"{name} {k}").steps[1:-1]
            assert all(0 < len(step.nodes) <= k for step in steps)
            if k <= 30:
                assert len(steps[0].nodes) == k
            if name == "eagle":
                full = [tuple(node.parent for node in step.nodes) for step in steps[:4]]
                assert len(set(full)) == 1
    chain = lab.run(prompt, Eagle(lab.parts, tree=chain_tree(5)), k=9, max_new_tokens=20, scope="chain").steps[1]
    assert [node.parent for node in chain.nodes] == [-1, 0, 1, 2, 3]


def guided(method: type[Eagle], parts: Parts, truth: list[int]) -> Eagle:
    """The method with its first guess replaced by the true token, except at some places, so that drafts of several lengths are accepted."""

    class Guided(method):
        def _grow(self, read, carried, states):
            super()._grow(read, carried, states)
            for tree, node in read:
                depth = 0 if node == ROOT else len(tree.paths[node])
                at = len(tree.sequence.tokens) + depth
                children = [i for i, parent in enumerate(tree.parents) if parent == node]
                if at < len(truth) and at % 7 not in (0, 3) and children and all(rank == 0 for rank in (() if node == ROOT else tree.paths[node])):
                    for i in children:
                        if tree.tokens[i] == truth[at]:
                            tree.tokens[i] = tree.tokens[children[0]]
                    tree.tokens[children[0]] = truth[at]
                    tree.scores[children[0]] = 0.0 if node == ROOT else tree.scores[node]
    return Guided(parts)


@pytest.mark.parametrize("name", METHODS)
def test_guessed_states_give_way_to_the_target_s_own(name):
    """Whatever was accepted, cut or read in chunks, the head's cache and the states it will read next are those of a cold pass."""
    lab = Lab(token_budget=7)
    prompt = repeating_prompt(23)
    plain = lab.run(prompt, max_new_tokens=30, scope="plain").tokens
    truth = prompt + plain
    drafter = guided(METHODS[name], lab.parts, truth)
    result = lab.add(prompt, drafter, k=8, max_new_tokens=30)
    bystander = lab.add(repeating_prompt(9, seed=3), drafter, k=5, max_new_tokens=30, scope="other")
    lengths = set()
    while lab.step():
        if result.steps and result.steps[-1].nodes:
            lengths.add(sum(node.state == "accepted" for node in result.steps[-1].nodes))
        state, tokens = result.sequence.drafting, result.sequence.tokens
        if state is None or not state.states:
            continue
        states = true_states(lab, tokens[:state.known], drafter.needs)
        length = drafter._cache.length(state.row)
        torch.testing.assert_close(torch.cat(state.states), states[length:], rtol=0, atol=1e-9)
        if length:
            cold = KVCache(256)
            row = cold.allocate()
            drafter._head.guess([cold.stage(row, length)], tokens[1:length + 1], drafter._head.fuse(states[:length]), ())
            for ours, theirs in zip(stored(drafter._cache, state.row), stored(cold, row)):
                torch.testing.assert_close(ours[:, :length], theirs[:, :length], rtol=0, atol=1e-6)
    assert result.tokens == plain and len(bystander.tokens) == 30
    assert {2, 3} <= lengths and len(result.steps) < 20


def stored(cache: KVCache, row: int) -> list[torch.Tensor]:
    return [*cache._rows[row].keys, *cache._rows[row].values]


@pytest.mark.parametrize("shared", [5, 20, 29])
@pytest.mark.parametrize("name", METHODS)
def test_a_prefix_is_taken_over_as_far_as_states_reach(name, shared):
    """A second prompt that shares part of the first gets the same drafts warm and cold; where states were used up, one token is read anew."""
    warm, cold = Lab(), Lab()
    first = repeating_prompt(20)
    answer = warm.run(first, name, max_new_tokens=12).tokens
    second = (first + answer)[:shared] + [5, 9, 7, 8]
    again, fresh = warm.run(second, name, max_new_tokens=10), cold.run(second, name, max_new_tokens=10)
    assert again.sequence.num_reused in (shared - 1, shared) and fresh.sequence.num_reused == 0
    assert again.tokens == fresh.tokens
    assert [[node.id for node in step.nodes] for step in again.steps] == [[node.id for node in step.nodes] for step in fresh.steps]


def test_another_method_s_prefix_is_read_anew():
    """A head cannot take over a text that it has no states for; a shorter prefix of its own is used instead, if there is one."""
    lab = Lab()
    first = repeating_prompt(20)
    lab.run(first, "plain", max_new_tokens=8)
    assert lab.run(first, "eagle", max_new_tokens=8).sequence.num_reused == 0
    longer = first + lab.run(first, "plain", max_new_tokens=20).tokens
    assert lab.run(longer, "eagle", max_new_tokens=8).sequence.num_reused >= len(first) + 6


def test_a_batch_drafts_what_each_would_draft_alone():
    """Rows of different length and budget in one forward of the head get the drafts that they get alone."""
    prompts = [repeating_prompt(9 + 7 * i, seed=i) for i in range(3)]
    for name in METHODS:
        together, alone = Lab(), Lab()
        results = [together.add(prompt, name, k=3 + 5 * i, max_new_tokens=10, scope=str(i)) for i, prompt in enumerate(prompts)]
        together.finish()
        for i, (prompt, result) in enumerate(zip(prompts, results)):
            single = alone.run(prompt, name, k=3 + 5 * i, max_new_tokens=10, scope=str(i))
            assert [[node.id for node in step.nodes] for step in result.steps] == [[node.id for node in step.nodes] for step in single.steps]


def test_only_tokens_that_the_target_has_are_proposed():
    """With a vocabulary of its own, and a target whose tokenizer ends before its head does, drafts stay among tokens that both have."""
    lab = Lab(likeness=1.0)
    target = LanguageModel(lab.target._runner._model, num_tokens=300)
    config, tensors = head_files.eagle3(lab.target, num_own=100)
    known = set((torch.arange(100) + tensors["d2t"]).tolist())
    assert max(known) >= 300
    parts = Parts(target, lab.cache, heads={"eagle3": checked_heads(tensors, config, "heads", target, "target")})
    lab.engine = Engine(target, lab.cache, Recorder(str))
    result = lab.run([token % 300 for token in repeating_prompt(10)], Eagle3(parts), k=20, max_new_tokens=20)
    drafted = {node.id for step in result.steps for node in step.nodes}
    assert drafted and drafted <= {token for token in known if token < 300}


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "mscale": 0.7,
     "mscale_all_dim": 1.4, "truncate": False}])
def test_rotary_frequencies_are_those_of_transformers(rope):
    """Every rotary type that a head may ask for."""
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=dict(rope), max_position_embeddings=4096)
    theirs = LlamaRotaryEmbedding(config)
    ours, scale = rope_frequencies(rope, 64)
    torch.testing.assert_close(ours, theirs.inv_freq)
    assert scale == pytest.approx(theirs.attention_scaling)


def test_methods_without_heads_say_what_is_missing():
    """No heads, or heads of another kind, is a reason that names --draft; a warning of the self-check becomes the note."""
    lab = Lab()
    for name in METHODS:
        assert "--draft" in DRAFTERS[name].missing(Parts(lab.target, lab.cache))
        assert "--draft" in DRAFTERS[name].missing(Parts(lab.target, lab.cache, heads={"medusa": lab.parts.heads["medusa"]}))
        assert not DRAFTERS[name].missing(lab.parts) and not DRAFTERS[name].note(lab.parts)


@pytest.mark.parametrize("name", METHODS)
def test_cancelling_frees_what_was_stored(name):
    """Waiting, reading its prompt or decoding: a cancelled request leaves no row in the head's cache, and the others go on unchanged."""
    lab = Lab(max_rows=2, token_budget=8, max_parked=0)
    prompts = [repeating_prompt(20, seed=i) for i in range(4)]
    expected = Lab().run(prompts[0], max_new_tokens=24).tokens
    survivor, decoding, waiting = (lab.add(prompt, name) for prompt in prompts[:3])
    while len(decoding.tokens) < 3:
        lab.step()
    for result in (waiting, decoding):
        lab.engine.cancel(result.sequence.id)
    reading = lab.add(prompts[3], name)
    lab.step()
    assert len(lab.drafters[name]._cache) == 2
    lab.engine.cancel(reading.sequence.id)
    assert len(lab.drafters[name]._cache) == 1
    lab.finish()
    assert survivor.tokens == expected and len(lab.drafters[name]._cache) == 0
    assert reading.sequence.drafting is None and waiting.sequence.drafting is None


@pytest.mark.parametrize("kind, second", [("eagle3", "eagle3"), ("eagle", "eagle2"), ("medusa", "medusa")])
def test_heads_take_over_where_a_hybrid_finds_nothing(kind, second):
    """With heads loaded the hybrid drafts with them where no earlier text matches; over two turns the text is plain decoding's."""
    lab, cold = Lab(), Lab()
    assert [part.name for part in hybrid(Parts(lab.target, lab.cache, heads={kind: lab.parts.heads[kind]}))._parts] == ["suffix", "prompt_lookup", second]
    drafter = Hybrid(Suffix(lab.parts, min_match=1), DRAFTERS[second].create(lab.parts))
    first = repeating_prompt(18)
    answer = lab.run(first, drafter, k=6, max_new_tokens=24)
    text = first + answer.tokens + [5, 6, 7, 8] + first[:6]
    again = lab.run(text, drafter, k=6, max_new_tokens=24)
    assert answer.tokens == cold.run(first, max_new_tokens=24).tokens and again.tokens == cold.run(text, max_new_tokens=24, scope="b").tokens
    assert again.sequence.num_reused == len(first) + len(answer.tokens) - 1
    assert {"suffix", second} <= {step.draft_by for result in (answer, again) for step in result.steps}


# ---- trees that end where they no longer pay -----------------------------------------------------------------------------
def test_least_probabilities_follow_from_measured_costs():
    """A cheap pass and a cheap forward let everything grow, dear ones stop early; where nothing was measured nothing is stopped."""
    lab = Lab()

    def least(cost: float | None, slope: float | None) -> tuple[float, float]:
        parts = replace(lab.parts, pass_cost=cost, verify_cost=None if slope is None else lambda m: 1 + slope * (m - 1))
        return least_path(parts), least_node(parts)
    assert least(0.01, 0.0) == (0.03, 0.0) and least(0.2, 0.07) == (0.77, 0.07) and least(3.0, 1.0) == (0.9, 0.9)
    assert least(None, None) == (0.0, 0.0) and least(None, 0.05) == (0.0, 0.05)
    assert {option.name: option.default for option in DRAFTERS["hybrid"].options(replace(lab.parts, preferred="eagle", pass_cost=0.1))}["confidence"] == 0.29


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
def test_improbable_paths_are_neither_deepened_nor_proposed(name):
    """`floor` drops nodes below it and nothing else; with `confidence` no level grows behind one whose best path is less probable; a
    tree that ended so says why, and the text stays plain's."""
    def steps(**options):
        lab = Lab()
        result = lab.add(repeating_prompt(11), lab.drafters[name], k=30, max_new_tokens=16, options=options)
        lab.finish()
        return result.sequence.tokens, [step for step in result.steps if step.kind == "spec"]
    text, free = steps()
    floor = sorted(node.score for node in free[0].nodes)[len(free[0].nodes) // 2]
    same, floored = steps(floor=floor)
    assert same == text and {(node.id, node.score) for node in floored[0].nodes} == {(n.id, n.score) for n in free[0].nodes if n.score >= floor}
    best = max(node.score for node in free[0].nodes)
    same, shallow = steps(confidence=min(0.99, best * 1.01))
    assert same == text and {node.parent for node in shallow[0].nodes} == {ROOT}
    assert floored[0].draft_stop == shallow[0].draft_stop == "confidence"
