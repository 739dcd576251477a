"""The same encoder by ONNX and by llama.cpp: texts a processor second, time of a question, how alike the vectors are.

``python -m bench.encoders`` prints the table of docs/embeddings.md. It needs the default embedding model in the folder
of ``ML_RAG_MODELS``; its weights are written as a GGUF in 32 bits and in 8. Both engines run as in the model server,
with one thread. The texts are paragraphs of the documentation.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from bench.measure import in_turn
from bench.retrieval import QUESTIONS
from ml_rag.server.catalogue import ModelEntry, load_catalogue, models_dir
from ml_rag.server.engines import load_engine

MODEL = "all_minilm_l6_v2"
ROUNDS = 3
TEXTS = 60
LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
TABLES = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}


def write(folder: Path, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """A BERT of sentence-transformers with mean pooling as a GGUF; ``kind``: of its matrices."""
    config = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(config["type_vocab_size"])
    tokens, kinds = [], []
    for word in sorted(words, key=words.__getitem__):
        special = word.startswith("[") and word.endswith("]") and len(word) > 2
        kinds.append(gguf.TokenType.CONTROL if special else gguf.TokenType.NORMAL)
        tokens.append(word if special else word[2:] if word.startswith("##") else f"\u2581{word}")
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(words["[CLS]"])
    writer.add_eos_token_id(words["[SEP]"])
    writer.add_sep_token_id(words["[SEP]"])
    writer.add_unk_token_id(words["[UNK]"])
    writer.add_pad_token_id(words["[PAD]"])
    weights = load_file(folder / "model.safetensors")
    names = dict(TABLES)
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in LAYER.items():
            for part in ("weight", "bias"):
                names[f"encoder.layer.{layer}.{ours}.{part}"] = f"blk.{layer}.{theirs}.{part}"
    for name, target in names.items():
        values = weights[name].astype(np.float32)
        if values.ndim == 2 and target not in ("position_embd.weight", "token_types.weight"):
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def texts() -> list[str]:
    """Paragraphs of at least 200 characters."""
    documents = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    found = [part for path in documents for part in path.read_text().split("\n\n") if len(part) >= 200]
    return [part[:1200] for part in found if not part.startswith(("|", "```"))][:TEXTS]


def processor_seconds(engine: Any) -> float:
    """Of this process, and of the engine's own where it has one."""
    own = time.process_time()
    if (pid := getattr(engine, "pid", None)) is None:
        return own
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return own + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _never() -> bool:
    return False


def _cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: NDArray[np.float32] = (a * b).sum(axis=1) / lengths
    return cosines


def main() -> None:
    catalogue = load_catalogue()
    folder = models_dir(catalogue)
    entry = catalogue.get(MODEL)
    assert entry is not None
    some = texts()
    with tempfile.TemporaryDirectory() as made:
        engines: dict[str, Any] = {"onnx, 32 bits": load_engine(entry.model_copy(update={"threads": 1}), folder)}
        for name, kind in (("32", gguf.GGMLQuantizationType.F32), ("8", gguf.GGMLQuantizationType.Q8_0)):
            path = Path(made) / f"{name}.gguf"
            write(entry.location(folder), path, kind)
            table = {"id": name, "task": "embed", "engine": "llama-cpp", "max_tokens": entry.max_tokens, "threads": 1}
            of_file = ModelEntry.model_validate({**table, "pooling": "mean", "sources": [{"path": str(path)}]})
            engines[f"llama-cpp, {name} bits"] = load_engine(of_file, folder)
        vectors = {name: engine.embed(some, _never) for name, engine in engines.items()}
        asked = in_turn(
            {name: lambda i, e=e: e.embed([QUESTIONS[i % len(QUESTIONS)]], _never) for name, e in engines.items()},
            rounds=40, block=10,
        )  # fmt: skip
        took: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                began = processor_seconds(engine)
                engine.embed(some, _never)
                took[name].append(processor_seconds(engine) - began)
        for engine in engines.values():
            engine.close()
    first = next(iter(engines))
    shown = Table(title=f"{MODEL}, {len(some)} texts", title_justify="left", box=None, pad_edge=False)
    for heading in ("engine", "texts a processor second", "ratio", "question, ms", "ratio", "least cosine"):
        shown.add_column(heading, justify="left" if heading == "engine" else "right")
    for name in engines:
        rate = len(some) / statistics.median(took[name])
        question = statistics.median(asked[name])
        shown.add_row(
            name, f"{rate:.0f}", f"{statistics.median(took[first]) / statistics.median(took[name]):.2f}",
            f"{question:.1f}", f"{question / statistics.median(asked[first]):.2f}",
            f"{_cosines(vectors[name], vectors[first]).min():.4f}",
        )  # fmt: skip
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()
