"""ground/parse, pipeline/request: each option at its limits and just past them, and nonsense."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, value_of
from support.metrics import METRICS
from support.option_cases import Option, Raw, dumps, fitting, read, refused
from support.stores import create_store, error


def parse(connection: Connection, routine: str, options: Any) -> Any:
    text = options if isinstance(options, str) and not isinstance(options, Raw) else dumps(options)
    return value_of(connection, "SELECT ml_rag.parse_options(%s, %s)", (routine, text))


@pytest.fixture(scope="module")
def options(module_asker: Connection) -> dict[str, list[Option]]:
    return read(module_asker)


@pytest.fixture(scope="module")
def all_options(options: dict[str, list[Option]]) -> list[Option]:
    return [option for records in options.values() for option in records]


def test_defaults_are_filled_in(module_asker: Connection, options: dict[str, list[Option]]) -> None:
    for routine, records in options.items():
        expected = {o.name: o.default_value for o in records if o.default_value is not None}
        assert parse(module_asker, routine, {}) == expected, routine
        assert parse(module_asker, routine, "null") == expected, routine
        assert module_asker.execute("SELECT ml_rag.parse_options(%s, NULL)", (routine,)).fetchone() == (expected,)
        assert parse(module_asker, routine, {o.name: None for o in records}) == expected, routine


def test_a_value_that_fits_is_taken_as_it_is_limits_included(
    module_asker: Connection, all_options: list[Option]
) -> None:
    for option in all_options:
        for value in fitting(option):
            found = parse(module_asker, option.routine, {option.name: value})[option.name]
            assert found == json.loads(dumps(value)), option


def shown(option: Option, value: Any, private: set[str]) -> str:
    """A refused value as the detail has it; ``private``: names of options that are private in some routine."""
    if option.name in private and isinstance(value, str | list | dict) and not isinstance(value, Raw):
        of = {str: f"a text of {len(value)} characters", list: f"an array of {len(value)}", dict: "an object"}
        return of[type(value)]
    text = dumps(value)
    return "" if "e" in text else text  # numbers with an exponent are written out


def test_a_value_past_a_limit_or_of_another_type_is_refused(
    module_asker: Connection, all_options: list[Option]
) -> None:
    private = {option.name for option in all_options if option.is_private}
    for option in all_options:
        for value in refused(option):
            with error("22023", f'"{option.name}"', shown(option, value, private)) as caught:
                parse(module_asker, option.routine, {option.name: value})
            assert "allowed" in caught.detail, option
            assert caught.hint.endswith("."), option


@pytest.mark.parametrize(
    ("routine", "key", "word", "hint"),
    [
        ("create_store", "index", "hnsw", 'Write {"index": {"type": "hnsw"}}.'),
        ("create_store", "index", "binary", 'Write {"index": {"quantization": "binary"}}.'),
        ("ml_rag", "rerank", "hybrid", 'Write {"rerank": {"model_id": "hybrid"}}.'),
        (
            "create_store",
            "index",
            "tree",
            "SELECT * FROM ml_rag.option lists the options with their ranges and defaults.",
        ),
    ],
)
def test_a_word_in_place_of_an_object(module_asker: Connection, routine: str, key: str, word: str, hint: str) -> None:
    with error("22023", "allowed: an object") as caught:
        parse(module_asker, routine, {key: word})
    assert caught.hint == hint


def test_limits_are_in_the_detail(module_asker: Connection, all_options: list[Option]) -> None:
    for option in all_options:
        if option.maximum is not None:
            with error("22023", f"from {option.minimum} to {option.maximum}"):
                parse(module_asker, option.routine, {option.name: Raw(option.maximum + 1)})


def test_an_integer_may_be_written_with_a_point(module_asker: Connection, all_options: list[Option]) -> None:
    for option in all_options:
        if option.type == "integer":
            parsed = module_asker.execute(
                "SELECT ml_rag.parse_options(%s, %s) ->> %s",
                (option.routine, f'{{"{option.name}": {option.maximum}.0}}', option.name),
            ).fetchone()
            assert parsed == (str(option.maximum),), option


def test_auto_is_taken_where_it_means_something(module_asker: Connection, all_options: list[Option]) -> None:
    for option in all_options:
        if option.has_auto:
            defaults = parse(module_asker, option.routine, {})
            for word in ("auto", "AUTO", "Auto"):
                chosen = {} if option.auto_value is None else {option.name: option.auto_value}
                assert parse(module_asker, option.routine, {option.name: word}) == {**defaults, **chosen}, option


def test_choices_are_taken_in_any_case(module_asker: Connection, all_options: list[Option]) -> None:
    for option in all_options:
        for choice in option.choices:
            for form in (choice.lower(), choice.upper(), choice.title()):
                assert parse(module_asker, option.routine, {option.name: form})[option.name] == choice, option


@pytest.mark.parametrize("value", ["L2", "", "cosine ", "COSINE,DOT", "манхэттен"])
def test_unknown_metric(module_asker: Connection, value: str) -> None:
    with error("22023", ", ".join(sorted(METRICS)), "distance_metric"):
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


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("yaer", "year", 1),
        ("frima", "firma", 1),
        ("ba", "ab", 1),
        ("bca", "abc", 2),
        ("aa", "a", 1),
        ("ca", "abc", 3),  # no letter changes twice
        ("éa", "aé", 1),
    ],
)
def test_letters_that_changed_places_are_one_change(module_asker: Connection, a: str, b: str, distance: int) -> None:
    for pair in ((a, b), (b, a)):
        assert value_of(module_asker, "SELECT ml_rag._distance_of_words(%s, %s)", pair) == distance


@pytest.mark.parametrize(
    ("routine", "name", "here"),
    [
        ("ml_rag", "limit", "n_citations"),
        ("ml_rag", "top_k", "n_citations"),
        ("ml_rag", "K", "n_citations"),
        ("ml_rag", "filter", "filters"),
        ("ml_rag", "threshold", 'max_distance" of "retrieval_options'),
        ("arm", "node_group", "in"),
        ("vector_store_load", "chunk_size", 'segment_tokens" of "chunking'),
        ("chunking", "tokens", "segment_tokens"),
        ("vector_store_columns", "content", "segment"),
        ("ml_rank", "top_k", "top_n"),
        ("ml_nl_sql", "limit", "max_rows"),
    ],
)
def test_what_other_systems_call_it_gets_the_name_here(
    module_asker: Connection, routine: str, name: str, here: str
) -> None:
    with error("22023", f'unknown option "{name}"') as caught:
        module_asker.execute("SELECT ml_rag.parse_options(%s, jsonb_build_object(%s::text, 5))", (routine, name))
    assert caught.hint == f'That is "{here}" here.'


def test_a_part_of_a_name_gets_the_whole_one_as_hint(module_asker: Connection) -> None:
    with error("22023", 'unknown option "table"') as caught:
        parse(module_asker, "vector_store_load", {"table": "handbook"})
    assert caught.hint == 'Did you mean "table_name"?'


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("vector_store", "handbook", 'Put it in brackets: {"vector_store": ["…"]}.'),
        ("arms", {"search": "keyword"}, 'Put it in brackets: {"arms": [{…}]}.'),
        ("rerank", True, '{"rerank": {}} takes its defaults.'),
        ("vector_store", 1, "SELECT * FROM ml_rag.option lists the options with their ranges and defaults."),
        ("rerank", False, "SELECT * FROM ml_rag.option lists the options with their ranges and defaults."),
    ],
)
def test_a_form_that_is_nearly_right_gets_the_right_one_as_hint(
    module_asker: Connection, name: str, value: Any, hint: str
) -> None:
    with error("22023", f'invalid value for option "{name}"') as caught:
        module_asker.execute("SELECT ml_rag.parse_options('ml_rag', %s)", (json.dumps({name: value}),))
    assert caught.hint == hint


def test_options_of_an_index_are_an_object(module_asker: Connection) -> None:
    with error("22023", 'Got "hnsw"; allowed: a JSON object.') as caught:
        module_asker.execute("SELECT ml_rag.parse_options('index', '\"hnsw\"')")
    assert caught.hint == 'Options are one JSON object, such as {"type": "hnsw"}.'


@pytest.mark.parametrize(
    ("statement", "routine", "got"),
    [
        ("CALL ml_rag('q', '[{\"n_citations\": 1}]')", "ml_rag", "array"),
        ("SELECT ml_rag_search('q', '\"x\"')", "ml_rag", "string"),
        ("SELECT ml_rag_chat('q', '[]')", "ml_rag_chat", "array"),
        ("SELECT ml_generate('q', '5')", "ml_generate", "number"),
    ],
)
def test_what_is_not_an_object_is_said(module_asker: Connection, statement: str, routine: str, got: str) -> None:
    with error("22023", f"the options of {routine} are not a JSON object", f"Got {got}.") as caught:
        module_asker.execute(statement)
    assert caught.hint == 'Options are one JSON object: {"option": value, …}.'


def test_a_null_does_not_hide_an_unknown_key(module_asker: Connection) -> None:
    with error("22023", "n_citation"):
        parse(module_asker, "ml_rag", {"n_citation": None})


def test_the_keys_of_an_object_are_checked_with_it(module_asker: Connection) -> None:
    objects = module_asker.execute(
        "SELECT routine, name, keys_of FROM ml_rag.option WHERE type = 'object' AND keys_of IS NOT NULL"
    ).fetchall()
    assert ("ml_rag", "model_options", "ml_generate") in objects
    for routine, name, keys_of in objects:
        with error("22023", 'unknown option "nonsense"') as caught:
            parse(module_asker, routine, {name: {"nonsense": 1}})
        assert caught.detail.startswith(f"Options of {keys_of}:")


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
        ({"model_options": {"temperature": -1}, "skip_generate": True}, "temperature"),
        ({"vector_store_columns": {"segment": ""}}, "segment"),
        ({"prompt": {"order": "best"}, "skip_generate": True}, "order"),
        ({"abstain": "true", "skip_generate": True}, "abstain"),
        ({"abstain_text": "  "}, "abstain_text"),
        ({"abstain_text": "\n\t", "skip_generate": True}, "abstain_text"),
        ({"vector_store": ["a", 1]}, "vector_store"),
        ({"n_citations": "3"}, "n_citations"),
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


@pytest.fixture(scope="module")
def documents(module_owner: Connection, module_asker: Connection) -> Connection:
    create_store(module_owner, rows=[("a", 1, i, f"s{i}", (1, i, 0)) for i in range(5)])
    return module_asker


def meets_documented_errors_only(connection: Connection, call: str, query: str, options: Any) -> None:
    try:
        connection.execute(f"SELECT {call}(%s, %s)", (query, dumps(options)))
    except psycopg.Error as e:
        assert e.sqlstate in DOCUMENTED, (e.sqlstate, e.diag.message_primary, options)  # noqa: PT017
        assert "internal error" not in (e.diag.message_primary or ""), (e.diag.message_detail, options)  # noqa: PT017


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("ml_rag_answer", {"model_options": {"temperature": 1e300}}),
        ("ml_rag_search", {"query_embedding": [1, 2, 3], "vector_store_columns": {"document_id": "segment"}}),
        ("ml_generate", {"stop_sequences": [""]}),
        ("ml_generate", {"json_schema": {"type": []}}),
    ],
)
def test_options_that_once_met_another_error(documents: Connection, call: str, options: Any) -> None:
    meets_documented_errors_only(documents, call, "q", options)


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
def test_an_option_in_the_wrong_place_gets_the_right_one_as_hint(
    module_asker: Connection, name: str, home: str
) -> None:
    with error("22023", f'unknown option "{name}"') as caught:
        parse(module_asker, "ml_rag", {name: 1})
    assert caught.hint == f'It belongs in "{home}".'


def test_the_language_is_one_of_the_store(module_asker: Connection) -> None:
    with error("22023", 'unknown option "language"') as caught:
        parse(module_asker, "ml_rag", {"language": "de"})
    assert caught.hint.startswith("The language of a store is an option of ml_rag.enable_keyword_search")


@pytest.mark.parametrize(
    ("routine", "options", "hint"),
    [
        ("ml_rag_evaluate", {"k": 1}, 'Put it in brackets: {"k": […]}.'),
        ("ml_rag", {"arms": {"search": "semantic"}}, 'Put it in brackets: {"arms": [{…}]}.'),
        ("ml_rag", {"vector_store": "docs"}, 'Put it in brackets: {"vector_store": ["…"]}.'),
    ],
)
def test_what_has_to_be_an_array_gets_brackets_as_hint(
    module_asker: Connection, routine: str, options: dict[str, Any], hint: str
) -> None:
    with error("22023", "invalid value") as caught:
        parse(module_asker, routine, options)
    assert caught.hint == hint
