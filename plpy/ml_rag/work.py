"""How far a command is: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ml_rag.progress import SECONDS, State, line
from ml_rag.terminal import printable


class Task:
    """A step of the work."""

    def __init__(self, work: Work, name: str) -> None:
        self._work = work
        self._name, self._note = name, ""
        self._bar = work.progress.add_task(printable(name), total=None, note="")
        self._began = work.clock(), State(name)

    def tell(self, done: int, total: int | None, *, failed: int = 0, segments: int | None = None) -> None:
        """Of what is counted so many are done. ``segments``: of the documents that are counted."""
        state = State(self._name, "", done, -1 if total is None else total, failed, segments)
        counts = [f"{failed} failed"] if failed else []
        counts += [f"{segments} segments"] if segments else []
        self._work.progress.update(self._bar, completed=done, total=total, note=", ".join(counts) or self._note)
        now = self._work.clock()
        if not self._work.console.is_terminal and now - self._work.told >= SECONDS:
            self._work.say(line(state, now - self._began[0], self._began[1]))

    def note(self, text: str) -> None:
        """What is done just now, in a few words."""
        self._note = text
        self._work.progress.update(self._bar, note=printable(text))

    def heard(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        """A notice of progress, of a call that takes long by itself."""
        self.note(diagnostic.message_primary or "")
        if not self._work.console.is_terminal:
            self._work.say(self._note)

    def end(self) -> None:
        self._work.progress.remove_task(self._bar)


class Work:
    """What a command does, from its beginning to its end. ``clock``: seconds, which never go back."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.told = clock()
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Work:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """Print a line, for output without a bar."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
        self.told = self.clock()

    @contextmanager
    def task(self, name: str) -> Iterator[Task]:
        """A step, which is named in front of what is done."""
        task = Task(self, name)
        try:
            yield task
        finally:
            task.end()
