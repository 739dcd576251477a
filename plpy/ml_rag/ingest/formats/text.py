"""Formats that are text already: plain text, Markdown, AsciiDoc, reStructuredText, subtitles, source code."""

from __future__ import annotations

import json
import math
import re
from datetime import date
from typing import Any

from ml_rag import abc
from ml_rag.ingest.formats.common import MAX_VALUE, Request, clean, document, metadata, one_line
from ml_rag.ingest.formats.encoding import decode
from ml_rag.protocol import LOAD_KEYS

#: characters of front matter that are read as YAML, and those of its values that each segment repeats; a value costs
#: some beside its text, so that nested ones end
_MAX_FRONT_MATTER = 16_384
_MAX_FRONT_VALUES = 4000
_VALUE_COST = 16

_HEADING = re.compile(r"^#[ \t]+(\S.*)$", re.MULTILINE)
# between two rules can stand text, too
_FRONT_MATTER = re.compile(
    r"""\A---\n((?:#[^\n]*\n)*["']?[\w.-]+["']?[ \t]*:.*?)\n(?:---|\.\.\.)(?:\n|\Z)""", re.DOTALL
)
#: if it is not YAML, such as "title: Guide: how to"; no line ends with a blank
_FRONT_KEY = re.compile(r"""["']?([\w.-]+)["']?[ \t]*:[ \t]*["']?(.*?)["']?$""")
#: numbers and truth values of YAML 1.1 that are texts in YAML 1.2, which authors mean: 01067, 12:30, 030_123, NO
_NEWER_TEXT = re.compile(r"[-+]?0[0-9b].*|.*[:_].*|yes|no|on|off", re.IGNORECASE)
#: the bytes of a picture in its place, as word processors and notebooks export it
_PICTURE = re.compile(r"data:image/[\w.+-]{1,100}(?:;[\w.=+-]{1,100}){0,9};base64,[a-z0-9+/=]{100,}", re.I)
#: of what programs print on a terminal
#: what Python says of an object that has no text
_OBJECT = re.compile(r"<[\w.]+(?: object)?(?: at 0x[0-9a-f]+)?>")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_RST_UNDERLINE = re.compile(r"""^([=\-`:'"~^_*+#<>])\1{2,}$""")
_CUE_TIME = re.compile(r"^(?:\d+:)?\d{1,2}:\d{2}[.,]\d{3}\s+-->\s+(?:\d+:)?\d{1,2}:\d{2}[.,]\d{3}.*$")
_CUE_VOICE = re.compile(r"<v(?:\.[^ \t.<>]+)*[ \t]+([^ \t<>][^<>]*)>")
#: those of WebVTT with their classes, its times, and what SRT has of HTML; any other < is of the text
_CUE_TAG = re.compile(
    r"</?(?:(?:c|i|b|u|s|ruby|rt)(?:\.[^<>\s]{0,200})?|(?:v|lang|font)(?:[. \t][^<>\n]{0,200})?)>"
    r"|<(?:\d+:)?\d{1,2}:\d{2}\.\d{3}>",
    re.IGNORECASE,
)
#: blocks of WebVTT that are not cues
_NO_CUE = re.compile(r"(?:WEBVTT|NOTE|STYLE|REGION)\b")


def parse_text(_name: str, content: bytes, request: Request) -> abc.Document:
    """Plain text as it is."""
    return document("text", [(decode(content, request.language), {})])


def parse_markdown(_name: str, content: bytes, request: Request) -> abc.Document:
    """Markdown; the keys of its front matter are metadata. Without a title there it is the first heading.

    Keys that every load writes are in an object of their own, ``front_matter``.
    """
    text = _PICTURE.sub("", clean(decode(content, request.language)))
    front = _FRONT_MATTER.match(text)
    found = _front_matter(front[1]) if front else None
    keys, left_out = _plain_keys(found) if found else ({}, [])
    body = text[front.end() :] if front and found else text
    title, author = keys.pop("title", None), keys.pop("author", None)
    if isinstance(author, list):
        author = ", ".join(map(str, author))
    meta = metadata(title=title or _heading(_FENCE.sub("", body)), author=author)
    taken = {key: keys.pop(key) for key in LOAD_KEYS & keys.keys()}
    meta = keys | ({"front_matter": taken} if taken else {}) | meta
    return document("markdown", [(body, {})], meta, f"front matter: {', '.join(left_out)}" if left_out else None)


def _front_matter(text: str) -> dict[Any, Any] | None:
    """The values by their keys; None if it is text between two rules."""
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            """Merged keys of merged keys have no bound: the loader refuses the tag of "<<"."""

        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            tag = super().resolve(kind, value, implicit)
            is_text = tag.endswith((":int", ":float", ":bool")) and _NEWER_TEXT.fullmatch(value)
            return self.DEFAULT_SCALAR_TAG if is_text else tag

    try:
        found = Loader(text).get_single_data() if len(text) <= _MAX_FRONT_MATTER else None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    lines: dict[str, list[str]] = {}
    goes_on: list[str] = []
    for line in text.split("\n"):
        if key := _FRONT_KEY.match(line):
            lines[key[1]] = goes_on = [key[2]]
        elif line.startswith((" ", "\t", "- ")):
            goes_on.append(line)
        elif line and not line.startswith("#"):
            return None
    return {key: one_line(" ".join(value)) for key, value in lines.items()}


def _plain_keys(found: dict[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of front matter as those of JSON, and the keys of those that are too long."""
    keys: dict[str, Any] = {}
    left_out = []
    room = _MAX_FRONT_VALUES
    for name, value in found.items():
        key = one_line(name)[:MAX_VALUE]
        try:
            plain, left = _plain(value, room - len(key))
        except OverflowError:
            left_out.append(key)
        else:
            keys[key], room = plain, left
    return keys, left_out


def _plain(value: Any, room: int) -> tuple[Any, int]:
    """A value of YAML as one of JSON, and how many characters are left. Raises OverflowError below 0."""
    room -= _VALUE_COST
    if isinstance(value, str):
        value = one_line(value)
        room -= len(value)
    if room < 0:
        raise OverflowError
    if isinstance(value, dict):
        plain: dict[str, Any] = {}
        for name, item in value.items():
            key = one_line(name)[:MAX_VALUE]
            plain[key], room = _plain(item, room - len(key))
        return plain, room
    if isinstance(value, list | tuple | set):
        items = []
        for one in value:
            item, room = _plain(one, room)
            items.append(item)
        return items, room
    if isinstance(value, date):
        return value.isoformat(), room
    is_json = value is None or isinstance(value, str | bool)
    is_number = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= 2**53
    return (value if is_json or is_number else one_line(value)[:MAX_VALUE]), room


def parse_asciidoc(_name: str, content: bytes, request: Request) -> abc.Document:
    """AsciiDoc with its section titles as Markdown headings."""
    text = clean(decode(content, request.language))
    text = re.sub(r"^(={1,6})[ \t]+(\S)", lambda found: f"{'#' * len(found[1])} {found[2]}", text, flags=re.MULTILINE)
    return _titled("asciidoc", text)


def parse_rst(_name: str, content: bytes, request: Request) -> abc.Document:
    """reStructuredText with its underlined titles as Markdown headings, levels in order of appearance."""
    lines = clean(decode(content, request.language)).split("\n")
    levels: list[str] = []
    out: list[str] = []
    for line in lines:
        rule = _RST_UNDERLINE.match(line)
        title = out[-1].strip() if out else ""
        if rule and title and len(line) >= len(title) and not title.startswith("#") and out[-1][:1].strip():
            over = len(out) > 1 and out[-2] == line
            style = line[0] * 2 if over else line[0]
            if style not in levels:
                levels.append(style)
            out[-2 if over else -1 :] = [f"{'#' * min(levels.index(style) + 1, 6)} {title}"]
        else:
            out.append(line)
    return _titled("rst", "\n".join(out))


def parse_source(name: str, content: bytes, request: Request) -> abc.Document:
    """Source code in a fence, so that its comments are not taken for headings."""
    text = clean(decode(content, request.language))
    return document("source", [(_fenced(text, name.rpartition(".")[2]), {})])


def notebook(found: dict[str, Any]) -> tuple[str, str | None]:
    """The cells of a notebook of Jupyter, code and what it printed in fences, and its title. Raises AttributeError or
    TypeError."""
    language = str(found.get("metadata", {}).get("kernelspec", {}).get("language", ""))
    parts, titled = [], []
    for cell in found["cells"]:
        text = _PICTURE.sub("", "".join(cell.get("source", "")))
        is_code = cell.get("cell_type") == "code"
        parts.append(_fenced(text, language) if is_code else text)
        titled += [] if is_code else [text]
        parts += map(_shown, cell.get("outputs", ()))
    return "\n\n".join(filter(None, parts)), _heading(_FENCE.sub("", "\n\n".join(titled)))


def _shown(output: dict[str, Any]) -> str:
    """What a cell shows: Markdown and HTML as such, where it has no better text than the name of their class."""
    from ml_rag.ingest.formats.html import html_to_markdown  # which most texts do without

    data = output.get("data", {})
    plain = _COLOUR.sub("", "".join(output.get("text") or data.get("text/plain") or output.get("traceback", "")))
    if "text/markdown" in data:
        return _PICTURE.sub("", "".join(data["text/markdown"]))
    if "text/html" in data and (not plain.strip() or _OBJECT.fullmatch(plain.strip())):
        return html_to_markdown("".join(data["text/html"]))
    if "application/json" in data and _OBJECT.fullmatch(plain.strip()):
        plain = json.dumps(data["application/json"], ensure_ascii=False)
    return _fenced(plain, "")


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    name = re.sub(r"[^a-z0-9]", "", language.lower())
    return f"{fence}{name}\n{text}\n{fence}" if text.strip() else ""


def parse_subtitles(_name: str, content: bytes, request: Request) -> abc.Document:
    """WebVTT or SRT: what is said, a line a cue, ``Speaker: `` before it where the cue names one."""
    text = clean(decode(content, request.language))
    is_vtt = text.startswith("WEBVTT")
    cues: list[str] = []
    for chunk in text.split("\n\n"):
        lines = chunk.split("\n")
        timed = next((i for i, line in enumerate(lines) if _CUE_TIME.match(line.strip())), None)
        if timed is None and is_vtt and _NO_CUE.match(chunk):
            continue
        # without a time it continues the cue before; before it a WebVTT cue has its name, an SRT one its number
        named = [] if timed is None or is_vtt else [line for line in lines[:timed] if not line.strip().isdigit()]
        first = 0 if timed is None else timed + 1
        said = _CUE_VOICE.sub(r"\1: ", " ".join(line.strip() for line in named + lines[first:]))
        said = _CUE_TAG.sub("", said)
        for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&nbsp;", " "), ("&amp;", "&")):
            said = said.replace(entity, char)
        if said.strip() and (not cues or cues[-1] != said.strip()):
            cues.append(said.strip())
    return document("vtt" if is_vtt else "srt", [("\n".join(cues), {})])


def _titled(format_name: str, text: str) -> abc.Document:
    return document(format_name, [(text, {})], metadata(title=_heading(text)))


def _heading(text: str) -> str | None:
    found = _HEADING.search(text)
    return found[1].rstrip().rstrip("#") if found else None
