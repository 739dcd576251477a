"""The form of a question's options: fields for those that matter most, JSON for the rest, together one JSON object.

A field stands for a place in the options, or, as a choice, for a piece of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: characters of the options
OPTIONS = 20_000


class Wrong(Exception):
    """What was typed cannot be read; the message says why."""


@dataclass(frozen=True)
class Field:
    """One of them. ``kind``: text, number, integer, list (of one text), choice (``choices``: label -> piece)."""

    name: str
    label: str
    kind: str
    path: tuple[str, ...] = ()
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    placeholder: str = ""

    def read(self, typed: str) -> dict[str, Any]:
        """What it says, as options. Raises Wrong."""
        if not typed.strip():
            return {}
        if self.kind == "choice":
            return parsed(typed, self.label)
        value: Any = typed.strip()
        if self.kind == "list":
            value = [value]
        elif self.kind in ("number", "integer"):
            try:
                value = int(value) if self.kind == "integer" else float(value)
            except ValueError:
                raise Wrong(f"{self.label} is not a number: {value[:100]}") from None
        return _at(self.path, value)

    def take(self, options: dict[str, Any]) -> str:
        """The text of the field for options, out of which its part is taken."""
        if self.kind == "choice":
            for piece in self.choices.values():
                if piece and _has(options, piece):
                    _remove(options, piece)
                    return json.dumps(piece)
            return ""
        value: Any = options
        for name in self.path:
            value = value.get(name) if isinstance(value, dict) else None
        is_list = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not {"list": is_list, "text": isinstance(value, str)}.get(self.kind, is_number):
            return ""
        _remove(options, _at(self.path, value))
        return str(value[0] if is_list else value)


def fields(
    presets: Mapping[str, str | None] | None = None,
    stores: Sequence[str] = (),
    rerankers: Sequence[str] = (),
    models: Sequence[str] = (),
) -> list[Field]:
    """The twelve that matter, with what there is to choose from. ``presets``: with their descriptions."""

    def named(names: Sequence[str], *path: str) -> dict[str, dict[str, Any]]:
        return {name: _at(path, name) for name in names}

    offered = {f"{name}: {told}" if told else name: {"preset": name} for name, told in (presets or {}).items()}
    searched = {name: {"vector_store": [name]} for name in stores}
    both = {
        "by meaning": {"semantic_search": True, "keyword_search": False},
        "by words": {"semantic_search": False, "keyword_search": True},
        "by both (hybrid)": {"keyword_search": True},
    }
    rewritten: dict[str, dict[str, Any]] = {
        "with synonyms": {"query_options": {"synonyms": True}},
        "and a hypothetical document": {"query_options": {"hypothetical_document": True}},
        "in up to 3 sub-questions": {"query_options": {"sub_questions": 3}},
    }
    around = {"the document": {"return": "document"}, "the node": {"return": "node"}}
    abstain = {"yes": {"abstain": True}, "no": {"abstain": False}}
    return [
        Field("preset", "Preset", "choice", choices=offered),
        Field("store", "Store", "choice", choices=searched, placeholder="all that qualify"),
        Field("search", "Search", "choice", choices=both),
        Field("citations", "Citations", "integer", ("n_citations",), placeholder="3 or 10"),
        Field("distance", "Largest distance", "number", ("retrieval_options", "max_distance"), placeholder="none"),
        Field("overlap", "Neighbours on either side", "integer", ("retrieval_options", "segment_overlap")),
        Field("document", "Only this document", "list", ("document_name",), placeholder="all"),
        Field("rerank", "Rerank with", "choice", choices=named(rerankers, "rerank", "model_id"), placeholder="none"),
        Field("question", "Search also", "choice", choices=rewritten, placeholder="the question as it is"),
        Field("return", "Cite", "choice", choices=around, placeholder="the segment"),
        Field("model", "Answer with", "choice", choices=named(models, "model_options", "model_id")),
        Field("abstain", "Abstain if nothing is relevant", "choice", choices=abstain),
    ]


def _at(path: Sequence[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def parsed(text: str, name: str = "Options") -> dict[str, Any]:
    """The options that somebody typed; nothing is none. Raises Wrong."""
    if not text.strip():
        return {}
    if len(text) > OPTIONS:
        raise Wrong(f"options have at most {OPTIONS} characters")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"{name}: the options are not JSON: {error}") from None
    if not isinstance(options, dict):
        raise Wrong(f"{name}: the options are not a JSON object")
    return options


def joined(fields: Sequence[Field], typed: Mapping[str, str], rest: str) -> dict[str, Any]:
    """The options that fields and JSON give together. Raises Wrong."""
    options = parsed(rest)
    for one in fields:
        _join(options, one.read(typed.get(one.name, "")), one.label)
    return options


def split(fields: Sequence[Field], options: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The texts of the fields for options, and the rest."""
    rest: dict[str, Any] = json.loads(json.dumps(options))
    return {one.name: one.take(rest) for one in fields}, rest


def _join(options: dict[str, Any], piece: Mapping[str, Any], label: str) -> None:
    for name, value in piece.items():
        if name not in options:
            options[name] = value
        elif isinstance(value, dict) and isinstance(options[name], dict):
            _join(options[name], value, label)
        elif options[name] != value:
            raise Wrong(f'"{name}" is in the JSON and in the field "{label}" with different values: leave one out')


def _has(options: Any, piece: Any) -> bool:
    if isinstance(piece, dict):
        return isinstance(options, dict) and all(
            name in options and _has(options[name], v) for name, v in piece.items()
        )
    return bool(options == piece) and type(options) is type(piece)


def _remove(options: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        if isinstance(value, dict):
            _remove(options[name], value)
        if not isinstance(value, dict) or not options[name]:
            del options[name]
