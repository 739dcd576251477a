"""Vector stores for tests, and calls of the routines."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from support.cluster import Connection, value_of

Row = tuple[str, int, int, str | None, Sequence[float] | None]

COLUMNS = "document_name text NOT NULL, metadata jsonb NOT NULL, document_id bigint NOT NULL, \
segment_number integer NOT NULL, segment text, segment_embedding {type}, PRIMARY KEY (document_id, segment_number)"

#: of a store of three dimensions: two documents
ROWS = [
    ("a.txt", 1, 1, "one two", (1, 0, 0)),
    ("a.txt", 1, 2, "two three", (1, 1, 0)),
    ("a.txt", 1, 3, "three four", (0, 1, 0)),
    ("b.txt", 2, 1, "five", (0, 1, 1)),
    ("b.txt", 2, 2, "six", (0, 0, 1)),
]


def marker(model: str = "fake-embed") -> str:
    return f"GENAI_OPTIONS=EMBED_MODEL_ID={model}"


def ident(name: str) -> sql.Composable:
    """``a.b`` as an identifier of two parts; a tuple of parts where they hold dots."""
    return sql.Identifier(*name.split("."))


def mark(
    owner: Connection, relation: str | sql.Composable, comment: str | None = None, column: str = "segment_embedding"
) -> None:
    """Put the marker comment on the embedding column."""
    relation = ident(relation) if isinstance(relation, str) else relation
    owner.execute(
        sql.SQL("COMMENT ON COLUMN {}.{} IS {}").format(
            relation, sql.Identifier(column), sql.Literal(comment if comment is not None else marker())
        )
    )


def grant(owner: Connection, relation: str | sql.Composable) -> None:
    relation = ident(relation) if isinstance(relation, str) else relation
    owner.execute(sql.SQL("GRANT SELECT ON {} TO ml_rag_user").format(relation))


def create_store(
    owner: Connection,
    name: str | sql.Composable = "docs",
    rows: Iterable[Row] = (),
    type: str = "vector(3)",
    model: str | None = "fake-embed",
    suffix: str = "",
) -> None:
    """A store as docs/loading.md has it, readable by ml_rag_user. A row: name, id, number, segment, embedding."""
    relation = ident(name) if isinstance(name, str) else name
    columns = COLUMNS.format(type=type)
    owner.execute(sql.SQL("CREATE TABLE {} (" + columns + ")" + suffix).format(relation))
    if model is not None:
        mark(owner, relation, marker(model))
    insert(owner, relation, rows)
    grant(owner, relation)


def insert(owner: Connection, name: str | sql.Composable, rows: Iterable[Row]) -> None:
    relation = ident(name) if isinstance(name, str) else name
    statement = sql.SQL(
        "INSERT INTO {} (document_name, metadata, document_id, segment_number, segment, segment_embedding) VALUES {}"
    )
    for some in batched(rows, 1000):
        values = [(d, Jsonb({"n": n}), i, n, s, None if e is None else as_text(e)) for d, i, n, s, e in some]
        places = sql.SQL(", ").join([sql.SQL("(%s, %s, %s, %s, %s, %s)")] * len(values))
        owner.execute(statement.format(relation, places), [value for row in values for value in row])


def batched(rows: Iterable[Row], n: int) -> Iterator[list[Row]]:
    """The rows in lists of at most n."""
    rest = iter(rows)
    while some := list(islice(rest, n)):
        yield some


def as_text(embedding: Sequence[float]) -> str:
    """pgvector's text form."""
    return "[" + ",".join(str(float(x)) for x in embedding) + "]"


def answer(connection: Connection, query: str | None, options: Any = None) -> Any:
    """``ml_rag_answer``'s document."""
    return value_of(connection, "SELECT ml_rag_answer(%s, %s)", (query, _options(options)))


def search(connection: Connection, query: str | None, options: Any = None) -> list[Any]:
    """``ml_rag_search``'s rows."""
    return connection.execute("SELECT * FROM ml_rag_search(%s, %s)", (query, _options(options))).fetchall()


def retrieve(connection: Connection, embedding: Sequence[float], **options: Any) -> Any:
    """The answer document of a call with a given embedding and without generation."""
    return answer(connection, "q", {"query_embedding": list(embedding), "skip_generate": True, **options})


def names(connection: Connection, *args: Any, **kwargs: Any) -> list[str]:
    """``ml_rag.discover``'s stores."""
    call = ", ".join([*["%s"] * len(args), *(f"{name} => %s" for name in kwargs)])
    values = [Jsonb(v) if isinstance(v, dict) else v for v in (*args, *kwargs.values())]
    return [row[0] for row in connection.execute(f"SELECT vector_store FROM ml_rag.discover({call})", values)]


def _options(options: Any) -> Any:
    if options is None or isinstance(options, str):
        return options
    return json.dumps(options)


def fake_embedding(text: str, dimensions: int = 16) -> list[float]:
    """What the model fake-embed answers, computed by hand (see plpy/ml_rag/server/engines/fake.py); ASCII only."""
    vector = np.zeros(dimensions)
    for word in "".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split():
        vector[zlib.crc32(word.encode()) % dimensions] += 1
    return list(vector / np.linalg.norm(vector))


def create_text_store(owner: Connection, name: str = "public.texts") -> None:
    """A store whose embeddings are what fake-embed makes of its texts."""
    texts = ["cats chase mice", "dogs chase cats", "birds fly south", "fish swim deep", "cows eat green grass"]
    create_store(owner, name, [("d.txt", 1, i, t, fake_embedding(t)) for i, t in enumerate(texts)], type="vector(16)")


class error:
    """``with error("22023") as caught``: the statement must fail with that SQLSTATE, and with these words in its text.

    ``caught.message``, ``.detail``, ``.hint`` afterwards. Every error of ours is also held to the house's form.
    """

    message: str
    detail: str
    hint: str

    def __init__(self, sqlstate: str, *words: str, ours: bool = True) -> None:
        self._sqlstate, self._words, self._ours = sqlstate, words, ours

    def __enter__(self) -> error:
        return self

    def __exit__(self, type_: Any, value: Any, traceback: Any) -> bool:
        assert value is not None, f"no error; expected {self._sqlstate}"
        if not isinstance(value, psycopg.Error):
            return False
        diag = value.diag
        self.message, self.detail, self.hint = (
            diag.message_primary or "",
            diag.message_detail or "",
            diag.message_hint or "",
        )
        assert diag.sqlstate == self._sqlstate, f"{diag.sqlstate}: {self.message} / {self.detail}"
        everything = "\n".join((self.message, self.detail, self.hint))
        for word in self._words:
            assert word in everything, everything
        if self._ours:
            assert self.message, "no message"
            assert not self.message[0].isupper(), self.message
            assert not self.message.endswith("."), self.message
        return True


@contextmanager
def warnings_of(connection: Connection) -> Iterator[list[Any]]:
    """Severity, SQLSTATE and message of each notice that comes meanwhile."""
    caught: list[Any] = []

    def keep(notice: Any) -> None:
        # the notice itself is gone once the handler returns
        caught.append((notice.severity_nonlocalized, notice.sqlstate, notice.message_primary))

    connection.add_notice_handler(keep)
    yield caught
    connection.remove_notice_handler(keep)
