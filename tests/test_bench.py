"""The benchmark on systems that are made up or tiny: prompts, order of runs, figures, factors, report, and the process around a system."""
from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import save_tiny

from specviz.bench import report, suite
from specviz.bench.analysis import Run, factors, figure, from_json, rows, speed_ups
from specviz.bench.ours import Ours, parse_arm
from specviz.bench.peer_transformers import Transformers
from specviz.bench.prompts import BUNDLED, BenchPrompt, read, some
from specviz.bench.sample import Sample
from specviz.bench.worker import Worker, WorkerError
from specviz.errors import InputError
from specviz.options import Options

PROMPTS = [BenchPrompt("copy", "a", 0), BenchPrompt("copy", "b", 1), BenchPrompt("story", "<c>", 0)]


class Stopwatch:
    """A system of known speed on a machine that slows down by a thousandth with every run. speeds: tokens/s of each arm at first."""
    slowness = [1.0]

    def __init__(self, name: str, **speeds: float) -> None:
        self.name, self.arms, self._speeds, self.facts = name, tuple(speeds), speeds, {"name": name, "quantization": "none", "threads": 1}
        self.calls: list[tuple[str, int]] = []

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def run(self, arm: str, prompt: list[int], num_tokens: int) -> Sample:
        self.calls.append((arm, num_tokens))
        self.slowness[0] *= 1.001
        seconds = (num_tokens - 1) / self._speeds[arm] * self.slowness[0]
        return Sample(num_tokens - 1, seconds, 0.1, num_steps=(num_tokens - 1) // (1 if arm == "plain" else 3) or 1, num_drafted=20, num_accepted=5, draft_s=seconds / 4,
                      verify_s=seconds / 2, other_s=seconds / 4, tokens=tuple(range(num_tokens)))

    def memory_bytes(self) -> int:
        return 2 ** 28


def measured(**kwargs) -> tuple[suite.Bench, list[Stopwatch]]:
    systems = [Stopwatch(report.OURS[1], plain=30.0, auto=60.0), Stopwatch(report.OURS[0], plain=15.0, auto=25.0),
               Stopwatch(report.REFERENCE, plain=10.0), Stopwatch("llama.cpp", plain=80.0)]
    bench = suite.Bench(systems, PROMPTS, 31, say=lambda line: None)
    bench.warm_up()
    bench.measure(**{"num_rounds": 2, "until": 1e9, "clock": lambda: 0.0} | kwargs)
    return bench, systems


def test_the_bundled_prompts_are_eight_categories_of_ten():
    """Every line can be read, no text occurs twice, and a limit takes the same number of each category."""
    prompts = read(BUNDLED)
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 80
    assert len({prompt.category for prompt in prompts}) == 8 and len(some(prompts, 2)) == 16
    assert {prompt.category for prompt in some(prompts, 1, ["code", "story"])} == {"code", "story"}
    with pytest.raises(InputError, match="cooking"):
        some(prompts, 1, ["cooking"])


def test_other_prompt_files(tmp_path):
    """Spec-Bench's lines are read by their first turn; a broken line is named."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"category": "mt_bench", "turns": ["First", "Second"], "question_id": 81}\n\n{"category": "qa", "prompt": "Why?"}\n')
    assert read(file) == [BenchPrompt("mt_bench", "First", 0), BenchPrompt("qa", "Why?", 0)]
    for line in ('{"category": "qa"}', '{"category": "qa", "turns": []}', "[1]", "nonsense", '{"prompt": "x"}'):
        file.write_text('{"category": "qa", "prompt": "Why?"}\n' + line)
        with pytest.raises(InputError, match="line 2"):
            read(file)


def test_runs_are_interleaved_and_warm_up_does_not_count():
    """Each prompt is answered by every system before the next prompt begins, in changing order; warm-up runs are short and leave no sample."""
    bench, systems = measured()
    assert all(system.calls[:len(system.arms)] == [(arm, 8) for arm in system.arms] for system in systems)
    assert all(run.sample.num_decoded == 30 for run in bench.runs) and len(bench.runs) == 2 * 3 * 6
    blocks = [bench.runs[i:i + 6] for i in range(0, len(bench.runs), 6)]
    assert all(len({run.key for run in block}) == 6 and len({(run.prompt, run.round) for run in block}) == 1 for block in blocks)
    assert len({block[0].key for block in blocks}) > 1
    assert [block[0].category for block in blocks[:2]] == ["copy", "story"], "one of each category first"
    ticks = iter(range(100))
    short, _ = measured(until=2, clock=lambda: next(ticks))
    assert len({(run.round, run.prompt) for run in short.runs}) == 2


def test_speed_ups_and_factors_do_not_suffer_from_a_machine_that_slows_down():
    """Pairs stand side by side, so the known ratios come out though the machine is slower at the end; the product of the factors
    is the ratio measured at once."""
    bench, _ = measured()
    found = {(row["system"], row["arm"]): row for row in rows(bench.runs)}
    row = found[report.OURS[1], "auto"]
    assert row["speed_up"].median == pytest.approx(2, rel=0.01) and row["speed_up"].count == 6
    assert row["tokens_per_step"] == 3 and row["acceptance"] == 0.25 and row["same_tokens"] == 1
    assert row["by_category"]["story"].median == pytest.approx(2, rel=0.01)
    assert sum(row["ms_per_token"].values()) == pytest.approx(1e3 / 60, rel=0.1)
    result = factors(bench.runs, report.REFERENCE, *report.OURS)
    assert [result[name].median for name in ("engine", "quantization", "speculation", "measured")] == pytest.approx([1.5, 2, 2, 6], rel=0.01)
    assert result["best_arm"] == (report.OURS[1], "auto")
    assert factors([run for run in bench.runs if run.system == report.OURS[0]], report.REFERENCE, *report.OURS)["engine"] is None


def test_the_interval_holds_the_median_and_narrows():
    """A median lies in its interval; more values of the same spread give a narrower one; equal values give none."""
    few, many = figure([1.0, 2.0, 3.0, 4.0, 5.0]), figure([1.0, 2.0, 3.0, 4.0, 5.0] * 20)
    assert few.low <= few.median == 3 <= few.high and many.high - many.low < few.high - few.low
    assert figure([2.0] * 4).low == figure([2.0] * 4).high == 2 and figure([]) is None


def test_the_report_tells_everything_and_needs_no_network(tmp_path):
    """Data, table and page are written; the page loads nothing from outside, holds the charts, and shows names as text."""
    bench, _ = measured()
    bench.runs = [replace(run, arm="<b>auto") if run.arm == "auto" else run for run in bench.runs]
    data = bench.to_json(title="Test", command="python -m specviz.bench --limit 1", skipped=["something (not there)"])
    files = suite.write(data, tmp_path / "out" / "bench")
    again = json.loads(files[0].read_text())
    assert from_json(again) == bench.runs
    table, page = files[1].read_text(), files[2].read_text()
    assert "1.50 engine" in table and "2.00 quantization" in table and "speculation" in table and "Not measured: something" in table
    assert "0.75 of its plain" in table, "llama.cpp is compared plainly"
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?:", page) and page.count("plotly-graph-div") >= 4
    body = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "<b>auto" not in body and "&lt;b&gt;auto" in body


def test_arms_are_named_by_method_and_length():
    """"method:5" and "method:auto" are read; anything else is refused."""
    assert parse_arm("suffix:8") == ("suffix", 8) and parse_arm("suffix:auto") == ("suffix", None) and parse_arm("plain") == ("plain", 0)
    for wrong in ("nonsense:3", "suffix:0", "suffix:65", "suffix:x"):
        with pytest.raises(InputError):
            parse_arm(wrong)


def test_our_engine_and_transformers_write_the_same_text(tmp_path):
    """On a tiny checkpoint in fp32 all our decodings and transformers' plain and lookup decoding give the same tokens, of the asked length."""
    save_tiny(tmp_path / "tiny")
    ours = Ours(Options(target=str(tmp_path / "tiny"), device="cpu", quantization="none", threads=1, browser=False, cache_dir=tmp_path),
                ["prompt_lookup:5", "suffix:auto", "draft_model:3"])
    theirs = Transformers(str(tmp_path / "tiny"), None, "cpu", "float32", 1)
    assert ours.arms == ("plain", "prompt_lookup:5", "suffix:auto"), "a method that cannot run is left out"
    text = "Guess, check, keep what was right. Guess, check, keep what was right. Guess,"
    prompt = ours.encode(text)
    assert prompt == theirs.encode(text)
    samples = {(system, arm): which.run(arm, prompt, 20) for system, which in (("ours", ours), ("theirs", theirs)) for arm in which.arms}
    expected = samples["ours", "plain"].tokens
    assert len(expected) == 20
    for (system, arm), sample in samples.items():
        assert sample.tokens == expected, (system, arm)
        assert 0 < sample.num_decoded <= 19 and sample.decode_s > 0 and sample.prefill_s > 0 and 0 < sample.num_steps <= 19
    assert ours.run("plain", prompt, 20).num_steps == 19
    assert ours.facts()["cost"]["num_tokens"][0] == 1
    json.dumps(ours.facts() | theirs.facts())


def test_a_system_that_cannot_start_says_why():
    """The process tells its parent the reason and ends."""
    with pytest.raises(WorkerError, match="llama.cpp cannot be measured: .*Error"):
        Worker("llama.cpp", {"kind": "llama.cpp", "gguf": "/nowhere", "threads": 1}, sys.executable)


def test_names_and_folders(tmp_path, capsys):
    """An unknown system, and prompts that are not there, end the command with a sentence before anything is loaded."""
    assert suite.main(["--systems", "guess"]) == 1 and "guess" in capsys.readouterr().err
    assert suite.main(["--prompts", str(Path(tmp_path, "none.jsonl"))]) == 1 and "none.jsonl" in capsys.readouterr().err
