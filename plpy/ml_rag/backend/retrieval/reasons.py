"""Why stores, or arms in them, are not searched: failures as ml_rag._raise takes them, and warnings."""

from __future__ import annotations

import json
import re
from typing import Any

from ml_rag.backend.retrieval.sqltext import identifier, literal
from ml_rag.backend.retrieval.stores import Store

#: bytes of a name that ml_rag.create_node_group takes
_LONGEST_NAME = 40


def failure(store: str, sqlstate: str, message: str, detail: str | None = None, hint: str | None = None) -> Any:
    """The error of a store, as ml_rag._warn_of_failures takes it too; see ml_rag._failure."""
    facts = {"detail": (detail or "")[:500], "hint": (hint or "")[:500]}
    facts = {key: text for key, text in facts.items() if text}
    return {"store": store, "sqlstate": sqlstate, "message": message[:500]} | facts


def other_dimensions(store: Store, dimensions: int, length: int) -> Any:
    """Of a store whose vectors cannot be compared with the query embedding, which has ``length`` dimensions."""
    name = store.vector_store
    return failure(
        name,
        "22000",
        "the query embedding and the vector store differ in dimensions",
        f"The query embedding has {length} dimensions, {name}.{_quoted(store.segment_embedding)} has {dimensions}.",
        'Name the store\'s own model in "embed_model_id", or leave the store out with "exclude_vector_store".',
    ) | {
        "warning": f'"{name}" has other dimensions than the query embedding; ignored',
        "skipped": f"It has {dimensions} dimensions, the query embedding {length}.",
        "warning_hint": 'Correct the model in its marker comment, or leave the store out with "exclude_vector_store".',
    }


def given_away(name: str) -> Any:
    """Of a store that the call found by itself, and would not find any more once it has its lock; or above READ
    COMMITTED, that was changed since the transaction began."""
    return failure(
        name,
        "55000",
        f'store "{name}" has changed, and is searched only if the call names it',
        "Another session changed it, or its privileges, or gave it to another role, since the call or its transaction"
        " began.",
        'Begin another transaction, or name it in "vector_store", with its schema.',
    )


def _quoted(name: str) -> str:
    return name if re.fullmatch("[a-z_][a-z0-9_]*", name) else identifier(name)


def broken_index(store: Store, why: str) -> Any:
    """Of a store whose keyword index cannot be used: its configuration was dropped, or its key's type changed."""
    name, hint = store.vector_store, f"Its owner can rebuild it: {_enabling(store)};"
    return failure(name, "55000", f'the keyword index of "{name}" cannot be used', why, hint) | {
        "warning": f'the keyword index of "{name}" cannot be used; ignored',
        "warning_detail": why,
        "skipped": "Its keyword index cannot be used.",
        "warning_hint": hint,
    }


def _enabling(store: Store) -> str:
    """The statement by which an owner creates or rebuilds the keyword index of a store."""
    options = ""
    if store.segment != "segment":
        options = f", {literal(json.dumps({'segment': store.segment}, ensure_ascii=False))}"
    return f"SELECT ml_rag.enable_keyword_search({literal(store.table)}{options})"


def _listed(stores: list[Store]) -> str:
    return ", ".join(store.vector_store for store in stores[:20])


def _first_table(plpy: Any, stores: list[Store]) -> Store | None:
    """The first that can have a keyword index and nodes of its own, which a view cannot."""
    relations = ", ".join(str(store.relation) for store in stores)
    rows = plpy.execute(f"SELECT c.oid FROM pg_class AS c WHERE c.oid IN ({relations}) AND c.relkind IN ('r', 'p')")
    tables = {int(row["oid"]) for row in rows}
    return next((store for store in stores if store.relation in tables), None)


def no_index(plpy: Any, stores: list[Store], *, is_all: bool) -> Any:
    """Say which stores a keyword arm left out for want of an index; where that is all of them, the error."""
    hint = "Only an ordinary table can have one: search the table behind it."
    if (table := _first_table(plpy, stores)) is not None:
        hint = f"Its owner can create one: {_enabling(table)};"
        if not plpy.execute(f"SELECT has_table_privilege({table.relation}, 'SELECT') AS reads_all")[0]["reads_all"]:
            hint += "\nIf it has one, searching it takes SELECT on the columns of its key, too."
    if is_all:
        names = ", ".join(store.vector_store for store in stores)
        hint += '\nOr search by meaning alone, as with "keyword_search": false.'
        message = "no vector store has a keyword index"
        return {"sqlstate": "55000", "message": message, "detail": f"Stores: {names}.", "hint": hint}
    message = f"{len(stores)} vector stores have no keyword index; keyword search ignores them"
    if len(stores) == 1:
        message = f'"{stores[0].vector_store}" has no keyword index; keyword search ignores it'
    detail = f"Ignored: {_listed(stores)}{', …' if len(stores) > 20 else ''}."
    plpy.warning(message, detail=detail, hint=hint, sqlstate="01000")
    return None


def no_part(plpy: Any, stores: list[Store], arm: Any, search: str, *, is_all: bool) -> Any:
    """The same of its node group or embedding; ``arm``: an AskedArm."""
    group, table = arm.node_group, _first_table(plpy, stores)
    store = "" if table is None else literal(table.table)
    if group is None:
        what = f'embedding "{arm.embedding[:100]}"'
        name = literal(arm.embedding)
        hint = f"CALL ml_rag.add_embedding({store}, {name}, '{{\"embed_model_id\": …}}') makes one."
    else:
        what = f'node group "{group[:100]}"'
        can_be = re.fullmatch(r"[^\W\d][\w-]*", group) and len(group.encode()) <= _LONGEST_NAME and group != "document"
        name = literal(group if can_be else "sentences")
        has = '"keyword_search": true' if search == "keyword" else '"embed": true'
        hint = (
            f"{'' if can_be else 'A node group cannot have that name. '}CALL ml_rag.create_node_group({store}, {name},"
            f" '{{\"transform\": …}}') makes one; it must have {has}, and the caller SELECT on it."
        )
    if table is None:
        hint = "Only a table can have one: search the table behind it."
    if is_all:
        message = f"no vector store has {'an' if group is None else 'a'} {what} to search"
        return {"sqlstate": "55000", "message": message, "detail": f"Stores: {_listed(stores)}.", "hint": hint}
    message = f"{len(stores)} vector stores have no {what} to search; left out"
    plpy.warning(message, detail=f"Left out: {_listed(stores)}.", hint=hint, sqlstate="01000")
    return None
