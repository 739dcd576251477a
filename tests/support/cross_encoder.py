"""A tiny cross-encoder made on the spot: random weights, so that its scores mean nothing, but every part is real."""

from __future__ import annotations

from pathlib import Path

MAX_TOKENS = 64
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def make(place: Path, seed: int = 7) -> None:
    """Write a sentence-transformers cross-encoder of BERT's kind, with one output and a vocabulary of characters."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), *".,?!"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(pieces),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=1,
            initializer_range=0.3,  # more than usual: else all texts score about the same
        )
    )
    model.save_pretrained(place)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    PreTrainedTokenizerFast(
        tokenizer_object=BertWordPieceTokenizer(vocabulary)._tokenizer,
        model_max_length=MAX_TOKENS,
        **dict(zip(names, special, strict=True)),
    ).save_pretrained(place)


def catalogue_entry(model_id: str, place: Path) -> str:
    """The TOML that adds it to the catalogue of a model server."""
    return (
        f'[models.{model_id}]\ntask = "rerank"\nengine = "sentence-transformers"\nmax_tokens = {MAX_TOKENS}\n'
        f'sources = [{{ path = "{place}" }}]\n'
    )
