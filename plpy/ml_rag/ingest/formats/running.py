"""Running headers and footers: lines at the edges of pages and slides that repeat, but for the number of the page."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

#: characters of a running line
LONGEST = 120
#: different ones that the metadata show
_SHOWN = 5
_NUMBER = re.compile(r"\d{1,5}")


def running(edges: Mapping[int, Sequence[str]]) -> tuple[dict[int, frozenset[str]], list[str]]:
    """Which of the lines at the edges of each page, by its number, run over pages, and the first of each kind.

    With a number that counts pages a line runs over three pages, or two where there are few; without one over three
    that are two fifths of all.
    """
    pages: dict[tuple[str, bool], set[int]] = defaultdict(set)
    for page, lines in edges.items():
        for line in lines:
            for key in _keys(line, page):
                pages[key].add(page)

    def runs(key: tuple[str, bool]) -> bool:
        n = len(pages[key])
        return n >= 3 if key[1] else n >= 3 and 5 * n >= 2 * len(edges)

    few = len(edges) <= 4
    kinds = {key for key, found in pages.items() if runs(key) or (key[1] and few and len(found) == 2)}
    found = {
        page: frozenset(line for line in lines if kinds.intersection(_keys(line, page)))
        for page, lines in edges.items()
    }
    shown: dict[tuple[str, bool], str] = {}
    for page, lines in edges.items():
        for line in lines:
            for key in kinds.intersection(_keys(line, page)):
                shown.setdefault(key, line)
    return found, list(dict.fromkeys(shown.values()))[:_SHOWN]


def _keys(line: str, page: int) -> Iterator[tuple[str, bool]]:
    """The line, and the line with its first or last number as its distance from the number of the page."""
    if not line or len(line) > LONGEST:
        return
    yield line, False
    numbers = list(_NUMBER.finditer(line))
    for number in {numbers[0], numbers[-1]} if numbers else ():
        yield f"{line[: number.start()]}\0{int(number[0]) - page}\0{line[number.end() :]}", True
