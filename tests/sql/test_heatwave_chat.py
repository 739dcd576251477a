"""chat/heatwave: HeatWave's HEATWAVE_CHAT, whose state is a setting of the session."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from support.cluster import Connection, Database, noticed, value_of
from support.scripted import MODEL, Script
from support.stores import Row, create_store, error, fake_embedding


@pytest.fixture
def script(db: Database, script: Script) -> Script:
    script.answer = "It stands in the reeds."
    db.connect().execute("SELECT ml_rag.configure('generate_model_id', %s)", (MODEL,))
    return script


@pytest.fixture
def stores(script: Script, owner: Connection) -> Connection:
    owner.execute("CREATE SCHEMA shop; GRANT USAGE ON SCHEMA shop TO ml_rag_user; CREATE SCHEMA nothing")
    for store, names in {"docs": ["/srv/heron.pdf", "tern.pdf"], "shop.Birds": ["loon.pdf"]}.items():
        rows: list[Row] = [(n, i, 1, f"about {n}", fake_embedding(f"about {n}")) for i, n in enumerate(names)]
        create_store(owner, store, rows, "vector(16)")
    return owner


def say(connection: Connection, query: str | None) -> Any:
    return value_of(connection, "CALL heatwave_chat(%s)", (query,))


def configure(connection: Connection, options: Any) -> None:
    text = options if isinstance(options, str) else json.dumps(options)
    connection.execute("SELECT set_config('ml_rag.chat_options', %s, false)", (text,))


def state(connection: Connection) -> Any:
    found = value_of(connection, "SELECT current_setting('ml_rag.chat_options', true)")
    return None if found is None else json.loads(found)


def test_a_first_turn(stores: Connection, asker: Connection, script: Script) -> None:
    assert state(asker) is None
    found = say(asker, "where is the heron.pdf?")
    (turn,) = found["chat_history"]
    assert UUID(turn["chat_query_id"])
    assert turn["user_message"] == "where is the heron.pdf?"
    assert turn["chat_bot_message"] == found["response"] == "It stands in the reeds."
    assert found["request_completed"] is True
    assert found["error"] is None
    assert found["tables"] == [
        {"schema_name": "public", "table_name": "docs"},
        {"schema_name": "shop", "table_name": "Birds"},
    ]
    assert {"id": "/srv/heron.pdf", "title": "heron.pdf", "segment": "about /srv/heron.pdf"} in found["documents"]
    assert len(found["documents"]) == 3
    assert "prompt" not in found
    # what was found is not named from now on
    assert state(asker) == {name: value for name, value in found.items() if name != "tables"}


def test_no_tables_are_no_stores(stores: Connection, asker: Connection) -> None:
    """An application that has found none for a user must not have all of them searched."""
    configure(asker, {"tables": []})
    with error("P0002", "no vector store found"):
        say(asker, "where is the heron?")
    configure(asker, {"tables": None})
    assert len(say(asker, "where is the heron?")["tables"]) == 2


def test_turns_go_on(stores: Connection, asker: Connection, script: Script) -> None:
    say(asker, "where is the heron?")
    script.answer = "It dives."
    found = say(asker, "and the tern?")
    assert [turn["user_message"] for turn in found["chat_history"]] == ["where is the heron?", "and the tern?"]
    assert "user: where is the heron?\nassistant: It stands in the reeds." in script.prompt
    configure(asker, state(asker) | {"re_run": True})
    script.answer = "It swims."
    found = say(asker, "and the loon?")
    assert "tern?" not in script.prompt
    assert [turn["chat_bot_message"] for turn in found["chat_history"]] == ["It stands in the reeds.", "It swims."]
    assert "re_run" not in state(asker)
    assert asker.execute("SELECT count(*) FROM ml_rag.conversation").fetchone() == (0,)


def test_the_newest_100_turns_are_kept(stores: Connection, asker: Connection) -> None:
    turn = {"chat_bot_message": "a"}
    configure(asker, {"chat_history": [{**turn, "user_message": f"q{i}"} for i in range(100)]})
    kept = [turn["user_message"] for turn in say(asker, "q100")["chat_history"]]
    assert kept == [f"q{i}" for i in range(1, 101)]


def test_keys_narrow_the_search(stores: Connection, asker: Connection, script: Script) -> None:
    def documents(**options: Any) -> list[str]:
        configure(asker, options)
        return sorted(document["title"] for document in say(asker, "about?")["documents"])

    birds = [{"schema_name": "shop", "table_name": "Birds"}]
    assert documents(tables=birds) == ["loon.pdf"]
    assert state(asker)["tables"] == birds
    assert documents(tables=[{"table_name": "docs"}]) == ["heron.pdf", "tern.pdf"]
    assert documents(schema_name="shop") == ["loon.pdf"]
    assert documents(include_document_uris=["tern.pdf"]) == ["tern.pdf"]
    assert len(documents(retrieve_top_k=1)) == 1
    assert documents(retrieve_top_k=0) == []
    stores.execute("ALTER TABLE docs RENAME segment TO body")
    assert documents(table_metadata={"segment": "body"}) == ["heron.pdf", "tern.pdf"]


def test_skip_generate_return_prompt_and_progress(stores: Connection, asker: Connection, script: Script) -> None:
    notices = noticed(asker)
    configure(asker, {"skip_generate": True})
    found = say(asker, "about?")
    assert (found["response"], found["chat_history"], len(found["documents"])) == (None, [], 3)
    assert not script.requests
    assert not notices
    configure(asker, {"return_prompt": True, "report_progress": True, "model_options": {"max_tokens": 7}})
    assert say(asker, "about?")["prompt"] == script.requests[-1]["messages"]
    assert script.requests[-1]["max_tokens"] == 7
    assert [notice.split(":")[0] for notice in notices] == ["heatwave_chat"] * 2
    configure(asker, {"task": "summarization", "retrieve_top_k": 1, "include_document_uris": ["tern.pdf"]})
    say(asker, "what does it cost?")
    assert "Summarize" in script.prompt


def test_without_a_store_the_model_answers_alone(asker: Connection, script: Script) -> None:
    found = say(asker, "what is SQL?")
    assert (found["response"], found["documents"], found["tables"]) == ("It stands in the reeds.", [], [])
    assert "<document" not in script.prompt
    for asked in ({"tables": [{"table_name": "docs"}]}, {"schema_name": "nothing"}):
        configure(asker, asked)
        with error("P0002"):
            say(asker, "what is SQL?")
        assert state(asker) == asked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "a JSON object"),
        ({"table": []}, '"tables"'),
        ({"retrieve_top_k": 101}, "from 0 to 100"),
        ({"tables": [{"schema_name": "a"}]}, "table_name"),
        ({"tables": [{"table_name": "a", "x": 1}]}, '"x"'),
        ({"tables": ["docs"]}, "table_name"),
        ({"tables": [{"table_name": "docs"}], "schema_name": "public"}, "together"),
        ({"chat_history": [{"user_message": "a"}]}, "chat_bot_message"),
        ({"model_options": {"maximum": 1}}, "maximum"),
        ({"model_options": {"task": "generation"}}, "beside"),
        ({"table_metadata": {"text": "a"}}, "text"),
    ],
    ids=str,
)
def test_bad_keys(stores: Connection, asker: Connection, script: Script, options: Any, words: str) -> None:
    configure(asker, options)
    with error("22023", words):
        say(asker, "about?")
    assert not script.requests


def test_the_setting_does_not_go_into_errors(asker: Connection, script: Script) -> None:
    configure(asker, '{"chat_history": [{"user_message": "secret"')
    with error("22023") as caught:
        say(asker, "about?")
    assert "secret" not in caught.message + caught.detail + caught.hint
    for turn in ({"user_message": "secret"}, "secret", {"user_message": ["secret"], "chat_bot_message": "a"}):
        configure(asker, {"chat_history": [turn]})
        with error("22023") as caught:
            say(asker, "about?")
        assert "secret" not in caught.message + caught.detail + caught.hint


def test_a_rollback_takes_the_turn_back(stores: Connection, asker: Connection) -> None:
    say(asker, "first?")
    with asker.transaction(force_rollback=True):
        assert len(say(asker, "second?")["chat_history"]) == 2
    assert [turn["user_message"] for turn in state(asker)["chat_history"]] == ["first?"]
    with error("22023", "the question is empty"):
        say(asker, None)


def test_a_stranger_cannot_call_it(stranger: Connection) -> None:
    with error("42501", ours=False):
        say(stranger, "about?")


@pytest.mark.parametrize(
    ("name", "schema", "table"),
    [
        ("a.b", "a", "b"),
        ("a.b.c", "a", "b.c"),
        ('"a.b".c', "a.b", "c"),
        ('"a.b"."C d"', "a.b", "C d"),
        ('"a"".b".c', 'a".b', "c"),
    ],
)
def test_names_of_tables(owner: Connection, name: str, schema: str, table: str) -> None:
    answer = json.dumps({"citations": [], "vector_store": [name]})
    found = owner.execute("SELECT ml_rag._heatwave_output('', '{}', %s) -> 'tables'", (answer,)).fetchone()
    assert found == ([{"schema_name": schema, "table_name": table}],)
