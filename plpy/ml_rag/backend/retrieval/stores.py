"""The vector stores of a call, as it discovers them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ml_rag.backend.statements import Statements

_INTEGERS = ("smallint", "integer", "bigint")


class Metric(NamedTuple):
    """A distance metric, a row of ml_rag.metric."""

    name: str
    operator: str
    shift: int
    #: whether 1 - distance is the similarity, else 1 / (1 + distance)
    is_complement: bool


class Embedding(NamedTuple):
    """Vectors that an arm compares in place of the store's own: of a node group, or a column of the store."""

    model: str | None
    column: str = ""
    type_name: str = "vector"
    dimensions: int | None = None


class Tuned(NamedTuple):
    """ml_rag._tuned: settings that searches of an index take, and what was measured with them, of how many rows."""

    ef_search: int | None = None
    probes: int | None = None
    rescore: int | None = None
    recall: float | None = None
    tuned_rows: int | None = None


class Store(NamedTuple):
    """A vector store, its columns by their logical names: the record ml_rag.store, and what a search of it depends on.

    It is the same object as long as nothing of it changes in the catalog, so that plans can be kept by it.
    """

    vector_store: str
    relation: int
    #: its name as it is written into a statement
    table: str
    embed_model_id: str | None
    segment_embedding: str
    segment: str
    document_name: str | None
    document_id: str | None
    segment_number: str | None
    metadata: str | None
    embedding_type: str
    dimensions: int | None
    document_id_type: str | None
    segment_number_type: str | None
    #: named (with its schema), or trusted
    found: str
    #: whether ctid tells its rows apart
    is_table: bool
    #: whether it is known to be so small that an HNSW index misses nothing with pgvector's usual ef_search
    is_small: bool
    #: whether row-level security applies to the caller
    is_secured: bool
    #: whether others than the owner of its schema may create there, and so put something else under its name
    is_shared: bool
    #: all names that a call can give it
    names: frozenset[str]
    #: whether some index is approximate: it can give fewer rows than there are
    is_approximate: bool = False
    #: whether some index is of an expression, as those of smaller vectors are
    has_expressions: bool = False
    #: lists of an IVFFlat index that are searched unless the caller says otherwise
    probes: int = 10
    #: what ml_rag.tune_index has kept for the index of its vectors; None = nothing
    tuned: Tuned | None = None
    #: columns that stand in the metadata of hits
    key: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def rows(self) -> str:
        """Its rows in FROM; of a table without children, which would have the same ctids, and code of their owners."""
        return f"ONLY {self.table}" if self.is_table else self.table

    @property
    def embedding(self) -> Embedding:
        return Embedding(self.embed_model_id, self.segment_embedding, self.embedding_type, self.dimensions)


class Wanted(NamedTuple):
    """What a call says of the stores that it searches: the arguments of ml_rag.discover."""

    names: tuple[str, ...] | None = None
    excluded: tuple[str, ...] | None = None
    schemas: tuple[str, ...] | None = None
    #: logical to real names of columns
    columns: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    #: whether a relation that is named needs no marker
    unmarked: bool = False
    #: whether those of the default model are searched, as the call names no other
    of_default: bool = False


#: a name is longer only if it is none: two of 63 characters, each quoted, and a dot
_LONGEST_NAME = 260
#: columns by their logical names; segment_embedding beside them
_COLUMNS = ("segment", "document_name", "document_id", "segment_number", "metadata")

#: a relation as it is written into a statement: the name it has now, whatever older one the snapshot of the transaction
#: shows, which another relation may have by now
_NAME = "(pg_identify_object('pg_class'::regclass, c.oid, 0)).identity"
#: which relations there are, and the version of all that is known of them: the places of their rows in the catalog,
#: what VACUUM changes in place, names that statements find them and their types by, and what the caller may do; a hash,
#: as PL/Python cannot read all names of others
_VERSIONS = f"""SELECT c.oid::int8 AS relation, c.relowner::int8 AS owner, n.nspowner::int8 AS schema_owner,
  pg_get_userbyid(c.relowner) = current_user AS is_own, pg_get_userbyid(n.nspowner) = current_user AS is_own_schema,
  c.relkind = 'v' OR c.relhassubclass OR c.relrowsecurity OR c.xmax <> '0' OR n.xmax <> '0' AS has_parts,
  (SELECT v.value FROM ml_rag.setting_value AS v WHERE v.name = 'searched_owners') AS searched_owners,
  (SELECT md5(v.text) FROM (SELECT concat(
    c.ctid, c.xmin, n.ctid, n.xmin, {_NAME}, c.reltuples BETWEEN 0 AND 20000, row_security_active(c.oid),
    has_table_privilege(c.oid, 'SELECT'), to_regclass('pg_catalog.pg_dist_partition') IS NULL, (
      SELECT string_agg(concat(a.ctid, a.xmin, d.ctid, d.xmin,
        CASE WHEN a.atttypid >= 16384 THEN format_type(a.atttypid, NULL) END,
        CASE WHEN NOT has_table_privilege(c.oid, 'SELECT')
          THEN has_column_privilege(c.oid, a.attnum, 'SELECT') END), NULL ORDER BY a.attnum)
      FROM pg_attribute AS a LEFT JOIN pg_description AS d
        ON d.objoid = a.attrelid AND d.classoid = 'pg_class'::regclass AND d.objsubid = a.attnum
      WHERE a.attrelid = c.oid AND a.attnum > 0), (
      SELECT string_agg(concat(x.ctid, x.xmin, i.ctid, i.xmin), NULL ORDER BY x.indexrelid)
      FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid WHERE x.indrelid = c.oid)) AS text
    OFFSET 0) AS v) AS version
FROM """
_SCHEMA = "CROSS JOIN LATERAL (SELECT n.ctid, n.xmin, n.xmax, n.* FROM pg_namespace AS n WHERE n.oid = c.relnamespace"
_USABLE = """c.relkind IN ('r', 'p', 'f', 'v', 'm') AND c.relispopulated
  AND has_schema_privilege(n.oid, 'USAGE') AND NOT pg_is_other_temp_schema(n.oid)"""


def _is_text(names: str) -> str:
    """SQL: whether PL/Python can read names of others, which it always can in UTF-8."""
    return f"CASE getdatabaseencoding() WHEN 'UTF8' THEN true ELSE ml_rag._is_text(concat({names})) END"


def _statements(schema: str) -> Statements:
    """What is read of the catalog: simple statements, since one for all of it takes ten times as long, most of it to
    begin. Each starts from an index, so that its cost does not grow with the number of tables or schemas: OFFSET 0
    keeps the planner from joining whole catalogs. ``schema``: pgvector's, as it is written."""
    types = f"('{schema}.vector'::regtype, '{schema}.halfvec'::regtype)"
    return Statements(
        {
            # The catalog is the same as long as the snapshot and the role are: each commit of a change gives another
            # one. Null where it does not tell: of changes of this transaction, on a standby, and where it is that of a
            # whole transaction, in which names may change.
            "moment": (
                "SELECT CASE WHEN pg_current_xact_id_if_assigned() IS NULL AND NOT pg_is_in_recovery()"
                " AND current_setting('transaction_isolation') = 'read committed'"
                " THEN concat_ws(' ', pg_current_snapshot(), current_user) END AS moment",
            ),
            "metrics": ("SELECT m.name, m.operator, m.shift, m.is_complement FROM ml_rag.metric AS m",),
            "named": (
                f"{_VERSIONS} (SELECT c.ctid, c.xmin, c.xmax, c.* FROM pg_class AS c WHERE c.relname = ANY ($1)"
                f" OFFSET 0) AS c {_SCHEMA} OFFSET 0) AS n WHERE {_USABLE}",
                "name[]",
            ),
            # every column of type vector is one entry of pg_depend away
            "all": (
                f"{_VERSIONS} (SELECT DISTINCT d.objid FROM pg_depend AS d"
                f" WHERE d.refclassid = 'pg_type'::regclass AND d.refobjsubid = 0 AND d.refobjid IN {types}"
                " AND d.classid = 'pg_class'::regclass AND d.objsubid > 0 OFFSET 0) AS d"
                # by table, once its owner is known: any role can make a table of 1600 vectors
                " CROSS JOIN LATERAL ("
                "SELECT c.ctid, c.xmin, c.xmax, c.* FROM pg_class AS c"
                " WHERE c.oid = d.objid AND c.relowner <> ALL ($1)"
                " AND (SELECT count(*) > 0 FROM (SELECT FROM pg_description AS m WHERE m.objoid = c.oid"
                " AND m.classoid = 'pg_class'::regclass AND m.objsubid > 0 LIMIT 1) AS m) OFFSET 0) AS c"
                f" {_SCHEMA} AND n.nspowner <> ALL ($1) OFFSET 0) AS n WHERE {_USABLE}",
                "oid[]",
            ),
            "relations": (
                "SELECT c.oid::int8 AS relation, n.nspname::text AS schema, c.relname::text AS name,"
                " quote_ident(n.nspname) AS quoted_schema, quote_ident(c.relname) AS quoted_name,"
                f" {_NAME} AS written,"
                # SELECT on some columns gives no privilege on ctid
                " c.relkind IN ('r', 'm') AND NOT c.relhassubclass AND NOT ml_rag._is_distributed(c.oid)"
                " AND has_table_privilege(c.oid, 'SELECT') AS is_table,"
                " c.reltuples BETWEEN 0 AND 20000 AS is_small, row_security_active(c.oid) AS is_secured,"
                " EXISTS (SELECT FROM aclexplode(n.nspacl) AS a WHERE a.privilege_type = 'CREATE'"
                " AND a.grantee <> n.nspowner) AS is_shared"
                " FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = ANY ($1)"
                f" AND {_is_text('n.nspname, c.relname')}",
                "oid[]",
            ),
            # vectors with what their markers say (store/marker.sql), and columns of these names
            "columns": (
                "SELECT a.attrelid::int8 AS relation, a.attnum, a.attname::text AS name,"
                f" CASE a.atttypid WHEN '{schema}.vector'::regtype THEN 'vector'"
                f" WHEN '{schema}.halfvec'::regtype THEN 'halfvec' END AS vector,"
                " nullif(a.atttypmod, -1) AS dimensions, ml_rag._type_name(a.atttypid) AS type,"
                " has_column_privilege(a.attrelid, a.attnum, 'SELECT') AS is_readable, m.*"
                " FROM pg_attribute AS a LEFT JOIN LATERAL ("
                " SELECT ml_rag._marked_model(d.beginning) AS model,"
                " ml_rag._marked_columns(d.beginning)::text AS columns,"
                " strpos(d.beginning, 'EMBEDDING=') > 0"
                " AND ml_rag._marked_key(d.beginning, 'EMBEDDING') IS NOT NULL AS is_further,"
                " ml_rag._tuned(d.beginning)::text AS tuned,"
                " strpos(d.beginning, 'DEFAULT=true') > 0 AS may_be_default,"
                " strpos(d.beginning, 'DEFAULT=true') > 0"
                " AND ml_rag._marked_key(d.beginning, 'DEFAULT') = 'true'"
                " OR strpos(d.beginning, 'SEGMENT=') > 0"
                " AND ml_rag._marked_key(d.beginning, 'SEGMENT') IS NOT NULL AS is_chosen"
                " FROM (SELECT ml_rag._beginning(d.description) AS beginning FROM pg_description AS d"
                " WHERE d.objoid = a.attrelid AND d.classoid = 'pg_class'::regclass"
                f" AND d.objsubid = a.attnum AND a.atttypid IN {types} OFFSET 0) AS d) AS m ON true"
                " WHERE a.attrelid = ANY ($1) AND a.attnum > 0 AND NOT a.attisdropped"
                f" AND {_is_text('a.attname, ml_rag._type_name(a.atttypid), m.model, m.columns')}"
                f" AND (a.atttypid IN {types} OR a.attname = ANY ($2)) ORDER BY a.attrelid, a.attnum",
                *("oid[]", "name[]"),
            ),
            "tuned": (
                "SELECT ml_rag._tuned(col_description(a.attrelid, a.attnum))::text AS tuned FROM pg_attribute AS a"
                " WHERE a.attrelid = $1 AND a.attname = $2",
                *("oid", "name"),
            ),
            "is searched": ("SELECT ml_rag._is_searched($1, $2) AS answer", "oid", "oid"),
            "trusts": ("SELECT ml_rag._trusts($1) AS answer", "oid"),
            "owners": (
                "SELECT o.owner::int8 AS owner, (SELECT bool_or(c.relhassubclass) FROM pg_class AS c"
                " WHERE c.oid = ANY (r.relations)) AS has_parts"
                " FROM (SELECT ml_rag._read_with($1) AS relations OFFSET 0) AS r"
                " CROSS JOIN unnest(ml_rag._code_owners(r.relations)) AS o (owner)",
                "oid",
            ),
            "default model": ("SELECT ml_rag._get_setting('embed_model_id') AS model",),
            "indexes": (
                "SELECT x.indrelid::int8 AS relation, bool_or(a.amname IN ('hnsw', 'ivfflat')) AS is_approximate,"
                " bool_or(x.indkey[0] = 0) AS has_expressions, max(CASE a.amname WHEN 'ivfflat' THEN"
                " coalesce(substring(array_to_string(i.reloptions, ',') FROM 'lists=([0-9]+)')::integer, 100) END)"
                " AS lists"
                " FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS a ON a.oid = i.relam"
                " WHERE x.indrelid = ANY ($1) GROUP BY x.indrelid",
                "oid[]",
            ),
        }
    )


_names = Statements(
    {
        "written": (
            f"SELECT ARRAY(SELECT {_NAME} FROM unnest($1) WITH ORDINALITY AS c (oid, place) ORDER BY c.place) AS names",
            "oid[]",
        ),
    }
)
_by_schema: dict[str, Statements] = {}
_metrics: dict[str, Metric] = {}


def _run(schema: str) -> Statements:
    if schema not in _by_schema:
        _by_schema[schema] = _statements(schema)
    return _by_schema[schema]


def written(plpy: Any, relations: list[int]) -> list[str | None]:
    """The relations as they are written into a statement now; None = dropped."""
    names: list[str | None] = _names(plpy, "written", relations)[0]["names"]
    return names


def metric(plpy: Any, schema: str, name: str) -> Metric:
    """The distance metric of that name."""
    if not _metrics:
        for row in _run(schema)(plpy, "metrics"):
            _metrics[row["name"]] = Metric(**row)
    return _metrics[name]


#: what a call finds in a relation of a version: (wanted, model, relation, version) -> store, or None
_known: dict[Any, Store | None] = {}
_MOST_KNOWN, _MOST_FOUND = 1000, 64
#: as Python writes it; what a longer one finds is not kept
_LONGEST_WANTED = 10_000
#: of the last look at the catalog, names of stores that were changed since the snapshot of the transaction
changed: list[str] = []
#: roles that some caller of this session did not trust
_strangers: set[int] = set()


class Moment:
    """What calls found in the catalog, and looked up beside it, while nothing committed, which ``mark`` tells; None:
    unknown. A call keeps its own: a function that it runs can call ml_rag itself."""

    def __init__(self, mark: str | None) -> None:
        self.mark = mark
        self.found: dict[Wanted, list[Store]] = {}
        self._seen: dict[Any, Any] = {}
        #: stores that the call does not name, and with which something is read that has parts
        self.with_parts: set[int] = set()

    def reads_parts(self, store: Store) -> bool:
        """Whether a store that the call does not name may be read with what has parts, as by a policy."""
        return store.relation in self.with_parts

    def look_up(self, key: Any, look_up: Callable[[], Any]) -> Any:
        """What ``look_up`` finds in the catalog, kept for calls of the same moment."""
        if key in self._seen:
            return self._seen[key]
        found = look_up()
        if self.mark is not None and len(self._seen) < _MOST_FOUND:
            self._seen[key] = found
        return found


_last = Moment(None)


def now(plpy: Any, schema: str) -> Moment:
    """The moment; another object than before if the catalog may be another one."""
    global _last
    mark = _run(schema)(plpy, "moment")[0]["moment"]
    if mark is None or mark != _last.mark:
        _last = Moment(mark)
    return _last


def discover(plpy: Any, schema: str, moment: Moment, wanted: Wanted) -> list[Store]:
    """The relations that the caller may search, in the order of their names; ``changed`` has those that it leaves out.

    ``schema``: pgvector's, as it is written. The columns of its marker count, but for those that the call names.
    """
    changed.clear()
    if wanted in moment.found:
        return list(moment.found[wanted])
    found = _discover(_run(schema), plpy, moment, wanted)
    if moment.mark is not None and len(moment.found) < _MOST_FOUND and len(repr(wanted)) <= _LONGEST_WANTED:
        moment.found[wanted] = found
    return list(found)


def _discover(run: Statements, plpy: Any, moment: Moment, wanted: Wanted) -> list[Store]:
    trust = _Trust(run, plpy, moment)
    if wanted.names is None:
        rows = [row for row in run(plpy, "all", trust.strangers()) if trust.covers(row) or trust.was_changed(row)]
    else:
        rows = list(run(plpy, "named", _tables(wanted.names)))
    if not rows:
        return []
    model = run(plpy, "default model")[0]["model"] if wanted.of_default else wanted.model
    keys = [(wanted, model, row["relation"], row["version"]) for row in rows]
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    known = _known if len(repr(wanted)) <= _LONGEST_WANTED else {}
    if unknown := [key for key in keys if key not in known]:
        found = _read(run, plpy, [relation for _, _, relation, _ in unknown], wanted, model)
        known.update({key: found.get(key[2]) for key in unknown})
    stores = []
    for key, row in zip(keys, rows, strict=True):
        store = known[key]
        if store is None:
            continue
        if store.found == "named" or (not trust.was_changed(row) if wanted.names is None else trust.covers(row)):
            stores.append(store)
        elif trust.was_changed(row):
            changed.append(store.vector_store)
    # as COLLATE "C" has it
    stores.sort(key=lambda store: store.vector_store.encode("utf-8", "surrogatepass"))
    return stores


def _read(run: Statements, plpy: Any, relations: list[int], wanted: Wanted, model: str | None) -> dict[int, Store]:
    """Those of the relations that are stores that the call wants; whether they are trusted is another question."""
    facts = {}
    for row in run(plpy, "relations", relations):
        full_name = f"{row['quoted_schema']}.{row['quoted_name']}"
        names = frozenset((f"{row['schema']}.{row['name']}", row["name"], full_name, row["quoted_name"]))
        if (
            (wanted.names is None or names.intersection(wanted.names))
            and (wanted.excluded is None or not names.intersection(wanted.excluded))
            and (wanted.schemas is None or row["schema"] in wanted.schemas)
        ):
            facts[row["relation"]] = row, names, full_name
    given = dict(wanted.columns)
    standard = [given.get(column, column) for column in _COLUMNS]
    vectors, columns = _columns(run, plpy, list(facts), standard)
    chosen = {}
    for relation, candidates in vectors.items():
        default = _embedding(candidates, given.get("segment_embedding"))
        embedding = default
        if default is not None and wanted.model not in (None, default["model"]) and "segment_embedding" not in given:
            # another one of the store's, which has its texts
            further = next((row for row in candidates if row["is_further"] and row["model"] == wanted.model), default)
            embedding = dict(further) | {"columns": default["columns"]}
        if embedding is None or not embedding["is_readable"]:
            continue
        if embedding["model"] is None and not (wanted.unmarked and wanted.names is not None):
            continue
        if model is None or embedding["model"] in (model, None):
            chosen[relation] = embedding
    marked = {
        relation: {k: v for k, v in json.loads(embedding["columns"] or "{}").items() if k not in given}
        for relation, embedding in chosen.items()
    }
    keys = {relation: own.pop("key", "").split("+") for relation, own in marked.items()}
    names_of = [*(own.values() for own in marked.values()), *keys.values()]
    if others := {name for own in names_of for name in own} - {"", *standard}:
        for relation, found in _columns(run, plpy, list(chosen), list(others))[1].items():
            columns.setdefault(relation, {}).update(found)
    indexes = {row["relation"]: row for row in run(plpy, "indexes", list(chosen))}
    stores = {}
    for relation, embedding in chosen.items():
        row, names, full_name = facts[relation]
        known = columns.get(relation, {})
        own: dict[str, Any] = {
            column: known.get(marked[relation].get(column) or given.get(column, column)) for column in _COLUMNS
        }
        number_type = own["segment_number"] and own["segment_number"]["type"]
        if number_type not in _INTEGERS:
            own["segment_number"] = None
        # a column that the call names is also a condition
        if own["segment"] is None or any(own[column] is None for column in given if column in own):
            continue
        index = indexes.get(relation)
        stores[relation] = Store(
            # quoted where two pairs of schema and table could read the same
            vector_store=full_name if "." in row["schema"] else f"{row['schema']}.{row['name']}",
            names=names,
            relation=relation,
            table=row["written"],
            embed_model_id=embedding["model"],
            segment_embedding=embedding["name"],
            segment=own["segment"]["name"],
            **{column: found and found["name"] for column, found in own.items() if column != "segment"},
            embedding_type=embedding["vector"],
            dimensions=embedding["dimensions"],
            document_id_type=own["document_id"] and own["document_id"]["type"],
            segment_number_type=number_type,
            # a table's name alone could be meant for another's
            found="named" if wanted.names is not None and _full_names(row).intersection(wanted.names) else "trusted",
            is_table=row["is_table"],
            is_small=row["is_small"],
            is_secured=row["is_secured"],
            is_shared=row["is_shared"],
            is_approximate=index is not None and index["is_approximate"],
            has_expressions=index is not None and index["has_expressions"],
            probes=max(10, ((index and index["lists"]) or 0) // 10),
            tuned=_tuned(embedding),
            key=tuple(name for name in keys[relation] if name in known),
        )
    return stores


#: the fields of ml_rag.store
_RECORD = (
    *("vector_store", "relation", "embed_model_id", "segment_embedding", "segment", "document_name", "document_id"),
    *("segment_number", "metadata", "embedding_type", "dimensions", "document_id_type", "segment_number_type"),
    *("found", "is_table"),
)


def record(store: Store) -> dict[str, Any]:
    """The record ml_rag.store, for jsonb_populate_record."""
    return {name: getattr(store, name) for name in _RECORD}


def of_record(plpy: Any, schema: str, fields: dict[str, Any], relation: int) -> Store:
    """The record ml_rag.store as a Store, of a table that a call reads beside its stores: a node group."""
    run = _run(schema)
    facts = run(plpy, "relations", [relation])[0]
    index = next(iter(run(plpy, "indexes", [relation])), None)
    tuned = next(iter(run(plpy, "tuned", relation, fields["segment_embedding"])), None)
    return Store(
        **{name: fields[name] for name in _RECORD if name not in ("relation", "is_table")},
        relation=relation,
        table=facts["written"],
        is_table=facts["is_table"],
        is_small=facts["is_small"],
        is_secured=facts["is_secured"],
        is_shared=facts["is_shared"],
        names=frozenset(),
        is_approximate=index is not None and index["is_approximate"],
        has_expressions=index is not None and index["has_expressions"],
        probes=max(10, ((index and index["lists"]) or 0) // 10),
        tuned=_tuned(tuned),
    )


def _tuned(row: Any) -> Tuned | None:
    return Tuned(**json.loads(row["tuned"])) if row and row["tuned"] else None


def _tables(names: tuple[str, ...]) -> list[str]:
    """The relations that such names can mean, and perhaps others: each part of a name can be the table's."""
    tables = set()
    for name in names:
        parts = name.split(".") if len(name) <= _LONGEST_NAME else []
        for i in range(len(parts)):
            table = ".".join(parts[i:])
            tables.add(table)
            if table.startswith('"'):
                tables.add(table[1:-1].replace('""', '"'))
    return list(tables)


def _full_names(row: Any) -> set[str]:
    """Those names of a relation that can be of no other one, whatever schemas and tables somebody makes."""
    names = {f"{row['quoted_schema']}.{row['quoted_name']}"}
    if not any(name.startswith('"') or "." in name for name in (row["schema"], row["name"])):
        names.add(f"{row['schema']}.{row['name']}")
    return names


def _columns(
    run: Statements, plpy: Any, relations: list[int], names: list[str]
) -> tuple[dict[int, list[Any]], dict[int, dict[str, Any]]]:
    """By relation: its vectors, and those of its columns with these names that the caller may read."""
    vectors: dict[int, list[Any]] = {}
    columns: dict[int, dict[str, Any]] = {}
    for row in run(plpy, "columns", relations, names):
        if row["vector"] is not None:
            vectors.setdefault(row["relation"], []).append(row)
        if row["is_readable"] and row["name"] in names:
            columns.setdefault(row["relation"], {})[row["name"]] = row
    return vectors, columns


def readable(plpy: Any, schema: str, relation: int, names: list[str]) -> set[str]:
    """Those names that are columns of a relation which the caller may read."""
    return set(_columns(_run(schema), plpy, [relation], names)[1].get(relation, ()))


def _embedding(candidates: list[Any], given: str | None) -> Any:
    """The column that is searched: the one that the call names; else one that its marker makes the default, or the
    usual one; None = none of these."""
    name = given or "segment_embedding"
    known = [row for row in candidates if row["name"] == name or (given is None and row["is_chosen"])]
    if not known:
        return None
    return min(known, key=lambda row: (given is None and row["name"] == name, not row["may_be_default"], row["attnum"]))


class _Trust:
    """Whether stores that the call does not name may be searched: owners of store and schema are trusted."""

    def __init__(self, run: Statements, plpy: Any, moment: Moment) -> None:
        self._run, self._plpy, self._moment = run, plpy, moment
        self._owners: dict[int, bool] = {}
        self._changed: set[int] = set()

    def covers(self, row: Any) -> bool:
        """A relation, and what is read with it."""
        if row["searched_owners"] is not None:
            if row["has_parts"]:
                self._moment.with_parts.add(row["relation"])
            answer: bool = self._run(self._plpy, "is searched", row["relation"], row["owner"])[0]["answer"]
            return answer
        is_trusted = (row["is_own"] or self._trusts(row["owner"])) and (
            row["is_own_schema"] or self._trusts(row["schema_owner"])
        )
        # of those whose owner is not, a role can make any number, and this takes a while for each
        if is_trusted and row["has_parts"]:
            rows = self._run(self._plpy, "owners", row["relation"])
            owners = [found["owner"] for found in rows]
            is_trusted = all(map(self._trusts, owners))
            if any(found["has_parts"] for found in rows):
                self._moment.with_parts.add(row["relation"])
            if all(map(self._trusts, set(owners) - {0})) and 0 in owners:
                self._changed.add(row["relation"])
        return bool(is_trusted)

    def was_changed(self, row: Any) -> bool:
        """Whether nothing but a change since the snapshot of the transaction keeps a relation out. After ``covers``."""
        return row["relation"] in self._changed

    def strangers(self) -> list[int]:
        """Roles whose relations need not be looked at: however many they make, a call takes no longer."""
        return [owner for owner in sorted(_strangers) if not self._trusts(owner)]

    def _trusts(self, owner: int) -> bool:
        if owner not in self._owners:
            self._owners[owner] = self._run(self._plpy, "trusts", owner)[0]["answer"]
            if not self._owners[owner]:
                _strangers.add(owner)
        return self._owners[owner]
