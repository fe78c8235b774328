"""The folders for Spaces: what lies in them can be uploaded, and the ZeroGPU one runs, with a double of `spaces` that forks and pickles."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny import save_tiny

from specviz.errors import InputError
from specviz.ui import space

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return space.write_space(tmp_path_factory.mktemp("space"))


def fields(folder: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+): (.+)$", (folder / "README.md").read_text(encoding="utf-8").split("---")[1], re.MULTILINE))


def test_cards_and_requirements(folders):
    """Both cards are whole; versions are those of the project; torch is one that ZeroGPU has, and Gradio is left to the builder."""
    app, static = fields(folders["zerogpu"]), fields(folders["static"])
    own = fields(ROOT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert app["sdk"] == "gradio" and app["sdk_version"] == own["sdk_version"] and app["python_version"] == '"3.12"'
    assert float(app["python_version"].strip('"')) >= float(project["requires-python"].removeprefix(">="))
    assert static["sdk"] == "static" and "sdk_version" not in static and (folders["static"] / static["app_file"]).is_file()
    lines = (folders["zerogpu"] / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert "torch>=2.8,<2.12" in lines and not any(re.match("gradio|spaces", line) for line in lines)
    ours = {re.match(r"[\w-]*", line)[0] for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()}
    assert {re.match(r"[\w-]*", line)[0] for line in lines} == ours - {"gradio"}
    low, high = re.search(r"^gradio>=([\d.]+),<(\d+)$", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE).groups()
    assert tuple(map(int, low.split("."))) <= tuple(map(int, app["sdk_version"].split("."))) < (int(high),)


def test_nothing_is_refused_at_the_upload(folders, tmp_path):
    """No leftovers and nothing large is in the folders; a large file or a wrong card is told by name; other folders are not touched."""
    files = [file for folder in folders.values() for file in folder.rglob("*") if file.is_file()]
    assert max(file.stat().st_size for file in files) <= space.MAX_BYTES and not [file for file in files if file.suffix in (".pyc", ".pyi")]
    copy = tmp_path / "copy"
    shutil.copytree(folders["static"], copy)
    (copy / "weights.bin").write_bytes(b"\0" * (space.MAX_BYTES + 1))
    with pytest.raises(InputError, match="weights.bin has 10.0 MiB; the Hub takes files up to 10 MiB"):
        space.check(copy)
    (copy / "weights.bin").unlink()
    card = (copy / "README.md").read_text(encoding="utf-8")
    for old, new, words in (("colorFrom: green", "colorFrom: grass", "colorFrom: grass"), ("sdk: static", "sdk static", "'sdk static'"),
                            ("app_file: index.html", "app_file: none.html", "none.html"), ("---\n", "", "no front matter")):
        (copy / "README.md").write_text(card.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(InputError, match=words):
            space.check(copy)
    (tmp_path / "zerogpu").mkdir()
    (tmp_path / "zerogpu" / "mine.txt").write_text("keep me", encoding="utf-8")
    with pytest.raises(InputError, match="holds something that is no Space"):
        space.write_space(tmp_path)
    assert (tmp_path / "zerogpu" / "mine.txt").read_text(encoding="utf-8") == "keep me"


@pytest.mark.long
def test_the_app_answers_several_visitors_in_forked_calls(folders, tmp_path):
    """It starts with a recorded run and no model in the way; each visitor gets the answer to their own prompt, whoever else waits."""
    from gradio_client import Client
    shutil.copyfile(ROOT / "tests" / "fake_spaces.py", tmp_path / "spaces.py")
    target = save_tiny(tmp_path / "tiny")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SPACES_ZERO_GPU": "true", "SPACE_ID": "someone/specviz", "SPECVIZ_TARGET": str(target),
                                "SPECVIZ_DEVICE": "cpu", "GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": "0", "HF_HUB_OFFLINE": "1",
                                "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    with open(tmp_path / "log.txt", "w+", encoding="utf-8") as log:
        process = subprocess.Popen([sys.executable, "space.py"], cwd=folders["zerogpu"], env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = next((line for line in process.stdout if "http" in line), "")
            log.seek(0)
            assert "Ready" in line, line + log.read()
            address = re.search(r"http://[\d.:]+", line)[0]
            prompts = ["Guess, check, keep.", "The quick brown fox", "A small model guesses"]

            def result(prompt: str) -> dict:
                client = Client(address, verbose=False)
                try:
                    return client.submit(prompt, max_new_tokens=12, api_name="/generate").result(timeout=120)
                finally:
                    client.close()
            with ThreadPoolExecutor(3) as pool:
                together = list(pool.map(result, prompts))
            assert len({each["text"] for each in together}) == 3 and result(prompts[-1])["text"] == together[-1]["text"]
            for prompt, each in zip(prompts, together):
                assert each["trace"]["meta"]["prompt"] == [{"role": "user", "content": prompt}] and each["stats"]["num_tokens"] == 12
            page = Client(address, verbose=False).config
            values = {part["props"].get("elem_id"): part["props"].get("value") for part in page["components"]}
            assert '"type":"trace"' in values["viewer"] and values["measure-plain"] is False
        finally:
            process.kill()
            process.wait()
