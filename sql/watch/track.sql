-- track: what is going on, for whoever watches (watch/watch.sql): a call begins, enters a stage, gets on, ends.
--
-- A routine that is watched reads
--   DECLARE _call integer := ml_rag._begin('ml_rag');
--   BEGIN
--     PERFORM ml_rag._stage(_call, 'search');
--     …
--     PERFORM ml_rag._end(_call);
--   EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
--     PERFORM ml_rag._end(_call, SQLSTATE);
--     RAISE;
--   END
-- A routine or stage of its own is added at the end of its list in backend/records.py.
-- _call is null where nobody is told (setting track is off, or the file cannot be used); all but _begin are strict, so
-- that they then cost nothing. Every call pays for these, so they pin no search_path, which would cost as much again:
-- they name every schema and use no operator, or run no SQL at all. _stage and _end return null: where it counts, a
-- variable is set to that, which costs a third of a PERFORM.

CREATE FUNCTION ml_rag._begin_call(routine text, stage text, role text, statement float8) RETURNS integer
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT
AS $$
# purpose: _begin, where it is not off. role: current_user; what is said is checked (see track.py)
# Calls: ml_rag._import_backend
if "ml_rag_track" not in GD or GD["ml_rag_track"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._import_backend('track') AS error")[0]["error"]:
        return None  # whoever needs the Python side says what is wrong with it
return GD["ml_rag_track"].begin(plpy, routine, stage, role, statement)
$$;

CREATE FUNCTION ml_rag._begin_error(OUT sqlstate text, OUT message text)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
AS $$
return GD["ml_rag_track"].ending()
$$;

CREATE FUNCTION ml_rag._begin(routine text, stage text DEFAULT '') RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
-- purpose: a call of a routine begins, in a stage where one is named; returns what it is called from now on
-- Calls: ml_rag._begin_call, ml_rag._begin_error  Reads: ml_rag.setting_value
DECLARE
  _call pg_catalog.int4;
  _error pg_catalog.record;
BEGIN
  -- Whether it is off is asked here only in a session that has no Python yet, so that it is not started in vain. The
  -- Python side asks as well, now and then: to look into a table each time would cost more than all the rest.
  IF pg_catalog.current_setting('ml_rag.has_python', true) IS NULL THEN
    IF EXISTS (SELECT FROM ml_rag.setting_value AS v
               WHERE pg_catalog.texteq(v.name, 'track') AND pg_catalog.texteq(v.value, 'off')) THEN
      RETURN NULL;
    END IF;
    PERFORM pg_catalog.set_config('ml_rag.has_python', 'true', false);
  END IF;
  _call := ml_rag._begin_call(routine, stage, current_user,
    pg_catalog.date_part('epoch', pg_catalog.statement_timestamp()));
  IF pg_catalog.int4lt(_call, 0) THEN
    _error := ml_rag._begin_error();
    RAISE EXCEPTION USING ERRCODE = _error.sqlstate, MESSAGE = _error.message;
  END IF;
  RETURN _call;
END
$$;

CREATE FUNCTION ml_rag._stage(call integer, stage text, model text DEFAULT '') RETURNS boolean
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT
AS $$
# purpose: the call enters a stage ('' = none), in which it waits for that model
if "ml_rag_track" in GD:
    GD["ml_rag_track"].stage(call, stage, model)
$$;

CREATE FUNCTION ml_rag._end(call integer, sqlstate text DEFAULT '00000') RETURNS boolean
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT
AS $$
# purpose: the call has ended, well or with this SQLSTATE
if "ml_rag_track" in GD:
    GD["ml_rag_track"].end(call, sqlstate)
$$;

CREATE FUNCTION ml_rag._progress(call integer, relation text, phase text, done bigint DEFAULT 0,
  total bigint DEFAULT -1, failed bigint DEFAULT 0) RETURNS void
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT
AS $$
# purpose: how far a long call is, for ml_rag.progress; relation: schema.table, or ''; total -1: not known
if "ml_rag_track" in GD:
    GD["ml_rag_track"].progress(call, relation, phase, done, total, failed)
$$;

CREATE FUNCTION ml_rag._advance(call integer) RETURNS void
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT
AS $$
# purpose: one more is done, for a statement that goes through many rows
if "ml_rag_track" in GD:
    GD["ml_rag_track"].advance(call)
$$;
