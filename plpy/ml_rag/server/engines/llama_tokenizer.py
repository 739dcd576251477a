"""The tokenizer of a GGUF model as a ``tokenizers.Tokenizer``, by which documents are split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from ml_rag.server.engines.llama_native import NativeModel

_WORD_BEGIN = "▁"
#: what SentencePiece drops, and what it takes for blank space
_DROPPED, _BLANKS = r"[\x00-\x08\x0b\x0e-\x1f\x7f\u200b-\u200f\ufeff]", r"[\t\n\x0c\r\u0085\u2028\u2029]| {2,}"


def tokenizer_of(native: NativeModel) -> Tokenizer | None:
    """Of a vocabulary of WordPiece (BERT) or of SentencePiece's unigram model (XLM-R); None for others."""
    texts = [native.token_text(token) for token in range(native.vocabulary_size)]
    kind = native.vocabulary_kind
    if kind == llama_cpp.LLAMA_VOCAB_TYPE_UGM:
        tokenizer = _unigram(texts, [native.score(token) for token in range(len(texts))])
    elif kind == llama_cpp.LLAMA_VOCAB_TYPE_WPM:
        tokenizer = _word_piece(texts, native.special_tokens())
    else:
        return None
    around = native.tokenize("", special=False, whole=True)
    if around:
        begin = [token for token in around[:1] if token == native.begin_token or len(around) > 1]
        names = [(texts[token], token) for token in around]
        single = " ".join([*(texts[token] for token in begin), "$A", *(texts[token] for token in around[len(begin) :])])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(dict(names).items())
        )
    return tokenizer


def _unigram(texts: list[str], scores: list[float]) -> Tokenizer:
    unknown = texts.index("<unk>") if "<unk>" in texts else None
    tokenizer = Tokenizer(models.Unigram(list(zip(texts, scores, strict=True)), unknown, False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Replace(Regex(_DROPPED), ""),
            normalizers.Replace(Regex(_BLANKS), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_WORD_BEGIN, "always", split=False)
    return tokenizer


def _word_piece(texts: list[str], special: dict[str, int]) -> Tokenizer:
    # llama.cpp marks the beginning of a word, WordPiece what is not one
    names = {
        text
        if text in special
        else text.removeprefix(_WORD_BEGIN)
        if text.startswith(_WORD_BEGIN)
        else f"##{text}": token
        for token, text in enumerate(texts)
    }
    tokenizer = Tokenizer(models.WordPiece(names, unk_token="[UNK]"))  # noqa: S106 - no password
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
