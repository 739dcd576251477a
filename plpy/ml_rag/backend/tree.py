"""The parse tree of a statement, as PostgreSQL writes it (pg_node_tree), as nodes."""

from __future__ import annotations

import re
from typing import Any

_PART = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)


class Node(dict[str, Any]):
    """Fields by name. A value is a Node, a list, or the text of a part; of several parts the list of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def node(self, field: str) -> Node | None:
        """None where it is null."""
        value = self.get(field)
        return value if isinstance(value, Node) else None

    def nodes(self, field: str) -> list[Node]:
        """Those of a list; empty where it is null."""
        value = self.get(field)
        return [item for item in value if isinstance(item, Node)] if isinstance(value, list) else []

    def number(self, field: str) -> int:
        return int(self.get(field, 0))


def parse(text: str) -> Any:
    """The root: a list of queries. A field has at least one part, so that no label follows a label.

    Raises IndexError where the text is not a tree.
    """
    root: list[Any] = []
    # of each open node or list: where its parts go to, and for a node the label that is open
    stack: list[tuple[Any, list[Any]]] = [(None, root)]
    labels: list[str] = [""]
    is_kind = is_value = False
    for part in _PART.findall(text):
        holder, parts = stack[-1]
        if is_kind:
            node = Node(part)
            parts.append(node)
            stack.append((node, []))
            labels.append("")
            is_kind = False
        elif part == "{":
            is_kind, is_value = True, False
        elif part == "(":
            inner: list[Any] = []
            parts.append(inner)
            stack.append((None, inner))
            labels.append("")
            is_value = False
        elif part in ")}":
            _close(holder, labels.pop(), parts)
            stack.pop()
            is_value = False
        elif holder is not None and part.startswith(":") and not is_value:
            _close(holder, labels[-1], parts)
            labels[-1] = part[1:]
            stack[-1] = (holder, [])
            is_value = True
        else:
            parts.append(part)
            is_value = False
    return root[0]


def _close(holder: Node | None, label: str, parts: list[Any]) -> None:
    if holder is not None and label:
        holder[label] = parts[0] if len(parts) == 1 else parts
