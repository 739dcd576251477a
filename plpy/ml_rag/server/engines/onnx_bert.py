"""The ONNX graph of a BERT or RoBERTa sentence encoder, written from its weights, without torch.

Most small embedding models are one of these: ``all-MiniLM``, ``bge``, ``e5``. The graph is made of onnxruntime's own
fused operators, to which it would bring an exported graph anyway. What it does not know, another architecture,
pooling or layer, is ``Unsupported``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ml_rag.server.engines.onnx_embedder import OUTPUT

if TYPE_CHECKING:
    from numpy.typing import NDArray

FUSED = "com.microsoft"
#: architectures, and whether positions count from the padding token's number on
ARCHITECTURES = {"bert": False, "roberta": True, "xlm-roberta": True}


class Unsupported(Exception):
    """The model is something else than what this module writes."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """What the files of a model say. ``max_tokens``: the longest text; ``cls``: whether the first token's vector stands
    for the text, otherwise their mean does."""

    config: dict[str, Any]
    max_tokens: int
    pad_id: int
    cls: bool
    normalize: bool


@dataclass
class _Graph:
    nodes: list[NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def add(self, op: str, *inputs: str, out: str = "", fused: bool = False, **attributes: Any) -> str:
        """The name of the node's output, a new one unless it is given."""
        out = out or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [out], domain=FUSED if fused else "", **attributes))
        return out

    def weight(self, value: NDArray[Any]) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, order="C"), name))
        return name


def read(folder: Path) -> Encoder:
    """What kind of encoder a folder of sentence-transformers has. Raises ``Unsupported``."""
    config = _json(folder / "config.json")
    if config.get("model_type") not in ARCHITECTURES or config.get("hidden_act") != "gelu":
        raise Unsupported(f"architecture {config.get('model_type')}, {config.get('hidden_act')}")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise Unsupported(f"positions {config['position_embedding_type']}")
    modules = json.loads((folder / "modules.json").read_bytes())
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0]["path"]:
        raise Unsupported(f"modules {', '.join(kinds)}")
    pooling = _json(folder / modules[1]["path"] / "config.json")
    modes = [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, value in pooling.items()
        if key.startswith("pooling_mode_") and value
    ]  # until release 5
    modes = [pooling["pooling_mode"]] if "pooling_mode" in pooling else modes
    if modes not in (["mean"], ["cls"]):
        raise Unsupported(f"pooling {modes}")
    own = _json(folder / "sentence_bert_config.json")
    named = _json(folder / "config_sentence_transformers.json").get("default_prompt_name")
    if own.get("do_lower_case") or named:
        raise Unsupported("texts changed before they are tokenized")
    pad_id = int(config.get("pad_token_id") or 0)
    longest = config["max_position_embeddings"] - (pad_id + 1 if ARCHITECTURES[config["model_type"]] else 0)
    limits = (own.get("max_seq_length"), _json(folder / "tokenizer_config.json").get("model_max_length"), longest)
    max_tokens = min(int(limit) for limit in limits if limit)
    return Encoder(config, max_tokens, pad_id, cls=modes == ["cls"], normalize="Normalize" in kinds)


def write(folder: Path, encoder: Encoder) -> ModelProto:
    """The graph: ``input_ids`` and ``attention_mask``, int64 of shape (texts, tokens), padded on the right, give
    ``sentence_vector``, float32 of shape (texts, dimensions). Raises ``Unsupported``."""
    config, graph = encoder.config, _Graph()
    weights = _weights(folder)

    def weight(name: str) -> NDArray[Any]:
        if name not in weights:
            raise Unsupported(f"the weights have no {name}")
        return weights[name].astype(np.float32)

    def normal(name: str) -> tuple[str, str]:
        return graph.weight(weight(f"{name}.LayerNorm.weight")), graph.weight(weight(f"{name}.LayerNorm.bias"))

    epsilon = float(config["layer_norm_eps"])
    # every token is of the first kind: its vector is part of the positions'
    positions = weight("embeddings.position_embeddings.weight") + weight("embeddings.token_type_embeddings.weight")[:1]
    if ARCHITECTURES[config["model_type"]]:
        positions = positions[encoder.pad_id + 1 :]
    ids, mask = (graph.add("Cast", name, to=TensorProto.INT32) for name in ("input_ids", "attention_mask"))
    state, lengths = "embedded", "lengths"
    embedded = (ids, "", graph.weight(weight("embeddings.word_embeddings.weight")), graph.weight(positions), "")
    graph.nodes.append(
        helper.make_node(
            "EmbedLayerNormalization",
            (*embedded, *normal("embeddings"), mask),
            [state, lengths],
            domain=FUSED,
            epsilon=epsilon,
        )
    )
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        parts = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
        attention = graph.add(
            "Attention",
            state,
            graph.weight(np.concatenate([weight(f"{part}.weight").T for part in parts], axis=1)),
            graph.weight(np.concatenate([weight(f"{part}.bias") for part in parts])),
            lengths,
            fused=True,
            num_heads=config["num_attention_heads"],
        )

        def add_normal(name: str, found: str, before: str) -> str:
            product = graph.add("MatMul", found, graph.weight(weight(f"{name}.dense.weight").T))
            bias = graph.weight(weight(f"{name}.dense.bias"))
            inputs = (product, before, *normal(name), bias)
            return graph.add("SkipLayerNormalization", *inputs, fused=True, epsilon=epsilon)

        state = add_normal(f"{layer}.attention.output", attention, state)
        inner = graph.add("MatMul", state, graph.weight(weight(f"{layer}.intermediate.dense.weight").T))
        inner = graph.add("BiasGelu", inner, graph.weight(weight(f"{layer}.intermediate.dense.bias")), fused=True)
        state = add_normal(f"{layer}.output", inner, state)
    if encoder.cls:
        vector = graph.add("Gather", state, graph.weight(np.array(0, np.int64)), axis=1)
    else:
        axis = graph.weight(np.array([1], np.int64))
        counted = graph.add("Cast", "attention_mask", to=TensorProto.FLOAT)
        kept = graph.add("Mul", state, graph.add("Unsqueeze", counted, graph.weight(np.array([2], np.int64))))
        total = graph.add("ReduceSum", kept, axis, keepdims=0)
        vector = graph.add("Div", total, graph.add("ReduceSum", counted, axis, keepdims=1))
    graph.add("LpNormalization" if encoder.normalize else "Identity", vector, out=OUTPUT)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["texts", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["texts", config["hidden_size"]])
    return helper.make_model(
        helper.make_graph(graph.nodes, "encoder", inputs, [output], graph.weights),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(FUSED, 1)],
        ir_version=8,
    )


def _weights(folder: Path) -> dict[str, NDArray[Any]]:
    """The tensors by their names inside the encoder; those of a whole model begin with its name."""
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise Unsupported(f"weights: {error}") from None
    first = next((name for name in tensors if name.endswith("embeddings.word_embeddings.weight")), "")
    prefix = first.removesuffix("embeddings.word_embeddings.weight")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}
