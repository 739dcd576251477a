-- compile: a question as one statement (backend/retrieval).

CREATE FUNCTION ml_rag._at_one_moment() RETURNS void
LANGUAGE plpython3u STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
# purpose: run what backend/rights.py holds ready, all of it at the moment of the caller's statement; by
# itself it does nothing
if "ml_rag" in GD:
    GD["ml_rag"].run_handed()
$$;

CREATE FUNCTION ml_rag._now() RETURNS void
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
# purpose: the same, each statement at a moment of its own
if "ml_rag" in GD:
    GD["ml_rag"].run_handed()
$$;

CREATE FUNCTION ml_rag._compile_question(
  query text, options text, query_embedding text, form text, call integer, session text[],
  OUT answer jsonb, OUT error jsonb
)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- plans are kept, and planning anew for the values of a call takes longer than all the rest
SET plan_cache_mode = force_generic_plan
SET jit = off
-- An approximate index is scanned until enough rows have passed the filters and row-level security.
SET hnsw.iterative_scan = 'relaxed_order'
SET ivfflat.iterative_scan = 'relaxed_order'
-- until the end of this function; where a call wants others, search.py sets them
SET hnsw.ef_search = 40
SET ivfflat.probes = 10
SET enable_seqscan = off
SET enable_sort = on
AS $$
# purpose: what a question finds, as form says; null if that is not all that the call is about. options: of
# ml_rag, but in the form hits ml_rag.request, and in the form shard what another server asks of a store. See
# backend/retrieval/run.py
@BACKEND@
return backend.compile_question(plpy, query, options, query_embedding, form, call, session, '@vector@')
$$;

CREATE FUNCTION ml_rag._session_settings() RETURNS text[]
LANGUAGE sql STABLE PARALLEL SAFE AS $$
-- purpose: what run.Session has of the caller's session, before a function pins it. One expression, for
-- PostgreSQL to put in the place of the call: it pins no search_path, and names every schema
SELECT ARRAY[current_user::pg_catalog.text, pg_catalog.current_setting('hnsw.ef_search', true),
  pg_catalog.current_setting('ivfflat.probes', true), pg_catalog.current_setting('enable_seqscan')]
$$;

CREATE FUNCTION ml_rag._compiled(query text, options jsonb, query_embedding text, form text,
  call integer) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: ml_rag._compile_question with what it takes from the session; the vector goes apart, as text. Null
-- where options are none or the question is too long: ml_rag._request says so
DECLARE
  _compiled record;
BEGIN
  IF query IS NULL OR octet_length(query) > 1000000
    OR options IS NOT NULL AND jsonb_typeof(options) <> 'object' THEN
    RETURN NULL;
  END IF;
  IF form NOT LIKE 'hits%' THEN
    options := ml_rag._layered(options);
  END IF;
  _compiled := ml_rag._compile_question(query, coalesce((options - 'query_embedding')::text, '{}'),
    coalesce(query_embedding, options ->> 'query_embedding'), form, call, ml_rag._session_settings());
  PERFORM ml_rag._raise(_compiled.error);
  RETURN _compiled.answer;
END
$$;

CREATE FUNCTION ml_rag.statement(query text, options jsonb DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
BEGIN
  -- says what is wrong with options or question
  PERFORM ml_rag._request(query, ml_rag._parse_rag_options(options));
  RETURN ml_rag._compiled(query, options, NULL, 'statement', NULL) #>> '{}';
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.statement(text, jsonb) IS
$$the SQL statement that retrieves for a call, with its values in it: SELECT ml_rag.statement('What is AutoML?')
Run by the same role it gives the rows of ml_rag_search; it can be changed, and given to EXPLAIN (ANALYZE,
BUFFERS). Lines before it say which settings it is run with, and what follows it. What a model does
(embedding) is done before and stands in it as a value; rows that were found before, such as those of a
narrow filter, by their places (ctid), which are those of other rows after VACUUM: run it soon. options: those
of ml_rag. Nothing of policies or of the definitions of views is in it. Errors: as ml_rag; 0A000 for a call
that one statement cannot answer, and why.$$;
