"""Names and values as they are written into a statement."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

#: a name, a string with escapes, a string
_QUOTED = re.compile('"(?:[^"]|"")*"' r"|\bE'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'", re.DOTALL)
_encoding: list[str] = []


def identifier(name: str) -> str:
    """A name of a column, always quoted."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text, the same whatever standard_conforming_strings says."""
    quoted = "'" + text.replace("'", "''").replace("\\", "\\\\") + "'"
    return f" E{quoted}" if "\\" in text else quoted


def joined(rows: list[str]) -> str:
    """Sub-selects as one."""
    return "\n  UNION ALL\n  ".join(rows)


def is_utf8(plpy: Any) -> bool:
    """Whether the encoding of the database is that in which PL/Python gives statements to PostgreSQL."""
    if not _encoding:
        _encoding.append(plpy.execute("SELECT pg_catalog.getdatabaseencoding() AS name")[0]["name"])
    return _encoding == ["UTF8"]


def in_encoding(plpy: Any) -> Any:
    """``plpy``, which gives statements to PostgreSQL in UTF-8, as one for the encoding of the database."""
    return plpy if is_utf8(plpy) else _InAscii(plpy)


class _InAscii:
    """PL/Python in a database that is not UTF-8: of a name or text with an accent in a statement it would make another
    one there, which can be the name of another relation or type. So statements are in ASCII; it converts parameters."""

    def __init__(self, plpy: Any) -> None:
        self._plpy = plpy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plpy, name)

    def prepare(self, statement: str, types: Sequence[str] = ()) -> Any:
        return self._plpy.prepare(in_ascii(statement), list(map(in_ascii, types)))

    def execute(self, statement: Any, *arguments: Any) -> Any:
        return self._plpy.execute(in_ascii(statement) if isinstance(statement, str) else statement, *arguments)

    def cursor(self, statement: Any, *arguments: Any) -> Any:
        return self._plpy.cursor(in_ascii(statement) if isinstance(statement, str) else statement, *arguments)


def in_ascii(statement: str) -> str:
    """The same statement in ASCII, whatever standard_conforming_strings says."""
    written = statement if statement.isascii() else _QUOTED.sub(_escaped, statement)
    if not written.isascii():
        raise ValueError("a statement has characters outside its names and strings that are not ASCII")
    return written


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    if text.isascii():
        return text
    is_name, is_plain = text.startswith('"'), not text.startswith("E")
    if is_plain:
        text = text.replace("\\", "\\\\")
    code = "\\+{:06x}" if is_name else "\\U{:08x}"
    text = "".join(each if each.isascii() else code.format(ord(each)) for each in text)
    return f"U&{text}" if is_name else f" E{text}" if is_plain else text
