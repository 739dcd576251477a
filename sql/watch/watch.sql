-- watch: what calls have reported to the model server (watch/track): those in flight, how far the long ones
-- are, what was done. As in pg_stat_activity, a role sees its own roles' calls, and members of
-- pg_read_all_stats (which pg_monitor is) see all.

CREATE FUNCTION ml_rag._read_calls(what text, OUT found json, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT
-- which would show the calls of others, before it is known which of them the caller may see
SET debug_print_plan = off
AS $$
# purpose: activity or stats, of others no more than that there is something  Reads: pg_stat_activity, as the
# caller
@BACKEND@
return backend.shown_calls(plpy, what)
$$;

CREATE FUNCTION ml_rag._reset_stats(OUT since float8, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
@BACKEND@
return backend.reset_stats(plpy)
$$;

CREATE FUNCTION ml_rag._watch(what text, shown text) RETURNS TABLE (since timestamptz, found json)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 100 SET search_path FROM CURRENT AS $$
-- purpose: activity or stats; nothing with a warning where the model server or the Python side is not to be
-- had: a view that is joined with others must not end their query
DECLARE
  _read record := ml_rag._read_calls(what);
BEGIN
  IF _read.error ->> 'sqlstate' IN ('08006', '22023', '38000', '53100', '53300', '55000') THEN
    RAISE WARNING USING MESSAGE = format('%s cannot be shown', shown),
      DETAIL = concat_ws(': ', _read.error ->> 'message', _read.error ->> 'detail'),
      HINT = coalesce(_read.error ->> 'hint', 'See the log of the model server.');
  ELSE
    PERFORM ml_rag._raise(_read.error);
  END IF;
  RETURN QUERY SELECT to_timestamp((_read.found ->> 'since')::float8), e.value
    FROM json_array_elements(_read.found -> 'rows') AS e;
END
$$;

CREATE VIEW ml_rag.activity AS
SELECT a.pid, a.datname, a.usename, a.role, a.routine, nullif(a.stage, '') AS stage,
  nullif(a.model, '') AS model,
  to_timestamp(a.started) AS started, n.now - to_timestamp(a.started) AS age,
  CASE WHEN a.stage <> '' THEN n.now - to_timestamp(a.stage_started) END AS stage_age
FROM ml_rag._watch('activity', 'calls in flight') AS w CROSS JOIN LATERAL json_to_record(w.found) AS a (
  pid integer, datname name, usename name, role name, routine text, stage text, model text, started float8,
    stage_started float8)
CROSS JOIN LATERAL (SELECT clock_timestamp() AS now) AS n;
COMMENT ON VIEW ml_rag.activity IS
$$calls of ml_rag's routines in flight, in all databases that use the same model server
usename: role of the session. role: current_user of the call. routine: the one the client called. stage: what
it, or a routine that it called, is at. model: what the stage waits for. stage_age: time in that stage. Shown
in full are one's own calls and those of roles (usename or role) that one is a member of, all to members of
pg_read_all_stats; of others pid, datname and usename only. pid leads to pg_stat_activity;
pg_cancel_backend(pid) ends the call. Empty, with a warning, where the model server cannot be reached.$$;

CREATE VIEW ml_rag.progress AS
SELECT a.pid, a.datname, a.usename, a.role, a.command, nullif(a.relation, '') AS relation,
  nullif(a.phase, '') AS phase, a.done,
  nullif(a.total, -1) AS total, a.failed, to_timestamp(a.progress_started) AS started
FROM ml_rag._watch('activity', 'calls in flight') AS w CROSS JOIN LATERAL json_to_record(w.found) AS a (
  pid integer, datname name, usename name, role name, command text, relation text, phase text, done bigint,
  total bigint, failed bigint,
  progress_started float8)
WHERE a.command IS NOT NULL;
COMMENT ON VIEW ml_rag.progress IS
$$how far the long routines in flight are, in all databases that use the same model server
command: the routine. relation: the table it fills or reads. done, total, failed: documents of
vector_store_load and load_documents, rows of ml_…_table, questions of ml_rag_evaluate, segments of
enable_keyword_search and add_embedding, rows of run_vectorizer; done includes failed, total is null where it
is not known. Shown to whom ml_rag.activity shows the call in full.$$;

CREATE VIEW ml_rag.stats AS
SELECT s.role, s.routine, s.stage, s.calls, s.errors, s.errors_by_sqlstate, s.total_ms, s.mean_ms, s.max_ms,
  round(s.p50_ms::numeric, 3)::float8 AS p50_ms, round(s.p95_ms::numeric, 3)::float8 AS p95_ms,
  round(s.p99_ms::numeric, 3)::float8 AS p99_ms, s.prompt_tokens, s.generated_tokens, w.since
FROM ml_rag._watch('stats', 'statistics') AS w CROSS JOIN LATERAL json_to_record(w.found) AS s (
  role name, routine text, stage text, calls bigint, errors bigint, errors_by_sqlstate jsonb,
  total_ms float8, mean_ms float8,
  max_ms float8, p50_ms float8, p95_ms float8, p99_ms float8, prompt_tokens bigint, generated_tokens bigint);
COMMENT ON VIEW ml_rag.stats IS
$$calls, errors and times of this database by role, routine and stage, since the model server started or was last reset
role: current_user of the call; null: roles that are gone, or of which there were too many to count each.
stage: total = the whole call; the others are parts of it. calls: those that have ended, errors among them.
errors_by_sqlstate (of total): {"57014": 2, "42xxx": 1, …}, some SQLSTATEs by themselves, others by class;
terminated = the backend ended first. The times are those of the calls without an error, in ms; p50, p95, p99
are exact to a factor of sqrt(2). A routine that calls another counts for both. Only roles that the caller is
a member of are shown, all of them to members of pg_read_all_stats. What was counted outlives sessions,
restarts and crashes of PostgreSQL, and ends with the model server. Empty, with a warning, where that cannot
be reached.$$;

CREATE FUNCTION ml_rag.reset_stats() RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
DECLARE
  _reset record;
BEGIN
  _reset := ml_rag._reset_stats();
  PERFORM ml_rag._raise(_reset.error);
  RETURN to_timestamp(_reset.since);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.reset_stats() IS
$$empties ml_rag.stats of this database, for all roles; returns the time from which it counts anew
For the owner of the extension, and whom it grants EXECUTE. Errors: 42501; 08006 the model server cannot be
reached.$$;
