"""ground/parse, pipeline/request: each option of SPEC.md section 2 and 3 in its range and past it, and nonsense."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_options import CASES, INF, LEFT_OUT, NUMBERS, ROUTINES, SAMPLES, SPEC, entry

from support.cluster import Connection
from support.stores import create_store, error


def parse(connection: Connection, routine: str, options: Any) -> Any:
    text = options if isinstance(options, str) else json.dumps(options)
    row = connection.execute("SELECT ml_rag.parse_options(%s, %s)", (routine, text)).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("routine", ROUTINES)
def test_defaults_are_filled_in(module_asker: Connection, routine: str) -> None:
    expected = {}
    for (owner, name), spec in SPEC.items():
        default = entry(*spec)[3]
        if owner == routine and default is not None:
            expected[name] = default
    assert parse(module_asker, routine, {}) == expected
    assert parse(module_asker, routine, "null") == expected
    assert module_asker.execute("SELECT ml_rag.parse_options(%s, NULL)", (routine,)).fetchone() == (expected,)
    every_null = {name: None for owner, name in SPEC if owner == routine}
    assert parse(module_asker, routine, every_null) == expected


@pytest.mark.parametrize(("routine", "name", "kind", "rest"), [(*c.values[:3], c.values[3:]) for c in CASES])
def test_a_value_of_the_right_type_is_taken_as_it_is(
    module_asker: Connection, routine: str, name: str, kind: str, rest: Any
) -> None:
    value = rest[0][0] if kind == "choice" else SAMPLES[kind]
    assert parse(module_asker, routine, {name: value})[name] == value


#: options that hold texts: their values are not repeated, as details go into PostgreSQL's log
UNTOLD = {"context", "system", "abstain_text", "stop_sequences", "required_keywords", "excluded_keywords"}


def told(name: str, value: Any) -> str:
    """A refused value as the detail has it."""
    if name in UNTOLD and isinstance(value, str | list | dict):
        of = {str: f"a text of {len(value)} characters", list: f"an array of {len(value)}", dict: "an object"}
        return of[type(value)]
    return json.dumps(value)


@pytest.mark.parametrize(("routine", "name", "kind"), [c.values[:3] for c in CASES])
def test_a_value_of_another_type_is_refused(module_asker: Connection, routine: str, name: str, kind: str) -> None:
    fits = {
        "text": "string",
        "text[]": "array",
        "boolean": "boolean",
        "object": "object",
        "choice": "string",
        "integer": "number",
        "number": "number",
    }
    values = {"string": "x", "number": 1, "boolean": True, "array": ["x"], "object": {"x": 1}}
    for type_, value in values.items():
        if fits.get(kind) == type_ or (kind == "vector" and type_ in ("array", "string")):
            continue
        with error("22023", f'"{name}"', told(name, value)) as caught:
            parse(module_asker, routine, {name: value})
        assert "allowed" in caught.detail
        assert caught.hint.endswith(".")


@pytest.mark.parametrize(("routine", "name", "kind", "least", "most"), [c.values[:5] for c in NUMBERS])
def test_limits_and_just_past_them(
    module_asker: Connection, routine: str, name: str, kind: str, least: float, most: float
) -> None:
    assert parse(module_asker, routine, {name: least})[name] == least
    step = 1 if kind == "integer" else 0.0001
    with error("22023", f'"{name}"'):
        parse(module_asker, routine, {name: least - step})
    if most == INF:
        assert parse(module_asker, routine, {name: 1e6})[name] == 1e6
        return
    assert parse(module_asker, routine, {name: most})[name] == most
    with error("22023", f'"{name}"', f"to {most}"):
        parse(module_asker, routine, f'{{"{name}": {most + step}}}')
    with error("22023", f'"{name}"'):
        parse(module_asker, routine, f'{{"{name}": 1e100000}}')


@pytest.mark.parametrize(
    ("routine", "name"), [c.values[:2] for c in NUMBERS if c.values[2] == "integer"], ids="{0[0]}.{0[1]}".format
)
def test_an_integer_has_no_fraction(module_asker: Connection, routine: str, name: str) -> None:
    with error("22023", f'"{name}"', "1.5"):
        parse(module_asker, routine, {name: 1.5})
    parsed = module_asker.execute(
        "SELECT ml_rag.parse_options(%s, %s) ->> %s", (routine, f'{{"{name}": 1.0}}', name)
    ).fetchone()
    assert parsed == ("1",)


@pytest.mark.parametrize(("routine", "name", "kind", "rest"), [(*c.values[:3], c.values[3:]) for c in CASES])
def test_auto_is_taken_where_it_means_something(
    module_asker: Connection, routine: str, name: str, kind: str, rest: Any
) -> None:
    auto = entry(kind, *rest)[4]
    if auto is not None:
        for word in ("auto", "AUTO", "Auto"):
            chosen = {} if auto is LEFT_OUT else {name: auto}
            assert parse(module_asker, routine, {name: word}) == {**parse(module_asker, routine, {}), **chosen}
    elif kind not in ("text", "vector"):
        with error("22023", f'"{name}"', told(name, "auto")):
            parse(module_asker, routine, {name: "auto"})


@pytest.mark.parametrize("word", ["cosine", "Dot", "EUCLIDEAN", "euclidean"])
def test_metric_in_any_case(module_asker: Connection, word: str) -> None:
    assert parse(module_asker, "ml_rag", {"distance_metric": word})["distance_metric"] == word.upper()


@pytest.mark.parametrize("value", ["L2", "", "cosine ", "COSINE,DOT", "манхэттен"])
def test_unknown_metric(module_asker: Connection, value: str) -> None:
    with error("22023", "COSINE, DOT, EUCLIDEAN, MANHATTAN", "distance_metric"):
        parse(module_asker, "ml_rag", {"distance_metric": value})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("n_citation", "n_citations"),
        ("N_CITATIONS", "n_citations"),
        ("vectorstore", "vector_store"),
        ("skip_generation", "skip_generate"),
        ("distance", None),
        ("zzz", None),
        ("", None),
        ("k", None),
        ("schéma", "schema"),
    ],
)
def test_unknown_key_gets_the_nearest_known_one_as_hint(
    module_asker: Connection, key: str, nearest: str | None
) -> None:
    with error("22023", f'unknown option "{key}"', "n_citations") as caught:
        parse(module_asker, "ml_rag", {key: 1})
    assert (f'Did you mean "{nearest}"?' == caught.hint) == (nearest is not None), caught.hint


def test_a_part_of_a_name_gets_the_whole_one_as_hint(module_asker: Connection) -> None:
    with error("22023", 'unknown option "table"') as caught:
        parse(module_asker, "vector_store_load", {"table": "handbook"})
    assert caught.hint == 'Did you mean "table_name"?'


def test_a_null_does_not_hide_an_unknown_key(module_asker: Connection) -> None:
    with error("22023", "n_citation"):
        parse(module_asker, "ml_rag", {"n_citation": None})


def test_keys_of_any_form_are_complained_about(module_asker: Connection) -> None:
    for key in ("x" * 100_000, "%s", '"', "\n", "😀", "a.b", "{}", "\\"):
        with error("22023") as caught:
            parse(module_asker, "ml_rag", {key: 1})
        assert len(caught.message) < 200


def test_huge_value_is_cut_in_the_detail(module_asker: Connection) -> None:
    with error("22023") as caught:
        parse(module_asker, "ml_rag", {"n_citations": "x" * 1_000_000})
    assert len(caught.detail) < 500


@pytest.mark.parametrize("options", ["[]", '"x"', "1", "true", "[1]"])
def test_options_are_an_object(module_asker: Connection, options: str) -> None:
    for call in ("ml_rag_search", "ml_rag_answer", "ml_generate", "ml_embed_row"):
        with error("22023"):
            module_asker.execute(f"SELECT {call}('q', %s)", (options,))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"retrieval_options": {"max_distance": -1}}, "max_distance"),
        ({"retrieval_options": {"n_citations": 1}}, "n_citations"),
        ({"retrieval_options": {"segment_overlap": 6}}, "segment_overlap"),
        ({"model_options": {"temperature": -0.1}}, "temperature"),
        ({"model_options": {"context": "x"}}, "context"),
        ({"model_options": {"n_citations": 1}}, "n_citations"),
        ({"model_options": {"temperature": -1}, "skip_generate": True}, "temperature"),
        ({"vector_store_columns": {"segment": 1}}, "segment"),
        ({"vector_store_columns": {"segments": "x"}}, "segments"),
        ({"vector_store_columns": {"segment": ""}}, "segment"),
        ({"prompt": {"system": ""}}, "system"),
        ({"prompt": {"citation_style": "footnotes"}}, "citation_style"),
        ({"prompt": {"order": "best"}, "skip_generate": True}, "order"),
        ({"prompt": {"orders": "best_last"}}, "orders"),
        ({"prompt": "short"}, "prompt"),
        ({"abstain": "true"}, "abstain"),
        ({"abstain_text": "  "}, "abstain_text"),
        ({"vector_store": ["a", 1]}, "vector_store"),
        ({"vector_store": ["a", None]}, "vector_store"),
        ({"vector_store": "a"}, "vector_store"),
        ({"vector_store": [["a"]]}, "vector_store"),
        ({"embed_model_id": ""}, "embed_model_id"),
        ({"skip_generate": 1}, "skip_generate"),
        ({"skip_generate": "true"}, "skip_generate"),
        ({"n_citations": "3"}, "n_citations"),
        ({"n_citations": True}, "n_citations"),
        ({"n_citations": "auto"}, "n_citations"),
    ],
    ids=json.dumps,
)
def test_bad_options_reach_the_caller_of_the_public_routines(
    module_asker: Connection, options: dict[str, Any], named: str
) -> None:
    for statement in ("SELECT ml_rag_search('q', %s)", "SELECT ml_rag_answer('q', %s)", "CALL ml_rag('q', %s)"):
        with error("22023", f'"{named}"'):
            module_asker.execute(statement, (json.dumps(options),))


DOCUMENTED = {"22023", "42P01", "42703", "42501", "P0002", "55000", "08006", "53300", "57014", "38000", "22000"}


numbers = st.one_of(
    st.integers(-3, 110),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 1, 5, 6, 100, 101, 999999.9999, 1000000, 0.5, -0.0]),
)


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)


scalars = st.one_of(st.none(), st.booleans(), numbers, texts, st.sampled_from(["auto", "COSINE", "dot", "docs"]))


anything = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3))
)


#: options of ml_rag that are objects with options of their own, of the same name
INNER = ("retrieval_options", "vector_store_columns", "prompt", "rerank", "hybrid_options")


VALUES = {
    "text[]": st.lists(st.one_of(texts, st.sampled_from(["docs", "public.docs", "a"])), max_size=3),
    "integer": numbers,
    "number": numbers,
    "boolean": st.booleans(),
    "text": st.one_of(texts, st.sampled_from(["fake-embed", "fake-generate", "segment"])),
    "vector": st.one_of(st.lists(numbers, max_size=4), st.just([1, 2, 3]), texts),
    "choice": st.sampled_from(
        ["COSINE", "dot", "Euclidean", "generation", "summarization", "numbered", "best_first", "x"]
    ),
}


def objects(routine: str) -> st.SearchStrategy[dict[str, Any]]:
    optional = {}
    for (owner, name), spec in SPEC.items():
        if owner == routine:
            nested = {"model_options": "ml_generate", **dict.fromkeys(INNER, name)}
            good = objects(nested[name]) if name in nested else VALUES.get(spec[0], anything)
            optional[name] = st.one_of(good, good, anything, st.none())
    known = st.fixed_dictionaries({}, optional=optional)
    # an object of few options gets past the checks more often than one of all
    few = known.flatmap(
        lambda d: (
            st.sets(st.sampled_from(sorted(d)), max_size=3).map(lambda keys: {k: d[k] for k in keys})
            if d
            else st.just(d)
        )
    )
    return st.one_of(few, few, known, st.dictionaries(texts, anything, max_size=3))


@pytest.fixture(scope="module")
def documents(module_owner: Connection, module_asker: Connection) -> Connection:
    create_store(module_owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in range(5)])
    return module_asker


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(query=st.one_of(texts, st.just("q")), options=st.one_of(objects("ml_rag"), anything))
@example(query="q", options={"model_options": {"temperature": 1e300}})
@example(query="q", options={"query_embedding": [1, 2, 3], "vector_store_columns": {"document_id": "segment"}})
def test_generated_options_meet_documented_errors_only(documents: Connection, query: str, options: Any) -> None:
    for name, value in (("ml_rag_search", options), ("ml_rag_answer", options)):
        try:
            documents.execute(f"SELECT {name}(%s, %s)", (query, json.dumps(value)))
        except psycopg.Error as e:
            assert e.sqlstate in DOCUMENTED, (e.sqlstate, e.diag.message_primary, options)  # noqa: PT017
            assert "internal error" not in (e.diag.message_primary or ""), (e.diag.message_detail, options)  # noqa: PT017


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=texts, options=st.one_of(objects("ml_generate"), anything))
@example(prompt="q", options={"stop_sequences": [""]})
@example(prompt="q", options={"json_schema": {"type": []}})
def test_generated_options_of_ml_generate(documents: Connection, prompt: str, options: Any) -> None:
    for call in ("ml_generate", "ml_embed_row"):
        try:
            documents.execute(f"SELECT {call}(%s, %s)", (prompt, json.dumps(options)))
        except psycopg.Error as e:
            assert e.sqlstate in DOCUMENTED, (e.sqlstate, e.diag.message_primary, options)  # noqa: PT017
            assert "internal error" not in (e.diag.message_primary or ""), (e.diag.message_detail, options)  # noqa: PT017


@pytest.mark.parametrize("number", ["1e5000", "1e-5000", "1e300", "123456789.000000000000000000000000000001"])
def test_numbers_that_no_float_holds(documents: Connection, number: str) -> None:
    for options in (f'{{"temperature": {number}}}', f'{{"json_schema": {{"minimum": {number}}}}}'):
        try:
            documents.execute("SELECT ml_generate('q', %s)", (options,))
        except psycopg.Error as e:
            assert e.sqlstate == "22023", (e.sqlstate, e.diag.message_primary, e.diag.message_detail)  # noqa: PT017


@pytest.mark.parametrize(
    ("name", "home"),
    [("max_distance", "retrieval_options"), ("candidates", "hybrid_options"), ("temperature", "model_options")],
)
def test_an_option_in_the_wrong_place_is_told_its_place(module_asker: Connection, name: str, home: str) -> None:
    with error("22023", f'unknown option "{name}"') as caught:
        parse(module_asker, "ml_rag", {name: 1})
    assert caught.hint == f'It belongs into "{home}".'
