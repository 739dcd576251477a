"""``ml-rag eval`` against a database, with the fake models."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from ml_rag.cli import main
from support.cluster import Connection, Database
from support.processes import wait_until

TOPICS = ["apples oranges pears", "violin trumpet drum", "mountain river valley", "copper silver gold"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four documents, and a question for each; the last question has no answer."""
    folder = tmp_path / "topics"
    folder.mkdir()
    write(folder, {f"d{i}": text for i, text in enumerate(TOPICS)})
    questions = [
        {"_id": f"q{i}", "text": text, "answers": [text.split()[0]], "answerable": True}
        for i, text in enumerate(TOPICS)
    ]
    questions.append({"_id": "none", "text": "zebra quagga", "answers": [], "answerable": False})
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (folder / "qrels.tsv").write_text("".join(f"q{i}\td{i}\t1\n" for i in range(len(TOPICS))))
    return folder


def write(folder: Path, corpus: dict[str, str]) -> None:
    lines = [json.dumps({"_id": id_, "title": "", "text": text}) for id_, text in corpus.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines))


def dsn(db: Database) -> str:
    return psycopg.conninfo.make_conninfo(db.dsn, dbname=db.name)


def run(db: Database, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["eval", "--dsn", dsn(db), *map(str, arguments)])


def evaluated(db: Database, folder: Path, *arguments: str | Path) -> Any:
    """The document that ``--json`` writes of the folder."""
    path = folder.parent / "out" / "eval.json"
    result = run(db, folder, "--json", path, *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())["sets"][folder.name]


def test_a_folder_is_loaded_and_measured(db: Database, owner: Connection, folder: Path) -> None:
    found = evaluated(db, folder, "--arms", "vector,exact")
    assert found["documents"] == {
        "documents": 4, "new": 4, "segments": 4, "seconds": found["documents"]["seconds"], "failed": []
    }  # fmt: skip
    assert found["questions"] == 4  # the one that cannot be answered measures nothing in a search
    for arm, title in (("vector", "semantic"), ("exact", "semantic, exact")):
        arm_run = found["arms"][arm]
        assert arm_run["measures"]["recall@1"] == 1
        assert arm_run["vector_store"] == ["ml_rag_eval.topics"]
        name = owner.execute("SELECT name FROM ml_rag.evaluation_run WHERE run_id = %s", (arm_run["run_id"],))
        assert name.fetchone() == (f"topics: {title}",)
    names = owner.execute("SELECT document_name FROM ml_rag_eval.topics ORDER BY 1").fetchall()
    assert names == [(f"d{i}.txt",) for i in range(4)]


def test_the_table_is_printed(db: Database, folder: Path) -> None:
    result = run(db, folder, "--arms", "vector", "--k", "1,2")
    assert "topics: 4 documents, 4 segments, 4 questions" in result.output
    assert "recall@2" in result.output
    assert "\nsemantic  " in result.output
    assert "1.000" in result.output


def test_what_is_there_costs_nothing(db: Database, owner: Connection, folder: Path) -> None:
    assert evaluated(db, folder, "--arms", "vector")["documents"]["new"] == 4
    assert evaluated(db, folder, "--arms", "vector")["documents"]["new"] == 0
    write(folder, {"d0": TOPICS[0], "d1": "violin changed", "new": "something"})
    found = evaluated(db, folder, "--arms", "vector")["documents"]
    assert (found["documents"], found["new"]) == (3, 2)
    names = owner.execute("SELECT document_name FROM ml_rag_eval.topics ORDER BY 1").fetchall()
    assert names == [("d0.txt",), ("d1.txt",), ("new.txt",)]
    # another way to split is another content
    assert evaluated(db, folder, "--arms", "vector", "--segment-tokens", "16")["documents"]["new"] == 3


def test_drop_leaves_no_store(db: Database, owner: Connection, folder: Path) -> None:
    evaluated(db, folder, "--arms", "vector", "--drop")
    assert owner.execute("SELECT to_regclass('ml_rag_eval.topics')").fetchone() == (None,)


@pytest.mark.parametrize(
    "made",
    [
        "SELECT ml_rag.create_store('public.topics');"
        " SELECT ml_rag.load_documents('public.topics', '{/srv/topics/a.txt}', ARRAY['apple'::bytea])",
        "CREATE TABLE public.topics AS SELECT 1 AS n",
    ],
)
def test_a_table_that_it_has_not_made_keeps_its_rows(db: Database, owner: Connection, folder: Path, made: str) -> None:
    owner.execute(made)
    for arguments in ([], ["--drop"]):
        result = run(db, folder, "--schema", "public", *arguments)
        assert result.exit_code == 1
        assert "public.topics is a table that ml-rag eval has not made" in result.output
        assert owner.execute("SELECT count(*) FROM public.topics").fetchone() == (1,)
    owner.execute("DROP TABLE public.topics")


def test_answers_are_measured_too(db: Database, folder: Path) -> None:
    found = evaluated(db, folder, "--arms", "vector", "--generate", "--generate-model", "fake-generate")
    assert found["questions"] == 5
    measures = found["arms"]["vector"]["measures"]
    assert measures["answer_contains"] == 1
    assert measures["refused_rightly"] == 0
    assert found["arms"]["vector"]["models"]["generate"] == "fake-generate"
    judged = evaluated(db, folder, "--arms", "vector", "--judge-model", "fake-generate")
    assert judged["arms"]["vector"]["measures"]["groundedness"] == 0


def test_limit_draws_the_same_questions_for_all(db: Database, owner: Connection, folder: Path) -> None:
    arms = evaluated(db, folder, "--arms", "vector,exact", "--limit", "2", "--seed", "7")["arms"]
    ids = [arms[name]["run_id"] for name in ("vector", "exact")]
    found = owner.execute("SELECT n FROM ml_rag_compare_runs(%s, %s) WHERE measure = 'mrr'", ids).fetchone()
    assert found == (2,)


def test_an_arm_that_cannot_run_says_why(db: Database, owner: Connection, folder: Path) -> None:
    owner.execute("SELECT ml_rag.configure('rerank_model_id', 'ms-marco-minilm-l6-v2')")
    found = evaluated(db, folder, "--arms", "vector,ranker")
    assert "missing" in found["arms"]["ranker"]
    assert "not run" in run(db, folder, "--arms", "ranker").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "vector,psychic"], "psychic"),
        (["--k", "x"], "numbers"),
        (["--k", "0"], '"k"'),
        (["--language", "other=zh"], "other"),
        (["--limit", "0"], "0"),
    ],
)
def test_what_is_wrong_is_said(db: Database, folder: Path, arguments: list[str], words: str) -> None:
    result = run(db, folder, *arguments)
    assert result.exit_code in (1, 2)
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_folder_without_questions(db: Database, tmp_path: Path) -> None:
    result = run(db, tmp_path)
    assert result.exit_code == 1
    assert "no questions to evaluate" in result.output


def test_languages_are_common_or_of_a_folder() -> None:
    from ml_rag.client.eval import languages

    assert languages(["en", "b=zh"], ["a", "b"]) == {"a": "en", "b": "zh"}
    assert languages([], ["a"]) == {"a": ""}


def test_an_interrupted_load_goes_on(db: Database, owner: Connection, folder: Path) -> None:
    """Ctrl-C in the middle: no half document, no run, no JSON; the next call does what is left."""
    owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed-slow')")
    path = folder / "out.json"
    command = [sys.executable, "-m", "ml_rag.cli", "eval", str(folder), "--dsn", dsn(db), "--json", str(path)]
    # a suite that runs in the background has SIGINT ignored, and its children would inherit that
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            # the documents are on their way (the slow model takes 2 s a text)
            own = (
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'ml-rag eval'"
            )
            loading = f"{own} AND state = 'active' AND query LIKE 'SELECT ml_rag.load_documents(%'"
            wait_until(lambda: owner.execute(loading).fetchone() != (0,), 60)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode not in (0, None)
    assert not path.exists()
    assert owner.execute("SELECT count(*) FROM ml_rag.evaluation_run").fetchone() == (0,)
    query = "SELECT document_name FROM ml_rag_eval.topics GROUP BY 1 HAVING count(*) <> 1"
    assert owner.execute(query).fetchall() == []
    wait_until(lambda: owner.execute(own).fetchone() == (0,), 60)
    owner.execute("SELECT ml_rag.configure('embed_model_id', 'fake-embed')")
    owner.execute("COMMENT ON COLUMN ml_rag_eval.topics.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    assert evaluated(db, folder, "--arms", "vector")["documents"]["segments"] == 4
