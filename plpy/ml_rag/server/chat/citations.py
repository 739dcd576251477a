"""Citation markers in an answer, held against its citations: what points nowhere is taken out.

A marker is a number in brackets, as models write it: ``[1]``, ``[1, 3]``, ``[1][2]``, ``[1-3]``, ``【1】``,
``[Document 1]``, ``[source #2]``. It is right where the answer has a citation of that number, counted from 1. Right
ones stay as they are; of a list the right numbers stay; the rest goes, together with the blank before it.

Not every number in brackets is a marker. Left alone are numbers of four digits and more without a word such as
``Document`` (years; there are at most 100 citations), lists and ranges of bare numbers with a 0 in them (intervals),
whatever stands in Markdown's code, links, and what reads as an index or a literal of a program. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_BLANK = "[ \t\u00a0]"
_S = _BLANK + "{0,3}"  # bounded, as all repetitions here are: no text takes more than time in step with its length
_WORD = (
    r"(?:documents?|docs?\.?|sources?|citations?|references?|refs?\.?|segments?|passages?|文档|文件|来源|引用|段落)"
    rf"(?:{_S}(?:numbers?|no\.?|nr\.?|id))?{_S}[:=#]?{_S}[\"']?"
)
_NUMBER = rf"[#^]?\d{{1,9}}[\"']?(?:{_S}(?:-|–|—|~|to|through){_S}\d{{1,9}})?"
_BETWEEN = rf"{_S}(?:,{_S}and|,|;|/|&|and|、|，){_S}"
_BODY = rf"{_S}(?:{_WORD})?{_NUMBER}(?:{_BETWEEN}(?:{_WORD})?{_NUMBER})*(?:†[^\]】］\n]{{0,80}})?{_S}"
_MARKER = re.compile(rf"\[{_BODY}\]|【{_BODY}】|［{_BODY}］", re.IGNORECASE)
_ITEM = re.compile(rf"(\d{{1,9}})(?:[\"']?{_S}(?:-|–|—|~|to|through){_S}(\d{{1,9}}))?", re.IGNORECASE)
#: what joins markers to one group: nothing, blanks, a comma, "and"
_JOINT = re.compile(rf"{_S}(?:,{_S}and|,|;|&|and|、|，)?{_S}", re.IGNORECASE)
_CODE = re.compile(r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|``.+?``|`[^`\n]+`", re.DOTALL)

_LONGEST_BARE = 3  # digits
_BEHIND = 80  # characters that are looked at before a bracket
#: the end of what is before a bracket that belongs to a program: a_b, a.b, a->b, $a, a single small letter, f(…)
_INDEXED = re.compile(
    r"(?:\w*[_$][\w$]*|\w+(?:\.|->|::)\w+|(?<![\w'’])[a-z]|[A-Za-z_]\w*\([^()\n]*\)|[A-Za-z_]\w*\[[^\[\]\n]*\])\Z",
    re.ASCII,
)
_LITERAL = re.compile(rf"(?:={_S}|\w\()\Z")
#: what follows an index, a literal or a link
_CODE_GOES_ON = re.compile(rf"{_S}(?:[-+*/%|&]?=|\+\+|--)|\.[a-z_]|\([^()\s]*\)|\[(?!{_S}\d)")
_STATEMENT_ENDS = re.compile(r";[ \t]*(?:\n|\Z)")
_PAIRS = (("(", ")"), ("[", "]"), ("（", "）"), ("<sup>", "</sup>"))
#: how deep what markers leave behind is looked at: a text of nothing else takes a pass for each
PASSES = 16

#: characters after a marker that decide what it is, and what goes with it
_AHEAD = 16
_OPENED, _CLOSED = re.compile(r"[\[【［]"), re.compile(r"[\]】］]")
#: a bracket without an end that is longer is not a marker
_LONGEST_MARKER = 400
#: what of a text may be code over several lines; what may begin a marker, or go with one that follows
_FENCED = re.compile("``|~~~")
_MAY_GO, _MAY_OPEN = " \t\r\n\u00a0([（【［~", tuple("<sup>"[:n] for n in range(1, 6))
#: characters of a line that are held against its citations as they come, and brackets in it; with more its end is
#: waited for
_LONGEST_LINE, _MOST_BRACKETS = 4096, 100


@dataclass(frozen=True, slots=True)
class _Marker:
    start: int
    end: int
    stays: str  # of its text; empty = nothing
    right: bool  # all of it stays


def verify(text: str, citations: int) -> str:
    """``text`` without the markers that point to none of ``citations`` (their number, 0 and more).

    A text whose markers are all right, or that has none, comes back as it is.
    """
    # What a marker leaves behind may make another one, as in [[9]8].
    for _ in range(PASSES):
        cleaned = _verify(text, citations)
        if cleaned == text:
            break
        text = cleaned
    return text


def without_markers(text: str) -> str:
    """``text`` of a document with each number in round brackets that could be taken for a marker of the answer."""
    return _MARKER.sub(lambda marker: f"({marker[0][1:-1]})", text)


class Verified:
    """``verify`` of a text that comes in pieces: what nothing that follows can change is passed on at once."""

    def __init__(self, citations: int) -> None:
        self._citations = citations
        #: from the beginning of a line on, with the end of the one before; and what of it was passed on
        self._text = self._passed = ""
        self._certain = 0
        #: characters from which on a long one is looked at again
        self._again = _LONGEST_LINE

    def takes_long(self, piece: str = "") -> bool:
        """Whether to continue takes too long for an event loop."""
        return len(self._text) + len(piece) > _LONGEST_LINE

    def add(self, piece: str) -> str:
        """What is certain now."""
        self._text += piece
        if len(self._text) > _LONGEST_LINE:
            if "\n" not in piece or len(self._text) < self._again:
                return ""
            self._again = 2 * len(self._text)
        if (end := _certain(self._text)) <= self._certain:
            return ""
        self._certain, certain = end, self._text[:end]
        cleaned = verify(certain, self._citations)
        ready = self._pass_on(_without_end(cleaned))
        if (line := certain.rfind("\n")) > 0:
            lines, last = (verify(part, self._citations) for part in (certain[:line], certain[line:]))
            if cleaned == lines + last and len(self._passed) >= len(lines):
                self._text, self._passed = self._text[line:], self._passed[len(lines) :]
                self._certain -= line
        return ready

    def end(self) -> str:
        """The rest."""
        return self._pass_on(verify(self._text, self._citations))

    def _pass_on(self, text: str) -> str:
        ready, self._passed = text[len(self._passed) :], text
        return ready


def _without_end(text: str) -> str:
    """Without what would go with a marker that follows."""
    while (short := text.rstrip(_MAY_GO)) != text or short.endswith(_MAY_OPEN):
        text = short[: short.rfind("<")] if short.endswith(_MAY_OPEN) else short
    return text


def _certain(text: str) -> int:
    """How many of the characters nothing that follows can change, but for blanks and brackets at the end."""
    end = len(text.rstrip("~"))
    if fenced := _FENCED.search(text):
        end = fenced.start()
    line = text.rfind("\n", 0, end) + 1
    if (code := text.find("`", line, end)) >= 0:
        end = code
    if sum(map(text[line:end].count, "[【［")) > _MOST_BRACKETS:
        return line
    chain = at = line  # where markers begin that one which is not certain may be joined to
    is_first = True
    while opened := _OPENED.search(text, at, end):
        start = opened.start()
        chain, is_first = start if is_first or start - at >= _AHEAD else chain, False
        marker = _MARKER.match(text, start, end)
        closed = marker.end() if marker else _after_bracket(text, start, end)
        if closed is None or end - closed < _AHEAD or re.match(r"\([^()\s]*\Z|;?[ \t]*\Z", text[closed:end]):
            return chain
        at = closed
    return end


def _after_bracket(text: str, start: int, end: int) -> int | None:
    """Where a bracket that is not a marker ends; None while it may become one."""
    closed = _CLOSED.search(text, start, min(end, start + _LONGEST_MARKER + 1))
    if closed is None:
        return start + 1 if end - start > _LONGEST_MARKER else None
    # what is taken out of a bracket can leave another marker
    return None if _OPENED.search(text, start + 1, closed.end()) else closed.end()


def _verify(text: str, citations: int) -> str:
    out, at = [], 0
    for group in _groups(text, _markers(text, citations)):
        if all(marker.right for marker in group):
            continue
        start, end = group[0].start, group[-1].end
        stays = ""
        for before, marker in zip([None, *group], group, strict=False):
            if marker.stays:
                stays += (text[before.end : marker.start] if before and stays else "") + marker.stays
        if not stays:
            start, end = _widened(text, start, end)
        out += [text[at:start], stays]
        at = end
    return "".join([*out, text[at:]])


def _markers(text: str, citations: int) -> Iterator[_Marker]:
    code = [match.span() for match in _CODE.finditer(text)]
    last = -1  # where the last marker ended
    span = 0
    for match in _MARKER.finditer(text):
        start, end = match.span()
        while span < len(code) and code[span][1] <= start:
            span += 1
        if span < len(code) and code[span][0] < end:
            continue
        items = list(_ITEM.finditer(match[0]))
        worded = re.match(rf"[\[【［]{_S}[#^]?\d", match[0]) is None
        if not worded and not _may_be_bare(items):
            continue
        if start != last and _is_code(text, start, end):
            continue
        last = end
        stays = _right_part(match[0], items, citations)
        yield _Marker(start, end, stays, stays == match[0])


def _may_be_bare(items: list[re.Match[str]]) -> bool:
    """Whether numbers without a word can be a marker: no year, no interval."""
    numbers = [number for item in items for number in item.groups() if number is not None]
    if any(len(number) > _LONGEST_BARE for number in numbers):
        return False
    return len(numbers) == 1 or all(int(number) for number in numbers)


def _is_code(text: str, start: int, end: int) -> bool:
    """Whether the bracket reads as an index, a literal or a link rather than as a marker."""
    before = text[max(0, start - _BEHIND) : start]
    if before.endswith(("\\", "!")) or _CODE_GOES_ON.match(text, end):
        return True
    if not before or before[-1].isspace():
        return _LITERAL.search(before) is not None
    if before[-1] == "]" or _LITERAL.search(before) or _INDEXED.search(before):
        return True
    return before[-1].isalnum() and _STATEMENT_ENDS.match(text, end) is not None


def _right_part(marker: str, items: list[re.Match[str]], citations: int) -> str:
    """The marker with its right numbers only; itself where all are right, nothing where none is."""
    kept, all_right = [], True
    for item in items:
        first, last = sorted((int(item[1]), int(item[2] or item[1])))
        right_first, right_last = max(first, 1), min(last, citations)
        if right_first > right_last:
            all_right = False
        elif (right_first, right_last) == (first, last):
            kept.append(item[0])
        else:
            all_right = False
            kept.append(f"{right_first}-{right_last}" if right_first < right_last else f"{right_first}")
    if all_right:
        return marker
    return marker[: items[0].start()] + ", ".join(kept) + marker[-1] if kept else ""


def _groups(text: str, markers: Iterable[_Marker]) -> Iterator[list[_Marker]]:
    """Markers that only a joint separates, together: what stays of them keeps the joints between."""
    group: list[_Marker] = []
    for marker in markers:
        if group and not _JOINT.fullmatch(text, group[-1].end, marker.start):
            yield group
            group = []
        group.append(marker)
    if group:
        yield group


def _widened(text: str, start: int, end: int) -> tuple[int, int]:
    """What goes with a marker: brackets around it that would be empty, the blank before, the line it has to itself."""
    while pair := next((p for p in _PAIRS if text.endswith(p[0], 0, start) and text.startswith(p[1], end)), None):
        start, end = start - len(pair[0]), end + len(pair[1])
    first = start
    while first > 0 and re.match(_BLANK, text[first - 1]):
        first -= 1
    if first > 0 and text[first - 1] != "\n":
        return first, end
    # at the beginning of a line it is the blank after it that is too much, or the whole line
    after = re.compile(rf":?{_BLANK}*").match(text, end)
    end = after.end() if after else end
    if end < len(text) and text[end] != "\n":
        return start, end
    if first == 0:
        return 0, min(end + 1, len(text))
    return first - 1, end
