"""A local page that shows why an answer is what it is. Needs ``pip install ".[explore]"``.

Pages without scripts: what the role of the DSN reads in read-only transactions, as HTML that Jinja escapes. Only marks
are written, into a table that the command names, and documents that are uploaded, by ml_rag.load_document. Any user who
has the token of the process may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlencode

import psycopg
from jinja2 import Environment, PackageLoader, StrictUndefined
from psycopg import sql
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ml_rag.errors import InvalidRequest, MlRagError
from ml_rag.integrations import chart, documents, marked, picture
from ml_rag.integrations.database import PRESETS, Query, Reader, asked, keys_of, worded
from ml_rag.integrations.fields import OPTIONS, Field, Wrong, fields, joined, parsed, split
from ml_rag.integrations.journey import Journey, key, look, moves, retrieve, write
from ml_rag.integrations.waiting import Stream, cancelled_once, waited_for
from ml_rag.search_path import refuse_borrowed_role, refuse_borrowed_role_async

#: characters of a question
QUESTION = 10_000
#: bytes of a form
FORM = 64 * 1024
#: bytes of a document that is uploaded
UPLOAD = 64 * 1024 * 1024
#: names of documents in the hint of a stage
_MEANT = re.compile(r'(?<=mean |. or )"(.+?)"(?= or "|\?$)')
#: characters of a document's title
_TITLE = 200
#: segments of a document, runs and questions of a run on one page
SEGMENTS = 50
#: characters of them
CHARACTERS = 1_000_000
RUNS = 50
#: where a page that is sent as it comes about is to be sent as far as it is
FLUSH = "\f"
#: candidates that are shown at first
FEW = 15
QUESTIONS = 100
#: characters in which two segments are compared for an overlap
OVERLAP = 2_000

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_WHO = sql.SQL("SELECT current_user::text AS role, pg_catalog.current_database()::text AS database")
_STORES = sql.SQL('SELECT d.vector_store FROM ml_rag.discover() AS d ORDER BY d.vector_store COLLATE "C" LIMIT 200')
_ALL_STORES = sql.SQL(
    """SELECT d.vector_store, d.embed_model_id, d.dimensions, c.reltuples,
      pg_catalog.obj_description(c.oid, 'pg_class') AS description
    FROM ml_rag.discover() AS d JOIN pg_catalog.pg_class AS c ON c.oid = d.relation
    ORDER BY d.vector_store COLLATE "C" LIMIT 1000"""
)
_MODELS = sql.SQL('SELECT m.model_id, m.task FROM {}() AS m WHERE m.available ORDER BY m.model_id COLLATE "C"')
_STORE = sql.SQL(
    "SELECT d.relation::pg_catalog.oid AS oid FROM ml_rag.discover() AS d WHERE d.vector_store = %(store)s"
)
#: after the wait for other loads, which any role can lengthen
_JUDGE = sql.SQL(
    "SELECT ml_rag._refuse_untrusted(%(oid)s::pg_catalog.oid) FROM ("
    "SELECT pg_catalog.pg_advisory_xact_lock(ml_rag._store_key(%(oid)s::pg_catalog.oid)) OFFSET 0) AS l"
)
_LOAD = sql.SQL(
    "SELECT ml_rag.load_document(%(oid)s::pg_catalog.oid::pg_catalog.regclass, %(name)s, %(content)s) AS outcome"
)
_WHY = sql.SQL("SELECT w.* FROM ml_rag.why_not(%(query)s, %(options)s, %(document)s, %(segment)s) AS w")
# Everybody writes runs of their own, and a superuser reads all of them: the page lists those of its role, and texts are
# cut before they come.
_RUNS = sql.SQL(
    """SELECT r.run_id, pg_catalog.left(r.name, 200) AS name, r.started_at, r.questions, r.measures
    FROM ml_rag.evaluation_run AS r WHERE r.role = current_user ORDER BY r.run_id DESC LIMIT %(most)s"""
)
_RUN = sql.SQL(
    """SELECT r.run_id, pg_catalog.left(r.name, 200) AS name, r.seconds, r.questions, r.measures,
      pg_catalog.left(r.source, 2000) AS source, pg_catalog.left(pg_catalog.jsonb_pretty(r.options), 20000) AS options
    FROM ml_rag.evaluation_run AS r WHERE r.run_id = %(run)s"""
)
_QUESTIONS = sql.SQL(
    """SELECT pg_catalog.left(q.question, 10000) AS question, pg_catalog.jsonb_array_length(q.citations) AS citations,
      q.measures, pg_catalog.left(q.sqlstate, 5) AS sqlstate, pg_catalog.left(q.message, 1000) AS message,
      count(*) OVER () AS total
    FROM ml_rag.evaluation_question AS q WHERE q.run_id = %(run)s
    ORDER BY (q.measures ->> %(measure)s::pg_catalog.text)::float8 NULLS FIRST, q.question_id COLLATE "C"
    OFFSET %(first)s LIMIT %(most)s"""
)
_COMPARED = sql.SQL("SELECT c.* FROM {}(%(a)s::bigint, %(b)s::bigint) AS c")
_CHANGED = sql.SQL(
    """SELECT q.question, q.a, q.b, q.b - q.a AS difference, q.total
    FROM (
      SELECT x.question_id, pg_catalog.left(x.question, 10000) AS question,
        (x.measures ->> %(measure)s::pg_catalog.text)::float8 AS a,
        (y.measures ->> %(measure)s::pg_catalog.text)::float8 AS b, count(*) OVER () AS total
      FROM ml_rag.evaluation_question AS x JOIN ml_rag.evaluation_question AS y ON y.question_id = x.question_id
      WHERE x.run_id = %(a)s AND y.run_id = %(b)s
    ) AS q
    ORDER BY pg_catalog.abs(q.b - q.a) DESC NULLS LAST, q.question_id COLLATE "C" OFFSET %(first)s LIMIT %(most)s"""
)
_IN_RUNS = sql.SQL(
    """SELECT r.run_id, pg_catalog.left(r.name, 200) AS name, q.measures, pg_catalog.left(q.sqlstate, 5) AS sqlstate,
      pg_catalog.left(q.message, 1000) AS message,
      CASE WHEN pg_catalog.jsonb_typeof(r.options -> 'options') = 'object'
        AND pg_catalog.length((r.options -> 'options')::pg_catalog.text) <= %(options)s
        THEN (r.options -> 'options')::pg_catalog.text END AS options,
      (SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
          'document_name', pg_catalog.left(c.value ->> 'document_name', 1000),
          'segment_number', pg_catalog.left(c.value ->> 'segment_number', 20),
          'is_right', c.value -> 'relevant' = 'true') ORDER BY c.place)
        FROM pg_catalog.jsonb_array_elements(q.citations) WITH ORDINALITY AS c (value, place)
        WHERE c.place <= 10) AS citations
    FROM ml_rag.evaluation_question AS q JOIN ml_rag.evaluation_run AS r USING (run_id)
    WHERE q.question = %(question)s AND r.role = current_user ORDER BY r.run_id DESC LIMIT %(most)s"""
)
_RELATION = sql.SQL("SELECT pg_catalog.to_regclass(%(name)s)::pg_catalog.oid AS oid")
_NAMES = sql.SQL(
    "SELECT n.nspname, c.relname FROM pg_catalog.pg_class AS c"
    " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s"
)
_TRUSTED = sql.SQL("SELECT ml_rag._are_trusted(ml_rag._read_with(%(oid)s))")
#: false of one that is not there; else no other one takes its name until the end of the transaction
_HOLD = sql.SQL(
    "SELECT h.is_held AND pg_catalog.to_regclass(%(name)s)::pg_catalog.oid OPERATOR(pg_catalog.=) h.oid AS is_held"
    " FROM (SELECT r.oid, ml_rag._hold_trusted(ARRAY[r.oid]) AS is_held"
    " FROM (SELECT pg_catalog.to_regclass(%(name)s)::pg_catalog.oid AS oid OFFSET 0) AS r OFFSET 0) AS h"
)
_MARKED = sql.SQL(
    "SELECT m.vector_store, m.document, m.segment_number, m.is_right FROM {} AS m"
    " WHERE m.question = %(question)s LIMIT 1000"
)
_UNMARK = sql.SQL(
    "DELETE FROM {} WHERE question = %(question)s AND vector_store = %(vector_store)s AND document = %(document)s"
    " AND segment_number IS NOT DISTINCT FROM %(segment_number)s::bigint"
)
_MARK = sql.SQL(
    "INSERT INTO {} (question, vector_store, document, segment_number, is_right)"
    " VALUES (%(question)s, %(vector_store)s, %(document)s, %(segment_number)s::bigint, %(is_right)s)"
)

Got = TypeVar("Got")


class Guard:
    """Lets through who has the token: in the URL once, then as a cookie, or in a header."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token, f"ml_rag_explore_{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = self._refusal(scope)
        await (self._app if response is None else response)(scope, receive, send)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _refusal(self, scope: Scope) -> Response | None:
        asked = HTTPConnection(scope)
        headers, parameters = asked.headers, asked.query_params
        # a name of somebody else's for this address is how DNS rebinding comes in
        if headers.get("host", "").lower() not in self._hosts:
            return PlainTextResponse("This page answers at localhost only.\n", 421, _HEADERS)
        if "token" in parameters and scope["method"] == "GET":
            if not self._is_token(parameters["token"]):
                return self._unknown()
            rest = urlencode([(name, value) for name, value in parameters.multi_items() if name != "token"])
            response = RedirectResponse(f"/?{rest}" if rest else "/", 303, _HEADERS)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return response
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return None if self._is_token(bearer.strip()) else self._unknown()
        if not self._is_token(asked.cookies.get(self._cookie, "")):
            return self._unknown()
        # ports of one host share cookies, so a page of another port must not ask here
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("Open this page by its own address.\n", 403, _HEADERS)
        if scope["method"] not in ("GET", "HEAD") and headers.get("origin") != f"http://{headers['host']}":
            return PlainTextResponse("This form is not of this page.\n", 403, _HEADERS)
        return None

    @staticmethod
    def _unknown() -> Response:
        message = "Open the address with the token that ml-rag explore printed when it started.\n"
        return PlainTextResponse(message, 401, _HEADERS)


def options_of(text: str) -> dict[str, Any]:
    """The options of an address; nothing is none."""
    try:
        return parsed(text)
    except Wrong as wrong:
        raise HTTPException(400, str(wrong)) from None


def overlap(before: str, after: str) -> int:
    """How many characters at the end of a segment the next one repeats."""
    for length in range(min(len(before), len(after), OVERLAP), 0, -1):
        if before.endswith(after[:length]):
            return length
    return 0


def short(name: str | None) -> str:
    """A document's name without the folders that its file lies in."""
    return "–" if not name else name.rstrip("/").rpartition("/")[2] or name


def changes(first: Journey, second: Journey) -> list[dict[str, Any]]:
    """What two sets of options cite: each citation of either, and its places."""
    found: dict[Any, dict[str, Any]] = {}
    for side, journey in enumerate((first, second)):
        for place, row in enumerate(journey.citations, 1):
            found.setdefault(key(row), {"row": row, "places": [None, None]})["places"][side] = place
    return list(found.values())


def _number(text: str | None, name: str, default: int | None = None) -> int | None:
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise HTTPException(400, f"{name} is not a number")
    return int(text)


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("ml_rag.integrations", "pages"),
        autoescape=True,
        enable_async=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = lambda value, digits=4: "–" if value is None else f"{float(value):.{digits}f}"
    made.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    made.filters["query"] = lambda values: urlencode({k: v for k, v in values.items() if v not in (None, "")})
    made.filters["short"] = short
    made.filters.update(excerpt=marked.excerpt, best=marked.best, markdown=marked.markdown, cells=marked.cells)
    made.filters["json"] = json.dumps
    made.tests["ending"] = str.endswith
    made.globals.update(
        chart=chart, moves=moves, few=FEW, supported=marked.supported, flush=FLUSH, most_options=OPTIONS
    )
    return made


def _table(dsn: str, name: str) -> tuple[sql.Identifier, bool]:
    """The table of the marks; without a schema, the one that the role's search_path has. Raises MlRagError.

    And whether it is to be held where it is read or written, as another one can have its name by then.

    Without its schema it is none of a role whose code the caller would not run: the owner of the database can make one
    of that name, and set the search_path.
    """
    parts = name.split(".")
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise InvalidRequest("the table of the marks is not named as schema.table")
    if len(parts) == 2:
        return sql.Identifier(*parts), False
    with psycopg.connect(dsn, application_name="ml-rag explore") as connection:
        (oid,) = connection.execute(_RELATION, {"name": sql.Identifier(*parts).as_string()}).fetchone() or (None,)
        refuse_borrowed_role(connection)
        names = connection.execute(_NAMES, {"oid": oid}).fetchone()
        if names is None:
            raise MlRagError("the table of the marks does not exist", detail=parts[0], hint="Name it as schema.table.")
        is_trusted = connection.execute(_TRUSTED, {"oid": oid}).fetchone() == (True,)
    if not is_trusted:
        why = "It or its schema belongs to a role that you do not trust, which could run code with your rights."
        hint = f"If the table is meant, name it with its schema, which is {names[0]}."
        raise MlRagError("the table of the marks is not trusted", detail=why, hint=hint)
    return sql.Identifier(*names), True


def app(dsn: str, token: str, port: int, marks: str | None = None, connections: int = 4) -> ASGIApp:
    """The application, which connects when it starts. ``marks``: the table that marks are written into."""
    reader = Reader(dsn, name="ml-rag explore", connections=connections)
    environment = _environment()
    table, is_held = (None, False) if marks is None else _table(dsn, marks)
    who: dict[str, Any] = {}
    run = reader.rows

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with reader.opened():
            who.update((await reader.rows(_WHO))[0])
            yield

    async def result(request: Request, work: Coroutine[Any, Any, Got]) -> Got:
        try:
            return await waited_for(request, asyncio.create_task(work))
        except psycopg.Error as error:
            raise HTTPException(404 if error.sqlstate == "P0002" else 400, worded(error)) from None

    async def rows(request: Request, query: Query, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        return await result(request, run(query, parameters))

    async def page(template: str, /, status: int = 200, **values: Any) -> Response:
        content = await environment.get_template(template).render_async(who=who, marks=marks, **values)
        return HTMLResponse(content, status, _HEADERS)

    def coming(template: str, tasks: list[asyncio.Task[None]], /, **values: Any) -> Response:
        """A page that is sent while it comes about: it awaits functions of ``values``, which may start tasks."""

        async def content() -> AsyncIterator[str]:
            ready: list[str] = []
            async for piece in environment.get_template(template).generate_async(who=who, marks=marks, **values):
                ready.append(piece)
                if FLUSH in piece:
                    yield "".join(ready).replace(FLUSH, " ")
                    ready.clear()
            yield "".join(ready)

        return Stream(content(), "text/html", tasks, _HEADERS)

    def asked_of(request: Request) -> dict[str, str]:
        """The question, its options and those beside them, as they were typed."""
        typed = {name: request.query_params.get(name, "") for name in ("q", "a", "b")}
        if len(typed["q"]) > QUESTION:
            raise HTTPException(400, f"a question has at most {QUESTION} characters")
        typed["generate"] = request.query_params.get("generate", "")
        return typed

    def refuse_replaced(is_trusted: bool) -> None:
        if not is_trusted:
            message = "the table of the marks is gone, or was replaced by one of a role that you do not trust"
            raise HTTPException(400, message)

    async def marked_for(request: Request, question: str) -> dict[Any, bool]:
        """What was marked as right or wrong for a question."""
        if table is None or not question:
            return {}

        async def read() -> list[dict[str, Any]]:
            async with reader.transaction() as run:
                if is_held:
                    refuse_replaced((await run(_HOLD, {"name": table.as_string()}))[0]["is_held"])
                return await run(_MARKED.format(table), {"question": question})

        found = await result(request, read())
        return {(row["vector_store"], row["document"], row["segment_number"]): row["is_right"] for row in found}

    async def choices(request: Request) -> list[Field]:
        """The fields of the options, with what this role can choose from."""
        presets = {row["name"]: row["description"] for row in await rows(request, PRESETS, {})}
        stores = [row["vector_store"] for row in await rows(request, _STORES, {})]
        models: list[dict[str, Any]] = []
        with contextlib.suppress(HTTPException):  # the model server is down
            models = await rows(request, _MODELS.format(reader.schemas.routine("ml_supported_models")), {})
        of = {task: [row["model_id"] for row in models if row["task"] == task] for task in ("rerank", "generate")}
        return fields(presets, stores, ["hybrid", *(m for m in of["rerank"] if m != "hybrid")], of["generate"])

    async def ask(request: Request) -> Response:
        typed = asked_of(request)
        offered = await choices(request)
        sides: list[dict[str, Any]] = []
        is_sent = False
        for name in ("a", "b"):
            texts = {one.name: request.query_params.get(f"{name}.{one.name}", "") for one in offered}
            side: dict[str, Any] = {"texts": texts, "rest": typed[name], "error": None}
            is_sent |= any(f"{name}.{one.name}" in request.query_params for one in offered)
            try:
                side["options"] = joined(offered, texts, typed[name])
            except Wrong as wrong:
                side["error"] = str(wrong)
            else:
                side["texts"], rest = split(offered, side["options"])
                side["rest"] = json.dumps(rest, ensure_ascii=False) if rest or typed[name].strip() == "{}" else ""
            sides.append(side)
        if not typed["q"].strip():
            typed["generate"] = "1"
        is_asked = bool(typed["q"].strip()) and not any(side["error"] for side in sides)
        values: dict[str, Any] = {"typed": typed, "fields": offered, "form": sides, "is_asked": is_asked}
        if not is_asked:
            return await page("ask.html", 400 if any(side["error"] for side in sides) else 200, **values)
        if is_sent:
            # one address for the same options, however they were typed
            for name, side in zip(("a", "b"), sides, strict=True):
                is_given = side["options"] or side["rest"]
                typed[name] = json.dumps(side["options"], ensure_ascii=False) if is_given else ""
            sent = {name: value for name, value in typed.items() if value}
            return RedirectResponse(f"/?{urlencode(sent)}", 303, _HEADERS)
        asked_with = [side["options"] for side in sides[: 1 + bool(typed["b"].strip())]]
        is_written = [not given.get("skip_generate", typed["generate"] != "1") for given in asked_with]
        journeys: list[Journey] = []
        writing: list[asyncio.Task[None]] = []

        async def retrieved() -> list[Journey]:
            found = await asyncio.gather(*(retrieve(run, reader.schemas, typed["q"], given) for given in asked_with))
            journeys.extend(found)
            for journey, is_wanted in zip(journeys, is_written, strict=True):
                if is_wanted and (journey.answer or not journey.error):
                    writing.append(asyncio.create_task(write(run, reader.schemas, journey)))
            return journeys

        async def looked() -> None:
            for journey in journeys:
                await look(run, reader.schemas, journey)

        async def written() -> None:
            await asyncio.gather(*writing)

        return coming(
            "ask.html", writing, **values, marked=await marked_for(request, typed["q"]), here=str(request.url.query),
            will_write=any(is_written), retrieved=retrieved, looked=looked, written=written, changes=changes,
        )  # fmt: skip

    async def why(request: Request) -> Response:
        typed = asked_of(request)
        document = request.query_params.get("document", "")
        if not typed["q"].strip() or not document.strip():
            raise HTTPException(400, "give a question, and a document as citations name it, to see what became of it")
        segment = _number(request.query_params.get("segment"), "the number of the segment")
        parameters = {**asked(typed["q"], options_of(typed["a"])), "document": document, "segment": segment}
        steps = await rows(request, _WHY, parameters)
        meant = [name for step in steps for name in _MEANT.findall(step["hint"] or "") if step["stage"] == "discover"]
        return await page("why.html", typed=typed, document=document, segment=segment, steps=steps, meant=meant)

    async def document(request: Request) -> Response:
        typed = asked_of(request)
        store, name = request.query_params.get("store", ""), request.query_params.get("document", "")
        first = max(1, _number(request.query_params.get("first"), "the first segment", 1) or 1)
        parameters = {"document": name, "first": max(0, first - 2), "most": SEGMENTS + 1, "characters": CHARACTERS}
        found, names, read = await result(request, documents.read(reader, store, parameters))
        if found.get("document_name") is None:
            raise HTTPException(
                404, "the vector store does not exist, has no names of documents, or this role may not read it"
            )
        # the segment before the first one is read to see what the two share
        before = read.pop(0)["segment"] if first > 1 and read else None
        if not read:
            raise HTTPException(404, "the store has no such document, or it has fewer segments")
        (name,), total = names, read[0]["segments"]
        shown = []
        for row in read[:SEGMENTS]:
            text = row["segment"] or ""
            shared = overlap(before or "", text)
            page_number = keys_of(row["metadata"]).get("page")
            shown.append({**row, "shared": shared, "text": text, "length": len(text), "page": page_number})
            before = text
        titles = (keys_of(row["metadata"]).get("title") for row in shown)
        title = next((title[:_TITLE] for title in titles if isinstance(title, str) and title.strip()), None)
        following = first + len(shown) if first + len(shown) <= total else None
        return await page(
            "document.html", typed=typed, store=store, name=name, title=title, segments=shown, first=first, total=total,
            following=following, earlier=max(1, first - SEGMENTS) if first > 1 else None,
            marked=await marked_for(request, typed["q"]), here=str(request.url.query),
            raw=request.query_params.get("raw", "")[:1],
        )  # fmt: skip

    async def runs(request: Request) -> Response:
        return await page("runs.html", runs=await rows(request, _RUNS, {"most": RUNS}))

    async def compared(request: Request) -> Response:
        numbers = {name: _number(request.query_params.get(name), f"run {name}") for name in ("a", "b")}
        measure = request.query_params.get("measure", "mrr")[:100]
        first = _number(request.query_params.get("first"), "the first question", 0) or 0
        routine = reader.schemas.routine("ml_rag_compare_runs")
        measures = await rows(request, _COMPARED.format(routine), numbers)
        pair = [(await rows(request, _RUN, {"run": number}))[0] for number in numbers.values()]
        wanted = {**numbers, "measure": measure, "first": first, "most": QUESTIONS}
        return await page("compare.html", runs=pair, measures=measures, measure=measure, first=first, step=QUESTIONS,
                          questions=await rows(request, _CHANGED, wanted))  # fmt: skip

    async def one_run(request: Request) -> Response:
        number = _number(request.path_params["run"], "the run")
        measure = request.query_params.get("measure", "mrr")[:100]
        first = _number(request.query_params.get("first"), "the first question", 0) or 0
        found = await rows(request, _RUN, {"run": number})
        if not found:
            raise HTTPException(404, "this role has no run of that number")
        wanted = {"run": number, "measure": measure, "first": first, "most": QUESTIONS}
        return await page("run.html", run=found[0], measure=measure, first=first, step=QUESTIONS,
                    questions=await rows(request, _QUESTIONS, wanted))  # fmt: skip

    async def question(request: Request) -> Response:
        typed = asked_of(request)
        found = await rows(request, _IN_RUNS, {"question": typed["q"], "most": RUNS, "options": OPTIONS})
        return await page("question.html", typed=typed, found=found)

    async def mark(request: Request) -> Response:
        form = await request.form(max_fields=20)
        if table is None:
            raise HTTPException(404, "start ml-rag explore with --marks to keep marks")
        needed = {name: form.get(name) for name in ("question", "vector_store", "document")}
        if form.get("mark") not in ("right", "wrong", "none") or not all(needed.values()):
            raise HTTPException(400, "the form lacks something")
        parameters = {
            **{name: str(value) for name, value in needed.items()},
            "segment_number": _number(str(form.get("segment_number", "")), "the number of the segment"),
            "is_right": form["mark"] == "right",
        }
        try:
            async with await psycopg.AsyncConnection.connect(dsn, application_name="ml-rag explore") as connection:
                await refuse_borrowed_role_async(connection)
                if is_held:
                    held = await (await connection.execute(_HOLD, {"name": table.as_string()})).fetchone()
                    refuse_replaced(held == (True,))
                await connection.execute(_UNMARK.format(table), parameters)
                if form["mark"] != "none":
                    await connection.execute(_MARK.format(table), parameters)
        except psycopg.Error as error:
            raise HTTPException(400, worded(error)) from None
        # nothing of the form but what follows the question mark: the address is one of this page's
        back = f"/document?{form.get('here', '')}#segment{parameters['segment_number']}"
        if form.get("from") != "/document":
            back = f"/?{form.get('here', '')}#citations"
        return RedirectResponse(back, 303, _HEADERS)

    async def stores(request: Request) -> Response:
        return await page("stores.html", stores=await rows(request, _ALL_STORES, {}))

    async def store(request: Request) -> Response:
        name = request.query_params.get("store", "")
        found = await result(request, picture.read(reader, name))
        if not found:
            raise HTTPException(404, "the vector store does not exist, or this role may not read it")
        return await page("store.html", store=name, found=found, most=picture.MOST, most_bytes=UPLOAD >> 20)

    async def upload(request: Request) -> Response:
        length = _number(request.headers.get("content-length"), "the length", 0) or 0
        if not 0 < length <= UPLOAD:
            raise HTTPException(413, f"a document has at most {UPLOAD >> 20} MB")
        async with request.form(max_files=1, max_fields=5) as form:
            file, name = form.get("file"), str(form.get("store", ""))
            if not isinstance(file, UploadFile) or not file.filename:
                raise HTTPException(400, "choose a document to upload")
            if form.get("confirm") != "yes":
                raise HTTPException(400, "confirm that the document is to be written into the store")
            content, title = await file.read(), short(file.filename.replace("\\", "/"))
        found = await rows(request, _STORE, {"store": name})
        if not found:
            raise HTTPException(404, "the vector store does not exist, or this role may not read it")

        async def load() -> dict[str, Any]:
            parameters = {"oid": found[0]["oid"], "name": title, "content": content}
            try:
                async with await psycopg.AsyncConnection.connect(dsn, application_name="ml-rag explore") as connection:
                    await refuse_borrowed_role_async(connection)
                    await cancelled_once(connection.execute(_JUDGE, parameters))
                    row = await (await cancelled_once(connection.execute(_LOAD, parameters))).fetchone()
            except psycopg.Error as error:
                return {"error": worded(error)}
            return row[0] if row else {}

        return coming("upload.html", [], store=name, document=title, load=load)

    async def style(_: Request) -> Response:
        content = resources.files("ml_rag.integrations").joinpath("pages", "explore.css").read_text()
        return Response(content, media_type="text/css", headers=_HEADERS)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await page("refused.html", error.status_code, message=error.detail)

    routes: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/", ask), ("/why", why), ("/document", document), ("/runs", runs), ("/runs/compare", compared),
        ("/runs/{run}", one_run), ("/question", question), ("/stores", stores), ("/store", store),
        ("/explore.css", style),
    ]  # fmt: skip
    return Guard(
        Starlette(
            routes=[
                *(Route(path, endpoint) for path, endpoint in routes),
                Route("/mark", mark, methods=["POST"], max_body_size=FORM),
                Route("/upload", upload, methods=["POST"]),
            ],
            exception_handlers={HTTPException: refused},
            lifespan=lifespan,
        ),
        token,
        port,
    )
