"""How large the values of a statement can become, as far as its parse tree shows, and what takes too long with them.

PostgreSQL cancels a statement between the calls of functions, but hardly within one. So a function whose time grows
with the product of two sizes is called only if that product is bounded, and one that makes a large value of a small one
only if the tree shows how large.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping

from ml_rag.backend.tree import Node

#: bytes: what the value of a column of a table is taken for; the tree does not show its size
STORED = 512 * 1024
#: what is put together of many rows: what the memory of a statement holds
GROWN = 32 * 1024 * 1024
#: a number, a date and the like; a number of any length
SMALL, NUMERIC = 64, 150_000
#: what repeat and the like may make
MADE = 1024 * 1024
#: of one call of a function
NANOSECONDS = 5e8
#: looked at for the sizes of one statement
EXPRESSIONS = 100_000

_VARCHAR = {1042, 1043}
_TEXT = {19, 25, *_VARCHAR}
_JSONB = 3802
#: bool, "char", name, int8, int2, int4, oid, point, lseg, box, line, float4, float8, circle, macaddr8, money, macaddr,
#: inet, cidr, date, time, timestamp, timestamptz, interval, timetz, uuid; numeric
_FIXED = dict.fromkeys(
    (
        *(16, 18, 19, 20, 21, 23, 26, 600, 601, 603, 628, 700, 701, 718, 774, 790, 829, 869, 650),
        *(1082, 1083, 1114, 1184, 1186, 1266, 2950),
    ),
    SMALL,
) | {1700: NUMERIC}
#: arrays of bool, "char" and int2
_ARRAYS_OF_BYTES = {1000, 1002, 1005}
_TYPES = "vartype consttype funcresulttype opresulttype aggtype wintype resulttype array_typeid casetype coalescetype"
_TYPE_FIELDS = f"{_TYPES} minmaxtype refrestype".split()


#: nanoseconds for each byte of a text that is read as a value of another type
_READ, _READ_JSONB = 75.0, 340.0
#: and for the square of their number, of types by their OIDs: tsquery, xml, whose attributes are compared, and arrays
_TSQUERY, _XML = 0.06, 0.015
_READ_SQUARE = {3615: _TSQUERY, 3645: _TSQUERY, 142: _XML, 143: _XML}


def _costs() -> dict[str, tuple[tuple[int, ...], float]]:
    """Measured on an AMD EPYC with PostgreSQL 15: signature -> arguments whose sizes are multiplied, nanoseconds for
    each byte of the product. No arguments: of the sum of all."""
    costs: dict[str, tuple[tuple[int, ...], float]] = {}

    def add(nanoseconds: float, arguments: tuple[int, ...], names: str, *types: str) -> None:
        costs.update({f"{name}({each})": (arguments, nanoseconds) for name in names.split() for each in types})

    add(2.2, (0, 1), "textlike textnlike texticlike texticnlike", "text, text")
    add(2.2, (0, 1), "bpcharlike bpcharnlike bpchariclike bpcharicnlike", "character, text")
    add(2.2, (0, 1), "texticlike texticnlike", "citext, text", "citext, citext")
    add(0.7, (0, 1), "strpos position", "text, text", "bytea, bytea")
    add(0.7, (0, 1), "replace string_to_array string_to_table", "text, text", "text, text, text")
    add(0.7, (0, 1), "split_part", "text, text, integer")
    add(7, (0, 1), "translate btrim ltrim rtrim", "text, text, text", "text, text", "bytea, bytea")
    add(0.15, (0, 1), "arrayoverlap arraycontains arraycontained", "anyarray, anyarray")
    add(1.5, (0, 1), "jsonb_contains jsonb_contained", "jsonb, jsonb")
    add(1.5, (0, 1), "jsonb_exists_any jsonb_exists_all jsonb_delete", "jsonb, text[]")
    # of each pair of words of the query up to 256 places each
    add(5e4, (1, 1), "ts_rank ts_rank_cd", "tsvector, tsquery", "tsvector, tsquery, integer")
    add(5e4, (2, 2), "ts_rank ts_rank_cd", "real[], tsvector, tsquery", "real[], tsvector, tsquery, integer")
    # the square of the number of words, to whose places the operators between them are linked
    queries = "to_tsquery plainto_tsquery phraseto_tsquery websearch_to_tsquery"
    add(_TSQUERY, (0, 0), queries, "text")
    add(_TSQUERY, (1, 1), f"{queries} ts_match_tt", "regconfig, text", "text, text")
    # each TMMon makes upper case of all that is left of the text
    add(5, (0, 1), "to_date to_timestamp", "text, text")
    add(450, (), "similarity similarity_dist similarity_op", "text, text")
    add(100, (), "jsonb_concat", "jsonb, jsonb")
    add(100, (), "jsonb_delete", "jsonb, text", "jsonb, integer")
    add(100, (), "jsonb_delete_path", "jsonb, text[]")
    add(100, (), "jsonb_set jsonb_insert", "jsonb, text[], jsonb, boolean")
    add(100, (), "jsonb_set_lax", "jsonb, text[], jsonb, boolean, text")
    add(100, (), "jsonb_strip_nulls", "jsonb")
    add(100, (), "jsonb_object", "text[]", "text[], text[]")
    return costs


_COSTS = _costs()
#: functions of large results
_MAKERS = {"repeat", "lpad", "rpad", "array_fill", "format", "bpchar", "bit"}
#: aggregates and window functions that return one of the values that they are given
_CHOOSERS = frozenset(
    ("min", "max", "mode", "percentile_disc", "any_value", "lag", "lead", "first_value", "last_value", "nth_value")
)
#: functions whose result has no more bytes than all arguments; that of others is taken for eight times as large
_KEEPER_NAMES = """
lower upper initcap casefold btrim ltrim rtrim reverse substr substring left right split_part overlay text
name varchar citext textcat textanycat anytextcat concat byteacat array_cat array_append array_prepend
array_remove trim_array array_larger array_smaller unnest regexp_substr regexp_match regexp_matches
regexp_split_to_table string_to_table to_tsquery plainto_tsquery phraseto_tsquery websearch_to_tsquery
tsquery_and tsquery_or tsquery_not tsquery_phrase strip unaccent json_extract_path json_extract_path_text
json_object_field json_object_field_text json_array_element json_array_element_text jsonb_extract_path
jsonb_object_field jsonb_array_element jsonb_concat text_larger text_smaller bpchar_larger bpchar_smaller
convert_from convert_to
"""
_KEEPERS = frozenset(_KEEPER_NAMES.split())

_Scope = tuple[Node, ...]


class _TooMuchError(Exception):
    pass


def check(query: Node, signatures: Mapping[int, str]) -> str | None:
    """What keeps a parsed statement from being run, or None. ``signatures``: of its functions, by their OIDs."""
    try:
        sizes = _Sizes(signatures)
        return next((found for node, scope in _walk(query) if (found := sizes.refusal(node, scope))), None)
    except (RecursionError, _TooMuchError):
        return "it is too deeply nested, or too long"


def functions(query: Node) -> list[int]:
    """OIDs of the functions that a parsed statement calls, by operators and casts too."""
    return sorted({oid for node, _ in _walk(query) if (oid := _function(node))})


def _function(node: Node) -> int:
    fields = ("funcid", "opfuncid", "aggfnoid", "winfnoid")
    return next((node.number(field) for field in fields if field in node), 0)


def _walk(query: Node) -> Iterator[tuple[Node, _Scope]]:
    """All nodes, each with the queries that it is in, the innermost first."""
    pending: list[tuple[object, _Scope]] = [(query, ())]
    while pending:
        value, scope = pending.pop()
        if isinstance(value, Node):
            if value.kind == "QUERY":
                scope = (value, *scope)
            yield value, scope
            pending += [(part, scope) for part in value.values() if isinstance(part, Node | list)]
        elif isinstance(value, list):
            pending += [(part, scope) for part in value if isinstance(part, Node | list)]


class _Sizes:
    def __init__(self, signatures: Mapping[int, str]) -> None:
        self._signatures = signatures
        self._columns: dict[tuple[int, int], float] = {}
        #: of a recursive query, while it is looked at
        self._assumed: dict[tuple[int, int], float] = {}
        self._left = EXPRESSIONS

    # -- what takes too long ------------------------------------------------------------------------------------------

    def refusal(self, node: Node, scope: _Scope) -> str | None:
        if node.kind == "COERCEVIAIO":
            result = node.number("resulttype")
            argument = node.node("arg")
            if argument is None or result in _FIXED or result in _TEXT or _type(argument) in _FIXED:
                return None
            size = self._size(argument, scope)
            cost = size * (_READ_JSONB if result == _JSONB else _READ) + size * size * _READ_SQUARE.get(result, 0)
            return "it reads a text that may be too large as a value of another type" if cost > NANOSECONDS else None
        signature = self._signatures.get(_function(node), "")
        arguments = _arguments(node)
        if signature in _COSTS:
            places, nanoseconds = _COSTS[signature]
            if _ARRAYS_OF_BYTES & set(map(_type, arguments)):
                nanoseconds *= 16
            sizes = [self._size(argument, scope) for argument in arguments]
            amount = math.prod(sizes[place] for place in places) if places else sum(sizes)
            if amount * nanoseconds > NANOSECONDS:
                return (
                    f"it calls {signature} with values that may be too large: give a short constant, or cut them with"
                    " left(…, 100)"
                )
        elif signature.partition("(")[0] in _MAKERS and self._makes_too_much(signature, arguments, scope):
            return f"it calls {signature} for a value that may be larger than 1 MB: the size must be a constant"
        return None

    def _makes_too_much(self, signature: str, arguments: list[Node], scope: _Scope) -> bool:
        size = self._made(signature, arguments, scope)
        # one with more arguments makes no more of them
        return size == math.inf or (size > MADE and not signature.startswith("format("))

    def _made(self, signature: str, arguments: list[Node], scope: _Scope) -> float:
        """Bytes of the result of one of ``_MAKERS``; infinite where the tree does not tell."""
        name = signature.partition("(")[0]
        sizes = [self._size(argument, scope) for argument in arguments]
        if name == "array_fill":
            counts = _numbers(arguments[1])
            return math.prod(counts) * max(SMALL, sizes[0]) if counts else math.inf
        if name == "format":
            # a width makes a text of any length of nothing
            return math.inf if _has_width(arguments[0]) else sum(sizes)
        if len(arguments) == 1:
            return sizes[0]
        number = _number(arguments[1])
        if number is None:
            return math.inf
        if number < 0:  # a character or bit string of any length
            return sizes[0] if name in ("bpchar", "bit") else 0
        return number * (sizes[0] if name == "repeat" else 4)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _size(self, node: Node, scope: _Scope) -> float:
        """Bytes of the largest value of an expression."""
        self._left -= 1
        if self._left < 0:
            raise _TooMuchError
        kind = node.kind.removesuffix("EXPR")
        if kind == "CONST":
            value = node.get("constvalue")
            header = 4 if node["constlen"] == "-1" else 0
            return max(float(value[0]) - header, 0) if isinstance(value, list) else 0
        if (fixed := _FIXED.get(_type(node))) is not None:
            return fixed
        if kind == "VAR":
            return min(self._variable(node, scope), GROWN)
        if kind in ("FUNC", "OP"):
            return min(self._result(node, scope), GROWN)
        if kind in ("AGGREF", "WINDOWFUNC"):
            is_chosen = self._signatures.get(_function(node), "").partition("(")[0] in _CHOOSERS
            return max((self._size(each, scope) for each in _arguments(node)), default=SMALL) if is_chosen else GROWN
        if kind == "SUBLINK":
            inner = node.node("subselect")
            # 4: a value; 6: an array of all rows; others: true or false
            if node["subLinkType"] == "4" and inner is not None:
                return self._column(inner, 0, (inner, *scope))
            return GROWN if node["subLinkType"] == "6" else SMALL
        parts = _parts(node)
        if parts is None:
            return GROWN
        sizes = [self._size(part, scope) for part in parts]
        if kind in ("ARRAY", "ROW"):
            return min(24 + sum(sizes), GROWN)
        size = max(sizes, default=0)
        return min(size * 8, GROWN) if kind in ("COERCEVIAIO", "ARRAYCOERCE") and size > SMALL else size

    def _result(self, node: Node, scope: _Scope) -> float:
        """Of a function or operator."""
        signature = self._signatures.get(_function(node), "")
        name = signature.partition("(")[0]
        arguments = _arguments(node)
        if name in _MAKERS:
            return self._made(signature, arguments, scope)
        sizes = [self._size(argument, scope) for argument in arguments]
        size = sum(sizes)
        if name in ("substr", "substring", "left", "right") and signature.endswith("integer)") and len(sizes) != 1:
            length = _number(arguments[-1]) if name in ("left", "right") or len(sizes) == 3 else None
            return min(sizes[0], size if length is None or length < 0 else 4 * length)
        if name == "replace":
            return sizes[0] * max(1, sizes[2])
        if name in ("regexp_replace", "array_to_string"):
            return sizes[0] * (8 + sizes[1 if name == "array_to_string" else 2])
        return size if name in _KEEPERS else 8 * size

    def _variable(self, node: Node, scope: _Scope) -> float:
        if _type(node) in _VARCHAR and node.number("vartypmod") > 4:
            return 4.0 * (node.number("vartypmod") - 4)
        level, place = node.number("varlevelsup"), node.number("varattno") - 1
        entry = scope[level].nodes("rtable")[node.number("varno") - 1]
        scope = scope[level:]
        kind = entry["rtekind"]
        if place < 0:
            return GROWN
        if kind == "0":
            return STORED
        if kind == "1" and (inner := entry.node("subquery")) is not None:
            return self._column(inner, place, (inner, *scope))
        if kind == "2":
            joined = entry["joinaliasvars"][place]
            return self._size(joined, scope) if isinstance(joined, Node) else SMALL
        if kind == "3":
            calls = [call for each in entry.nodes("functions") if (call := each.node("funcexpr")) is not None]
            return max((self._size(call, scope) for call in calls), default=GROWN)
        if kind == "5":
            return max(self._size(row[place], scope) for row in entry["values_lists"])
        if kind == "6":
            return self._common(entry, place, scope)
        return GROWN

    def _common(self, entry: Node, place: int, scope: _Scope) -> float:
        """Of a column of a query in WITH."""
        scope = scope[entry.number("ctelevelsup") :]
        found = next(each for each in scope[0].nodes("cteList") if each["ctename"] == entry["ctename"])
        inner = found.node("ctequery")
        if inner is None:
            return GROWN
        column = self._recursive_column if found["cterecursive"] == "true" else self._column
        return column(inner, place, (inner, *scope))

    def _column(self, query: Node, place: int, scope: _Scope) -> float:
        key = (id(query), place)
        if key in self._assumed:
            return self._assumed[key]
        if key not in self._columns:
            size = self._of_branches(query, place, scope)
            # what was found while something was assumed holds only then
            if self._assumed:
                return size
            self._columns[key] = size
        return self._columns[key]

    def _recursive_column(self, query: Node, place: int, scope: _Scope) -> float:
        """As large as in the first round, if a round makes it no larger."""
        key = (id(query), place)
        if key in self._assumed:
            return self._assumed[key]
        self._assumed[key] = 0
        try:
            size = self._assumed[key] = self._of_branches(query, place, scope)
            return GROWN if self._of_branches(query, place, scope) > size else size
        finally:
            del self._assumed[key]

    def _of_branches(self, query: Node, place: int, scope: _Scope) -> float:
        if query.node("setOperations") is not None:
            inner = [each for entry in query.nodes("rtable") if (each := entry.node("subquery")) is not None]
            return max(self._column(each, place, (each, *scope)) for each in inner)
        targets = query.nodes("targetList")
        expression = targets[place].node("expr") if place < len(targets) else None
        return GROWN if expression is None else self._size(expression, scope)


def _type(node: Node) -> int:
    if node.kind == "RELABELTYPE" and (argument := node.node("arg")) is not None and _type(argument) in _FIXED:
        return _type(argument)
    return next((node.number(field) for field in _TYPE_FIELDS if field in node), 0)


def _arguments(node: Node) -> list[Node]:
    """Those of an aggregate are entries of a target list."""
    arguments = node.nodes("aggdirectargs") + node.nodes("args")
    expressions = [each.node("expr") if each.kind == "TARGETENTRY" else None for each in arguments]
    return [each if found is None else found for each, found in zip(arguments, expressions, strict=True)]


def _parts(node: Node) -> list[Node] | None:
    """The expressions of which one is the value of this one, or that it is made of; None for others."""
    match node.kind.removesuffix("EXPR"):
        case "RELABELTYPE" | "COLLATE" | "NAMEDARG" | "COERCEVIAIO" | "ARRAYCOERCE":
            parts = [node.node("arg")]
        case "SUBSCRIPTINGREF":
            parts = [node.node("refexpr")]
        case "CASE":
            parts = [*(each.node("result") for each in node.nodes("args")), node.node("defresult")]
        case "ARRAY":
            return node.nodes("elements")
        case "COALESCE" | "MINMAX" | "ROW" | "NULLIF":
            return node.nodes("args")
        case (
            "SQLVALUEFUNCTION"
            | "BOOL"
            | "NULLTEST"
            | "BOOLEANTEST"
            | "SCALARARRAYOP"
            | "DISTINCT"
            | "ROWCOMPARE"
            | "GROUPINGFUNC"
        ):
            return []
        case _:
            return None
    return [part for part in parts if part is not None]


def _bytes(node: Node) -> bytes | None:
    """Of a constant."""
    value = node.get("constvalue")
    if node.kind != "CONST" or not isinstance(value, list):
        return None
    return bytes(int(byte) & 255 for byte in value[2:-1])


def _number(node: Node) -> int | None:
    """The integer that a constant is."""
    value = _bytes(node)
    if value is None or _type(node) not in (20, 21, 23):
        return None
    return int.from_bytes(value, sys.byteorder, signed=True)


def _numbers(node: Node) -> list[int]:
    """The integers of an array of constants, ARRAY[1, 2]."""
    numbers = [_number(each) for each in node.nodes("elements")]
    return [max(number, 1) for number in numbers if number is not None] if None not in numbers else []


def _has_width(node: Node) -> bool:
    """Whether a format, ``%5$-10s``, may name a width of more than four digits, or one that is an argument."""
    text = _bytes(node)
    return text is None or re.search(rb"%(\d+\$)?-?(\d{5}|\*)", text.replace(b"%%", b"")) is not None
