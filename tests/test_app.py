"""The command line, the start in the background, and the page's public endpoint in process over a scripted service."""
from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_service import ANSWER, FakeService

import app
from specviz.errors import InputError, LoadError, SpecvizError
from specviz.limits import Limits
from specviz.options import Options, parse
from specviz.trace import dumps

ROOT = Path(app.__file__).parent
FLAGS = ("--host --port --no-browser --share --auth --root-path --target --draft --device --dtype --quantization --method --k --threads "
         "--cache-dir --trace --offline --no-history --force-public").split()


def recorded():
    """A trace made by the scripted service."""
    from specviz.engine.sampling import SamplingParams
    from specviz.service import ChatRequest
    run = FakeService().submit(ChatRequest(({"role": "user", "content": "Hi"},), SamplingParams(), "prompt_lookup"))
    assert list(run) and list(run.measure_plain())
    return run.trace()


# ---- arguments --------------------------------------------------------------------------------------------------------------------------

def test_help_names_every_flag_and_imports_nothing_heavy():
    """--help answers before torch or Gradio would be imported."""
    code = ("import sys, app\ntry: app.main(['--help'])\n"
            "finally: print([m for m in ('torch', 'gradio', 'transformers', 'plotly') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert all(flag in done.stdout for flag in FLAGS) and done.stdout.strip().endswith("[]")


def test_defaults_are_this_machine_only():
    options = parse([], {})
    assert (options.host, options.port, options.browser, options.public, options.history) == ("127.0.0.1", 7860, True, False, True)
    assert Options() == options


def test_every_flag_reaches_the_options():
    line = ("--host 0.0.0.0 --port 80 --no-browser --share --auth me:a:b --root-path /x --target T --draft D --device cuda:1 --dtype bfloat16 "
            "--quantization nf4 --method eagle --k 7 --option depth=3 --option tree=0,0.0 --threads 3 --cache-dir /c --trace t.json --offline --no-history")
    options = parse(line.split(), {})
    assert options == Options(target="T", draft="D", device="cuda:1", dtype="bfloat16", quantization="nf4", method="eagle", k=7, threads=3,
                              method_options=(("depth", "3"), ("tree", "0,0.0")),
                              cache_dir=Path("/c"), offline=True, trace=Path("t.json"), host="0.0.0.0", port=80, browser=False, share=True,
                              auth=("me", "a:b"), root_path="/x", history=False, limits=Limits(per_minute=30))


@pytest.mark.parametrize("argv", [["--share"], ["--host", "0.0.0.0"], ["--host", "192.168.1.5"]])
def test_a_public_page_needs_a_password(argv):
    """Other people reach the page only with --auth, --force-public, or on a Space, where that is the purpose."""
    with pytest.raises(InputError, match="--auth USER:PASSWORD"):
        parse(argv, {})
    assert parse([*argv, "--auth", "a:b"], {}).public and parse([*argv, "--force-public"], {}).public
    assert parse(argv, {"SPACE_ID": "me/specviz"}).public


def test_gradio_variables_are_honoured_and_judged_alike():
    options = parse([], {"GRADIO_SERVER_PORT": "9000", "GRADIO_ROOT_PATH": "/app"})
    assert (options.port, options.root_path) == (9000, "/app")
    assert parse([], {"SPACE_ID": "me/specviz"}).host == "0.0.0.0"
    with pytest.raises(InputError):
        parse([], {"GRADIO_SERVER_NAME": "0.0.0.0"})


@pytest.mark.parametrize("argv", [["--k", "0"], ["--k", "65"], ["--threads", "0"], ["--port", "70000"]])
def test_a_value_out_of_range_names_its_flag(argv):
    with pytest.raises(InputError, match=argv[0]):
        parse(argv, {})


def test_a_busy_port_moves_on():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        assert app.free_port("127.0.0.1", busy) > busy
        with pytest.raises(InputError, match="No free port"):
            app.free_port("127.0.0.1", busy, tries=1)


def test_main_refuses_with_one_sentence(capsys):
    assert app.main(["--share"]) == 2
    assert capsys.readouterr().err.startswith("specviz: --share lets other people")


def test_the_page_needs_no_torch():
    """A recorded trace opens, and the page is built, before torch is imported or where it is missing."""
    code = "import sys, specviz.ui.layout, specviz.ui.recordings; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip().endswith("False False")


# ---- starting ---------------------------------------------------------------------------------------------------------------------------

def test_late_service_is_loading_then_the_service():
    """The page can be built and asked while the engine is still being imported, and it refuses questions with the reason."""
    go = threading.Event()
    late = app.LateService(lambda: go.wait(10) and FakeService())
    assert late.status().state == "loading" and late.config() == {} and late.methods() == [] and late.default_method() == ""
    with pytest.raises(SpecvizError, match="Nothing can be answered yet"):
        late.submit(None)
    go.set()
    late._thread.join(10)
    assert late.status().state == "ready" and late.default_method() == "prompt_lookup"
    late.close()


def test_late_service_passes_on_everything_about_models():
    """Before the service is there nothing can be chosen, kindly; afterwards every call reaches it."""
    go = threading.Event()
    fake = FakeService()
    late = app.LateService(lambda: go.wait(10) and fake)
    choice = fake.choice_now
    assert late.offers() == [] and late.advice() == [] and late.suggestion() is None and late.choice() is None
    for call in (late.inspect, late.load):
        with pytest.raises(SpecvizError, match="No model can be chosen yet"):
            call(choice)
    late.cancel_load()
    late.unload()
    go.set()
    late._thread.join(10)
    assert late.choice() == choice and late.offers() == fake.offers() and late.advice() == [] and late.inspect(choice) == fake.inspect(choice)
    fake.may_end.clear()
    late.load(choice, unload_first=True)
    assert fake.loads == [(choice, True)] and late.status().is_loading
    late.cancel_load()
    assert not late.status().is_loading
    late.unload()
    assert late.status().state == "unloaded"
    fake.may_end.set()
    late.close()


@pytest.mark.parametrize(("error", "words"), [(LoadError("No weights here."), "No weights here"), (ZeroDivisionError("x"), "ZeroDiv")])
def test_late_service_that_fails_says_why(error, words):
    def broken():
        raise error
    late = app.LateService(broken)
    late._thread.join(10)
    assert late.status().state == "failed" and words in late.status().message
    late.close()


def test_a_broken_trace_file_is_a_sentence_and_the_bundled_one_is_shown(tmp_path):
    from specviz.ui.recordings import opening
    bundled, mine = tmp_path / "bundled", tmp_path / "mine.json"
    bundled.mkdir()
    (bundled / "01.json").write_text(dumps(recorded()))
    mine.write_text("{")
    broken = opening(mine, bundled)
    assert broken.problem and broken.trace == opening(None, bundled).trace is not None
    mine.write_text(dumps(recorded()))
    assert opening(mine, bundled).name == "mine.json" and not opening(mine, bundled).problem
    assert opening(tmp_path / "nowhere.json", tmp_path / "nothing").trace is None
    assert "nowhere.json" in opening(tmp_path / "nowhere.json", tmp_path / "nothing").problem


def test_the_program_starts_without_a_model_and_ends_on_ctrl_c(tmp_path):
    """With nothing to load and no network the page is served, the reason is printed, and Ctrl-C ends it cleanly."""
    program = tmp_path / "start.py"
    program.write_text(
        "import sys, app\nfrom specviz.errors import LoadError\n"
        "def nothing(options): raise LoadError('The weights are not on this machine and --offline forbids fetching them.')\n"
        "sys.exit(app.main(sys.argv[1:], nothing))\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, str(program), "--no-browser", "--offline", "--port", str(port)], cwd=ROOT, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        watchdog = threading.Timer(90, process.kill)
        watchdog.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            if any("forbids" in line for line in lines) and any("http://" in line for line in lines):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        watchdog.cancel()
    said = "".join(lines) + rest
    assert re.search(r"open http://127\.0\.0\.1:\d+", said) and "closing" in said and "Traceback" not in said
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no interval timer")
def test_a_signal_at_any_moment_of_the_wait_ends_it():
    """A handler that takes a lock the interrupted wait already holds would stop the program for ever: the signal comes at 5000 moments."""
    held = signal.getsignal(signal.SIGALRM)
    try:
        for number in range(5000):
            stop = app.Stop()
            signal.signal(signal.SIGALRM, stop.ask)
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 60))
            while not stop.wait(0.01):
                pass
            assert stop.wait(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, held)


# ---- the public endpoint ----------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def served():
    """(service, url): the page over a scripted service, in this process."""
    from specviz.ui.layout import build, launch
    from specviz.ui.recordings import Recording
    service = FakeService(pause_s=0.01)
    page = build(service, Recording(trace=recorded()))
    address, _ = launch(page, Options(browser=False, history=False), app.free_port("127.0.0.1", 0))
    yield service, address
    page.close(verbose=False)


@pytest.fixture(scope="module")
def client(served):
    from gradio_client import Client
    return Client(served[1], verbose=False)


def test_only_one_endpoint_is_public(client):
    assert list(client.view_api(return_format="dict", print_info=False)["named_endpoints"]) == ["/generate"]


def test_generate_gives_text_stats_and_trace(served, client):
    """The last value holds the whole answer; those before it are beginnings of it."""
    from specviz.trace import loads
    job = client.submit("Tell me", "Be brief.", "", 4, 0.0, 1, 200, options={"min_match": 7, "branches": False}, api_name="/generate")
    result = job.result(timeout=60)
    assert result["text"] == ANSWER and result["stats"]["num_accepted_draft_tokens"] > 0
    assert len(loads(json.dumps(result["trace"])).steps) == result["stats"]["num_steps"] + 1
    assert all(ANSWER.startswith(part["text"]) for part in job.outputs())
    request = served[0].requests[-1]
    assert dict(request.options) == {"min_match": 7, "branches": False}
    assert (request.method, request.k, request.sampling.seed, request.messages[0]["content"]) == ("prompt_lookup", 4, 1, "Be brief.")


def test_generate_errors_are_sentences(served, client):
    from gradio_client.exceptions import AppError
    with pytest.raises(AppError, match="prompt is empty"):
        client.predict("  ", api_name="/generate")
    with pytest.raises(AppError, match="longer than 400 tokens"):
        client.predict("word " * 500, api_name="/generate")
    with pytest.raises(AppError, match="min_match is 99; expected a whole number from 1 to 16"):
        client.predict("Hi", options={"min_match": 99}, api_name="/generate")


def test_generate_can_be_cancelled(served, client):
    """After job.cancel() the run on the server ends too: nobody reads it any more."""
    served[0].pause_s = 0.2
    try:
        job = client.submit("Slow", api_name="/generate")
        deadline = time.monotonic() + 30
        while not job.outputs() and time.monotonic() < deadline:
            time.sleep(0.05)
        run = served[0].runs[-1]
        assert job.cancel()
        while not run._cancelled.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run._cancelled.is_set() and len(run.text) < len(ANSWER)
    finally:
        served[0].pause_s = 0.01


def test_turns_go_to_the_service_at_once(served, client):
    """The engine batches and has a queue of its own, so the page holds nobody back: three questions are with it before one is answered."""
    before = len(served[0].runs)
    served[0].pause_s = 0.5
    try:
        jobs = [client.submit(f"Question {i}", api_name="/generate") for i in range(3)]
        deadline = time.monotonic() + 30
        while len(served[0].runs) < before + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [run.reason for run in served[0].runs[before:]] == [""] * 3
    finally:
        served[0].pause_s = 0.01
    assert [job.result()["text"] for job in jobs] == [ANSWER] * 3
