"""Draft trees: which nodes are proposed, what they were drawn from, and what the draft model's cache keeps of them."""
from __future__ import annotations

import pytest
import torch
from engine_helpers import Lab, repeating_prompt

from specviz.drafters.draft_tree import ChosenTree, DraftTree, DrawnTree, shape
from specviz.engine.draft import ROOT, Draft
from specviz.engine.model import Row


def grown(tree, model):
    """Expand until nothing is left to expand; `model` maps a path of tokens to a distribution."""
    while tree.frontier:
        rows = []
        for node in tree.frontier:
            path = []
            while node != ROOT:
                path.append(tree.tokens[node])
                node = tree.parents[node]
            rows.append(model(tuple(path[::-1])))
        tree.add(rows)
    return tree.finished()


def table(path, size=12) -> torch.Tensor:
    """A distribution that depends on the whole path."""
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return (3 * torch.randn(size, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 9])
def test_shapes_are_trees_of_the_asked_size(depth, width):
    """Parents come first, levels in order, no node beyond depth or width, as many nodes as asked or as fit; width 1 is a chain."""
    for num_nodes in (0, 1, 4, 9, 30):
        parents = shape(num_nodes, depth, width)
        draft = Draft(tuple(range(len(parents))), parents)
        assert list(draft.depths) == sorted(draft.depths) and max(draft.depths, default=0) <= depth
        assert max((len(draft.children(node)) for node in range(ROOT, len(draft))), default=0) <= width
        real_width = min(width, 8)                       # the table of supposed chances ends there
        assert len(draft) == min(num_nodes, sum(real_width**level for level in range(1, depth + 1)))
        assert width > 1 or draft.is_chain
    assert shape(2, 1, 3) == (ROOT, ROOT) and shape(4, 0, 2) == ()


def test_chosen_trees_hold_the_most_probable_paths():
    """Level by level with pruning gives exactly the best nodes that a search of all paths finds, best first."""
    for num_nodes, depth, width in ((6, 3, 3), (9, 4, 2), (5, 5, 4), (1, 3, 3)):
        tokens, parents, order = grown(tree := ChosenTree(num_nodes, depth, width, 99), table)
        draft = Draft(tokens, parents)
        paths = {(): 1.0}
        level = [()]
        for _ in range(depth):
            following = []
            for path in level:
                top = table(path).topk(width)
                for prob, token in zip(top.values.tolist(), top.indices.tolist()):
                    paths[(*path, token)] = paths[path] * prob
                    following.append((*path, token))
            level = following
        del paths[()]
        best = sorted(paths, key=paths.get, reverse=True)[:num_nodes]
        assert [tuple(tokens[i] for i in draft.path(node)) for node in range(len(draft))] == best
        assert [tree.scores[node] for node in order] == pytest.approx([paths[path] for path in best])


def test_chosen_trees_read_no_more_than_there_is_place_for():
    """The draft model never reads more nodes than its cache can hold, whatever is best."""
    for most in (0, 1, 4):
        tree, fed = ChosenTree(12, 6, 3, most), 0
        while tree.frontier:
            fed += sum(node != ROOT for node in tree.frontier)
            tree.add([table((fed, i)) for i in range(len(tree.frontier))])
        assert fed <= most and len(tree.finished()[0]) > 0


def test_drawn_siblings_carry_what_they_were_drawn_from():
    """Each row is the distribution of its parent without the earlier siblings; no sibling repeats; few possible tokens make few siblings."""
    generator = torch.Generator().manual_seed(0)

    def draw(probs, depth, number):
        return int(torch.multinomial(probs, 1, generator=generator))
    for _ in range(20):
        tree = DrawnTree(shape(9, 3, 3), draw)
        grown(tree, table)
        draft = Draft(tuple(tree.tokens), tuple(tree.parents), torch.stack(tree.probs))
        assert draft.parents == shape(9, 3, 3)
        for parent in range(ROOT, len(draft)):
            left = table(tuple(draft.tokens[i] for i in draft.path(parent)))
            for node in draft.children(parent):
                torch.testing.assert_close(draft.probs[node], left)
                assert left[draft.tokens[node]] > 0
                left = left.clone()
                left[draft.tokens[node]] = 0
                left /= left.sum()
    certain = DrawnTree(shape(9, 2, 3), draw)
    grown(certain, lambda path: torch.tensor([0.0, 1.0, 0.0]))
    assert certain.tokens == [1, 1] and certain.parents == [ROOT, 0]


def test_every_draw_has_noise_of_its_own():
    """No two nodes of a tree ask for the same random number."""
    asked = []
    tree = DrawnTree(shape(20, 4, 3), lambda probs, depth, number: asked.append((depth, number)) or len(asked) % 12)
    grown(tree, lambda path: torch.full((12,), 1 / 12))
    assert len(asked) == len(set(asked)) == 20


def cached_tokens(lab: Lab, drafter: DraftTree, sequence) -> int:
    """How many tokens the draft model has read, after checking that keys and values are those of reading the text anew."""
    cache, row = drafter._cache, sequence.drafting.row
    length = cache.length(row)
    fresh = cache.allocate()
    lab.draft.forward([Row(fresh, sequence.tokens[:length], num_logits=0)], cache)
    for ours, theirs in zip(cache._rows[row].keys + cache._rows[row].values, cache._rows[fresh].keys + cache._rows[fresh].values):
        torch.testing.assert_close(ours[:, :length], theirs[:, :length], rtol=0, atol=1e-9)
    cache.free(fresh)
    return length


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_the_draft_models_cache_follows_the_accepted_path(family, temperature):
    """After every step the row holds exactly the text, without the nodes that were rejected, nor those accepted but never read."""
    lab = Lab(family, likeness=0.97)
    drafter = lab.drafters["draft_tree"]
    result = lab.add(repeating_prompt(20), drafter, k=9, max_new_tokens=40, temperature=temperature, seed=4)
    accepted, behind = set(), set()
    while lab.step():
        if result.sequence.drafting is not None and result.steps[-1].nodes:
            length = cached_tokens(lab, drafter, result.sequence)
            behind.add(len(result.sequence.tokens) - length)
            accepted.add(sum(node.state == "accepted" for node in result.steps[-1].nodes))
            draft_kv = result.steps[-1].kv["drafter"]
            assert draft_kv.after == length and draft_kv.fed >= draft_kv.after - draft_kv.before
    assert len(accepted) > 1 and max(accepted) >= 2
    assert behind >= {1, 2}


def test_trees_branch_and_the_text_is_plain():
    """With a fair draft model the tree has siblings, some of them accepted after the first was rejected; greedy text is plain decoding's."""
    lab = Lab(likeness=0.8)
    prompt = repeating_prompt(20)
    plain = lab.run(prompt, max_new_tokens=60, scope="plain")
    result = lab.run(prompt, "draft_tree", k=8, max_new_tokens=60)
    assert result.tokens == plain.tokens and len(result.steps) < len(plain.steps)
    branched = [step for step in result.steps if len({node.parent for node in step.nodes}) < len(step.nodes)]
    assert branched
    assert any(node.state == "accepted" and any(other.state == "rejected" and other.parent == node.parent for other in step.nodes[:i])
               for step in branched for i, node in enumerate(step.nodes))
    assert all(node.score is not None and node.q is None and node.q_t1 is not None for step in result.steps for node in step.nodes)


def test_a_perfect_draft_model_is_always_accepted():
    """With the target itself as draft model some child of every judged parent is accepted, greedy and sampled."""
    lab = Lab(likeness=1.0)
    for temperature in (0.0, 1.0):
        result = lab.run(repeating_prompt(10), "draft_tree", k=5, max_new_tokens=26, temperature=temperature)
        for step in result.steps[1:]:
            judged = {node.parent for node in step.nodes if node.state in ("accepted", "rejected")}
            assert judged == {node.parent for node in step.nodes if node.state == "accepted"}


def test_a_tree_is_compared_with_a_chain_of_the_same_size():
    """K means nodes for both methods, so that they can be compared on one pair of models."""
    lab = Lab()
    for temperature in (0.0, 1.0):
        runs = [lab.run(repeating_prompt(10), method, k=6, max_new_tokens=30, temperature=temperature, scope=f"{method} {temperature}")
                for method in ("draft_model", "draft_tree")]
        assert [max(len(step.nodes) for step in run.steps) for run in runs] == [6, 6]
