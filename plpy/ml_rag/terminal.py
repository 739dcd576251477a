"""Names of files, and texts of the database, on their way to a terminal, which would obey what stands in them."""

from __future__ import annotations

import re

#: control characters, ends of lines, what turns the direction of writing, and bytes of names that are not UTF-8
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """On one line, with escapes such as ``\\x1b`` in place of what a terminal would obey."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """The same of each line."""
    return "\n".join(printable(line.expandtabs(2)) for line in text.split("\n"))
