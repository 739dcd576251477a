"""nodes/transform: nodes that a model writes: what it is asked, what of its answers is taken, what they cost."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

from support.cluster import Connection, Database, value_of
from support.nodes import create, nodes, refresh
from support.scripted import MODEL, Script
from support.stores import create_store, error, fake_embedding, insert, search

#: brief in the catalogue
SMALLEST = "smollm2-135m-instruct"
TEXTS = {(1, 1): "Herons wait for fish.", (1, 2): "Loons call at night.", (2, 1): "Swans are heavy."}


@pytest.fixture
def store(owner: Connection, script: Script) -> Connection:
    rows = [(f"d{d}", d, n, text, fake_embedding(text)) for (d, n), text in TEXTS.items()]
    create_store(owner, "docs", rows, type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    return owner


def text_of(body: dict[str, Any]) -> str:
    """The text that a request is about."""
    found: str = body["messages"][-1]["content"].partition("Text:\n")[2].partition("\n\nWrite a JSON object")[0]
    return found


@pytest.mark.parametrize("transform", ["keyphrases", "questions", "entities"])
def test_lists_become_a_node_each(store: Connection, script: Script, transform: str) -> None:
    script.answer = lambda body: {transform: [f"first of {text_of(body)}", " ", "second", "second", f"x\0{transform}"]}
    result = create(store, transform, transform=transform, model_id=MODEL)
    assert (result["parents"], result["nodes"], result["failed"]) == (3, 9, 0)
    assert nodes(store, transform)[1, 2] == ["first of Loons call at night.", "second", f"x{transform}"]
    assert sorted(map(text_of, script.requests)) == sorted(TEXTS.values())
    assert list(script.asked) == [transform]
    assert script.requests[0]["temperature"] == 0
    assert refresh(store)["parents"] == 0
    assert len(script.requests) == 3
    hits = search(store, "first of loons", {"arms": [{"search": "keyword", "in": transform}], "return": "node"})
    assert hits[0][5] == "first of Loons call at night."


@pytest.mark.parametrize("model", [{}, {"model_id": SMALLEST}])
def test_the_smallest_models_are_refused_before_anything_is_made(
    db: Database, store: Connection, script: Script, model: dict[str, str]
) -> None:
    db.connect().execute("SELECT ml_rag.configure('generate_model_id', %s)", (SMALLEST,))
    with error("55000", f"model {SMALLEST} is too small to make nodes", f"such as {MODEL}."):
        create(store, "s", transform="summary", **model)
    assert store.execute("SELECT to_regclass('docs_s')").fetchone() == (None,)
    assert create(store, "s", transform="summary", dry_run=True, **model) == {"parents": 3, "model_calls": 3}
    assert create(store, "s", transform="sentence")["nodes"] == 3
    assert script.requests == []


def test_a_summary_of_each_document_in_one_call(store: Connection, script: Script) -> None:
    script.answer = lambda body: {"summary": f"about {text_of(body)[:6].strip()}"}
    create(store, "summaries", transform="summary", parent="document", model_id=MODEL)
    assert sorted(map(text_of, script.requests)) == [
        "Herons wait for fish.\n\nLoons call at night.",
        "Swans are heavy.",
    ]
    assert nodes(store, "summaries") == {(1, 1): ["about Herons"], (2, 1): ["about Swans"]}
    create(store, "words", transform="sentence", parent="summaries")
    assert nodes(store, "words") == {(1, 1): ["about Herons"], (2, 1): ["about Swans"]}
    # a document's node counts for all its segments
    hits = search(store, "herons", {"arms": [{"search": "keyword", "in": "words"}]})
    assert [(row[3], row[4]) for row in hits] == [(1, 1), (1, 2)]


def test_a_long_text_is_summarized_in_parts(store: Connection, script: Script) -> None:
    long = " ".join(f"word{i}" for i in range(3000))
    insert(store, "docs", [("d3", 3, 1, long, fake_embedding("word"))])
    store.execute("DELETE FROM docs WHERE document_id < 3")
    script.answer = lambda body: {"summary": f"{len(text_of(body).split())} words"}
    counted = create(store, "s", transform="summary", model_id=MODEL, dry_run=True)["model_calls"]
    assert script.requests == []
    create(store, "s", transform="summary", model_id=MODEL)
    asked = [text_of(body) for body in script.requests]
    assert len(asked) == counted == 4
    assert " ".join(" ".join(asked[:3]).split()) == long
    assert max(map(len, asked)) <= 12000
    assert nodes(store, "s") == {(3, 1): ["6 words"]}


def test_context_stands_before_the_text_that_is_embedded_and_indexed(store: Connection, script: Script) -> None:
    script.answer = {"context": "From the chapter on birds."}
    create(store, "context", transform="context", model_id=MODEL)
    assert nodes(store, "context")[1, 2] == ["From the chapter on birds.\n\nLoons call at night."]
    vector = value_of(
        store,
        "SELECT node_embedding::real[] FROM docs_context WHERE (document_id, segment_number, node_number) = (1, 2, 1)",
    )
    assert vector == pytest.approx(fake_embedding("From the chapter on birds.\n\nLoons call at night."), abs=1e-6)
    prompt = next(
        body["messages"][-1]["content"]
        for body in script.requests
        if "A part of it:\nLoons" in str(body["messages"][-1]["content"])
    )
    assert prompt.startswith("Document: d1\n\nIts text:\nHerons wait for fish.\nLoons call at night.\n")
    assert search(store, "chapter loons", {"arms": [{"search": "keyword", "in": "context"}]})[0][5] == TEXTS[1, 2]


def test_a_prompt_of_ones_own_takes_the_place_of_ours(store: Connection, script: Script) -> None:
    script.answer = {"keyphrases": ["a"]}
    create(store, "k", transform="keyphrases", model_id=MODEL, prompt="the birds")
    assert "- keyphrases (a list of texts): the birds." in script.prompt


@pytest.mark.parametrize(
    ("answered", "detail"),
    [
        ("no JSON", "It is not JSON."),
        ({"other": ["a"]}, 'Its "keyphrases" is neither a text nor a list of texts.'),
        ({"keyphrases": [1]}, 'Its "keyphrases" is neither a text nor a list of texts.'),
        ({"keyphrases": [" "]}, 'Its "keyphrases" is blank.'),
        ("[]", 'Its "keyphrases" is neither a text nor a list of texts.'),
    ],
)
def test_an_answer_that_is_nonsense_fails_its_text_alone(
    store: Connection, script: Script, answered: Any, detail: str
) -> None:
    script.answer = lambda body: answered if "Loons" in str(body) else {"keyphrases": ["fine"]}
    result = create(store, "k", transform="keyphrases", model_id=MODEL)
    assert (result["nodes"], result["failed"]) == (2, 1)
    errors = store.execute("SELECT key, sqlstate, message, detail FROM ml_rag.node_group_error").fetchall()
    assert errors == [("{1,2}", "38000", "the model's answer cannot be used", detail)]
    asked = len(script.requests)
    script.answer = {"keyphrases": ["fine"]}
    refresh(store)
    assert len(script.requests) == asked + 1
    assert nodes(store, "k")[1, 2] == ["fine"]


def test_what_every_text_would_get_ends_the_call_and_leaves_nothing_half(store: Connection, script: Script) -> None:
    with error("22023", "nonsense"):
        create(store, "k", transform="keyphrases", model_id="nonsense")
    assert store.execute("SELECT rows, pending, failed FROM ml_rag.node_group").fetchall() == [(0, 3, 0)]


def test_the_shipped_fake_model_answers_nonsense_and_nothing_breaks(store: Connection) -> None:
    # its smallest instance of the schema is an empty list, or an empty text
    result = create(store, "k", transform="keyphrases", model_id="fake-generate")
    assert (result["parents"], result["nodes"], result["failed"]) == (3, 0, 0)
    assert refresh(store)["parents"] == 0
    assert create(store, "s", transform="summary", model_id="fake-generate")["failed"] == 3
    assert store.execute("SELECT DISTINCT message, detail FROM ml_rag.node_group_error").fetchall() == [
        ("the model's answer cannot be used", 'Its "summary" is blank.')
    ]


def test_enrichment_is_merged_into_the_words_of_its_segments(store: Connection, script: Script) -> None:
    script.answer = lambda body: {"questions": ["Who fishes?" if "Herons" in text_of(body) else "Why?"]}
    create(store, "questions", transform="questions", model_id=MODEL, merge=True)
    assert [(row[3], row[4]) for row in search(store, "fishes", {"arms": [{"search": "keyword"}]})] == [(1, 1)]


def test_a_call_cancelled_while_the_model_answers_keeps_what_was_committed_and_goes_on(
    db: Database, store: Connection, script: Script
) -> None:
    other = db.connect()
    cancelled = threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if "Swans" in text_of(body) and not cancelled.is_set():
            other.execute("SELECT pg_cancel_backend(%s::integer)", (store.info.backend_pid,))
            cancelled.wait(60)  # as a slow model: only the cancel ends the call
        return {"keyphrases": [text_of(body).split()[0]]}

    script.answer = answer
    began = time.monotonic()
    try:
        with pytest.raises(psycopg.errors.QueryCanceled):
            create(store, "k", transform="keyphrases", model_id=MODEL, batch_size=1)
        assert time.monotonic() - began < 30
    finally:
        cancelled.set()
    assert store.execute("SELECT rows, pending, failed FROM ml_rag.node_group").fetchall() == [(2, 1, 0)]
    assert store.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
    asked = len(script.requests)
    assert refresh(store)["parents"] == 1
    assert len(script.requests) == asked + 1
    assert nodes(store, "k") == {(1, 1): ["Herons"], (1, 2): ["Loons"], (2, 1): ["Swans"]}


def test_context_of_a_hidden_segment_is_hidden_too(db: Database, store: Connection, script: Script) -> None:
    """A model has read the whole document, and may repeat any of it."""
    script.answer = {"context": "Beside herons that wait for fish."}
    create(store, "context", transform="context", model_id=MODEL)
    create(store, "parts", transform="sentence", parent="context")
    create(store, "sentences", transform="sentence")
    store.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (segment_number <> 1)")
    asker = db.connect("asker")
    for group, keys in (("context", []), ("parts", []), ("sentences", [(1, 2)])):
        query = f"SELECT DISTINCT document_id, segment_number FROM docs_{group}"
        assert asker.execute(query).fetchall() == keys, group
    assert search_keys(asker, "loons", "sentences") == [(1, 2)]
    for group in ("context", "parts"):
        assert search_keys(asker, "herons", group) == []
    store.execute("ALTER POLICY p ON docs USING (document_id = 1)")
    for group in ("context", "parts"):
        query = f"SELECT DISTINCT document_id, segment_number FROM docs_{group} ORDER BY 1, 2"
        assert asker.execute(query).fetchall() == [(1, 1), (1, 2)]
        assert search_keys(asker, "herons", group) == [(1, 1), (1, 2)]


def test_nodes_of_context_are_not_merged(store: Connection, script: Script) -> None:
    """The column of merged nodes is seen by all who see the segment, and a model has read others for it."""
    script.answer = {"context": "Beside herons that wait for fish."}
    create(store, "context", transform="context", model_id=MODEL)
    create(store, "parts", transform="sentence", parent="context")
    for parent in ("context", "parts"):
        with error("22023", 'option "merge"', "nodes of context"):
            create(store, "n", transform="sentence", parent=parent, merge=True)
    create(store, "sentences", transform="sentence")
    create(store, "n", transform="sentence", parent="sentences", merge=True)


def test_context_of_a_hidden_segment_is_hidden_where_documents_are_told_apart_later(
    db: Database, owner: Connection, script: Script
) -> None:
    """Before, a segment was read by itself, and whoever saw it saw its nodes."""
    script.answer = {"context": "Beside herons that wait for fish."}
    owner.execute(
        "CREATE TABLE docs (id integer PRIMARY KEY, segment text, segment_embedding vector(16));"
        "COMMENT ON COLUMN docs.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed';"
        "INSERT INTO docs VALUES (1, 'Herons wait for fish.'), (2, 'Loons call at night.');"
        "GRANT SELECT ON docs TO ml_rag_user"
    )
    create(owner, "context", transform="context", model_id=MODEL)
    create(owner, "parts", transform="sentence", parent="context")
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON docs USING (id <> 1)")
    asker = db.connect("asker")
    for group in ("context", "parts"):
        assert asker.execute(f"SELECT DISTINCT id FROM docs_{group}").fetchall() == [(2,)]
    owner.execute("ALTER TABLE docs ADD document_id integer DEFAULT 1")
    refresh(owner)
    for group in ("context", "parts"):
        assert len(owner.execute(f"SELECT DISTINCT id FROM docs_{group} WHERE members <> '{{}}'").fetchall()) == 2
        assert asker.execute(f"SELECT DISTINCT id FROM docs_{group}").fetchall() == []


def search_keys(connection: Connection, query: str, group: str) -> list[tuple[int, int]]:
    try:
        rows = search(connection, query, {"arms": [{"search": "keyword", "in": group}]})
    except psycopg.errors.NoDataFound:
        return []
    return sorted((row[3], row[4]) for row in rows)
