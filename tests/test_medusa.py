"""Medusa's heads against a plain implementation, its trees, and the state that each proposal starts from."""
from __future__ import annotations

import itertools
import math

import head_files
import pytest
import torch
from engine_helpers import Lab, repeating_prompt
from torch.nn import functional as F

from specviz.drafters import DRAFTERS, Parts
from specviz.drafters.checkpoints import checked_heads
from specviz.drafters.medusa import RANK_CHANCES, Medusa, MedusaHeads
from specviz.drafters.static_tree import best_tree, chain_tree, prefix
from specviz.engine.draft import Draft
from specviz.engine.engine import Engine
from specviz.engine.model import FINAL, LanguageModel, Row
from specviz.engine.record import Recorder


def plain_heads(tensors, target: LanguageModel, state: torch.Tensor) -> list[torch.Tensor]:
    """The published forward of every head on one state [H], head by head: log-probabilities [V]."""
    found = []
    for i in itertools.count():
        if f"{i}.0.linear.weight" not in tensors:
            return found
        x = state + F.silu(tensors[f"{i}.0.linear.weight"].double() @ state + tensors[f"{i}.0.linear.bias"].double())
        logits = tensors[f"{i}.1.weight"].double() @ x if f"{i}.1.weight" in tensors else target.head(x[None])[0]
        found.append(logits.log_softmax(-1))


def final_state(lab: Lab, tokens: list[int]) -> torch.Tensor:
    cache = lab.target.new_cache(256)
    return lab.target.forward([Row(cache.allocate(), tokens)], cache, hidden=(FINAL,))[0].hidden[-1]


@pytest.mark.parametrize("lm_heads", [True, False], ids=["own LM heads", "the target's LM head"])
def test_heads_compute_what_the_paper_says(lm_heads):
    """A batch of states through all heads equals the plain implementation, one state and head at a time."""
    lab = Lab()
    config, tensors = head_files.medusa(lab.target, lm_heads=lm_heads)
    heads = MedusaHeads(checked_heads(tensors, config, "heads", lab.target, "target"), lab.target)
    assert heads.num_heads == 4
    states = torch.stack([final_state(lab, repeating_prompt(length)) for length in (5, 9, 12)])
    ours = heads.log_probs(states, 3)
    for row, state in zip(ours, states):
        torch.testing.assert_close(row, torch.stack(plain_heads(tensors, lab.target, state)[:3]), rtol=0, atol=1e-9)


def test_every_draft_comes_from_the_last_committed_token_s_state():
    """Whatever was accepted before, node by node: the heads' guess of its rank and depth behind the last token that the target has read."""
    lab = Lab(token_budget=7)
    _, tensors = head_files.medusa(lab.target, 2)                   # as the Lab's own
    prompt = repeating_prompt(20)
    plain = lab.run(prompt, max_new_tokens=30, scope="plain").tokens
    truth = prompt + plain
    accepted = set()

    class Helped(Medusa):
        """Every other step proposes the true continuation, two or three tokens of it right."""
        def propose(self, sequences, budgets):
            drafts = super().propose(sequences, budgets)
            for i, (sequence, budget) in enumerate(zip(sequences, budgets)):
                tokens = sequence.tokens
                guesses = plain_heads(tensors, lab.target, final_state(lab, tokens[:-1]))
                for node, token in enumerate(drafts[i].tokens):
                    path = drafts[i].path(node)
                    ranks = [guesses[depth].argsort(descending=True).tolist().index(drafts[i].tokens[at]) for depth, at in enumerate(path)]
                    assert tuple(ranks) in self.tree(budget.nodes, budget.depth)
                    score = math.exp(sum(guesses[depth][drafts[i].tokens[at]].item() for depth, at in enumerate(path)))
                    assert drafts[i].scores[node] == pytest.approx(score, rel=1e-6)
                ahead = truth[len(tokens):len(tokens) + min(budget.depth, 3)]
                if len(tokens) % 2 and ahead:
                    drafts[i] = Draft.from_paths([[(t + 5) % 384 for t in ahead], [*ahead[:-1], (ahead[-1] + 1) % 384]]).truncate(budget.nodes)
            return drafts
    result = lab.run(prompt, Helped(lab.parts), k=8, max_new_tokens=30)
    accepted = {sum(node.state == "accepted" for node in step.nodes) for step in result.steps}
    assert result.tokens == plain and {0, 2} <= accepted


def test_the_tree_takes_the_best_paths_first():
    """The default tree of n nodes is the n most likely paths by brute force, parents first, and a prefix of every larger one."""
    chances = RANK_CHANCES[:3]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(10), repeat=depth)]
    worth = {path: math.prod(chances[depth][rank] for depth, rank in enumerate(path)) for path in every}
    largest = best_tree(chances, 64)
    for n in (1, 5, 24, 64):
        tree = best_tree(chances, n)
        assert tree == largest[:n] and len(set(tree)) == n
        assert sorted((worth[path] for path in tree), reverse=True) == pytest.approx(sorted(worth.values(), reverse=True)[:n])
        assert all(path[:-1] in tree[:i] for i, path in enumerate(tree) if len(path) > 1)
    assert prefix(chain_tree(9), 5, 3) == [(0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize("num_heads", [1, 2, 5])
def test_trees_keep_to_budget_and_heads(num_heads):
    """No path is longer than there are heads, and no draft larger than its budget, with default and own trees."""
    lab = Lab()
    config, tensors = head_files.medusa(lab.target, num_heads=num_heads)
    parts = Parts(lab.target, lab.cache, heads={"medusa": checked_heads(tensors, config, "heads", lab.target, "target")})
    for k in (1, 6, 40):
        nodes = lab.run(repeating_prompt(12), Medusa(parts), k=k, max_new_tokens=12, scope=str(k)).steps[1].nodes
        depths = [1]
        for node in nodes[1:]:
            depths.append(1 + (0 if node.parent < 0 else depths[node.parent]))
        assert len(nodes) == min(k, 10) if num_heads == 1 else len(nodes) == k
        assert max(depths) <= num_heads
    chain = lab.run(repeating_prompt(12), Medusa(parts, tree=chain_tree(8)), k=20, max_new_tokens=30, scope="chain").steps[1].nodes
    assert [node.parent for node in chain] == list(range(-1, num_heads - 1))


def test_a_truncated_vocabulary_is_mapped_and_padding_is_left_out():
    """Heads over some of the tokens propose the target's ids of these, and never one beyond the target's tokenizer."""
    lab = Lab()
    target = LanguageModel(lab.target._runner._model, num_tokens=300)
    ids = torch.arange(0, 384, 7)
    new = head_files._Random(4)
    tensors = {"token_map": ids}
    for i in range(3):
        tensors |= {f"blocks.{i}.layers.0.weight": new(64, 64), f"lm_heads.{i}.weight": new(len(ids), 64)}
    parts = Parts(target, lab.cache, heads={"medusa": checked_heads(tensors, {"model_type": "medusa"}, "heads", target, "target")})
    lab.engine = Engine(target, lab.cache, Recorder(str))
    steps = lab.run([token % 300 for token in repeating_prompt(12)], Medusa(parts), k=50, max_new_tokens=20).steps
    drafted = {node.id for step in steps for node in step.nodes}
    assert len(drafted) > 5 and drafted <= {token for token in ids.tolist() if token < 300}
    top = [row for step in steps for record in step.top for row in record.rows if row[3]]
    assert top and all(row[0] in ids.tolist() for row in top)         # the probabilities shown for them stand at the right ids


def test_without_heads_the_reason_names_the_option():
    """As the menu shows it."""
    lab = Lab()
    assert "--draft" in DRAFTERS["medusa"].missing(Parts(lab.target, lab.cache)) and not DRAFTERS["medusa"].missing(lab.parts)


def test_improbable_nodes_are_not_proposed():
    """`floor` drops the nodes below it, with all behind them, and nothing else; the tree says why it is smaller, and the text is the same."""
    def steps(floor):
        lab = Lab()
        result = lab.add(repeating_prompt(11), "medusa", k=20, max_new_tokens=16, options={"floor": floor})
        lab.finish()
        return result.sequence.tokens, [step for step in result.steps if step.kind == "spec"]
    text, free = steps(0.0)
    floor = sorted(node.score for node in free[0].nodes)[len(free[0].nodes) // 2]
    same, fewer = steps(floor)
    assert same == text and free[0].draft_stop == "length" and fewer[0].draft_stop == "confidence"
    assert [(node.id, node.score) for node in fewer[0].nodes] == [(node.id, node.score) for node in free[0].nodes if node.score >= floor]
