"""client/load: what `ml-rag load` shows of notices."""

from __future__ import annotations

import io

from rich.console import Console

from ml_rag.client.load import Client, Store
from ml_rag.files import Given
from ml_rag.work import Work


class Listened:
    def __init__(self) -> None:
        self.handlers: list[object] = []
        self.add_notice_handler, self.remove_notice_handler = self.handlers.append, self.handlers.remove


def test_notices_are_shown_as_long_as_the_bar_is() -> None:
    """What PostgreSQL says later, as of the index, has no bar any more."""
    connection = Listened()
    client = Client(connection, Store(1, is_judged=False), {}, Given({}, {}))  # type: ignore[arg-type]
    with Work(Console(file=io.StringIO())) as work, work.task("files") as task:
        with client.hears(task):
            assert connection.handlers == [task.heard]
        assert connection.handlers == []
