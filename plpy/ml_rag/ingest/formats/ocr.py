"""Text of images by Tesseract, where its program is installed."""

from __future__ import annotations

import re
import shutil
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

    Raises DocumentError where Tesseract or its language is missing.
    """
    if shutil.which("tesseract") is None:
        raise DocumentError(
            "OCR is not available", detail="the program tesseract was not found", hint="Install tesseract-ocr."
        )
    import pytesseract  # type: ignore[import-untyped]

    wanted = _LANGUAGES.get((language or "en")[:2].lower(), "eng")
    if wanted not in pytesseract.get_languages():
        raise DocumentError(
            "OCR is not available",
            detail=f"Tesseract has no data for the language {wanted}",
            hint=f"Install tesseract-ocr-{wanted.replace('_', '-')}.",
        )
    # page segmentation 6: one block of text, so that a row of a table stays one line
    config = "--psm 6" if keep_lines else ""
    text = pytesseract.image_to_string(image, lang=wanted, timeout=_TIMEOUT, config=config)
    if keep_lines:
        return "\n".join(" ".join(line.split()) for line in text.splitlines() if _WORDLIKE.search(line))
    # Tesseract breaks lines where the page does.
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n") if part.strip())
