"""PDF through pdfium: text of each page in its order, paragraphs put together again, headings by their size."""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby, islice, pairwise
from typing import Any

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.common import (
    CAPTION,
    Request,
    damaged,
    document,
    encrypted,
    metadata,
    numbers,
    one_line,
    pipe_table,
)
from ml_rag.ingest.formats.ocr import read_image
from ml_rag.ingest.formats.pdf_grid import objects, rulings
from ml_rag.ingest.formats.pdf_tables import find_tables, goes_on, may_have_tables
from ml_rag.ingest.formats.pdf_words import Table, Word, WordPlace
from ml_rag.ingest.formats.pictures import MAX_SIDE, Pictures
from ml_rag.ingest.formats.running import may_be_text, running

MAX_PAGES = 20_000
#: attachments that are named
_MAX_ATTACHMENTS = 100
#: a line set this much larger than the body text is a heading
_HEADING_RATIO = 1.15
_HEADING_LENGTH = 120
#: points per inch of a PDF; scans are read at 300 dots per inch
_OCR_SCALE = 300 / 72
#: longer side of a picture that OCR reads, in pixels: a page of A2 at that; one of 14,400 points would have 60,000
_OCR_SIDE = 7016
#: pictures smaller than this, in points, hold no text worth reading: logos, bullets, rules
_PICTURE_WIDTH, _PICTURE_HEIGHT = 72, 24
#: of a page, what the pictures of a scan cover at least
_SCANNED = 0.75

#: A page is not read if more than this share of its characters has no map to Unicode, and of these more than this share
#: has numbers of no letters: simple fonts without a map often number them as ASCII does.
_UNMAPPED, _NO_LETTERS = 1 / 2, 1 / 8

#: points from the corner of a page at which nothing is of it
_FAR = 1e6

#: of the height of a page, above and below: where nothing but running lines stands, and where these can stand at all
_MARGIN, _EDGE = 0.075, 1 / 6
#: below a table that continues on the next page, at most: a row of it had no room there
_FULL = 1 / 3

# pdfium marks a hyphen at a line's end as U+0002 or U+FFFE, and then often leaves the line end out.
_HYPHEN_MARK = re.compile("[\x02\ufffe]\\s*")
_MARK = "\x02"
_HYPHENATED = re.compile(rf"[^\W\d_]{{2}}[-\u2010{_MARK}]$")
# From the beginning of a word only: from each of its letters, 30 kB of them took 20 seconds.
_BROKEN_WORD = re.compile(rf"(?:(?<![\w-])([\w-]+))?{_MARK}([\w-]*)")
_WORD = re.compile(r"\w+(?:-\w+)*")
#: of a line as pdfium gives it, in which a word that continues in the next line is two
_SHOWN = re.compile("[^\\s\x02\ufffe]+[\x02\ufffe]?")
_BULLET = re.compile(r"^(?:[•●▪■◦‣–\-*·○➢]|o|\(?\d{1,3}[.)]|\(?[a-z][.)])\s+\S")
_GLYPH_BULLET = re.compile(r"^[•●▪■◦‣·○➢\uf0b7\uf0a7]\s*")
#: figures, some of which may be a power and no fraction, of which the base line is higher by this, in sizes of the font
_DIGITS, _RAISED = re.compile(r"\d[\d+\u2212-]++(?! ?[/\u2044])"), 0.2
_SENTENCE_END = re.compile(r"[.!?:;…。！？：；][\"'”’)\]]*$")
_WIDE = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")
#: a letter or a mark of Hebrew or Arabic, no sign and no figure
_RIGHT_TO_LEFT = (
    r"(?:(?![\u060c\u061b\u061f\u0660-\u066d\u06d4\u06f0-\u06f9])[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc])"
)
#: letters of a word of Arabic or Hebrew, such as that of an abbreviation with its mark
_TURNED = re.compile(rf"{_RIGHT_TO_LEFT}+(?:[\"']{_RIGHT_TO_LEFT}+)*")
#: these, or another character
_TURNED_OR_ONE = re.compile(rf"{_TURNED.pattern}|.")
#: what stands between such letters; of this, what is read from the left: a name, or else each number
_BETWEEN = re.compile(rf"(?:(?!{_RIGHT_TO_LEFT}).)+")
_NAME, _NUMBER = re.compile(r"\w(?:.*\w)?"), re.compile(r"(?:(?<![%$€£¥₪°])[%$€£¥₪°]+)?\d(?:\S*\d)?[$€£¥₪°]*")
_LINE = re.compile(".+")
_BRACKETS = ("()", "[]", "{}")
#: a sign that stands after its number
_SIGN_AFTER = re.compile(r"(?<!\S)(\d[\d.,]*%?)([-+\u2212])(?!\S)")
#: a mark of an Arabic letter, which pdfium puts before it after a space of no width, as Word writes it
_MARK_BEFORE = re.compile(rf" ([\u064b-\u0652\u0670])({_RIGHT_TO_LEFT})")


#: left, bottom, right, top, in points, y upwards
_Place = tuple[float, float, float, float]


@dataclass(slots=True)
class _Line:
    """A line of a page, or several that hyphens hold together.

    Places are in points, y upwards: where it starts (left, y), where it ends, its right border. ``size`` is the
    font's, None where not known. A page that is read from the right is mirrored: x of all places is negated.
    """

    text: str
    left: float = 0.0
    right: float = 0.0
    y: float = 0.0
    end: float = 0.0
    end_y: float = 0.0
    size: float | None = None
    #: of its first character, in radians, clockwise
    angle: float = 0.0
    #: whether a space follows: in Korean it tells the end of a word from a word that continues in the next line
    space: bool = False
    #: the text of a picture, or a table: a paragraph of its own, its line ends kept
    picture: bool = False
    #: of a table, of which it is the rows
    table: Table | None = None


def parse_pdf(_name: str, content: bytes, request: Request) -> abc.Document:
    """A block a page with ``{"page": n}``, 1-based.

    Where the request wants OCR, it reads scanned pages, and the pictures on others at their place: a table is often
    one. Where a model describes pictures, what it says of a scanned page, or of the pictures on another
    one, follows the page.

    Raises DocumentError for encrypted and broken files, and where no page has text.
    """
    import pypdfium2 as pdfium  # type: ignore[import-untyped]
    import pypdfium2.raw as raw  # type: ignore[import-untyped]

    try:
        pdf = pdfium.PdfDocument(content)
    except pdfium.PdfiumError as error:
        if getattr(error, "err_code", None) in {raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY}:
            raise encrypted(f"PDF: {error}") from error
        raise damaged(f"PDF: {error}") from error
    try:
        if not 0 < len(pdf) <= MAX_PAGES:
            raise DocumentError("document has no pages" if not len(pdf) else "document has too many pages")
        with contextlib.suppress(pdfium.PdfiumError):  # then fields are not read
            pdf.init_forms()
        pages: dict[int, list[_Line]] = {}
        heights: dict[int, tuple[float, float]] = {}
        scanned: dict[int, str] = {}
        described: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        broken: list[int] = []
        pictured: list[int] = []
        unmapped: list[int] = []
        is_read = False
        for number in range(1, len(pdf) + 1):
            try:
                page = pdf[number - 1]
                if page.get_rotation() and _turn(page, raw):
                    page.close()
                    page = pdf[number - 1]
            except pdfium.PdfiumError:
                broken.append(number)  # one broken page does not take the others away
                continue
            lines = _lines(page, raw)
            if lines is not None and (rotation := _sideways(lines[0])):
                page.set_rotation(rotation)
                if _turn(page, raw):
                    page.close()
                    page = pdf[number - 1]
                    lines = _lines(page, raw)
            pages[number] = _with_tables(page, raw, *(lines or ([], [], False)))
            heights[number] = page.get_bbox()[1::2]
            is_scan = _is_scan(page, raw, pages[number])
            places = _picture_places(page, raw, [] if is_scan else pages[number], lines is not None and lines[2])
            left = places
            if request.pictures is not None:
                described[number], left = _describe(page, number, places, request.pictures)
            if request.ocr and is_scan:
                scanned[number] = "".join(read_image(_draw(page, place), request.language) for place in left)
            elif request.ocr:
                pages[number] = _with_pictures(page, left, pages[number], request.language)
            # what is written on scans does not stand for their text
            is_unread = is_scan and not request.ocr and request.pictures is None
            is_read = is_read or not is_unread or bool(pages[number])
            if is_unread and lines is None:
                unmapped.append(number)
            elif is_unread and any(_placed(page, raw)):
                pictured.append(number)
            pages[number] = _with_written(pages[number], _written(page, pdf, raw))
            page.close()
        found = pdf.get_metadata_dict(skip_empty=True)
        attached = list(islice(_attachments(pdf, raw), _MAX_ATTACHMENTS))
        is_dynamic = pdf.get_formtype() == raw.FORMTYPE_XFA_FULL
    finally:
        pdf.close()
    sizes = _heading_sizes(chain.from_iterable(pages.values()))
    pages, repeated = _without_running(pages, sizes, heights)
    _carry_headers(pages, heights, sizes)
    for line in chain.from_iterable(pages.values()):
        if (table := line.table) is not None:
            line.text = "\n\n".join(filter(None, (table.title, pipe_table(table.rows))))
    texts = {
        number: "\n\n".join(filter(None, (scanned.get(number), _page_text(lines, sizes))))
        for number, lines in pages.items()
    }
    if any(_MARK in text for text in texts.values()):
        words = frozenset(_WORD.findall(" ".join(texts.values()).lower()))
        texts = {number: _mend_words(text, words) for number, text in texts.items()}
    blocks: list[tuple[str, dict[str, Any]]] = []
    for number, text in texts.items():
        blocks += [(text if is_read else "", {"page": number}), *described.get(number, ())]
    if not any(text.strip() for text, _ in blocks):
        raise DocumentError(
            "document has no text",
            detail=f"none of its {len(texts)} pages has a text layer that can be read",
            hint="Set ocr to true to read the images, or have a model describe them with describe_images."
            if not request.ocr
            else "OCR found no text in it either.",
        )
    meta = metadata(title=_title(found.get("Title")), author=found.get("Author"))
    if repeated:
        meta["running_lines"] = repeated
    left_out = {
        "": broken,
        " without text (ocr reads pictures)": pictured,
        " in fonts without Unicode (ocr reads pages)": unmapped,
    }
    told = [f"{numbers('page', which)}{why}" for why, which in left_out.items() if which]
    told += ["dynamic form (XFA)"] if is_dynamic else []
    told += [f"attachments: {', '.join(attached)}"] if attached else []
    return document("pdf", blocks, meta, "; ".join(told))


def _turn(page: Any, raw: Any) -> bool:
    """Rewrite a page that is turned to be shown as it is shown, where readers see its lines. Then open it again."""
    left, bottom, right, top = page.get_bbox()
    matrix = {
        90: (0, -1, 1, 0, -bottom, right), 180: (-1, 0, 0, -1, right, top), 270: (0, 1, -1, 0, top, -left)
    }[page.get_rotation()]  # fmt: skip
    width, height = page.get_size()
    if not raw.FPDFPage_TransFormWithClip(page.raw, raw.FS_MATRIX(*matrix), None):
        return False
    raw.FPDFPage_TransformAnnots(page.raw, *matrix)
    page.set_rotation(0)
    page.set_mediabox(0, 0, width, height)
    page.set_cropbox(0, 0, width, height)
    return True


def _sideways(lines: list[_Line]) -> int:
    """How a page is turned (clockwise, degrees) so that its lines can be read, if they are at right angles to it."""
    count = Counter[int]()
    for line in lines:
        count[round(math.degrees(line.angle) / 90) % 4] += len(line.text)
    quarter = max(count, key=lambda quarter: count[quarter], default=0)
    return {1: 270, 3: 90}.get(quarter, 0)


def _without_running(
    pages: dict[int, list[_Line]], sizes: list[float], heights: dict[int, tuple[float, float]]
) -> tuple[dict[int, list[_Line]], list[str]]:
    """The pages without running headers and footers, and these: lines in the two rows at the top and the bottom edge.

    ``heights``: where each page begins below, and where it ends above.
    """
    edges: dict[int, dict[int, str]] = {}
    for number, lines in pages.items():
        rows = sorted({round(line.y) for line in lines if not line.picture})
        bottom, top = heights[number]
        margin, edge = _MARGIN * (top - bottom), _EDGE * (top - bottom)
        outer = {*(y for y in rows[:2] if y < bottom + edge), *(y for y in rows[-2:] if y > top - edge)}
        edges[number] = {
            id(x): x.text
            for x in lines
            if round(x.y) in outer and x.size not in sizes and not x.picture
            if not may_be_text(x.text, number) or not bottom + margin < x.y < top - margin
        }
    found, shown = running({number: list(texts.values()) for number, texts in edges.items()})
    left = {
        number: [x for x in lines if edges[number].get(id(x)) not in found[number]] for number, lines in pages.items()
    }
    return (left, shown) if any(left.values()) else (pages, [])


def _title(title: str | None) -> str | None:
    """The title, unless it is what a program put there in place of one."""
    bad = re.compile(r"^(untitled|microsoft word - .*|.*\.(docx?|pptx?|xlsx?|indd|tex|dvi|pdf)|document\d*)$", re.I)
    return None if title is None or bad.match(title.strip()) else title


def _lines(page: Any, raw: Any) -> tuple[list[_Line], list[WordPlace], bool] | None:
    """The lines of a page in the order of the file, the places of their words, whether these are mirrored.

    None if its fonts do not tell."""
    textpage = page.get_textpage()
    try:
        handle = textpage.raw
        if _is_unmapped(raw, handle):
            return None
        text: str = textpage.get_text_range()
        has_marks = _HYPHEN_MARK.search(text) is not None
        turned = sum(map(len, _TURNED.findall(text)))
        is_mirrored = 2 * turned > sum(map(str.isalpha, text))
        lines: list[_Line] = []
        words: list[WordPlace] = []
        start = 0
        box = tuple(ctypes.c_double() for _ in range(4))
        pointers = [ctypes.byref(place) for place in box]
        for piece in re.split(r"\r?\n", text):
            shown = piece.strip()
            if shown:
                first = start + len(piece) - len(piece.lstrip())
                read = shown
                if turned:
                    boxes = _boxes(raw, handle, shown, first)
                    read = shown = _in_order(shown, boxes)
                if is_mirrored and _TURNED.search(shown):
                    read = _from_right(read, boxes)
                    shown = _SHOWN.sub(partial(_word_from_right, boxes), shown)
                else:
                    read = _with_powers(raw, handle, read, first)
                line = _Line(_HYPHEN_MARK.sub(_MARK, read) if has_marks else read, space=piece[-1:].isspace())
                line.text = _MARK_BEFORE.sub(r"\2\1", line.text) if turned else line.text
                begin = raw.FPDFText_GetCharIndexFromTextIndex(handle, first)
                end = raw.FPDFText_GetCharIndexFromTextIndex(handle, first + len(shown) - 1)
                if begin >= 0 and raw.FPDFText_GetCharBox(handle, begin, *pointers):
                    line.left, line.right = _mirrored(box[0].value, box[1].value, is_mirrored)
                    raw.FPDFText_GetCharOrigin(handle, begin, *pointers[:2])
                    line.y = line.end_y = box[1].value  # the base line: boxes of letters differ in height
                    line.size = _size(raw, handle, begin)
                    line.angle = raw.FPDFText_GetCharAngle(handle, begin)
                if end >= 0 and raw.FPDFText_GetCharBox(handle, end, *pointers):
                    _, line.end = _mirrored(box[0].value, box[1].value, is_mirrored)
                    line.right = max(line.right, line.end)
                    raw.FPDFText_GetCharOrigin(handle, end, *pointers[:2])
                    line.end_y = box[1].value
                size = line.size or 10.0
                is_upright = abs(line.end_y - line.y) > size and abs(line.end - line.left) < 2 * size
                if begin >= 0 and not is_upright:
                    texts = shown if is_mirrored else read
                    words += _words(raw, handle, shown, texts, first, begin, end, line, len(lines), is_mirrored)
                lines.append(line)
            start += len(piece) + (2 if text[start + len(piece) : start + len(piece) + 2] == "\r\n" else 1)
        return lines, words, is_mirrored
    finally:
        textpage.close()


def _mirrored(left: float, right: float, is_mirrored: bool) -> tuple[float, float]:
    return (-right, -left) if is_mirrored else (left, right)


def _boxes(raw: Any, handle: Any, shown: str, first: int) -> list[tuple[float, float]]:
    """Left and right of the characters of a line whose text begins at ``first``; zeros if not known."""
    rectangle = raw.FS_RECTF()
    pointer = ctypes.byref(rectangle)

    def box(at: int) -> tuple[float, float]:
        index = raw.FPDFText_GetCharIndexFromTextIndex(handle, at)
        is_known = index >= 0 and raw.FPDFText_GetLooseCharBox(handle, index, pointer)
        return (rectangle.left, rectangle.right) if is_known else (0.0, 0.0)

    return [box(first + at) for at in range(len(shown))]


def _in_order(shown: str, boxes: list[tuple[float, float]]) -> str:
    """A line with the letters of Arabic and Hebrew words in the order of reading.

    pdfium turns a line that is read from the right around, with it the letters of one glyph, such as lam and alef, but
    not letters that stand as text beside their glyphs, as Chromium writes them."""

    def turned(word: re.Match[str]) -> str:
        glyphs = [
            (place, "".join(character for _, character in glyph))
            for place, glyph in groupby(zip(boxes[slice(*word.span())], word[0], strict=True), key=lambda one: one[0])
        ]
        if any(sum(one) / 2 < other[0] for (one, _), (other, _) in pairwise(glyphs)):
            glyphs.sort(key=lambda glyph: -glyph[0][1])
            return "".join(text for _, text in glyphs)
        return "".join(text[::-1] if left < right else text for (left, right), text in glyphs)

    return _TURNED.sub(turned, shown)


def _from_right(text: str, boxes: list[tuple[float, float]]) -> str:
    """A part of a line of a page that is read from the right, whose words have their letters in order, as it is read.

    pdfium parts names, numbers and signs, such as INV-1001, turns some brackets around, and takes some lines from the
    left."""
    if (0.0, 0.0) in boxes or _HYPHEN_MARK.search(text):
        return text

    def place(found: re.Match[str], start: int = 0) -> float:
        return max(map(sum, boxes[start + found.start() : start + found.end()]))

    def drawn(part: re.Match[str]) -> str:
        pieces = _TURNED_OR_ONE.finditer(part[0])
        return "".join(piece[0] for piece in sorted(pieces, key=lambda piece: -place(piece, part.start())))

    def read(run: re.Match[str]) -> str:
        what = _NAME if any(map(str.isalpha, run[0])) else _NUMBER
        return what.sub(lambda found: found[0][::-1], run[0])

    places = [place(found) for found in _SHOWN.finditer(text)]
    is_from_left = 2 * sum(one < other for one, other in pairwise(places)) >= len(places) > 1
    text = (_LINE if is_from_left else _BETWEEN).sub(drawn, text)
    return _with_brackets(_SIGN_AFTER.sub(r"\2\1", _BETWEEN.sub(read, text)))


def _word_from_right(boxes: list[tuple[float, float]], word: re.Match[str]) -> str:
    return _from_right(word[0], boxes[slice(*word.span())])


def _with_brackets(text: str) -> str:
    """The text with each bracket as the white space beside it says, or else as the one before."""
    found = list(text)
    for pair in _BRACKETS:
        depth = 0
        for at, character in enumerate(text):
            if character in pair:
                begins, ends = not text[max(at - 1, 0) : at].strip(), not text[at + 1 : at + 2].strip()
                is_end = depth > 0 if begins == ends else ends
                found[at] = pair[is_end]
                depth += -1 if is_end else 1
    return "".join(found)


def _with_powers(raw: Any, handle: Any, shown: str, first: int) -> str:
    """A line whose text begins at ``first`` with ^ before a power: 10^6, not 106."""
    x, y = ctypes.c_double(), ctypes.c_double()

    def place(at: int) -> tuple[float, float]:
        index = raw.FPDFText_GetCharIndexFromTextIndex(handle, first + at)
        raw.FPDFText_GetCharOrigin(handle, index, x, y)
        return y.value, _size(raw, handle, index)

    def raised(run: re.Match[str]) -> str:
        if place(run.start())[0] == place(run.end() - 1)[0]:
            return run[0]
        places = [place(at) for at in range(*run.span())]
        text = run[0][0]
        for (one, other), character in zip(pairwise(places), run[0][1:], strict=True):
            is_power = text[-1].isdigit() and other[0] > one[0] + _RAISED * one[1] and other[1] < one[1]
            text += f"^{character}" if is_power else character
        return text

    return _DIGITS.sub(raised, shown)


def _is_unmapped(raw: Any, handle: Any) -> bool:
    """Whether most characters of a page have the numbers of their glyphs in place of those of Unicode."""
    count = raw.FPDFText_CountChars(handle)
    unmapped = [i for i in range(count) if raw.FPDFText_HasUnicodeMapError(handle, i) == 1]
    if len(unmapped) <= _UNMAPPED * count:
        return False
    codes = (raw.FPDFText_GetUnicode(handle, i) for i in unmapped)
    return sum(not (0x20 <= code < 0x7F or 0xA0 <= code <= 0xFF) for code in codes) > _NO_LETTERS * len(unmapped)


def _words(
    raw: Any,
    handle: Any,
    shown: str,
    texts: str,
    first: int,
    begin: int,
    end: int,
    line: _Line,
    number: int,
    is_mirrored: bool,
) -> list[WordPlace]:
    """The words ``texts`` of a line, whose text begins at ``first`` and whose characters are ``begin`` to ``end``."""
    rectangle = raw.FS_RECTF()
    pointer = ctypes.byref(rectangle)
    get = raw.FPDFText_GetLooseCharBox
    is_straight = end - begin == len(shown) - 1
    size, y = line.size or 10.0, line.y
    bottom = 0.0
    words: list[WordPlace] = []
    for match, text in zip(_SHOWN.finditer(shown), _SHOWN.findall(texts), strict=True):
        at, last = match.span()
        if is_straight:
            at, last = begin + at, begin + last - 1
        else:
            at = raw.FPDFText_GetCharIndexFromTextIndex(handle, first + at)
            last = raw.FPDFText_GetCharIndexFromTextIndex(handle, first + last - 1)
        if not get(handle, at, pointer):
            continue
        left, right = rectangle.left, rectangle.right
        if line.end_y != line.y:  # one that a hyphen holds together continues in the next line
            bottom = bottom if words else rectangle.bottom
            y = line.y + rectangle.bottom - bottom
        for index in range(at + 1, last + 1) if is_mirrored else (last,):
            if get(handle, index, pointer):
                left = min(left, rectangle.left) if is_mirrored else left
                right = max(right, rectangle.right)
        left, right = _mirrored(left, right, is_mirrored)
        if abs(left) < _FAR and abs(right) < _FAR and abs(y) < _FAR:  # which NaN is not
            words.append((text, left, right, y, size, number))
    return words


def _with_tables(page: Any, raw: Any, lines: list[_Line], places: list[WordPlace], is_mirrored: bool) -> list[_Line]:
    """The lines of a page with its tables in place of their words, each where its first word stood."""
    if not may_have_tables(places):
        return lines
    words = [Word(*place) for place in places]
    if is_mirrored or any(_TURNED.search(line.text) for line in lines):
        for word in words:
            if is_mirrored and not any(map(str.isalpha, word.text)):
                word.direction = "-"
            elif (_TURNED.search(word.text) is not None) != is_mirrored:
                word.direction = "<"
    for word, following in pairwise(words):
        word.space = word.line != following.line and lines[word.line].space
    tables = find_tables(words, *rulings(page, raw, is_mirrored), _join)
    taken: dict[int, set[int]] = {}
    for table in tables:
        for word in table.words:
            taken.setdefault(word.line, set()).add(id(word))
    first: dict[int, list[Table]] = {}
    for table in tables:
        first.setdefault(min(word.line for word in table.words), []).append(table)
    found = []
    for number, line in enumerate(lines):
        for table in first.get(number, ()):
            left, right = table.columns[0][0], table.columns[-1][1]
            found.append(_Line("", left, right, _top(table), picture=True, table=table))
        if number not in taken:
            found.append(line)
    beside: dict[int, list[Word]] = {}
    for word in words:
        if word.line in taken and id(word) not in taken[word.line]:
            beside.setdefault(word.line, []).append(word)
    for number, rest in beside.items():
        place = next((i for i, line in enumerate(found) if line.y < rest[0].y), len(found))
        text = " ".join(word.text for word in rest)
        found.insert(place, replace(lines[number], text=text, left=rest[0].left, end=rest[-1].right))
    return found


def _carry_headers(pages: dict[int, list[_Line]], heights: dict[int, tuple[float, float]], sizes: list[float]) -> None:
    """Put the header of a table that continues at the top of the next page before its rows there, too.

    Only what both pages have, or what stands at their edges, may come between: a heading or text begins another table.
    """

    def is_begin(line: _Line) -> bool:
        return line.size in sizes or CAPTION.match(line.text) is not None

    for (number, before), (following, after) in pairwise(pages.items()):
        last = min((line.table for line in before if line.table is not None), key=_bottom, default=None)
        first = max((line.table for line in after if line.table is not None), key=_top, default=None)
        if last is None or first is None or first.title or not goes_on(last, first):
            continue
        (low, high), (bottom, top) = heights[number], heights[following]
        below = [line for line in before if line.table is not last and line.y < _bottom(last)]
        above = [line for line in after if line.table is not first and line.y > _top(first)]
        others = [line for line in below if is_begin(line) or line.y > low + _EDGE * (high - low)]
        others += [line for line in above if is_begin(line) or line.y < top - _MARGIN * (top - bottom)]
        repeated = {line.text for line in before} & {line.text for line in after}
        if _bottom(last) < low + _FULL * (high - low) and all(line.text in repeated for line in others):
            first.rows.insert(0, last.rows[0])


def _top(table: Table) -> float:
    return max(word.y for word in table.words)


def _bottom(table: Table) -> float:
    return min(word.y for word in table.words)


def _is_scan(page: Any, raw: Any, lines: list[_Line]) -> bool:
    """Whether a page has no text, or is a picture with text in its margins only, such as a number that was stamped."""
    left, bottom, right, top = page.get_bbox()
    margin = _MARGIN * (top - bottom)
    if any(line.table is not None or bottom + margin < line.y < top - margin for line in lines):
        return False
    covered = sum((place[2] - place[0]) * (place[3] - place[1]) for place in _placed(page, raw))
    return not lines or covered >= _SCANNED * (right - left) * (top - bottom)


def _placed(page: Any, raw: Any) -> Iterator[_Place]:
    """Where the pictures of a page stand, as far as it shows them."""
    box = page.get_bbox()
    for _, place, _ in objects(page, raw, raw.FPDF_PAGEOBJ_IMAGE):
        left, bottom = map(max, place[:2], box[:2])
        right, top = map(min, place[2:], box[2:])
        if left < right and bottom < top:
            yield left, bottom, right, top


def _picture_places(page: Any, raw: Any, lines: list[_Line], is_mirrored: bool) -> list[_Place]:
    """Where the pictures of a page stand, but for small ones; the whole of one without text on which something stands.

    A picture that text lies on is left out: such a page is a scan with a text layer, or the picture a background.
    """
    if not lines:
        is_empty = not raw.FPDFPage_CountObjects(page.raw) and not raw.FPDFPage_GetAnnotCount(page.raw)
        return [] if is_empty else [page.get_bbox()]
    starts = [(-line.left if is_mirrored else line.left, line.y) for line in lines if not line.picture]
    return [
        (left, bottom, right, top)
        for left, bottom, right, top in _placed(page, raw)
        if right - left >= _PICTURE_WIDTH and top - bottom >= _PICTURE_HEIGHT
        if not any(left <= x <= right and bottom <= y <= top for x, y in starts)
    ]


def _draw(page: Any, place: _Place, longest: float = _OCR_SIDE) -> Any:
    """A part of a page as a picture, at 300 dots per inch, but at most ``longest`` pixels on the longer side."""
    left, bottom, right, top = place
    scale = min(_OCR_SCALE, longest / max(right - left, top - bottom, 1.0))
    box = page.get_bbox()
    return page.render(scale=scale, crop=(left - box[0], bottom - box[1], box[2] - right, box[3] - top)).to_pil()


def _describe(
    page: Any, number: int, places: list[_Place], pictures: Pictures
) -> tuple[list[tuple[str, dict[str, Any]]], list[_Place]]:
    """The blocks of the pictures that have a description, and the places of the others."""
    blocks: list[tuple[str, dict[str, Any]]] = []
    others = []
    for place in places:
        found = pictures.block(partial(_draw, page, place, MAX_SIDE), {"page": number})
        blocks += found
        if not found:
            others.append(place)
    return blocks, others


def _with_pictures(page: Any, places: list[_Place], lines: list[_Line], language: str | None) -> list[_Line]:
    """The lines of a page and the text of its pictures, each before the first line that starts below its top."""
    lines = list(lines)
    for left, bottom, right, top in places:
        image = _draw(page, (left, bottom, right, top))
        if text := read_image(image, language, keep_lines=True):
            place = next((i for i, line in enumerate(lines) if line.y < top), len(lines))
            shown = _Line(text, left, right, top, right, bottom, picture=True)
            lines.insert(place, shown)
    return lines


def _written(page: Any, pdf: Any, raw: Any) -> Iterator[_Line]:
    """What was filled in or written on a page: fields that have a value and are shown, with their names; text boxes."""
    left_out = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW
    buttons = (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON)
    fields = (*buttons, raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX)
    form = pdf.formenv and pdf.formenv.raw
    for number in range(raw.FPDFPage_GetAnnotCount(page.raw)):
        if not (one := raw.FPDFPage_GetAnnot(page.raw, number)):
            continue
        try:
            kind, place, text = raw.FPDFAnnot_GetSubtype(one), raw.FS_RECTF(), ""
            if raw.FPDFAnnot_GetFlags(one) & left_out or not raw.FPDFAnnot_GetRect(one, place):
                continue
            if kind == raw.FPDF_ANNOT_FREETEXT:
                text = _string(raw.FPDFAnnot_GetStringValue, one, b"Contents")
            elif (
                kind == raw.FPDF_ANNOT_WIDGET and form and (what := raw.FPDFAnnot_GetFormFieldType(form, one)) in fields
            ):
                is_secret = raw.FPDFAnnot_GetFormFieldFlags(form, one) & raw.FPDF_FORMFLAG_TEXT_PASSWORD
                if raw.FPDFAnnot_IsChecked(form, one) if what in buttons else not is_secret:
                    text = _string(raw.FPDFAnnot_GetFormFieldValue, form, one)
                name = _string(raw.FPDFAnnot_GetFormFieldAlternateName, form, one)
                name = name or _string(raw.FPDFAnnot_GetFormFieldName, form, one).rpartition(".")[2].partition("[")[0]
                text = text and f"{one_line(name).rstrip(' :')}: {text}".removeprefix(": ")
            if text:
                yield _Line(text, place.left, place.right, place.top, place.right, place.bottom, picture=True)
        finally:
            raw.FPDFPage_CloseAnnot(one)


def _attachments(pdf: Any, raw: Any) -> Iterator[str]:
    """Names of the files in a PDF; those of a portfolio are what it is about."""
    for number in range(pdf.count_attachments()):
        yield _string(raw.FPDFAttachment_GetName, raw.FPDFDoc_GetAttachment(pdf.raw, number)) or "unnamed"


def _string(get: Any, *arguments: Any) -> str:
    length = get(*arguments, None, 0)
    found = (ctypes.c_ushort * (length // 2 + 1))()
    get(*arguments, found, length)
    return bytes(found).decode("utf-16-le", "replace").partition("\0")[0].strip()


def _with_written(lines: list[_Line], written: Iterable[_Line]) -> list[_Line]:
    """The lines of a page and what was written on it, each before the first line that stands below it."""
    lowest = list(accumulate((-line.y for line in lines), max))
    at: dict[int, list[_Line]] = {}
    for one in sorted(written, key=lambda one: (-one.y, one.left)):
        at.setdefault(bisect_right(lowest, -one.end_y), []).append(one)
    return [line for i, other in enumerate([*lines, None]) for line in (*at.get(i, ()), other) if line is not None]


def _size(raw: Any, handle: Any, index: int) -> float:
    """Font size in points on the page: the nominal size times the scale of the text matrix."""
    matrix = raw.FS_MATRIX()
    size: float = raw.FPDFText_GetFontSize(handle, index)
    if raw.FPDFText_GetMatrix(handle, index, matrix):
        size *= (matrix.c**2 + matrix.d**2) ** 0.5 or 1.0
    return round(size * 2) / 2


def _heading_sizes(lines: Iterable[_Line]) -> list[float]:
    """Sizes of headings, largest first, at most three: those larger than the size most text is set in."""
    amount: Counter[float] = Counter()
    for line in lines:
        if line.table is not None:
            for word in line.table.words:
                amount[word.size] += len(word.text)
        elif line.size is not None:
            amount[line.size] += len(line.text)
    if not amount:
        return []
    body, most = amount.most_common(1)[0]
    larger = [size for size, n in amount.items() if size >= body * _HEADING_RATIO and n < most / 2]
    return sorted(larger, reverse=True)


def _page_text(lines: list[_Line], heading_sizes: list[float]) -> str:
    gap = _usual_gap(lines)
    text = ""
    before: _Line | None = None
    level_before = 0
    for i, line in enumerate(lines):
        level = _level(line, heading_sizes)
        shown = _GLYPH_BULLET.sub("- ", line.text)
        if before is None:
            text = f"{'#' * level} {shown}" if level else shown
        elif level == level_before and _continues(before, line, gap, _column_border(lines, i - 1), level):
            text = _join(text + " " if before.space else text, shown)
        else:
            # Items of a list stand close together.
            close = shown.startswith("- ") and text.rpartition("\n")[2].startswith("- ")
            text += ("\n" if close else "\n\n") + (f"{'#' * level} {shown}" if level else shown)
        before, level_before = line, level
    return text


def _column_border(lines: list[_Line], i: int) -> float:
    """Where the lines around a line end at the right: the border of its column."""
    line = lines[i]
    around = lines[max(0, i - 4) : i + 5]
    beside = (other.right for other in around if other.left <= line.right and line.left <= other.right)
    return max(beside, default=line.right)


def _level(line: _Line, heading_sizes: list[float]) -> int:
    if line.size not in heading_sizes or len(line.text) > _HEADING_LENGTH or not re.search(r"[^\W\d_]{2}", line.text):
        return 0
    return min(1 + heading_sizes.index(line.size), 3)


def _usual_gap(lines: list[_Line]) -> float:
    gaps = Counter(round(a.end_y - b.y, 0) for a, b in pairwise(lines) if 0 < a.end_y - b.y < 4 * (a.size or 12))
    return gaps.most_common(1)[0][0] if gaps else 0.0


def _continues(before: _Line, line: _Line, gap: float, border: float, level: int) -> bool:
    """Whether a line continues the paragraph of the line before it."""
    step = before.end_y - line.y
    if before.picture or line.picture:
        return False
    if _BULLET.match(line.text) or _GLYPH_BULLET.match(line.text):
        return False
    if abs(step) < 0.6 * (before.size or 4) and line.left > before.end - 2:  # a raised mark, a piece of the line
        return True
    if step < 0 and not _SENTENCE_END.search(before.text) and level == 0:  # the next column
        return line.text[:1].islower()
    if step < 0 or (gap and step > 1.45 * gap and step > 1.6 * (line.size or 12)):
        return False
    if before.size is not None and line.size is not None and abs(before.size - line.size) > 1:
        return False
    if level:
        return True
    # A line that ends well before its column does ends its paragraph, unless the sentence plainly continues.
    short = border - before.end > 0.25 * max(border - before.left, 1.0)
    if short and not line.text[:1].islower():
        return False
    return not (short and _SENTENCE_END.search(before.text))


def _join(text: str, more: str) -> str:
    if _HYPHENATED.search(text[-3:]):
        return text[:-1] + _MARK + more
    if text.endswith(("-", "\u2010", _MARK)) or (_WIDE.match(text[-1:]) and _WIDE.match(more[:1])):
        return text + more
    return f"{text.rstrip()} {more}"


def _mend_words(text: str, words: frozenset[str]) -> str:
    """Words divided at a line's end made whole; the hyphen stays where the document has it elsewhere, too."""

    def mend(found: re.Match[str]) -> str:
        left, right = found[1] or "", found[2]
        if right[:1].islower() and left[-1:].isalpha():
            whole, parted = f"{left}{right}", f"{left}-{right}"
            return parted if parted.lower() in words and whole.lower() not in words else whole
        return f"{left}-{right}"

    return _BROKEN_WORD.sub(mend, text)
