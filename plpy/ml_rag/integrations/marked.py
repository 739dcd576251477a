"""Texts of documents and answers as HTML: Markdown with its tables, passages marked, sentences with their support.

All that a text says is shown: its HTML is text, but for line breaks and formatting; its links and pictures are their
words. "As stored" shows the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markupsafe import Markup, escape

#: where a passage begins and ends, in the text that is rendered: no reference such as &#xe000; stands for one of these
_BEGIN, _END = "\ufdd0", "\ufdd1"
#: what Markdown has at the begin of a line, or of a cell
_LEAD = re.compile(r"(?:[ \t\n]|#{1,6} |[-*+>|] ?|\d{1,9}[.)] |\|[ :|-]*\n)*")
#: formatting that is dropped, with what it stands around left in place
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_FORMAT = re.compile(r"</?(?:b|i|u|em|strong|span|font|p|div|center|sub|sup|small)(?:\s[^<>]*)?>", re.IGNORECASE)

#: cells of a text that is shown with tables, as rows get those that they lack; characters of a cell's label
_CELLS, _LABEL = 10_000, 100


class _Renderer(RendererHTML):
    """Headings are paragraphs, as the page has an outline of its own; nothing is loaded and nothing leads elsewhere."""

    is_marked = False

    def text(self, tokens: Any, index: int, *_: Any) -> str:
        lines = _BREAK.split(_FORMAT.sub("", tokens[index].content))
        return "<br>".join(self._marked(line) for line in lines)

    def code_inline(self, tokens: Any, index: int, *_: Any) -> str:
        return f"<code>{self._marked(tokens[index].content)}</code>"

    def _marked(self, text: str) -> str:
        made = ""
        for part in re.split(f"([{_BEGIN}{_END}])", text):
            if part in (_BEGIN, _END):
                self.is_marked = part == _BEGIN
            elif part:
                made += f"<mark>{escape(part)}</mark>" if self.is_marked else str(escape(part))
        return made

    def fence(self, tokens: Any, index: int, *_: Any) -> str:
        return f'<pre tabindex="0">{self._marked(tokens[index].content)}</pre>'

    code_block = fence  # type: ignore[assignment]

    def heading_open(self, *_: Any) -> str:
        return '<p class="heading">'

    def heading_close(self, *_: Any) -> str:
        return "</p>\n"

    def table_open(self, *_: Any) -> str:
        self._labels: list[str] = []
        wrapper = '<div class="scroll" tabindex="0" role="group" aria-label="Table of the document">'
        return f'{wrapper}<table class="stack">\n'

    def th_open(self, tokens: Any, index: int, *_: Any) -> str:
        self._labels.append(re.sub(f"[{_BEGIN}{_END}]", "", tokens[index + 1].content)[:_LABEL])
        return "<th>"

    def tr_open(self, *_: Any) -> str:
        self._row = iter(self._labels)
        return "<tr>\n"

    def td_open(self, *_: Any) -> str:
        return f'<td data-label="{escape(next(self._row, ""))}">'

    def table_close(self, *_: Any) -> str:
        return "</table></div>\n"

    def link_open(self, *_: Any) -> str:
        return ""

    link_close = link_open

    def image(self, tokens: Any, index: int, *_: Any) -> str:
        return str(escape(tokens[index].content))

    def hr(self, *_: Any) -> str:
        return "<p>– – –</p>\n"


def markdown(text: str, highlights: Sequence[Mapping[str, int]] = ()) -> Markup:
    """A segment, with its passages marked. ``highlights``: of ``citation_fields``."""
    text = re.sub(f"[{_BEGIN}{_END}]", " ", text)
    at: dict[int, str] = {}
    for passage in highlights:
        begin, end = passage["start"], passage["end"]
        found = _LEAD.match(text, begin, end)
        begin = found.end() if found else begin
        # what comes behind the last bar of a row is not shown
        end = begin + len(text[begin:end].rstrip("| \t\n"))
        if begin < end:
            at[begin], at[end] = _BEGIN, _END
    for place in sorted(at, reverse=True):
        text = text[:place] + at[place] + text[place:]
    reader = MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
    lines = re.split(r"\r\n?|\n", text)
    if len(lines) * max(line.count("|") for line in lines) <= _CELLS:
        reader.enable("table")
    return Markup(reader.render(text))  # noqa: S704 - the renderer escapes it


def cells(text: str) -> str:
    """Rows of tables, such as sentences of an extractive answer, without bars."""
    return "\n".join(
        " · ".join(filter(None, map(str.strip, line.split("|")))) if re.fullmatch(r"\s*\|.*\|\s*", line) else line
        for line in text.split("\n")
    )


def supported(text: str, claims: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """An answer in pieces, each with the claim that it is, or null between them."""
    pieces: list[tuple[str, Mapping[str, Any] | None]] = []
    place = 0
    for claim in claims:
        begin, end = claim["start_pos"], claim["end_pos"]
        if place <= begin < end <= len(text):
            pieces += [(text[place:begin], None), (text[begin:end], claim)]
            place = end
    return [piece for piece in [*pieces, (text[place:], None)] if piece[0]]


def excerpt(segment: str | None, most: int = 120) -> str:
    """The first words of a segment, without what Markdown draws tables and headings with, and emphasis."""
    text = re.sub(r"\*\*|`", "", _FORMAT.sub("", _BREAK.sub(" ", segment or "")))
    words = re.sub(r"\|[\s|:-]*|(?:^|(?<=\s))#{1,6} ", " ", text).split()
    kept: list[str] = []
    length = 0
    for word in words:
        length += len(word) + 1
        if length > most:
            return " ".join(kept or [word[:most]]) + " …"
        kept.append(word)
    return " ".join(kept)


def best(row: Mapping[str, Any], most: int = 160) -> str:
    """The passage of a citation that answers best, or its first words."""
    passages = row.get("highlights") or []
    segment = row["segment"]
    return excerpt(segment[passages[0]["start"] : passages[0]["end"]] if passages else segment, most)
