"""Options to try, made from the records of ``ml_rag.option``, and from anything else that is JSON.

Nothing here knows an option by its name but for SPECIAL: a new record is tried at its limits as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from support.cluster import Connection


class Raw(str):
    """JSON as it is written, mostly a number: Python's own have bounds that JSON's have not."""

    __slots__ = ()


@dataclass(frozen=True)
class Option:
    routine: str
    name: str
    type: str
    minimum: Decimal | None
    maximum: Decimal | None
    choices: tuple[str, ...]
    default_value: Any
    has_auto: bool
    auto_value: Any
    #: whose options the keys of its object are
    keys_of: str | None
    is_private: bool

    @property
    def key(self) -> tuple[str, str]:
        return self.routine, self.name


def read(connection: Connection) -> dict[str, list[Option]]:
    """Routine -> its options."""
    found: dict[str, list[Option]] = {}
    for row in connection.execute(
        "SELECT routine, name, type, minimum, maximum, choices, default_value, auto_value IS NOT NULL, auto_value,"
        " keys_of, is_private FROM ml_rag.option ORDER BY 1, 2"
    ):
        found.setdefault(row[0], []).append(Option(*row[:5], tuple(row[5] or ()), *row[6:]))
    return found


def dumps(value: Any) -> str:
    """JSON text of a value in which ``Raw`` may stand."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dumps, value)) + "]"
    return json.dumps(value)


ODD_TEXTS = [
    "", " ", "\t\n", "\u00a0", "x" * 5000, "'", '"', "\\", "%", "%s", "%1$s", "$1", "; DROP TABLE docs; --", "\x01\x7f",
    "\ufeff", "\u202e", "\u2028", "e\u0301", "中文", "😀", "a.b", "a.b.c", ".", '"a"."b"', '"', "pg_catalog.pg_class",
    "ml_rag.setting_value", "../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/", "null",
    "auto", "[1,2,3]", "[nan]", "{}", "(?:", "[a-", "a{99999}", "(a+)+$", "1e400", "-1", "en", "xx", "pt-BR", "simple",
    "no_such_model", "GENAI_OPTIONS=EMBED_MODEL_ID=x", "ctid", "tableoid", "xmax", "public",
]  # fmt: skip
#: what leads somewhere in the database of the tests
KNOWN_TEXTS = [
    "docs", "public.docs", "words", "texts", "fake-embed", "fake-embed-wide", "fake-generate", "fake-rerank", "hybrid",
    "segment", "segment_embedding", "document_name", "document_id", "segment_number", "metadata", "english", "question",
    "id", "a", "b", "text", "md",
]  # fmt: skip


def pick(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """One of them. Unlike sampled_from its repr holds none of them, which hypothesis wants to be short."""
    return st.integers(0, len(values) - 1).map(lambda i: values[i])


PLAIN = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)
TEXTS = st.one_of(pick(KNOWN_TEXTS), pick(KNOWN_TEXTS), pick(ODD_TEXTS), PLAIN)
NUMBERS = st.one_of(
    st.integers(-3, 110),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    pick([Raw(n) for n in ("1e400", "-1e400", "1e-400", "1e10000", "-0", "0.5", "1e2", "9" * 5000)]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(
    SCALARS, lambda v: st.one_of(st.lists(v, max_size=4), st.dictionaries(TEXTS, v, max_size=3)), max_leaves=8
)
#: nested deeply, long, wide; as JSON text, since most of them are no good as Python's objects
LARGE = pick(
    [
        *(Raw("[" * n + "]" * n) for n in (40, 400, 5000)),
        *(Raw('{"and":[' * n + "]}" * n) for n in (7, 9, 1000)),
        Raw(json.dumps("x" * 1_000_000)),
        Raw(json.dumps([str(n) for n in range(30_000)])),
        Raw(json.dumps({str(n): n for n in range(20_000)})),
        Raw(json.dumps([0.5] * 16_001)),
    ]
)
SMALL_SCHEMAS = pick(
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        {"enum": ["yes", "no"]},
        {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**12},
        {"anyOf": []},
        {"type": []},
        {"type": "object", "required": [{}], "properties": 1},
    ]
)
OPERATORS = ("eq", "ne", "in", "nin", "lt", "lte", "gt", "gte", "between", "like", "ilike", "exists", "contains", "zzz")
FILTERS = st.recursive(
    st.dictionaries(
        st.one_of(st.sampled_from(["document_name", "document_id", "k", "/a/b", "segment_embedding"]), TEXTS),
        st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.sampled_from(OPERATORS), ANYTHING)),
        max_size=2,
    ),
    lambda f: st.dictionaries(st.sampled_from(["and", "or", "not"]), st.one_of(f, st.lists(f, max_size=3)), min_size=1),
    max_leaves=4,
)
#: the size of the models' vectors in the database of the tests
VECTORS = st.one_of(
    st.lists(st.one_of(st.integers(-2, 2), st.floats(-1e3, 1e3)), min_size=16, max_size=16),
    st.lists(NUMBERS, max_size=20),
    st.lists(SCALARS, max_size=3),
    pick(["[" + ",".join(["0.25"] * 16) + "]", "[1,2,3]", "[]", "[1,", "[1e39]", "[nan]", "x", ""]),
)
SPECIAL = {
    "filters": FILTERS,
    "json_schema": SMALL_SCHEMAS,
    "k": st.lists(st.integers(0, 101), max_size=4),
}


class Generator:
    """Makes options of routines; ``reached`` holds those that a case had."""

    def __init__(self, options: Mapping[str, Sequence[Option]]) -> None:
        self.options = options
        self.reached: set[tuple[str, str]] = set()
        self._known: dict[tuple[str, ...], st.SearchStrategy[Any]] = {}

    def nested(self, option: Option) -> str | None:
        """The routine whose options the object of an option takes."""
        return option.keys_of

    def values(self, option: Option) -> st.SearchStrategy[Any]:
        """Values that fit, values just past what fits, and others."""
        fitting: st.SearchStrategy[Any]
        if (nested := self.nested(option)) is not None:
            fitting = st.deferred(lambda: self.objects(nested))
            if option.type == "array":
                fitting = st.lists(fitting, min_size=1, max_size=3)
        elif option.name in SPECIAL:
            fitting = SPECIAL[option.name]
        elif option.type == "text":
            fitting = TEXTS
        elif option.type == "text[]":
            fitting = st.lists(TEXTS, max_size=4)
        elif option.type == "boolean":
            fitting = st.booleans()
        elif option.type == "choice":
            fitting = st.sampled_from([form for c in option.choices for form in (c, c.lower(), c.upper())])
        elif option.type == "vector":
            fitting = VECTORS
        elif option.type in ("integer", "number"):
            fitting = self._numbers(option)
        else:
            fitting = ANYTHING
        return st.one_of(fitting, fitting, fitting, st.one_of(ANYTHING, st.just("auto"), st.none(), LARGE))

    @staticmethod
    def _numbers(option: Option) -> st.SearchStrategy[Any]:
        least, most = _range(option)
        inside = st.decimals(least, min(most, least + 50), allow_nan=False, places=3)
        whole = st.integers(int(least), int(min(most, least + 50)))
        return st.one_of(whole, inside.map(_number), st.sampled_from(_edges(option)))

    def objects(self, *routines: str) -> st.SearchStrategy[Any]:
        """Options of these routines together; few at a time more often than many."""
        if routines not in self._known:
            entries = [option for routine in routines for option in self.options[routine]]
            one = st.sampled_from(entries).flatmap(lambda o: self.values(o).map(lambda v: (o.name, v)))
            spoilt = st.tuples(st.sampled_from([o.name for o in entries]), PLAIN).map(lambda p: p[0][:-1] + p[1])
            self._known[routines] = st.one_of(
                st.lists(one, max_size=3).map(dict),
                st.lists(one, max_size=3).map(dict),
                st.lists(one, max_size=len(entries)).map(dict),
                st.tuples(st.lists(one, max_size=2).map(dict), st.dictionaries(spoilt, ANYTHING, max_size=1)).map(
                    lambda pair: pair[0] | pair[1]
                ),
            )
        return self._known[routines]

    def sweep(self, *routines: str) -> Iterator[dict[str, Any]]:
        """Each option by itself, also those inside of objects: fitting values, the edges, values of other types."""
        for option in (option for routine in routines for option in self.options[routine]):
            inside: list[Any] = [] if (nested := self.nested(option)) is None else list(self.sweep(nested))
            if option.type == "array":
                inside = [[value] for value in inside]
            for value in [*_SAMPLES, *option.choices, *inside, *_edges(option)]:
                yield {option.name: value}

    def note(self, routines: Sequence[str], options: Any) -> None:
        """Remember which options a case has."""
        for key in self._found(routines, options):
            self.reached.add(key)

    def _found(self, routines: Sequence[str], options: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(options, Mapping):
            return
        for routine in routines:
            for option in self.options[routine]:
                if option.name in options:
                    yield option.key
                    if (nested := self.nested(option)) is not None:
                        value = options[option.name]
                        for item in value if isinstance(value, list) else [value]:
                            yield from self._found([nested], item)

    @property
    def coverage(self) -> str:
        total = {option.key for entries in self.options.values() for option in entries}
        return f"{len(self.reached & total)} of {len(total)} options"


#: a value of each type that is taken as it is
SAMPLES: dict[str, Any] = {
    "text": "x",
    "text[]": ["a", "b.c"],
    "boolean": True,
    "object": {},
    "array": [1],
    "vector": [1, 2, 3],
    "any": "question",
}
#: a value of each kind of JSON, and the types that take it
KINDS: list[tuple[Any, set[str]]] = [
    ("x", {"text", "vector", "any"}),
    (1, {"integer", "number", "any"}),
    (True, {"boolean", "any"}),
    (["x"], {"text[]", "array", "vector", "any"}),
    ({"x": 1}, {"object", "any"}),
]


def fitting(option: Option) -> list[Any]:
    """Values that are taken as they are: the limits, each choice."""
    if option.type in ("integer", "number"):
        least, most = _range(option)
        return [_number(least), _number(most)]
    return list(option.choices) or [SAMPLES[option.type]]


def refused(option: Option) -> list[Any]:
    """Values just past the limits, and of every other type."""
    past: list[Any] = []
    if option.type in ("integer", "number"):
        step = 1 if option.type == "integer" else Decimal("0.0001")
        least, most = _range(option)
        past = [_number(least - step)]
        if option.maximum is not None:
            past += [_number(most + step), Raw("1e100000")]
        if option.type == "integer":
            past.append(1.5)
    if option.type == "choice":
        first = option.choices[0]
        past = [first + "x", first[:-1], " " + first, ",".join([*option.choices, "x"]), ""]
    if option.type == "text":
        past = [""]
    if option.type == "text[]":
        past = [["a", 1], ["a", None], [["a"]]]
    if not option.has_auto and option.type not in ("text", "vector", "any") and "auto" not in option.choices:
        past.append("auto")
    return past + [value for value, types in KINDS if option.type not in types]


#: a value of each type, for the sweep
_SAMPLES = [None, True, 1, 0.5, "docs", ["docs"], {}, [1, 2, 3], "auto", Raw("1e400")]


def _range(option: Option) -> tuple[Decimal, Decimal]:
    assert option.minimum is not None
    return option.minimum, option.maximum if option.maximum is not None else Decimal(10**6)


def _edges(option: Option) -> list[Any]:
    if option.type not in ("integer", "number"):
        return []
    least, most = _range(option)
    edges = [least, most, least - 1, most + 1, least + 1, (least + most) / 2, Decimal("0.5"), most + Decimal("1e-9")]
    return [_number(edge) for edge in edges]


def _number(value: Decimal) -> Raw:
    return Raw(format(value.normalize(), "f"))
