"""pipeline/documents: documents by what a question, or an option, calls them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench.questions import NAMED, read_lines

from support.cluster import Connection, Database, noticed
from support.stores import Row, answer, as_text, create_store, error, fake_embedding, search, warnings_of

NAMES = ["/srv/docs/PerksPlus.pdf", "/srv/docs/employee_handbook.pdf", "/srv/docs/role_library.pdf"]


@pytest.fixture(scope="module")
def files(module_db: Database) -> Connection:
    owner = module_db.connect()
    rows: list[Row] = [
        (name, i, n, f"text {n} of {i}", fake_embedding(f"text {n} of {i}"))
        for i, name in enumerate(NAMES)
        for n in (1, 2)
    ]
    create_store(owner, "docs", rows, type="vector(16)")
    titles = {2: {"title": "Roles at Contoso"}, 1: {"headings": ["Contoso", "Rules for Everybody"]}}
    for i, metadata in titles.items():
        owner.execute(
            "UPDATE docs SET metadata = %s WHERE document_id = %s AND segment_number = 1", (json.dumps(metadata), i)
        )
    return module_db.connect("asker")


def found(connection: Connection, question: str, **options: Any) -> set[str]:
    """The documents of the hits of a question that may name some."""
    options = {"n_citations": 20, "query_options": {"document_names": True}, **options}
    return {row[2] for row in search(connection, question, options)}


@pytest.mark.parametrize(
    ("question", "numbers"),
    [
        ("what does perksplus.pdf say", {0}),
        ("docs/employee_handbook on holidays", {1}),
        ("who is in the document roles at contoso", {2}),
        ("holidays, by the rules for everybody", {1}),
        ("role library: and PerksPlus?", {2, 0}),
        ("nothing of the kind", {0, 1, 2}),
    ],
)
def test_only_the_documents_that_are_named_are_searched(files: Connection, question: str, numbers: set[int]) -> None:
    assert found(files, question) == {NAMES[n] for n in numbers}


def test_the_documents_are_told(files: Connection) -> None:
    options = {"skip_generate": True, "query_options": {"document_names": True}}
    told = answer(files, "what does perksplus.pdf say", options)["retrieval_info"]["query"]
    assert told == {"question": "what does perksplus.pdf say", "document_names": [NAMES[0]]}
    assert "document_names" not in answer(files, "what?", options)["retrieval_info"]["query"]
    row = files.execute("""SELECT ml_rag.rewrite('perksplus.pdf?', '{"document_names": true}')""").fetchone()
    assert row == ({"question": "perksplus.pdf?", "document_names": [NAMES[0]]},)


def test_a_question_cannot_widen_what_the_options_leave(files: Connection) -> None:
    assert found(files, "perksplus.pdf", document_name=NAMES[1:]) == set(NAMES[1:])
    assert found(files, "perksplus.pdf", document_name=NAMES[:2]) == {NAMES[0]}
    assert found(files, "perksplus.pdf", exclude_document_name=NAMES[:1]) == set(NAMES[1:])


def test_row_level_security_decides_which_names_there_are(
    owner: Connection, asker: Connection, tenant: Connection
) -> None:
    rows: list[Row] = [
        (f"/{who}/plan.pdf", i, 1, f"text of {who}", [1, 0, 0]) for i, who in enumerate(("asker", "tenant"))
    ]
    create_store(owner, "docs", rows)
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    owner.execute(
        "CREATE POLICY own ON docs USING (document_name LIKE '/' || substring(current_user FROM '[a-z]+$') || '/%')"
    )
    options = {"query_embedding": [1, 0, 0], "query_options": {"document_names": True}, "skip_generate": True}
    for session, name in ((asker, "/asker/plan.pdf"), (tenant, "/tenant/plan.pdf")):
        # two such names for the owner, one for each of them
        told = answer(session, "what is in plan.pdf?", options)["retrieval_info"]["query"]
        assert told["document_names"] == [name]
    assert "document_names" not in answer(owner, "what is in plan.pdf?", options)["retrieval_info"]["query"]
    other = answer(asker, "what is in tenant/plan.pdf?", options)["retrieval_info"]["query"]
    assert other["document_names"] == ["/asker/plan.pdf"]
    with warnings_of(asker) as told, error("P0002"):
        answer(asker, "q", {"query_embedding": [1, 0, 0], "document_name": ["/tenant/plan.pdf"]})
    assert all("tenant/plan" not in str(warning) or "no document is named" in warning[2] for warning in told)


def hints_of(connection: Connection, names: list[str]) -> list[tuple[str | None, str | None]]:
    """Message and hint of each warning of a call with option document_name."""
    told: list[tuple[str | None, str | None]] = []

    def keep(notice: Any) -> None:
        told.append((notice.message_primary, notice.message_hint))

    connection.add_notice_handler(keep)
    try:
        search(connection, "text", {"document_name": [*names, NAMES[2]]})
    finally:
        connection.remove_notice_handler(keep)
    return told


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PerksPlus.pdf", NAMES[0]),
        ("perksplus.PDF", NAMES[0]),
        ("perksplus", NAMES[0]),
        ("/other/employee_handbook.docx", NAMES[1]),
        ("/srv/docs/PerkPlus.pdf", NAMES[0]),
        ("wholly different", None),
    ],
)
def test_a_name_that_is_none_is_warned_of_with_the_nearest(files: Connection, name: str, nearest: str | None) -> None:
    ((message, hint),) = hints_of(files, [name])
    assert message == f'no document is named "{name}"'
    assert hint is not None
    assert hint == f'Did you mean "{nearest}"?' if nearest else "document_names" in hint


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("perksplus.pdf", NAMES[0]), (NAMES[0].upper(), NAMES[0]), (NAMES[0], None), ("wholly different", None)],
)
def test_a_name_that_leaves_out_no_document_is_warned_of(files: Connection, name: str, nearest: str | None) -> None:
    with warnings_of(files) as told:
        rows = search(files, "text", {"exclude_document_name": [name], "n_citations": 20})
    assert {row[2] for row in rows} == set(NAMES) - {name}
    if nearest is None:
        assert told == []
    else:
        ((_, _, message),) = [warning[:3] for warning in told]
        assert message == f'"{name}" does not leave out "{nearest}"'


@pytest.mark.parametrize(
    ("question", "name", "nearest"),
    [
        ("Summarize handbook.pdf", "handbook.pdf", None),
        ("What does employe_handbook.pdf say?", "employe_handbook.pdf", NAMES[1]),
        ("compare PerkPlus.PDF, please", "PerkPlus.PDF", NAMES[0]),
    ],
)
def test_a_file_that_a_question_names_and_that_is_none(
    files: Connection, question: str, name: str, nearest: str | None
) -> None:
    told = noticed(files, lambda d: (d.message_primary or "", d.message_detail or "", d.message_hint or ""))
    # it counts as the nearest one
    assert found(files, question) == ({nearest} if nearest else set(NAMES))
    ((message, detail, hint),) = told
    assert message == "a file that the question names is not among the documents"
    assert ("searched in its place" in detail) == (nearest is not None)
    # what is asked does not get into PostgreSQL's log
    assert name not in hint
    assert hint == f'Did you mean "{nearest}"?' if nearest else "SELECT DISTINCT document_name" in hint


def test_a_misspelt_name_is_that_of_one_document(owner: Connection, asker: Connection) -> None:
    names = ["report_2022.pdf", "report_2024.pdf", "north/plan_a.pdf", "south/plan_b.pdf", "travel_expenses.pdf"]
    rows: list[Row] = [(name, i, 1, "text", fake_embedding("text")) for i, name in enumerate(names)]
    create_store(owner, "docs", rows, type="vector(16)")
    # another year is another document, and of two that are as near none is meant
    for question, wanted in (
        ("what grew, by report_2023.pdf?", names),
        ("what grew, by reprot_2024.pdf?", [names[1]]),
        ("what is in plan_c.pdf?", names),
        ("Summarise travel_expences.pdf", [names[4]]),
        ("travel_expences.pdf and report_2022.pdf on trains", [names[4], names[0]]),
    ):
        assert found(asker, question) == set(wanted), question
    row = asker.execute(
        "SELECT ml_rag.rewrite('Summarise travel_expences.pdf', '{\"document_names\": true}')"
    ).fetchone()
    assert row == ({"question": "Summarise travel_expences.pdf", "document_names": [names[4]]},)


NORTHWIND = {
    "Benefit_Options.pdf": "Plan and Benefit Packages",
    "Northwind_Health_Plus_Benefits_Details.pdf": "Northwind Health Plus Plan",
    "Northwind_Standard_Benefits_Details.pdf": "Northwind Health Standard Plan",
    "PerksPlus.pdf": "PerksPlus Health and Wellness Reimbursement Program for Contoso Electronics Employees",
    "employee_handbook.pdf": "Contoso Electronics Employee Handbook",
    "role_library.pdf": "Roles Descriptions at Contoso Electronics",
}


def test_questions_that_name_documents_in_their_own_words(db: Database) -> None:
    owner = db.connect()
    rows: list[Row] = [(name, i, 1, "text", fake_embedding("text")) for i, name in enumerate(NORTHWIND)]
    create_store(owner, "docs", rows, type="vector(16)")
    for name, title in NORTHWIND.items():
        owner.execute("UPDATE docs SET metadata = %s WHERE document_name = %s", (json.dumps({"title": title}), name))
    asker = db.connect("asker")
    questions = read_lines(NAMED)
    wrong = [
        line["question"] for line in questions if found(asker, line["question"]) != set(line["documents"] or NORTHWIND)
    ]
    assert len(questions) == 60
    assert wrong == []


@pytest.mark.parametrize(
    "question",
    ["what does perksplus.pdf say", "docs/PerksPlus.pdf?", "who uses node.js, e.g. at home", "version 1.2 of it"],
)
def test_what_is_no_missing_file_is_not_warned_of(files: Connection, question: str) -> None:
    with warnings_of(files) as told:
        found(files, question)
    assert told == []


def test_names_that_exist_are_not_warned_of(files: Connection) -> None:
    assert hints_of(files, NAMES[:2]) == []


def test_where_nothing_is_found_the_nearest_name_is_told_first(files: Connection) -> None:
    with warnings_of(files) as told, error("P0002", "no segment found"):
        search(files, "text", {"document_name": ["perksplus.pdf"]})
    assert [message for *_, message in told] == ['no document is named "perksplus.pdf"']


def test_a_store_without_names_goes_by_its_own(owner: Connection, asker: Connection) -> None:
    owner.execute("CREATE TABLE bird_facts (segment text, segment_embedding vector(16))")
    owner.execute("COMMENT ON COLUMN bird_facts.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    owner.execute("INSERT INTO bird_facts VALUES ('a heron', %s)", (as_text(fake_embedding("a heron")),))
    owner.execute("GRANT SELECT ON bird_facts TO ml_rag_user")
    options = {"skip_generate": True, "query_options": {"document_names": True}}
    told = answer(asker, "which heron is in bird_facts?", options)
    assert told["retrieval_info"]["query"]["document_names"] == ["public.bird_facts"]
    assert len(told["citations"]) == 1


def test_the_list_of_documents_waits_for_nobody_that_was_not_named(
    db: Database, owner: Connection, asker: Connection
) -> None:
    create_store(owner, "docs", [("/a/plan.pdf", 1, 1, "text", [1, 0, 0])])
    create_store(owner, "held", [("/b/other.pdf", 1, 1, "text", [1, 0, 0])])
    holder = db.connect(autocommit=False)
    holder.execute("LOCK TABLE held IN ACCESS EXCLUSIVE MODE")
    options = {"query_embedding": [1, 0, 0], "query_options": {"document_names": True}, "skip_generate": True}
    with warnings_of(asker):
        told = answer(asker, "what is in plan.pdf?", options)
    assert told["retrieval_info"]["query"]["document_names"] == ["/a/plan.pdf"]
    holder.rollback()


def test_names_that_nobody_can_write_are_not_listed(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [("a.pdf", 1, 1, "text", (1, 0, 0))])
    # 300 MB, of which PostgreSQL keeps 3
    owner.execute(
        "INSERT INTO docs SELECT repeat('a', 1000000) || n, '{}', n, 1, 'text', '[1, 0, 0]'"
        " FROM generate_series(2, 301) AS n"
    )
    options: dict[str, Any] = {"query_embedding": [1, 0, 0], "n_citations": 1}
    asking = {"query_options": {"document_names": True}}
    assert {row[2] for row in search(asker, "what does a.pdf say", options | asking)} == {"a.pdf"}
    with warnings_of(asker) as told:
        search(asker, "what?", options | {"document_name": ["a.pdf", "b.pdf", "a" * 1_000_000 + "2"]})
    assert [message for _, _, message in told] == ['no document is named "b.pdf"']


def test_json_documents_of_any_shape_are_no_titles(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [(f"d{i}", i, 1, "text", [1, 0, 0]) for i in range(6)])
    for i, metadata in enumerate(
        [{"title": 1}, {"title": ["a"]}, {"headings": "x"}, {"headings": [1, {}]}, {"headings": {}}]
    ):
        owner.execute("UPDATE docs SET metadata = %s WHERE document_id = %s", (json.dumps(metadata), i))
    options = {"query_embedding": [1, 0, 0], "query_options": {"document_names": True}, "skip_generate": True}
    assert answer(asker, "what?", options)["citations"]
