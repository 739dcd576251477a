"""Embedding models and cross-encoders of the sentence-transformers kind, from a local folder.

An embedding model runs in onnxruntime: the same weights give the same vectors, three times as fast for a single query.
Its graph is made once, in a process of its own, in ``.onnx`` of the models folder. A model whose graph cannot be made
faithfully, a cross-encoder, and what runs on a GPU, run in torch, which is an extra of the package.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ml_rag.abc import CHARACTERS_PER_TOKEN
from ml_rag.errors import ModelUnavailable
from ml_rag.server.engines import require
from ml_rag.server.pins import cached_sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ml_rag.abc import Cancelled, EmbedEngine, Engine
    from ml_rag.server.catalogue import ModelEntry

log = logging.getLogger("ml_rag.server")

#: part of an export's name: raise it when ``onnx_export`` or ``onnx_bert`` changes what it writes
EXPORT_VERSION = 2
EXPORT_SECONDS = 600
#: texts that torch runs at once, between two looks at whether the client is still there. A few would leave most of a
#: GPU idle: an H100 embeds (all-MiniLM) 1,050 texts of 150 words a second 16 at once, and 2,300 256 at once
EMBED_BATCH = {"cpu": 16, "cuda": 128}
RERANK_BATCH = {"cpu": 8, "cuda": 32}


def load(entry: ModelEntry, models_dir: Path) -> Engine:
    """An ``EmbedEngine`` or ``RerankEngine``. Raises ``ModelUnavailable``."""
    folder = entry.location(models_dir)
    if entry.task == "rerank" or entry.device != "cpu":
        require(entry, "sentence_transformers")
        _require_device(entry)
        return TorchReranker(folder, entry) if entry.task == "rerank" else TorchEmbedder(folder, entry)
    return _onnx(entry, folder, models_dir) or TorchEmbedder(folder, entry)


def _require_device(entry: ModelEntry) -> None:
    import torch

    kind, _, number = entry.device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ModelUnavailable(
            f"model {entry.id} cannot run on {entry.device}",
            detail=f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs",
            hint='Install a torch that is built for the GPU, or set device = "cpu".',
        )


def _onnx(entry: ModelEntry, folder: Path, models_dir: Path) -> EmbedEngine | None:
    from ml_rag.server.engines.onnx_embedder import open_export

    out, facts = prepare(entry, models_dir)
    if facts is None or "failed" in facts:
        reason = facts["failed"] if facts else "the export could not be written"
        log.warning("model %s runs in torch, slower: %s", entry.id, reason)
        return None
    return open_export(out, folder, entry.threads)


def export_place(entry: ModelEntry, models_dir: Path) -> Path:
    """Where a model's export is, or goes: the models folder, or the user's cache where that is not ours to write."""
    key = export_key(entry.location(models_dir), models_dir, entry.max_tokens)
    out = models_dir / ".onnx" / key
    if out.exists() or os.access(models_dir, os.W_OK):
        return out
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "ml_rag" / "onnx" / key


def prepare(entry: ModelEntry, models_dir: Path) -> tuple[Path, dict[str, Any] | None]:
    """Export an embedding model unless that is done already: the export's folder, and what is known about it. Raises
    ``ModelUnavailable`` where that takes torch, which is not installed."""
    folder, out = entry.location(models_dir), export_place(entry, models_dir)
    facts = _facts(out)
    if facts is None:
        log.info("exporting model %s to ONNX, once", entry.id)
        command = [sys.executable, "-P", "-m", __name__.rpartition(".")[0] + ".onnx_export"]
        try:
            done = subprocess.run(  # noqa: S603 - our own module
                [*command, str(folder), str(out), str(entry.max_tokens or 0)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=EXPORT_SECONDS,
                check=False,
            )
            if done.returncode:
                log.warning("exporting model %s failed: %s", entry.id, done.stderr[-2000:])
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("exporting model %s failed: %s", entry.id, error)
        facts = _facts(out)
    if facts is None or "failed" in facts:
        require(entry, "sentence_transformers")
    return out, facts


def _facts(out: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads((out / "export.json").read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def export_key(folder: Path, models_dir: Path, max_tokens: int | None) -> str:
    """The name of a model's export: it changes with the weights, the tokenizer and the configuration."""
    digest = hashlib.sha256(f"{EXPORT_VERSION} {max_tokens}".encode())
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".safetensors", ".bin", ".model") and path.is_file():
            digest.update(f"{path.relative_to(folder)} {cached_sha256(path, models_dir)}\n".encode())
    return digest.hexdigest()[:32]


class TorchEmbedder:
    """An ``EmbedEngine`` that runs the model as sentence-transformers does."""

    def __init__(self, folder: Path, entry: ModelEntry) -> None:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device=entry.device, local_files_only=True)
        limit = int(model.max_seq_length or entry.max_tokens or 512)
        self.max_tokens = model.max_seq_length = min(limit, entry.max_tokens or limit)
        self._model: Any = model
        self._batch = EMBED_BATCH[model.device.type]
        #: what of a bulk request goes through at once; None = as much as by default
        self.chunk_texts = self.chunk_characters = None
        if model.device.type == "cuda":
            self.chunk_texts, self.chunk_characters = self._batch, self._batch * 1024
        self.dimensions = int(self._model.encode([""]).shape[1])
        self._tokenizer = self.tokenizer()
        #: tokens of each text of the last ``embed``, without a fast tokenizer words
        self.last_token_counts: list[int] = []

    def embed(self, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        self.last_token_counts = [0] * len(texts)
        limit = self.max_tokens * CHARACTERS_PER_TOKEN
        for start in range(0, len(texts), self._batch):
            if cancelled():
                break
            part = [text[:limit] for text in texts[start : start + self._batch]]
            vectors[start : start + len(part)] = self._model.encode(
                part, batch_size=self._batch, convert_to_numpy=True, show_progress_bar=False
            )
            self.last_token_counts[start : start + len(part)] = self._counts(part)
        return vectors

    def _counts(self, texts: list[str]) -> list[int]:
        if self._tokenizer is None:
            return [len(text.split()) for text in texts]
        return [min(len(found.ids), self.max_tokens) for found in self._tokenizer.encode_batch(texts)]

    def tokenizer(self) -> Any:
        backend = getattr(self._model.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer

        plain = Tokenizer.from_str(backend.to_str())
        plain.no_padding()
        plain.no_truncation()
        return plain

    def close(self) -> None:
        self._model = None


class TorchReranker:
    """A ``RerankEngine`` over a cross-encoder with one output.

    The sigmoid brings that output to 0-1 whatever activation the model's own configuration names: the ms-marco models
    name none, so that their scores are not bounded, and any other monotonic one puts the texts in the same order.
    Query and text together are cut at ``max_tokens``, the longer of the two first.
    """

    def __init__(self, folder: Path, entry: ModelEntry) -> None:
        import torch
        from sentence_transformers import CrossEncoder

        model: Any = CrossEncoder(str(folder), device=entry.device, local_files_only=True)
        if model.config.num_labels != 1:
            raise ModelUnavailable(
                f"model {entry.id} cannot rerank", detail=f"it has {model.config.num_labels} outputs instead of one"
            )
        limit = int(model.max_length or 512)
        self.max_tokens = model.max_length = min(limit, entry.max_tokens or limit)
        self._model = model
        self._batch = RERANK_BATCH[model.device.type]
        self._sigmoid = torch.nn.Sigmoid()

    def rerank(self, query: str, texts: Sequence[str], cancelled: Cancelled) -> NDArray[np.float32]:
        scores = np.zeros(len(texts), np.float32)
        limit = self.max_tokens * CHARACTERS_PER_TOKEN
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        for start in range(0, len(order), self._batch):
            if cancelled():
                break
            indexes = order[start : start + self._batch]
            pairs = [(query[:limit], texts[index][:limit]) for index in indexes]
            scores[indexes] = self._model.predict(
                pairs, batch_size=self._batch, activation_fn=self._sigmoid, show_progress_bar=False
            )
        return scores

    def close(self) -> None:
        self._model = None
