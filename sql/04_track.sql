-- 04_track: what is going on, for whoever watches (05_watch.sql): a call begins, enters a stage, gets on, ends.
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
-- _call is null where nobody is told (setting track is off, or the file cannot be used); all but _begin are strict, so
-- that they then cost nothing. They pin no search_path, which would cost more than they do: they run no SQL.

CREATE FUNCTION ml_rag._begin_call(routine text, OUT call integer, OUT sqlstate text, OUT message text)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
# Calls: ml_rag._import_backend
if "ml_rag_track" not in GD or GD["ml_rag_track"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._import_backend('track') AS error")[0]["error"]:
        return None, None, None  # whoever needs the Python side says what is wrong with it
return GD["ml_rag_track"].begin(plpy, routine)
$$;

CREATE FUNCTION ml_rag._begin(routine text) RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a call of a routine begins; returns what it is called from now on
-- Calls: ml_rag._begin_call  Reads: ml_rag.setting_value
DECLARE
  _begun record;
BEGIN
  -- asked here: where it is off, no session that needs no model has to start Python
  IF EXISTS (SELECT FROM ml_rag.setting_value AS v WHERE v.name = 'track' AND v.value = 'off') THEN
    RETURN NULL;
  END IF;
  _begun := ml_rag._begin_call(routine);
  IF _begun.sqlstate IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _begun.sqlstate, MESSAGE = _begun.message;
  END IF;
  RETURN _begun.call;
END
$$;

CREATE FUNCTION ml_rag._stage(call integer, stage text, model text DEFAULT '') RETURNS void
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT
AS $$
# purpose: the call enters a stage ('' = none), in which it waits for that model
if "ml_rag_track" in GD:
    GD["ml_rag_track"].stage(call, stage, model)
$$;

CREATE FUNCTION ml_rag._end(call integer, sqlstate text DEFAULT '00000') RETURNS void
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
