"""The load benchmark over real HTTP against scripted servers: counts, failures and the table, never a time limit."""
from __future__ import annotations

import json

import pytest
from remote_server import Script, recorded, serve, wire

from specviz.bench import load
from specviz.errors import InputError

FAST = wire([event for event, _ in recorded("x_draft_chat")])
SLOW = wire([event for event, _ in recorded("x_none_chat")])


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in ("SPECVIZ_REMOTE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_levels_count_what_the_servers_sent(tmp_path, capsys):
    """Two servers, three levels: every prompt is asked once per level and arm, sums are the streams' own, files and flags are written."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "chat", "prompt": "a"}\n{"turns": ["b", "c"]}\nplain text\n', encoding="utf-8")
    with serve(one := Script(FAST, owner="llamacpp")) as fast, serve(two := Script(SLOW, owner="llamacpp")) as slow:
        code = load.main(["--remote", fast, "--baseline", slow, "--prompts", str(prompts), "--concurrency", "1,3", "--json",
                          str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")])
    assert code == 0
    asked = sorted(body["messages"][0]["content"] for body in one.asked)
    assert asked == sorted(["a", "b", "plain text"] * 2 + ["a"]) and len(two.asked) == 7          # one warm-up each
    rows = json.loads((tmp_path / "out.json").read_text())["levels"]
    assert [(row["arm"].split()[0], row["concurrency"]) for row in rows] == [
        ("speculative", 1), ("baseline", 1), ("speculative", 3), ("baseline", 3)]
    assert all(row["num_requests"] == 3 and row["num_failed"] == 0 for row in rows)
    assert rows[0]["acceptance"] == 20 / 25 and rows[0]["tokens_per_step"] == 5 and rows[1]["acceptance"] is None
    printed = capsys.readouterr().out
    assert "80 %" in printed and "--speculative-config" in printed and "×" in printed
    assert "plotly" in (tmp_path / "out.html").read_text(encoding="utf-8")[:5_000_000].lower()


def test_failures_are_counted_and_named(tmp_path, capsys):
    """A server that refuses everything gives a level of failures with their sentence, not a crash and not a speed."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\ntwo\n", encoding="utf-8")
    with serve(Script(status=429, error=b'{"error":{"message":"slow down"}}', owner="vllm")) as address:
        assert load.main(["--remote", address, "--prompts", str(prompts), "--concurrency", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2" in printed and "slow down" in printed and "| –" in printed


@pytest.mark.parametrize("text, words", [("", "holds no prompt"), ('{"prompt"', "line 1"), ('{"turns": []}', "line 1")])
def test_prompts_that_are_none(tmp_path, text, words):
    """A broken prompt file names its line."""
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        load.read_prompts(path)


@pytest.mark.parametrize("argv", [["--concurrency", "0"], ["--concurrency", "a,b"]])
def test_levels_that_are_none(argv):
    """A level is a number from one."""
    assert load.main(argv) == 2
