"""From bytes to text: byte order marks, UTF-8, UTF-16 without a mark, then the likeliest older encoding."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

#: encodings a document is likely to have; a free choice among all of Python's gives exotic ones for short texts
_CANDIDATES = [
    "cp932", "euc_jp", "gb18030", "big5", "cp949", "cp1251", "koi8_r", "cp1250", "cp1252", "cp1253", "cp1254",
    "cp1255", "cp1256", "iso8859_2", "iso8859_15",
]  # fmt: skip

#: what browsers read instead, which has more characters, and so do the people who write it (Encoding of the WHATWG)
_LARGER = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949",
}  # fmt: skip
_HIGH = bytes(range(0x80, 0x100))

_NO_TEXT = frozenset({"idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape"})

#: encodings that are usual for a language, the likeliest first
_BY_LANGUAGE = {
    "ja": ("cp932", "euc_jp"), "zh": ("gb18030", "big5"), "ko": ("cp949",), "th": ("cp874",), "vi": ("cp1258",),
    "ru": ("cp1251", "koi8_r", "cp866"), "bg": ("cp1251", "koi8_r", "cp866"), "uk": ("cp1251", "koi8_u", "cp866"),
    **dict.fromkeys(("pl", "cs", "sk", "hu", "ro", "sl", "hr"), ("cp1250", "iso8859_2", "cp852")),
    **dict.fromkeys(("lt", "lv", "et"), ("cp1257",)),
    "el": ("cp1253",), "tr": ("cp1254",), "he": ("cp1255",), "ar": ("cp1256",),
}  # fmt: skip
#: letters and signs of languages that are written in cp1252, of those that a text in cp1250 seems to have, too
_WESTERN = {
    "pt": "áâãàçéêíóôõúüªº", "es": "áéíñóúü¡¿ªº", "fr": "àâçéèêëîïôœùûü", "it": "àèéìòùªº", "en": "éèêïçñö",
    "de": "äöüßé„", "nl": "éèëïöü", "sv": "åäöé", "fi": "åäöé", "da": "æøåé", "no": "æøåé", "nb": "æøåé", "nn": "æøåé",
}  # fmt: skip
_CENTRAL = frozenset({"cp1250", "iso8859_2"})
#: of each of them
_SIGNS = frozenset("€‚…†‡‰‹‘’“”•–—™›\xa0§©«\xad®°±²³µ·»£½\ufffd")
#: what their texts rarely have: signs beside letters, letters without the one that follows them, two with accents
_STRANGE = re.compile(r"[^\W\d_][£±³µ¿¡ºª]|£[^\W\d_]|õ(?!e)|ã(?![oe])|œ(?!u)|(?!ç|éé|.ß)[ß-öø-ÿ]{2}")
_JAPANESE = re.compile(r"[\u3041-\u3096\u30a1-\u30fa]")
#: an encoding named inside the document: XML declaration, HTML meta element
_DECLARED = re.compile(
    rb"""(?:<\?xml[^>]{0,100}encoding|<meta[^>]{0,200}charset)\s*=\s*["']?([A-Za-z0-9_.:-]{2,40})""", re.I
)
#: enough for a verdict, little enough to be quick
_SAMPLE = 64 * 1024


def decode(content: bytes, language: str | None = None, charset: str | None = None) -> str:
    """The text of the bytes. Never fails: the last resort is cp1252 with its holes replaced.

    Order: byte order mark; UTF-16 without one (NUL in every other byte); valid UTF-8; the encoding that is declared, as
    ``charset`` or inside; UTF-8 with few errors; the declared encoding with few errors; of those usual for
    ``language`` the one that charset-normalizer finds; cp932 if that gives Japanese; charset-normalizer among likely
    encodings, but cp1252 where it finds cp1250 in a text of a western language.
    """
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return content.decode(encoding, "replace")
    utf16 = utf16_without_mark(content)
    if utf16:
        return content.decode(utf16, "replace")
    declared = charset or _declared(content)
    if content.isascii() and (charset or b"\x1b" in content):  # as those of 7 bits are, such as ISO-2022-JP
        return _decode_as(content, declared) or content.decode()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as found:
        error = found
        # A character cut off at the end does not make it another encoding; a single byte there can be one of another.
        before, cut = content[: error.start], content[error.start :]
        if error.reason == "unexpected end of data" and (len(cut) > 1 or not before.isascii()):
            return before.decode("utf-8")
    if (text := _decode_as(content, declared)) is not None:
        return text
    replaced = content.decode("utf-8", "replace")
    if sum(byte >= 0x80 for byte in content[:_SAMPLE]) > 20 * replaced[:_SAMPLE].count("\ufffd"):
        return replaced
    if (text := _decode_as(content, declared, "replace")) is not None and not _is_japanese(content[:_SAMPLE]):
        high = len(content) - len(content.translate(None, _HIGH))
        if text.count("\ufffd") <= min(high // 3, 1 + high // 50):
            return text
    language = (language or "")[:2].lower()
    if likely := _BY_LANGUAGE.get(language):
        best = likely[0] if len(likely) == 1 else _likeliest(content[error.start :][:_SAMPLE], likely) or likely[0]
        if (text := _decode_as(content, best)) is not None:
            return text
    return content.decode(_guess(content, language), "replace")


def _decode_as(content: bytes, encoding: str, errors: str = "strict") -> str | None:
    """The text in an encoding that a document names; None if it is not in it, or the encoding does not exist."""
    try:
        name = codecs.lookup(encoding).name
        # Python has others by such names: punycode takes minutes for a megabyte, and idna is for names of hosts
        return None if name in _NO_TEXT else content.decode(_LARGER.get(name, name), errors)
    except (UnicodeError, LookupError, ValueError):
        return None


def utf16_without_mark(content: bytes) -> str | None:
    """``utf-16-le`` or ``utf-16-be`` where every other byte is mostly NUL, else None."""
    sample = content[:2048]
    half = len(sample) // 2
    if half < 4 or b"\0" not in sample:
        return None
    even, odd = sample[0 : 2 * half : 2].count(0), sample[1 : 2 * half : 2].count(0)
    if odd > 0.6 * half and even < 0.1 * half:
        return "utf-16-le"
    if even > 0.6 * half and odd < 0.1 * half:
        return "utf-16-be"
    return None


def _declared(content: bytes) -> str:
    """The encoding that is named inside, or an empty text. What can be read there is not in UTF-16."""
    found = _DECLARED.search(content[:4096])
    name = found[1].decode("ascii") if found else ""
    return "utf-8" if name.lower().replace("_", "-").startswith(("utf-", "utf8")) else name


def _is_japanese(sample: bytes) -> bool:
    try:
        text = sample.decode("cp932")
    except UnicodeDecodeError:
        return False
    return len(_JAPANESE.findall(text)) * 2 > 0.3 * sum(byte >= 0x80 for byte in sample) > 0


def _is_western(sample: bytes, languages: Iterable[str]) -> bool:
    """Whether the bytes as cp1252 look like a text of one of the languages."""
    text = sample.decode("cp1252", "replace").lower()
    letters = Counter(letter for letter in text if letter > "\x7f" and letter not in _SIGNS)
    others = min(sum(letters[one] for one in letters.keys() - set(_WESTERN[language])) for language in languages)
    return 10 * (others + len(_STRANGE.findall(text))) <= letters.total()


def _guess(content: bytes, language: str) -> str:
    sample = content[:_SAMPLE]
    if _is_japanese(sample):
        return "cp932"
    high = sum(byte >= 0x80 for byte in sample)
    # Few high bytes, each alone between ASCII letters: a western text with accents.
    if len(re.findall(rb"(?<![\x80-\xff])[\xc0-\xff](?![\x80-\xff])", sample)) > 0.7 * high:
        return "cp1252"
    if language in _WESTERN and _is_western(sample, [language]):
        return "cp1252"

    best = _likeliest(sample, _CANDIDATES)
    return "cp1252" if best is None or (best in _CENTRAL and _is_western(sample, _WESTERN)) else best


def _likeliest(sample: bytes, encodings: Iterable[str]) -> str | None:
    from charset_normalizer import from_bytes

    best = from_bytes(sample, cp_isolation=list(encodings)).best()
    return None if best is None else best.encoding
