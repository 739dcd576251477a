"""A BERT of two layers with random weights, in torch and as a GGUF, to compare engines without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS, *(f"▁{letter}" for letter in LETTERS)]
BEGIN, PAD, END = 0, 1, 2
POSITIONS, WIDTH = 64, 64
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def make(labels: int = 1) -> Any:
    """A ``BertForSequenceClassification``."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(PIECES),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=POSITIONS,
        num_labels=labels,
        initializer_range=0.3,
        layer_norm_eps=1e-12,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config).eval()


def ids(text: str) -> list[int]:
    """The tokens of words of one letter each."""
    return [PIECES.index(f"▁{word}") for word in text.split()]


def write(model: Any, path: Path) -> None:
    """As a GGUF: a unigram vocabulary, mean pooling, a classifier."""
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    writer.add_classifier_output_labels([f"l{number}" for number in range(len(weights["classifier.bias"]))])
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(PIECES)
    writer.add_token_scores([0.0] * 4 + [-5.0] * 27 + [-3.0] * 26)
    writer.add_token_types([3, 3, 3, 2] + [1] * (len(PIECES) - 4))
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_unk_token_id(3)
    writer.add_sep_token_id(END)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    names = {
        "bert.embeddings.word_embeddings.weight": "token_embd.weight",
        "bert.embeddings.position_embeddings.weight": "position_embd.weight",
        "bert.embeddings.token_type_embeddings.weight": "token_types.weight",
        "bert.embeddings.LayerNorm.weight": "token_embd_norm.weight",
        "bert.embeddings.LayerNorm.bias": "token_embd_norm.bias",
        "bert.pooler.dense.weight": "cls.weight",
        "bert.pooler.dense.bias": "cls.bias",
        "classifier.weight": "cls.output.weight",
        "classifier.bias": "cls.output.bias",
    }
    for layer in range(2):
        for ours, theirs in _LAYER.items():
            for kind in ("weight", "bias"):
                names[f"bert.encoder.layer.{layer}.{ours}.{kind}"] = f"blk.{layer}.{theirs}.{kind}"
    for name, target in names.items():
        writer.add_tensor(target, weights[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
