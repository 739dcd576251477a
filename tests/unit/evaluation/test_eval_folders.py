"""Folders of documents and questions, as ``ml-rag eval`` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ml_rag.client.datasets import read
from ml_rag.client.evaluation import table_name
from ml_rag.errors import InvalidRequest

CORPUS = [
    {"_id": "d1", "title": "Normans", "text": "People in Normandy."},
    {"_id": "d2", "title": "", "text": " The Norse. "},
    {"_id": 3, "text": "Rollo"},
    {"_id": "empty", "title": "", "text": " "},
]


def write(folder: Path, **files: Any) -> Path:
    """Files by name without dots: ``corpus`` and ``questions`` as lines of JSON, ``qrels`` as text."""
    for name, content in files.items():
        if isinstance(content, str):
            path = folder / name.replace("__", "/")
            path = path.with_suffix(".tsv")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        else:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    return folder


def test_a_folder_in_the_form_of_beir(tmp_path: Path) -> None:
    questions = [
        {"_id": "q1", "text": "who?", "answers": ["Rollo"], "answerable": True},
        {"_id": "q2", "text": "where?"},
        {"_id": "other split", "text": "when?"},
        {"_id": "none", "text": "why?", "answerable": False},
    ]
    qrels = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\t3\t1\n"
    dataset = read(write(tmp_path, corpus=CORPUS, questions=questions, qrels=qrels))
    assert dataset.name == tmp_path.name
    # the title belongs to the text; what is empty is left out
    assert dataset.documents == {
        "d1.txt": b"Normans\n\nPeople in Normandy.",
        "d2.txt": b"The Norse.",
        "3.txt": b"Rollo",
    }
    assert dataset.content("3.txt") == b"Rollo"
    assert [(q.id, q.text, q.answers, q.answerable) for q in dataset.questions] == [
        ("q1", "who?", ["Rollo"], True),
        ("q2", "where?", [], None),
        ("none", "why?", [], False),
    ]
    assert [q.documents for q in dataset.questions] == [
        [{"document": "d1.txt", "grade": 2}, {"document": "d2.txt", "grade": 0}],
        [{"document": "3.txt", "grade": 1}],
        [],
    ]


@pytest.mark.parametrize(
    ("name", "qrels"),
    [
        ("qrels__test", "query-id\tcorpus-id\tscore\nq1\td1\t1\n"),
        ("qrels", "q1\td1\t1\n\n"),
        ("qrels", "q1\t0\td1\t1\r\n"),
    ],
)
def test_forms_of_judgements(tmp_path: Path, name: str, qrels: str) -> None:
    queries = [{"_id": "q1", "text": "who?"}]
    dataset = read(write(tmp_path, corpus=CORPUS, queries=queries, **{name: qrels}))
    assert [q.documents for q in dataset.questions] == [[{"document": "d1.txt", "grade": 1}]]


def test_a_folder_of_documents_and_cited_pages(tmp_path: Path) -> None:
    (tmp_path / "pdf" / "plans").mkdir(parents=True)
    (tmp_path / "pdf" / "a.pdf").write_bytes(b"one")
    (tmp_path / "pdf" / "plans" / "b.pdf").write_bytes(b"two")
    (tmp_path / "pdf" / ".hidden").write_bytes(b"three")
    questions = [
        {"_id": "1", "text": "x", "answers": ["It is so.[a.pdf#page=7]"], "citations": [{"file": "a.pdf", "page": 7}]},
        {"_id": "2", "text": "y", "answers": ["One [plans/b.pdf#page=1][a.pdf#page=2]. Two [a.pdf#page=2]"]},
        {"_id": "3", "text": "z", "answers": [], "answerable": False, "citations": []},
    ]
    dataset = read(write(tmp_path, questions=questions))
    assert sorted(dataset.documents) == ["a.pdf", "plans/b.pdf"]
    assert dataset.content("plans/b.pdf") == b"two"
    assert [q.documents for q in dataset.questions] == [
        [{"document": "a.pdf", "page": 7}],
        [{"document": "plans/b.pdf", "page": 1}, {"document": "a.pdf", "page": 2}],
        [],
    ]
    assert [q.answers for q in dataset.questions] == [["It is so."], ["One. Two"], []]
    assert [q.answerable for q in dataset.questions] == [None, None, False]


@pytest.mark.parametrize(
    ("files", "detail"),
    [
        ({}, "neither questions.jsonl nor queries.jsonl"),
        ({"questions": []}, "neither corpus.jsonl nor"),
        ({"questions": [], "corpus": CORPUS}, "no qrels.tsv"),
        ({"questions": [{"_id": "1"}], "corpus": CORPUS, "qrels": ""}, "questions.jsonl, line 1"),
        ({"questions": [["_id"]], "corpus": CORPUS, "qrels": ""}, "questions.jsonl, line 1"),
        ({"questions": [], "corpus": [*CORPUS, *CORPUS], "qrels": ""}, "corpus.jsonl, line 5: d1"),
        ({"questions": [], "corpus": CORPUS, "qrels": "a\tb\t1\na\tb\n"}, "qrels.tsv, line 2"),
        ({"questions": [], "corpus": CORPUS, "qrels": "a\tb\t1\na\tb\tx\n"}, "qrels.tsv, line 2"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, files: dict[str, Any], detail: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(write(tmp_path, **files))
    assert detail in (caught.value.detail or "")


def test_a_line_that_is_no_json(tmp_path: Path) -> None:
    write(tmp_path, corpus=CORPUS, qrels="")
    (tmp_path / "questions.jsonl").write_text('{"_id": "1", "text": "x"}\n{"_id"\n')
    with pytest.raises(InvalidRequest) as caught:
        read(tmp_path)
    assert "questions.jsonl, line 2" in (caught.value.detail or "")


@pytest.mark.parametrize(
    ("folder", "table"),
    [
        ("squad2", "squad2"),
        ("My Docs (v2)", "my_docs_v2"),
        ("档案", "dataset"),
        ("x" * 80, "x" * 63),
        ("a-b.c", "a_b_c"),
    ],
)
def test_names_of_stores(folder: str, table: str) -> None:
    assert table_name(folder) == table
