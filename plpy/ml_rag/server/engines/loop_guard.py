"""The end of an answer that has begun to repeat itself.

Small models, greedily sampled, fall into loops: they say one sentence again and again until ``max_tokens``. Such an
answer ends here before the repetition. Three signs count, all of them exact and all of prose only:

* a sentence of six words and more that the answer already has, letter for letter but for blank space;
* the same two to sixteen words over and over, or one tag: at least three times in a row, and 24 words of them;
* the same two to sixteen characters over and over without blank space (``pay-pay-pay``, ``</b></b>``): at least eight
  times in a row, and 32 characters of them.

Numbers, table rows, short list items and what stands in a fence of code repeat for good reasons and are left alone.
"""

from __future__ import annotations

import re
from collections import deque

_SENTENCE_WORDS = 6
_RUN_WORDS, _RUN_COPIES, _LONGEST_PERIOD = 24, 3, 16
_STUTTER_CHARACTERS, _STUTTER_COPIES = 32, 8
_CODE = "```"
# The last of a sentence, with quotes or brackets that close after it; or the line ends.
_SENTENCE_END = re.compile(r"""[.!?…]+["'”’)\]*_]*(?=\s)|[。！？]|\n""")
_WORD = re.compile(r"[^\W\d_]{2,}|[^\W\d_](?=\W|$)")
_ENDS = (".", "!", "?", "…", "。", "！", "？")


class LoopGuard:
    """Takes the text of an answer in pieces and gives it on, up to the point where it repeats itself.

    Text that could still become a repeated sentence is held back, as blank space between sentences is, so that what
    is given out ends with the sentence before. Where the answer does not loop, the pieces make exactly its text.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        # every beginning of a sentence in _seen, so that a look at each piece costs the same in long answers
        self._beginnings: set[str] = set()
        self._sentence = ""
        self._given = 0  # characters of _sentence that were given out
        self._in_code = False
        self._word = ""
        self._words: deque[str] = deque(maxlen=_LONGEST_PERIOD)
        # [p]: how many of the last words are each the same as the one p words before
        self._runs = [0] * (_LONGEST_PERIOD + 1)
        # the same of the last characters, since the last blank
        self._characters: deque[str] = deque(maxlen=_LONGEST_PERIOD)
        self._stutters = [0] * (_LONGEST_PERIOD + 1)
        #: the answer repeats itself; nothing follows
        self.looping = False

    def feed(self, text: str) -> str:
        """The text that ``text`` makes safe to give out."""
        safe = ""
        for line in text.splitlines(keepends=True):
            # by lines, since a fence of code begins and ends with one
            self.looping = self.looping or self._runs_on(line)
            if self.looping:
                break
            end = self._stuttering(line)
            safe += self._feed(line[:end])
            if end is not None:
                self.looping = True
                break
        return safe

    def finish(self) -> str:
        """What was held back, at the end of the answer; nothing when it is a repeated sentence."""
        if self.looping or self._ends_here(self._sentence):
            return ""
        return self._sentence[self._given :]

    def _feed(self, text: str) -> str:
        safe, self._sentence = "", self._sentence + text
        # blank space before a sentence belongs to it, so that it goes with it
        while end := _SENTENCE_END.search(self._sentence, len(self._sentence) - len(self._sentence.lstrip())):
            sentence, rest = self._sentence[: end.end()], self._sentence[end.end() :]
            if self._ends_here(sentence):
                return safe
            safe += sentence[self._given :]
            self._sentence, self._given = rest, 0
        if not self._may_repeat(self._sentence):
            safe += self._sentence[self._given :]
            self._given = len(self._sentence)
        return safe

    def _ends_here(self, sentence: str) -> bool:
        """Take note of a sentence; whether the answer loops with it."""
        key = " ".join(sentence.split())
        if key.startswith(_CODE):
            self._in_code = not self._in_code
        if self._in_code:
            return False
        whole = key.rstrip("\"'”’)]*_").endswith(_ENDS) and "|" not in key
        if whole and len(_WORD.findall(key)) >= _SENTENCE_WORDS:
            self.looping = key in self._seen
            self._seen.add(key)
            self._beginnings.update(key[:length] for length in range(1, len(key) + 1))
        return self.looping

    def _runs_on(self, text: str) -> bool:
        """Whether the words of the answer, with ``text`` after them, only repeat themselves."""
        *complete, self._word = re.split(r"\s+", self._word + text)
        for word in filter(None, complete):
            if self._in_code or "|" in word:  # the cells of a table
                self._words.clear()
                self._runs = [0] * len(self._runs)
                continue
            for period, before in enumerate(reversed(self._words), start=1):
                run = self._runs[period] = self._runs[period] + 1 if before == word else 0
                # run counts the second copy and those after it
                if run + period >= max(_RUN_WORDS, _RUN_COPIES * period) and self._says_something(period):
                    return True
            self._words.append(word)
        return False

    def _stuttering(self, text: str) -> int | None:
        """How much of ``text`` there is until the answer only repeats some characters; None: it does not."""
        for place, character in enumerate(text):
            if self._in_code or character.isspace() or character == "|":
                self._characters.clear()
                self._stutters = [0] * len(self._stutters)
                continue
            for period, before in enumerate(reversed(self._characters), start=1):
                run = self._stutters[period] = self._stutters[period] + 1 if before == character else 0
                if run + period >= max(_STUTTER_CHARACTERS, _STUTTER_COPIES * period):
                    last = list(self._characters)[-period:]
                    if len({one for one in last if one.isalpha()}) >= 2 or ("<" in last and ">" in last):
                        return place
            self._characters.append(character)
        return None

    def _says_something(self, period: int) -> bool:
        """Whether the last ``period`` words are prose: two different ones with letters, at least; or one tag."""
        last = list(self._words)[-period:]
        if period == 1 and last[0].startswith("<") and last[0].endswith(">"):
            return True
        return len({word for word in last if _WORD.search(word)}) >= 2

    def _may_repeat(self, sentence: str) -> bool:
        begun = " ".join(sentence.split())
        return not self._in_code and (not begun or begun in self._beginnings)
