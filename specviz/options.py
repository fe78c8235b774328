"""What the command line says, as one frozen record. It knows nothing of models or pages and imports nothing heavy, so --help is quick."""
from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .errors import InputError
from .limits import Limits
from .remote.reach import Reach, read_header, read_seconds

__all__ = ["Options", "parse"]

KINDS = ("auto", "vllm", "llamacpp", "sglang", "tensorrt_llm", "lm_studio", "specviz", "openai")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PER_MINUTE = 30               # requests of one visitor, where others can reach the page


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that can be asked for at the start; None and "auto" mean "you choose".

    target: a model card's name, a hub repository, a local folder or GGUF file. draft: likewise, a drafter model or drafting heads.
    graphs, same_kernels, quantize_head: on CUDA, see `gpu_model.GpuSettings`. method_options: (name, value) of the method to begin with, as written; the engine reads them.
    system_prompt: the operator's own, before everybody's. limits: what one visitor may take.
    auth: (user, password). remote: the address of a server to attach to; its key never stands here. Raises InputError where a value is out of range or the page would be open to anyone by accident.
    """
    target: str | None = None
    draft: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    graphs: bool = True
    same_kernels: bool = False
    quantize_head: bool = False
    method: str | None = None
    k: int | str | None = None
    method_options: tuple[tuple[str, str], ...] = ()
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
    api_key: str = field(default="", repr=False)
    api_only: bool = False
    remote: str | None = None
    remote_model: str = ""
    remote_kind: str = "auto"
    remote_draft: str = ""
    remote_baseline: str | None = None
    remote_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    remote_ca: Path | None = None
    remote_timeout: float = 300.0
    on_space: bool = False
    system_prompt: str = ""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, value: object, expected: str) -> None:
            if not ok:
                raise InputError(f"{name} is {value!r}; expected {expected}.")
        check(0 <= self.port <= 65535, "--port", self.port, "a number from 0 (any free port) to 65535")
        check(self.k in (None, "auto") or 1 <= self.k <= 64, "--k", self.k, "a draft length from 1 to 64, or auto")
        check(not (self.prepare and self.offline), "--prepare", "given with --offline", "one of the two")
        check(all(" " < letter < "\x7f" for letter in self.api_key), "--api-key", "a key with other characters", "visible ASCII, no spaces")
        check(not (self.api_only and (self.share or self.auth)), "--api-only", "given with --share or --auth", "neither: they belong to the page")
        if self.api_only and self.public and not (self.api_key or self.force_public):
            raise InputError(f"--host {self.host} lets other people use this model. Add --api-key KEY, or --force-public if everyone may use it.")
        check(self.threads is None or self.threads >= 1, "--threads", self.threads, "at least 1")
        if self.public and not (self.api_only or self.auth or self.force_public or self.on_space):
            how = "--share" if self.share else f"--host {self.host}"
            raise InputError(f"{how} lets other people reach this page and its model. Add --auth USER:PASSWORD, or --force-public if "
                             "everyone may use it.")

    @property
    def reach(self) -> Reach:
        return Reach(self.remote_headers, self.remote_ca, self.remote_timeout)

    @property
    def public(self) -> bool:
        """Whether other machines can reach the page."""
        return self.share or self.host not in LOOPBACK


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Options:
    """The options in `argv` (default: the process's arguments). Exits on --help and unknown arguments; raises InputError, see `Options`.

    A value that is not given is taken from Gradio's variables GRADIO_SERVER_NAME, GRADIO_SERVER_PORT and GRADIO_ROOT_PATH where set.
    """
    on_space = bool(environ.get("SPACE_ID"))
    given = vars(_parser(environ, on_space).parse_args(argv))
    limits = {field.name: given.pop(field.name) for field in fields(Limits)}
    options = Options(**(given | {"remote_headers": tuple(given["remote_headers"]), "method_options": tuple(given["method_options"] or ())}),
                      on_space=on_space)
    if limits["per_minute"] is None:
        limits["per_minute"] = PER_MINUTE if options.public else 0
    return replace(options, limits=Limits(**limits))


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
    model.add_argument("--quantization", default="auto", metavar="NAME", help='"auto", "none", "int8"; on CUDA also "nf4", "fp4", "nf4-double", "fp4-double" (default: auto)')
    model.add_argument("--quantize-head", action="store_true", help="on CUDA: quantize the LM head too; faster, and it shows in the text most")
    model.add_argument("--same-kernels", action="store_true",
                       help="on CUDA: pad plain steps to the shape of drafted ones, to compare texts token by token; plain decoding gets slower")
    model.add_argument("--no-graphs", dest="graphs", action="store_false", help="on CUDA: launch every step from Python, capture none")
    model.add_argument("--threads", type=int, metavar="N", help="CPU threads for the model")
    model.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="where downloaded weights are kept")
    model.add_argument("--offline", action="store_true", help="download nothing; use what is already on this machine")
    model.add_argument("--prepare", action="store_true", help="fetch everything for later use without a network, then end")

    api = parser.add_argument_group("OpenAI-compatible API (on the page's port, under /v1)")
    api.add_argument("--api-key", default=environ.get("SPECVIZ_API_KEY", ""), metavar="KEY",
                     help="what clients must send as a bearer (default: SPECVIZ_API_KEY); without one the API is offered to this machine only")
    api.add_argument("--api-only", action="store_true", help="serve the API without the page")

    remote = parser.add_argument_group("another server (its key comes from SPECVIZ_REMOTE_API_KEY or OPENAI_API_KEY)")
    remote.add_argument("--remote", metavar="URL", help="attach this page to a running vLLM, SGLang, TensorRT-LLM, llama.cpp, LM Studio or "
                        "OpenAI-compatible server instead of loading a model")
    remote.add_argument("--remote-model", default="", metavar="NAME", help="which of the server's models (default: the first)")
    remote.add_argument("--remote-kind", default="auto", choices=KINDS, help="what kind of server it is (default: found by asking it)")
    remote.add_argument("--remote-draft", default="", metavar="NAME", help="draft model for servers that take one per request (LM Studio)")
    remote.add_argument("--remote-baseline", metavar="URL", help="a second server with the same model and no speculation, to compare with")
    remote.add_argument("--remote-header", dest="remote_headers", type=_typed(read_header), action="append", default=[],
                        metavar="NAME:VALUE", help="an extra header; may be given several times")
    remote.add_argument("--remote-ca", type=Path, metavar="FILE", help="certificates to trust, as a PEM file")
    remote.add_argument("--remote-timeout", type=_typed(read_seconds), default=300.0, metavar="SECONDS",
                        help="how long the server may be silent, reading the prompt included (default: 300)")

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument("--method", metavar="NAME", help="drafting method to start with")
    drafting.add_argument("--k", type=_length, metavar="N", help="draft length to start with, 1 to 64, or auto: the engine chooses it step by step")
    drafting.add_argument("--option", type=_option, action="append", dest="method_options", metavar="NAME=VALUE",
                          help="an option of that method, such as window=7; may be given several times. A wrong name is answered by a list")

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
    page.add_argument("--system-prompt", default="", metavar="TEXT",
                      help="put this before every conversation, page and API; it is read once and shared by all")
    page.add_argument("--force-public", action="store_true", help="allow --share or a public --host without --auth")

    usual = Limits()
    many = parser.add_argument_group("many people on one engine (page and API alike)")
    many.add_argument("--at-once", type=int, default=usual.at_once, metavar="N",
                      help=f"answers that are written at the same time (default: {usual.at_once})")
    many.add_argument("--waiting", type=int, default=usual.waiting, metavar="N",
                      help=f"requests that may wait for their turn; more are refused (default: {usual.waiting})")
    many.add_argument("--max-prompt", dest="prompt_tokens", type=int, metavar="N",
                      help="longest prompt in tokens (default: what the model's context holds)")
    many.add_argument("--max-new-tokens", dest="new_tokens", type=int, default=usual.new_tokens, metavar="N",
                      help=f"longest answer in tokens (default: {usual.new_tokens})")
    many.add_argument("--per-minute", type=int, metavar="N",
                      help=f"requests a minute of one visitor, 0 for no limit (default: {PER_MINUTE} where others can reach the page, else 0)")
    many.add_argument("--keep-runs", dest="runs_kept", type=int, default=usual.runs_kept, metavar="N",
                      help=f"runs of one visitor that the server keeps for the page (default: {usual.runs_kept})")
    many.add_argument("--forget-after", dest="forget_minutes", type=float, default=usual.forget_minutes, metavar="MINUTES",
                      help=f"silence after which nothing of a visitor stays on the server (default: {usual.forget_minutes:g})")
    return parser


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        try:
            return read(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip()):
        raise argparse.ArgumentTypeError("expected NAME=VALUE")
    return name.strip(), value.strip()


def _length(text: str) -> int | str:
    return "auto" if text == "auto" else int(text)


def _credentials(text: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise argparse.ArgumentTypeError("expected USER:PASSWORD, both not empty")
    return user, password
