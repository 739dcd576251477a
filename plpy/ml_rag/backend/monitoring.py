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
SELECT coalesce(json_agg(jsonb_build_object('pid', a.pid, 'datname', a.datname, 'usename', a.usename)
    || CASE WHEN is_open THEN c.call || jsonb_build_object('role', r.rolname) ELSE '{}' END ORDER BY a.pid),
    '[]')::text AS rows
FROM jsonb_array_elements($1) AS c (call)
  CROSS JOIN jsonb_to_record(c.call) AS of (pid integer, database oid, role oid, statement float8, started float8,
    stage_started float8, done bigint, total bigint, failed bigint, progress_started float8)
  JOIN pg_stat_activity AS a ON a.pid = of.pid AND a.datid = of.database
  LEFT JOIN pg_roles AS r ON r.oid = of.role
  CROSS JOIN LATERAL (SELECT a.pid = pg_backend_pid() AS is_own) AS own
  CROSS JOIN LATERAL (SELECT is_own OR coalesce(pg_has_role(a.usesysid, 'USAGE'), false)
      OR coalesce(pg_has_role(r.oid, 'USAGE'), false) OR pg_has_role('pg_read_all_stats', 'USAGE') AS is_open) AS open
WHERE NOT is_open OR is_own AND of.statement = date_part('epoch', statement_timestamp())
  OR NOT is_own AND coalesce(of.statement = date_part('epoch', a.query_start), true)
    AND coalesce(a.state IN ('active', 'fastpath function call', 'disabled'), true)
""",
            "jsonb",
        ),
        # role null: one that is gone, or all that were too many to count each
        "stats": (
            """
SELECT coalesce(json_agg(to_jsonb(s) || jsonb_build_object('role', r.rolname) ORDER BY s.routine, s.stage, r.rolname),
    '[]')::text AS rows
FROM jsonb_array_elements($1) AS c (counted)
  CROSS JOIN jsonb_populate_record(NULL::ml_rag.stats, c.counted - 'role') AS s
  LEFT JOIN pg_roles AS r ON r.oid = (c.counted ->> 'role')::oid
WHERE coalesce(pg_has_role(r.oid, 'USAGE'), false) OR pg_has_role('pg_read_all_stats', 'USAGE')
""",
            "jsonb",
        ),
        "encoding": ("SELECT getdatabaseencoding() AS name",),
    }
)


def _ask(plpy: Any, server: ModelServer, **fields: Any) -> dict[str, Any]:
    """The reply of the model server. The request names the backends that have ended."""
    cluster, database = calls.origin(plpy)
    request = {"cluster": cluster, "database": database, **fields}
    calls.send_waiting()
    reply = server.call("POST", PATH, request)
    if calls.send_waiting():
        # the server has read what was in their way; these must be in the answer, too
        reply = server.call("POST", PATH, request)
    try:
        if gone := [[c["pid"], c["session"]] for c in reply["activity"] if not _is_alive(c["pid"])]:
            reply = server.call("POST", PATH, {**request, "gone": gone})
        found: dict[str, Any] = {
            **reply,
            "since": float(reply["since"]),
            "stats": [dict(row) for row in reply["stats"]],
        }
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise _nonsense(e) from None
    return found


def _is_alive(pid: int) -> bool:
    """Whether it is a process of this user."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def shown(plpy: Any, server: ModelServer, what: str) -> str:
    """As JSON text {"since", "rows"}: the calls in flight in every database that uses the same model server, of the
    sessions of others no more than that there is one (activity), or what was counted in this database, of the roles
    whose sessions the caller may look at (stats)."""
    reply = _ask(plpy, server)
    # what another database has reported may have characters that this one's encoding lacks
    is_utf8 = _run(plpy, "encoding")[0]["name"] == "UTF8"
    text = json.dumps(reply[what], ensure_ascii=False).encode("utf-8" if is_utf8 else "ascii", "replace").decode()
    try:
        rows = _run(plpy, what, text)[0]["rows"]
    except plpy.SPIError as e:
        if e.sqlstate.startswith("22"):
            raise _nonsense(e) from None
        raise
    return f'{{"since": {reply["since"]!r}, "rows": {rows}}}'


def _nonsense(error: Exception) -> EngineFailed:
    return EngineFailed("unexpected reply from the model server", detail=f"No calls: {error!r}.")


def reset(plpy: Any, server: ModelServer) -> float:
    """Count anew from now on; the time, seconds since 1970."""
    since: float = _ask(plpy, server, reset=True)["since"]
    return since
