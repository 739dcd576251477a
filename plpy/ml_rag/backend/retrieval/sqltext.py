"""Names and values as they are written into a statement."""

from __future__ import annotations

import re
from typing import Any

_QUOTED = re.compile(r'"(?:[^"]|"")*"')
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


def in_ascii(plpy: Any, text: str) -> str:
    """SQL with names of relations, and no strings. Where the database is not UTF-8, PL/Python would make another name
    of one with an accent, which another relation may have."""
    return text if text.isascii() or is_utf8(plpy) else _QUOTED.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    if found[0].isascii():
        return found[0]
    name = found[0].replace("\\", "\\\\")
    return "U&" + "".join(each if each.isascii() else f"\\+{ord(each):06x}" for each in name)
