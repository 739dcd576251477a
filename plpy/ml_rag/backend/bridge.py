"""What the PL/Python functions of sql/ call. One bridge turns this package's errors into SQL errors.

The first call of a session waits for these imports, so what only loads need is imported by them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ml_rag.backend import calls as _calls
from ml_rag.backend import embed as _embed
from ml_rag.backend import generate as _generate
from ml_rag.backend import indexes as _indexes
from ml_rag.backend import monitoring as _monitoring
from ml_rag.backend import rerank as _rerank
from ml_rag.backend import rewrite as _rewrite
from ml_rag.backend import rights as _rights
from ml_rag.backend.client import ModelServer
from ml_rag.backend.retrieval.sqltext import in_encoding
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.errors import (
    DocumentError,
    EngineFailed,
    InvalidRequest,
    MlRagError,
    ModelUnavailable,
    PrivilegeError,
    reasons,
)

P = ParamSpec("P")
R = TypeVar("R")

_session: dict[str, Any] = {}


def as_jsonb(value: Any) -> str:
    """JSON text that PostgreSQL takes: without NUL and halves of surrogate pairs, which its text cannot hold.

    Raises EngineFailed for NaN and infinity.
    """
    try:
        return _storable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError as e:
        raise EngineFailed("unexpected reply from the model server", detail=f"No JSON: {e}.") from None


def _storable(text: str) -> str:
    """JSON text without what PostgreSQL cannot hold."""
    if "\\u0000" in text:  # an escaped NUL, but not an escaped backslash before the letters u0000
        text = re.sub(r"(?<!\\)((?:\\\\)*)\\u0000", r"\1", text)
    return text.encode("utf-8", "replace").decode()


def _parsed(text: str) -> Any:
    """JSON text of PostgreSQL that has something of a caller's in it.

    Raises InvalidRequest for what jsonb takes and Python does not.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest("an option is nested too deeply") from None
    except ValueError as e:
        raise InvalidRequest("an option has a number that is out of range", detail=f"{e}.") from None


def _where(error: BaseException) -> str:
    """Its class and place. Not its words: they can hold a caller's text, and a detail ends up in PostgreSQL's log."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f", {os.path.basename(place.tb_frame.f_code.co_filename)} line {place.tb_lineno}" if place else ""
    return f"{type(error).__name__}{where}."


def outcome(function: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], tuple[R | None, str | None]]:
    """Make ``function`` return (result, None) or (None, error as JSON text) and never raise.

    The PL/pgSQL around it raises the error (ml_rag._raise). An exception that leaves PL/Python would come out with
    the name of its Python class before the message, also a cancelled statement's.
    """

    @functools.wraps(function)
    def wrapper(plpy: Any, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R | None, str | None]:
        try:
            return function(in_encoding(plpy), *args, **kwargs), None
        except MlRagError as e:
            error = {"sqlstate": e.sqlstate, "message": e.message, "detail": e.detail, "hint": e.hint}
        except (plpy.SPIError, plpy.Error) as e:  # the latter: a cancel that comes with a message to the client
            _, detail, hint, _, _, schema, table, _, _, constraint, *_ = getattr(e, "spidata", None) or [None] * 10
            error = {"sqlstate": sqlstate(e), "message": str(e)}
            error |= {key: text for key, text in (("detail", detail), ("hint", hint)) if text}
            if schema and table and constraint:
                error |= {"schema": schema, "table": table, "constraint": constraint}
        except Exception as e:  # noqa: BLE001 - a defect of ours, but still not XX000
            error = {"sqlstate": EngineFailed.sqlstate, "message": "internal error in ml_rag", "detail": _where(e)}
        return None, as_jsonb(error)

    return wrapper


#: functions that sql/ calls by their names: ml_rag._python
_doors: dict[str, Callable[..., Any]] = {}


def door(function: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let ``function`` be called by its name, by all who may call the functions of ml_rag."""
    _doors[function.__name__] = function
    return function


@outcome
def call_by_name(plpy: Any, name: str, given: str) -> str:
    """What a door returns, as JSON text, which it may be already; ``given``: JSON text of an array of its arguments."""
    if name not in _doors:
        raise InvalidRequest("the function does not exist", detail=f"Its name is {name[:80]!r}.")
    found = _doors[name](plpy, *_parsed(given))
    return found if isinstance(found, str) else as_jsonb(found)


def server(plpy: Any) -> ModelServer:
    """The session's connection to the model server; the address is read anew, so that a change takes effect."""
    address = _address(plpy)
    connection: ModelServer | None = _session.get("server")
    if connection is None or connection.address != address:
        if connection is not None:
            connection.close()
        connection = _session["server"] = ModelServer(address, functools.partial(_interrupt, plpy))
    return connection


def _address(plpy: Any) -> str:
    if "address" not in _session:
        # with the schemas of operators, as loads, which commit, are under the path of the session
        (default,) = plpy.execute(
            "SELECT s.default_value FROM ml_rag.setting AS s WHERE s.name OPERATOR(pg_catalog.=) 'model_server'"
        )
        _session["default"] = default["default_value"]
        # the table itself: the view around it would cost as much again
        _session["address"] = plpy.prepare(
            "SELECT v.value FROM ml_rag.setting_value AS v WHERE v.name OPERATOR(pg_catalog.=) 'model_server'"
        )
    changed = plpy.execute(_session["address"])
    address: str = changed[0]["value"] if changed else _session["default"]
    return address


def _interrupt(plpy: Any) -> None:
    """Executing any statement is what makes PostgreSQL look at its interrupts. The client hears how far the call is."""
    if "interrupt" not in _session:
        _session["interrupt"] = plpy.prepare("SELECT 1")
    plpy.execute(_session["interrupt"])
    _calls.session.pace.repeat(plpy)


@contextlib.contextmanager
def _apart(plpy: Any) -> Iterator[ModelServer]:
    """A connection for the monitoring views: that of the session may be in the middle of a reply when a trigger asks.
    It reads the address with the rights of ``ml_rag_internal``, since a role that may watch may lack the right to
    ask."""
    apart = ModelServer(_rights.as_owner(plpy, lambda: _address(plpy)), functools.partial(_interrupt, plpy))
    try:
        yield apart
    finally:
        apart.close()


@outcome
def commit(plpy: Any) -> bool:
    """Commit; whether that was allowed: it is not inside a transaction block or a function."""
    committed = _rights.commit(plpy)
    # a cancel that came meanwhile fails the job, which gives back what it holds; nothing sees one between two steps
    _interrupt(plpy)
    return committed


def next_step(
    plpy: Any, schema: str, job: int | None, routine: str, given: str, call: int | None, committed: bool | None,
    found: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The next statement of a job, its result, or its error; see ``ml_rag.backend.jobs.loop``."""
    from ml_rag.backend.jobs import KINDS, loop

    step: dict[str, Any] = dict.fromkeys(
        ("given", "statement", "vectors", "by_index", "shard", "result", "fallback", "error")
    )
    step["job"] = job

    @outcome
    def advance(plpy: Any) -> None:
        if job is None:
            session = loop.Session(plpy, functools.partial(server, plpy), schema, routine, given, call)
            module, name = KINDS[routine]
            kind = getattr(importlib.import_module(f"ml_rag.backend.jobs.{module}"), name)
            step["job"] = loop.begin(kind(session))
        following = loop.advance(step["job"], committed, found)
        if isinstance(following, dict):
            step["result"] = as_jsonb(following)
        elif following is not loop.COMMIT:
            step["statement"], step["given"] = following.text, following.given
            step["vectors"], step["by_index"] = following.vectors, following.by_index
            step["shard"] = following.shard and json.dumps(following.shard)
        if (fallback := loop.fallback(step["job"])) is not None:
            step["fallback"] = as_jsonb(fallback)

    _, step["error"] = advance(plpy)
    return step


@door
def stop_work(plpy: Any, job: int | None) -> None:
    """Forget a job that has failed, and give back what the session holds for it."""
    if "ml_rag.backend.jobs.loop" in sys.modules:
        from ml_rag.backend.jobs import loop

        loop.stop(job)


@door
def reach(plpy: Any) -> None:
    """Whether something listens at the address of the model server."""
    server(plpy).reach()


@door
def get(plpy: Any, path: str) -> dict[str, Any]:
    """The reply of /healthz or /v1/models."""
    if path not in ("/healthz", "/v1/models"):
        raise InvalidRequest("not a path that may be asked for", detail=path)
    reply = server(plpy).call("GET", path)
    if not isinstance(reply, dict):
        raise EngineFailed("unexpected reply from the model server", detail="No JSON object.")
    return reply


@outcome
def shown_calls(plpy: Any, what: str) -> str:
    """activity or stats, as JSON text: see ``ml_rag.backend.monitoring``."""
    with _apart(plpy) as model_server:
        return _monitoring.shown(plpy, model_server, what)


@outcome
def reset_stats(plpy: Any) -> float:
    """Count anew; the time from which on, seconds since 1970."""
    with _apart(plpy) as model_server:
        return _monitoring.reset(plpy, model_server)


@outcome
def embed(plpy: Any, texts: list[str], model_id: str, input_type: str | None, truncate: bool) -> list[str]:
    """The vectors of the texts, in pgvector's text form."""
    with _calls.waiting(plpy, "ml_rag.embed", "embed", model_id):
        return _embed.embed(server(plpy), texts, model_id, input_type, truncate)


@door
def count_tokens(plpy: Any, texts: list[str], model_id: str) -> list[int | None] | None:
    """The tokens of each text, as the embedding model reads it."""
    return _embed.count_tokens(server(plpy), texts, model_id)


@door
def rerank(plpy: Any, query: str, texts: list[str], model_id: str) -> list[float]:
    """The relevance of each text to the query, 0-1."""
    with _calls.waiting(plpy, "ml_rag.rerank", "rerank", model_id):
        return _rerank.rerank(server(plpy), query, texts, model_id)


@door
def generate(plpy: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request made by sql/pipeline/generate.sql."""
    with _calls.waiting(plpy, "ml_rag.generate", "generate", request["options"]["model_id"]):
        answer = _generate.generate(server(plpy), request)
        _calls.tokens(answer)
    return answer


@door
def table_distances(plpy: Any, query: str, texts: list[str], model_id: str) -> list[float]:
    """Cosine distances of descriptions of tables from a question; see ``ml_rag.backend.tables``."""
    from ml_rag.backend import tables

    with _calls.waiting(plpy, "ml_rag.embed", "embed", model_id):
        return tables.distances(plpy, server(plpy), query, texts, model_id)


@door
def nl_sql(plpy: Any, request: dict[str, Any]) -> str:
    """The answer to a request made by sql/nlsql/question.sql, as JSON text; see ``ml_rag.backend.nl_sql``."""
    from ml_rag.backend import nl_sql

    def generate(prompt: dict[str, Any]) -> str:
        with _calls.waiting(plpy, "ml_rag.generate", "generate", request["model_id"]):
            answer = _generate.generate(server(plpy), prompt)
            _calls.tokens(answer)
        text: str = answer["text"]
        return text

    return _storable(nl_sql.answer(plpy, generate, request))


@door
def names_in(plpy: Any, statement: str) -> dict[str, Any]:
    """What a statement may name: {"names", "operators"}; see ``ml_rag.backend.names``."""
    from ml_rag.backend import names
    from ml_rag.backend.statement import MAX_CHARACTERS

    if len(statement) > MAX_CHARACTERS:  # any role may call this, and it takes the square of it
        raise InvalidRequest("the statement is too long", detail=f"It may have {MAX_CHARACTERS} characters.")
    return {"names": names.names_in(statement), "operators": names.operators_in(statement)}


def fits(size: int) -> bool:
    """Whether a row of a statement may come to Python; see ``ml_rag.backend.statement``."""
    from ml_rag.backend import statement

    return statement.fits(size)


@door
def rewrite(plpy: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What is searched with, of a request made by sql/pipeline/rewrite.sql: the fields of ml_rag.rewritten."""
    with _calls.waiting(plpy, "ml_rag.rewrite", "rewrite", request["model_id"]):
        found = _rewrite.rewrite(server(plpy), request)
        _calls.tokens(found)
    return found


def _stop_words(plpy: Any, language: str) -> Callable[[Collection[str]], set[str]]:
    """Those among words that a text search configuration leaves out."""
    if "stops" not in _session:
        _session["stops"] = plpy.prepare(
            "SELECT w.word FROM pg_catalog.unnest($1) AS w (word)"
            " WHERE pg_catalog.length(pg_catalog.to_tsvector($2::pg_catalog.regconfig, w.word))"
            " OPERATOR(pg_catalog.=) 0",
            ["text[]", "text"],
        )
    return lambda words: {row["word"] for row in plpy.execute(_session["stops"], [list(words), language])}


def _pause(plpy: Any) -> Callable[[], None]:
    """``_interrupt``, but not more often than is of use."""
    last = time.monotonic()

    def pause() -> None:
        nonlocal last
        if time.monotonic() - last > 0.02:
            _interrupt(plpy)
            last = time.monotonic()

    return pause


@door
def check_grounding(
    plpy: Any, answer: str, texts: list[str], question: str, options: dict[str, Any], language: str
) -> dict[str, Any]:
    """The reply of ml_check_grounding, and ``supported_text``: the answer without unsupported claims."""
    from ml_rag.backend import grounding

    claims = grounding.check(answer, texts, question, _stop_words(plpy, language), _pause(plpy))
    if options["model"] != "hybrid":
        with _calls.waiting(plpy, "ml_check_grounding", "judge", options["model"]):
            grounding.judge(server(plpy), claims, texts, options["model"])
    threshold = options["citation_threshold"]
    reply = grounding.report(claims, texts, threshold, with_claims=options["claims"])
    return reply | {"supported_text": grounding.supported(answer, claims, threshold)}


@door
def write(plpy: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The text that a request of sql/pipeline/generate.sql asks for; see ``ml_rag.backend.answer``."""
    from ml_rag.backend import answer

    def check(text: str) -> dict[str, Any]:
        rag, texts = request["rag"], [document["text"] for document in request["documents"] or ()]
        return check_grounding(plpy, text, texts, rag["question"], rag["grounding"], rag["language"])

    return answer.write(plpy, functools.partial(generate, plpy), check, request)


@door
def highlights(plpy: Any, question: str, texts: list[str], language: str) -> list[Any]:
    """An array for each text; see ``ml_rag.backend.highlights``."""
    from ml_rag.backend import highlights as found

    return found.highlights(question, texts, _stop_words(plpy, language), _pause(plpy))


@door
def answer_measures(plpy: Any, answer: str | None, expected: list[str | None]) -> dict[str, float]:
    """How an answer agrees with those that are expected; see ``ml_rag.backend.measures``."""
    from ml_rag.backend import measures

    return measures.of_answer(answer, expected)


@door
def make_nodes(plpy: Any, options: dict[str, Any], text: str, around: dict[str, Any]) -> list[str]:
    """The nodes of a text, by the options of a node group; ``around``: the document that the text is a part of."""
    from ml_rag.backend import nodes

    transform = options["transform"]
    if transform in ("sentence", "paragraph"):
        return nodes.split(transform, text, functools.partial(_interrupt, plpy))
    request = {key: options.get(key) for key in ("transform", "model_id", "prompt")} | around

    def write(part: str) -> list[str]:
        with _calls.waiting(plpy, "ml_rag.generate", "generate", options["model_id"]):
            made, tokens = nodes.write(server(plpy), request | {"text": part})
            _calls.tokens(tokens)
        return made

    return nodes.asked(write, transform, text)


@door
def node_calls(plpy: Any, transform: str, texts: list[str | None]) -> int:
    """How often a model is asked about texts."""
    from ml_rag.backend import nodes

    return sum(nodes.calls(transform, text) for text in texts)


@door
def named_documents(plpy: Any, question: str, documents: list[Any]) -> dict[str, Any]:
    """Which documents a question names, and whether it asks for nothing but a summary.

    ``documents``: an array of [name, [titles]].
    """
    from ml_rag.backend.documents import named

    found = named(question, documents, lambda: plpy.execute("SELECT 1"))
    return {"names": found.names, "is_summary": found.is_summary}


@door
def why_not(plpy: Any, request: dict[str, Any], document: str, number: int | None, page: int | None) -> str:
    """What became of a segment in a call, as JSON text; see ``ml_rag.backend.why``."""
    from ml_rag.backend import why

    return why.follow(plpy, request, document, number, page)


def keyword(name: str = "keyword") -> ModuleType:
    """The module that scores keyword queries, or ``runs``, which writes their indexes: those that need numpy.

    Raises ModelUnavailable (55000) where the server's python3 lacks it.
    """
    # numpy's linear algebra would start a thread for each core, in a process that must have one only
    before = {variable: os.environ.get(variable) for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    if "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(before, "1"))
    try:
        return importlib.import_module(f"ml_rag.backend.{name}")
    except ImportError as e:
        raise ModelUnavailable(
            "keyword search needs numpy in the database server's python3",
            # numpy for another version is there but for its compiled part, and then speaks of many things
            detail=f"PL/Python here is Python {sys.version_info[0]}.{sys.version_info[1]}: {str(e).splitlines()[0]}.",
            hint="Install the package python3-numpy on the machine of the database, then connect again. Where it is"
            " there, but for another Python, as after an upgrade of the distribution, upgrade PostgreSQL too.",
        ) from None
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


@door
def numpy_version(plpy: Any) -> str:
    """The version of numpy that keyword search runs with, as JSON text."""
    return json.dumps(keyword().np.__version__)


@door
def keyword_indexes(plpy: Any, store: int | None) -> list[dict[str, Any]]:
    """The keyword indexes that the caller may search, or the one of a table."""
    return _indexes.of_caller(plpy, store)


@outcome
def discover_stores(
    plpy: Any, names: list[str] | None, excluded: list[str] | None, schemas: list[str] | None, columns: str | None,
    model: str | None, unmarked: bool | None, schema: str,
) -> str:  # fmt: skip
    """The records ml_rag.store of the stores that the caller may search, as JSON text; the arguments are those of
    ml_rag.discover. ``schema``: pgvector's, as it is written."""
    from ml_rag.backend.retrieval import stores

    def present(given: list[str] | None) -> tuple[str, ...] | None:
        return None if given is None else tuple(name for name in given if name is not None)

    mapped = _parsed(columns or "{}") or {}
    wanted = stores.Wanted(
        *(present(names), present(excluded), present(schemas)),
        columns=tuple((key, key if name is None else str(name)) for key, name in mapped.items()),
        model=model,
        unmarked=bool(unmarked),
    )
    found = stores.discover(plpy, schema, stores.now(plpy, schema), wanted)
    return as_jsonb([stores.record(store) for store in found])


@outcome
def compile_question(
    plpy: Any, question: str, options: str, vector: str | None, form: str, call: int | None, session: list[str | None],
    schema: str,
) -> str | None:  # fmt: skip
    """What a question finds, as JSON text: with ``form`` citations or rows if that is all that the call is about, else
    None; hits (and all, what each arm has found) of ml_rag.request; shard, what another server asks; statement, its
    text. See
    ``ml_rag.backend.retrieval.run``. ``session``: the fields of ``search.Session``. ``schema``: pgvector's, quoted."""
    from ml_rag.backend.retrieval import run, search

    retrieval = run.Retrieval(plpy, schema, search.Session.of(session), keyword, call)
    if form == "shard":
        return retrieval.as_shard(json.loads(options))
    if form == "statement":
        return as_jsonb(retrieval.statement(question, options, vector))
    if form.startswith("hits"):
        return retrieval.hits(options, question, vector, form.removeprefix("hits").strip())
    return retrieval.answer(question, options, vector, form)


@door
def keyword_statistics(plpy: Any, store: int, segment: str, key: list[str], terms: list[str]) -> Any:
    """Rows, tokens and document frequencies of a keyword index; see ``ml_rag.backend.keyword``."""
    return _rights.at_one_moment(plpy, lambda: keyword().statistics(plpy, store, segment, key, terms))


def run_handed() -> None:
    """What ``rights.as_owner`` holds ready; for the functions that have the rights of ``ml_rag_internal``."""
    _rights.run_handed()


@door
def build_keyword_index(plpy: Any, index: dict[str, Any], call: int | None) -> None:
    """Make the keyword index of a table of the caller's, described by a row of keyword_store."""
    keyword("runs").build(plpy, index, call)


@door
def drop_keyword_index(plpy: Any, store: int) -> None:
    """Drop the keyword index of a table of the caller's."""
    keyword("runs").drop(plpy, store)


@door
def index_cursor(plpy: Any, store: int, rows: str) -> int:
    """Index the rows (key, segment) of an open cursor; for the triggers, which run as ``ml_rag_internal``."""
    added: int = keyword("runs").add_from_cursor(plpy, store, rows)
    return added


@door
def merge_keywords(plpy: Any, store: int, thorough: bool) -> None:
    """Fold what waits in a keyword index into its runs; for the triggers, which run as ``ml_rag_internal``."""
    keyword("runs").merge(plpy, store, thorough)


@door
def merge_own_keywords(plpy: Any, store: int) -> None:
    """Merge all of the keyword index of a table of the caller's."""
    keyword("runs").merge_own(plpy, store)


def _check_file_privilege(plpy: Any) -> None:
    """Stop a caller who may not read the server's files: the functions that do can be called by themselves."""
    role = plpy.execute(
        "SELECT pg_catalog.quote_ident(current_user) AS name,"
        " pg_catalog.pg_has_role(current_user, 'pg_read_server_files', 'USAGE') AS may_read"
    )[0]
    if not role["may_read"]:
        raise PrivilegeError(
            "permission denied to read files of the server",
            detail=f'Only roles with privileges of "pg_read_server_files" may; {role["name"]} has none.',
            hint='Ask for GRANT pg_read_server_files, or load from the client\'s side with "ml-rag load".',
        )


@door
def find_files(plpy: Any, uri: str) -> str:
    """What a URI names, as JSON text: files (sorted paths), left_out (folders that cannot be read, each with its
    error), base and patterns, table_name (the default one).
    """
    from ml_rag import files

    _check_file_privilege(plpy)
    location = files.parse(uri)
    left_out: list[list[str | None]] = []
    found = files.find(
        location,
        lambda: plpy.execute("SELECT 1"),
        lambda folder, e: left_out.append([_to_hex(folder), e.message, e.detail, e.hint]),
    )
    return json.dumps(
        {
            "files": list(map(_to_hex, found)),
            "left_out": left_out,
            "base": location.base,
            "patterns": location.patterns,
            "table_name": files.table_name(location),
        }
    )


def _to_hex(path: str) -> str:
    """The bytes of a name in hexadecimal, since a name need not be UTF-8."""
    return path.encode("utf-8", "surrogateescape").hex()


def _from_hex(path: str) -> str:
    return bytes.fromhex(path).decode("utf-8", "surrogateescape")


def _held(plpy: Any) -> Callable[[str], str]:
    """A text as the encoding of the database can hold it: with ? where characters are not in it."""
    if plpy.execute("SELECT pg_catalog.getdatabaseencoding() AS name")[0]["name"] == "UTF8":
        return lambda text: text
    from ml_rag.files import storable

    plan = plpy.prepare("SELECT $1", ["pg_catalog.text"])

    def held(text: str) -> str:
        try:
            plpy.execute(plan, [storable(text)])
        except plpy.SPIError as e:
            if not sqlstate(e).startswith("22"):
                raise
            return text.encode("ascii", "replace").decode()
        return text

    return held


@outcome
def load_files(plpy: Any, job_text: str, former: str | None) -> str:
    """Bring the files of a job (made by sql/store/load.sql) into its store; commits after each batch where it can.
    ``former``: what the loads before have returned."""
    from ml_rag import files
    from ml_rag.backend import load
    from ml_rag.backend.store import SqlStore

    _check_file_privilege(plpy)
    job = _parsed(job_text)
    location = files.Location(job["base"], tuple(job["patterns"]))
    base = None if location.file else location.base
    store = SqlStore(plpy, job, _embedder(plpy), may_commit=True)
    total = len(job["files"]) + len(job["left_out"])
    tell = functools.partial(_tell, plpy, job["relation"], total)
    loader = load.Loader(job, server(plpy), store, functools.partial(tell, "loading documents"), *_splitter(plpy, job))
    held = _held(plpy)
    found = list(map(_from_hex, job["files"]))
    for folder, message, detail, hint in job["left_out"]:
        loader.outcome.fail(held(_from_hex(folder)), DocumentError(message, detail=detail, hint=hint), known=False)
    paths = [path for path in found if held(path) == path]
    for path in sorted(set(found).difference(paths)):
        lacks = DocumentError(
            "the file name is not valid text", detail="The encoding of the database lacks a character."
        )
        loader.outcome.fail(held(path), lacks, known=False)
    with store.held(), files.Reading() as reading:
        for batch in files.batches(files.sizes(paths, store.interrupt)):
            readers = [
                functools.partial(reading.read, path, base, files.MAX_DOCUMENT_BYTES, store.interrupt) for path in batch
            ]
            loader.load(list(zip(batch, readers, strict=True)))
        if job["refresh"] and location.is_folder:
            there = set(found)
            gone = [name for name in store.below(location.prefix) if name not in there and location.matches(name)]
            known = files.Listings()
            if gone := [name for name in gone if files.is_gone(name, store.interrupt, known)]:
                tell("removing documents", total, loader.outcome.counts["failed"], loader.outcome.segments)
                loader.outcome.counts["removed"] = store.remove(gone)
                store.commit()
    tell("indexing", total, loader.outcome.counts["failed"], loader.outcome.segments)
    result = loader.result()
    load.warn(plpy, reasons(result["failed"]))
    return json.dumps(load.joined(None if former is None else json.loads(former), result))


def _embedder(plpy: Any) -> Callable[[list[str], str], list[str]]:
    return lambda texts, model_id: _embed.embed(server(plpy), texts, model_id, "document")


def _splitter(
    plpy: Any, job: dict[str, Any]
) -> tuple[Callable[[str], list[str]] | None, Callable[[list[str], str], list[str]] | None]:
    """``split`` and ``embed`` of a Loader, where a function of the caller's splits the documents of a job."""
    if "splitter" not in job:
        return None, None
    from ml_rag.backend.store import split, split_plan

    function = job["splitter"]  # a name that ml_rag._find_function has found and quoted
    return functools.partial(split, plpy, split_plan(plpy, function), function), _embedder(plpy)


def _tell(plpy: Any, relation: str, total: int, phase: str, done: int, failed: int, segments: int) -> None:
    _calls.progress(plpy, _calls.innermost(), relation, phase, done, total, failed, segments)


@outcome
def load_contents(plpy: Any, job_text: str, names: list[str], contents: list[bytes]) -> str:
    """Bring documents that the client has sent into the store of a job."""
    from ml_rag import files
    from ml_rag.backend.load import Loader
    from ml_rag.backend.store import SqlStore

    job = _parsed(job_text)
    store = SqlStore(plpy, job, _embedder(plpy), may_commit=False)
    tell = functools.partial(_tell, plpy, job["relation"], len(names), "loading documents")
    loader = Loader(job, server(plpy), store, tell, *_splitter(plpy, job))
    dates = job["file_dates"] or [{}] * len(names)
    content = {name: files.File(*file) for name, *file in zip(names, contents, dates, strict=True)}
    for batch in files.batches([(name, len(content[name].content)) for name in names]):
        loader.load([(name, functools.partial(content.__getitem__, name)) for name in batch])
    return json.dumps(loader.result())


@door
def unchanged_contents(plpy: Any, job: dict[str, Any], names: list[str], hashes: list[str]) -> list[str]:
    """Names of those documents that ``load_contents`` would leave alone."""
    from ml_rag import files
    from ml_rag.backend.load import has_all, is_made_of
    from ml_rag.backend.store import SqlStore

    given = files.Given(job["metadata"], job["document_metadata"])
    states = SqlStore(plpy, job, _embedder(plpy), may_commit=False).states(names)
    return [
        name
        for name, sha256 in zip(names, hashes, strict=False)
        if name in states
        and (not job["refresh"] or is_made_of(states[name], sha256, job["made_with"]))
        and has_all(states[name], given.of(name) if job["refresh"] else {})
    ]
