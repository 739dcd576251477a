"""Questions made of a store's segments (``ml_rag.make_questions``), and what they say of it.

What the model writes is recorded: for Northwind's pages by a large model, for squad2 by people, who also wrote
questions on the subject of each paragraph that it does not answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from bench.recorded import MODEL, read_lines
from ml_rag.server.chat.prompt import defuse

ANSWERABLE, UNANSWERABLE = 150, 100
_SEGMENT = re.compile(r"<document number=\"1\" name=\"text\">\n(.*)\n</document>\n\n(?:Write one question)", re.DOTALL)
_JUDGED = re.compile(r"contain the answer to this question\? (.*)\Z", re.DOTALL)

#: the text of a segment -> a question that it answers with the answer, and one that it does not
Written = Mapping[str, tuple[tuple[str, str] | None, str | None]]


def pages(recorded: Mapping[str, Mapping[str, Any]]) -> Written:
    """Of Northwind's pages, ``bench.nodes.enrichments``; the summary of the page stands for the answer."""
    return {
        defuse(text.strip()): ((row["questions"][0], row["summary"]), None)
        for text, row in recorded.items()
        if row["questions"]
    }


def paragraphs(connection: psycopg.Connection[Any], store: str, data: Path) -> Written:
    """Of squad2's segments: the first question whose answer stands there, and the first one without an answer."""
    of: dict[str, list[dict[str, Any]]] = {}
    for question in read_lines(data / "squad2" / "questions.jsonl"):
        for document in question["docs"]:
            of.setdefault(f"{document}.txt", []).append(question)
    query = sql.SQL("SELECT document_name, segment FROM {}").format(sql.Identifier(*store.split(".")))
    written = {}
    for name, segment in connection.execute(query):
        asked = of.get(name, [])
        right = ((q["text"], answer) for q in asked for answer in q["answers"] if answer in segment)
        wrong = (q["text"] for q in asked if not q["answerable"])
        written[defuse(segment.strip())] = next(right, None), next(wrong, None)
    return written


def writer(written: Written) -> Callable[[Mapping[str, Any]], str]:
    """What a model answers to the requests of ``ml_rag.make_questions``; nothing where it is not recorded."""
    unanswered = {wrong for _, wrong in written.values()}

    def answer(body: Mapping[str, Any]) -> str:
        content = body["messages"][-1]["content"]
        if judged := _JUDGED.search(content):
            return json.dumps({"is_answered": judged[1] not in unanswered})
        segment = _SEGMENT.match(content)
        right, wrong = written.get(segment[1] if segment else "", (None, None))
        if "answer" in body["response_format"]["json_schema"]["schema"]["properties"]:
            return json.dumps({"question": right[0], "answer": right[1]}) if right else ""
        return json.dumps({"question": wrong}) if wrong else ""

    return answer


@dataclass(frozen=True, slots=True)
class Measured:
    """``own``: the share of ``answerable`` questions whose own segment is among the first three. The other shares are
    of the half that the limit was not chosen on; None without unanswerable questions."""

    answerable: int
    unanswerable: int
    own: float
    refused: float | None = None
    wrongly_refused: float | None = None


def measure(connection: psycopg.Connection[Any], store: str, unanswerable: int = 0) -> Measured:
    """Makes questions, asks them, and calibrates the limit of the store on one half of them."""
    options = {"keyword_search": True, "vector_store": [store]}
    made = {"n": ANSWERABLE, "unanswerable": unanswerable, "model_id": MODEL}
    connection.execute("DROP TABLE IF EXISTS made")
    connection.execute(
        "CREATE TEMP TABLE made AS SELECT m.*, row_number() OVER (PARTITION BY m.answerable) AS n"
        " FROM ml_rag.make_questions(%s, %s) AS m",
        (store, Jsonb(made)),
    )
    counts = connection.execute("SELECT count(*) FILTER (WHERE answerable), count(*) FROM made").fetchone() or (0, 0)
    query = (
        "SELECT public.ml_rag_evaluate($$SELECT question, jsonb_build_object('document', document_name,"
        " 'segment_number', segment_number) AS documents FROM made WHERE answerable$$, %s) #> '{measures,recall@3}'"
    )
    own = connection.execute(query, (Jsonb({"k": [3], "options": options}),)).fetchone() or (0,)
    if not unanswerable:
        return Measured(counts[0], 0, own[0])
    query = (
        "SELECT threshold, refused_wrongly, 1 - answered_wrongly, is_proposed"
        " FROM ml_rag.calibrate($$SELECT question, answerable FROM made WHERE n %% 2 = {}$$, %s)"
    )
    rows = connection.execute(query.format(0), (Jsonb({**options, "keep": True}),)).fetchall()
    (kept,) = [row[0] for row in rows if row[3]]
    auto = Jsonb({**options, "retrieval_options": {"max_distance": "auto"}})
    rows = connection.execute(query.format(1), (auto,)).fetchall()
    ((_, wrongly, refused, _),) = [row for row in rows if row[0] == kept]
    return Measured(counts[0], counts[1] - counts[0], own[0], float(refused), float(wrongly))
