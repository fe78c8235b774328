"""Drafts as trees: how they are built, cut and walked."""
import pytest
import torch

from specviz.engine.draft import EMPTY, ROOT, Draft


def test_chain():
    """A chain is a tree with one branch; an empty one is plain decoding."""
    draft = Draft.chain([5, 6, 7], torch.eye(3), stop="length")
    assert draft.parents == (ROOT, 0, 1) and draft.is_chain and draft.depths == (1, 2, 3) and draft.stop == "length" and len(draft) == 3
    assert len(EMPTY) == 0 and EMPTY.is_chain and EMPTY.children(ROOT) == [] and Draft.chain([]) == EMPTY


def test_from_paths_merges_prefixes():
    """Common prefixes become one node, order of trust is order of trial, and repeated or shorter paths add nothing."""
    draft = Draft.from_paths([[5, 6], [5, 7], [8], [5, 6, 9], [5]])
    assert draft.tokens == (5, 6, 7, 8, 9) and draft.parents == (ROOT, 0, 0, ROOT, 1)
    assert draft.children(ROOT) == [0, 3] and draft.children(0) == [1, 2] and draft.children(1) == [4] and draft.children(4) == []
    assert draft.depths == (1, 2, 2, 1, 3) and not draft.is_chain and draft.probs is None
    assert Draft.from_paths([]) == EMPTY and Draft.from_paths([[1, 2, 3]]).is_chain


def test_from_paths_keeps_equal_tokens_of_different_parents_apart():
    """The same token under two parents is two nodes."""
    draft = Draft.from_paths([[1, 1], [2, 1]])
    assert draft.tokens == (1, 1, 2, 1) and draft.parents == (ROOT, 0, ROOT, 2)


def test_path():
    """A node's path runs from the root's child down to it, and its length is its depth."""
    draft = Draft.from_paths([[5, 6, 9], [5, 7], [8]])
    assert draft.path(ROOT) == [] and draft.path(2) == [0, 1, 2] and draft.path(3) == [0, 3]
    assert [len(draft.path(i)) for i in range(len(draft))] == list(draft.depths)


def test_children_leave_out_what_is_not_judged():
    """Window nodes are nobody's judged children, wherever they hang, and do not count as judged."""
    draft = Draft((1, 2, 3, 4), (ROOT, ROOT, 1, 1), judged=(False, True, False, True))
    assert draft.children(ROOT) == [1] and draft.children(1) == [3] and draft.num_judged == 2
    assert Draft((1, 2), (ROOT, 0)).num_judged == 2


def test_truncate_keeps_a_tree():
    """The first nodes of a draft are a draft, with their rows, flags and scores; the reason for the end is the cut's."""
    draft = Draft((1, 2, 3, 4), (ROOT, ROOT, 0, 1), torch.eye(4), (True, False, True, False), (0.4, 0.3, 0.2, 0.1), torch.ones(4, 4),
                  "length")
    for n in range(1, 4):
        short = draft.truncate(n)
        assert short.tokens == draft.tokens[:n] and short.parents == draft.parents[:n] and short.judged == draft.judged[:n]
        assert short.scores == draft.scores[:n] and torch.equal(short.probs, draft.probs[:n]) and short.stop == "budget"
        assert torch.equal(short.shown_probs, draft.shown_probs[:n])
    assert draft.truncate(4) is draft and draft.truncate(9) is draft and draft.truncate(2, "eos").stop == "eos"


@pytest.mark.parametrize("num_nodes", [0, -1])
def test_truncate_to_nothing(num_nodes):
    """No room means a draft without nodes, with no rows of probabilities left over."""
    short = Draft.chain([1, 2], torch.eye(2)).truncate(num_nodes)
    assert len(short) == 0 and len(short.probs) == 0 and short.children(ROOT) == [] and short.is_chain


@pytest.mark.parametrize("arguments", [
    {"tokens": (1, 2), "parents": (ROOT,)}, {"tokens": (1,), "parents": (0,)}, {"tokens": (1, 2), "parents": (1, ROOT)},
    {"tokens": (1,), "parents": (-2,)}, {"tokens": (1,), "parents": (ROOT,), "judged": ()},
    {"tokens": (1,), "parents": (ROOT,), "probs": torch.eye(2)}])
def test_a_draft_that_is_no_tree_is_refused(arguments):
    """Parents come first, and every node has its parent, row and flag."""
    with pytest.raises(AssertionError):
        Draft(**arguments)
