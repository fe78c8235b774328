"""Fetches one wheel from the package index that pip is configured for, without pip, and goes on where it was interrupted.

It knows nothing of models. Asked are, in this order, PIP_INDEX_URL or index-url of pip's configuration files or, where neither says
anything, the public index; then the extra indexes. Written for the "simple repository" protocol, in HTML (PEP 503) and JSON (PEP 691).
"""
from __future__ import annotations

import configparser
import json
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import HTTPBasicAuthHandler, HTTPPasswordMgrWithDefaultRealm, HTTPSHandler, OpenerDirector, Request, build_opener

from .errors import LoadError

__all__ = ["configured_indexes", "fetch_wheel"]

PUBLIC_INDEX = "https://pypi.org/simple"
_TIMEOUT_S = 20
_PAGE_BYTES = 20_000_000
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


def fetch_wheel(project: str, wheel: str, num_bytes: int, part: Path, report: Callable[[float], None],
                environ: Mapping[str, str] = os.environ) -> None:
    """Write the wheel into `part`; what lies there already is kept and only the rest is asked for.

    report: told how much there is, 0 to 1. The caller checks the hash. Raises LoadError with what each index answered; what was received
    until then stays in `part`.
    """
    indexes = configured_indexes(environ)
    if not indexes:
        raise LoadError("pip is configured to use no index")
    problems = []
    for index in indexes:
        try:
            opener, clean = _opener(index, environ)
            url = _find(opener, clean, project, wheel)
            _stream(opener, url, num_bytes, part, report)
            return
        except (URLError, OSError, ValueError, LookupError) as error:
            reason = f"{error.code} {error.reason}" if isinstance(error, HTTPError) else str(getattr(error, "reason", None) or error)
            problems.append(f"{_without_password(index)}: {reason[:120] or type(error).__name__}")
    raise LoadError("; ".join(problems))


def configured_indexes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Addresses in the order in which they are asked; none where pip is told to use no index."""
    settings = _pip_settings(environ)
    if settings.get("no-index", "").strip().lower() in ("1", "true", "yes", "on"):
        return []
    first = settings.get("index-url", "").split() or [PUBLIC_INDEX]
    return list(dict.fromkeys(first + settings.get("extra-index-url", "").split()))


def _pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """pip's own order: system, user and environment files, [global] before [download], then variables."""
    settings: dict[str, str] = {}
    if environ.get("PIP_CONFIG_FILE") != os.devnull:
        for path in (*_config_files(environ), environ.get("PIP_CONFIG_FILE")):
            parser = configparser.RawConfigParser()
            try:
                if path is None or not parser.read(path, encoding="utf-8"):
                    continue
            except (configparser.Error, OSError, UnicodeDecodeError):
                continue                          # pip complains about it; the public index may still do
            for section in ("global", "download"):
                if parser.has_section(section):
                    settings.update(parser.items(section))
    for name in ("no-index", "index-url", "extra-index-url", "cert"):
        if value := environ.get("PIP_" + name.upper().replace("-", "_")):
            settings[name] = value
    return settings


def _config_files(environ: Mapping[str, str]) -> list[Path]:
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    if sys.platform == "win32":
        places = [Path(environ.get("PROGRAMDATA", "C:/ProgramData")) / "pip/pip.ini", home / "pip/pip.ini",
                  Path(environ.get("APPDATA", home)) / "pip/pip.ini"]
    else:
        config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
        support = [home / "Library/Application Support/pip/pip.conf"] if sys.platform == "darwin" else []
        places = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf", config / "pip/pip.conf", *support]
    return [*places, Path(sys.prefix) / ("pip.ini" if sys.platform == "win32" else "pip.conf")]


def _opener(index: str, environ: Mapping[str, str]) -> tuple[OpenerDirector, str]:
    """Opens addresses with the system's proxies, pip's or the system's certificates, and the name and password written into the address."""
    cert = _pip_settings(environ).get("cert")
    context = ssl.create_default_context(cafile=cert) if cert else ssl.create_default_context()
    if not cert and not context.get_ca_certs():                # a Python of its own may know none
        import certifi
        context.load_verify_locations(certifi.where())
    parts = urlsplit(index)
    handlers: list[Any] = [HTTPSHandler(context=context)]
    clean = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    if parts.username:
        passwords = HTTPPasswordMgrWithDefaultRealm()
        passwords.add_password(None, urljoin(clean, "/"), unquote(parts.username), unquote(parts.password or ""))
        handlers.append(HTTPBasicAuthHandler(passwords))
    return build_opener(*handlers), clean


def _find(opener: OpenerDirector, index: str, project: str, wheel: str) -> str:
    """The wheel's address on the project's page."""
    page_url = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    if page_url.startswith("file:"):
        page_url += "index.html"
    with opener.open(Request(page_url, headers={"Accept": _ACCEPT}), timeout=_TIMEOUT_S) as answer:
        content, kind, base = answer.read(_PAGE_BYTES), answer.headers.get("Content-Type", ""), answer.geturl()
    text = content.decode("utf-8", "replace")
    links = _json_links(text) if "json" in kind else _html_links(text)
    for name, link in links:
        if name == wheel:
            url = urljoin(base, link)
            if urlsplit(url).scheme not in ("https", urlsplit(index).scheme):
                raise ValueError(f"it sends the download to {urlsplit(url).scheme}")
            return url.partition("#")[0]
    raise LookupError(f"it has no {wheel}")


def _json_links(text: str) -> Iterator[tuple[str, str]]:
    content = json.loads(text)
    for file in content.get("files", []) if isinstance(content, dict) else []:
        yield str(file["filename"]), str(file["url"])


def _html_links(text: str) -> Iterator[tuple[str, str]]:
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attributes if tag == "a" and name == "href" and value)

    Links().feed(text)
    for link in found:
        yield unquote(urlsplit(link).path.rpartition("/")[2]), link


def _stream(opener: OpenerDirector, url: str, num_bytes: int, part: Path, report: Callable[[float], None]) -> None:
    """Append what is missing. A server that ignores the range sends all, and then all is written anew."""
    have = part.stat().st_size if part.exists() else 0
    if have > num_bytes:
        have = 0
    if have == num_bytes:
        return
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with opener.open(Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
        goes_on = have and getattr(answer, "status", None) == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        with open(part, "ab" if goes_on else "wb") as sink:
            have = have if goes_on else 0
            while block := answer.read(1 << 18):
                have += len(block)
                if have > num_bytes:
                    break
                report(have / num_bytes)          # first: whoever has been stopped must not write behind the next attempt's back
                sink.write(block)
    if have != num_bytes:
        if have > num_bytes:
            part.unlink()
        raise ValueError(f"it sent {have:,} of {num_bytes:,} bytes")


def _without_password(index: str) -> str:
    parts = urlsplit(index)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
