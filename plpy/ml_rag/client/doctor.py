"""``ml-rag doctor``: checks the whole chain from database to answer, and says what to do about what is wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
import tomllib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, LiteralString

import click
import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ml_rag import __version__
from ml_rag.client.dsn import dsn_option
from ml_rag.errors import MlRagError, from_json
from ml_rag.protocol import request_address
from ml_rag.search_path import PIN, PIN_TRANSACTION, refuse_borrowed_role
from ml_rag.terminal import printable_lines

SUPPORTED_POSTGRESQL = (15, 18)
OLDEST_PGVECTOR = (0, 8)
#: what to take in place of the default models: for answers on a few cores; for other languages than English, from PyPI
USABLE, MULTILINGUAL = "qwen2.5-1.5b-instruct", "multilingual-e5-small-q4"
#: for rewriting, conditions and SQL, which take a larger model
CAPABLE = "qwen2.5-7b-instruct"
#: answers where no language model is there
EXTRACTIVE = "extractive"
#: of the letters of a store that an English text with some names and signs does not reach
FOREIGN_SHARE = 0.3
#: rows up to which an index finds what is there without being told (ml_rag._ef_search)
SMALL = 20_000
#: for the model server to answer in
SECONDS = 10.0
#: bytes of its reply
MOST_REPLY = 1024 * 1024
#: for the rows of all stores of another role to be counted in
COUNT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. ``hint`` says what to do where ``ok`` is false, what could be better where it is true."""

    check: str
    ok: bool
    found: str
    hint: str = ""


def _wrong(found: str, hint: str) -> MlRagError:
    """What stands in the way of the checks that build on this one."""
    return MlRagError(found, hint=hint)


def _joined(message: str, detail: str | None) -> str:
    """A message and its detail, which is a sentence or continues that of the message."""
    if not detail:
        return message
    return f"{message.rstrip('.')}{'. ' if detail[0].isupper() else '; '}{detail}"


def run(name: str, check: Callable[[], str]) -> Finding:
    """The finding of one check; every error becomes one, with its own hint where it has one."""
    try:
        return Finding(name, True, check())
    except MlRagError as e:
        return Finding(name, False, _joined(e.message, e.detail), e.hint or "")
    except psycopg.Error as e:
        diagnostic = e.diag
        found = _joined(diagnostic.message_primary or str(e).strip(), diagnostic.message_detail)
        hint = diagnostic.message_hint or "Check --dsn (or PGHOST, PGPORT, PGUSER, PGDATABASE), and that it runs."
        if isinstance(e, psycopg.errors.InsufficientPrivilege):
            hint = diagnostic.message_hint or "As a superuser: GRANT ml_rag_user TO that role. Roles: docs/security.md."
        return Finding(name, False, found, hint)


class _Socket(socket.socket):
    """A socket that has ``SECONDS`` for all that comes over it, not for each piece."""

    def __init__(self, family: int) -> None:
        super().__init__(family)
        self._deadline = time.monotonic() + SECONDS
        self.settimeout(SECONDS)

    def recv_into(self, *arguments: Any) -> int:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)
        return super().recv_into(*arguments)


def _ask(address: str) -> tuple[int, bytes]:
    """Status and body of /healthz. Raises OSError, ValueError for a malformed address, HTTPException for its reply."""
    family, target = request_address(address)
    connection = http.client.HTTPConnection("localhost")
    with contextlib.closing(connection):
        connection.sock = _Socket(family)
        connection.sock.connect(target)
        connection.request("GET", "/healthz")
        reply = connection.getresponse()
        body = bytearray()
        # read() would read all of a chunk whose size is negative
        while len(body) <= MOST_REPLY and (piece := reply.read1(1 << 16)):
            body += piece
    if len(body) > MOST_REPLY:
        raise http.client.HTTPException(f"more than {MOST_REPLY} bytes")
    return reply.status, bytes(body)


def _other(address: str, why: str) -> MlRagError:
    hint = "Correct its address: SELECT ml_rag.configure('model_server', '…')."
    return _wrong(f"{address} answers something else than an ml_rag model server: {why}", hint)


def check_server(address: str) -> Iterator[Finding]:
    """The model server, seen from here: reachable, of this version, its document parsers confined."""
    confined: list[Finding] = []

    def health() -> str:
        try:
            status, body = _ask(address)
        except (OSError, ValueError) as e:
            start = os.environ.get("ML_RAG_START_SERVER") or "ml-rag serve"  # as in backend/client
            hint = f"Start it with \"{start}\", or correct its address: SELECT ml_rag.configure('model_server', '…')."
            raise _wrong(f"it cannot be reached from here: {address}: {e}.", hint) from None
        except http.client.HTTPException as e:
            raise _other(address, repr(e)[:100]) from None
        try:
            reply = json.loads(body)
            if status != 200:
                raise from_json(reply, status)
            if not isinstance(version := reply["version"], str):
                raise TypeError
            if version == __version__:
                uptime = f"{reply['uptime_seconds']:.0f}"
                confined.append(parsers(reply))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            raise _other(address, f"HTTP status {status}, {len(body)} bytes") from None
        if version != __version__:
            raise _wrong(f"version {version}, this command is {__version__}", "Restart the model server.")
        return f"version {version}, up for {uptime} s, at {address}"

    finding = run("model server", health)
    if not finding.ok and "Permission denied" in finding.found:
        hint = "Run this as the model server's user, as root, or as a user in allowed_users of its configuration."
        finding = Finding(finding.check, False, finding.found, hint)
    yield finding
    yield from confined


def parsers(health: dict[str, Any]) -> Finding:
    """How far the kernel lets document parsers be confined; less than all of it is reported, and is not an error."""
    found: dict[str, Any] = health.get("parsers") or {}
    if missing := found.get("missing"):
        why = "; ".join(f"no {what} ({why})" for what, why in missing.items())
        return Finding("document parsers", True, why, "See docs/operations.md, Document parsers.")
    confined = found.get("confined")
    return Finding("document parsers", True, "confined" if confined else "not known yet whether they are confined")


def _value(connection: psycopg.Connection, query: LiteralString | sql.Composed, *parameters: object) -> Any:
    row = connection.execute(query, parameters).fetchone()
    return row[0] if row else None


def check_extension(connection: psycopg.Connection) -> Iterator[Finding]:
    """PostgreSQL, pgvector, PL/Python and the extension, each in a version that fits."""

    def postgresql() -> str:
        major = connection.info.server_version // 10000
        if not SUPPORTED_POSTGRESQL[0] <= major <= SUPPORTED_POSTGRESQL[1]:
            raise _wrong(f"version {major}", "ml_rag runs on PostgreSQL {} to {}.".format(*SUPPORTED_POSTGRESQL))
        return f"version {major}, database {connection.info.dbname}, as {connection.info.user}"

    def pgvector() -> str:
        version = _value(connection, "SELECT extversion FROM pg_extension WHERE extname = 'vector'")
        if version is None:
            raise _wrong("not installed", "CREATE EXTENSION ml_rag CASCADE installs it.")
        if tuple(map(int, version.split(".")[:2])) < OLDEST_PGVECTOR:
            raise _wrong(f"version {version}", "Install pgvector 0.8 or newer, then ALTER EXTENSION vector UPDATE.")
        return f"version {version}"

    def extension() -> str:
        version = _value(connection, "SELECT extversion FROM pg_extension WHERE extname = 'ml_rag'")
        if version is None:
            raise _wrong(
                "not installed in this database",
                "As a superuser: CREATE EXTENSION ml_rag CASCADE. If it is not available: make install.",
            )
        sql_version = _value(connection, "SELECT ml_rag.version()")
        if sql_version != __version__:
            raise _wrong(
                f"version {sql_version}, this command is {__version__}",
                "Run make install, then ALTER EXTENSION ml_rag UPDATE, or install the command of that version.",
            )
        return f"version {version}"

    yield run("PostgreSQL", postgresql)
    yield run("pgvector", pgvector)
    yield run("extension ml_rag", extension)


def check_keyword(connection: psycopg.Connection) -> Iterator[Finding]:
    """Keyword search: numpy in the python3 of the database server."""

    def numpy() -> str:
        ((version, error),) = connection.execute(
            "SELECT n.found #>> '{}', n.error FROM ml_rag._call_python('numpy_version', '[]') AS n"
        ).fetchall()
        if version is None:
            raise _wrong(f"{error['message']}: {error['detail']}", error["hint"])
        return f"numpy {version}"

    yield run("keyword search", numpy)


#: added to advice about tables whose owners this role does not trust
_OF_OTHERS = (
    " Leave that to the owner of a table of another role: its triggers run with the rights of the role that calls it."
)


def check_vectorizers(connection: psycopg.Connection) -> Iterator[Finding]:
    """Whether vectorizers went with a DROP EXTENSION."""

    def former() -> str:
        rows = connection.execute(
            "SELECT ml_rag._full_name(c.oid), CASE WHEN NOT ml_rag._are_trusted(ml_rag._parts(c.oid))"
            " THEN pg_get_userbyid(c.relowner) END"
            " FROM ml_rag._former_vectorizers() AS f JOIN pg_class AS c ON c.oid = f ORDER BY 1"
        ).fetchall()
        if rows:
            raise _wrong(
                "gone, so that changed rows keep the embedding of their former text: "
                + ", ".join(name if owner is None else f"{name} of {owner}" for name, owner in rows),
                "SELECT ml_rag.create_vectorizer('TABLE', '…') with the options that it had takes a table back, and "
                "embeds what may have changed." + (_OF_OTHERS if any(owner for _, owner in rows) else ""),
            )
        return "none is gone"

    yield run("vectorizers", former)


def check_roles(connection: psycopg.Connection) -> Iterator[Finding]:
    """Whether conversations and runs are left of roles that are gone; policies show them to a superuser only."""

    def gone() -> str:
        rows = connection.execute(
            "SELECT k.role, count(*) FROM (SELECT c.role FROM ml_rag.conversation AS c"
            " UNION ALL SELECT r.role FROM ml_rag.evaluation_run AS r) AS k"
            " WHERE NOT EXISTS (SELECT FROM pg_roles AS p WHERE p.rolname = k.role) GROUP BY k.role ORDER BY k.role"
        ).fetchall()
        if rows:
            raise _wrong(
                "conversations and evaluation runs of roles that are gone, which a new role of the name would see: "
                + ", ".join(f"{n} of {role}" for role, n in rows),
                "SELECT ml_rag.forget_role('…') deletes those of a role.",
            )
        return "no conversation or evaluation run is of a role that is gone"

    if _value(connection, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"):
        yield run("dropped roles", gone)


@dataclass(frozen=True, slots=True)
class Unread:
    """A vector store that is not read unasked: reading it could run its owner's code as this role."""

    name: str
    relation: int
    owner: str
    segment: str
    embedding: str
    #: whether rows can be without an embedding, as far as the catalog tells
    nullable: bool
    #: whether the owner trusts that of the schema, who decides what the name means, and those of its partitions
    is_trusted_by_owner: bool
    reason: str


def unread_stores(connection: psycopg.Connection) -> list[Unread]:
    """The stores that this role may read, but for those that searches read unasked. Only the catalog is read."""
    rows = connection.execute(
        """
        SELECT s.vector_store, s.relation::oid::bigint, pg_get_userbyid(c.relowner), s.segment,
          s.segment_embedding, NOT a.attnotnull AND c.relkind IN ('r', 'p'),
          ml_rag._are_trusted(ml_rag._read_with(s.relation), c.relowner), rtrim(w.reason, '.')
        FROM ml_rag.discover((
          SELECT array_agg(format('%I.%I', n.nspname, k.relname) ORDER BY k.oid) FROM pg_description AS m
          JOIN pg_class AS k ON k.oid = m.objoid JOIN pg_namespace AS n ON n.oid = k.relnamespace
          WHERE m.classoid = 'pg_class'::regclass AND m.objsubid > 0 AND m.description LIKE '%EMBED_MODEL_ID=%'
        )) AS s
        JOIN pg_class AS c ON c.oid = s.relation JOIN pg_namespace AS o ON o.oid = c.relnamespace
        JOIN pg_attribute AS a ON a.attrelid = s.relation AND a.attname = s.segment_embedding
        LEFT JOIN ml_rag.discover() AS d ON d.relation = s.relation
        CROSS JOIN LATERAL ml_rag._why_not(s.relation, '{}') AS w
        WHERE d.found IS NULL ORDER BY 1
        """
    ).fetchall()
    return [Unread(*row) for row in rows]


def count_as_owner(dsn: str, store: Unread, seconds: float) -> int:
    """How many rows with a text have no embedding, counted with the rights of the store's owner alone; for a superuser.

    Nothing that runs in a function with its owner's rights can take others. What it does to the session is undone, and
    the session is used for nothing else: the owner could replace the function. A policy of the owner's can catch what
    a statement_timeout raises; the end of its session it cannot.
    """
    function = sql.Identifier("pg_temp", "ml_rag_count")
    with psycopg.connect(dsn, connect_timeout=5) as connection, connection.transaction(force_rollback=True):
        end = threading.Timer(seconds, _terminate, (dsn, connection.info.backend_pid))
        end.start()
        try:
            connection.execute(PIN_TRANSACTION)
            # nothing takes its name, which the owner would read then, and it is that owner's
            connection.execute(
                "SELECT ml_rag._hold_filled(ARRAY[r], ARRAY[r], r::regclass, quote_ident(%s)::regrole, true)"
                " FROM (SELECT %s::oid) AS s (r)",
                (store.owner, store.relation),
            )
            body = sql.SQL("SELECT count(*) FROM {} AS t WHERE t.{} IS NULL AND t.{} ~ '\\S'").format(
                sql.SQL(_value(connection, "SELECT ml_rag._relation_name(%s::oid)", store.relation)),
                sql.Identifier(store.embedding),
                sql.Identifier(store.segment),
            )
            for statement in (
                sql.SQL("SET LOCAL check_function_bodies = off"),
                sql.SQL(
                    "CREATE FUNCTION {}() RETURNS bigint LANGUAGE sql SECURITY DEFINER"
                    " SET search_path = pg_catalog, pg_temp AS {}"
                ).format(function, body.as_string(connection)),
                sql.SQL("ALTER FUNCTION {}() OWNER TO {}").format(function, sql.Identifier(store.owner)),
            ):
                connection.execute(statement)
            row = connection.execute(sql.SQL("SELECT {}()").format(function)).fetchone()
        finally:
            end.cancel()
        return int(row[0]) if row else 0


def _terminate(dsn: str, pid: int) -> None:
    """End another session."""
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        connection.execute("SELECT pg_catalog.pg_terminate_backend(%s::integer)", (pid,))


def check_calls(connection: psycopg.Connection, dsn: str) -> Iterator[Finding]:
    """What a caller does, as this role: reach the server, embed, generate, retrieve."""

    def routine(name: str) -> sql.Composable:
        """A public one. It is given all arguments with their types, as the owner of the schema can overload it."""
        schema = _value(
            connection,
            "SELECT n.nspname FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace"
            " WHERE e.extname = 'ml_rag'",
        )
        return sql.Identifier(schema, name)

    def server() -> str:
        reply = _value(connection, "SELECT ml_rag.model_server()")
        return f"version {reply['version']} answers the backend"

    def defaults() -> str:
        rows = connection.execute(
            sql.SQL(
                "SELECT s.name, s.model_id, m.available FROM ("
                "SELECT s.name, "
                "CASE s.name WHEN 'embed_model_id' THEN s.value ELSE ml_rag._default_model() END AS model_id "
                "FROM ml_rag.setting AS s WHERE s.name IN ('embed_model_id', 'generate_model_id')) AS s "
                "LEFT JOIN {}() AS m ON m.model_id = s.model_id"
            ).format(routine("ml_supported_models"))
        ).fetchall()
        for name, value, available in rows:
            if available is None:
                raise _wrong(
                    f"{name} is {value}, which the model server does not know",
                    f"SELECT ml_rag.configure('{name}', '…'), or add the model to the server's catalogue.",
                )
            if not available:
                raise _wrong(
                    f"{name} is {value}, whose files are missing",
                    how_to_pull(connection, value) or "Put them where the model server's catalogue says they are.",
                )
        return ", ".join(f"{name} = {value}" for name, value, _ in rows)

    def embedding() -> str:
        began = time.monotonic()
        dimensions = _value(
            connection,
            sql.SQL("SELECT cardinality({}('a test query'::text, NULL::jsonb)::real[])").format(
                routine("ml_embed_row")
            ),
        )
        return f"{dimensions} dimensions in {(time.monotonic() - began) * 1000:.0f} ms"

    def generation() -> str:
        began = time.monotonic()
        # a sentence that it can take out of a text, if it takes sentences only
        options: dict[str, Any] = {"max_tokens": 8}
        if _value(connection, "SELECT ml_rag._default_model()") == EXTRACTIVE:
            options["context"] = "Say hello."
        query = sql.SQL("SELECT {}('Say hello.'::text, %s)").format(routine("ml_generate"))
        _value(connection, query, Jsonb(options))
        return f"answered in {(time.monotonic() - began) * 1000:.0f} ms"

    def retrieval() -> str:
        stores = _value(connection, "SELECT count(*) FROM ml_rag.discover()")
        usable = _value(
            connection, "SELECT count(*) FROM ml_rag.discover(embed_model_id => ml_rag._get_setting('embed_model_id'))"
        )
        if not stores and (unread := unread_stores(connection)):
            raise _wrong(
                f"{connection.info.user} must name what to search, such as {unread[0].name} ({unread[0].reason})",
                'Name it in "vector_store", or run ml-rag doctor as the user who asks.',
            )
        if not usable:
            raise _wrong(
                f"{stores} vector stores that {connection.info.user} may read, none of the default embedding model",
                "Make their model the default: SELECT ml_rag.configure('embed_model_id', '…'). "
                "SELECT vector_store, embed_model_id FROM ml_rag.discover() shows it."
                if stores
                else "Load documents: CALL vector_store_load('file:///path/of/a/folder/'), or ml-rag load.",
            )
        rows = _value(
            connection,
            sql.SQL("SELECT count(*) FROM {}('a test query'::text, jsonb_build_object('n_citations', 1))").format(
                routine("ml_rag_search")
            ),
        )
        return f"{usable} vector stores, {rows} segment found"

    def embeddings() -> Finding:
        read = connection.execute(
            "SELECT s.vector_store, coalesce(ml_rag._without_embedding(s), 0) FROM ml_rag.discover() AS s"
        ).fetchall()
        is_superuser = _value(connection, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        unread, is_of_others = [], False
        left: dict[str, float] = {}
        for store in unread_stores(connection):
            began, seconds = time.monotonic(), left.get(store.owner, COUNT_SECONDS)
            try:
                if not store.nullable:
                    read.append((store.name, 0))
                elif is_superuser and store.is_trusted_by_owner and seconds > 0:
                    read.append((store.name, count_as_owner(dsn, store, seconds)))
                    is_of_others |= read[-1][1] > 0
                else:
                    reason = store.reason if seconds > 0 else f"its owner's stores took {COUNT_SECONDS:g} s"
                    unread.append(f"{store.name} of {store.owner} ({reason})")
            except psycopg.Error as error:
                unread.append(f"{store.name} of {store.owner} ({error.diag.message_primary or error})")
            left[store.owner] = seconds - (time.monotonic() - began)
        lacking = ", ".join(f"{n} of {name}" for name, n in sorted(read) if n)
        found = [f"no row of {len(read)} vector stores lacks its embedding"]
        hints = []
        if lacking:
            found = [f"rows that searches by meaning do not find: {lacking}"]
            hints = [
                "They have no embedding yet, or lost it when their text changed: CALL ml_rag.run_vectorizer or "
                "ml_embed_table embeds them, ml-rag worker does it by itself." + (_OF_OTHERS if is_of_others else "")
            ]
        if unread:
            more = f" and {len(unread) - 10} more" if len(unread) > 10 else ""
            found.append(f"{len(unread)} not looked at: {', '.join(unread[:10])}{more}")
            hints.append("To have those looked at, run ml-rag doctor as their owner.")
        return Finding("rows without an embedding", not lacking, "; ".join(found), " ".join(hints))

    def truncated() -> Finding:
        name = "texts longer than the model takes in"
        rows = connection.execute(
            "SELECT v.relation::text, v.truncated FROM ml_rag.vectorizer AS v WHERE v.truncated > 0 ORDER BY 1"
        ).fetchall()
        if not rows:
            return Finding(name, True, "no vectorizer's model has cut a text")
        found = "cut when they were embedded: " + ", ".join(f"{n} of {relation}" for relation, n in rows)
        return Finding(name, True, found, 'A vectorizer with "destination": "table" splits them: docs/own-tables.md.')

    def indexes() -> Finding:
        """Of stores whose index was measured, and of large ones, as a small one finds what is there."""
        tuned, grown, untuned = [], [], []
        for store, kept, rows in connection.execute(
            "SELECT s.vector_store, ml_rag._tuned(ml_rag._embedding_comment(s)), ml_rag._analyzed_rows(s.relation)"
            " FROM ml_rag.discover() AS s"
            " WHERE EXISTS (SELECT FROM ml_rag.metric AS m WHERE (ml_rag._tuned_index(s, m.name)).method IS NOT NULL)"
        ):
            if kept is None:
                untuned += [store] if rows > SMALL else []
            elif rows >= 2 * kept["tuned_rows"]:
                grown.append(f"{store} (from {kept['tuned_rows']} to {rows} rows)")
            else:
                tuned.append(f"{store} ({kept['recall']:.1%} of the nearest found)")
        found = [f"{what}: {', '.join(stores)}" for what, stores in (
            ("measured", tuned), ("doubled since they were measured", grown), ("never measured", untuned),
        ) if stores]  # fmt: skip
        hint = "SELECT * FROM ml_rag.tune_index('STORE') measures what is found, and keeps a setting for searches."
        name = "approximate indexes"
        return Finding(name, True, "; ".join(found) or "none of a large store", hint if grown or untuned else "")

    for name, check in {
        "model server, from the database": server,
        "default models": defaults,
        "embedding": embedding,
        "generation": generation,
        "retrieval": retrieval,
    }.items():
        finding = run(name, check)
        yield finding
        if name == "model server, from the database" and not finding.ok:
            return
    yield embeddings()
    yield truncated()
    yield indexes()


def built_in_models() -> dict[str, dict[str, Any]]:
    """What the catalogue that ships with this command says of each model."""
    text = resources.files("ml_rag.server").joinpath("catalogue.toml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = tomllib.loads(text)["models"]
    return found


def foreign_share(texts: Sequence[str]) -> float:
    """The share of letters that are of another script than Latin, in which no English is written."""
    letters = [character for text in texts for character in text if character.isalpha()]
    foreign = sum(1 for letter in letters if not unicodedata.name(letter, "").startswith(("LATIN ", "FULLWIDTH LATIN")))
    return foreign / len(letters) if letters else 0.0


def how_to_pull(connection: psycopg.Connection, model_id: str) -> str:
    """The command that gets a model's files into the model server's folder; empty where they are there.

    Where the server does not answer, or has no such model, the command does not name a folder.
    """
    row = connection.execute(
        "SELECT m.value ->> 'pull' FROM ml_rag._call_python('get', '[\"/v1/models\"]') AS s, "
        "jsonb_array_elements(s.found -> 'data') AS m "
        "WHERE m.value ->> 'id' = %s",
        [model_id],
    ).fetchone()
    return row[0] or "" if row else f"ml-rag models pull {model_id}"


def after_pull(connection: psycopg.Connection, model_id: str) -> str:
    """The beginning of a hint that continues with a statement."""
    command = how_to_pull(connection, model_id)
    return f"{command}, then " if command else ""


def check_models(connection: psycopg.Connection) -> Iterator[Finding]:
    """Whether the models are good for what they are there for."""
    known = built_in_models()

    def languages() -> str:
        stores = connection.execute(
            "SELECT s.vector_store, s.embed_model_id, s.relation::oid, s.segment FROM ml_rag.discover() AS s ORDER BY 1"
        ).fetchall()
        wrong, unread = [], len(unread_stores(connection))
        for store, model, oid, column in stores:
            if known.get(model.partition("@")[0], {}).get("languages") != "en":
                continue
            with connection.transaction():
                if not _value(connection, "SELECT ml_rag._hold_trusted(ARRAY[%s::oid])", oid):
                    continue
                # a regular expression reads bytes that are not characters, at which left alone would fail
                query = sql.SQL(
                    "SELECT left((regexp_match(t.{0}, '^.*$'))[1], 500) FROM {1} AS t"
                    " WHERE octet_length(t.{0}) <= 100000 LIMIT 100"
                ).format(
                    sql.Identifier(column), sql.SQL(_value(connection, "SELECT ml_rag._relation_name(%s::oid)", oid))
                )
                share = foreign_share([text for (text,) in connection.execute(query) if text])
            if share > FOREIGN_SHARE:
                wrong.append(f"{store} ({share:.0%} of the letters)")
        if wrong:
            raise _wrong(
                f"texts that are not English, with an embedding model for English: {', '.join(wrong)}",
                f"{after_pull(connection, MULTILINGUAL)}CALL ml_rag.add_embedding('STORE', 'multilingual', "
                f'\'{{"embed_model_id": "{MULTILINGUAL}"}}\'), '
                "then SELECT ml_rag.use_embedding('STORE', 'multilingual').",
            )
        left_out = f", {unread} not looked at" if unread else ""
        return f"none of {len(stores)} vector stores is in another script than its model was made for{left_out}"

    yield run("languages", languages)


def check_language_models(connection: psycopg.Connection) -> Iterator[Finding]:
    """What waits for a language model, and the line that gets it; nothing where there is one for all of it."""
    known = built_in_models()
    models: dict[str, str] = {}

    def look() -> str:
        models["generate"] = _value(connection, "SELECT ml_rag._default_model()")
        models["query"] = _value(
            connection, "SELECT coalesce(ml_rag._get_setting('query_model_id'), ml_rag._default_model())"
        )
        return ", ".join(models.values())

    def is_lacking(model: str) -> bool:
        return model == EXTRACTIVE or bool(known.get(model, {}).get("brief"))

    looked = run("language models", look)
    if not looked.ok:
        yield looked
        return
    if is_lacking(models["generate"]):
        yield Finding(
            "answers",
            True,
            "extractive answers with sentences of the documents: no capable language model is there"
            if models["generate"] == EXTRACTIVE
            else f"{models['generate']} is there to try things out: it often repeats a passage instead of answering",
            f"{after_pull(connection, USABLE)}SELECT ml_rag.configure('generate_model_id', '{USABLE}'). Ollama, or "
            "another endpoint: docs/models.md. ml-rag models recommend names models for the server's machine.",
        )
    for check, model, found, setting in (
        ("rewriting", "query", "follow-ups and other words (query_options)", "query_model_id"),
        (
            "conditions",
            "query",
            'conditions that a question states ("query_options": {"filters": true})',
            "query_model_id",
        ),
        ("SQL", "generate", "questions about tables (ml_nl_sql)", "generate_model_id"),
    ):
        if is_lacking(models[model]):
            line = f"{after_pull(connection, CAPABLE)}SELECT ml_rag.configure('{setting}', '{CAPABLE}')."
            yield Finding(check, True, f"{found} need a language model", line)


def diagnose(dsn: str) -> Iterator[Finding]:
    """All checks, in an order in which each builds on those before it."""
    connections: list[psycopg.Connection] = []

    def connect() -> str:
        connections.append(psycopg.connect(dsn, autocommit=True, connect_timeout=5))
        refuse_borrowed_role(connections[0], PIN)
        return "reached"

    connected = run("database", connect)
    yield connected
    if not connected.ok:
        return
    with connections[0] as connection:
        findings = list(check_extension(connection))
        yield from findings
        if not all(finding.ok for finding in findings):
            return
        address = _value(connection, "SELECT ml_rag._get_setting('model_server')")
        yield from check_keyword(connection)
        yield from check_vectorizers(connection)
        yield from check_roles(connection)
        yield from check_server(address)
        yield from check_models(connection)
        yield from check_calls(connection, dsn)
        yield from check_language_models(connection)


@click.command()
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def doctor(ctx: click.Context, dsn: str, as_json: bool) -> None:
    """Check the whole chain, and say what to do about what is wrong.

    Exit status 1 where anything is wrong.
    """
    findings = list(diagnose(dsn))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            # Text, not markup: what was found may hold brackets
            found = Text(printable_lines(finding.found))
            if finding.hint:
                found.append(f"\n{printable_lines(finding.hint)}", style="bold")
            mark = Text("WRONG", style="bold red")
            if finding.ok:
                mark = Text("note", style="yellow") if finding.hint else Text("ok", style="green")
            table.add_row(mark, finding.check, found)
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    ctx.exit(0 if all(finding.ok for finding in findings) else 1)
