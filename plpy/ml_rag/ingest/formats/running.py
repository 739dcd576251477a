"""Running headers and footers: lines at the edges of pages and slides that repeat, but for the number of the page."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

#: characters of a running line
LONGEST = 120
#: different ones that the metadata show; of those of PDFs and slides, those that count pages: each chapter can have one
SHOWN = 5
#: that can be of a page: no part of a name, such as INV-1001, 2024/17 or 0007, or of a value, such as 1.5
_NUMBER = re.compile(r"(?a:(?<!\w)(?<!\w[/-]))(?<!\d[.,])(?:\d{1,2}|(?!0)\d{3,5})(?!(?a:\w)|[.,-]?\d)")
#: what stands before the number of a page
_PAGE = (
    r".*(?:\b(?:pages?|pp?|pg|p[aáà]g(?:ina)?|seite|s|blatt|folie|slide|diapositiv[ae]|blz|sid[ae]?|sivu|str|strona"
    r"|stran(?:a|ica)?|стр|стор|сторінка|страница|страна|oldal|sayfa|hal(?:aman)?|trang|σελ(?:ίδα)?|עמוד|صفح[ةه]|पृष्ठ"
    r"|หน้า)(?:\W*n[or])?[\W_]*|第 *(?=\0 *(?:[页頁]|ページ)))\0"
)
#: a number that is more likely of something else: "Fee: 100 EUR", "Section 1: Boats", "Invoice no. 1"
_VALUE = re.compile(rf"(?!{_PAGE})(?:.*(?:[:=#№第]|\bn[or]\.) *\0|\W*[^\W\d_]+[ .]*\0.*[^\W\d_])", re.I)
#: and one of a week or of a page of a chapter
_NAMED = re.compile(rf"(?!{_PAGE})\W*[a-z\u00aa-\u2e7f]+[ .]*\0", re.I)
#: by how much a number is more than that of the page at most, unless it stands alone: invoices count on from more
_MAX_OFFSET = 99

#: a line, and by how much its number, which it is without, is more than that of its page; None for all of a line
_Key = tuple[str, int | None]


def running(edges: Mapping[int, Sequence[str]]) -> tuple[dict[int, frozenset[str]], list[str]]:
    """Which of the lines at the edges of each page, by its number, run over pages, and the first of each kind.

    Without a number that counts pages a line runs over three pages that are two fifths of all. With one it is three
    pages, or two of two or three that count from 1 or a page before or after; and as many as two fifths count alike.
    What counts with the pages and is not their number, such as weeks, does not run.
    """
    pages: dict[_Key, set[int]] = defaultdict(set)
    alike: dict[int | None, set[int]] = defaultdict(set)
    for page, lines in edges.items():
        for line in lines:
            for key in _keys(line, page):
                pages[key].add(page)
                alike[key[1]].add(page)

    # the names of several chapters, with the number of the page, count on alike
    names = Counter(key[1] for key in pages if len(pages[key]) >= 3 and _NAMED.match(key[0]))

    def runs(key: _Key) -> bool:
        n, offset = len(pages[key]), key[1]
        many = pages[key] if offset is None else alike[offset]
        few = n == 2 and len(edges) <= 3 and offset is not None and abs(offset) <= 1
        if not (n >= 3 or few) or 5 * len(many) < 2 * len(edges):
            return False
        return not _VALUE.match(key[0]) and (names[offset] > 1 or not _NAMED.match(key[0]))

    kinds = {key for key in pages if runs(key)}
    found = {
        page: frozenset(line for line in lines if kinds.intersection(_keys(line, page)))
        for page, lines in edges.items()
    }
    shown: dict[_Key, str] = {}
    for page, lines in edges.items():
        for line in lines:
            for key in kinds.intersection(_keys(line, page)):
                shown.setdefault(key, line)
    for key in [key for key in shown if key[1] is not None][SHOWN:]:
        del shown[key]
    return found, list(dict.fromkeys(shown.values()))


def _keys(line: str, page: int) -> Iterator[_Key]:
    """The line, and the line with its first or last number left out."""
    if not line or len(line) > LONGEST:
        return
    yield line, None
    numbers = list(_NUMBER.finditer(line))
    for number in {numbers[0], numbers[-1]} if numbers else ():
        offset = int(number[0]) - page
        if offset <= _MAX_OFFSET or line.isdecimal():
            yield f"{line[: number.start()]}\0{line[number.end() :]}", offset


def may_be_text(line: str, page: int) -> bool:
    """Whether it is a number alone that need not be of the page: so it is in the margin only."""
    return line.isdecimal() and (len(line) > 5 or int(line) - page > _MAX_OFFSET)
