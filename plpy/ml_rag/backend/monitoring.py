"""What the model server knows of the calls of this cluster, for the views of sql/watch/watch.sql.

Each caller gets what pg_stat_activity would show it: the statements below run with the caller's rights, and nothing but
their rows leaves this module.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ml_rag.backend import calls
from ml_rag.backend.client import ModelServer
from ml_rag.backend.statements import Statements
from ml_rag.errors import EngineFailed

PATH = "/v1/calls"

_run = Statements(
    {
        # An error may have gone by the end of its call: what began this statement, where the caller may know that, and
        # whether anything runs at all. Within a transaction pg_stat_activity is frozen, but for one's own statement.
        "activity": (
            """
SELECT coalesce(json_agg(shown), '[]')::text AS rows
FROM json_to_recordset($1) AS c (pid integer, database oid, role oid, routine text, started float8, stage text,
    stage_started float8, model text, statement float8, command text, relation text, phase text, done bigint,
    total bigint, failed bigint, progress_started float8)
  JOIN pg_stat_activity AS a ON a.pid = c.pid AND a.datid = c.database
  LEFT JOIN pg_roles AS r ON r.oid = c.role
  CROSS JOIN LATERAL (SELECT a.pid = pg_backend_pid() AS is_own) AS own
  CROSS JOIN LATERAL (SELECT is_own OR coalesce(pg_has_role(a.usesysid, 'USAGE'), false)
      OR coalesce(pg_has_role(r.oid, 'USAGE'), false) OR pg_has_role('pg_read_all_stats', 'USAGE') AS is_open) AS open
  LEFT JOIN LATERAL (
    SELECT r.rolname AS role, c.routine, nullif(c.stage, '') AS stage, nullif(c.model, '') AS model, c.started,
      CASE WHEN c.stage <> '' THEN c.stage_started END AS stage_started, c.command, nullif(c.relation, '') AS relation,
      nullif(c.phase, '') AS phase, c.done, nullif(c.total, -1) AS total, c.failed, c.progress_started
  ) AS told ON is_open
  CROSS JOIN LATERAL (SELECT a.pid, a.datname, a.usename, told.*) AS shown
WHERE NOT is_open OR is_own AND c.statement = date_part('epoch', statement_timestamp())
  OR NOT is_own AND coalesce(c.statement = date_part('epoch', a.query_start), true)
    AND coalesce(a.state IN ('active', 'fastpath function call', 'disabled'), true)
""",
            "json",
        ),
        # role null: one that is gone, or all that were too many to count each
        "stats": (
            """
SELECT coalesce(json_agg(shown), '[]')::text AS rows
FROM json_to_recordset($1) AS c (role oid, routine text, stage text, calls bigint, errors bigint,
    errors_by_sqlstate json, total_ms float8, mean_ms float8, max_ms float8, p50_ms float8, p95_ms float8,
    p99_ms float8, prompt_tokens bigint, generated_tokens bigint)
  LEFT JOIN pg_roles AS r ON r.oid = c.role
  CROSS JOIN LATERAL (SELECT r.rolname AS role, c.routine, c.stage, c.calls, c.errors, c.errors_by_sqlstate,
      c.total_ms, c.mean_ms, c.max_ms, c.p50_ms, c.p95_ms, c.p99_ms, c.prompt_tokens, c.generated_tokens) AS shown
WHERE coalesce(pg_has_role(r.oid, 'USAGE'), false) OR pg_has_role('pg_read_all_stats', 'USAGE')
""",
            "json",
        ),
        "encoding": ("SELECT getdatabaseencoding() AS name",),
    }
)


def _ask(plpy: Any, server: ModelServer, **fields: Any) -> dict[str, Any]:
    """The reply of the model server, which does not know which backends are still there: that is told to it."""
    cluster, database = calls.origin(plpy)
    request = {"cluster": cluster, "database": database, **fields}
    calls.tell_waiting()
    reply = server.call("POST", PATH, request)
    if calls.tell_waiting():
        # the server has read what was in their way; these must be in the answer, too
        reply = server.call("POST", PATH, request)
    try:
        if gone := [[c["pid"], c["session"]] for c in reply["activity"] if not _is_alive(c["pid"])]:
            reply = server.call("POST", PATH, {**request, "gone": gone})
        if not isinstance(reply["stats"], list) or not isinstance(reply["since"], float):
            raise TypeError("no statistics")
    except (KeyError, TypeError, OverflowError) as e:
        raise _nonsense(e) from None
    found: dict[str, Any] = reply
    return found


def _is_alive(pid: int) -> bool:
    """Whether it is a process of this user."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _shown(plpy: Any, name: str, found: list[Any]) -> str:
    text = json.dumps(found, ensure_ascii=False)
    if _run(plpy, "encoding")[0]["name"] != "UTF8":
        # what another database has told may have characters that this one's encoding lacks
        text = text.encode("ascii", "replace").decode()
    try:
        rows: str = _run(plpy, name, text)[0]["rows"]
    except plpy.SPIError as e:
        if e.sqlstate.startswith("22"):
            raise _nonsense(e) from None
        raise
    return rows


def _nonsense(error: Exception) -> EngineFailed:
    return EngineFailed("unexpected reply from the model server", detail=f"No calls: {error!r}.")


def activity(plpy: Any, server: ModelServer) -> str:
    """The calls in flight, in every database that uses the same model server, as JSON text. Of the sessions of others:
    that there is a call, and no more."""
    return _shown(plpy, "activity", _ask(plpy, server)["activity"])


def stats(plpy: Any, server: ModelServer) -> str:
    """What was counted in this database, of the roles whose sessions the caller may look at, and since when, as JSON
    text."""
    reply = _ask(plpy, server)
    return json.dumps({"since": reply["since"], "rows": json.loads(_shown(plpy, "stats", reply["stats"]))})


def reset(plpy: Any, server: ModelServer) -> float:
    """Count anew from now on; the time, seconds since 1970."""
    since: float = _ask(plpy, server, reset=True)["since"]
    return since
