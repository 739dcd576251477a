"""Names that a statement may contain, wherever its strings and comments are: all that it could, and more."""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*", re.ASCII)
#: from each quotation mark, whichever of them opens a name; longer ones than 63 bytes are cut off
_QUOTED = re.compile(r'(?="((?:[^"]|""){1,130}))')
_OPERATOR = re.compile(r"[-+*/<>=~!@#%^&|`?]+")
#: those that PostgreSQL looks up, as it does written ones, for LIKE, ILIKE, SIMILAR TO, IN, BETWEEN, CASE, NULLIF,
#: IS DISTINCT FROM, USING, NATURAL and !=
_IMPLIED = ("~~", "!~~", "~~*", "!~~*", "~", "!~", "=", "<>", "<", "<=", ">", ">=")
#: PostgreSQL's operators have at most 63 characters; a longer run of signs is a line in a comment
_MAX_OPERATOR = 63


def names_in(statement: str) -> list[str]:
    """Those of types, functions and schemas."""
    found: set[str] = set()
    for word in _WORD.findall(statement):
        # $ is a part of a name, or ends the mark of a string before it
        places = [0, *(place + 1 for place, sign in enumerate(word) if sign == "$")]
        found.update(word[place:] for place in places)
    lower = {word.translate(_LOWER) for word in found} | {word.lower() for word in found}
    return sorted(lower | {quoted.replace('""', '"') for quoted in _QUOTED.findall(statement)} - {""})


_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def operators_in(statement: str) -> list[str]:
    """Each part of a run of signs, since a comment or another operator can follow at once; and those of words."""
    found = set(_IMPLIED)
    for run in set(_OPERATOR.findall(statement)):
        for start in range(len(run)):
            found.update(run[start:end] for end in range(start + 1, min(len(run), start + _MAX_OPERATOR) + 1))
    return sorted(found)
