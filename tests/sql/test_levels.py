"""pipeline/levels, preset/preset: options of ml_rag by name and for everybody, each level laid over the one before."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.cluster import Connection, value_of
from support.stores import answer, create_store, error, fake_embedding, search

SEGMENTS = ["Hotels are paid in full.", "Trains are free.", "Rain falls.", "Dogs bark."]


@pytest.fixture
def store(owner: Connection) -> None:
    rows = [("travel.md", 1, place, text, fake_embedding(text)) for place, text in enumerate(SEGMENTS, start=1)]
    create_store(owner, "handbook", rows, type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('handbook')")


def configure(owner: Connection, options: Any) -> None:
    owner.execute(
        "SELECT ml_rag.configure('default_options', %s)", (options if options is None else json.dumps(options),)
    )


def session(connection: Connection, options: Any) -> None:
    connection.execute("SELECT set_config('ml_rag.options', %s, false)", (json.dumps(options),))


def preset(owner: Connection, name: str, options: Any, description: str | None = None) -> None:
    owner.execute("SELECT ml_rag.create_preset(%s, %s, %s)", (name, json.dumps(options), description))


def n(connection: Connection, **options: Any) -> int:
    found = answer(connection, "trains", {"skip_generate": True, **options})
    # rows and the stages see the same options as the statement
    assert len(search(connection, "trains", options)) == len(found["citations"])
    explained = answer(connection, "trains", {"skip_generate": True, "explain": True, **options})
    assert explained["citations"] == found["citations"]
    return len(found["citations"])


@pytest.mark.usefixtures("store")
def test_each_level_is_laid_over_the_one_before(owner: Connection, asker: Connection) -> None:
    assert n(asker) == 3
    configure(owner, {"n_citations": 1})
    assert n(asker) == 1
    session(asker, {"n_citations": 2})
    assert n(asker) == 2
    preset(owner, "handbook", {"n_citations": 4})
    assert n(asker) == 2
    assert n(asker, preset="handbook") == 4
    assert n(asker, preset="handbook", n_citations=1) == 1
    # null is what is built in
    assert n(asker, preset="handbook", n_citations=None) == 3
    preset(owner, "handbook", {"n_citations": 1}, "what staff may read")
    assert n(asker, preset="handbook") == 1
    rows = asker.execute("SELECT * FROM ml_rag.preset").fetchall()
    assert rows == [("handbook", {"n_citations": 1}, "what staff may read")]
    configure(owner, None)
    asker.execute("RESET ml_rag.options")
    assert n(asker) == 3


@pytest.mark.usefixtures("store")
def test_the_options_of_a_role(owner: Connection, asker: Connection) -> None:
    (role,) = asker.execute("SELECT current_user").fetchone() or ("",)
    session(asker, {"n_citations": 1})
    assert n(asker) == 1
    asker.execute("SET ml_rag.options = ''")
    assert n(asker) == 3
    owner.execute(sql.SQL("ALTER ROLE {} SET ml_rag.options = '{{}}'").format(sql.Identifier(role)))
    owner.execute(sql.SQL("ALTER ROLE {} RESET ml_rag.options").format(sql.Identifier(role)))


@pytest.mark.usefixtures("store")
def test_objects_are_laid_over_key_by_key(owner: Connection, asker: Connection) -> None:
    configure(owner, {"retrieval_options": {"max_distance": 0, "segment_overlap": 2}})
    with error("P0002"):
        n(asker)
    found = answer(asker, "trains", {"skip_generate": True, "retrieval_options": {"max_distance": 2}, "n_citations": 1})
    assert found["citations"][0]["segment"].count("\n") + found["citations"][0]["segment"].count(".") > 2


@pytest.mark.usefixtures("store")
def test_filters_of_all_levels_hold_but_for_a_key_that_is_given_anew(owner: Connection, asker: Connection) -> None:
    """Segments 1 to 4. What a level has under "and", "or" and "not" is no condition that another one gives anew."""

    def found(**options: Any) -> list[int]:
        wanted = {"n_citations": 9, **options}
        rows = sorted(row[4] for row in search(asker, "trains", wanted))
        # as a gateway does it, which lays the levels over one another and then calls with all of them
        laid = asker.execute("SELECT ml_rag._layered(%s)", (json.dumps(wanted),)).fetchone() or ({},)
        assert sorted(row[4] for row in search(asker, "trains", laid[0])) == rows
        again = asker.execute("SELECT ml_rag._layered(%s)", (json.dumps(laid[0]),)).fetchone()
        assert again == laid
        return rows

    def number(n: int) -> dict[str, Any]:
        return {"segment_number": n}

    for lower in ({"not": number(2)}, {"and": [{"not": number(2)}]}, {"or": [number(1), number(3), number(4)]}):
        configure(owner, {"filters": lower})
        assert found() == [1, 3, 4]
        assert found(filters={"not": number(3)}) == [1, 4]
        assert found(filters={"and": [{"not": number(3)}]}) == [1, 4]
        assert found(filters={"or": [number(1), number(2)]}) == [1]
        assert found(filters={"segment_number": {"gt": 1}}) == [3, 4]
        assert found(filters=lower) == found(filters={}) == [1, 3, 4]
        assert found(filters=None) == [1, 2, 3, 4]
        session(asker, {"filters": {"not": number(4)}})
        preset(owner, "some", {"filters": {"or": [number(1), number(2), number(4)]}})
        assert found(preset="some") == [1]
        assert found(preset="some", filters={"not": number(2), "and": [{"segment_number": {"gt": 0}}]}) == [1]
        with error("P0002", "no segment found"):
            found(preset="some", filters={"not": number(1)})
        asker.execute("RESET ml_rag.options")
        with error("22023", 'option "filters"'):
            found(filters={"and": None})
    configure(owner, {"filters": {"segment_number": {"gte": 2, "lt": 4}, "and": [{"n": {"gt": 0}}]}})
    assert found(filters={"segment_number": {"gte": 3}}) == [3]
    assert found(filters=number(1)) == [1]


@pytest.mark.usefixtures("store")
def test_arms_take_the_place_of_the_usual_two(owner: Connection, asker: Connection) -> None:
    configure(owner, {"keyword_search": True})
    assert answer(asker, "trains", {"skip_generate": True})["retrieval_info"]["search"] == "hybrid"
    arms = [{"search": "keyword"}]
    found = answer(asker, "trains", {"skip_generate": True, "arms": arms})
    assert found["retrieval_info"]["search"] == "keyword"
    configure(owner, {"arms": arms})
    found = answer(asker, "trains", {"skip_generate": True, "semantic_search": True})
    assert "search" not in found["retrieval_info"]
    # how they are fused goes with either way
    for level in ({"arms": arms}, {"hybrid_options": {"fusion": "rrf"}, "keyword_search": True}):
        configure(owner, level)
        for call in ({"arms": arms}, {"hybrid_options": {"rrf_k": 7}}):
            found = answer(asker, "trains", {"skip_generate": True, **call})
            assert found["retrieval_info"]["search"] == ("keyword" if "arms" in {*level, *call} else "hybrid")
    configure(owner, {"arms": arms})
    hybrid = {"keyword_search": True, "hybrid_options": {"semantic_weight": 0.5}}
    for call in (hybrid, {"hybrid_options": {"semantic_weight": 0.5}}):
        found = answer(asker, "trains", {"skip_generate": True, **call})
        assert found["retrieval_info"].get("search") == ("hybrid" if "keyword_search" in call else None)


@pytest.mark.usefixtures("store")
def test_chat_and_tables_have_them_too(owner: Connection, asker: Connection) -> None:
    preset(owner, "short", {"n_citations": 1, "model_options": {"model_id": "extractive"}})
    assert len(value_of(asker, """SELECT ml_rag_chat('trains', '{"preset": "short"}')""")["citations"]) == 1
    configure(owner, {"n_citations": 2, "model_options": {"model_id": "extractive"}})
    assert len(value_of(asker, "SELECT ml_rag_chat('trains')")["citations"]) == 2


@pytest.mark.usefixtures("store")
def test_an_error_says_the_level(owner: Connection, asker: Connection) -> None:
    session(asker, {"n_citations": 101})
    with error("22023", 'option "n_citations"', "It comes from setting ml_rag.options."):
        n(asker)
    # what the call says itself does not
    asker.execute("RESET ml_rag.options")
    configure(owner, {"n_citations": 1})
    with error("22023", 'option "n_citations"') as caught:
        n(asker, n_citations=101)
    assert "It comes from" not in caught.detail
    for wrong in ("{", "[]", '{"preset": "a"}', "3"):
        asker.execute("SELECT set_config('ml_rag.options', %s, false)", (wrong,))
        with error("22023", "invalid value of setting ml_rag.options"):
            n(asker)
    asker.execute("RESET ml_rag.options")
    with error("22023", 'preset "none" does not exist'):
        n(asker, preset="none")
    with error("22023", 'option "preset"'):
        n(asker, preset=3)


def test_levels_are_checked_when_they_are_set(owner: Connection) -> None:
    for wrong in ({"n_citations": 101}, {"nonsense": 1}, {"preset": "a"}, []):
        with error("22023"):
            configure(owner, wrong)
        with error("22023"):
            preset(owner, "a", wrong)
    with error("22023"):
        owner.execute("SELECT ml_rag.configure('default_options', '{')")
    for name in ("", "x" * 101):
        with error("22023"):
            preset(owner, name, {})
    preset(owner, "x" * 100, {})
    assert owner.execute("SELECT ml_rag.drop_preset(%s)", ("x" * 100,)).fetchone() == (True,)
    assert owner.execute("SELECT ml_rag.drop_preset('x')").fetchone() == (False,)


def test_who_may_make_presets(owner: Connection, asker: Connection) -> None:
    (role,) = asker.execute("SELECT current_user").fetchone() or ("",)
    for statement in ("SELECT ml_rag.create_preset('a', '{}')", "SELECT ml_rag.drop_preset('a')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            asker.execute(statement)
    owner.execute(sql.SQL("GRANT ml_rag_publisher TO {}").format(sql.Identifier(role)))
    try:
        preset(asker, "a", {"n_citations": 1})
        assert asker.execute("SELECT ml_rag.drop_preset('a')").fetchone() == (True,)
    finally:
        owner.execute(sql.SQL("REVOKE ml_rag_publisher FROM {}").format(sql.Identifier(role)))


@pytest.mark.usefixtures("store")
def test_explain_says_where_options_come_from(owner: Connection, asker: Connection) -> None:
    configure(owner, {"n_citations": 1, "distance_metric": "DOT", "retrieval_options": {"max_distance": 2}})
    session(asker, {"n_citations": 2})
    preset(owner, "handbook", {"retrieval_options": {"segment_overlap": 0}})
    given = {"skip_generate": True, "explain": True, "preset": "handbook"}
    options = answer(asker, "trains", given)["explain"]["options"]
    assert options["n_citations"] == {"value": 2, "from": "setting ml_rag.options"}
    assert options["distance_metric"] == {"value": "DOT", "from": "setting default_options"}
    assert options["retrieval_options"]["from"] == 'preset "handbook", setting default_options'
    assert options["skip_generate"] == {"value": True, "from": "call"}
    assert options["semantic_search"] == {"value": True, "from": "built in"}
