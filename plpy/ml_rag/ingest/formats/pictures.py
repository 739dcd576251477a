"""Pictures of a document for a model that describes them, and what it said of them.

A document is parsed twice: once its pictures are collected, then what a model said of them stands in their places. The
model is asked in between, by another process. Pictures are counted as they come, which is the same both times.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

#: of one document: pictures, and their bytes as they are sent
MAX_PICTURES = 200
MAX_BYTES = 32 * 1024 * 1024
#: of a picture before it is made smaller: an A3 page at 600 dots per inch has fewer
MAX_PIXELS = 80_000_000
#: the longer side of a picture that is sent
MAX_SIDE = 2048
#: processor time for the pictures of a document: those that are small, blank or met before take it, too
MAX_SECONDS = 20.0
#: a smaller one is an icon, a rule or a bullet: its shorter side, and the area
_MIN_SIDE, _MIN_AREA = 32, 20_000
#: of a picture, before its decoder is asked
_MAX_CONTENT = 64 * 1024 * 1024
#: other decoders of the library are never tried, whatever a picture claims to be
FORMATS = ("PNG", "JPEG", "TIFF", "GIF", "BMP", "WEBP")
#: key of a block's metadata: the model that wrote its text
DESCRIBED_BY = "described_by"
#: around the number of a picture, in a text where its description stands: XML allows it, and no text has it
MARK = "\ufdd0"
_MARKED = re.compile(f"{MARK}([0-9]+){MARK}")

#: text and metadata of a block
_Block = tuple[str, dict[str, Any]]


class Pictures:
    """The pictures of one document. Without ``described`` they are collected, else that has their texts by number."""

    def __init__(self, model: str, described: Mapping[str, str] | None = None) -> None:
        self._model = model
        self._described = described
        self._known: set[bytes] = set()
        self._bytes = 0
        self._seconds = 0.0
        #: pictures that were met, also those that are not wanted
        self.count = 0
        #: number and JPEG of those to describe
        self.wanted: list[tuple[int, bytes]] = []
        #: why others are not described, with the number of them
        self.left_out: Counter[str] = Counter()

    def describe(self, draw: Callable[[], Image | bytes | None]) -> str:
        """What the model said of the next picture; empty where it is being collected, or there is nothing.

        ``draw`` gives the picture, or the bytes of its file, and is called only where it is needed.
        """
        number = self.count
        self.count += 1
        if self._described is not None:
            return self._described.get(str(number), "")
        if len(self.wanted) >= MAX_PICTURES:
            self.left_out[f"beyond the {MAX_PICTURES} of a document"] += 1
            return ""
        if self._seconds >= MAX_SECONDS:
            self.left_out[f"beyond {MAX_SECONDS:g} s of processor time for a document"] += 1
            return ""
        began = time.process_time()
        try:
            drawn = draw()
            jpeg = None if drawn is None else _jpeg(drawn)
        except _TooLarge:
            self.left_out["too large"] += 1
        except Exception:  # noqa: BLE001 - whatever a decoder raises is about the picture
            self.left_out["cannot be read"] += 1
        else:
            if jpeg is not None:
                self._want(number, jpeg)
        self._seconds += time.process_time() - began
        return ""

    def block(self, draw: Callable[[], Image | bytes | None], metadata: dict[str, Any]) -> Iterable[_Block]:
        """The block of the next picture, where it has a description."""
        return self.described(self.describe(draw), metadata)

    def described(self, text: str, metadata: dict[str, Any]) -> Iterable[_Block]:
        """The block of a description."""
        return [(text, {**metadata, DESCRIBED_BY: self._model})] if text else []

    def mark(self, draw: Callable[[], Image | bytes | None]) -> str:
        """What stands in a text for the description of the next picture, until ``blocks``; empty where it has none."""
        number = self.count
        return f"{MARK}{number}{MARK}" if self.describe(draw) else ""

    def blocks(self, text: str, metadata: dict[str, Any]) -> list[_Block]:
        """The blocks of a text with marks."""
        before, *rest = _MARKED.split(text)
        found: list[_Block] = [(before, metadata)]
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            found += [*self.described((self._described or {}).get(number, ""), metadata), (after, metadata)]
        return found

    def _want(self, number: int, jpeg: bytes) -> None:
        digest = hashlib.sha256(jpeg).digest()
        if digest in self._known:  # a logo on each page is described once
            return
        if self._bytes + len(jpeg) > MAX_BYTES:
            self.left_out[f"beyond the {MAX_BYTES >> 20} MiB of a document"] += 1
            return
        self._known.add(digest)
        self._bytes += len(jpeg)
        self.wanted.append((number, jpeg))


class _TooLarge(Exception):
    """A picture beyond the bounds."""


def _open(content: bytes) -> Image:
    """The picture, not decoded yet. Raises ``_TooLarge``, and what the library raises."""
    from PIL import Image

    if len(content) > _MAX_CONTENT:
        raise _TooLarge
    try:
        return Image.open(BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _TooLarge from None


def _jpeg(drawn: Image | bytes) -> bytes | None:
    """The picture as it is sent; None for one that is too small, or of one colour."""
    from PIL import Image, ImageOps

    image = _open(drawn) if isinstance(drawn, bytes) else drawn
    if image.width * image.height > MAX_PIXELS:
        raise _TooLarge
    if min(image.size) < _MIN_SIDE or image.width * image.height < _MIN_AREA:
        return None
    image.draft("RGB", (MAX_SIDE, MAX_SIDE))  # a JPEG is decoded at about that size
    if image.mode != "RGB":
        # what is transparent is white, as on paper
        alpha = image.convert("RGBA")
        image = Image.new("RGB", alpha.size, "white")
        image.paste(alpha, mask=alpha.getchannel("A"))
    image = ImageOps.exif_transpose(image)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    extremes: Any = image.getextrema()
    if all(least == most for least, most in extremes):
        return None
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
