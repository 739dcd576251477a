"""Folders with documents and questions, as ``ml-rag eval`` reads them.

Two forms:

* BEIR: ``corpus.jsonl`` (``_id``, ``title``, ``text``), ``queries.jsonl`` or ``questions.jsonl`` (``_id``, ``text``),
  and ``qrels.tsv`` or ``qrels/test.tsv`` (query, document, grade; a line of headings is allowed).
* documents: a folder ``pdf``, ``docs`` or ``documents`` and ``questions.jsonl``, whose lines cite their pages, in
  ``citations`` (``[{"file": "a.pdf", "page": 7}]``) or in an answer (``[a.pdf#page=7]``).

A line of questions may also have ``answers`` (texts) and ``answerable`` (true or false).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_rag.errors import InvalidRequest

_FOLDERS = ("pdf", "docs", "documents")
_QUESTIONS = ("questions.jsonl", "queries.jsonl")
_QRELS = ("qrels.tsv", "qrels/test.tsv")
_MARKER = re.compile(r"\s*\[([^\[\]#]+)#page=(\d+)\]")


@dataclass(frozen=True, slots=True)
class Question:
    """``documents``: those to be found, as ``ml_rag_evaluate`` takes them; empty if none, or if it is unknown."""

    id: str
    text: str
    documents: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    answerable: bool | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """``documents``: name -> content, or the file that has it. Names are unique, contents are not empty."""

    name: str
    documents: Mapping[str, bytes | Path]
    questions: list[Question]

    def content(self, name: str) -> bytes:
        """The bytes of a document. Raises OSError where its file cannot be read."""
        content = self.documents[name]
        return content if isinstance(content, bytes) else content.read_bytes()


def read(folder: Path) -> Dataset:
    """The folder's documents and questions.

    Raises ``InvalidRequest``: the folder has neither form, or invalid line; the detail names it.
    """
    questions = next((folder / name for name in _QUESTIONS if (folder / name).is_file()), None)
    if questions is None:
        raise _no_dataset(folder, f"neither {_QUESTIONS[0]} nor {_QUESTIONS[1]}")
    name = folder.resolve().name
    if (folder / "corpus.jsonl").is_file():
        qrels = next((folder / name for name in _QRELS if (folder / name).is_file()), None)
        if qrels is None:
            raise _no_dataset(folder, "no qrels.tsv")
        return Dataset(name, _corpus(folder / "corpus.jsonl"), _judged(questions, _judgements(qrels)))
    documents = next((folder / name for name in _FOLDERS if (folder / name).is_dir()), None)
    if documents is None:
        raise _no_dataset(folder, "neither corpus.jsonl nor a folder " + ", ".join(_FOLDERS))
    files = {
        path.relative_to(documents).as_posix(): path
        for path in sorted(documents.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    return Dataset(name, files, [_cited(line) for line in _lines(questions)])


def _no_dataset(folder: Path, detail: str) -> InvalidRequest:
    hint = (
        "A folder has corpus.jsonl, questions.jsonl and qrels.tsv, or questions.jsonl and documents in pdf/ or docs/."
    )
    return InvalidRequest("the folder has no questions to evaluate", detail=f"{folder}: {detail}", hint=hint)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. What every line must have is checked: ``_id`` and ``text``."""
    seen = set()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                value = {**value, "_id": str(value["_id"]), "text": str(value["text"])}
            except (ValueError, KeyError, TypeError) as e:
                detail = f"{path}, line {number}: {e!r}"
                raise InvalidRequest("invalid line", detail=detail) from None
            if value["_id"] in seen:
                raise InvalidRequest("two lines have the same _id", detail=f"{path}, line {number}: {value['_id']}")
            seen.add(value["_id"])
            yield value


def document_name(id_: str) -> str:
    """What the document of that id is called in the store. The ending says that it is text, whatever it looks like."""
    return f"{id_}.txt"


def _corpus(path: Path) -> dict[str, bytes]:
    texts = {
        line["_id"]: "\n\n".join(filter(None, (str(line.get("title") or "").strip(), line["text"].strip())))
        for line in _lines(path)
    }
    # collections have empty documents here and there, which nothing can find
    return {document_name(id_): text.encode() for id_, text in texts.items() if text}


def _judgements(path: Path) -> dict[str, dict[str, float]]:
    grades: dict[str, dict[str, float]] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip("\r\n").split("\t")
            try:
                query, document, grade = fields if len(fields) == 3 else (fields[0], fields[2], fields[3])
                grades.setdefault(query, {})[document] = float(grade)
            except (ValueError, IndexError):
                if number > 1 and line.strip():
                    detail = f"{path}, line {number}: {line.strip()[:100]}"
                    raise InvalidRequest("invalid line", detail=detail) from None
    return grades


def _answers(line: dict[str, Any]) -> list[str]:
    answers = line.get("answers") or []
    return [str(answer) for answer in ([answers] if isinstance(answers, str) else answers)]


def _answerable(line: dict[str, Any]) -> bool | None:
    answerable = line.get("answerable")
    return answerable if isinstance(answerable, bool) else None


def _judged(path: Path, grades: dict[str, dict[str, float]]) -> list[Question]:
    """Those with judgements or said to have no answer; BEIR's files hold the questions of other splits too."""
    questions = []
    for line in _lines(path):
        documents = [{"document": document_name(d), "grade": g} for d, g in grades.get(line["_id"], {}).items()]
        question = Question(line["_id"], line["text"], documents, _answers(line), _answerable(line))
        if documents or question.answerable is False:
            questions.append(question)
    return questions


def _cited(line: dict[str, Any]) -> Question:
    answers = _answers(line)
    pages = [(c["file"], c.get("page")) for c in line.get("citations") or []]
    pages = pages or [(file, int(page)) for answer in answers for file, page in _MARKER.findall(answer)]
    documents = [{"document": f, **({} if p is None else {"page": p})} for f, p in dict.fromkeys(pages)]
    answers = [_MARKER.sub("", answer) for answer in answers]
    return Question(line["_id"], line["text"], documents, answers, _answerable(line))
