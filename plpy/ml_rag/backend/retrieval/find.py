"""What a request finds in its stores. Those that it does not name and that fail are left out, and it is begun again."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ml_rag.backend import rights
from ml_rag.backend.retrieval import explain, filters, reasons, vectors
from ml_rag.backend.retrieval import stores as discovery
from ml_rag.backend.retrieval.functions import FunctionFailed
from ml_rag.backend.retrieval.request import AskedArm, Request
from ml_rag.backend.retrieval.search import BrokenIndex, Context, NoIndex, Search, hold
from ml_rag.backend.retrieval.shape import GIVEN, Arm, Source, Words
from ml_rag.backend.retrieval.shards import Silent
from ml_rag.backend.retrieval.stores import Store, record
from ml_rag.backend.retrieval.trace import Trace
from ml_rag.backend.retrieval.vectors import Vectors
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.backend.statements import Statements
from ml_rag.errors import MlRagError

STORES = "ARRAY(SELECT s FROM jsonb_populate_recordset(NULL::ml_rag.store, {}) AS s)"
_STORE = "jsonb_populate_record(NULL::ml_rag.store, {})"
_run = Statements(
    {
        "kept limit": (f"SELECT ml_rag._kept_limit({STORES.format('$1')})::text AS kept", "jsonb"),
        "failure of": (
            f"SELECT ml_rag._failure_of({_STORE.format('$1')}, $2)::text AS failure",
            *("jsonb", "text"),
        ),
        "warn": ("SELECT ml_rag._warn_of_failures(ARRAY(SELECT f FROM jsonb_array_elements($1) AS f))", "jsonb"),
        "name": ("SELECT ml_rag._relation_name($1)", "oid"),
        "schemas": (
            "SELECT array_agg(s::int8 ORDER BY s) AS schemas, array_agg(n.object_names[1] ORDER BY s) AS names"
            " FROM ml_rag._schemas_of(ARRAY[$1]) AS s"
            " CROSS JOIN LATERAL pg_identify_object_as_address('pg_namespace'::regclass, s, 0) AS n",
            "oid",
        ),
        "hold schemas": (
            "SELECT bool_and((pg_get_object_address('schema', ARRAY[s.name], '{}')).objid = s.oid) AS are_held"
            " FROM unnest($1, $2) AS s (oid, name)",
            *("oid[]", "text[]"),
        ),
        "hold schemas anew": ("SELECT ml_rag._hold_schemas(ARRAY[$1])", "oid"),
        "hold": ("SELECT ml_rag._hold_read(ml_rag._node_tables($1))", "oid"),
        "hold found": ("SELECT ml_rag._hold_with(ARRAY[$1], 'trusted')::int8[] AS held", "oid"),
        "hold nodes": ("SELECT ml_rag._hold_trusted(ARRAY[g.relation::oid]) FROM ml_rag._node_groups($1) AS g", "oid"),
        "lock_timeout": ("SELECT set_config('lock_timeout', $1, true)", "text"),
        "short wait": ("SELECT ml_rag._limit_wait() AS former",),
    }
)
#: of one statement: tables that its arms search, each of which takes 0.2 MB, and 50 us in which it cannot be cancelled;
#: and the length of its conditions, each character of which takes 2 us to make
MOST_READS, MOST_CONDITIONS = 4000, 4_000_000
#: what was found is not there: a column, a table
_GONE = ("42703", "42P01")
#: how often stores are held until nothing new is read with them
_MOST_ROUNDS = 10


class Failed(MlRagError):
    """An error of the call, as ml_rag._raise takes it."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"], detail=error.get("detail"), hint=error.get("hint"))
        self.sqlstate = error["sqlstate"]  # type: ignore[misc]


class Again(Exception):
    """The search is to be begun again."""


class Left(Exception):
    """Stores that the call does not name are left out, its arguments: the others are searched without them."""


class Moved(Exception):
    """Stores are read with other parts by now, or are left out; its arguments: the stores to search."""


class Found(NamedTuple):
    """The row of a statement, and what it was made of."""

    row: Any
    sources: list[Source]
    search: Search
    settings: tuple[str, ...]


class Finder:
    """Of one call. ``discover``: its stores as they are now."""

    def __init__(self, context: Context, trace: Trace, discover: Callable[[Request, str], list[Store]]) -> None:
        self._plpy, self._context, self._trace, self._discover = context.plpy, context, trace, discover
        #: of stores, the shards that do not answer
        self.missing: dict[Store, list[str]] = {}
        self.failures: list[dict[str, Any]] = []
        #: by place of an arm, the stores that it could not search for want of an index or a node group
        self._without: dict[int, list[Store]] = {}
        #: how often the search was begun again for an error that does not come again
        self._retries = 0
        #: what option explain tells of the search
        self._explained: list[dict[str, Any]] = []
        #: schemas that could not be held, and the error: no further store that the call does not name waits for them
        self._locked: dict[int, Exception] = {}
        #: stores whose keyword index cannot be used, and why
        self._broken: dict[Store, str] = {}

    def find(self, request: Request, question: str, stores: list[Store], vector: str | None) -> Found:
        try:
            return self._find_in(request, question, stores, vector)
        except (self._plpy.SPIError, MlRagError) as e:
            # a search that had to wait for a change of a table to be over goes by what that has left
            if sqlstate(e) in _GONE and (now := self._discover(request, question)) != stores:
                return self._find_in(request, question, now, vector)
            raise

    def _find_in(self, request: Request, question: str, stores: list[Store], vector: str | None) -> Found:
        if len(stores) == 1 or all(store.found == "named" for store in stores):
            return self._embed_and_search(request, question, stores, vector)
        # a store that the call does not name must not delay it: if it is locked, it is left out
        former = _run(self._plpy, "short wait")[0]["former"]
        try:
            return self._embed_and_search(request, question, stores, vector)
        finally:
            _run(self._plpy, "lock_timeout", former)

    def _embed_and_search(self, request: Request, question: str, stores: list[Store], vector: str | None) -> Found:
        embeds = vector is None and request.needs_embedding
        # for a model, for other servers
        has_paused = request.rewrites or request.is_partial
        # what one of several reads takes does not lead the next to another table
        is_one_read = len(stores) == 1 and not any(arm.node_group for arm in request.arms)
        if embeds or has_paused or not is_one_read or stores[0].found == "trusted":
            stores = self._hold(request, question, stores)
        else:
            # for the searches that follow in the same transaction, too
            if False in [self._hold_schemas(store) for store in stores]:
                stores = self.as_named_now(stores)
            for store in stores:
                hold(self._plpy, store)
        enter = functools.partial(self._trace.enter, "embed")
        made = vectors.make(self._plpy, request, question, stores, vector, enter)
        self._trace.step("embed")
        if embeds and self._context.has_moved():
            stores = self._hold(request, question, stores)
        left = self._of_dimensions(request, stores, made)
        while True:
            try:
                is_plain = not request.is_filtered and not any(arm.kind.looks_up for arm in request.shape.arms)
                if is_plain and all(store.is_table for store in left):
                    found = self._search(request, question, left, made)
                else:  # what is found out before the statement is of the same moment
                    wanted = list(left)
                    found = rights.at_one_moment(
                        self._plpy,
                        lambda: self._search(request, question, wanted, made),  # noqa: B023
                    )
                break
            except FunctionFailed as e:
                raise Failed(e.args[0]) from None
            except Again:
                pass
            except Left as e:
                left = [store for store in left if store not in e.args]
            except Moved as e:
                left = self._of_dimensions(request, list(e.args), made)
        warned = []
        for place, without in self._without.items():
            arm, asked = request.shape.arms[place - 1], request.arms[place - 1]
            # two arms may lack the same, as those of a question and of its history
            lacking = (arm.search, asked.node_group, asked.embedding, without)
            if lacking not in warned:
                self._warn_of(arm, asked, without, is_all=False)
            warned.append(lacking)
        if self.failures:
            _run(self._plpy, "warn", json.dumps(self.failures))
        if request.is_filtered:
            filters.warn(self._plpy, found.sources, request.options)
        self._explain_steps(request, found)
        return found

    def _search(self, request: Request, question: str, stores: list[Store], made: Vectors) -> Found:
        search = Search(self._context, request, question, made, self.missing)

        def look_again() -> None:
            if self._context.has_moved():
                now = self._hold(request, question, stores)
                if now != stores or search.has_moved():
                    raise Moved(*now)

        self._context.after_pause = lambda: rights.now(self._plpy, look_again)
        if request.has_own_limit:
            kept = _run(self._plpy, "kept limit", self.records(stores))[0]["kept"]
            search.values["max_distance"] = kept or search.values["max_distance"]
        sources: list[Source] = []
        arms = len(request.arms)
        reads, length = arms * len(stores), 0
        for store in stores:
            try:
                sources.append(search.source(store))
            except self._plpy.SPIError as e:
                self._leave_out(store, stores, e)
            reads += arms * (max(1, len(sources[-1].leaves or ())) - 1)
            length += arms * len(sources[-1].condition)
            _check_size(reads, length)
        sources = self._arms(search, sources, stores)
        if request.shape.arm("keyword") is not None:
            self._trace.step("keyword")
        if request.explains or request.has_functions or request.is_partial or request.rewrites:
            self._trace.enter("search")
        try:
            row, sources = search.run(sources)
        except Silent as e:
            store = next(store for store in stores if store.vector_store == e.args[0]["store"])
            self._left(store, stores, e.args[0])
            raise
        except self._plpy.SPIError as e:
            self._find_culprit(search, sources, stores, e)
            raise
        found = Found(row, sources, search, self._context.settings)
        if request.explains:
            # not within at_one_moment, where PostgreSQL allows no EXPLAIN
            self._explained = rights.now(self._plpy, lambda: explain.steps(self._context, found, self.failures))
        return found

    def _arms(self, search: Search, sources: list[Source], stores: list[Store]) -> list[Source]:
        has_found = False
        self._without.clear()
        for place, (arm, asked) in enumerate(zip(search.shape.arms, search.request.arms, strict=True), 1):
            without: list[Store] = []
            failures: list[dict[str, Any]] = []
            for i, source in enumerate(sources, 1):
                store = source.store
                try:
                    if arm.search == "keyword" and store in self._broken:
                        raise BrokenIndex(self._broken[store])
                    sources[i - 1] = search.add(source, place, i)
                    continue
                except NoIndex:
                    without.append(store)
                except BrokenIndex as e:
                    failure = reasons.broken_index(store, e.message)
                    if len(stores) == 1:
                        raise Failed(failure) from None
                    failures.append(failure)
                except Silent as e:
                    self._left(store, stores, e.args[0])
                except self._plpy.SPIError as e:
                    self._leave_out(store, stores, e)
                sources[i - 1] = search.nothing(source, place, i)
            searched = len(sources) - len(without) - len(failures)
            if without:
                # said once, when the search is not begun again
                self._without[place] = without
                if len(without) == len(stores):
                    self._warn_of(arm, asked, without, is_all=True)
            if not searched and failures and not has_found:
                raise Failed(failures[0])
            self.failures += [failure for failure in failures if failure not in self.failures]
            has_found = has_found or searched > 0
            why = "It has no keyword index."
            if arm.in_nodes or asked.embedding is not None:
                why = f"It has no such {'node group' if arm.in_nodes else 'embedding'}."
            for store in without:
                search.facts[arm.name, store.vector_store] = {"skipped": why}
            for failure in failures:
                search.facts[arm.name, failure["store"]] = {"skipped": failure["skipped"]}
        return sources

    def _warn_of(self, arm: Arm, asked: AskedArm, without: list[Store], *, is_all: bool) -> None:
        """Say which stores an arm could not search; raises where these are all."""
        if arm.in_nodes or asked.embedding is not None:
            error = reasons.no_part(self._plpy, without, asked, arm.search, is_all=is_all)
        else:
            error = reasons.no_index(self._plpy, without, is_all=is_all)
        if error is not None:
            raise Failed(error)

    def _hold(self, request: Request, question: str, stores: list[Store]) -> list[Store]:
        """The stores that ``held`` leaves; if that is none, those of others that are found now."""
        kept = self.held(request, stores)
        if not kept and (now := self._discover(request, question)) != stores:
            kept = self.held(request, now)
        if not kept:
            raise Failed(self.failures[0])
        return kept

    def held(self, request: Request, stores: list[Store]) -> list[Store]:
        """Keep the stores from being dropped, renamed or altered until the end of the transaction, as ml_rag._hold.

        Returns them without those that the call does not name and that were given away since they were found: while a
        lock was waited for, or a model or a function ran: locks do not keep the owner of a table from making parts."""
        former: dict[int, list[int]] | None = None
        for _ in range(_MOST_ROUNDS):
            held = self._hold_each(request, stores)
            left = [store for store in stores if store.relation in held]
            if not self._context.has_moved():
                return left
            moment = self._context.look_anew()
            left = self.as_named_now(left)
            is_settled = former is not None and all(former[relation] == held[relation] for relation in held)
            if is_settled or all(store.found == "named" for store in left):
                return left
            found = discovery.discover(self._plpy, self._context.schema, moment, request.wanted)
            now = {store.relation for store in found}
            stores = [store for store in left if store.found == "named" or store.relation in now]
            self.failures += [reasons.given_away(store.vector_store) for store in left if store not in stores]
            # while one was waited for, another can have got parts, of which the locks are waited for later
            if not any(map(moment.reads_parts, stores)):
                return stores
            former = held
        message = "what is read with vector stores cannot be locked"
        detail = "Each time that it was locked, other parts were there."
        raise Failed({"sqlstate": "55P03", "message": message, "detail": detail, "hint": "Try again."})

    def _hold_schemas(self, store: Store) -> bool:
        """Keep the schemas that statements on the store name from being renamed, as ml_rag._hold_schemas.

        Whether they have the names still that they had when the call looked at the catalog."""
        found = self._context.moment.look_up(
            ("schemas", store.relation), lambda: dict(_run(self._plpy, "schemas", store.relation)[0])
        )
        schemas = found["schemas"] or []
        if store.found != "named" and (locked := self._locked.keys() & schemas):
            raise self._locked[locked.pop()]
        try:
            if not schemas or _run(self._plpy, "hold schemas", schemas, found["names"])[0]["are_held"]:
                return True
        except self._plpy.SPIError as e:
            if sqlstate(e) != "3F000":
                self._locked |= dict.fromkeys(schemas, e)
                raise
        _run(self._plpy, "hold schemas anew", store.relation)
        return False

    def _hold_each(self, request: Request, stores: list[Store]) -> dict[int, list[int]]:
        """By store what is held with it; those that cannot be held are left out."""
        held = {}
        has_nodes = any(arm.node_group for arm in request.arms)
        for store in stores:
            own: list[int] | None = []
            try:
                self._hold_schemas(store)
                is_plain = store.is_table and not self._context.moment.reads_parts(store)
                if is_plain and not has_nodes:
                    self._plpy.prepare(f"SELECT FROM ONLY {store.table}")
                else:
                    hold(self._plpy, store)
                    if store.found == "named":
                        _run(self._plpy, "hold", store.relation)
                    else:
                        own = _run(self._plpy, "hold found", store.relation)[0]["held"]
                        _run(self._plpy, "hold nodes", store.relation)
            except self._plpy.SPIError as e:
                try:
                    self._leave_out(store, stores, e)
                except Left:
                    continue
            if own is None:
                self.failures.append(reasons.given_away(store.vector_store))
            else:
                held[store.relation] = own
        return held

    def as_named_now(self, stores: list[Store]) -> list[Store]:
        """The stores by the names that they have once they are held. Raises the error of one that was dropped."""
        names = discovery.written(self._plpy, [store.relation for store in stores])
        if names == [store.table for store in stores]:
            return stores
        left = []
        for store, name in zip(stores, names, strict=True):
            if name is None and (store.found == "named" or len(stores) == 1):
                _run(self._plpy, "name", store.relation)
            left.append(store if name in (store.table, None) else store._replace(table=name))
        return left

    def _of_dimensions(self, request: Request, stores: list[Store], made: Vectors) -> list[Store]:
        """The stores whose vectors can be compared; of the others those that the call does not name are left out."""
        left = []
        for store in stores:
            failure = self._other_dimensions(request, store, made)
            if failure is None:
                left.append(store)
                continue
            if not request.skips_dimensions:
                raise Failed(failure)
            self.failures.append(failure)
        if not left:
            raise Failed(self.failures[0])
        return left

    def _other_dimensions(self, request: Request, store: Store, made: Vectors) -> dict[str, Any] | None:
        """The failure of a store whose vectors have other dimensions than what an arm compares them with."""
        for place, arm in enumerate(request.arms, 1):
            text = made.of(place, store)
            if not arm.takes_vectors or arm.node_group is not None or text is None:
                continue
            embedding = made.embeddings.get((place, store.relation), store.embedding)
            length = made.dimensions(text)
            if embedding is not None and embedding.dimensions is not None and embedding.dimensions != length:
                failure: dict[str, Any] = reasons.other_dimensions(store, embedding.dimensions, length)
                return failure
        return None

    # -- stores that fail ---------------------------------------------------------------------------------------------

    def _leave_out(self, store: Store, stores: list[Store], error: Any) -> None:
        """Raises the error of a store that the call names, or that is the only one; else Left."""
        if ends(error) or sqlstate(error) == "40001" or store.found == "named" or len(stores) == 1:
            self.as_named_now([store])
            raise error
        _, detail, hint, *_ = getattr(error, "spidata", None) or (None, None, None)
        failure = reasons.failure(store.vector_store, sqlstate(error), str(error), detail, hint)
        if sqlstate(error) == "22023" and re.match(
            'invalid value for option "filters"|operator is not supported', str(error)
        ):
            # a value of filters that its column does not take: without the store the answer would be another one
            hint = (
                f'It is the filter on "{store.vector_store}"; name the stores to search in "vector_store", or leave'
                " that one out."
            )
            raise Failed(failure | {"hint": hint})
        self._left(store, stores, failure)

    def _left(self, store: Store, stores: list[Store], failure: dict[str, Any]) -> None:
        if store.found == "named" or len(stores) == 1:
            raise Failed(failure)
        self.failures.append(failure)
        raise Left(store)

    def _find_culprit(self, search: Search, sources: list[Source], stores: list[Store], error: Any) -> None:
        """Which store an error of the statement comes from: each is searched by itself. Raises what follows from it."""
        if ends(error) or sqlstate(error) == "40001":
            raise error
        left: list[Store] = []
        for i, source in enumerate(sources, 1):
            failure = self._failure_of(search, source, i)
            if failure is None:
                continue
            store = source.store
            words = [isinstance(one, Words) for one in source.searches]
            if any(words) and re.match("22|38|F0|42704", failure["sqlstate"]):
                # without the words: their index may have keys of another type than the table by now
                others = tuple(GIVEN if isinstance(one, Words) else one for one in source.searches)
                places = [place for place, is_words in enumerate(words, 1) if is_words]
                search.values |= {f"hits_{place}_{i}": "[]" for place in places}
                if self._failure_of(search, source._replace(searches=others), i) is None:
                    self._broken[store] = failure["message"]
                    raise Again
            if store.found == "named" or len(stores) == 1:
                self.as_named_now([store])
                raise Failed(failure)
            self.failures.append(failure)
            left.append(store)
        if len(left) == len(stores):
            raise Failed(self.failures[0])
        if left:
            raise Left(*left)
        if self._retries:
            raise error
        self._retries += 1  # what it was is over
        raise Again

    def _failure_of(self, search: Search, source: Source, i: int) -> dict[str, Any] | None:
        """Why a store cannot be searched by itself."""
        shape = search.shape._replace(told="")
        text = search.alone(_alone(search.values, i)).text([source], shape)
        failure = _run(self._plpy, "failure of", json.dumps(self.record(source.store)), text)[0]["failure"]
        return None if failure is None else json.loads(failure)

    def skipped(self, found: Found) -> list[str]:
        """Names of stores that no arm could search."""
        arms = [arm.name for arm in found.search.shape.arms]
        facts = found.search.facts
        searched = [
            store.vector_store
            for store in (source.store for source in found.sources)
            if any("skipped" not in facts.get((arm, store.vector_store), {}) for arm in arms)
        ]
        names = [source.store.vector_store for source in found.sources]
        names += [failure["store"] for failure in self.failures if failure["store"] not in names]
        return [name for name in names if name not in searched]

    def _explain_steps(self, request: Request, found: Found) -> None:
        if not request.explains:
            nearest = found.row.get("nearest")
            self._trace.step("search", {"nearest": nearest and float(nearest)})
            return
        self._trace.steps += self._explained

    def record(self, store: Store) -> dict[str, Any]:
        """The record ml_rag.store."""
        return record(store) | {"missing": self.missing.get(store)}

    def records(self, stores: list[Store]) -> str:
        """The records as JSON text."""
        return json.dumps([self.record(store) for store in stores])


def ends(error: Any) -> bool:
    """Whether the statement is over: cancelled, shut down."""
    return sqlstate(error).startswith("57")


def _check_size(reads: int, length: int) -> None:
    """Raises the error of a search that is too large for one statement. ``length``: of the text of its conditions."""
    if reads > MOST_READS:
        detail = f"Its arms search {reads} tables in all, of which one statement takes {MOST_READS}."
    elif length > MOST_CONDITIONS:
        detail = f"The filters of all its arms and stores are longer than {MOST_CONDITIONS} characters."
    else:
        return
    hint = 'Name fewer stores in "vector_store", or use fewer arms or conditions.'
    raise Failed({"sqlstate": "54000", "message": "the search is too large", "detail": detail, "hint": hint})


def _alone(values: dict[str, Any], i: int) -> dict[str, Any]:
    """The parameters of a statement of the one store that was number i."""
    own = {
        f"{name.removesuffix(f'_{i}')}_1": value
        for name, value in values.items()
        if re.fullmatch(rf"(keys|scores|candidates|hits)_\d+_{i}|row_keys_{i}", name)
    }
    return values | own
