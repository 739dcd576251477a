"""Text of images by Tesseract, where its program is installed."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from typing import Any

from ml_rag.errors import DocumentError

#: seconds for one page
_TIMEOUT = 120

#: text that is not a speck, frame or ornament which OCR took for a letter
_WORDLIKE = re.compile(r"\w\w|[^\x00-\u2e7f]")

_LANGUAGES = {
    "ar": "ara", "bg": "bul", "cs": "ces", "da": "dan", "de": "deu", "el": "ell", "en": "eng", "es": "spa",
    "fi": "fin", "fr": "fra", "he": "heb", "hi": "hin", "hu": "hun", "it": "ita", "ja": "jpn", "ko": "kor",
    "nl": "nld", "no": "nor", "pl": "pol", "pt": "por", "ro": "ron", "ru": "rus", "sk": "slk", "sv": "swe",
    "th": "tha", "tr": "tur", "uk": "ukr", "vi": "vie", "zh": "chi_sim",
}  # fmt: skip


def read_image(image: Any, language: str | None, *, keep_lines: bool = False) -> str:
    """The text in a PIL image, paragraphs apart; with ``keep_lines`` line by line, as a table needs it.

    Raises DocumentError where Tesseract or its language is missing, or it fails.
    """
    if shutil.which("tesseract") is None:
        raise DocumentError(
            "OCR is not available", detail="the program tesseract was not found", hint="Install tesseract-ocr."
        )
    wanted = _LANGUAGES.get((language or "en")[:2].lower(), "eng")
    if wanted not in _languages():
        raise DocumentError(
            "OCR is not available",
            detail=f"Tesseract has no data for the language {wanted}",
            hint=f"Install tesseract-ocr-{wanted.replace('_', '-')}.",
        )
    # page segmentation 6: one block of text, so that a row of a table stays one line
    text = _tesseract("-", "-", "-l", wanted, *(("--psm", "6") if keep_lines else ()), given=_as_png(image))
    if keep_lines:
        return "\n".join(" ".join(line.split()) for line in text.splitlines() if _WORDLIKE.search(line))
    # Tesseract breaks lines where the page does.
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n") if part.strip())


def _languages() -> list[str]:
    """Each time: one can be installed meanwhile."""
    return _tesseract("--list-langs").splitlines()[1:]


def _tesseract(*arguments: str, given: bytes = b"") -> str:
    """What it prints. By pipes, and not by pytesseract, which has files in between: a parser may write none."""
    try:
        done = subprocess.run(  # noqa: S603 - the names of languages are ours
            ["tesseract", *arguments],  # noqa: S607 - wherever it is installed
            input=given, capture_output=True, timeout=_TIMEOUT, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DocumentError("OCR has failed", detail=f"a page took longer than {_TIMEOUT} s") from None
    except subprocess.CalledProcessError as error:
        detail = error.stderr.decode("utf-8", "replace").strip() or f"tesseract ended with status {error.returncode}"
        raise DocumentError("OCR has failed", detail=detail[:500]) from None
    return done.stdout.decode("utf-8", "replace")


def _as_png(image: Any) -> bytes:
    from PIL import Image

    if image.has_transparency_data:  # on white paper
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image).convert("RGB")
    elif image.mode in ("I", "F"):  # of any range
        least, most = image.getextrema()
        scale = 255 / ((most - least) or 1)
        image = image.point(lambda value: value * scale - least * scale).convert("L")
    elif image.mode not in ("1", "L", "P", "RGB", "I;16", "I;16B"):
        image = image.convert("RGB")
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()
