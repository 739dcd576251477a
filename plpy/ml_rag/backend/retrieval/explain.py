"""Option explain: how each arm searched each store, of what the caller may see.

The plan itself stays here. It holds the conditions of policies and the relations behind views, and its estimates come
from rows that the caller may not see: told is only which indexes of the store itself, or of its partitions, are used.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from ml_rag.backend.retrieval.plan import plan
from ml_rag.backend.retrieval.shape import Near
from ml_rag.backend.retrieval.stores import Tuned
from ml_rag.backend.statements import Statements

_run = Statements(
    {
        "indexes": (
            "SELECT i.relname::text AS index, m.amname::text AS method FROM ("
            "SELECT $1::oid AS oid UNION SELECT p.relid FROM pg_partition_tree($1) AS p"
            " UNION SELECT h.inhrelid FROM pg_inherits AS h WHERE h.inhparent = $1) AS part"
            " JOIN pg_index AS x ON x.indrelid = part.oid JOIN pg_class AS i ON i.oid = x.indexrelid"
            " JOIN pg_am AS m ON m.oid = i.relam JOIN pg_namespace AS n ON n.oid = i.relnamespace"
            " WHERE (n.nspname, i.relname) IN (SELECT * FROM unnest($2::name[], $3::name[])) ORDER BY i.relname",
            *("oid", "text[]", "text[]"),
        ),
        "kind": (
            "SELECT c.relkind::text AS kind, ml_rag._is_distributed(c.oid) AS is_distributed,"
            " ml_rag._has_shards(c.oid) AS has_shards, current_setting('hnsw.iterative_scan', true) AS hnsw,"
            " current_setting('ivfflat.iterative_scan', true) AS ivfflat,"
            " ml_rag._analyzed_rows(c.oid) AS rows FROM pg_class AS c WHERE c.oid = $1",
            "oid",
        ),
    }
)


def steps(context: Any, found: Any, failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the trace: of each arm, of fusing, of the threshold. None includes the time that this takes."""
    began = time.perf_counter()
    search, row = found.search, found.row
    explained = _explained(context, found)
    read_indexes = [sorted(_names(explained, f"{arm.expression}_found")) for arm in search.shape.arms]
    counts, per_store = list(row["counts"]), list(row["found"])
    told: dict[int, dict[str, Any]] = {place: {} for place in range(1, len(search.shape.arms) + 1)}
    for (place, i), n in zip(search.searched(found.sources), per_store, strict=True):
        arm, source = search.shape.arms[place - 1], found.sources[i - 1]
        facts = dict(search.facts.get((arm.name, source.store.vector_store), {}))
        if "skipped" not in facts:
            read = source.searches[place - 1]
            if isinstance(read, Near):
                facts |= _read(context, search, found, source, read_indexes[place - 1], read)
            facts["candidates"] = n if isinstance(read, Near) else min(n, arm.candidates)
        told[place][source.store.vector_store] = facts
    for own in told.values():
        own |= {
            f["store"]: {"skipped": f.get("skipped") or f"{f['sqlstate']}: {f['message'].rstrip('.')}."}
            for f in failures
        }
    first = next(iter(told[1].values()), None)
    if first is not None:
        first["explaining"] = 1000 * (time.perf_counter() - began)
    ended = datetime.now(UTC)
    made = []
    for place, arm in enumerate(search.shape.arms, 1):
        facts = {"arm": arm.name, "stores": told[place], "candidates": counts[place - 1]}
        made.append({"stage": arm.kind.stage, "ended": ended, "facts": facts})
    if len(search.shape.arms) > 1:
        made.append({"stage": "fuse", "ended": ended, "facts": {"candidates": counts[-2]}})
    nearest = row["nearest"] and float(row["nearest"])
    facts = {"candidates": counts[-1], "nearest": nearest, "max_distance": search.values["max_distance"]}
    made.append({"stage": "threshold", "ended": ended, "facts": facts})
    return made


def _explained(context: Any, found: Any) -> list[Any]:
    """The plan of the statement, planned as it was run."""
    search = found.search
    # with the filter itself, not the rows that it leaves
    sources = tuple(source._replace(is_narrow=False) for source in found.sources)
    made = plan(search.shape, sources, context.schema)
    text = f"EXPLAIN (FORMAT JSON, COSTS OFF, VERBOSE) {made.text}"
    values = [search.values[name] for name in made.slots]
    rows = context.plpy.execute(context.plpy.prepare(text, list(made.slots.values())), values)
    explained: list[Any] = json.loads(rows[0]["QUERY PLAN"])
    return explained


def _read(
    context: Any, search: Any, found: Any, source: Any, read_indexes: list[tuple[str, str]], read: Near
) -> dict[str, Any]:
    store = source.store
    kind = _run(context.plpy, "kind", store.relation)[0]
    facts: dict[str, Any] = {"sort": read.sort, "limit": read.limit, "reads": search.reads}
    if kind["kind"] in ("v", "f"):
        return {"plan": "view" if kind["kind"] == "v" else "foreign table"} | facts
    if kind["has_shards"]:
        return {"plan": "shards"} | facts
    if kind["is_distributed"]:
        return {"plan": "distributed"} | facts
    schemas, names = [schema for schema, _ in read_indexes], [name for _, name in read_indexes]
    indexes = [dict(row) for row in _run(context.plpy, "indexes", store.relation, schemas, names)]
    method = min((row["method"] for row in indexes if row["method"] in ("hnsw", "ivfflat")), default="exact")
    facts |= {"plan": method, "indexes": indexes}
    ef_search, probes, *_ = found.settings
    if method != "exact":
        facts["iterative_scan"] = kind[method]
        facts |= {"ef_search": int(ef_search)} if method == "hnsw" else {"probes": int(probes)}
        if store.tuned is not None:
            facts["tuned"] = _tuned(context, store.vector_store, store.tuned, kind["rows"])
    if read.quantization is not None and read.sort == "index":
        facts["rescored"] = read.rescored
    return facts


def _tuned(context: Any, store: str, tuned: Tuned, rows: int) -> dict[str, Any]:
    """What ml_rag.tune_index measured; with a warning if the table has doubled since."""
    measured = tuned.tuned_rows or 0
    if rows >= 2 * measured:
        context.plpy.warning(
            f"{store} has doubled since the settings of its index were measured",
            detail=f"It had {measured} rows, and has {rows}.",
            hint=f"SELECT * FROM ml_rag.tune_index('{store}') measures them again.",
            sqlstate="01000",
        )
    return {"recall": tuned.recall, "rows": measured, "is_outgrown": rows >= 2 * measured}


def _names(node: Any, name: str, *, is_inside: bool = False, schema: str = "") -> set[tuple[str, str]]:
    """Schemas and names of the indexes that a common table expression reads."""
    if isinstance(node, list):
        return set().union(*(_names(one, name, is_inside=is_inside, schema=schema) for one in node))
    if not isinstance(node, dict):
        return set()
    is_inside = is_inside or node.get("Subplan Name") == f"CTE {name}"
    schema = node.get("Schema", schema)  # a scan of a bitmap index has that of the table above it
    own = {(schema, node["Index Name"])} if is_inside and "Index Name" in node else set()
    return own.union(*(_names(value, name, is_inside=is_inside, schema=schema) for value in node.values()))
