"""HTML to Markdown. Scripts, styles and navigation are left out; of a link its text stays, of an image its alt text."""

from __future__ import annotations

import re
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from functools import cache
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from ml_rag import abc
from ml_rag.ingest.formats.common import Repeats, Request, document, metadata, pipe_table, power
from ml_rag.ingest.formats.encoding import decode
from ml_rag.ingest.formats.numbering import numeral, whole
from ml_rag.ingest.formats.pictures import MARK, Pictures

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

_DROPPED = [
    "script", "style", "noscript", "template", "svg", "iframe", "object", "nav", "button", "select",
    "rt", "rp", "annotation", "annotation-xml",  # readings of characters, formulas in other words
]  # fmt: skip
#: of formulas, and what stands before each of their parts but the first
_SIGNS = {
    "mfrac": "/", "msup": "^", "msub": "_", "munder": "_", "mover": "^", "msubsup": "_^", "munderover": "_^",
    "mroot": "√",  # the index, which stands first here, is before the sign
}  # fmt: skip
#: parts that are never in brackets
_WHOLE = ("mi", "mn", "mo", "mtext")
#: where a button is what stands there: the heading of a part that it opens, the column that it sorts by
_HEADINGS = ["h1", "h2", "h3", "h4", "h5", "h6"]
_LABELS = [*_HEADINGS, "dt", "legend", "summary", "th"]
#: words of a button that is text, such as the question whose answer it opens; of one that says so in its class, any
_WORDS, _WORDS_OPENING = 6, 3
_OPENING = {"accordion", "collapsible"}
#: that browsers show apart, and markdownify in a line with what is around them
_BLOCKS = [
    "address", "aside", "center", "details", "dialog", "fieldset", "footer", "form", "header", "hgroup", "legend",
    "main", "menu", "optgroup", "option", "search", "summary", "textarea",
]  # fmt: skip
_PARTS = ["thead", "tbody", "tfoot", "tr"]
_CELLS = ["td", "th"]
#: elements that put a sign before each line within them, and the depth beyond which they put none
_MARKED = ["blockquote", "li"]
_MOST_MARKED = 20
#: of the lines of an item with a long number
_MOST_INDENT = 12
# Marks between cells and rows while the converter works from the inside out
_OPEN, _CELL, _ROW = "\x1d", "\x1f", "\x1e"
_MARKS = re.compile(f"[{MARK}\x1c-\x1f]")
#: text of XHTML, which the parser of HTML takes for a comment
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_SPANS = re.compile(_OPEN + r"(\d+),(\d+),")
#: what browsers take
_MAX_SPANS = {"colspan": 1000, "rowspan": 65_534}
#: of a style, whose last declaration counts, or the last important one
_DISPLAY = re.compile(r"(?:\A|;)\s{0,100}display\s{0,100}:\s{0,100}([\w-]{1,100})\s{0,100}(!\s{0,100}important)?")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def parse_html(_name: str, content: bytes, request: Request) -> abc.Document:
    """One block of Markdown, but for pictures that are described; title and author from the head."""
    soup = _soup(decode(content, request.language))
    meta = _metadata(soup)
    pictures = request.pictures

    def describe(source: str) -> str:
        return pictures.mark(lambda: _embedded(source)) if pictures and source.startswith("data:image/") else ""

    return document("html", html_blocks(soup, pictures, describe, {}), meta)


def html_to_markdown(text: str) -> str:
    """Markdown of a piece of HTML."""
    return _convert(_soup(text))


def mail_to_markdown(text: str) -> str:
    """Markdown of the HTML of a mail, without what it hides, such as the line that a list of mails shows of it. On a
    page, what is hidden is often text that a click shows."""
    soup = _soup(text)
    for element in soup.find_all(style=_is_hidden):
        if not element.decomposed:  # with another one
            element.decompose()
    # one that hides all of it has forgotten to end
    return _convert(soup) or html_to_markdown(text)


def _is_hidden(style: str | None) -> bool:
    found = _DISPLAY.findall(_COMMENT.sub("", style or "").lower())
    last = ([value for value, is_important in found if is_important] or [value for value, _ in found])[-1:]
    return last == ["none"]


def html_blocks(
    html: str | BeautifulSoup, pictures: Pictures | None, mark: Callable[[str], str], keys: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Blocks of a piece of HTML: Markdown, and where ``pictures`` is given a block for each picture that has a text.

    ``mark``: of ``pictures``, by the picture's address. A picture in a table comes after it.
    """
    soup = _soup(html) if isinstance(html, str) else html
    if pictures is None:
        return [(_convert(soup), keys)]
    for image in soup.find_all(["img", "image"]):
        address = image.get("src") or image.get("xlink:href") or image.get("href") or ""
        if described := mark(str(address)):
            place = soup.new_tag("p")
            place.string = described
            (image.find_parents(["table", "svg"]) or [image])[-1].insert_after(place)
    return pictures.blocks(_convert(soup), keys)


def _embedded(address: str) -> bytes:
    """The bytes of a data URI. Raises ValueError."""
    head, _, data = address.partition(",")
    if head.endswith(";base64"):
        return b64decode(unquote_to_bytes(data))
    return unquote_to_bytes(data)


def _soup(text: str) -> BeautifulSoup:
    import warnings

    from bs4 import BeautifulSoup, MarkupResemblesLocatorWarning, XMLParsedAsHTMLWarning

    if "http://www.w3.org/1999/xhtml" in text:
        # up to the last end: from a beginning without one, all of the rest would be read
        sections, end, rest = text.rpartition("]]>")
        text = _CDATA.sub(lambda found: escape(found[1]), sections + end) + rest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarkupResemblesLocatorWarning)
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        # else an attribute of more than 10 MB, such as a picture, would be dropped without a word
        soup = BeautifulSoup(text, "lxml", huge_tree=True)
    for string in soup.find_all(string=_MARKS):  # not in the source, where they can be references
        string.replace_with(_MARKS.sub("", string))
    return soup


def _metadata(soup: BeautifulSoup) -> dict[str, Any]:
    title = soup.find("title") or soup.find("h1")
    author = soup.find("meta", attrs={"name": re.compile("^author$", re.I)})
    return metadata(title=title.get_text() if title else None, author=author.get("content") if author else None)


def _convert(soup: BeautifulSoup) -> str:
    labels: set[int] = set()
    marked: dict[int, int] = {}
    for element in soup.find_all(True):
        marked[id(element)] = around = marked.get(id(element.parent), 0) + (element.name in _MARKED)
        if around > _MOST_MARKED and element.name in _MARKED:
            element.name = "div"
        if element.name in _LABELS or id(element.parent) in labels:
            labels.add(id(element))
            element.name = "span" if element.name == "button" else element.name
    headed = {id(heading.find_parent("button")) for heading in soup(_HEADINGS)}
    for button in soup("button"):
        if id(button) in headed or _is_text(button):
            button.name = "div"
    # where tags that may be left out are, the parser takes elements of the body, such as <main>, for parts of the head
    for element in [*soup(_DROPPED), *(one for head in soup("head") for one in head("title"))]:
        element.decompose()
    for element in soup(_BLOCKS):
        element.name = "div"
    for root in soup("mroot"):
        if len(parts := root.find_all(True, recursive=False)) == 2:
            root.insert(0, parts[1].extract())
    _flatten_layout_tables(soup)
    _free_cells(soup)
    _number(soup)
    try:
        converter = _converter()
        converter.repeats = Repeats()
        markdown: str = converter.convert_soup(soup)
        return markdown
    except RecursionError:
        # Thousands of nested elements: the text without its structure.
        return soup.get_text("\n", strip=True)


def _is_text(button: Any) -> bool:
    if _OPENING.intersection(button.get_attribute_list("class")):
        return True
    least = _WORDS_OPENING if {"aria-controls", "aria-expanded"} & button.attrs.keys() else _WORDS
    words = (word for text in button.stripped_strings for word in text.split(maxsplit=least))
    return len(list(islice(words, least))) == least


def _number(soup: BeautifulSoup) -> None:
    """Put before the items of lists what browsers show there: the number of an ordered list, in its kind. A document
    of Word says it at their beginning, and has items that are there only to hold lists."""
    is_told = soup.find("marker") is not None
    items: list[Any] = soup.find_all("li")
    counts = Counter(id(item.parent) for item in items)
    numbers: dict[int, int] = {}
    for item in items:
        around = item.parent
        first = item.contents[0] if item.contents else None
        if is_told and first is not None and first.name == "marker":
            item["marker"] = first.extract().get_text().strip()
        elif is_told and first is not None and first.name in ("ul", "ol"):
            item["marker"] = ""
        elif around.name != "ol":
            item["marker"] = "-"
        else:
            is_down = "reversed" in around.attrs
            step = -1 if is_down else 1
            start = whole(around.get("start"), counts[id(around)] if is_down else 1)
            number = whole(item.get("value"), numbers.get(id(around), start - step) + step)
            numbers[id(around)] = number
            item["marker"] = f"{numeral(number, str(item.get('type') or around.get('type')))}."


def _flatten_layout_tables(soup: BeautifulSoup) -> None:
    """Make tables that only place things on the page (one column, or other tables inside) plain blocks."""
    parts: dict[int, list[Any]] = {}
    outer: set[int] = set()
    tables = soup.find_all("table")
    for table in tables:
        outer.add(id(table.find_parent("table")))
    for part in soup.find_all([*_PARTS, *_CELLS]):
        parts.setdefault(id(part.find_parent("table")), []).append(part)
    for table in tables:
        own = parts.get(id(table), [])
        cells = Counter(id(part.parent) for part in own if part.name in _CELLS)
        if id(table) in outer or max(cells.values(), default=0) <= 1:
            for element in (table, *own):
                element.name = "div"
    for part in parts.get(id(None), []):
        part.name = "div"


def _free_cells(soup: BeautifulSoup) -> None:
    """Make elements around rows and cells plain: their signs and line ends would stand at the ends of the marks."""
    around: dict[int, Any] = {}
    for part in soup.find_all([*_PARTS, *_CELLS]):
        element: Any = part.parent
        while element.name not in ("table", *_PARTS, *_CELLS) and id(element) not in around:
            around[id(element)] = element
            element = element.parent
    for element in around.values():
        element.name = "span"


@cache
def _converter() -> Any:
    from markdownify import ATX, MarkdownConverter

    class Converter(MarkdownConverter):
        """Tables are put together here: markdownify knows neither row spans nor headerless tables well."""

        #: of the document
        repeats: Repeats

        def convert_a(self, el: Any, text: str, parent_tags: Any) -> str:
            return text

        def convert_img(self, el: Any, text: str, parent_tags: Any) -> str:
            return " ".join((el.attrs.get("alt") or "").split())

        def convert_input(self, el: Any, text: str, parent_tags: Any) -> str:
            if str(el.attrs.get("type")).lower() not in ("checkbox", "radio"):
                return ""
            is_apart = isinstance(el.next_sibling, str) and el.next_sibling[:1].isspace()
            return ("☒" if "checked" in el.attrs else "☐") + ("" if is_apart else " ")

        def convert_sup(self, el: Any, text: str, parent_tags: Any) -> str:
            before = el.previous_element
            return power(before, text) if isinstance(before, str) else text

        def convert_li(self, el: Any, text: str, parent_tags: Any) -> str:
            before = f"{el['marker']} ".lstrip()
            lines = text.strip().replace("\n", "\n" + " " * min(len(before), _MOST_INDENT))
            return f"{before}{lines}\n" if lines else "\n"

        def convert_mrow(self, el: Any, text: str, parent_tags: Any) -> str:
            if (signs := _SIGNS.get(el.parent.name)) is None:
                return text
            shown = text if el.name in _WHOLE or len(text) < 2 else f"({text})"
            place = sum(1 for one in islice(el.previous_siblings, 9) if one.name is not None)
            return signs[min(place, len(signs)) - 1] + shown if place else shown

        convert_mi = convert_mn = convert_mo = convert_mtext = convert_mfrac = convert_msup = convert_msub = (
            convert_mrow
        )
        convert_munder = convert_mover = convert_msubsup = convert_munderover = convert_mroot = convert_mtable = (
            convert_mrow
        )

        def convert_mtd(self, el: Any, text: str, parent_tags: Any) -> str:
            return text if el.find_next_sibling("mtd") is None else f"{text}, "

        def convert_mtr(self, el: Any, text: str, parent_tags: Any) -> str:
            return text if el.find_next_sibling("mtr") is None else f"{text}; "

        def convert_msqrt(self, el: Any, text: str, parent_tags: Any) -> str:
            return self.convert_mrow(el, f"√({text})", parent_tags)

        def convert_td(self, el: Any, text: str, parent_tags: Any) -> str:
            return f"{_OPEN}{_span(el, 'colspan')},{_span(el, 'rowspan')},{text}{_CELL}"

        convert_th = convert_td

        def convert_tr(self, el: Any, text: str, parent_tags: Any) -> str:
            return text + _ROW

        def convert_table(self, el: Any, text: str, parent_tags: Any) -> str:
            before, rows = _table_rows(text, self.repeats)
            return "\n\n" + "\n\n".join(part for part in (*before, pipe_table(rows)) if part) + "\n\n"

    return Converter(
        heading_style=ATX, bullets="-", escape_asterisks=False, escape_underscores=False, escape_misc=False
    )


def _span(el: Any, key: str) -> int:
    value = str(el.attrs.get(key, "1"))
    return max(1, min(int(value), _MAX_SPANS[key])) if value.isascii() and value.isdigit() else 1


def _table_rows(text: str, repeats: Repeats) -> tuple[list[str], list[list[str]]]:
    """What stands in a table outside its cells (a caption), and its rows; a cell over several rows is repeated."""
    outside: list[str] = []
    rows: list[list[str]] = []
    #: by column, the last row of a cell that stands in several, and its text
    hanging: dict[int, tuple[int, str]] = {}
    for number, line in enumerate(text.split(_ROW)):
        row: list[str] = []
        cells = line.split(_CELL)
        outside.extend(rest for rest in [cells.pop().strip()] if rest)
        for cell in cells:
            before, *found = _SPANS.split(cell)
            outside.extend(rest for rest in [before.strip()] if rest)
            # several if a cell stands in another one
            for columns, lines, value in zip(found[::3], found[1::3], found[2::3], strict=True):
                _hang(row, hanging, number, repeats)
                repeats.add(int(columns) - 1)
                for i in range(int(columns)):
                    shown = value.strip() if i == 0 else ""
                    if int(lines) > 1:
                        hanging[len(row)] = (number + int(lines) - 1, shown)
                    row.append(shown)
        if cells:
            _hang(row, hanging, number, repeats)
            rows.append(row)
    return outside, rows


def _hang(row: list[str], hanging: dict[int, tuple[int, str]], number: int, repeats: Repeats) -> None:
    while (cell := hanging.get(len(row))) is not None and cell[0] >= number:
        repeats.add(1 + len(cell[1]))
        row.append(cell[1])
