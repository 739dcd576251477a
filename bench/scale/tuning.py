"""What ml_rag.tune_index measures over more and more vectors with neighbours like those of texts, and without.

Of texts: real embeddings of real texts, repeated with noise, and real questions. Made up: those of the other curves.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import numpy as np
import psycopg

from bench import corpus
from bench.scale import page
from bench.scale.setting import BLOCK, DIMENSIONS, MODEL, N, Row, Setting, blocks, copy, create_store, seconds, value

SIZES, LARGE, LARGEST = (100_000,), (300_000,), (1_000_000,)
KINDS = ("none", "halfvec", "binary")
BATCH = 64
SETS = ("squad2", "vaswani_npl")
#: of the evaluation data; what has fewer words is a heading
TEXTS, QUESTIONS, WORDS = 30_000, 100, 5
#: length of the noise beside the embedding, whose length is 1: copies of a text are about 0.2 apart by cosine. The 1st,
#: 10th, 100th of a million are 0.27, 0.33, 0.40 from a question, and of the 30,000 texts 0.27, 0.39, 0.54
NOISE = 0.5


def embeddings(address: str) -> tuple[np.ndarray, np.ndarray]:
    """Of the texts and of the questions of the evaluation data, kept in bench/out."""
    path = page.OUT / "scale_tuning.npz"
    if not path.exists():

        def of(texts: list[str]) -> np.ndarray:
            batches = [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]
            return np.concatenate([embedded(address, batch) for batch in batches])

        def asked(name: str) -> list[str]:
            return [text for text in corpus.texts(name, "questions.jsonl") if text.strip()]

        questions = itertools.chain.from_iterable(zip(*map(asked, SETS), strict=False))
        np.savez(path, texts=of(texts()), questions=of(list(itertools.islice(questions, QUESTIONS))))
    found = np.load(path)
    return found["texts"], found["questions"]


def texts() -> list[str]:
    """Of the evaluation data, few alike: paragraphs, abstracts, passages and claims, and the sentences of each.

    The short ones first: what the model takes at once is as long as the longest.
    """
    whole = [text for name in SETS for text in corpus.texts(name, "corpus.jsonl")] + corpus.claims()
    sentences = [sentence for text in whole for sentence in re.split(r"(?<=[.!?])\s+", text)]
    found = {text.lower(): text for text in (" ".join(text.split()) for text in whole + sentences)}
    return sorted([text for text in found.values() if len(text.split()) >= WORDS][:TEXTS], key=len)


def embedded(address: str, texts: list[str]) -> np.ndarray:
    http = HTTPConnection("model-server")
    http.sock = socket.socket(socket.AF_UNIX)
    http.sock.connect(address.removeprefix("unix:"))
    with closing(http):
        http.request("POST", "/v1/embeddings", json.dumps({"model": MODEL, "input": texts}))
        return np.array([one["embedding"] for one in json.loads(http.getresponse().read())["data"]], "f4")


def repeated(texts: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    """``rows`` vectors in blocks: the texts in another order each time, all but the first time with noise (seeded)."""
    random = np.random.default_rng(7)
    order = np.concatenate([random.permutation(len(texts)) for _ in range(1 + rows // len(texts))])[:rows]
    for first in range(0, rows, BLOCK):
        found = texts[order[first : first + BLOCK]]
        noise = random.standard_normal(found.shape, dtype="f4") * NOISE / DIMENSIONS**0.5
        noise[: max(0, len(texts) - first)] = 0
        found = found + noise
        yield found / np.linalg.norm(found, axis=1, keepdims=True)


def measure(setting: Setting) -> list[Row]:
    sizes = SIZES + (() if setting.quick else LARGE) + (LARGEST if setting.most else ())
    texts, asked = embeddings(setting.address)
    found: list[Row] = []
    with psycopg.connect(setting.owner, autocommit=True) as owner:
        owner.execute("SET client_min_messages = error")
        for size in sizes:
            for vectors, source, questions, kinds in (
                ("texts", repeated(texts, size), asked, KINDS),
                ("made up", blocks(size, 8), next(blocks(QUESTIONS, 9)), KINDS[:1]),
            ):
                create(owner, source, questions, size)
                for kind in kinds:
                    found.append({"rows": size, "vectors": vectors, "kind": kind, **_one(owner, kind)})
                    print(json.dumps(found[-1]), flush=True)
    return found


def create(owner: psycopg.Connection, source: Iterator[np.ndarray], questions: np.ndarray, size: int) -> None:
    owner.execute("DROP TABLE IF EXISTS tuned, asked; CREATE TABLE asked (query_embedding vector)")
    for vector in questions:
        owner.execute("INSERT INTO asked VALUES (%s)", (str(vector.tolist()),))
    create_store(owner, "public.tuned")
    for number, vectors in enumerate(source):
        copy(owner, "tuned", vectors, number * BLOCK)
    owner.execute("VACUUM ANALYZE tuned")
    owner.execute(f"SET maintenance_work_mem = '{max(1, size // 250_000)}GB'")


def _one(owner: psycopg.Connection, kind: str) -> Row:
    options = json.dumps({"type": "hnsw", "quantization": kind})
    row: Row = {"build s": seconds(lambda: owner.execute("SELECT ml_rag.index_store('tuned', NULL, %s)", (options,)))}
    row["curve"] = owner.execute(
        "SELECT ef_search, rescore, recall, milliseconds, is_kept FROM ml_rag.tune_index('tuned', %s)",
        (json.dumps({"questions": "asked", "n_citations": N}),),
    ).fetchall()
    index = value(
        owner,
        "SELECT i.oid::regclass FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS a"
        " ON a.oid = i.relam WHERE a.amname = 'hnsw' AND x.indrelid = 'tuned'::regclass",
    )
    owner.execute(f"DROP INDEX {index}")
    return row
