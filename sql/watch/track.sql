-- track: what a call tells of itself, for whoever watches (watch/watch.sql): begun, at which stage, how far, ended how.
--
-- A routine that is watched reads
--   DECLARE _call integer := ml_rag._begin('ml_generate');
--   BEGIN
--     PERFORM ml_rag._stage(_call, 'generate', _model);
--     …
--     PERFORM ml_rag._end(_call);
--   EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
--     PERFORM ml_rag._end(_call, SQLSTATE);
--   @RAISE@
--   END
-- It is told to the model server by backend/calls.py; protocol.py has the names of routines and stages.
--
-- Questions (ml_rag, ml_rag_search: ml_rag._begin_question) are over in a few milliseconds, and Python is entered with a
-- cold cache each time. So they enter it once, at their end, with the time of each stage; and before they ask a model, by
-- _stage with that model, from where on they are seen in ml_rag.activity. Every other _stage of theirs costs nothing.
--
-- _call is null where nothing is told (setting track is off). Every call pays for these functions, so they pin no
-- search_path, which would cost as much again: they name every schema and use no operator, or run no SQL at all. _stage,
-- _end and _begin_question are one expression each, which PostgreSQL puts in the place of the call.

CREATE FUNCTION ml_rag._begin_call(routine text, stage text, role text, statement float8) RETURNS integer
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT AS $$
# purpose: a call begins, where it is not off. role: current_user; what is said is checked (see backend/calls.py)
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None  # whoever needs the Python side says what is wrong with it
return GD["ml_rag"].calls.begin(plpy, routine, stage, role, statement)
$$;

CREATE FUNCTION ml_rag._enter_stage(call integer, stage text, model text, role text, statement float8) RETURNS boolean
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT AS $$
# purpose: _stage; null where PostgreSQL wants the statement to end
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return True
return GD["ml_rag"].calls.stage(plpy, call, stage, model, role, statement)
$$;

CREATE FUNCTION ml_rag._end_call(call integer, sqlstate text, role text, trace json, began float8) RETURNS boolean
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT AS $$
# purpose: _end; null where PostgreSQL wants the statement to end. trace: the steps of a question that ended well, and
# when that began; else [] and 0
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return True
return GD["ml_rag"].calls.end(plpy, call, sqlstate, role, trace, began)
$$;

CREATE FUNCTION ml_rag._statement_error(OUT sqlstate text, OUT message text)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
return GD["ml_rag"].calls.ending() if "ml_rag" in GD else (None, None)
$$;

CREATE FUNCTION ml_rag._end_statement() RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: raise the error by which PostgreSQL ends the statement, where that came while a call was told of: out of
-- Python it would have another message
DECLARE
  _error record := ml_rag._statement_error();
BEGIN
  IF _error.sqlstate IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _error.sqlstate, MESSAGE = _error.message;
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._begin(routine text, stage text DEFAULT '') RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE STRICT AS $$
-- purpose: a call of a routine begins, in a stage where one is named; returns what it is called from now on
-- Reads: ml_rag.setting_value
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
  RETURN coalesce(ml_rag._begin_call(routine, stage, current_user,
    pg_catalog.date_part('epoch', pg_catalog.statement_timestamp())), ml_rag._end_statement());
END
$$;

CREATE FUNCTION ml_rag._begin_question(routine text) RETURNS integer
LANGUAGE sql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a question begins, by ml_rag or ml_rag_search; nothing is told of it until it waits for a model or ends, so
-- its number says no more than which of the two it is, and is negative (backend/calls.py, QUESTIONS). The first of a session
-- is told at once, and is a call like others
SELECT CASE
  WHEN pg_catalog.current_setting('ml_rag.has_python', true) IS NULL THEN ml_rag._begin(routine, 'discover')
  WHEN pg_catalog.texteq(routine, 'ml_rag') THEN -1
  WHEN pg_catalog.texteq(routine, 'ml_rag_search') THEN -2 END
$$;

CREATE FUNCTION ml_rag._stage(call integer, stage text, model text DEFAULT '') RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the call enters a stage ('' = none), in which it waits for that model
SELECT CASE
  WHEN call IS NULL OR pg_catalog.int4lt(call, 0) AND pg_catalog.texteq(model, '') THEN NULL
  ELSE coalesce(ml_rag._enter_stage(call, stage, model, current_user,
    pg_catalog.date_part('epoch', pg_catalog.statement_timestamp())), ml_rag._end_statement() IS NULL) END
$$;

CREATE FUNCTION ml_rag._end(call integer, sqlstate text DEFAULT '00000') RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the call has ended, well or with this SQLSTATE
SELECT CASE
  WHEN call IS NULL THEN NULL
  ELSE coalesce(ml_rag._end_call(call, sqlstate, current_user, '[]', 0), ml_rag._end_statement() IS NULL) END
$$;

CREATE FUNCTION ml_rag._end(call integer, trace ml_rag.step[], began timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the question has ended well; it began then, and the trace says when each of its stages ended. The trace goes on
-- to the model server as it is: reading it in Python would take longer than all the rest
SELECT CASE
  WHEN call IS NULL THEN NULL
  ELSE coalesce(ml_rag._end_call(call, '00000', current_user, pg_catalog.array_to_json(trace),
    pg_catalog.date_part('epoch', began)), ml_rag._end_statement() IS NULL) END
$$;

CREATE FUNCTION ml_rag._progress(call integer, relation text, phase text, done bigint DEFAULT 0,
  total bigint DEFAULT -1, failed bigint DEFAULT 0) RETURNS void
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE AS $$
# purpose: how far a long call is, for the client and for ml_rag.progress; relation: schema.table, or ''; total -1: not known
if "ml_rag" in GD:
    GD["ml_rag"].calls.progress(plpy, call, relation or "", phase, done, total, failed)
$$;
