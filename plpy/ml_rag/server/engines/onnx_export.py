"""Make the ONNX graph of a sentence-transformers model: written by ``onnx_bert``, otherwise exported by torch.

Run in a process of its own (``python -m ml_rag.server.engines.onnx_export MODEL OUT MAX_TOKENS``), so that the half
gigabyte of torch does not stay in the server. ``OUT`` becomes a folder with ``model.onnx`` and ``export.json``; that
file alone, with the key ``failed``, when the model cannot be exported faithfully; nothing, where only torch could, and
is not installed. An export by torch is compared with the original. optimum is not used: its current release does not
go with the transformers that sentence-transformers needs.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ml_rag.scratch import Scratch, sweep
from ml_rag.server.engines import onnx_bert
from ml_rag.server.engines.onnx_embedder import OUTPUT, OnnxEmbedder
from ml_rag.shortage import shortage

#: smallest cosine between a vector of the export and one of the original
FAITHFUL = 0.9999
_SAMPLES = [
    "What is AutoML?",
    "",
    "Ein Satz auf Deutsch, mit Umlauten: äöüß; et une phrase française, 日本語の文, и по-русски.",
    "SELECT count(*) FROM pg_stat_activity WHERE state = 'active'; -- 12,345.67 €",
    "A vector index returns the nearest segments first. " * 6,
    "The quick brown fox jumps over the lazy dog and says 0123456789. " * 90,
]


class NotFaithful(Exception):
    """The export does not compute what the model computes."""


def export(model_folder: Path, out: Path, max_tokens: int | None) -> dict[str, Any]:
    """Write the graph into the folder ``out``; the facts about it. Raises ``NotFaithful`` or what torch raises."""
    if not (model_folder / "tokenizer.json").exists():
        raise NotFaithful("the model has no tokenizer.json")
    try:
        encoder = onnx_bert.read(model_folder)
        graph = onnx_bert.write(model_folder, encoder).SerializeToString()
    except onnx_bert.Unsupported:
        return _trace(model_folder, out, max_tokens)
    (out / "model.onnx").write_bytes(graph)
    return {"max_tokens": min(encoder.max_tokens, max_tokens or encoder.max_tokens), "pad_id": encoder.pad_id}


def _trace(model_folder: Path, out: Path, max_tokens: int | None) -> dict[str, Any]:
    """The same by torch."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(model_folder), device="cpu", local_files_only=True, model_kwargs={"attn_implementation": "eager"}
    ).eval()
    limit = int(model.max_seq_length or 512)
    model.max_seq_length = min(limit, max_tokens or limit)
    features = model.tokenizer(_SAMPLES[:3], padding=True, truncation=True, max_length=64, return_tensors="pt")
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in features]

    class Sentence(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Any) -> Any:
            return self.model(dict(zip(names, tensors, strict=True)))["sentence_embedding"]

    graph = out / "model.onnx"
    axes = {name: {0: "texts", 1: "tokens"} for name in names} | {OUTPUT: {0: "texts"}}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch's newer exporter (dynamo=True) takes three times as long, and what it wrote for these models was refused
        # by onnxruntime (a name defined twice)
        torch.onnx.export(
            Sentence(),
            tuple(features[name] for name in names),
            str(graph),
            input_names=names,
            output_names=[OUTPUT],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
    facts = {"max_tokens": int(model.max_seq_length), "pad_id": int(model.tokenizer.pad_token_id or 0)}
    exported = OnnxEmbedder(graph, model_folder / "tokenizer.json", **facts)
    expected = np.asarray(model.encode(_SAMPLES, convert_to_numpy=True), np.float32)
    found = exported.embed(_SAMPLES, lambda: False)
    alone = np.concatenate([exported.embed([text], lambda: False) for text in _SAMPLES])
    for vectors in (found, alone):
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
        cosine = float(((vectors * expected).sum(axis=1) / lengths).min())
        if not cosine >= FAITHFUL or not np.allclose(vectors, expected, atol=1e-2 * np.abs(expected).max()):
            raise NotFaithful(f"the smallest cosine to the original's vectors is {cosine:.6f}")
        facts["cosine"] = cosine  # type: ignore[assignment]
    return facts


def main() -> None:
    """Command line; the folder appears at once and complete, or not at all."""
    model_folder, out, max_tokens = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep(out.parent, ".exporting-")
    with Scratch(out.parent, ".exporting-") as folder:
        work = folder / "export"
        work.mkdir()
        try:
            facts = export(model_folder, work, max_tokens or None)
        except ModuleNotFoundError as error:
            sys.exit(f"{error.name} is not installed")
        except Exception as error:  # whatever it is, torch itself runs the model then
            if shortage(error) is not None:
                raise  # there may be room the next time
            facts = {"failed": f"{type(error).__name__}: {error}"[:500]}
            (work / "model.onnx").unlink(missing_ok=True)
        (work / "export.json").write_text(json.dumps(facts))
        if out.exists():
            shutil.rmtree(out)
        work.replace(out)


if __name__ == "__main__":
    main()
