"""Zstandard for archives.py: in the client and in the parsers of documents, where a library is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from ml_rag import archives

#: the library bounds no output: four bytes can become 128 KB
_CHUNK = 256


def install() -> None:
    """From now on archives.py unpacks Zstandard, too."""
    archives.zstd = _pieces


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise archives.no_zstd() from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=archives.DICTIONARY_BYTES)
    data = b""
    try:
        while data or (data := file.read(_CHUNK)):
            frame = decompressor.decompressobj()
            while not frame.eof:
                if not data and not (data := file.read(_CHUNK)):
                    raise EOFError("it ends in the middle")
                yield frame.decompress(data)
                data = b""
            data = frame.unused_data
    except zstandard.ZstdError as error:
        raise ValueError(error) from None
