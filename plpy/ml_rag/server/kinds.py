"""The kinds of engines: a row of ``ENGINES`` each; CONTRIBUTING.md has the recipe. No engine is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from ml_rag.abc import Task


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What is known of an engine before a model needs it."""

    #: in ``ml_rag.server.engines``; it has ``load(entry, models_dir)``
    module: str
    tasks: tuple[Task, ...]
    #: what it runs, for the documentation
    runs: str
    #: its models are files of this machine, which are pulled, pinned and loaded
    has_files: bool = True
    #: each of its models is one file, not a folder of them
    is_single_file: bool = False
    #: its models are on another machine, which bounds what it is asked for itself
    is_remote: bool = False
    #: settings that its models must have
    required_settings: tuple[str, ...] = ()
    #: it is given documents as they are, and answers with sentences of them
    is_extractive: bool = False
    #: package whose native code a caller's options and texts can reach: each model has a process of its own
    own_process_for: str | None = None
    #: of this package, which brings what it needs
    extra: str | None = None


ENGINES: dict[str, EngineKind] = {
    "sentence-transformers": EngineKind(
        "sentence_transformers", ("embed", "rerank"), "embedding models and cross-encoders", extra="torch"),
    "llama-cpp": EngineKind(
        "llama_cpp", ("embed", "generate", "rerank"), "GGUF files", is_single_file=True, own_process_for="llama_cpp",
        extra="llama"),
    "openai": EngineKind(
        "openai", ("embed", "generate", "rerank"), "models of an OpenAI-compatible endpoint",
        has_files=False, is_remote=True, required_settings=("base_url",)),
    "extractive": EngineKind(
        "extractive", ("generate",), "sentences taken out of the documents, without a language model",
        has_files=False, is_extractive=True),
    "fake": EngineKind("fake", ("embed", "generate", "rerank"), "answers for tests", has_files=False),
}  # fmt: skip
