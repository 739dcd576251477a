"""Names and values as they are written into a statement."""

from __future__ import annotations


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
