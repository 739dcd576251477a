"""What the arms of a call search with: by which model the question, and other texts, are embedded for each store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ml_rag.backend.embed import read_bytes
from ml_rag.backend.retrieval.request import AskedArm, Request
from ml_rag.backend.retrieval.stores import Embedding, Store, record
from ml_rag.backend.sqlstate import sqlstate
from ml_rag.backend.statements import Statements

#: errors that are of one model: unknown or of another task, not available, failed
_OF_MODEL = ("22023", "55000", "38000")

_run = Statements(
    {
        "embed": ("SELECT ml_rag._embed_means($1, $2, $3)::text AS vectors", "jsonb", "text", "text"),
        "embedding": (
            "SELECT e.embed_model_id AS model, e.segment_embedding::text AS column, e.embedding_type AS type_name,"
            " e.dimensions FROM ml_rag._embedding(jsonb_populate_record(NULL::ml_rag.store, $1), $2) AS e"
            " WHERE e.embed_model_id IS NOT NULL",
            *("jsonb", "text"),
        ),
        "node model": (
            "SELECT g.options ->> 'embed_model_id' AS model FROM ml_rag._node_groups($1) AS g WHERE g.name = $2",
            *("oid", "text"),
        ),
    }
)


class Vectors:
    """``question``: what distances are measured from. ``own``: of arms, by place and model; None = the model of the
    question. ``embeddings``: what arms compare in stores, by place and relation, where that is not the store's own;
    None = it has none of the name."""

    def __init__(self, question: str | None = None, own: dict[tuple[int, str | None], str] | None = None) -> None:
        self.question, self.own = question, own or {}
        self.embeddings: dict[tuple[int, int], Embedding | None] = {}
        #: how much of a text the models take in: of the question, and by place of arms with an embedding of theirs
        self.read_bytes: dict[int, float | None] = {}
        self._dimensions: dict[str, int] = {}

    def dimensions(self, text: str) -> int:
        """Of a vector."""
        if text not in self._dimensions:
            self._dimensions[text] = text.count(",") + 1
        return self._dimensions[text]

    def of(self, place: int, store: Store) -> str | None:
        """What an arm searches a store with."""
        embedding = self.embeddings.get((place, store.relation))
        model = None if embedding is None else embedding.model
        return self.own.get((place, model)) or self.own.get((place, None)) or self.question

    def is_own(self, place: int) -> bool:
        """Whether an arm compares other vectors than those that distances are measured by."""
        texts = [text for (one, _), text in self.own.items() if one == place]
        columns = [own and own.column for (one, _), own in self.embeddings.items() if one == place]
        return any(text != self.question for text in texts) or any(columns)

    def slot(self, place: int, store: Store) -> str:
        """The parameter that has it."""
        return next(name for name, text in self.slots(place).items() if text == self.of(place, store))

    def slots(self, place: int) -> dict[str, str | None]:
        texts = {text: None for (one, _), text in self.own.items() if one == place and text != self.question}
        names = [f"vector_{place}", *(f"vector_{place}_{k}" for k in range(2, len(texts) + 1))]
        return dict(zip(names, texts, strict=False)) | {"vector": self.question}

    @property
    def values(self) -> dict[str, str | None]:
        """All parameters."""
        places = {place for place, _ in self.own}
        return {"vector": self.question} | {k: v for place in places for k, v in self.slots(place).items()}


def embeddings(plpy: Any, arms: tuple[AskedArm, ...], stores: list[Store]) -> dict[tuple[int, int], Embedding | None]:
    """Which vectors arms compare that name a node group or an embedding."""
    found: dict[tuple[int, int], Embedding | None] = {}
    for place, arm in enumerate(arms, 1):
        for store in stores:
            if arm.node_group is not None and arm.takes_vectors:
                rows = _run(plpy, "node model", store.relation, arm.node_group)
                own = [Embedding(row["model"]) for row in rows if row["model"] is not None]
            elif arm.embedding is not None:
                own = [Embedding(**row) for row in _run(plpy, "embedding", json.dumps(record(store)), arm.embedding)]
            else:
                continue
            if not own or own[0].column != store.segment_embedding:
                found[place, store.relation] = own[0] if own else None
    return found


def embed(plpy: Any, request: Request, texts: list[tuple[str, ...]], model: str | None) -> list[str]:
    """A vector each; of several texts the mean of theirs."""
    hint = None
    if request.shape.arm("keyword") is not None:
        hint = _hint_of_words(json.loads(request.options))
    vectors: list[str] = json.loads(_run(plpy, "embed", json.dumps(texts), model, hint)[0]["vectors"])
    return vectors


def _hint_of_words(options: dict[str, Any]) -> str:
    """How a hybrid call goes without a model."""
    ways = ['Words are searched without a model: with {"semantic_search": false, "keyword_search": true}']
    if "arms" in options:
        ways = ["Words are searched without a model: with arms that search by words only"]
    if options.get("retrieval_options", {}).keys() & {"max_distance", "percentage_distance"}:
        ways.append('without "abstain" and limits on distances')
    return ", ".join([*ways, 'with "skip_generate": true or by ml_rag_search.'])


def _leave_out(made: Vectors, model: str | None, stores: list[Store]) -> bool:
    """Let no arm search vectors of a model. False where the call names a store with such, or an arm has no other."""
    found = {store.relation: store.found for store in stores}
    having = [at for at, own in made.embeddings.items() if own is not None and own.model == model]
    others = {place for (place, _), own in made.embeddings.items() if own is not None and own.model != model}
    if any(found[relation] == "named" or place not in others for place, relation in having):
        return False
    made.embeddings |= dict.fromkeys(having)
    return True


def make(
    plpy: Any, request: Request, question: str, stores: list[Store], vector: str | None, stage: Callable[[str], None]
) -> Vectors:
    """The vectors of a call; ``vector``: of the question, if given. ``stage`` is called with each model."""
    made = Vectors(vector)
    made.embeddings = embeddings(plpy, request.arms, stores)
    main = request.wanted.model or stores[0].embed_model_id
    wanted: dict[str | None, dict[tuple[int, str | None], tuple[str, ...]]] = {}
    if vector is None and request.needs_embedding:
        wanted[main] = {(0, None): (question,)}
    for place, arm in enumerate(request.arms, 1):
        if not arm.takes_vectors:
            continue
        if arm.vector is not None:
            made.own[place, None] = arm.vector
            continue
        models: set[str | None] = {None}
        if arm.node_group is not None or arm.embedding is not None:
            models = {own.model for (one, _), own in made.embeddings.items() if one == place and own is not None}
        for model in sorted(models, key=lambda name: name or ""):
            other = None if model == main else model
            if other is not None or arm.query is not None:
                wanted.setdefault(other or main, {})[place, other] = arm.query or (question,)
    for model, texts in wanted.items():
        stage(model or "")
        try:
            made.own |= dict(zip(texts, embed(plpy, request, list(texts.values()), model), strict=True))
        except plpy.SPIError as e:
            if model == main or sqlstate(e) not in _OF_MODEL or not _leave_out(made, model, stores):
                raise
            what = f"model {str(model)[:100]} cannot embed the question; what stores have by it is left out"
            plpy.warning(what, detail=str(e)[:500], sqlstate="01000")
    if (0, None) in made.own:
        made.question = made.own.pop((0, None))
    if made.question is None:  # where nothing asks for the question's own, distances are those of the first there is
        others = {place for (place, _), own in made.embeddings.items() if own is not None and own.model != main}
        first = (text for (place, other), text in made.own.items() if other is None and place not in others)
        made.question = next(first, None)
    made.read_bytes = {0: read_bytes(main)} if main in wanted else {}
    for place, arm in enumerate(request.arms, 1):
        if arm.embedding is not None:
            own = {one.model for (at, _), one in made.embeddings.items() if at == place and one is not None}
            limits = [limit for limit in map(read_bytes, own) if limit is not None]
            made.read_bytes[place] = min(limits, default=None)
    return made
