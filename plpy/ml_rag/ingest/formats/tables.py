"""Tables and records as text: CSV, TSV, JSON, JSON lines."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from itertools import chain
from typing import Any

from ml_rag import abc
from ml_rag.errors import DocumentError
from ml_rag.ingest.formats.common import Request, document, metadata, one_line, pipe_table
from ml_rag.ingest.formats.encoding import decode
from ml_rag.ingest.formats.text import notebook

#: a JSON record nested deeper than this is written as JSON
_MAX_DEPTH = 8

#: a line that tells Excel the delimiter
_SEPARATOR = re.compile(r'\ufeff?"?sep=([,;\t|])"?\n', re.IGNORECASE)

#: a line whose commas are those of numbers
_WITH_SEMICOLONS = re.compile(r"(?:[^,;]*(?:(?<=\d),(?=\d)[^,;]*)?;)+[^,;]*(?:(?<=\d),(?=\d)[^,;]*)?")


def parse_csv(name: str, content: bytes, request: Request) -> abc.Document:
    """One pipe table, the first row its header. The delimiter is the one that splits the first lines most evenly."""
    text = decode(content, request.language).replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
    format_name = "tsv" if name.lower().endswith((".tsv", ".tab")) else "csv"
    delimiter = "\t" if format_name == "tsv" else _delimiter(text)
    if told := _SEPARATOR.match(text):
        delimiter, text = told[1], text[told.end() :]
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    rows = csv.reader(text.split("\n"), delimiter=delimiter) if '"' not in text else _quoted(text, delimiter)
    return document(format_name, [(pipe_table(rows), {})])


def _quoted(text: str, delimiter: str) -> Any:
    lines = [line + "\n" for line in text.split("\n")]
    if delimiter != "\t":
        return csv.reader(lines, delimiter=delimiter)
    try:
        return list(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error:  # few programs quote between tabs: one quote would hide line ends up to the next
        return csv.reader(text.split("\n"), delimiter=delimiter, quoting=csv.QUOTE_NONE)


def _delimiter(text: str) -> str:
    lines = [line for line in text[:16384].split("\n")[:20] if line.strip() and not line.startswith("#")]
    without = _WITH_SEMICOLONS if lines and _WITH_SEMICOLONS.fullmatch(lines[0]) else None

    def score(delimiter: str) -> tuple[int, int]:
        counted = [line for line in lines if not (without and delimiter == "," and without.fullmatch(line))]
        widths = [len(row) for row in csv.reader(counted, delimiter=delimiter)]
        common = max(widths, key=widths.count) if widths else 1
        return (widths.count(common) if common > 1 else 0, common)

    return max(",;\t|", key=score)


def parse_json(name: str, content: bytes, request: Request) -> abc.Document:
    """Flat records as a pipe table, a notebook as Markdown, anything else as a nested list; JSON lines as if they were
    one array."""
    text = decode(content, request.language).replace("\0", "")
    format_name = "json"
    try:
        value = _loads(text)
        if name.lower().endswith((".jsonl", ".ndjson")):
            format_name, value = "jsonl", [value]
    except ValueError as error:
        format_name = "jsonl"
        try:
            value = [_loads(line) for line in text.split("\n") if line.strip()]
        except ValueError:
            hint = "Correct the file at that line."
            raise DocumentError("document is not valid JSON", detail=str(error), hint=hint) from error
    if isinstance(value, dict) and "nbformat" in value:
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            shown, title = notebook(value)
            return document(format_name, [(shown, {})], metadata(title=title))
    title = value.get("title") or value.get("name") if isinstance(value, dict) else None
    meta = metadata(title=title if isinstance(title, str) else None)
    return document(format_name, [(_render(value), {})], meta)


class _Float(float):
    """A number as it is written, which may be more exact."""

    def __new__(cls, text: str) -> _Float:
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str

    def __str__(self) -> str:
        return self.text


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_float=_Float)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that it has several times, the list of the values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        values: dict[str, list[Any]] = {}
        for key, value in pairs:
            values.setdefault(key, []).append(value)
        found = {key: one if len(one) > 1 else one[0] for key, one in values.items()}
    return found


def _render(value: Any) -> str:
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, dict) for item in value):
        keys = list(dict.fromkeys(chain.from_iterable(value)))
        flat = not any(isinstance(cell, dict | list) for item in value for cell in item.values())
        if flat and len(keys) <= 20 and sum(map(len, value)) * 2 >= len(keys) * len(value):
            return pipe_table([keys, *([_scalar(item.get(key)) for key in keys] for item in value)])
        return "\n\n".join("\n".join(_lines(item, 0)) for item in value)
    return "\n".join(_lines(value, 0))


def _lines(value: Any, depth: int) -> list[str]:
    indent = "  " * depth
    if depth >= _MAX_DEPTH and isinstance(value, dict | list):
        return [f"{indent}- {json.dumps(value, ensure_ascii=False)}"]
    lines: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict | list):
                lines.append(f"{indent}- {one_line(key)}:")
                lines.extend(_lines(item, depth + 1))
            else:
                lines.append(f"{indent}- {one_line(key)}: {_scalar(item)}")
    elif isinstance(value, list):
        for number, item in enumerate(value, 1):
            if isinstance(item, dict | list):
                lines.append(f"{indent}- {number}:")
                lines.extend(_lines(item, depth + 1))
            else:
                lines.append(f"{indent}- {_scalar(item)}")
    else:
        lines.append(_scalar(value))
    return lines


def _scalar(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return value.strip() if isinstance(value, str) else str(value)
