"""llama.cpp by its C interface: one model, one context; one sequence of tokens in the KV cache, or several to pool.

``llama_cpp.Llama`` is not used, because its loop can neither be interrupted inside a prompt batch nor check drafts
without keeping the logits of every prompt token (context x vocabulary floats), and because it redirects the process's
stdout and stderr while it loads. Not thread-safe, but for :attr:`NativeModel.abort`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from ml_rag.abc import Cancelled, Sampling
from ml_rag.errors import EngineFailed, InvalidRequest, ModelUnavailable
from ml_rag.server.engines import time_limit
from ml_rag.server.engines.llama_grammar import json_grammar

#: seconds between two looks at ``cancelled`` while a prompt is evaluated
CANCEL_POLL = 0.02
_log = logging.getLogger("ml_rag.llama_cpp")
_ERROR = 4  # of ggml_log_level
_last_errors: list[str] = []


def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    # An exception must not cross into C; text may be cut within a character.
    line = text.decode("utf-8", "replace").strip()
    if not line.strip("."):
        return
    if level == _ERROR:
        _last_errors[:] = [*_last_errors[-3:], line]
    # All of it is for developers of llama.cpp; what went wrong for good is in the exception that follows.
    _log.debug("%s", line)


_log_callback = llama_cpp.llama_log_callback(_on_log)


# llama.cpp asks the abort callback some thousand times a token; a Python function there would cost more than the
# model. strlen of a one-character buffer does the same in C: "" is 0 (go on), "\x01" is 1 (stop).
_strlen_address = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value or 0
_abort_callback = llama_cpp.ggml_abort_callback(_strlen_address)

# Tokens that penalties look back on: an answer of the default length.
_SAMPLER_WINDOW = 256
# llama.cpp multiplies a single token by other kernels than several, with other rounding. So that a prompt gives the
# same logits whether its prefix is cached or not, its end is never evaluated as a single token.
_REPLAYED = 2
_NO_MEMORY_SLOT, _ABORTED = 1, 2


class Aborted(Exception):
    """Evaluation was stopped by :attr:`NativeModel.abort`."""


class NativeModel:
    """A GGUF model and its context.

    Raises ``ModelUnavailable``: the file is missing, no GGUF, of an unknown architecture, or too big for the memory.
    """

    def __init__(
        self,
        path: Path,
        *,
        context_tokens: int | None,
        default_context_tokens: int,
        batch_tokens: int,
        threads: int | None,
        gpu_layers: int,
        pooling: int | None = None,
        sequences: int = 1,
    ) -> None:
        """``pooling``: for ``pooled``, one of llama.cpp's numbers, of up to so many ``sequences`` at once."""
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        if not path.is_file():
            raise ModelUnavailable("the model file is missing", detail=f"{path.name} is not there.")
        llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))  # instead of stderr
        llama_cpp.llama_backend_init()
        _last_errors.clear()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = gpu_layers
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self._model:
            raise ModelUnavailable("the model file cannot be loaded", detail=" ".join(_last_errors) or path.name)
        vocabulary = self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        #: one of llama.cpp's numbers, ``LLAMA_VOCAB_TYPE_…``
        self.vocabulary_kind = int(llama_cpp.llama_vocab_type(vocabulary))
        #: what a text begins and ends with, and what stands between two; -1 where there is nothing
        self.begin_token = int(llama_cpp.llama_vocab_bos(vocabulary))
        self.end_token = int(llama_cpp.llama_vocab_eos(vocabulary))
        self.separator_token = int(llama_cpp.llama_vocab_sep(vocabulary))
        self.wants_begin_token = bool(llama_cpp.llama_vocab_get_add_bos(vocabulary))
        self.wants_end_token = bool(llama_cpp.llama_vocab_get_add_eos(vocabulary))
        #: dimensions of what the model makes of a text, and outputs of its classifier, 0 where it has none
        self.width = int(llama_cpp.llama_model_n_embd(self._model))
        self.outputs = int(llama_cpp.llama_model_n_cls_out(self._model))
        self.trained_context = int(llama_cpp.llama_model_n_ctx_train(self._model))
        self.context_tokens = context_tokens or min(self.trained_context, default_context_tokens)
        self.batch_tokens = min(batch_tokens, self.context_tokens)
        cores = threads or len(os.sched_getaffinity(0))
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = self.context_tokens
        settings.n_batch = settings.n_ubatch = self.batch_tokens
        settings.n_threads = settings.n_threads_batch = cores
        # On a CPU flash attention is not faster, and its result depends on how a prompt is cut into batches: the same
        # question would get another answer when its prefix comes from the cache.
        settings.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO if gpu_layers else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        settings.no_perf = True
        if pooling is not None:
            settings.embeddings, settings.pooling_type = True, pooling
            settings.n_seq_max, settings.kv_unified = sequences, True
            # nothing is cached here: 1076 tokens of 200 a second and core, 579 without (multilingual-e5-small, Q4_0)
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            detail = " ".join(_last_errors) or f"context_tokens is {self.context_tokens}"
            self.close()
            raise ModelUnavailable("the model's context cannot be created", detail=detail)
        self._memory = llama_cpp.llama_get_memory(self._context)
        #: set ``abort.value`` to b"\x01", from any thread, to stop the evaluation in progress
        self.abort = ctypes.create_string_buffer(2)
        llama_cpp.llama_set_abort_callback(self._context, _abort_callback, ctypes.cast(self.abort, ctypes.c_void_p))
        self._batch = llama_cpp.llama_batch_init(self.batch_tokens, 0, 1)
        self._piece = ctypes.create_string_buffer(256)
        #: whether the last tokens can be taken back; a recurrent state cannot
        self.can_rewind = not (
            llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        )
        #: tokens whose keys and values are in the cache, in order
        self.evaluated: list[int] = []
        #: tokens evaluated since loading, for tests and metrics of prefix reuse
        self.evaluated_total = 0

    def close(self) -> None:
        if self._batch is not None:
            llama_cpp.llama_batch_free(self._batch)
        if self._context:
            llama_cpp.llama_free(self._context)
        if self._model:
            llama_cpp.llama_model_free(self._model)
        self._batch = self._context = self._model = None

    # Vocabulary

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it, e.g. ``<|im_end|>``; "" for a token it does not have."""
        if token < 0:
            return ""
        return bytes(llama_cpp.llama_vocab_get_text(self._vocabulary, token)).decode("utf-8", "replace")

    def ends_generation(self, token: int) -> bool:
        """Whether the token ends a text or a turn."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocabulary, token))

    def special_tokens(self) -> dict[str, int]:
        """Text and id of every token that only a chat template may write: control, unknown and user-defined ones."""
        special = (
            llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
            | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
            | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        )
        attribute = llama_cpp.llama_vocab_get_attr
        found = (t for t in range(self.vocabulary_size) if attribute(self._vocabulary, t) & special)
        return {text: token for token in found if (text := self.token_text(token))}

    def is_control(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_control(self._vocabulary, token))

    def tokenize(self, text: str, *, special: bool, whole: bool = False) -> list[int]:
        """Tokens of ``text``; with ``special``, names of control tokens in it become those tokens; with ``whole``,
        those that begin and end a text are added."""
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        buffer = (llama_cpp.llama_token * capacity)()
        length = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), buffer, capacity, whole, special)
        if length < 0:
            raise EngineFailed("the text cannot be tokenized", detail=f"{-length} tokens from {len(data)} bytes")
        return list(buffer[:length])

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; possibly a part of a character; nothing for control tokens."""
        length = llama_cpp.llama_token_to_piece(self._vocabulary, token, self._piece, len(self._piece), 0, False)
        if length < 0:
            self._piece = ctypes.create_string_buffer(-length)
            length = llama_cpp.llama_token_to_piece(self._vocabulary, token, self._piece, -length, 0, False)
        return self._piece.raw[:length]

    def score(self, token: int) -> float:
        """Of a unigram vocabulary: the logarithm of how likely the token is."""
        return float(llama_cpp.llama_vocab_get_score(self._vocabulary, token))

    def chat_template(self) -> str | None:
        template = llama_cpp.llama_model_chat_template(self._model, None)
        return template.decode("utf-8", "replace") if template else None

    # Evaluation

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep of the cache what ``tokens`` begins with, drop the rest; how many tokens were kept.

        The last two of ``tokens`` are left to evaluate in any case, since sampling needs the logits of the last.
        """
        same = 0
        for old, new in zip(self.evaluated, tokens[:-_REPLAYED], strict=False):
            if old != new:
                break
            same += 1
        self.truncate(same)
        return len(self.evaluated)

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens from the cache; models with a recurrent state lose all of it."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
            llama_cpp.llama_memory_clear(self._memory, True)
            length = 0
        del self.evaluated[length:]

    def batches(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """``tokens`` in pieces of ``batch_tokens``, the last of them not a single token."""
        start = 0
        while start < len(tokens):
            left = len(tokens) - start
            size = self.batch_tokens - (left == self.batch_tokens + 1)
            yield tokens[start : start + size]
            start += size

    def evaluate(self, tokens: Sequence[int], *, all_logits: bool = False) -> None:
        """Evaluate ``tokens`` after those in the cache; at most ``batch_tokens`` of them.

        Raises ``Aborted`` (:attr:`abort` was set; the cache is as before); ``EngineFailed`` (llama.cpp failed).
        """
        batch, past, length = self._batch, len(self.evaluated), len(tokens)
        batch.n_tokens = length
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits
        batch.logits[length - 1] = True
        status = llama_cpp.llama_decode(self._context, batch)
        if status == 0:
            self.evaluated.extend(tokens)
            self.evaluated_total += length
            return
        self.truncate(past)
        if status == _ABORTED:
            raise Aborted
        why = "no room in the KV cache" if status == _NO_MEMORY_SLOT else " ".join(_last_errors)
        raise EngineFailed("the model failed", detail=f"llama_decode returned {status}: {why}")

    def pooled(self, sequences: Sequence[Sequence[int]], width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """What the model makes of each sequence, shape (sequences, width); ``batch_tokens`` together at most.

        Raises ``Aborted`` (:attr:`abort` was set); ``EngineFailed`` (llama.cpp failed).
        """
        batch, filled = self._batch, 0
        for number, tokens in enumerate(sequences):
            for place, token in enumerate(tokens):
                batch.token[filled] = token
                batch.pos[filled] = place
                batch.n_seq_id[filled] = 1
                batch.seq_id[filled][0] = number
                batch.logits[filled] = True
                filled += 1
        batch.n_tokens = filled
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, True)
            status = llama_cpp.llama_decode(self._context, batch)
        else:
            status = llama_cpp.llama_encode(self._context, batch)
        if status == _ABORTED:
            raise Aborted
        if status != 0:
            raise EngineFailed("the model failed", detail=f"llama.cpp returned {status}: {' '.join(_last_errors)}")
        found = np.empty((len(sequences), width), np.float32)
        for number in range(len(sequences)):
            found[number] = llama_cpp.llama_get_embeddings_seq(self._context, number)[:width]
        return found

    # Sampling

    @contextmanager
    def sampler(self, sampling: Sampling) -> Iterator[Sampler]:
        """A sampler for one answer, freed at the end.

        Raises ``InvalidRequest``: the JSON schema cannot be made into a grammar.
        """
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        try:
            for part in self._parts(sampling):
                llama_cpp.llama_sampler_chain_add(chain, part)
            yield Sampler(chain, self._context, has_grammar=sampling.json_schema is not None)
        finally:
            llama_cpp.llama_sampler_free(chain)

    def _parts(self, sampling: Sampling) -> Iterator[Any]:
        # A repeat penalty of 0 would divide by zero; it is taken as "none", which is 1.
        repeat = sampling.repeat_penalty or 1.0
        frequency, presence = sampling.frequency_penalty or 0.0, sampling.presence_penalty or 0.0
        if (repeat, frequency, presence) != (1.0, 0.0, 0.0):
            yield llama_cpp.llama_sampler_init_penalties(
                self.vocabulary_size, _SAMPLER_WINDOW, repeat, frequency, presence
            )
        if sampling.json_schema is not None:
            with time_limit.step():
                grammar = llama_cpp.llama_sampler_init_grammar(
                    self._vocabulary, json_grammar(sampling.json_schema).encode(), b"root"
                )
            if not grammar:
                raise InvalidRequest("invalid json_schema", detail="No grammar can be made of it.")
            yield grammar
        if sampling.temperature <= 0:
            yield llama_cpp.llama_sampler_init_greedy()
            return
        # llama.cpp's defaults, as llama_cpp.Llama has them
        yield llama_cpp.llama_sampler_init_top_k(40 if sampling.top_k is None else sampling.top_k)
        yield llama_cpp.llama_sampler_init_top_p(0.95 if sampling.top_p is None else sampling.top_p, 1)
        yield llama_cpp.llama_sampler_init_min_p(0.05, 1)
        yield llama_cpp.llama_sampler_init_temp(sampling.temperature)
        # 0xFFFFFFFF asks llama.cpp for a random seed.
        seed = 0xFFFFFFFF if sampling.seed is None else sampling.seed % 0xFFFFFFFF
        yield llama_cpp.llama_sampler_init_dist(seed)


class Sampler:
    """Chooses tokens; remembers those it chose (penalties, grammar)."""

    def __init__(self, chain: Any, context: Any, *, has_grammar: bool) -> None:
        self._chain, self._context, self._has_grammar = chain, context, has_grammar

    def sample(self, index: int) -> int:
        """The token that follows the ``index``-th of the batch evaluated last (-1: the last one)."""
        if not self._has_grammar:
            return int(llama_cpp.llama_sampler_sample(self._chain, self._context, index))
        with time_limit.step():
            return int(llama_cpp.llama_sampler_sample(self._chain, self._context, index))


@contextmanager
def watching(cancelled: Cancelled, native: NativeModel) -> Iterator[None]:
    """Abort what ``native`` evaluates inside the block once ``cancelled()`` is true."""
    done = threading.Event()

    def watch() -> None:
        while not cancelled():
            if done.wait(CANCEL_POLL):
                return
        native.abort.value = b"\x01"

    native.abort.value = b""
    watcher = threading.Thread(target=watch, name="ml-rag-cancel", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        native.abort.value = b""
