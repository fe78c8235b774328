"""Streams of other engines become step records that add up to the server's own totals; what is not told stays unknown."""
from __future__ import annotations

import json
import random

import pytest
from remote_server import recorded

from specviz import metrics
from specviz.remote.chunks import ChunkReader
from specviz.remote.reading import RemoteError
from specviz.remote.sse import SseParser
from specviz.remote.timings import TimingsReader
from specviz.trace import Trace, dumps, loads


def read(name, reader):
    live = []
    for event, arrival_s in recorded(name):
        live += reader.feed(event, arrival_s)
    return live, reader.finish()


def counts(ending):
    decode = ending.steps[1:]
    return (sum(token.num_tokens for step in ending.steps for token in step.emitted), sum(step.num_drafted or 0 for step in decode),
            sum(step.num_accepted or 0 for step in decode))


# name, reader, tokens, drafted, accepted as the servers themselves counted them, accepted per step, reason
STREAMS = [
    ("v_ngram_chat", ChunkReader, 10, 8, 6, [0, 0, 3, 0, 3], "eos"), ("v_draft_chat", ChunkReader, 29, 24, 24, [4] * 6, "eos"),
    ("own_chat", ChunkReader, 10, 12, 6, [4, 0, 2], "eos"), ("x_draft_chat", TimingsReader, 26, 25, 20, [5, 5, 5, 5, 0], "eos"),
    ("x_synth_chat", TimingsReader, 26, 50, 15, [1, 2, 4, 0, 0, 1, 1, 3, 3, 0], "eos"),
    ("x_ngram_chat", TimingsReader, 13, 8, 0, [0] * 12, "eos"), ("x_none_chat", TimingsReader, 13, 0, 0, [0] * 12, "eos"),
    ("x_draft_utf8_native", TimingsReader, 14, 10, 10, [5, 5, 0], "length"), ("x_draft_logprobs", TimingsReader, 9, 6, 6, [5, 1], "length")]


@pytest.mark.parametrize("name, reader, tokens, drafted, accepted, per_step, reason", STREAMS, ids=[row[0] for row in STREAMS])
def test_steps_add_up_to_the_servers_own_totals(name, reader, tokens, drafted, accepted, per_step, reason):
    """Recorded streams of live servers: every step exact, sums equal to the totals in the server's last event, and a trace that opens."""
    _, ending = read(name, reader())
    assert counts(ending) == (tokens, drafted, accepted) and ending.reason == reason
    assert [step.num_accepted for step in ending.steps[1:]] == per_step
    assert all(step.source == "exact" for step in ending.steps[1:]) and ending.steps[0].kind == "prefill"
    stats = metrics.summarize(Trace({}, ending.steps))
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_tokens) == (drafted, accepted, tokens)
    record = (ending.server.get("metrics") or {}).get("speculative_decoding") or {}
    if "num_spec_steps" in record and "mean_acceptance_length" in record:
        assert stats.num_spec_steps == record["num_spec_steps"] and stats.mean_acceptance_length == record["mean_acceptance_length"]
    reopened = loads(dumps(Trace({"remote": {}}, ending.steps)))
    assert [step.num_accepted for step in reopened.steps] == [step.num_accepted for step in ending.steps]


def test_drafts_rejected_whole_count_though_their_steps_are_unknown():
    """vLLM with n-gram drafts, recorded: four of 19 chunks of one token were drafts rejected whole, and nothing says which. These steps stay
    unknown, with a sentence, and every figure of drafts is the server's own, also in a trace that was saved and opened again."""
    live, ending = read("v_ngram_mixed", ChunkReader())
    record = ending.server["metrics"]["speculative_decoding"]
    assert record["per_step_accepted"] == [3, 0, 0, 0, 0] and [step.kind for step in ending.steps].count("unknown") == 19
    assert len(live) == len(ending.steps) and "which ones is not told" in ending.notes[0]
    stats = metrics.summarize(loads(dumps(Trace({"remote": {"counted": ending.counted}}, ending.steps))))
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "draft_acceptance_rate", "mean_acceptance_length"):
        assert getattr(stats, name) == record[name]
    assert list(stats.per_step_accepted) == record["per_step_accepted"] and list(stats.per_step_drafted) == record["per_step_drafted"]
    assert list(stats.acceptance_histogram) == record["acceptance_histogram"][:4] and stats.tokens_per_step == 25 / 22
    for nonsense in (5, [5], [[1]], [[1, 2]], [[-1, -1]], [[0, 0]], [["a", 0]], [[2, True, 3]]):
        assert metrics.summarize(Trace({"remote": {"counted": nonsense}}, ending.steps)).num_draft_tokens == 4


@pytest.mark.parametrize("sizes, accepted, expected", [
    ([1, 1, 4, 1, 1], [0, 0, 3], [0, 0, 3, "", ""]), ([1, 1, 4, 1, 1], [3, 0, 0], ["", "", 3, 0, 0]),
    ([1, 4, 1, 1, 2], [3, 0, 1], ["", 3, None, None, 1]), ([1, 2, 1, 3], [0, 1, 0, 2], [0, 1, 0, 2]),
    ([2, 1, 1], [1, 4], [1, "", 4]), ([4, 2, 1], [1, 3], "merged"), ([2, 1, 2], [1, 0, 0, 1], "merged"), ([1, 1], [1], ["", 1]),
    ([3, 1, 2], [2, 0], "merged")])
def test_between_two_hits_steps_are_known_where_all_or_none_were_drafts(sizes, accepted, expected):
    """Entries above zero belong to chunks of several tokens, in order; between two of these single tokens were all drafts, none ("": plain),
    or cannot be told apart (None). A last step may be cut down. What does not fit was merged on the way."""
    reader = ChunkReader()
    for size in (1, *sizes):
        reader.feed({"choices": [{"delta": {"content": "x" * size}, "token_ids": list(range(size))}]}, 0.1)
    record = {"per_step_accepted": accepted, "per_step_drafted": [4] * len(accepted)}
    reader.feed({"choices": [], "metrics": {"speculative_decoding": record}}, 0.2)
    steps = reader.finish().steps[1:]
    if expected == "merged":
        assert [step.source for step in steps] == ["aggregate"]
        return
    assert [step.num_accepted if step.kind != "plain" else "" for step in steps] == expected
    assert all(step.num_drafted == {"plain": 0, "spec": 4, "unknown": None}[step.kind] for step in steps)


def test_while_it_runs_nothing_is_claimed_that_only_the_end_tells():
    """vLLM's chunks: a chunk of one token may be a plain step or a draft rejected whole, so live it is unknown, and nothing is drafted."""
    live, ending = read("v_ngram_chat", ChunkReader())
    assert [step.kind for step in live] == ["prefill", "unknown", "unknown", "spec", "unknown", "spec"]
    assert all(step.num_drafted is None and step.source == "inferred" for step in live)
    assert [step.kind for step in ending.steps] == ["prefill", "plain", "plain", "spec", "plain", "spec"]


def test_text_of_each_token_where_the_server_tells_it():
    """With log-probabilities the drafts of a step are told apart from the target's own token; without, a step is one block."""
    _, ending = read("v_draft_chat", ChunkReader())
    assert [(token.text, token.origin) for token in ending.steps[1].emitted] == [
        (" sea", "draft"), (" is", "draft"), (" a", "draft"), (" vast", "draft"), (",", "bonus")]
    assert "".join(token.text for step in ending.steps for token in step.emitted).endswith(" mystery.")
    _, merged = read("own_chat", ChunkReader())
    assert [(token.text, token.num_tokens) for token in merged.steps[1].emitted] == [(" b c d e f", 5)]


def test_without_timings_steps_are_called_guesses():
    """llama.cpp without timings_per_token: steps from the moments of arrival, marked inferred, with the server's totals in a note."""
    _, ending = read("x_draft_no_timings", TimingsReader())
    assert {step.source for step in ending.steps} == {"inferred"} and len(ending.steps) == 3
    assert all(step.num_drafted is None for step in ending.steps) and "6 of 6" in ending.notes[1]


@pytest.mark.parametrize("merge", [(1, 2), (3, 4, 5)])
def test_chunks_merged_on_the_way_degrade_to_totals(merge):
    """A reader that lags or a gateway merges chunks: the borders are gone, which is noticed and said; totals stay the server's."""
    events = [event for event, _ in recorded("v_draft_chat")]
    full = [i for i, event in enumerate(events) if event["choices"] and event["choices"][0].get("token_ids")]
    first, *others = [full[i] for i in merge]
    for i in others:
        events[first]["choices"][0]["token_ids"] += events[i]["choices"][0]["token_ids"]
        events[first]["choices"][0]["delta"]["content"] += events[i]["choices"][0]["delta"]["content"]
    events[first]["usage"] = events[others[-1]]["usage"]
    reader = ChunkReader()
    for i, event in enumerate(events):
        if i not in others:
            reader.feed(event, float(i))
    ending = reader.finish()
    assert [step.source for step in ending.steps[1:]] == ["aggregate"] and "merged" in ending.notes[0]
    assert counts(ending) == (29, 24, 24)
    stats = metrics.summarize(Trace({}, ending.steps))
    assert stats.tokens_per_step is None and stats.per_step_accepted == () and stats.draft_acceptance_rate == 1.0


def test_a_server_that_counts_nothing_gives_text_and_a_reason():
    """No usage, no ids, no log-probabilities: the text is there, no step is invented, and a sentence says why there is no step view."""
    reader = ChunkReader()
    for text in ("Hel", "lo", "!"):
        reader.feed({"choices": [{"delta": {"content": text}}]}, 0.1)
    reader.feed({"choices": [{"delta": {}, "finish_reason": "length"}]}, 0.2)
    ending = reader.finish()
    assert "".join(token.text for step in ending.steps for token in step.emitted) == "Hello!" and ending.reason == "length"
    assert "no step view" in ending.notes[0] and ending.steps[-1].num_drafted is None


def test_totals_alone_stay_totals():
    """SGLang's last chunk: totals without order; steps come from chunks and are inferred, the server's own words are kept beside them."""
    reader, used = ChunkReader(), 0
    for i, count in enumerate((1, 3, 1, 4)):
        used += count
        reader.feed({"choices": [{"delta": {"content": " x" * count}}], "usage": {"completion_tokens": used, "prompt_tokens": 7}}, 0.1 * i)
    details = {"spec_accept_length": 2.25, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 9, "spec_verify_ct": 4}
    reader.feed({"choices": [{"delta": {}, "finish_reason": "stop"}], "sglext": {"spec_tokens_details": details}}, 0.5)
    ending = reader.finish()
    assert [sum(token.num_tokens for token in step.emitted) for step in ending.steps] == [1, 3, 1, 4]
    assert {step.source for step in ending.steps} == {"inferred"} and ending.server["sglext"]["spec_tokens_details"] == details


@pytest.mark.parametrize("reader", [ChunkReader, TimingsReader])
@pytest.mark.parametrize("event", [{"error": "Unauthorized"}, {"error": {"message": "out of memory"}}, {"object": "error", "message": "bad"}])
def test_an_error_inside_the_stream_is_an_error(reader, event):
    """The status was 200 long ago; an error event in the middle is still an error, in any of the shapes that servers use."""
    with pytest.raises(RemoteError, match="Unauthorized|out of memory|bad"):
        reader().feed(event, 0.1)


@pytest.mark.parametrize("event", [{}, {"choices": None}, {"choices": [None]}, {"choices": [{}]}, {"choices": [{"delta": None}]}, {"usage": 3},
                                   {"choices": [{"delta": {"content": 5}, "token_ids": "x", "logprobs": [1]}]}, {"timings": {"predicted_n": 0}},
                                   {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [None]}}]}])
def test_odd_events_do_no_harm(event):
    """Servers are not trusted to keep to any schema: an event of another shape changes nothing or adds its text."""
    for reader in (ChunkReader(), TimingsReader()):
        reader.feed(event, 0.1)
        assert all(step.num_drafted is None for step in reader.finish().steps)


def test_events_survive_any_cut():
    """Bytes cut anywhere, comments, CRLF, data without a space, several lines of data: the same events in the same order."""
    events = [{"text": "naïve 🦊"}, {"text": "a\nb"}, {"n": 1}]
    stream = (": ping\r\n\r\n" + f"event: x\r\ndata: {json.dumps(events[0], ensure_ascii=False)}\r\n\r\n"
              + f"data:{json.dumps(events[1])}\n\n" + "retry: 3\n\n" + 'data: {"n":\ndata: 1}\n\n').encode()
    generator = random.Random(0)
    for _ in range(60):
        cuts = sorted(generator.sample(range(1, len(stream)), 6))
        parser, got = SseParser(), []
        for begin, end in zip([0, *cuts], [*cuts, len(stream)]):
            got += parser.feed(stream[begin:end])
        assert [json.loads(text) for text in got + parser.finish()] == events
