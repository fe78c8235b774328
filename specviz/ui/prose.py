"""A small part of Markdown as data: headings, paragraphs, lists, tables, code and bold words. What the viewer shows is text, never markup.

It knows nothing of lessons or pages.
"""
from __future__ import annotations

import re
from typing import Any

__all__ = ["blocks", "words"]

_WORDS = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|([^`*]+|[`*])")


def words(text: str) -> list[list[str]]:
    """A line as [style, text] pairs; style is "", "code" or "strong".

    >>> words("accept if `u < p/q`")
    [['', 'accept if '], ['code', 'u < p/q']]
    """
    out: list[list[str]] = []
    for code, strong, plain in _WORDS.findall(text):
        style, part = ("code", code) if code else ("strong", strong) if strong else ("", plain)
        if out and not style and not out[-1][0]:
            out[-1][1] += part
        else:
            out.append([style, part])
    return out


def blocks(text: str) -> list[dict[str, Any]]:
    """A document as blocks: {"kind": "h2", "words"}, "p" likewise, {"kind": "ul" or "ol", "items": [words]}, and {"kind": "table",
    "rows": [[words]]}, whose first row is the head."""
    out: list[dict[str, Any]] = []
    for part in re.split(r"\n\s*\n", text.strip()):
        lines = part.splitlines()
        if heading := re.match(r"(#{1,3}) (.+)$", lines[0]):
            out.append({"kind": f"h{len(heading[1])}", "words": words(heading[2])})
            lines = lines[1:]
        if not lines:
            continue
        if lines[0].startswith("|"):
            rows = [[words(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines
                    if not re.fullmatch(r"[|\s:-]+", line)]
            out.append({"kind": "table", "rows": rows})
        elif mark := re.match(r"(-|\d+\.) ", lines[0]):
            items = re.split(r"^(?:-|\d+\.) ", "\n".join(lines), flags=re.MULTILINE)[1:]
            out.append({"kind": "ul" if mark[1] == "-" else "ol", "items": [words(" ".join(item.split())) for item in items]})
        else:
            out.append({"kind": "p", "words": words(" ".join(line.strip() for line in lines))})
    return out
