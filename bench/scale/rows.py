"""One store of more and more rows, under each kind of HNSW index."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import psycopg

from bench.measure import own_megabytes
from bench.retrieval import EmbeddingCall
from bench.scale.setting import (
    BLOCK,
    TEXTS,
    N,
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
    questions,
    seconds,
    value,
)

SIZES, LARGE, LARGEST = (10_000, 30_000, 100_000), (300_000,), (1_000_000,)
KINDS = ("none", "halfvec", "binary")
#: of more rows only our index is built, which is the same statement
BARE_BUILD = 100_000
_BARE = {
    "none": "segment_embedding vector_cosine_ops",
    "halfvec": "(segment_embedding::halfvec(384)) halfvec_cosine_ops",
    "binary": "(binary_quantize(segment_embedding)::bit(384)) bit_hamming_ops",
}
INDEX = "grown_embedding"


def recall(connection: psycopg.Connection[Any], found: list[list[str]], exact: list[list[str]]) -> float:
    return sum(len(set(f) & set(e)) for f, e in zip(found, exact, strict=True)) / sum(map(len, exact))


def measure(setting: Setting) -> list[Row]:
    sizes = SIZES + (() if setting.quick else LARGE) + (LARGEST if setting.most else ())
    found: list[Row] = []
    with psycopg.connect(setting.owner, autocommit=True) as owner:
        owner.execute("SET client_min_messages = error")
        create_store(owner, "public.grown")
        rows = 0
        source = blocks(sizes[-1], 8)
        vectors = next(source)
        for size in sizes:
            while rows < size:
                here = rows % BLOCK
                part = vectors[here : here + size - rows]
                copy(owner, "grown", part, rows)
                rows += len(part)
                if rows % BLOCK == 0 and rows < sizes[-1]:
                    vectors = next(source)
            owner.execute("VACUUM ANALYZE grown")
            owner.execute(f"SET maintenance_work_mem = '{max(1, size // 250_000)}GB'")
            for kind in KINDS:
                found.append({"rows": size, "kind": kind, **_one(setting, owner, size, kind)})
                print(json.dumps(found[-1]), flush=True)
    return found


def _one(setting: Setting, owner: psycopg.Connection[Any], size: int, kind: str) -> Row:
    row: Row = {}
    if size <= BARE_BUILD:
        row["bare build s"] = seconds(
            lambda: owner.execute(f"CREATE INDEX {INDEX} ON grown USING hnsw ({_BARE[kind]})")
        )
        owner.execute(f"DROP INDEX {INDEX}")
    row["build s"] = seconds(
        lambda: owner.execute(
            "SELECT ml_rag.index_store('grown', NULL, %s)", (json.dumps({"type": "hnsw", "quantization": kind}),)
        )
    )
    index = value(
        owner,
        "SELECT i.oid::regclass FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS a"
        " ON a.oid = i.relam WHERE a.amname = 'hnsw' AND x.indrelid = 'grown'::regclass",
    )
    row["index MB"] = value(owner, f"SELECT pg_relation_size('{index}') / 1e6")
    row["table MB"] = value(owner, "SELECT pg_table_size('grown') / 1e6")
    asked = questions()
    with_vector = [options_of(q, vector_store=["public.grown"]) for q in asked]
    with_text = options_of(None, vector_store=["public.grown"])
    # what ours sets by itself
    ef_search = {"none": 40 if size <= 20_000 else 200, "halfvec": 40 if size <= 20_000 else 200, "binary": 400}[kind]
    with (
        closing(EmbeddingCall(setting.address)) as embed,
        connect(setting.asker) as ours,
        connect(setting.asker, ef_search=ef_search) as plain,
    ):

        def knn(question: str) -> list[Any]:
            return plain.execute(bare("grown", question, kind)).fetchall()

        times = medians(
            {
                "bare": lambda i: knn(asked[i % len(asked)]),
                "ours": lambda i: answer(ours, with_vector[i % len(asked)]),
                "bare with embedding": lambda i: knn(embed(TEXTS[i % len(TEXTS)]).to_text()),
                "ours with embedding": lambda i: answer(ours, with_text, TEXTS[i % len(TEXTS)]),
            },
            setting.rounds,
        )
        row |= {f"{name} ms": milliseconds for name, milliseconds in times.items()}
        row["backend MB"], row["bare backend MB"] = (
            own_megabytes(ours.info.backend_pid),
            own_megabytes(plain.info.backend_pid),
        )
        some = asked[:20]
        exact = [_names(owner.execute(_exact(question)).fetchall()) for question in some]
        row["bare recall"] = recall(owner, [_names(knn(question)) for question in some], exact)
        # the text of a segment names it: neighbours are left out for that
        alone = {"retrieval_options": {"segment_overlap": 0}}
        row["recall"] = recall(
            owner,
            [
                [c["segment"] for c in answer(ours, options_of(q, vector_store=["public.grown"], **alone))["citations"]]
                for q in some
            ],
            exact,
        )
    owner.execute(f"DROP INDEX {index}")
    return row


def _exact(question: str) -> str:
    of = f"segment_embedding <=> '{question}'"
    return f"SELECT document_name, segment FROM grown ORDER BY ({of}) + 0 LIMIT {N}"


def _names(rows: list[Any]) -> list[str]:
    return [row[1] for row in rows]
