"""What all parsers share: the request, clean text, pipe tables, a document from blocks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.pictures import Pictures

#: people do not read a wider table as a grid: its cells stand in a line, and empty ones are left out
MAX_COLUMNS = 512

#: characters of a value of metadata, which each segment of its block has
MAX_VALUE = 500

# Control characters other than white space, lone surrogates, byte order marks, the two non-characters.
_UNWANTED = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff\ufffe\uffff\xad]")
# U+000B is a line end within a paragraph of PowerPoint.
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# From the first blank of a run only: from each of them, 400 kB of blanks within a line took minutes.
_TRAILING = re.compile(r"(?<![ \t])[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")
#: as long as no run of marks of a language is
_MARKS = re.compile(r"[^\w\s\x00-\x7f]{100,}")
#: what programs write if no title or author was given
_NOBODY = frozenset({"(anonymous)", "anonymous", "unknown", "untitled", "none", "user", "python-docx", "openpyxl"})
_SPACE = re.compile(r"\s+")
#: what the caption of a table begins with
CAPTION = re.compile(
    r"\s*[\[【]?(?:table|tab\.|tabelle|tableau|tabla|tabela|tabella|таблица|表格?|표)\s*[\dIVX]+(?![\w])", re.I
)


@dataclass(frozen=True, slots=True)
class Request:
    """How the caller wants a document read. ``language`` is an ISO 639-1 code or None.

    ``pictures``: where a model describes them.
    """

    language: str | None = None
    ocr: bool = False
    pictures: Pictures | None = None


#: characters that the repeated cells and rows of a document may add: 500 bytes made a hundred million cells
_MAX_REPEATED = 8_000_000


@dataclass(slots=True)
class Repeats:
    """What the repeated cells and rows of a document have added."""

    characters: int = 0

    def add(self, characters: int) -> None:
        self.characters += characters
        if self.characters > _MAX_REPEATED:
            raise DocumentError(
                "document unpacks to too much data",
                detail=f"its repeated cells and rows add more than {_MAX_REPEATED} characters",
                hint="Split the document.",
            )


def damaged(detail: str, hint: str = "Copy the file again.") -> DocumentError:
    return DocumentError("document is truncated or damaged", detail=detail[:500], hint=hint)


def encrypted(detail: str) -> DocumentError:
    return DocumentError("document is encrypted", detail=detail, hint="Remove the password and load it again.")


def unknown(detail: str, hint: str) -> DocumentError:
    return DocumentError("unknown document format", detail=detail, hint=hint)


def clean(text: str) -> str:
    """NFC text with ``\\n`` line ends, without NUL and other control characters, without runs of blank lines."""
    text = _UNWANTED.sub("", _LINE_ENDS.sub("\n", text))
    text = _TRAILING.sub("", unicodedata.normalize("NFC", _MARKS.sub(_in_order, text)))
    return _BLANK_LINES.sub("\n\n", text).strip("\n")


def _in_order(run: re.Match[str]) -> str:
    """Marks in their canonical order, into which ``unicodedata`` moves each of them past all others."""
    marks = "".join(unicodedata.normalize("NFD", one) for one in run[0])
    runs = groupby(marks, lambda mark: unicodedata.combining(mark) > 0)
    return "".join("".join(sorted(found, key=unicodedata.combining) if is_mark else found) for is_mark, found in runs)


def one_line(value: object) -> str:
    """The text of a value with every run of white space as one space."""
    return _SPACE.sub(" ", _UNWANTED.sub("", str(value))).strip()


def power(before: str, raised: str) -> str:
    """Raised text, with a sign if it is a power: ``10^6``."""
    return f"^{raised}" if before[-1:].isdigit() and raised[:1] in {*"0123456789+-−"} else raised


def pipe_table(rows: Iterable[Sequence[str]]) -> str:
    """A Markdown pipe table with the first row as its header; empty rows and columns are left out.

    Cells are put on one line, ``|`` is escaped, short rows are filled up. Without any text the result is empty.
    """
    cells = [[one_line(cell).replace("|", "\\|") for cell in row] for row in rows]
    cells = [row for row in cells if any(row)]
    used = sorted({i for row in cells for i, cell in enumerate(row) if cell})
    if not used:
        return ""
    if len(used) > MAX_COLUMNS:
        return "\n\n".join(" | ".join(filter(None, row)) for row in cells)
    if len(used) == 1:
        return "\n\n".join(row[used[0]] for row in cells if len(row) > used[0] and row[used[0]])
    lines = ["| " + " | ".join(row[i] if i < len(row) else "" for i in used) + " |" for row in cells]
    lines.insert(1, "|" + " --- |" * len(used))
    return "\n".join(lines)


def packed(row: Iterable[str]) -> list[str]:
    """A row of a sheet without the empty cells at its end; of more than 512 between two others, 512 are left."""
    cells: list[str] = []
    empty = 0
    for cell in row:
        if cell:
            cells += [""] * min(empty, MAX_COLUMNS)
            cells.append(cell)
        empty = 0 if cell else empty + 1
    return cells


def metadata(**values: object) -> dict[str, Any]:
    """The values that say something, each on one line of at most 500 characters."""
    found = {key: one_line(value)[:MAX_VALUE] for key, value in values.items() if value is not None}
    return {
        key: unicodedata.normalize("NFC", value)
        for key, value in found.items()
        if value and not (key in {"title", "author"} and value.lower() in _NOBODY)
    }


def dublin_core(root: Any, authors: Sequence[str] = ("{http://purl.org/dc/elements/1.1/}creator",)) -> dict[str, Any]:
    """Title and author below an element of XML; ``authors``: elements, of which the first one that is there has it."""
    title = root.find(".//{http://purl.org/dc/elements/1.1/}title")
    author = next((found for name in authors if (found := root.find(f".//{name}")) is not None), None)
    return metadata(title=None if title is None else title.text, author=None if author is None else author.text)


def document(
    format_name: str,
    blocks: Iterable[tuple[str, dict[str, Any]]],
    meta: dict[str, Any] | None = None,
    left_out: str | None = None,
) -> abc.Document:
    """A document of the blocks that have text once cleaned. ``left_out``: what of the file could not be read."""
    cleaned = ((clean(text), keys) for text, keys in blocks)
    kept = [abc.Block(text, _cut(keys)) for text, keys in cleaned if text.strip()]
    return abc.Document(format_name, kept, {**(meta or {}), **metadata(left_out=left_out)})


def numbers(what: str, found: Sequence[int]) -> str | None:
    """``page 3``, ``4 pages: 1-3, 5``; None for none. They are in order."""
    if len(found) < 2:
        return f"{what} {found[0]}" if found else None
    runs = [[one for _, one in run] for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
    shown = (f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{len(found)} {what}s: {', '.join(shown)}"


def _cut(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value[:MAX_VALUE] if isinstance(value, str) else value for key, value in keys.items()}
