"""Embeds with onnxruntime: tokenise, batch by length, run. Imports neither torch nor transformers."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from ml_rag.abc import CHARACTERS_PER_TOKEN
from ml_rag.priority import yield_thread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.abc import Cancelled

#: padded tokens in one run; measured on 2 cores: larger batches are slower there, as they fall out of the cache
RUN_TOKENS = 2048
#: bytes of a graph whose weights may be in memory twice
SMALL_GRAPH = 256 * 1024 * 1024
#: name of the exported graph's output, shape (texts, dimensions)
OUTPUT = "sentence_vector"


def cores() -> int:
    """The processor cores this process may use."""
    return len(os.sched_getaffinity(0)) or 1


def others_running() -> int:
    """Threads of the whole machine that run or wait for a processor at this moment, the calling one not counted."""
    try:
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        return int(running) - 1
    except (OSError, ValueError, IndexError):
        return 0


class OnnxEmbedder:
    """An ``EmbedEngine`` over a graph that ``onnx_export`` wrote."""

    def __init__(
        self, graph: Path, tokenizer: Path, *, max_tokens: int, pad_id: int, threads: int | None = None
    ) -> None:
        self._threads = threads or cores()
        self._session = _open(graph, self._threads)
        # The threads of one run wait for one another at every step of the graph, which is worth it for a query alone on
        # cores that are free: a load, an answer and other programs on both of 2 cores, a query took 220 ms so, by one
        # thread 165 (medians). Where several texts are at hand, a run for each core, of one thread, takes half the
        # processor time: 1.7 ms a query and not 3.7 (32 at once on 2 cores, busy). Not where a second copy of the
        # weights is much memory.
        several = self._threads > 1 and graph.stat().st_size <= SMALL_GRAPH
        self._single: Any = _open(graph, 1) if several else None
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="onnx") if several else None
        self._inputs = {node.name for node in self._session.get_inputs()}
        self.dimensions = int(self._session.get_outputs()[0].shape[1])
        self.max_tokens = max_tokens
        self._pad_id = pad_id
        self._plain = _plain_tokenizer(tokenizer)
        self._cutting = _plain_tokenizer(tokenizer)
        self._cutting.enable_truncation(max_tokens)
        #: tokens of each text of the last ``embed``
        self.last_token_counts: list[int] = []
        #: the same model over the same graphs: for bulk requests, called beside this one, at a lower priority
        self.bulk: OnnxEmbedder | None = None
        if several:
            self.bulk = copy.copy(self)
            self.bulk._pool = ThreadPoolExecutor(
                self._threads, thread_name_prefix="onnx-bulk", initializer=yield_thread
            )

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        limit = self.max_tokens * CHARACTERS_PER_TOKEN
        cut = [text[:limit] for text in texts]
        encodings = self._cutting.encode_batch(cut) if len(cut) > 1 else [self._cutting.encode(text) for text in cut]
        ids = [encoding.ids for encoding in encodings]
        counts = [len(row) for row in ids]
        self.last_token_counts = counts
        vectors = np.zeros((len(ids), self.dimensions), np.float32)
        if self._pool is None or len(ids) == 1:
            crowded = self._single is not None and others_running() > (os.cpu_count() or 1) // 2
            session = self._single if crowded else self._session
            for batch in batches_by_length(counts, RUN_TOKENS):
                if cancelled():
                    break
                vectors[batch] = self._run(session, [ids[index] for index in batch])
            return vectors

        def run(batch: list[int]) -> None:
            if not cancelled():
                vectors[batch] = self._run(self._single, [ids[index] for index in batch])

        for _ in self._pool.map(run, batches_by_length(counts, min(RUN_TOKENS, -(-sum(counts) // self._threads)))):
            pass
        return vectors

    def _run(self, session: Any, rows: list[list[int]]) -> NDArray[np.float32]:
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self._pad_id, np.int64)
        mask = np.zeros((len(rows), width), np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
        feed = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._inputs:
            feed["token_type_ids"] = np.zeros_like(ids)
        vectors: NDArray[np.float32] = session.run([OUTPUT], feed)[0]
        return vectors

    def tokenizer(self) -> Tokenizer:
        return self._plain

    def close(self) -> None:
        if self.bulk is not None:
            self.bulk.close()
        if self._pool is not None:
            self._pool.shutdown()
        self._session = self._single = None


def _open(graph: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that spin while a query runs, and only then: 3.2 ms against 3.8-5.2 without on an idle machine of two
    # cores; with four busy processes on those cores 12 ms against 8.6. Between queries nothing spins.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"], enable_fallback=False)


def batches_by_length(counts: Sequence[int], tokens: int) -> list[list[int]]:
    """Indexes in batches of like length, longest first, each at most ``tokens`` when padded (or a single text)."""
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
        if room == 0:
            batches.append([])
            room = max(1, tokens // max(1, counts[index]))
        batches[-1].append(index)
        room -= 1
    return batches


def _plain_tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def open_export(folder: Path, model: Path, threads: int | None) -> OnnxEmbedder:
    """The embedder of a finished export; ``model``: the model's folder, for its tokenizer."""
    facts = json.loads((folder / "export.json").read_text())
    return OnnxEmbedder(
        folder / "model.onnx",
        model / "tokenizer.json",
        max_tokens=facts["max_tokens"],
        pad_id=facts["pad_id"],
        threads=threads,
    )
