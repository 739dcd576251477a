"""A model server with several embedding models, which lets a test do something before a request is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster import Connection
from support.documents_server import DocumentsServer
from support.hostile_server import hostile
from support.stores import fake_embedding


class ModelsServer(DocumentsServer):
    """A handler for ``hostile``. Models: those of ``MODELS``, and every other name as ``fake-embed``.

    ``requests`` holds what each request to embed asked for. A text with ``!nan`` gets an embedding that is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, list[str]]] = []
        #: number of a request, from 0 -> what to do before it is answered
        self.before: dict[int, Callable[[], object]] = {}
        #: the same before each request, given its texts
        self.always: Callable[[list[str]], object] = lambda _: None

    def vectors(self, texts: list[str], model: str) -> list[list[float]]:
        """See ``DocumentsServer``."""
        number = len(self.requests)
        self.requests.append((model, texts))
        self.before.pop(number, lambda: None)()
        self.always(texts)
        return [[float("nan")] * 16 if "!nan" in text else embedding(text, model) for text in texts]

    def embedded(self, model: str) -> list[str]:
        """The texts that a model has embedded, in their order; without the probe of its dimensions."""
        texts = [text for asked, texts in self.requests if asked == model for text in texts]
        return [text for text in texts if text != "dimensions"]


#: what each model makes of a text: other dimensions, or the same ones in another order
MODELS: dict[str, Callable[[str], list[float]]] = {
    "narrow": lambda text: fake_embedding(text, 8),
    "other": lambda text: fake_embedding(text)[::-1],
    "wide": lambda text: fake_embedding(text, 2500),
}


def embedding(text: str, model: str) -> list[float]:
    return MODELS.get(model, fake_embedding)(text)


@pytest.fixture
def models(owner: Connection, local_sockets: Path) -> Iterator[ModelsServer]:
    """The model server of the database."""
    handler = ModelsServer()
    with hostile(local_sockets, handler, owner=owner):
        yield handler
