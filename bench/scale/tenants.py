"""Ways to keep the rows of tenants apart: a column, a partition or a store for each."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import psycopg
from psycopg.types.json import Jsonb

from bench.measure import own_megabytes
from bench.scale.setting import (
    MODEL,
    Row,
    Setting,
    answer,
    bare,
    blocks,
    connect,
    copy,
    create_store,
    medians,
    options_of,
    own_database,
    questions,
    seconds,
    value,
)

COUNTS, MOST = (10, 1_000), (100_000,)
ROWS, QUICK_ROWS = 100_000, 20_000
#: more of them are not tried: what one costs at 1 000 says what 100 000 would
FEW = 1_000
LAYOUTS = ("column", "partitions", "stores")
CATALOG = (
    "SELECT sum(pg_total_relation_size(c.oid)) / 1e3 FROM pg_class AS c"
    " WHERE c.relnamespace = 'pg_catalog'::regnamespace"
)


def measure(setting: Setting) -> list[Row]:
    found: list[Row] = []
    for tenants in COUNTS + (MOST if setting.most or not setting.quick else ()):
        rows = max(QUICK_ROWS if setting.quick else ROWS, tenants)
        for layout in LAYOUTS:
            if layout != "column" and tenants > FEW:
                continue
            row = {"tenants": tenants, "rows": rows, "layout": layout, **_one(setting, layout, tenants, rows)}
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def _table(layout: str, tenant: int) -> str:
    return f"tenants.store_{tenant}" if layout == "stores" else "tenants.all_of_them"


def _make(owner: psycopg.Connection[Any], layout: str, tenants: int) -> None:
    """Empty; with all indexes but those of the embeddings."""
    if layout == "stores":
        for i in range(tenants):
            create_store(owner, _table(layout, i))
    elif layout == "column":
        create_store(owner, _table(layout, 0))
        owner.execute("ALTER TABLE tenants.all_of_them ADD COLUMN tenant integer NOT NULL")
        owner.execute("CREATE INDEX ON tenants.all_of_them (tenant)")
    else:
        owner.execute(
            "CREATE TABLE tenants.all_of_them (document_name text NOT NULL, metadata jsonb NOT NULL DEFAULT '{}',"
            " document_id bigint, segment_number integer, tenant integer, segment text NOT NULL,"
            " segment_embedding vector(384), PRIMARY KEY (tenant, document_id, segment_number))"
            " PARTITION BY LIST (tenant)"
        )
        owner.execute(
            f"COMMENT ON COLUMN tenants.all_of_them.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID={MODEL}'"
        )
        for i in range(tenants):
            owner.execute(f"CREATE TABLE tenants.part_{i} PARTITION OF tenants.all_of_them FOR VALUES IN ({i})")
        owner.execute("SELECT ml_rag.enable_keyword_search('tenants.all_of_them', '{\"language\": \"en\"}')")


def _fill(owner: psycopg.Connection[Any], layout: str, tenants: int, rows: int) -> None:
    size = rows // tenants
    first = 0
    if layout != "stores":
        for vectors in blocks(rows, 8):
            numbers = np.arange(first, first + len(vectors))
            copy(owner, _table(layout, 0), vectors, first, np.minimum(numbers // size, tenants - 1))
            first += len(vectors)
        return
    vectors = np.concatenate(list(blocks(rows, 8)))
    for i in range(tenants):
        copy(owner, _table(layout, i), vectors[i * size : (i + 1) * size], i * size)


def _index(owner: psycopg.Connection[Any], layout: str, tenants: int) -> None:
    for i in range(tenants if layout == "stores" else 1):
        owner.execute('SELECT ml_rag.index_store(%s, NULL, \'{"type": "hnsw"}\')', (_table(layout, i),))


def _one(setting: Setting, layout: str, tenants: int, rows: int) -> Row:
    with own_database(setting) as own, psycopg.connect(own.owner, autocommit=True) as owner:
        owner.execute("SET client_min_messages = error; CREATE SCHEMA tenants; GRANT USAGE ON SCHEMA tenants TO asker")
        before = value(owner, CATALOG)
        row: Row = {"make s": seconds(lambda: _make(owner, layout, tenants))}
        _fill(owner, layout, tenants, rows)
        row["index s"] = seconds(lambda: _index(owner, layout, tenants))
        row["catalogue kB"] = value(owner, CATALOG) - before
        owner.execute("VACUUM ANALYZE")
        row["size MB"] = value(
            owner,
            "SELECT sum(pg_total_relation_size(c.oid)) / 1e6 FROM pg_class AS c"
            " WHERE c.relnamespace = 'tenants'::regnamespace AND c.relkind = 'r'",
        )
        row |= _searches(own, owner, layout, tenants)
        row |= _writes(owner, layout, tenants)
    return row


def _searches(setting: Setting, owner: psycopg.Connection[Any], layout: str, tenants: int) -> Row:
    asked = questions()
    # not in order, so that a session meets many tenants
    order = np.random.default_rng(4).permutation(max(tenants, len(asked)))[:200] % tenants

    def tenant(i: int) -> int:
        return int(order[i % len(order)])

    def options(i: int) -> str:
        given: dict[str, Any] = {"vector_store": [_table(layout, tenant(i))]}
        if layout != "stores":
            given["filters"] = {"tenant": {"eq": tenant(i)}}
        return options_of(asked[i % len(asked)], **given)

    def statement(i: int) -> str:
        condition = "" if layout == "stores" else f"WHERE tenant = {tenant(i)}"
        return bare(_table(layout, tenant(i)), asked[i % len(asked)], condition=condition)

    with connect(setting.asker) as ours, connect(setting.asker) as plain:
        times = medians(
            {
                "ours": lambda i: answer(ours, options(i)),
                "bare": lambda i: plain.execute(statement(i)).fetchall(),
            },
            setting.rounds,
        )
        for i in range(len(order)):
            answer(ours, options(i))
        return {f"{name} ms": found for name, found in times.items()} | {
            "backend MB": own_megabytes(ours.info.backend_pid)
        }


def _writes(owner: psycopg.Connection[Any], layout: str, tenants: int) -> Row:
    vector = questions()[0]
    numbers = itertools.count(10**9)

    def write(i: int) -> None:
        tenant = i % tenants
        columns = "document_name, metadata, document_id, segment_number, segment, segment_embedding"
        values = "%s, %s, %s, 0, 'a segment that is written alone', %s"
        if layout != "stores":
            columns, values = f"{columns}, tenant", f"{values}, {tenant}"
        owner.execute(
            f"INSERT INTO {_table(layout, tenant)} ({columns}) VALUES ({values})",
            ("new document", Jsonb({}), next(numbers), vector),
        )

    return {"write ms": medians({"write": write}, 100)["write"]}
