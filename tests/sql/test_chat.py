"""chat/tables, chat/chat, chat/forget: conversations whose turns are kept."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Cluster, Connection, Database, value_of
from support.processes import Background
from support.programs import dump, restore
from support.scripted import MODEL, Script
from support.stores import answer, create_store, error, fake_embedding

TEXTS = {"heron.pdf": "the heron stands in the reeds", "tern.pdf": "the tern dives for fish", "loon.pdf": "a loon"}


@pytest.fixture
def script(db: Database, script: Script) -> Script:
    script.answer = "It stands in the reeds."
    owner = db.connect()
    owner.execute("SELECT ml_rag.configure('generate_model_id', %s)", (MODEL,))
    create_store(
        owner,
        "docs",
        [(name, i, 1, text, fake_embedding(text)) for i, (name, text) in enumerate(TEXTS.items())],
        "vector(16)",
    )
    return script


def chat(connection: Connection, query: str | None, **options: Any) -> Any:
    return value_of(connection, "SELECT ml_rag_chat(%s, %s)", (query, json.dumps(options)))


def turns(connection: Connection, conversation_id: str) -> list[Any]:
    return connection.execute(
        "SELECT turn, query, text FROM ml_rag.message WHERE conversation_id = %s ORDER BY turn", (conversation_id,)
    ).fetchall()


def counts(connection: Connection) -> Any:
    return connection.execute(
        "SELECT (SELECT count(*) FROM ml_rag.conversation), (SELECT count(*) FROM ml_rag.message)"
    ).fetchone()


def forget(connection: Connection, conversation_id: str) -> Any:
    (forgotten,) = connection.execute("SELECT ml_rag.forget_conversation(%s)", (conversation_id,)).fetchone() or (None,)
    return forgotten


def test_a_first_turn_is_an_answer_that_is_kept(script: Script, asker: Connection) -> None:
    found = chat(asker, "where is the heron?", n_citations=1)
    plain = answer(asker, "where is the heron?", {"n_citations": 1, "query_options": {}})
    assert {name: found[name] for name in plain} == plain
    assert set(found) - set(plain) == {"conversation_id", "message_id", "question"}
    assert found["question"] == "where is the heron?"
    row = asker.execute(
        "SELECT conversation_id::text, message_id::text, turn, query, question, text, citations, options"
        " FROM ml_rag.message"
    ).fetchone()
    assert row is not None
    assert list(row) == [
        found["conversation_id"],
        found["message_id"],
        1,
        "where is the heron?",
        "where is the heron?",
        "It stands in the reeds.",
        found["citations"],
        {"n_citations": 1},
    ]


def test_earlier_turns_are_searched_with_and_stand_in_the_prompt(script: Script, asker: Connection) -> None:
    first = chat(asker, "where is the heron?")
    script.answer = "It dives."
    second = chat(asker, "and the tern?", conversation_id=first["conversation_id"])
    assert second["conversation_id"] == first["conversation_id"]
    assert second["message_id"] != first["message_id"]
    assert second["retrieval_info"]["query"] == {
        "question": "and the tern?",
        "history": "where is the heron?\nIt stands in the reeds.\nand the tern?",
    }
    said = "<conversation>\nuser: where is the heron?\nassistant: It stands in the reeds.\n</conversation>"
    assert said in script.prompt
    assert script.prompt.index("</document>") < script.prompt.index(said) < script.prompt.index("and the tern?")
    assert turns(asker, first["conversation_id"]) == [
        (1, "where is the heron?", "It stands in the reeds."),
        (2, "and the tern?", "It dives."),
    ]


def test_a_model_alone_sees_the_conversation_too(script: Script, asker: Connection) -> None:
    first = chat(asker, "where is the heron?", n_citations=0)
    found = chat(asker, "why?", n_citations=0, conversation_id=first["conversation_id"], return_prompt=True)
    assert "user: where is the heron?" in script.prompt
    assert found["prompt"] == script.requests[-1]["messages"]
    assert found["question"] == "why?"


def test_a_single_answer_has_its_prompt_too(script: Script, asker: Connection) -> None:
    asked = {"n_citations": 0, "return_prompt": True}
    assert answer(asker, "where is the heron?", asked)["prompt"] == script.requests[-1]["messages"]
    assert "prompt" not in answer(asker, "where is the heron?", {"n_citations": 0})
    assert "prompt" not in answer(asker, "where is the heron?", {"n_citations": 0, "return_prompt": False})
    assert "prompt" not in answer(asker, "where is the heron?", {**asked, "skip_generate": True})


def test_history_tokens_bound_what_the_answer_sees(script: Script, asker: Connection) -> None:
    first = chat(asker, "where is the heron?")
    chat(asker, "why?", conversation_id=first["conversation_id"], query_options={"history_tokens": 0})
    assert "heron?" not in script.prompt


def test_a_rewritten_question_stands_alone(script: Script, asker: Connection) -> None:
    first = chat(asker, "where is the heron?")
    script.answer = lambda body: {"question": "what does the tern do?"} if "response_format" in body else "It dives."
    found = chat(asker, "and the tern?", conversation_id=first["conversation_id"], query_options={"model_id": MODEL})
    assert found["question"] == "what does the tern do?"
    assert "what does the tern do?" in script.prompt
    assert "<conversation>" not in script.prompt
    kept = asker.execute("SELECT query, question FROM ml_rag.message WHERE turn = 2").fetchone()
    assert kept == ("and the tern?", "what does the tern do?")


BEFORE = "The search before had these conditions: "


def choosing(body: dict[str, Any]) -> Any:
    """A model that chooses conditions as it is told: what the question says, and what the search before had."""
    prompt = body["messages"][-1]["content"]
    if "response_format" not in body:
        return "Here they are."
    question = next(line for line in prompt.splitlines() if line.startswith("Question: "))
    chosen = [{"key": "n", "operator": "lt", "value": 3}] if "below three" in question else []
    if "above zero" in question:
        chosen += [{"key": "n", "operator": "gt", "value": 0}]
    if BEFORE in prompt and "something else" not in question:
        before = json.loads(prompt.split(BEFORE)[1].split(". filters has them")[0])
        for condition in before.get("and", [before]):
            ((key, test),) = condition.items()
            ((operator, value),) = test.items()
            chosen += [{"key": key, "operator": operator, "value": value}]
    return {"filters": chosen}


def test_conditions_that_the_model_chose_hold_in_the_turn_after(script: Script, asker: Connection) -> None:
    script.answer = choosing
    query = {"filters": ["n"], "model_id": MODEL, "rewrite": False}
    first = chat(asker, "those below three", query_options=query)
    id_ = first["conversation_id"]
    assert first["retrieval_info"]["query"]["filters"] == {"n": {"lt": 3}}
    second = chat(asker, "only above zero", conversation_id=id_, query_options=query)
    both = {"and": [{"n": {"gt": 0}}, {"n": {"lt": 3}}]}
    assert second["retrieval_info"]["query"]["filters"] == both
    third = chat(asker, "and then?", conversation_id=id_, query_options=query)
    assert third["retrieval_info"]["query"]["filters"] == both
    # asked again, it is the turn before that counts
    again = chat(asker, "and then?", conversation_id=id_, query_options=query, re_run=True)
    assert again["retrieval_info"]["query"]["filters"] == both
    # what is given stays the caller's, and what is about something else begins anew
    fourth = chat(asker, "something else", conversation_id=id_, query_options=query, filters={"n": 1})
    assert "filters" not in fourth["retrieval_info"]["query"]
    chat(asker, "more", conversation_id=id_, query_options=query)
    assert BEFORE not in script.requests[-2]["messages"][-1]["content"]
    # another conversation knows nothing of it
    chat(asker, "only above zero", query_options=query)
    assert BEFORE not in script.requests[-2]["messages"][-1]["content"]
    kept = asker.execute(
        "SELECT turn, filters FROM ml_rag.message WHERE conversation_id = %s ORDER BY turn", (id_,)
    ).fetchall()
    assert kept == [(1, {"n": {"lt": 3}}), (2, both), (3, both), (4, None), (5, None)]


def test_conditions_of_a_turn_before_are_not_asked_for_by_themselves(script: Script, asker: Connection) -> None:
    script.answer = choosing
    first = chat(asker, "below three", query_options={"filters": ["n"], "model_id": MODEL, "rewrite": False})
    second = chat(asker, "and then?", conversation_id=first["conversation_id"])
    assert "query" not in second["retrieval_info"] or "filters" not in second["retrieval_info"]["query"]
    with error("22023"):
        chat(asker, "x", query_options={"filters_before": {"n": 1}})


def test_re_run_replaces_the_last_turn(script: Script, asker: Connection) -> None:
    first = chat(asker, "where is the heron?")
    same = {"conversation_id": first["conversation_id"]}
    second = chat(asker, "and the tern?", **same)
    script.answer = "Under water."
    third = chat(asker, "and the loon?", re_run=True, **same)
    assert third["message_id"] != second["message_id"]
    assert "tern?" not in script.prompt
    assert turns(asker, first["conversation_id"])[1:] == [(2, "and the loon?", "Under water.")]
    script.answer = "In the lake."
    chat(asker, None, re_run=True, n_citations=1, **same)
    assert turns(asker, first["conversation_id"])[1:] == [(2, "and the loon?", "In the lake.")]


def test_what_was_not_answered_is_no_history(script: Script, asker: Connection) -> None:
    first = chat(asker, "where is the heron?", skip_generate=True)
    assert "text" not in first
    assert turns(asker, first["conversation_id"]) == [(1, "where is the heron?", None)]
    second = chat(asker, "why?", conversation_id=first["conversation_id"])
    assert second["retrieval_info"]["query"] == {"question": "why?"}


def test_an_abstention_is_a_turn(script: Script, asker: Connection) -> None:
    before = len(script.requests)
    found = chat(asker, "xyzzy", retrieval_options={"max_distance": 0}, return_prompt=True)
    assert found["citations"] == []
    assert "prompt" not in found
    assert len(script.requests) == before
    assert turns(asker, found["conversation_id"]) == [(1, "xyzzy", found["text"])]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conversation_id": "nonsense"}, "a uuid"),
        ({"conversation_id": 7}, "a text"),
        ({"re_run": True}, "conversation_id"),
        ({"re_run": "yes"}, "true or false"),
        ({"n_citation": 1}, "n_citations"),
        ({"conversation": "3f2504e0-4f89-41d3-9a0c-0305e82c3301"}, 'Did you mean "conversation_id"?'),
        ({"rerun": True}, 'Did you mean "re_run"?'),
        ({"vector_stores": ["x"]}, 'Did you mean "vector_store"?'),
        ({"query_options": {"history": []}}, "turns of the conversation"),
        ({"conversation_id": "3f2504e0-4f89-41d3-9a0c-0305e82c3301"}, "conversation does not exist"),
        ([1], "a JSON object"),
    ],
    ids=str,
)
def test_bad_options(script: Script, asker: Connection, options: Any, words: str) -> None:
    with error("22023", words):
        asker.execute("SELECT ml_rag_chat('q', %s)", (json.dumps(options),))
    assert counts(asker) == (0, 0)
    assert not script.requests


def test_a_query_must_be_there(script: Script, asker: Connection) -> None:
    for query in (None, "", " "):
        with error("22023", "the question is empty"):
            chat(asker, query)
    (empty,) = (
        asker.execute("INSERT INTO ml_rag.conversation DEFAULT VALUES RETURNING conversation_id::text").fetchone() or ()
    )
    with error("22023", "no turn to replace"):
        chat(asker, None, conversation_id=empty, re_run=True)


def test_a_read_only_transaction(script: Script, asker: Connection) -> None:
    asker.execute("SET default_transaction_read_only = on")
    with error("25006", "conversation"):
        chat(asker, "where is the heron?")
    assert not script.requests


# -- roles -------------------------------------------------------------------------------------------------------------


def test_roles_do_not_see_each_others_conversations(
    script: Script, owner: Connection, asker: Connection, tenant: Connection
) -> None:
    mine = chat(asker, "where is the heron?")
    theirs = chat(tenant, "where is the tern?")
    for connection, found, other in ((asker, mine, theirs), (tenant, theirs, mine)):
        assert counts(connection) == (1, 1)
        assert turns(connection, other["conversation_id"]) == []
        for options in ({}, {"re_run": True}):
            with error("22023", "conversation does not exist"):
                chat(connection, "why?", conversation_id=other["conversation_id"], **options)
        assert forget(connection, other["conversation_id"]) is False
        assert forget(connection, found["conversation_id"]) is True
        assert turns(connection, found["conversation_id"]) == []
    # the superuser sees them in the tables only
    mine = chat(asker, "where is the heron?")
    assert len(turns(owner, mine["conversation_id"])) == 1
    with error("22023", "conversation does not exist"):
        chat(owner, "why?", conversation_id=mine["conversation_id"])


def test_nobody_writes_into_others_conversations(script: Script, asker: Connection, tenant: Connection) -> None:
    mine = chat(asker, "where is the heron?")
    columns = "(message_id, conversation_id, role, turn, query, question, citations, options)"
    values = "(gen_random_uuid(), %s, {}, 2, 'q', 'q', '[]', '{{}}')"
    for name in ("current_user", f"'{role_of(asker)}'"):
        with error("42501", ours=False):
            statement = f"INSERT INTO ml_rag.message {columns} VALUES {values.format(name)}"
            tenant.execute(statement.encode(), (mine["conversation_id"],))
    with error("42501", ours=False):
        tenant.execute("INSERT INTO ml_rag.conversation (role) VALUES (%s)", (role_of(asker),))
    # that there is one of that id is not to be found out either
    tenant.execute("INSERT INTO ml_rag.conversation (conversation_id) VALUES (%s)", (mine["conversation_id"],))
    chat(tenant, "where is the tern?", conversation_id=mine["conversation_id"])
    assert len(turns(asker, mine["conversation_id"])) == 1
    assert forget(tenant, mine["conversation_id"]) is True
    assert counts(tenant) == (0, 0)
    assert counts(asker) == (1, 1)


def test_deleting_a_conversation_deletes_its_turns(script: Script, asker: Connection, stranger: Connection) -> None:
    first = chat(asker, "where is the heron?")
    chat(asker, "why?", conversation_id=first["conversation_id"])
    other = chat(asker, "where is the tern?")
    assert forget(asker, first["conversation_id"]) is True
    assert forget(asker, first["conversation_id"]) is False
    assert asker.execute("SELECT ml_rag.forget_conversation(NULL)").fetchone() == (False,)
    assert counts(asker) == (1, 1)
    assert turns(asker, other["conversation_id"])
    for table in ("conversation", "message"):
        with error("42501", ours=False):
            stranger.execute(f"SELECT FROM ml_rag.{table}".encode())


def test_conversations_are_in_a_dump(owner: Connection) -> None:
    rows = owner.execute(
        "SELECT unnest(extconfig)::regclass::text FROM pg_extension WHERE extname = 'ml_rag'"
    ).fetchall()
    assert {("ml_rag.conversation",), ("ml_rag.message",)} <= set(rows)


# -- two at once -------------------------------------------------------------------------------------------------------


def test_two_sessions_in_one_conversation(script: Script, db: Database, asker: Connection) -> None:
    """Neither waits for the other's model; turns stand in the order in which they were written."""
    first = chat(asker, "where is the heron?")
    other = db.connect("asker")
    reached, go_on = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> str:
        reached.set()
        assert go_on.wait(60)
        return "slow"

    script.answer = slow
    running = Background(lambda: chat(other, "slow?", conversation_id=first["conversation_id"]))
    assert reached.wait(60)
    model = {"model_id": "fake-generate"}  # another one: a model answers one question at a time
    chat(asker, "quick?", conversation_id=first["conversation_id"], model_options=model)
    go_on.set()
    found = running.result(60)
    assert [row[1] for row in turns(asker, first["conversation_id"])[1:]] == ["quick?", "slow?"]
    # each sees the turns that were there when it began
    assert found["retrieval_info"]["query"]["history"].count("?") == 2


def test_writers_of_turns_wait_for_each_other(script: Script, db: Database, asker: Connection) -> None:
    first = chat(asker, "where is the heron?")
    others = [db.connect("asker") for _ in range(6)]
    conversation = first["conversation_id"]
    running = [
        Background(lambda c=c, i=i: chat(c, f"why {i}?", conversation_id=conversation)) for i, c in enumerate(others)
    ]
    for one in running:
        one.result(60)
    kept = turns(asker, first["conversation_id"])
    assert [row[0] for row in kept] == list(range(1, 8))
    assert {row[1] for row in kept[1:]} == {f"why {i}?" for i in range(6)}


def test_a_conversation_that_is_deleted_meanwhile(script: Script, db: Database, asker: Connection) -> None:
    first = chat(asker, "where is the heron?")
    other = db.connect("asker")

    def delete(body: dict[str, Any]) -> str:
        assert forget(other, first["conversation_id"]) is True
        return "late"

    script.answer = delete
    with error("55000", "deleted during the call"):
        chat(asker, "why?", conversation_id=first["conversation_id"])
    assert counts(asker) == (0, 0)


@pytest.mark.parametrize("re_run", [False, True])
def test_a_conversation_that_is_begun_anew_meanwhile_gets_no_turn_of_the_former(
    script: Script, db: Database, asker: Connection, re_run: bool
) -> None:
    first = chat(asker, "where is the heron?")
    other = db.connect("asker")

    def begin_anew(body: dict[str, Any]) -> str:
        assert forget(other, first["conversation_id"]) is True
        other.execute("INSERT INTO ml_rag.conversation (conversation_id) VALUES (%s)", (first["conversation_id"],))
        return "late"

    script.answer = begin_anew
    with error("55000", "deleted during the call"):
        chat(asker, "why?", conversation_id=first["conversation_id"], re_run=re_run)
    assert counts(asker) == (1, 0)


def test_a_cancelled_call_keeps_nothing(script: Script, owner: Connection, asker: Connection) -> None:
    first = chat(asker, "where is the heron?")
    pid = asker.info.backend_pid

    def cancel(body: dict[str, Any]) -> str:
        owner.execute("SELECT pg_cancel_backend(%s::integer)", (pid,))
        time.sleep(1)
        return "late"

    script.answer = cancel
    for options in ({}, {"conversation_id": first["conversation_id"]}, {**first_of(first), "re_run": True}):
        with error("57014", ours=False):
            chat(asker, "why?", **options)
        assert turns(asker, first["conversation_id"]) == [(1, "where is the heron?", "It stands in the reeds.")]
        assert counts(asker) == (1, 1)


def first_of(found: Any) -> dict[str, Any]:
    return {"conversation_id": found["conversation_id"]}


def test_an_error_keeps_nothing(script: Script, asker: Connection) -> None:
    with error("22023"):
        chat(asker, "where is the heron?", model_options={"model_id": "no-such-model"})
    with error("P0002"):
        chat(asker, "where is the heron?", vector_store=["public.nothing"])
    assert counts(asker) == (0, 0)


def test_forget_deletes_the_callers_old_conversations(
    script: Script, owner: Connection, asker: Connection, tenant: Connection
) -> None:
    chat(tenant, "where is the tern?", skip_generate=True)
    chat(owner, "where is the tern?", skip_generate=True)
    old, new = (chat(asker, "where is the heron?", skip_generate=True) for _ in range(2))
    owner.execute(
        "UPDATE ml_rag.conversation SET changed_at = '2020-01-01' WHERE conversation_id = %s OR role <> %s",
        (old["conversation_id"], role_of(asker)),
    )
    assert asker.execute("SELECT ml_rag.forget('2020-01-01')").fetchone() == (0,)
    assert asker.execute("SELECT ml_rag.forget('2020-01-01 00:00:01')").fetchone() == (1,)
    assert turns(asker, old["conversation_id"]) == []
    assert len(turns(asker, new["conversation_id"])) == 1
    assert counts(tenant) == (1, 1)
    # of the superuser its own
    assert owner.execute("SELECT ml_rag.forget('infinity')").fetchone() == (1,)
    assert counts(owner) == (2, 2)
    with error("22023", "forget"):
        asker.execute("SELECT ml_rag.forget(NULL)")


def test_a_new_turn_makes_a_conversation_young(script: Script, owner: Connection, asker: Connection) -> None:
    found = chat(asker, "where is the heron?", skip_generate=True)
    owner.execute("UPDATE ml_rag.conversation SET changed_at = '2020-01-01'")
    chat(asker, "why?", skip_generate=True, **first_of(found))
    assert asker.execute("SELECT ml_rag.forget(now() - interval '1 hour')").fetchone() == (0,)


def role_of(connection: Connection) -> str:
    return str(value_of(connection, "SELECT current_user::text"))


@pytest.mark.parametrize("form", ["plain", "directory"])
def test_conversations_go_on_where_a_dump_was_restored(
    script: Script, asker: Connection, cluster: Cluster, db: Database, tmp_path: Path, form: str
) -> None:
    """Into another database they go on where they were; a parallel restore takes the tables in any order."""
    first = chat(asker, "where is the heron?", n_citations=1)
    conversation = first["conversation_id"]
    chat(asker, "and the tern?", conversation_id=conversation)
    other = chat(db.connect("tenant"), "a secret?")["conversation_id"]
    every = "SELECT m::text FROM ml_rag.message AS m ORDER BY turn"
    everything = [asker.execute(statement).fetchall() for statement in (every, "TABLE ml_rag.conversation")]
    dump(db, form, tmp_path / "dump")
    with cluster.database(template="template0") as copy:
        restore(copy, form, tmp_path / "dump")
        restored = copy.connect("asker")
        assert [restored.execute(s).fetchall() for s in (every, "TABLE ml_rag.conversation")] == everything
        assert turns(restored, other) == []
        (third,) = restored.execute(
            "SELECT ml_rag_chat('and who is that?', %s)", (json.dumps({"conversation_id": conversation}),)
        ).fetchone() or (None,)
        assert third["conversation_id"] == conversation
        assert [turn[0] for turn in turns(restored, conversation)] == [1, 2, 3]
        assert "where is the heron?" in script.prompt or "where is the heron?" in json.dumps(script.requests[-1])
        # deleting still takes the turns along
        restored.execute("SELECT ml_rag.forget_conversation(conversation_id) FROM ml_rag.conversation")
        assert counts(restored) == (0, 0)
        assert counts(copy.connect("tenant")) == (1, 1)
