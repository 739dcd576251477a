"""pipeline/summarize: whole documents, each segment read once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import interrupts
from support.cluster import Connection, Database
from support.scripted import MODEL, Script, scripted_model
from support.stores import Row, answer, create_store, error, search, warnings_of

PLAN, MEMO = "/srv/docs/plan.pdf", "/srv/docs/memo.pdf"
SEGMENT = re.compile(r"segment (\d+) of (\w+)")


@pytest.fixture(scope="module")
def script(module_db: Database, reachable_dir: Path) -> Iterator[Script]:
    with scripted_model(module_db, reachable_dir, context_tokens=700) as made:
        made.answer = reading
        yield made


@pytest.fixture(scope="module")
def files(module_db: Database, script: Script) -> Connection:
    """A plan of 40 segments and a memo of 2; nothing is near to any question."""
    owner = module_db.connect()
    rows: list[Row] = [(PLAN, 1, n, f"segment {n} of plan " + "word " * 20, [1, 0, 0]) for n in range(40, 0, -1)]
    rows += [(MEMO, 2, n, f"segment {n} of memo", [1, 0, 0]) for n in (2, 1)]
    rows += [("/srv/docs/other.pdf", 3, 1, "something else", [1, 0, 0])]
    create_store(owner, "docs", rows)
    return module_db.connect("asker")


def reading(body: dict[str, Any]) -> str:
    """A summary that says which segments, or summaries of which, it was made of."""
    prompt = body["messages"][-1]["content"]
    return " ".join(f"segment {n} of {name}" for n, name in SEGMENT.findall(prompt)) or "nothing"


def documents_of(request: dict[str, Any]) -> list[str]:
    return re.findall(r"<document number=.*?>\n(.*?)\n</document>", request["messages"][-1]["content"], re.DOTALL)


def summarize(connection: Connection, question: str = "Summarize it", **options: Any) -> Any:
    options = {"document_name": [PLAN], "model_options": {"model_id": MODEL, "max_tokens": 20}, **options}
    return answer(connection, question, options)


def test_every_segment_is_read_exactly_once_and_in_order(files: Connection, script: Script) -> None:
    before = len(script.requests)
    found = summarize(files)
    asked = script.requests[before:]
    first_level = [text for request in asked for text in documents_of(request) if "word" in text]
    assert [SEGMENT.match(text).group(1) for text in first_level] == [str(n) for n in range(1, 41)]  # type: ignore[union-attr]
    # in parts that fit, whose summaries are summarized
    assert sum("word" in request["messages"][-1]["content"] for request in asked) > 1
    assert [text for text in documents_of(asked[-1]) if "word" in text] == []
    assert SEGMENT.findall(found["text"]) == [(str(n), "plan") for n in range(1, 41)]
    assert [c["segment"].split()[1] for c in found["citations"]] == [str(n) for n in range(1, 41)]
    assert found["retrieval_info"]["method"] == "document_order"


def test_what_fits_is_one_request(files: Connection, script: Script) -> None:
    before = len(script.requests)
    found = summarize(files, document_name=[MEMO])
    assert len(script.requests) == before + 1
    assert found["text"] == "segment 1 of memo segment 2 of memo"
    assert script.requests[-1]["messages"][-1]["content"].endswith("Summarize the text above.")


@pytest.mark.parametrize(
    ("question", "options", "is_summary"),
    [
        ("Summarize plan.pdf", {}, True),
        ("tl;dr", {}, True),
        ("what does it cost?", {}, False),
        ("summarize the costs", {}, False),
        ("what does it cost?", {"model_options": {"task": "summarization"}}, True),
        ("Summarize plan.pdf", {"document_name": None, "query_options": {"document_names": True}}, True),
        ("plan.pdf: what does it cost?", {"document_name": None, "query_options": {"document_names": True}}, False),
        ("Summarize plan.pdf", {"document_name": None}, False),
        ("Summarize it", {"document_name": None, "query_options": {"document_names": True}}, False),
        ("Summarize it", {"document_name": None, "model_options": {"task": "summarization"}}, False),
    ],
)
def test_when_documents_are_read_as_a_whole(
    files: Connection, question: str, options: dict[str, Any], is_summary: bool
) -> None:
    options = {"query_embedding": [1, 0, 0], "document_name": [PLAN], **options}
    rows = search(files, question, options)
    assert len(rows) == (40 if is_summary else 3)
    if is_summary:
        assert [row[4] for row in rows] == list(range(1, 41))


def test_a_question_besides_is_what_the_summary_is_about(files: Connection, script: Script) -> None:
    options = {"model_id": MODEL, "max_tokens": 20, "task": "summarization"}
    summarize(files, "what does it cost?", document_name=[MEMO], model_options=options)
    assert "say about this: what does it cost?" in script.requests[-1]["messages"][-1]["content"]


def test_several_documents_one_after_the_other(files: Connection, script: Script) -> None:
    found = summarize(files, document_name=[MEMO, PLAN])
    assert [c["document_name"] for c in found["citations"]] == [MEMO] * 2 + [PLAN] * 40
    assert len(SEGMENT.findall(found["text"])) == 42


def test_filters_and_thresholds(files: Connection) -> None:
    rows = search(files, "Summarize it", {"document_name": [PLAN], "filters": {"segment_number": {"lte": 5}}})
    assert [row[4] for row in rows] == [1, 2, 3, 4, 5]
    with warnings_of(files) as told, error("P0002"):
        search(files, "Summarize it", {"document_name": ["plan"]})
    assert [message for *_, message in told] == ['no document is named "plan"']


def test_explain_and_tokens(files: Connection) -> None:
    explained = summarize(files, explain=True)["explain"]
    assert explained["tokens"]["prompt"] > 1000
    assert {"read", "generate"} <= set(explained["milliseconds"])
    assert explained["candidates"] == {"citations": 40}


def test_summaries_that_get_no_shorter_come_to_an_end(files: Connection, script: Script) -> None:
    script.answer = "long " * 300
    try:
        found = summarize(files)
        assert found["text"].startswith("long long")
    finally:
        script.answer = reading


def test_a_segment_longer_than_the_context_is_an_error(owner: Connection, db: Database, reachable_dir: Path) -> None:
    create_store(owner, "docs", [(PLAN, 1, 1, "word " * 5000, [1, 0, 0])])
    with scripted_model(db, reachable_dir, context_tokens=700), error("22023", "no document fits"):
        summarize(db.connect("asker"))


def test_documents_that_are_too_long_are_an_error(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs")
    owner.execute(
        "INSERT INTO docs SELECT %s, '{}', 1, n, 'text', '[1,0,0]' FROM generate_series(1, 10001) AS n", (PLAN,)
    )
    with error("54000", "10000"):
        search(asker, "Summarize it", {"document_name": [PLAN]})
    owner.execute("DELETE FROM docs WHERE segment_number = 10001")
    assert len(search(asker, "Summarize it", {"document_name": [PLAN]})) == 10000


def test_what_comes_with_the_texts_is_not_unbounded_in_memory(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs")
    # 200 MB, of which PostgreSQL keeps 2
    owner.execute(
        "INSERT INTO docs SELECT %s, jsonb_build_object('x', repeat('x', 1000000)), 1, n, 'text', '[1,0,0]'"
        " FROM generate_series(1, 200) AS n",
        (PLAN,),
    )
    with error("54000", "16000000"):
        search(asker, "Summarize it", {"document_name": [PLAN]})
    owner.execute("DELETE FROM docs WHERE segment_number > 63")
    assert len(search(asker, "Summarize it", {"document_name": [PLAN]})) == 63


def test_row_level_security_holds(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [(PLAN, 1, n, f"segment {n}", [1, 0, 0]) for n in range(1, 7)])
    owner.execute(
        "ALTER TABLE docs ENABLE ROW LEVEL SECURITY; CREATE POLICY odd ON docs USING (segment_number % 2 = 1)"
    )
    assert [row[4] for row in search(asker, "Summarize it", {"document_name": [PLAN]})] == [1, 3, 5]


@pytest.mark.parametrize("way", interrupts.WAYS)
def test_it_is_interrupted_at_once_and_tells_how_far_it_is(
    module_owner: Connection, module_db: Database, files: Connection, way: str
) -> None:
    session = module_db.connect("asker")
    search(session, "Summarize it", {"document_name": [PLAN]})
    slow = {"model_id": "fake-generate-slow", "max_tokens": 200}
    late = interrupts.seconds_late(session, module_owner, way, lambda: summarize(session, model_options=slow))
    assert late < interrupts.GRACE_SECONDS


def test_progress_is_told(files: Connection, module_db: Database, script: Script) -> None:
    watcher = module_db.connect()
    seen: list[Any] = []

    def watch(body: dict[str, Any]) -> str:
        seen.append(watcher.execute("SELECT phase, done, total FROM ml_rag.progress").fetchall())
        return reading(body)

    script.answer = watch
    try:
        summarize(files)
    finally:
        script.answer = reading
    assert seen[0] == [("summarizing", 0, 40)]
    assert [rows[0][1] for rows in seen[:3]] == sorted(rows[0][1] for rows in seen[:3])
    assert seen[1][0][1] > 0
