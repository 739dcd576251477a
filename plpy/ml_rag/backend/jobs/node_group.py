"""Node groups: texts made of the texts of a store, and their embeddings (sql/nodes).

Row 0 of a key says what was done, so that the next call resumes one that has ended at any moment.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ml_rag.backend.jobs import vectors
from ml_rag.backend.jobs.loop import (
    COMMIT,
    MOST_BYTES,
    Batch,
    CreatedAgain,
    Derived,
    Session,
    Statement,
    Steps,
    call,
    function,
    later,
    run,
)
from ml_rag.backend.retrieval.sqltext import identifier, literal
from ml_rag.errors import MlRagError

_BEGIN = {
    "ml_rag.create_node_group": "_begin_node_group(oid, text, jsonb)",
    "ml_rag.refresh_node_groups": "_begin_refresh(oid, jsonb)",
}
#: texts of a batch: fewer where a model is asked about each
_SIZE, _SIZE_ASKED = 100, 8
#: keys without a text whose nodes are taken away at once
_SIZE_GONE = 10_000
#: nodes of a batch, but for those of its last parent: each has a vector
_MOST_NODES = 10_000
#: bytes of the keys of segments beside the nodes of one parent, each of which has all of them
_MOST_MEMBERS = 100_000_000
_TOO_MANY = {
    "sqlstate": "54000",
    "message": "too many nodes and segments of one document",
    "detail": f"Each has the keys of all segments: {_MOST_MEMBERS} bytes of them are kept.",
}


#: a node group as it is filled; sources, pending, same, key_text, node_key, merged: SQL. place: the columns by which
#: parents are read: that of the documents, if it has no nulls, so that a batch does not put together later documents
_FACTS = """
SELECT json_build_object('relation', r.relation::oid::bigint, 'name', ml_rag._relation_name(r.relation),
  'rows', ml_rag._indexed_rows(r.relation), 'store', ml_rag._indexed_rows(r.store),
  'options', r.options, 'key', r.key, 'store_key', r.store_key, 'key_types', r.key_types,
  'asks_model', ml_rag._asks_model(r.options ->> 'transform'), 'pending', ml_rag._pending_nodes(r),
  'sources', ml_rag._node_sources(r), 'same', ml_rag._same_key('h', r.key, 's', r.store_key),
  'node_key', ml_rag._key_text('h', r.key), 'key_text', ml_rag._key_text('s', r.store_key),
  'merged', ml_rag._merged_nodes(($1 ->> 'store')::oid), 'place', p.names, 'place_text', ml_rag._key_text('s', p.names),
  'place_types', p.types)
FROM ml_rag._look_up(($1 ->> 'store')::oid, $1 ->> 'name', ($1 ->> 'retries')::boolean) AS r
LEFT JOIN pg_attribute AS a ON a.attrelid = r.store AND a.attname = r.document AND a.attnotnull
  AND r.options ->> 'parent' = 'document'
CROSS JOIN LATERAL (
  SELECT CASE WHEN a.attnum IS NULL THEN r.store_key ELSE '{document}' END,
    CASE WHEN a.attnum IS NULL THEN r.key_types ELSE ARRAY[ml_rag._type_name(a.atttypid, a.atttypmod)] END
) AS p (names, types)
"""


class Dropped(MlRagError):
    """The store was dropped before its node groups were filled."""

    sqlstate = "42P01"


class NodeGroups(Derived):
    """What waits are parents whose nodes are not there, are of another text, or failed and are to be tried again.

    One session at a time fills a node group; parents of others come first.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.must_commit = session.routine != "fill_node_groups"
        self._began = time.monotonic()
        self._nodes = 0
        #: what _FACTS has of the group that is being filled; None: the next one is to be begun
        self._group: Any = None
        #: place of the last parent that was read, and the last key of those that have no text any more
        self._after: str | None = None
        self._after_gone: str | None = None

    def begin(self) -> Steps[None]:
        #: names, batch_size; or counted, where that is all
        begin = _BEGIN.get(self.session.routine)
        self._given = {} if begin is None else (yield Statement(function(begin), self.session.given))
        self._store, *given = json.loads(self.session.given)
        #: whether the caller has not named the store, so that its owner must be trusted
        self._is_judged = self.session.routine == "fill_node_groups" and given == [True]
        found = yield from run(
            "SELECT json_build_object('owner', c.relowner::bigint, 'name', ml_rag._full_name(c.oid),"
            " 'relation', ml_rag._relation_name(c.oid), 'is_owner', pg_has_role(c.relowner, 'USAGE'),"
            " 'groups', ARRAY(SELECT g.name FROM ml_rag._node_groups(c.oid) AS g))"
            " FROM pg_class AS c WHERE c.oid = ($1 ->> 'store')::oid",
            store=self._store,
        )
        if found is None:
            raise Dropped("vector store does not exist", detail="It was dropped before its node groups were filled.")
        self._owner, self.relation, self._relation = found["owner"], found["name"], found["relation"]
        self._names: list[str] = list(self._given.get("names", ()))
        if self.session.routine == "fill_node_groups":
            if found["is_owner"]:
                self._names = found["groups"]
            elif found["groups"]:
                name = literal(self._relation)
                hint = f"Its owner should CALL ml_rag.refresh_node_groups({name});"
                self.session.plpy.notice(f'node groups of "{self._relation}" are not filled', hint=hint)
            # the documents are loaded, whatever becomes of their nodes
            self.session.fallback = {"result": {}, **(self.session.fallback or {}), "store": self._relation}

    def enter(self, step: str) -> Steps[None]:
        if step == "make":
            yield from self._lock()
        elif self._names:
            yield from run(
                "SELECT NULL FROM ml_rag._node_tables(($1 ->> 'store')::oid) AS t,"
                " ml_rag._hold_filled(t, t, ($1 ->> 'store')::oid, ($1 ->> 'owner')::oid, true,"
                " ($1 ->> 'is_judged')::boolean)",
                store=self._store, owner=self._owner, is_judged=self._is_judged,
            )  # fmt: skip
            yield from self._lock()
            if (group := self._group) is not None:
                # tables can have been renamed, and others have their names
                yield from self._look_up()
                if any(group[key] != self._group[key] for key in ("relation", "options")):
                    name = f'node group "{self._names[0]}" of "{self._relation}"'
                    raise CreatedAgain(f"{name} was dropped and created again during the call", hint="Call again.")
        if self._names:
            self._say({"make": "generate", "finish": "index"}.get(step, "read"))

    def _lock(self) -> Steps[None]:
        if self._group is not None:
            yield from call("_lock_nodes(oid, text)", self._store, self._names[0])

    def _say(self, stage: str) -> None:
        options = self._group["options"] if self._group else {}
        self.session.stage(stage, options.get("model_id") or options.get("embed_model_id") or "")
        self.tell("building index" if stage == "index" else "making nodes")

    def read(self) -> Steps[Batch | None]:
        if self._group is None:
            if not self._names:
                return None
            yield from self._begin_group()
            return {}
        group = self._group
        columns = ", ".join(f"s.{identifier(name)}" for name in group["place"])
        after = "" if self._after is None else f" AND {later('s', group['place'], group['place_types'])}"
        # numbered after LIMIT: to number all that is pending, PostgreSQL would sort it
        parents = yield from run(
            f"SELECT json_agg(p ORDER BY p.n) FROM (SELECT q.*, row_number() OVER () AS n, sum(b.bytes) OVER ("
            "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS former"
            f" FROM (SELECT {group['key_text']} AS key, {group['place_text']} AS place, s.hash::text, s.members,"
            f" s.texts, s.around {group['pending']}{after}"
            f" ORDER BY {columns} LIMIT ($1 ->> 'size')::integer) AS q CROSS JOIN LATERAL"
            " (SELECT coalesce(sum(octet_length(t.text)), 0) + coalesce(octet_length(q.members::text), 0) AS bytes"
            " FROM unnest(q.texts) AS t (text)) AS b) AS p"
            f" WHERE p.former IS NULL OR p.former <= {MOST_BYTES}",
            after=self._after, size=self._given.get("batch_size") or (_SIZE_ASKED if group["asks_model"] else _SIZE),
        )  # fmt: skip
        if parents:
            self._after = parents[-1]["place"]
            return {"parents": parents}
        if gone := (yield from self._read_gone()):
            return {"parents": gone}
        yield from self._end_group()
        return {}

    def _read_gone(self) -> Steps[list[dict[str, Any]] | None]:
        """Keys that have nodes and no text any more: it is blank, or its document begins with another segment."""
        group = self._group
        columns = ", ".join(f"h.{identifier(name)}" for name in group["key"])
        after = "" if self._after_gone is None else f" AND {later('h', group['key'], group['key_types'])}"
        gone: list[dict[str, Any]] | None = yield from run(
            f"SELECT json_agg(p ORDER BY p.place) FROM (SELECT {group['node_key']} AS key,"
            f" row_number() OVER (ORDER BY {columns}) AS place FROM {group['rows']} AS h WHERE h.node_number = 0"
            f" AND NOT EXISTS (SELECT FROM ({group['sources']}) AS s WHERE {group['same']}){after}"
            f" ORDER BY place LIMIT {_SIZE_GONE}) AS p",
            after=self._after_gone,
        )
        if gone:
            self._after_gone = gone[-1]["key"]
        return gone

    def _look_up(self) -> Steps[None]:
        self._group = yield from run(
            _FACTS, store=self._store, name=self._names[0], retries=self.session.routine != "fill_node_groups"
        )

    def _begin_group(self) -> Steps[None]:
        yield from self._look_up()
        self._after = self._after_gone = None
        yield from call("_grant_readers(oid, oid)", self._store, self._group["relation"])
        waiting = yield from run(f"SELECT to_json(count(*)) {self._group['pending']}")
        self.total = (self.total or 0) + waiting

    def _end_group(self) -> Steps[None]:
        """Its indexes, once there is something, and fresh statistics."""
        if self.done:
            yield COMMIT
            yield from self.enter("finish")
            yield from call("_index_group(oid, jsonb)", self._group["relation"], self._group["options"])
        self._group = None
        del self._names[0]

    def make(self, batch: Batch) -> Steps[list[dict[str, Any]]]:
        """The nodes of a batch, with their embeddings, after the state of their parent; one of which fails has none."""
        group = self._group
        options = group["options"] | {"store": self._store}
        rows: list[dict[str, Any]] = []
        for i, parent in enumerate(batch["parents"]):
            if len(rows) > _MOST_NODES:
                # the next batch begins with this one
                del batch["parents"][i:]
                self._after = batch["parents"][-1]["place"]
                break
            if "texts" not in parent:
                continue
            state = {"key": parent["key"], "hash": parent["hash"], "number": 0}
            rows.append(state)
            for place, text in enumerate(parent["texts"], 1):
                made = yield from call("_transform(jsonb, text, jsonb)", options, text, parent["around"])
                if made["error"] is not None:
                    state["error"] = made["error"]
                    break
                for node in made["nodes"]:
                    number = rows[-1]["number"] + 1
                    rows.append({**state, "number": number, "parent": place, "text": node, "state": state})
            if rows[-1]["number"] * sum(map(len, parent["members"] or ())) > _MOST_MEMBERS:
                state.setdefault("error", _TOO_MANY)
        if (model := group["options"].get("embed_model_id")) is not None:
            nodes = [row for row in rows if row["number"] and "error" not in row["state"]]
            found, errors, _ = vectors.embed_apart(self.session, [row["text"] for row in nodes], model)
            for row, vector, error in zip(nodes, found, errors, strict=True):
                row["vector"] = vector
                if error is not None:
                    row["state"].setdefault("error", vectors.error_of(error))
        return [row for row in rows if not row.get("state", row).get("error") or not row["number"]]

    def write(self, batch: Batch, made: list[dict[str, Any]]) -> Steps[None]:
        """The nodes of a batch in place of what was there.

        A parent that was deleted meanwhile has none; one whose text was changed comes up again, as does one that
        another transaction is changing: it waits for no row, so it takes part in no deadlock.
        """
        group = self._group
        nodes, embeds = group["name"], "embed_model_id" in group["options"]
        columns = ", ".join(map(identifier, group["key"]))
        of_nodes = ", ".join(f"n.{identifier(name)}" for name in group["key"])
        of_store = ", ".join(f"s.{identifier(name)}" for name in group["store_key"])
        values = ", ".join(f"(u.key::text[])[{i}]::{name}" for i, name in enumerate(group["key_types"], 1))
        # before their nodes, which go with them
        keys: list[str] = yield from run(
            f"""
            WITH free AS MATERIALIZED (
              SELECT {group["key_text"]} AS key FROM {group["store"]} AS s
              WHERE ({of_store}) IN (SELECT {values} FROM json_array_elements_text($1 -> 'keys') AS u (key))
              FOR {"NO KEY UPDATE" if group["options"].get("merge") else "KEY SHARE"} SKIP LOCKED
            )
            SELECT coalesce(json_agg(f.key), '[]') FROM free AS f{self._still_there(batch, of_store, values)}""",
            keys=[parent["key"] for parent in batch["parents"]],
            hashes=[parent.get("hash") for parent in batch["parents"]],
            places=[parent["place"] for parent in batch["parents"]],
        )  # fmt: skip
        free = set(keys)
        made = [row for row in made if row["key"] in free]
        former = yield from run(
            f"WITH former AS (DELETE FROM {group['rows']} AS n USING json_array_elements_text($1 -> 'keys') AS u (key)"
            f" WHERE ({of_nodes}) = ({values}) RETURNING n.node_number, u.key, n.text_hash::text, n.attempts)"
            " SELECT json_object_agg(f.key, json_build_array(f.text_hash, f.attempts)) FROM former AS f"
            " WHERE f.node_number = 0",
            keys=keys,
        )
        attempts: dict[str, Any] = former or {}
        for row in made:
            text_hash, n = attempts.get(row["key"], (None, None))
            if row.get("error"):
                row["attempts"] = 1 + ((n or 0) if text_hash == row["hash"] else 0)
        written = yield from run(
            f"""
            WITH written AS (
              INSERT INTO {nodes} ({columns}, node_number, parent_number, node, text_hash, members, error, attempts,
                next_attempt{", node_embedding" if embeds else ""})
              SELECT {values}, u.number, u.parent, u.text, u.hash, p.members, u.error, u.attempts,
                CASE WHEN u.error IS NOT NULL
                  THEN now() + least(interval '1 day', interval '1 minute' * 2 ^ least(u.attempts - 1, 20)) END
                {f", u.vector::{self.session.schema}.vector" if embeds else ""}
              FROM ROWS FROM (json_to_recordset($1 -> 'rows') AS (key text, number integer, parent integer, text text,
                hash bigint, error jsonb, attempts integer), unnest($2))
                AS u (key, number, parent, text, hash, error, attempts, vector)
              JOIN json_to_recordset($1 -> 'parents') AS p (key text, members text[]) ON p.key = u.key
              RETURNING node_number
            )
            SELECT to_json(count(*) FILTER (WHERE w.node_number > 0)) FROM written AS w""",
            vectors=[row.pop("vector", None) for row in made],
            rows=[{key: value for key, value in row.items() if key != "state"} for row in made],
            # once, and not with each of their nodes
            parents=[{"key": parent["key"], "members": parent.get("members")} for parent in batch["parents"]],
        )  # fmt: skip
        if group["options"].get("merge"):
            yield from run(
                f"WITH merged AS (UPDATE {group['store']} AS s SET segment_nodes = {group['merged']}"
                f" WHERE ({of_store}) IN (SELECT {values} FROM json_array_elements_text($1 -> 'keys') AS u (key))"
                " RETURNING 1) SELECT to_json(count(*)) FROM merged",
                keys=keys,
            )
        self.failed += sum(1 for row in made if row.get("error"))
        self.done += sum(1 for row in made if not row["number"])
        self._nodes += written

    def _still_there(self, batch: Batch, of_store: str, values: str) -> str:
        """SQL of the condition that the text of a parent f is the one that its nodes are made of.

        Another row can have its key by now, which others see.
        """
        group, parents = self._group, batch["parents"]
        if "texts" not in parents[0]:
            return ""
        sources, condition = group["sources"], ""
        if group["options"]["parent"] == "segment":
            # not what a model reads around it
            text_hash = 'hashtextextended(concat(s.segment) COLLATE "C", 0)'
            sources = f"SELECT {of_store}, {text_hash} AS hash FROM {group['store']} AS s"
        elif group["place"] == ["document"]:
            # one by one: PostgreSQL looks up the rows of these documents then, and of no others
            place = f"(($1 -> 'places' ->> %s)::text[])[1]::{group['place_types'][0]}"
            condition = f" WHERE s.document = ANY (ARRAY[{', '.join(place % i for i in range(len(parents)))}])"
        return (
            " WHERE f.key IN (SELECT u.key FROM ROWS FROM (json_array_elements_text($1 -> 'keys'),"
            f" json_array_elements_text($1 -> 'hashes')) AS u (key, hash) JOIN ({sources}) AS s"
            f" ON ({of_store}) = ({values}) AND s.hash = u.hash::bigint{condition})"
        )

    def end(self) -> Steps[dict[str, Any]]:
        yield from ()
        if (counted := self._given.get("counted")) is not None:
            return dict(counted)
        if self.failed:
            self.warn(
                f'{self.failed} texts of "{self._relation}" have no nodes',
                "View ml_rag.node_group_error has the reasons.",
                "The others are done. What failed is tried again later, or by CALL ml_rag.refresh_node_groups at once.",
            )
        return {
            "vector_store": self.relation,
            "parents": self.done,
            "nodes": self._nodes,
            "failed": self.failed,
            "seconds": round(time.monotonic() - self._began, 3),
        }
