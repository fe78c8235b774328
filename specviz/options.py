"""What the command line says, as one frozen record. It knows nothing of models or pages and imports nothing heavy, so --help is quick."""
from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import InputError

__all__ = ["Options", "parse"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that can be asked for at the start; None and "auto" mean "you choose".

    target: a model card's name, a hub repository, a local folder or GGUF file. draft: likewise, a drafter model or drafting heads.
    auth: (user, password). Raises InputError where a value is out of range or the page would be open to anyone by accident.
    """
    target: str | None = None
    draft: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    method: str | None = None
    k: int | None = None
    threads: int | None = None
    cache_dir: Path | None = None
    offline: bool = False
    prepare: bool = False
    trace: Path | None = None
    host: str = "127.0.0.1"
    port: int = 7860
    browser: bool = True
    share: bool = False
    auth: tuple[str, str] | None = None
    root_path: str | None = None
    history: bool = True
    force_public: bool = False
    on_space: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, value: object, expected: str) -> None:
            if not ok:
                raise InputError(f"{name} is {value!r}; expected {expected}.")
        check(0 <= self.port <= 65535, "--port", self.port, "a number from 0 (any free port) to 65535")
        check(self.k is None or 1 <= self.k <= 64, "--k", self.k, "a draft length from 1 to 64")
        check(not (self.prepare and self.offline), "--prepare", "given with --offline", "one of the two")
        check(self.threads is None or self.threads >= 1, "--threads", self.threads, "at least 1")
        if self.public and not (self.auth or self.force_public or self.on_space):
            how = "--share" if self.share else f"--host {self.host}"
            raise InputError(f"{how} lets other people reach this page and its model. Add --auth USER:PASSWORD, or --force-public if "
                             "everyone may use it.")

    @property
    def public(self) -> bool:
        """Whether other machines can reach the page."""
        return self.share or self.host not in LOOPBACK


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Options:
    """The options in `argv` (default: the process's arguments). Exits on --help and unknown arguments; raises InputError, see `Options`.

    A value that is not given is taken from Gradio's variables GRADIO_SERVER_NAME, GRADIO_SERVER_PORT and GRADIO_ROOT_PATH where set.
    """
    on_space = bool(environ.get("SPACE_ID"))
    given = _parser(environ, on_space).parse_args(argv)
    return Options(**vars(given), on_space=on_space)


def _parser(environ: Mapping[str, str], on_space: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py", description="specviz: chat with a model and watch speculative decoding as it happens.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110))

    model = parser.add_argument_group("model")
    model.add_argument("--target", metavar="MODEL", help="model that answers: a name from models/, a hub repository, a folder, a GGUF file")
    model.add_argument("--draft", metavar="MODEL", help="what drafts: a small model with the target's tokenizer, or Medusa, EAGLE or EAGLE-3 heads")
    model.add_argument("--device", default="auto", metavar="NAME",
                       help='"auto", "cpu", "cuda", "cuda:1", "cuda:all" (several cards together), "mps" (default: auto)')
    model.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="number format (default: auto)")
    model.add_argument("--quantization", default="auto", metavar="NAME", help='"auto", "none", "int8", "nf4", ... (default: auto)')
    model.add_argument("--threads", type=int, metavar="N", help="CPU threads for the model")
    model.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="where downloaded weights are kept")
    model.add_argument("--offline", action="store_true", help="download nothing; use what is already on this machine")
    model.add_argument("--prepare", action="store_true", help="fetch everything for later use without a network, then end")

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument("--method", metavar="NAME", help="drafting method to start with")
    drafting.add_argument("--k", type=int, metavar="N", help="draft length to start with, 1 to 64")

    page = parser.add_argument_group("page")
    page.add_argument("--trace", type=Path, metavar="FILE", help="open this recorded run")
    page.add_argument("--host", default=environ.get("GRADIO_SERVER_NAME") or ("0.0.0.0" if on_space else "127.0.0.1"), metavar="ADDRESS",
                      help="address to listen on (default: 127.0.0.1, this machine only)")
    page.add_argument("--port", type=int, default=environ.get("GRADIO_SERVER_PORT") or 7860, metavar="N",
                      help="port; if it is busy the next free one is taken (default: 7860)")
    page.add_argument("--no-browser", dest="browser", action="store_false", help="do not open a browser")
    page.add_argument("--share", action="store_true", help="also make a public link through Gradio's relay; needs --auth")
    page.add_argument("--auth", type=_credentials, metavar="USER:PASSWORD", help="ask visitors for this name and password")
    page.add_argument("--root-path", default=environ.get("GRADIO_ROOT_PATH"), metavar="PATH", help="path behind a reverse proxy")
    page.add_argument("--no-history", dest="history", action="store_false",
                      help="keep no run history and no conversations in the browser")
    page.add_argument("--force-public", action="store_true", help="allow --share or a public --host without --auth")
    return parser


def _credentials(text: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise argparse.ArgumentTypeError("expected USER:PASSWORD, both not empty")
    return user, password
