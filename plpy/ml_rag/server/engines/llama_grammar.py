"""JSON schema to a grammar of llama.cpp, by the converter of llama-cpp-python, with two of its mistakes made good."""

from __future__ import annotations

import json
import re
from typing import Any

from llama_cpp.llama_grammar import SchemaConverter

from ml_rag.errors import InvalidRequest

_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r"}
_ESCAPED = re.compile(r'[\\"\n\r]')
#: of a grammar: characters, and subschemas visited, of which a reference makes one again each time
MAX_CHARACTERS = 1024 * 1024
MAX_VISITS = 10_000


class _Converter(SchemaConverter):
    """Constants and property names stand in the grammar as JSON writes them, in plain characters where it may."""

    _visits = _characters = 0

    def visit(self, schema: Any, name: str) -> str:
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise _too_large(f"it refers to more than {MAX_VISITS} schemas, each counted as often as it is referred to")
        rule: str = super().visit(schema, name)  # type: ignore[no-untyped-call]
        return rule

    def _add_rule(self, name: str, rule: str) -> str:
        before = len(self._rules)
        added: str = super()._add_rule(name, rule)  # type: ignore[no-untyped-call]
        if len(self._rules) > before:
            self._characters += len(added) + len(rule)
        if self._characters > MAX_CHARACTERS:
            raise _too_large(f"its grammar has more than {MAX_CHARACTERS} characters")
        return added

    def _format_literal(self, literal: str) -> str:
        # The original leaves backslashes as they are, so that the grammar reads JSON's escapes as its own.
        if len(literal) > 1 and literal[0] == literal[-1] == '"':
            literal = json.dumps(json.loads(literal), ensure_ascii=False)
        return '"' + _ESCAPED.sub(lambda found: _ESCAPES[found[0]], literal) + '"'


def _too_large(detail: str) -> InvalidRequest:
    return InvalidRequest("json_schema is too complex", detail=detail, hint="Leave properties and references out.")


def json_grammar(schema: dict[str, Any]) -> str:
    """A grammar (GBNF, root rule ``root``) for JSON texts of that schema.

    Raises ``InvalidRequest``: the schema uses what cannot be expressed, or too much of it; remote references are
    never fetched.
    """
    converter: Any = _Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)  # type: ignore[no-untyped-call]
    try:
        converter.visit(converter.resolve_refs(json.loads(json.dumps(schema)), "stdin"), "")
        grammar: str = converter.format_grammar()
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(
            "invalid json_schema",
            detail=f"{type(error).__name__}: {error}"[:500],
            hint="Correct that part, or leave it out.",
        ) from error
    # The original lets raw line breaks and other control characters into strings, which JSON forbids.
    return grammar.replace(r'char ::= [^"\\] |', r'char ::= [^"\\\x00-\x1F\x7F] |')
