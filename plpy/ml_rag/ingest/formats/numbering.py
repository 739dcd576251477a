"""Numbers of lists and headings: numerals, and what Word and OpenDocument show before paragraphs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ml_rag.ingest.formats.common import one_line

_ROMAN = {
    "m": 1000, "cm": 900, "d": 500, "cd": 400, "c": 100, "xc": 90, "l": 50, "xl": 40, "x": 10, "ix": 9, "v": 5,
    "iv": 4, "i": 1,
}  # fmt: skip
_KINDS = {"lowerLetter": "a", "upperLetter": "A", "lowerRoman": "i", "upperRoman": "I"}
_ORDINALS = {1: "st", 2: "nd", 3: "rd"}
_NUMBER = re.compile(r"\s*(-?\d{1,9})\s*", re.ASCII)
_PLACE = re.compile("%([1-9])")
_ODF_PLACE = re.compile("%([1-9][0-9]?)%")
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_STYLE = "{urn:oasis:names:tc:opendocument:xmlns:style:1.0}"
#: of newer versions of LibreOffice, such as %1%.%2%
_WRITTEN = "{urn:org:documentfoundation:names:experimental:office:xmlns:loext:1.0}num-list-format"
_OUTLINE = "\n"
_XML_ID = "{http://www.w3.org/XML/1998/namespace}id"
#: styles on which each other are based
_MOST_BASES = 50
#: of a list of OpenDocument; Word has 9
_MOST_LEVELS = 10
#: Word takes 255 characters
_MOST_CHARACTERS = 255


def numeral(number: int, kind: str, *, is_repeated: bool = False) -> str:
    """A number in a kind of HTML and OpenDocument: ``1``, ``a`` (z, aa, ab, or aa, bb), ``A``, ``i``, ``I``."""
    text = ""
    if kind in ("a", "A") and number > 0 and is_repeated:
        times, letter = divmod(number - 1, 26)
        text = chr(ord("a") + letter) * min(times + 1, _MOST_CHARACTERS)
    elif kind in ("a", "A") and number > 0:
        while number:
            number, letter = divmod(number - 1, 26)
            text = chr(ord("a") + letter) + text
    elif kind in ("i", "I") and 0 < number < 4000:
        for sign, value in _ROMAN.items():
            text += sign * (number // value)
            number %= value
    return (text.upper() if kind.isupper() else text) or str(number)


def whole(value: Any, otherwise: int) -> int:
    """The whole number that an attribute has."""
    found = _NUMBER.fullmatch(value or "")
    return int(found[1]) if found else otherwise


@dataclass(slots=True)
class _Level:
    start: int
    format: str
    text: str
    #: the first of the levels above that do not restart it
    restart: int
    is_decimal: bool
    style: str | None

    def shown(self, number: int, *, is_decimal: bool) -> str:
        if self.format in ("none", "bullet"):
            return ""
        kind = "" if is_decimal else _KINDS.get(self.format, "")
        if self.format == "ordinal" and not is_decimal:
            return f"{number}{'th' if number // 10 % 10 == 1 else _ORDINALS.get(number % 10, 'th')}"
        return f"{number:02}" if self.format == "decimalZero" else numeral(number, kind, is_repeated=True)


class WordLabels:
    """What Word shows before the paragraphs of a part, which are asked for in their order."""

    def __init__(self, numbering: Any, styles: Any) -> None:
        """The roots of the parts of this name; the second can be None."""
        self._styles = {_attribute(one, "styleId"): one for one in (() if styles is None else styles)}
        self._nums = {_attribute(one, "numId"): one for one in numbering.iterchildren("{*}num")}
        self._lists = {_attribute(one, "abstractNumId"): one for one in numbering.iterchildren("{*}abstractNum")}
        self._levels: dict[str | None, dict[int, _Level]] = {}
        self._known: dict[str, tuple[str | None, dict[int, _Level], dict[int, int]]] = {}
        #: the number of each level of a list
        self._numbers: dict[str | None, dict[int, int]] = {}
        self._places: dict[tuple[str | None, str | None, str | None], tuple[str | None, int]] = {}
        self._begun: set[tuple[str, int]] = set()

    def label(self, paragraph: Any) -> str | None:
        """None without a number or with a bullet; empty if the number is not shown."""
        properties = paragraph.find("{*}pPr")
        if properties is None or any(
            properties.find(f"{{*}}rPr/{{*}}{key}") is not None for key in ("del", "moveFrom")
        ):
            return None
        num, level = self._place(properties)
        if num is None or num not in self._nums:
            return None
        name, levels, starts = self._list(num)
        if level not in levels:
            return None
        numbers = self._numbers.setdefault(name, {})
        for above in levels.keys() - numbers.keys():  # one that is skipped counts, too
            if above < level:
                numbers[above] = levels[above].start
        own = levels[level]
        if level in starts and (num, level) not in self._begun:
            numbers[level] = starts[level]
        else:
            numbers[level] = numbers[level] + 1 if level in numbers else own.start
        self._begun.add((num, level))
        for deeper in [one for one in numbers if one > level and one in levels and level < levels[one].restart]:
            del numbers[deeper]
        if own.format == "bullet":
            return None

        def shown(place: re.Match[str]) -> str:
            one = int(place[1]) - 1
            return levels[one].shown(numbers[one], is_decimal=own.is_decimal) if one in levels and one <= level else ""

        return one_line(_PLACE.sub(shown, own.text))[:_MOST_CHARACTERS]

    def _place(self, properties: Any) -> tuple[str | None, int]:
        """The list of a paragraph, by its number, and the level, of its own or of its style."""
        key = (_value(properties, "numPr/numId"), _value(properties, "numPr/ilvl"), _value(properties, "pStyle"))
        if key not in self._places:
            self._places[key] = self._through_styles(*key)
        return self._places[key]

    def _through_styles(self, num: str | None, level: str | None, style: str | None) -> tuple[str | None, int]:
        for _ in range(_MOST_BASES):
            base = self._styles.get(style)
            if base is None or (num and level):
                break
            num = num or _value(base, "pPr/numPr/numId")
            if num and not level:
                levels = self._list(num)[1] if num in self._nums else {}
                linked = next((str(key) for key, one in levels.items() if one.style == style), None)
                level = linked or _value(base, "pPr/numPr/ilvl")
            style = _value(base, "basedOn")
        return num, whole(level, 0)

    def _list(self, num: str) -> tuple[str | None, dict[int, _Level], dict[int, int]]:
        """The name of a list, its levels, and the numbers at which this use of it begins."""
        if num in self._known:
            return self._known[num]
        element = self._nums[num]
        name = _value(element, "abstractNumId")
        for _ in range(_MOST_BASES):  # through styles of lists
            found = self._lists.get(name)
            link = None if found is None else _value(found, "numStyleLink")
            style = None if link is None else self._styles.get(link)
            other = None if style is None else self._nums.get(_value(style, "pPr/numPr/numId"))
            if other is None:
                break
            name = _value(other, "abstractNumId")
        if name not in self._levels:
            found = self._lists.get(name)
            self._levels[name] = _levels(() if found is None else found.iterchildren("{*}lvl"))
        overrides = {_attribute(one, "ilvl"): one for one in element.iterchildren("{*}lvlOverride")}
        starts = {whole(key, 0): _value(one, "startOverride") for key, one in overrides.items()}
        own = _levels(level for one in overrides.values() for level in one.iterchildren("{*}lvl"))
        begins = {key: whole(one, 0) for key, one in starts.items() if one}
        self._known[num] = name, self._levels[name] | own, begins
        return self._known[num]


def _levels(elements: Iterable[Any]) -> dict[int, _Level]:
    levels = {}
    for element in elements:
        number = whole(_attribute(element, "ilvl"), 0)
        if not 0 <= number < _MOST_LEVELS:
            continue
        levels[number] = _Level(
            whole(_value(element, "start"), 0),
            _value(element, "numFmt") or "decimal",
            (_value(element, "lvlText") or "")[:_MOST_CHARACTERS],
            whole(_value(element, "lvlRestart"), number),
            _value(element, "isLgl", "true") in ("true", "1", "on"),
            _value(element, "pStyle"),
        )
    return levels


def _value(element: Any, path: str, otherwise: str | None = None) -> str | None:
    """The value of an element below another one; ``otherwise`` if it is there without one."""
    found = element.find("/".join(f"{{*}}{name}" for name in path.split("/")))
    return None if found is None else _attribute(found, "val") or otherwise


def _attribute(element: Any, name: str) -> str | None:
    attributes: Mapping[str, str] = element.attrib
    return next((value for key, value in attributes.items() if key.rpartition("}")[2] == name), None)


def number_odf(part: Any, roots: Iterable[Any]) -> None:
    """Give items of lists with numbers, and headings, what stands before them, as an attribute ``label``. ``roots``:
    of the styles."""
    styles: dict[str | None, dict[int, Any]] = {}
    plain: dict[str | None, Any] = {}
    for root in roots:
        for style in root.iter(f"{_TEXT}list-style", f"{_TEXT}outline-style"):
            name = _OUTLINE if style.tag.endswith("outline-style") else style.get(f"{_STYLE}name")
            styles[name] = {whole(level.get(f"{_TEXT}level"), 0): level for level in style.iterchildren("*")}
        plain |= {style.get(f"{_STYLE}name"): style for style in root.iter(f"{_STYLE}style")}
    #: of a list its style, its level, and the numbers of all levels, which lists that continue it share
    lists: dict[Any, tuple[str | None, int, dict[int, int]]] = {}
    known: dict[str | None, dict[int, int]] = {}
    outline: dict[int, int] = {}
    counted = f"{_TEXT}list", f"{_TEXT}list-item", f"{_TEXT}h"
    apart = part.iter(f"{_TEXT}tracked-changes", "{*}annotation")
    uncounted = {one for deleted in apart for one in deleted.iter(*counted)}
    for one in part.iter(*counted):
        if one in uncounted:
            continue
        around, name = one.getparent(), one.get(f"{_TEXT}style-name")
        if one.tag == f"{_TEXT}list":
            if (above := lists.get(around.getparent())) is not None:
                lists[one] = name or above[0], above[1] + 1, above[2]
                continue
            does_continue = one.get(f"{_TEXT}continue-numbering") == "true"
            before = one.get(f"{_TEXT}continue-list") or (name if does_continue else None)
            lists[one] = name, 1, known.get(before, {})
            known |= {key: lists[one][2] for key in (name, one.get(_XML_ID)) if key}
        elif one.tag == f"{_TEXT}list-item" and around in lists:
            style, level, numbers = lists[around]
            if level > _MOST_LEVELS:
                continue
            levels = styles.get(one.get(f"{_TEXT}style-override") or style, {})
            if one.find("*") is not None and one.find("*").tag == f"{_TEXT}list":  # it is there only to hold this
                numbers.setdefault(level, 1)
            else:
                _label_odf(one, levels, level, numbers)
        elif around.tag != f"{_TEXT}list-item" and one.get(f"{_TEXT}is-list-header") != "true":
            for _ in range(_MOST_BASES):
                if (style := plain.get(name)) is None or (found := style.get(f"{_STYLE}list-style-name")) is not None:
                    break
                name = style.get(f"{_STYLE}parent-style-name")
            if style is None or found:
                _label_odf(one, styles.get(_OUTLINE, {}), whole(one.get(f"{_TEXT}outline-level"), 1), outline)


def _label_odf(element: Any, levels: Mapping[int, Any], level: int, numbers: dict[int, int]) -> None:
    own = levels.get(level)
    start = whole(None if own is None else own.get(f"{_TEXT}start-value"), 1)
    numbers[level] = whole(element.get(f"{_TEXT}start-value"), numbers[level] + 1 if level in numbers else start)
    for deeper in [one for one in numbers if one > level]:
        del numbers[deeper]
    if own is None or not own.get(f"{_STYLE}num-format"):
        return

    def shown(number: int) -> str:
        kind = levels[number].get(f"{_STYLE}num-format") if number in levels else None
        is_repeated = number in levels and levels[number].get(f"{_STYLE}num-letter-sync") == "true"
        return numeral(numbers.get(number, 1), kind, is_repeated=is_repeated) if kind else ""

    first = level + 1 - whole(own.get(f"{_TEXT}display-levels"), 1)
    text = ".".join(filter(None, map(shown, range(max(first, 1), level + 1))))
    text = f"{own.get(f'{_STYLE}num-prefix', '')}{text}{own.get(f'{_STYLE}num-suffix', '')}"
    if written := own.get(_WRITTEN):
        text = _ODF_PLACE.sub(lambda place: shown(int(place[1])), written[:_MOST_CHARACTERS])
    element.set("label", one_line(text)[:_MOST_CHARACTERS])
