"""From token bytes to text a client may see: whole characters, nothing at or after a stop sequence or a loop."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ml_rag.server.engines.loop_guard import LoopGuard


class TextStream:
    """Collects the bytes of tokens and gives out text.

    A character whose bytes come with several tokens is given out when it is whole. Text that could still become a
    stop sequence is held back. Blank space at the very beginning is dropped, since some vocabularies begin every
    text with a space. With ``loop_guard`` it ends where the text begins to repeat itself.
    """

    def __init__(self, stop: Sequence[str] = (), *, loop_guard: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = [sequence for sequence in stop if sequence]
        self._held = ""
        self._begun = self._met_stop = False
        self._guard = LoopGuard() if loop_guard else None

    @property
    def stopped(self) -> bool:
        """A stop sequence has come, or the text repeats itself; nothing follows."""
        return self._met_stop or (self._guard is not None and self._guard.looping)

    def feed(self, data: bytes) -> str:
        """The text that ``data`` makes safe to give out."""
        text = self._take(self._decoder.decode(data), last=False)
        return text if self._guard is None else self._guard.feed(text)

    def finish(self) -> str:
        """What was held back, at the end of the answer, without the bytes of an unfinished character."""
        text = self._take("", last=True)
        return text if self._guard is None else self._guard.feed(text) + self._guard.finish()

    def _take(self, text: str, *, last: bool) -> str:
        if self._met_stop:
            return ""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        self._held += text
        found = [at for sequence in self._stop if (at := self._held.find(sequence)) >= 0]
        if found:
            self._met_stop = True
            safe = min(found)
        else:
            safe = len(self._held) - (0 if last else self._unsure())
        given, self._held = self._held[:safe], self._held[safe:]
        return given

    def _unsure(self) -> int:
        """Length of the longest end of the held text that begins a stop sequence."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(sequence.startswith(self._held[-length:]) for sequence in self._stop):
                return length
        return 0
