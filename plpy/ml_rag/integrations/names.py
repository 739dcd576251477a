"""Names that callers misspell: frameworks pass on whatever they get, and an argument that is ignored is missed late."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


def unknown(given: Iterable[str], known: Collection[str], what: str) -> str | None:
    """What is to be said of the first name that is not known, with the nearest one; None: all are known.

    ``what``: has these arguments.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            return f"{what} has no argument {name!r}; {hint}"
    return None


def refuse_unknown(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raises TypeError for such a name."""
    if (message := unknown(given, known, what)) is not None:
        raise TypeError(message)
