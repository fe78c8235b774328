"""The lessons hold for the recordings they play on, wrong ones are named, and pages are written without torch or Gradio."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "browser"))
from synthetic import make_trace  # noqa: E402

from specviz.errors import InputError, LoadError  # noqa: E402
from specviz.record import read_list  # noqa: E402
from specviz.trace import save  # noqa: E402
from specviz.ui.lessons import LESSONS, Lesson, Question, Stop, read_lesson, ready  # noqa: E402
from specviz.ui.library import COURSE, Library  # noqa: E402
from specviz.ui.prose import blocks  # noqa: E402
from specviz.ui.steps import KINDS, find_step, values  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = '</script><img src=x onerror="window.pwned=1">${window.pwned=1}{{scripts}}<!--\u2028'


def test_every_lesson_holds_for_its_recording():
    """At least nine lessons, each with a question; every recording, step, node, number and expectation is there; files are small."""
    library = Library({})
    lessons = library.course["lessons"]
    assert len(lessons) >= 9 and len({lesson["id"] for lesson in lessons}) == len(lessons)
    assert all(any("question" in stop for stop in lesson["stops"]) for lesson in lessons)
    assert sum(len(lesson["stops"]) for lesson in lessons) <= 60                     # ten minutes
    assert all(file.stat().st_size < 200_000 for file in library.files.values())
    assert not re.search(r"\{\w+\}", json.dumps(lessons, ensure_ascii=False)), "a number was not filled in"
    assert json.loads(library.answer(COURSE))["teacher"][0]["kind"] == "h1"
    assert json.loads(library.answer("story-plain"))["format"] == "specviz-trace"
    for wrong in ("../recordings", "nothing", None, ["course"], 7):
        assert "error" in json.loads(library.answer(wrong))


def test_one_command_records_everything():
    """Each bundled recording is in the list that `python -m specviz.record` reads, with the folder it lies in, and nothing else is."""
    listed = {(recording.folder, recording.file) for recording in read_list(ROOT / "assets" / "recordings.toml")}
    there = {(str(file.parent.relative_to(ROOT / "assets")), file.stem) for file in (ROOT / "assets").glob("**/traces/*.json")}
    assert listed == there


def test_figures_in_lessons_come_from_recordings():
    """A stop that points at a figure of the run writes no number itself: recording again may change it."""
    for path in LESSONS.glob("*.json"):
        for stop in read_lesson(path).stops:
            if stop.focus in ("speed_up", "tokens_per_step", "acceptance", "tokens_per_s", "badge"):
                bare = re.sub(r"\{\w+\}|`[^`]*`|lessons? \d+", "", stop.text + (stop.question.why if stop.question else ""))
                assert not re.search(r"\d+[.,]\d", bare), f"{path.name}: {bare}"


def _lesson(**stop) -> Lesson:
    return Lesson("x", "X", "", "run", (Stop(**({"text": "Step {step}"} | stop)),))


@pytest.mark.parametrize("stop, problem", [
    ({"step": "first dance"}, "no step 'first dance'"), ({"step": "first tree"}, "has no 'first tree'"), ({"view": "map"}, "view is 'map'"),
    ({"focus": "moon"}, "focus is 'moon'"), ({"text": "{nothing}"}, "quotes {nothing}"),
    ({"expect": ("speed_up < 0",)}, "expected speed_up < 0"), ({"expect": ("fast",)}, "no expectation"),
    ({"node": "close"}, "no node 'close'"),
    ({"question": Question("?", ("a", "a"), 0, "")}, "not distinct"), ({"question": Question("?", ("a", "b"), 2, "")}, "not the index"),
    ({"question": Question("?", ("a", "b"), 0, "", "all")}, "hides is 'all'")])
def test_a_wrong_stop_is_named(stop, problem):
    """What does not hold for the recording is refused with the lesson, the stop and the reason."""
    with pytest.raises(InputError, match=re.escape(problem)):
        ready(_lesson(**stop), {"run": make_trace(12)})


def test_a_broken_lesson_file_is_named(tmp_path):
    """Wrong format, unknown and missing entries are refused, by file."""
    good = {"format": "specviz-lesson", "version": 1, "id": "a", "title": "", "summary": "", "trace": "t", "stops": []}
    for number, data in enumerate([[], good | {"format": "x"}, {name: good[name] for name in ("format", "version", "id")},
                                   good | {"stops": [{"txt": ""}]}]):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(data))
        with pytest.raises(InputError, match=f"{number}.json"):
            read_lesson(path)
    with pytest.raises(InputError, match="'gone' is not there"):
        ready(Lesson("x", "X", "", "gone", ()), {})


def test_steps_are_what_their_names_say():
    """Conditions find steps by what happened: order, endings, trees; numbers in texts agree with the step."""
    chain, tree = make_trace(60, seed=2), make_trace(20, tree=True)
    first, second, last = (find_step(chain, f"{order} rejection") for order in ("first", "second", "last"))
    assert first < second < last and all(chain.steps[i].emitted[-1].origin == "correction" for i in (first, second, last))
    full = chain.steps[find_step(chain, "longest full acceptance")]
    assert all(node.state == "accepted" for node in full.nodes) and full.emitted[-1].origin == "bonus"
    assert chain.steps[find_step(chain, "first prompt")].kind == "prefill" and tree.steps[find_step(tree, "first tree")].nodes
    at = find_step(chain, "first close call")
    node = next(i for i, n in enumerate(chain.steps[at].nodes) if n.accept_prob and n.accept_prob < 1 and n.state == "accepted")
    said = values(chain, at, node)
    assert said["step"] == at and said["u"] < said["accept"] and said["step_tokens"] == len(chain.steps[at].emitted)
    siblings = tree.steps[find_step(tree, "first second choice")].nodes
    assert any(n.state == "accepted" and any(o.parent == n.parent and o.state == "rejected" for o in siblings) for n in siblings)
    assert all(isinstance(kind(step), bool) for kind in KINDS.values() for step in (*chain.steps, *tree.steps))


def test_prose_is_data():
    """Headings, lists, tables and words become blocks of text; markup stays text."""
    found = blocks("# A `b` <img src=x>\n\nText **bold**\nmore\n\n- one\n- two\n  lines\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n1. x")
    assert [block["kind"] for block in found] == ["h1", "p", "ul", "table", "ol"]
    assert found[0]["words"] == [["", "A "], ["code", "b"], ["", " <img src=x>"]] and found[1]["words"][1] == ["strong", "bold"]
    assert found[2]["items"][1] == [["", "two lines"]] and len(found[3]["rows"]) == 2


def test_pages_need_neither_torch_nor_gradio(tmp_path):
    """A shared trace becomes a page, and the site is written, without torch, transformers, Gradio and numpy; plotly alone gives charts."""
    save(make_trace(8), tmp_path / "run.json")
    code = ("import sys\n"
            "for name in ('torch', 'transformers', 'gradio', 'numpy', 'safetensors'): sys.modules[name] = None\n"
            "from specviz.ui import static\n"
            f"out = {str(tmp_path)!r}\n"
            "sys.exit(static.main([out + '/site']) or static.main(['--trace', out + '/run.json', out + '/run.html']) or\n"
            "         static.main(['--no-charts', '--trace', out + '/run.json', out + '/small.html']))")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    small, large = ((tmp_path / name).stat().st_size for name in ("small.html", "run.html"))
    assert small < 500_000 and large > 4_000_000 and (tmp_path / "site/index.html").stat().st_size < 150_000
    page = (tmp_path / "small.html").read_text(encoding="utf-8")
    assert "http" not in re.sub(r"http://www\.w3\.org/\S*|https://huggingface\.co|http-equiv", "", page), "the page names another machine"


def test_own_texts_can_stand_in_a_script():
    """Nothing in the viewer's script or in Plotly's ends a script element or changes how it is read; data is escaped."""
    from specviz.ui.script import script_safe, viewer_script
    from specviz.ui.static import _plotly
    for text in (viewer_script(), _plotly().read_text(encoding="utf-8")):
        assert not re.search(r"</script|<!--", text, re.IGNORECASE)
    assert json.loads(script_safe(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE and "<" not in script_safe(HOSTILE)


def test_a_thin_copy_is_the_model_without_some_layers(tmp_path):
    """The copy's logits are those of the model whose layers were taken out in memory; a layer that is not there is refused."""
    torch = pytest.importorskip("torch")
    from tiny import save_tiny
    from transformers import AutoModelForCausalLM

    from specviz.thin import thin_copy
    folder = Path(save_tiny(tmp_path / "tiny", "llama"))
    copy = thin_copy(folder, (1,), tmp_path)
    assert copy.name.endswith("2-of-3-layers")
    whole, thin = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, copy))
    del whole.model.layers[1]
    whole.config.num_hidden_layers = 2
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(whole(ids, use_cache=False).logits, thin(ids, use_cache=False).logits)
    with pytest.raises(LoadError, match="Layer 3 cannot"):
        thin_copy(folder, (3,), tmp_path)
