"""The emitted text follows the target's law exactly, for every way of drafting and every lossless rule; each classic fault is caught by
the same proof.

Nothing here is statistical: all random outcomes of drafting, judging and drawing are enumerated in exact fractions on small
vocabularies, over several steps. Every test of a fault asserts both that the honest form is exact and that the faulty one is not.
"""
from fractions import Fraction as F

import pytest
import torch

from fakes import (Choices, EnumeratingNoise, FractionVector, Table, honest, law, one_hot, one_step, speculative_law, target_law, vector,
                   whole_law)
from specviz.drafters.draft_tree import ChosenTree, DrawnTree, shape
from specviz.drafters.lookahead import Pool, Window
from specviz.drafters.suffix import Suffix
from specviz.engine import rules
from specviz.engine.draft import ROOT, Draft
from specviz.engine.drafting import Budget, DraftSettings
from specviz.engine.sampling import SamplingParams
from specviz.engine.sequence import Sequence
from specviz.engine.verify import without
from specviz.museum.faults import SharedU, bonus_after_rejection, corrects_from_p, drops_unlikely, softmax_q, under


def plain(tokens, step, noise):
    return Draft()


class Tree:
    """Draws a full tree level by level: `widths[d]` siblings below each node of depth d.

    replace: siblings are independent draws, duplicates included; else without replacement, each from its conditional distribution.
    stop: called with the draft model's distribution at a node; True ends that branch before anything is drawn from it.
    """

    def __init__(self, model, widths, replace=True, stop=lambda probs: False):
        self.model, self.widths, self.replace, self.stop = model, widths, replace, stop

    def row(self, q, left):
        """The probabilities to report for a token drawn from `left`, where the model said `q`."""
        return left

    def __call__(self, tokens, step, noise):
        nodes, parents, rows = [], [], []
        level = [(ROOT, tuple(tokens))]
        for width in self.widths:
            following = []
            for parent, prefix in level:
                q = left = self.model(prefix)
                if self.stop(q):
                    continue
                for sibling in range(width):
                    token = noise.draw_draft(left, len(prefix), step, sibling)
                    following.append((len(nodes), (*prefix, token)))
                    nodes.append(token)
                    parents.append(parent)
                    rows.append(self.row(q, left))
                    if not self.replace:
                        if left[token] == 1:              # nothing else is possible: a fact of q's support, not of the draw
                            break
                        left = without(left, token)
            level = following
        return Draft(tuple(nodes), tuple(parents), rows or None)


def top(model, widths, probs=False):
    """A tree of the most probable tokens, chosen and not drawn. probs=True is the fault of reporting the model's softmax for them."""
    def propose(tokens, step, noise):
        nodes, parents, rows = [], [], []
        level = [(ROOT, tuple(tokens))]
        for width in widths:
            following = []
            for parent, prefix in level:
                q = model(prefix)
                for token in sorted(range(len(q)), key=lambda token: -q[token])[:width]:
                    if not q[token]:
                        continue
                    following.append((len(nodes), (*prefix, token)))
                    nodes.append(token)
                    parents.append(parent)
                    rows.append(q)
            level = following
        return Draft(tuple(nodes), tuple(parents), rows if probs else None)
    return propose


def mixed(model):
    """A chosen first child (one-hot row) before a drawn one, and below each a drawn child and a chosen one."""
    def propose(tokens, step, noise):
        nodes, parents, rows = [], [], []
        def add(parent, prefix, token, row):
            nodes.append(token)
            parents.append(parent)
            rows.append(row)
            return len(nodes) - 1, (*prefix, token)
        def drawn(parent, prefix, sibling):
            q = model(prefix)
            return add(parent, prefix, noise.draw_draft(q, len(prefix), step, sibling), q)
        def chosen(parent, prefix, token):
            return add(parent, prefix, token, one_hot(token, model.size))
        root = ROOT, tuple(tokens)
        first, second = chosen(*root, len(tokens) % model.size), drawn(*root, 1)
        drawn(*first, 0)
        chosen(*first, 0)
        chosen(*second, 1)
        return Draft(tuple(nodes), tuple(parents), rows)
    return propose


def with_window(propose, size):
    """Prepends nodes that are fed and never judged, a child of the window beside the guesses included."""
    def wrapped(tokens, step, noise):
        draft = propose(tokens, step, noise)
        extra = (len(tokens) % size, 0)
        rows = None if draft.probs is None else [one_hot(token, size) for token in extra] + draft.probs
        return Draft(extra + draft.tokens, (ROOT, 0) + tuple(ROOT if parent == ROOT else parent + 2 for parent in draft.parents), rows,
                     judged=(False, False) + (True,) * len(draft))
    return wrapped


def unjudged_tail(propose):
    """The last node of every draft is drawn, fed, and never judged."""
    def wrapped(tokens, step, noise):
        draft = propose(tokens, step, noise)
        return Draft(draft.tokens, draft.parents, draft.probs, tuple(i < len(draft) - 1 for i in range(len(draft))))
    return wrapped


def cut(propose, num_nodes):
    return lambda tokens, step, noise: propose(tokens, step, noise).truncate(num_nodes)


def sure(q):
    """A stop rule that looks at the distribution alone: its largest probability is low."""
    return max(q) < F(1, 2)


def paths_of(tokens, tree):
    """The prefixes of the nodes that a growing tree wants to expand."""
    for node in tree.frontier:
        path = []
        while node != ROOT:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        yield [*tokens, *path[::-1]]


def drawn_tree(model, num_nodes, depth, width):
    """The draft-tree method's own growth under sampling, on a table model."""
    def propose(tokens, step, noise):
        tree = DrawnTree(shape(num_nodes, depth, width), lambda probs, at, number: noise.draw_draft(probs, len(tokens) + at, step, number))
        while tree.frontier:
            tree.add([model(prefix) for prefix in paths_of(tokens, tree)])
        nodes, parents, _ = tree.finished()
        return Draft(nodes, parents, tree.probs)
    return propose


def chosen_tree(model, num_nodes, depth):
    """The draft-tree method's own growth when greedy; whether its choice is good is no part of the law."""
    def propose(tokens, step, noise):
        tree = ChosenTree(num_nodes, depth, 2, 99)
        while tree.frontier:
            tree.add([torch.tensor([float(p) for p in model(prefix)]) for prefix in paths_of(tokens, tree)])
        nodes, parents, _ = tree.finished()
        return Draft(nodes, parents)
    return propose


class LooksAhead:
    """The lookahead method's own window and pool; the target's first choices at the window's nodes come from the table."""

    def __init__(self, target, size):
        self.target, self.window, self.before = target, Window(2, size, Pool(2)), None

    def __call__(self, tokens, step, noise):
        text = [0, *tokens]                                  # a prompt of one token
        if self.window.fed:
            old, draft = self.before
            rows = [list(self.target([*old, *(draft.tokens[i] for i in draft.path(node))])) for node in self.window.fed]
            self.window.learn([row.index(max(row)) for row in rows], text, len(tokens) - len(old))
        self.before = list(tokens), self.window.draft(text, Budget(2, 2, 9))
        return self.before[1]


class LooksUp:
    """The suffix method itself, and where nothing matches another way of drafting (the hybrid method's split)."""

    def __init__(self, otherwise):
        self.drafter, self.otherwise = Suffix(min_match=1), otherwise
        self.sequence = Sequence(0, [0], SamplingParams(), self.drafter, DraftSettings(), None, frozenset())

    def __call__(self, tokens, step, noise):
        self.sequence.tokens[1:] = tokens
        [draft] = self.drafter.propose([self.sequence], [Budget(2, 2)])
        return draft if len(draft) else self.otherwise(tokens, step, noise)


def drafters(size):
    q = Table("draft", size)
    deep = size == 2
    return {
        "plain": plain,
        "chain": Tree(q, (1, 1, 1) if deep else (1, 1)),
        "independent siblings": Tree(q, (2, 2) if deep else (3,)),
        "siblings then chain": Tree(q, (2, 1)),
        "without replacement": Tree(q, (2, 2) if deep else (3,), replace=False),
        "without replacement, then chain": Tree(q, (2, 1), replace=False),
        "top-k": top(q, (2, 2)),
        "argmax chain": top(q, (1, 1, 1)),
        "duplicates, chosen": lambda tokens, step, noise: Draft((0, 0, 1, 1), (ROOT, ROOT, ROOT, 2)),
        "chosen among drawn": mixed(q),
        "early stop by distribution": Tree(q, (1, 1, 1) if deep else (1, 1), stop=sure),
        "pruned tree": Tree(q, (2, 1), stop=sure),
        "cut by budget": cut(Tree(q, (2, 2) if deep else (3,), replace=False), 3 if deep else 2),
        "depth by position": lambda tokens, step, noise: Tree(q, (1,) * (1 + len(tokens) % 3))(tokens, step, noise),
        "window and guesses": with_window(Tree(q, (1, 1)), size),
        "window and top-k": with_window(top(q, (2, 1)), size),
        "unjudged tail": unjudged_tail(Tree(q, (1, 1))),
        "the target itself": Tree(Table("target", size), (1, 1)),
        "draft tree, drawn": drawn_tree(q, 5 if deep else 3, 3 if deep else 2, 2),
        "draft tree, wide": drawn_tree(q, 4, 2, 3),
        "draft tree, chosen": chosen_tree(q, 4, 3),
    }


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", drafters(2))
def test_every_way_of_drafting_is_lossless(name, size, greedy):
    """Three tokens of text, over one to three steps, have exactly the target's distribution; q and p vary with the prefix."""
    target = Table("target", size, greedy)
    assert speculative_law(target, drafters(size)[name], 3) == target_law(target, 3)


@pytest.mark.parametrize("seed", range(8))
def test_lossless_for_many_models(seed):
    """Chains and both kinds of siblings stay exact whatever p and q are, zeros and equal rows included."""
    target, q = Table(f"p{seed}", 4), Table(f"q{seed}", 4)
    for propose in (Tree(q, (1, 1)), Tree(q, (3,)), Tree(q, (3,), replace=False), top(q, (3, 2)), Tree(target, (2,), replace=False)):
        assert speculative_law(target, propose, 2) == target_law(target, 2)


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", ["lookahead 2", "lookahead 3", "suffix", "hybrid"])
def test_drafters_that_remember_are_lossless(name, greedy):
    """Five tokens over whole runs, in which window, pool and index live on from step to step, have exactly the target's distribution."""
    target, q = Table("target", 2, greedy), Table("draft", 2)
    make = {"lookahead 2": lambda: LooksAhead(target, 2), "lookahead 3": lambda: LooksAhead(target, 3), "suffix": lambda: LooksUp(plain),
            "hybrid": lambda: LooksUp(Tree(q, (1, 1)))}[name]
    drafted = []

    def counted():
        propose = make()
        def wrapped(tokens, step, noise):
            draft = propose(tokens, step, noise)
            drafted.append(draft.num_judged)
            return draft
        return wrapped
    assert whole_law(target, counted, 5) == target_law(target, 5)
    assert any(drafted)


def test_both_enumerations_agree():
    """Enumerating prefix by prefix and enumerating whole runs give one law: steps share nothing but the tokens."""
    target, q = Table("target", 2), Table("draft", 2)
    assert whole_law(target, lambda: Tree(q, (1, 1)), 3) == speculative_law(target, Tree(q, (1, 1)), 3) == target_law(target, 3)


def test_enumeration_finds_a_known_law():
    """The proof's own tool: two dependent draws have the law worked out by hand, impossible outcomes absent."""
    def run(choices: Choices):
        first = choices.choose([F(1, 3), F(0), F(2, 3)])
        return first, choices.choose([F(1, 4), F(3, 4)]) if first else None
    assert law(run) == {(0, None): F(1, 3), (2, 0): F(1, 6), (2, 1): F(1, 2)}


# The faults. P and Q are fixed distributions at every prefix, chosen so that the honest form is seen to be exact on the same numbers.

P, Q = vector(4, 3, 2, 1), vector(1, 2, 3, 4)


def always(probs):
    def model(prefix):
        return probs
    model.size = len(probs)
    return model


def first_token(propose, target=P, verifier=honest, noise=EnumeratingNoise):
    """The law of the first emitted token."""
    emitted = speculative_law(always(target), propose, 1, verifier, noise)
    return FractionVector(emitted.get((token,), 0) for token in range(len(target)))


def test_top_k_children_judged_with_the_real_q():
    """Children taken by rank are point masses; judging them with the model's probabilities changes the law."""
    assert first_token(top(always(Q), (2,))) == P
    assert first_token(top(always(Q), (2,), probs=True)) != P


def test_argmax_drafts_judged_with_softmax_q():
    """A greedy draft is chosen, not drawn: min(1, p/q) with its softmax accepts too much."""
    assert first_token(top(always(Q), (1,))) == P
    assert first_token(softmax_q(top(always(Q), (1,)), always(Q))) == vector(9, 3, 0, 4)


def test_dropping_an_unlikely_drawn_token():
    """A stop that looks at the drawn token biases the text, even where p = q; a stop that looks at the distribution does not."""
    p = vector(9, 1)
    assert first_token(Tree(always(p), (1,)), p) == p
    assert first_token(Tree(always(p), (1,), stop=sure), p) == p
    assert first_token(drops_unlikely(Tree(always(p), (1,)), always(p), F(1, 2)), p) == vector(99, 1)


def test_not_judging_an_unlikely_drawn_token():
    """The same fault in the judged flags: they must not depend on what was drawn."""
    p = vector(9, 1)
    def propose(tokens, step, noise):
        draft = Tree(always(p), (1,))(tokens, step, noise)
        return Draft(draft.tokens, draft.parents, draft.probs, judged=(draft.tokens[0] == 0,))
    assert first_token(unjudged_tail(Tree(always(p), (1,))), p) == p
    assert first_token(propose, p) == vector(99, 1)


@pytest.mark.parametrize("propose", [Tree(always(Q), (1,)), Tree(always(Q), (2,)), top(always(Q), (2,))], ids=["chain", "tree", "top-k"])
def test_correction_drawn_from_p_instead_of_the_residual(propose):
    """The correction must come from what is left of p."""
    assert first_token(propose) == P
    assert first_token(propose, verifier=corrects_from_p) != P


def test_siblings_that_share_one_u():
    """Every sibling needs a number of its own; a chain, with one child per position, cannot show the fault."""
    p, two = vector(5, 3, 2), top(always(vector(3, 2, 1)), (2,))
    assert first_token(two, p) == p
    assert first_token(two, p, noise=SharedU) == FractionVector([F(5, 10), F(1, 10), F(4, 10)])
    p, q = vector(10, 9, 1), vector(9, 4, 7)
    assert first_token(Tree(always(q), (1,)), p, noise=SharedU) == p
    assert first_token(Tree(always(q), (2,)), p) == p
    assert first_token(Tree(always(q), (2,)), p, noise=SharedU) != p


def test_bonus_after_a_rejection():
    """The row behind a rejected token continues a text that does not exist; nothing may be emitted from it."""
    target, q = Table("target", 3), Table("draft", 3)
    assert speculative_law(target, Tree(q, (1, 1)), 3) == target_law(target, 3)
    assert speculative_law(target, Tree(q, (1, 1)), 3, bonus_after_rejection) != target_law(target, 3)


class GridNoise(EnumeratingNoise):
    """u is one of 0, 1/n, ..., (n-1)/n, as real generators have it, so that u = 0 happens. `strict` compares u < prob."""
    n, strict = 4, True

    def accepts(self, prob, position, sibling):
        u = F(self._choices.choose([F(1, self.n)] * self.n), self.n)
        return u < prob if self.strict else u <= prob, u


class LooseGridNoise(GridNoise):
    """The fault: u <= prob, which accepts the impossible when u is 0."""
    strict = False


def test_accepting_a_token_that_is_impossible():
    """p = 0 must never be accepted, whatever u is."""
    p, q = vector(2, 2, 0), vector(1, 2, 1)
    assert first_token(Tree(always(q), (1,)), p, noise=GridNoise) == p
    assert first_token(Tree(always(q), (1,)), p, noise=LooseGridNoise)[2] > 0


class Unconditional(Tree):
    """The fault: siblings drawn without replacement are judged with the q of the first."""

    def row(self, q, left):
        return q


def test_siblings_without_replacement_judged_with_unconditional_q():
    """A second sibling was drawn from what the first left of q; that is the q to judge it with."""
    assert first_token(Tree(always(Q), (2,), replace=False)) == P
    assert first_token(Unconditional(always(Q), (2,), replace=False)) != P


def test_reranking_drawn_siblings():
    """Keeping the more probable of two drawn siblings looks at what was drawn and changes the law; chosen nodes may be reranked."""
    def propose(tokens, step, noise):
        draft = drawn_tree(always(Q), 2, 1, 2)(tokens, step, noise)
        best = max(range(2), key=lambda node: Q[draft.tokens[node]])
        return Draft((draft.tokens[best],), (ROOT,), [draft.probs[best]])
    assert first_token(drawn_tree(always(Q), 2, 1, 2)) == P == first_token(chosen_tree(always(Q), 2, 1))
    assert first_token(propose) != P


class ReplayedNoise(EnumeratingNoise):
    """The fault: draft draws keyed by position alone, so a position that is drafted again gets the same draw."""

    def __init__(self, choices):
        super().__init__(choices)
        self._drawn = {}

    def draw_draft(self, probs, position, step, sibling=0):
        key = (position, sibling, probs)
        if key not in self._drawn:
            self._drawn[key] = super().draw_draft(probs, position, step, sibling)
        return self._drawn[key]


class ReadsUnjudged:
    """The other half of the fault: drafts on only if the token that it drew here before, and that nobody judged, was token 0."""

    def __init__(self, model):
        self.draft = Tree(model, (1, 1))
        self.last = {}

    def __call__(self, tokens, step, noise):
        if self.last.get(len(tokens), 0) != 0:
            return Draft()
        draft = self.draft(tokens, step, noise)
        self.last = {len(tokens) + i: token for i, token in enumerate(draft.tokens)}
        return draft


def test_replayed_draft_noise_with_a_decision_that_reads_it():
    """Noise keyed by position alone lets a decision know the next draw. Each half alone is exact; together they change the law."""
    p, q = vector(9, 1), vector(1, 1)
    exact = target_law(always(p), 2)
    assert whole_law(always(p), lambda: Tree(always(q), (1, 1)), 2, noise=ReplayedNoise) == exact
    assert whole_law(always(p), lambda: ReadsUnjudged(always(q)), 2) == exact
    wrong = whole_law(always(p), lambda: ReadsUnjudged(always(q)), 2, noise=ReplayedNoise)
    assert wrong != exact
    rejected = law(lambda choices: after_rejection(choices, p, q))
    assert rejected[0, True] / (rejected[0, True] + rejected[1, True]) == F(19, 20)


def after_rejection(choices, p, q):
    """The second token, and whether the first step rejected its first guess (then the second guess was never judged)."""
    noise, propose = ReplayedNoise(choices), ReadsUnjudged(always(q))
    first = one_step([], 0, always(p), propose, noise)
    rejected = len(first) == 1
    second = one_step(first, 1, always(p), propose, noise)[0] if rejected else first[1]
    return second, rejected


# The other lossless rules. Faults of block verification are put into the product's own functions.

BLOCK, SHARED = under(rules.block), under(rules.shared)


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", drafters(2))
@pytest.mark.parametrize("verifier", [BLOCK, SHARED], ids=["block", "shared-noise"])
def test_every_way_of_drafting_is_lossless_under_the_other_rules(verifier, name, size, greedy):
    """As for rejection: three tokens of text have exactly the target's distribution, trees, windows and early stops included."""
    target = Table("target", size, greedy)
    assert speculative_law(target, drafters(size)[name], 3, verifier) == target_law(target, 3)


@pytest.mark.parametrize("seed", range(8))
def test_block_is_lossless_for_many_models(seed):
    """Chains of two and three, drawn, chosen and mixed, stay exact whatever p and q are, zeros and equal rows included."""
    target, q = Table(f"p{seed}", 3), Table(f"q{seed}", 3)
    def partly_chosen(tokens, step, noise):
        drawn = noise.draw_draft(q(tokens), len(tokens), step)
        return Draft.chain([drawn, seed % 3], [q(tokens), one_hot(seed % 3, 3)])
    for propose in (Tree(q, (1, 1)), Tree(q, (1, 1, 1)), Tree(target, (1, 1)), top(q, (1, 1, 1)), partly_chosen):
        assert speculative_law(target, propose, 3, BLOCK) == target_law(target, 3)


def mean_length(propose, target, verifier):
    """Expected tokens of the first step."""
    lengths = law(lambda choices: len(one_step([], 0, target, propose, EnumeratingNoise(choices), verifier)))
    return sum(length * weight for length, weight in lengths.items())


def test_block_accepts_no_fewer_tokens_than_rejection():
    """The reason for the rule (arXiv 2403.10444, Theorem 2): never shorter on average, longer for some models; chosen chains are equal."""
    gains = []
    for seed in range(8):
        target, q = Table(f"p{seed}", 3), Table(f"q{seed}", 3)
        gains.append(mean_length(Tree(q, (1, 1, 1)), target, BLOCK) - mean_length(Tree(q, (1, 1, 1)), target, honest))
        assert mean_length(top(q, (1, 1)), target, BLOCK) == mean_length(top(q, (1, 1)), target, honest)
    assert min(gains) >= 0 and max(gains) > 0


FAULTS = {
    "the product is not cut at 1": ("joint_ratio", lambda before, p, q: before * p / q),
    "each token by its own ratio": ("joint_ratio", lambda before, p, q: min(p / q, 1)),
    "the residual of rejection": ("block_residual", lambda p, joint, draft, node: (p - draft.probs[node]).clamp(min=0)),
    "p where the residual is due": ("block_residual", lambda p, joint, draft, node: p * joint),
    "the joint ratio for every block": ("block_prob", lambda mass, joint: joint),
    "the mass without its complement": ("block_prob", lambda mass, joint: min(mass, 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_block_verification(fault, monkeypatch):
    """Each part of the rule is needed: with one part wrong the law of two tokens is another one."""
    target, q = Table("p1", 3), Table("q1", 3)
    exact = target_law(target, 3)
    assert speculative_law(target, Tree(q, (1, 1, 1)), 3, BLOCK) == exact
    monkeypatch.setattr(rules, *FAULTS[fault])
    broken = under(lambda *args: rules.block(args[0], args[1], Lenient(args[2]), args[3]))
    assert speculative_law(target, Tree(q, (1, 1, 1)), 3, broken) != exact


class Lenient:
    """Passes probabilities above 1, which a fault may produce, on as 1."""

    def __init__(self, noise):
        self._noise = noise

    def accepts(self, prob, position, sibling):
        return self._noise.accepts(min(prob, 1), position, sibling)

    def draw(self, probs, position):
        return self._noise.draw(probs, position)


class KeptU(SharedU):
    """u is a number per (position, sibling) that stays the same for the whole run, as keyed noise has it."""

    def accepts(self, prob, position, sibling):
        return super().accepts(prob, (position, sibling), sibling)


def test_block_judges_a_position_again_with_a_number_of_its_own():
    """A position whose block failed is judged anew by the next step. Keyed by position alone it would meet the u that already failed."""
    p, q = vector(1, 1), vector(1, 3)
    exact = target_law(always(p), 3)
    assert whole_law(always(p), lambda: Tree(always(q), (1, 1)), 3, BLOCK, KeptU) == exact
    assert whole_law(always(p), lambda: Tree(always(q), (1, 1)), 3, BLOCK, SharedU) != exact
    p, q = vector(1, 1, 2), vector(1, 2, 1)
    def chain_then_siblings(tokens, step, noise):            # the second is judged by rejection, whose siblings have keys of their own
        return Draft((0, 1), (ROOT, ROOT)) if tokens else Tree(always(q), (1, 1))(tokens, step, noise)
    assert whole_law(always(p), lambda: chain_then_siblings, 2, BLOCK, KeptU) == target_law(always(p), 2)
