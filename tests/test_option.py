"""What a method lets its users set: values are read or refused in a sentence, and no setting changes the text."""
from __future__ import annotations

import pytest
from engine_helpers import Lab, repeating_prompt

from specviz.drafters import DRAFTERS
from specviz.drafters.static_tree import chain_tree, written_tree
from specviz.engine.option import KINDS, Option, settled
from specviz.errors import InputError

OPTIONS = (Option("width", "Width", "whole", 3, low=1, high=8), Option("share", "Share", "number", 0.5, low=0, high=1),
           Option("branches", "Branches", "flag", True), Option("first", "First", "choice", "a", choices=(("a", "A"), ("b", "B"))),
           Option("tree", "Tree", "text", "best", check=written_tree))
# One value of every option beside its default; a method whose options are not all here fails the test below.
OTHERS = {
    "prompt_lookup": [dict(min_match=1, max_match=3), dict(min_match=5)],
    "suffix": [dict(min_match=1, max_match=2, growth=8, min_share=0.0), dict(min_match=4, branches=False)],
    "lookahead": [dict(window=7, ngram=2, guesses=9), dict(window=1, ngram=5, guesses=1)],
    "draft_model": [dict(confidence=0.05)],
    "draft_tree": [dict(width=1, depth=2), dict(width=6, siblings="top")],
    "early_exit": [dict(exit_layer=2), dict(exit_layer=1, confidence=0.2)],
    "exit_adapter": [dict(confidence=0.01)],
    "medusa": [dict(tree="0 1 0.0 0.1 1.0"), dict(tree="chain", depth=2), dict(floor=0.003)],
    "eagle": [dict(tree="0 1 2 0.0 0.0.1"), dict(tree="chain", depth=2)],
    "eagle2": [dict(depth=2, width=3), dict(confidence=0.02, floor=0.003)],
    "eagle3": [dict(depth=1, width=2), dict(depth=9, width=10, confidence=0.05), dict(floor=0.02)],
    "hybrid": [dict(first="prompt_lookup", min_match=1, max_match=2, confidence=0.2), dict(growth=1, min_share=0.6, branches=False)],
}


@pytest.mark.parametrize("given, read", [
    ({}, (3, 0.5, True, "a", "best")), ({"width": "8", "share": "1", "branches": "off", "first": "b", "tree": "0 0.0"}, (8, 1.0, False, "b", "0 0.0")),
    ({"width": 2.0, "branches": False, "tree": " chain "}, (2, 0.5, False, "a", "chain"))])
def test_values_are_read_from_controls_and_from_text(given, read):
    """A slider's float, a command line's words and plain values mean the same; what is not given is the default."""
    assert settled(OPTIONS, given, "Method") == tuple(zip(("width", "share", "branches", "first", "tree"), read))


@pytest.mark.parametrize("given, sentence", [
    ({"width": 0}, "width is 0; expected a whole number from 1 to 8"), ({"width": "2.5"}, "expected a whole number from 1 to 8"),
    ({"width": True}, "expected a whole number"), ({"width": None}, "expected a whole number"), ({"share": "nan"}, "expected a number from 0 to 1"),
    ({"share": float("inf")}, "expected a number"), ({"branches": "maybe"}, "expected on or off"), ({"first": "c"}, "expected one of a, b"),
    ({"tree": "0 1.0"}, "1.0 comes before 1"), ({"tree": "x"}, "'x' is no path"), ({"tree": "12"}, "ranks up to 9"), ({"tree": 7}, "expected a text"),
    ({"depth": 3}, "Method has no option 'depth'; its options are width, share, branches, first, tree")])
def test_anything_else_is_refused_in_a_sentence(given, sentence):
    """It names the option, what was given and what was expected."""
    with pytest.raises(InputError, match=sentence):
        settled(OPTIONS, given, "Method")
    with pytest.raises(InputError, match="it has none"):
        settled((), given, "Plain decoding")


def test_written_trees():
    """Words or paths, with commas or without; equal paths count once."""
    assert written_tree("") is written_tree("best") is None
    assert written_tree("chain")[:3] == chain_tree(3)
    assert written_tree("0, 0.0, 1 0.0") == ((0,), (0, 0), (1,))


def test_declarations_are_complete():
    """Every option has a label, a kind and words of help, a default inside its range, and another value in the tests below."""
    lab = Lab()
    assert OTHERS.keys() | {"plain"} == DRAFTERS.keys()
    for method in DRAFTERS.values():
        declared = method.options(lab.parts)
        assert len({option.name for option in declared}) == len(declared)
        assert {option.name for option in declared} == {name for case in OTHERS.get(method.name, ()) for name in case}
        for option in declared:
            assert option.kind in KINDS and option.label and option.help and option.read(option.default) == option.default


def test_no_setting_changes_the_text():
    """Every method with every option off its default, all in one batch of rows of different length: greedy text is plain's."""
    cases = [(method, options) for method, cases in OTHERS.items() for options in cases]
    lab = Lab(max_rows=len(cases), token_budget=64)
    prompts = [repeating_prompt(9 + 2 * i, period=4 + i % 5, seed=i) for i in range(len(cases))]
    plain = [lab.add(prompt, max_new_tokens=16, scope=f"plain {i}") for i, prompt in enumerate(prompts)]
    lab.finish()
    results = [lab.add(prompt, method, 7, options=options, max_new_tokens=16, scope=f"{i}")
               for i, (prompt, (method, options)) in enumerate(zip(prompts, cases))]
    lab.finish()
    for case, result, expected in zip(cases, results, plain):
        assert result.tokens == expected.tokens, case
    assert {result.sequence.drafter.name for result in results if any(step.nodes for step in result.steps)} >= OTHERS.keys() - {"prompt_lookup", "suffix"}


@pytest.mark.parametrize("method, rule", [("draft_tree", "shared-noise"), ("exit_adapter", "shared-noise"), ("early_exit", "shared-noise"),
                                          ("medusa", "shared-noise"), ("hybrid", "shared-noise")])
def test_shared_noise_keeps_plain_samplings_text_under_any_setting(method, rule):
    """Sampled, whatever is set: token for token plain sampling's text with the same seed."""
    lab = Lab(likeness=0.97)
    prompt = repeating_prompt(15)
    for seed, options in enumerate(OTHERS[method]):
        case = dict(temperature=1.0, seed=seed, rule=rule, max_new_tokens=20)
        plain = lab.run(prompt, "plain", scope=f"plain {seed}", **case)
        assert lab.run(prompt, method, 6, options=options, scope=f"{seed}", **case).tokens == plain.tokens


@pytest.mark.parametrize("before, after", [(dict(min_match=2), dict(min_match=5)), (dict(min_match=5), dict(min_match=1))])
@pytest.mark.parametrize("method", ["suffix", "lookahead", "exit_adapter", "eagle2", "hybrid"])
def test_settings_may_change_from_turn_to_turn(method, before, after):
    """A warm second turn under other settings gives a cold one's tokens; what the first turn kept goes on where it still fits."""
    if method == "lookahead":
        before, after = dict(ngram=2, guesses=2), dict(ngram=4, guesses=1)
    elif method not in ("suffix", "hybrid"):
        before, after = {}, OTHERS[method][0]
    lab, prompt = Lab(), repeating_prompt(18)
    first = lab.run(prompt, method, options=before, max_new_tokens=10)
    second = prompt + first.tokens + [5, 6] + prompt[:5]
    again = lab.run(second, method, options=after, max_new_tokens=10)
    assert again.sequence.num_reused >= len(prompt)
    assert again.tokens == Lab().run(second, max_new_tokens=10).tokens
