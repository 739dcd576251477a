"""Engine ``llama-cpp``: text from GGUF models, through llama.cpp; ``llama_encoder`` has its embeddings and reranking.

The prompt is the cost on a CPU, so what a new prompt has in common with the last one (at least the constant system
message) stays in the KV cache and only the rest is evaluated. Evaluation can be cancelled anywhere: within a prompt
batch by llama.cpp's abort callback, else between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from ml_rag.abc import Cancelled, Delta, Sampling
from ml_rag.errors import InvalidRequest
from ml_rag.server.engines.llama_native import Aborted, NativeModel, Sampler, watching
from ml_rag.server.engines.llama_template import ChatTemplate
from ml_rag.server.engines.text_stream import TextStream

if TYPE_CHECKING:
    from ml_rag.abc import Engine
    from ml_rag.server.catalogue import ModelEntry

#: of prompt and answer together, or what the model was trained for where that is less
DEFAULT_CONTEXT_TOKENS = 4096
#: of a prompt, evaluated in one go
BATCH_TOKENS = 512
# Two words found again are followed by what followed them before; measured best on answers that quote documents.
_LOOKUP_WORDS, _LOOKUP_DRAFT = 2, 8


def load(entry: ModelEntry, models_dir: Path) -> Engine:
    """The catalogue's model. Raises ``ModelUnavailable``."""
    if entry.task != "generate":
        from ml_rag.server.engines.llama_encoder import LlamaEmbedder, LlamaReranker

        return (LlamaEmbedder if entry.task == "embed" else LlamaReranker)(entry, entry.location(models_dir))
    return LlamaCppEngine(entry, entry.location(models_dir))


class LlamaCppEngine:
    """A GGUF model with one context. Raises ``ModelUnavailable`` where the file cannot be loaded."""

    def __init__(self, entry: ModelEntry, path: Path) -> None:
        self._entry, self.brief = entry, entry.brief
        self._native = NativeModel(
            path,
            context_tokens=entry.context_tokens,
            default_context_tokens=DEFAULT_CONTEXT_TOKENS,
            batch_tokens=BATCH_TOKENS,
            threads=entry.threads,
            gpu_layers=entry.gpu_layers,
        )
        try:
            self._template = ChatTemplate(self._native, entry.chat_format)
        except BaseException:
            self._native.close()
            raise
        self._lookup = LlamaPromptLookupDecoding(max_ngram_size=_LOOKUP_WORDS, num_pred_tokens=_LOOKUP_DRAFT)
        self.max_tokens = self._native.context_tokens

    def close(self) -> None:
        """Free model and context."""
        self._native.close()

    def count_tokens(self, messages: Sequence[dict[str, str]], cancelled: Cancelled | None = None) -> int:
        """Tokens of the messages in the model's chat template, generation prompt included."""
        return len(self._template.encode(messages))

    def generate(self, messages: Sequence[dict[str, str]], sampling: Sampling, cancelled: Cancelled) -> Iterator[Delta]:
        """The answer, piece by piece; the last piece carries ``finish_reason`` and the counts.

        It ends at the model's end of turn, at a stop sequence, before it repeats itself, or after ``max_tokens``
        (``length``: JSON of a schema is then cut, too). Once ``cancelled()`` is true it ends without a last piece.

        Raises ``InvalidRequest`` (prompt and ``max_tokens`` exceed the context; bad ``json_schema``);
        ``EngineFailed`` (llama.cpp failed).
        """
        native = self._native
        prompt = self._template.encode(messages)
        if len(prompt) + sampling.max_tokens > self.max_tokens:
            raise InvalidRequest(
                "the prompt does not fit the model's context",
                detail=f"The prompt takes {len(prompt)} tokens and max_tokens is {sampling.max_tokens}; "
                f"the context has {self.max_tokens}.",
                hint="Ask a shorter question, lower max_tokens, or take a model with a larger context.",
            )
        if sampling.repeat_penalty is None and sampling.json_schema is None:
            sampling = replace(sampling, repeat_penalty=self._entry.repeat_penalty)
        guarded = self._entry.loop_guard and sampling.json_schema is None
        text, generated, tail = TextStream(sampling.stop, loop_guard=guarded), 0, ""
        finish: Literal["stop", "length"] = "stop"
        with native.sampler(sampling) as sampler:
            try:
                self._evaluate_prompt(prompt, cancelled)
            except Aborted:
                return
            for token in self._tokens(sampler, sampling):
                if cancelled():
                    return
                if native.ends_generation(token) or token in self._template.turn_tokens:
                    break
                generated += 1
                piece = text.feed(native.piece(token))
                if text.stopped or generated == sampling.max_tokens:
                    finish = "stop" if text.stopped else "length"
                    tail = piece
                    break
                if piece:
                    yield Delta(piece)
        tail += text.finish()
        yield Delta(tail, "stop" if text.stopped else finish, len(prompt), generated)

    def _evaluate_prompt(self, prompt: Sequence[int], cancelled: Cancelled) -> None:
        """Evaluate what the cache does not hold of the prompt.

        Raises ``Aborted``: ``cancelled()`` became true; what was evaluated by then stays in the cache.
        """
        native = self._native
        with watching(cancelled, native):
            for batch in native.batches(prompt[native.reuse(prompt) :]):
                # The abort callback works on the CPU only; elsewhere a batch is short.
                if native.abort.value:
                    raise Aborted
                native.evaluate(batch)

    def _tokens(self, sampler: Sampler, sampling: Sampling) -> Iterator[int]:
        """Tokens one after the other, without end.

        With prompt lookup, a guess at the next ones is evaluated together with the last one; sampling then continues
        for as long as it agrees with the guess, so that the result is what it would have been without.
        """
        native = self._native
        speculative = sampling.speculative_decoding and native.can_rewind
        token = sampler.sample(-1)
        while True:
            yield token
            draft = self._draft(token) if speculative else []
            native.evaluate([token, *draft], all_logits=bool(draft))
            for index, guess in enumerate(draft):
                token = sampler.sample(index)
                if token != guess:
                    native.truncate(len(native.evaluated) - len(draft) + index)
                    break
                yield token
            else:
                token = sampler.sample(-1)

    def _draft(self, token: int) -> list[int]:
        native = self._native
        room = min(native.context_tokens - len(native.evaluated) - 1, native.batch_tokens - 1)
        if room <= 0:
            return []
        tokens = np.array([*native.evaluated, token], dtype=np.intc)
        draft: list[int] = self._lookup(tokens).tolist()
        return draft[:room]
