-- track: what a call reports of itself, for those who watch (watch/watch.sql): begun, at which stage, how
-- far, ended how.
--
-- A routine that is watched reads
--   DECLARE _call integer := ml_rag._begin('ml_generate');
--   BEGIN
--     PERFORM ml_rag._stage(_call, 'generate', _model);
--     …
--     PERFORM ml_rag._end(_call);
--   @CATCH_AND_END@
--   END
-- backend/calls.py reports it to the model server; protocol.py has the names of routines and stages.
--
-- _call is null where nothing is reported (setting track is off). Every call pays for these functions, so
-- they pin no search_path, which would cost as much again: they name every schema and use no operator. _stage
-- and _end are one expression each, which PostgreSQL puts in the place of the call.

CREATE FUNCTION ml_rag._report(event text, call integer,
  name text DEFAULT '', model text DEFAULT '', trace json DEFAULT '[]',
  began float8 DEFAULT 0, OUT number integer, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE STRICT AS $$
# purpose: begin (name: the routine, model: its stage), stage or end (name: SQLSTATE). error: PostgreSQL wants
# the statement to end
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, None  # those who need the Python side say what is wrong with it
return GD["ml_rag"].calls.report(plpy, event, call, name, model, trace, began)
$$;

CREATE FUNCTION ml_rag._begin(routine text, stage text DEFAULT '') RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE STRICT AS $$
-- purpose: a call of a routine begins, in a stage where one is named; its number
-- Reads: ml_rag.setting_value
DECLARE
  _begun record;
BEGIN
  IF pg_catalog.current_setting('ml_rag.has_python', true) IS NULL THEN
    -- Whether it is off is asked here only in a session without Python, so that it is not started in vain.
    -- The Python side asks now and then: to look into a table each time would cost more than all the rest.
    IF EXISTS (SELECT FROM ml_rag.setting_value AS v
               WHERE pg_catalog.texteq(v.name, 'track') AND pg_catalog.texteq(v.value, 'off')) THEN
      RETURN NULL;
    END IF;
    PERFORM pg_catalog.set_config('ml_rag.has_python', 'true', false);
  ELSIF pg_catalog.texteq(stage, 'discover') THEN
    -- A question is over in a few milliseconds, and Python is entered with a cold cache each time. So nothing
    -- is reported of it until it waits for a model (_stage with that model) or ends, with the times of its
    -- stages (calls.py, QUESTIONS).
    IF pg_catalog.texteq(routine, 'ml_rag') THEN
      RETURN -1;
    ELSIF pg_catalog.texteq(routine, 'ml_rag_search') THEN
      RETURN -2;
    END IF;
  END IF;
  _begun := ml_rag._report('begin', 0, routine, stage);
  PERFORM ml_rag._raise(_begun.error);
  RETURN _begun.number;
END
$$;

CREATE FUNCTION ml_rag._stage(call integer, stage text, model text DEFAULT '') RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the call enters a stage ('' = none), in which it waits for that model
SELECT CASE WHEN call IS NULL OR pg_catalog.int4lt(call, 0) AND pg_catalog.texteq(model, '') THEN NULL
  ELSE ml_rag._raise((ml_rag._report('stage', call, stage, model)).error) IS NULL END
$$;

CREATE FUNCTION ml_rag._end(call integer, sqlstate text DEFAULT '00000', trace ml_rag.step[] DEFAULT '{}',
  began timestamptz DEFAULT 'epoch') RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the call has ended, well or with this SQLSTATE; of a question that ended well: when it and each of
-- its stages did
SELECT CASE WHEN call IS NULL THEN NULL ELSE ml_rag._raise((ml_rag._report('end', call, sqlstate, '',
  pg_catalog.array_to_json(trace), pg_catalog.date_part('epoch', began))).error) IS NULL END
$$;

CREATE FUNCTION ml_rag._progress(call integer, relation text, phase text, done bigint DEFAULT 0,
  total bigint DEFAULT -1, failed bigint DEFAULT 0) RETURNS void
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE AS $$
# purpose: how far a long call is, for the client and for ml_rag.progress; relation: schema.table, or '';
# total -1: not known
if "ml_rag" in GD:
    GD["ml_rag"].calls.progress(plpy, call, relation or "", phase, done, total, failed)
$$;
