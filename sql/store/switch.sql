-- switch: the moment in which a re-embedding's new column takes the old one's place, and the routines that lead there.

CREATE FUNCTION ml_rag._reembed_hindrance(job jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET enable_seqscan = off
AS $$
-- purpose: what keeps a store from switching, nobody being able to write to it: {"state": index (one is missing) | behind
-- (rows without a new embedding) | failed, "failed", "first_error"}; null = nothing
-- Calls: ml_rag._check_embedding_column, ml_rag._reembedding, ml_rag._missing_indexes, ml_rag._reembed_pending
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _found record;
  _blank bigint;
BEGIN
  PERFORM ml_rag._check_embedding_column(_store, job ->> 'embedding');
  _found := ml_rag._reembedding(_store);
  IF _found.overtaken_by IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('a trigger was made while "%s" was re-embedded that runs after ours', _store),
      DETAIL = format('Nobody knows which texts trigger "%s" has changed since they were embedded.', _found.overtaken_by),
      HINT = 'CALL it again: it starts from the beginning, with a trigger that runs after that one.';
  ELSIF NOT coalesce(_found.follows, false) THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('a trigger was dropped or switched off while "%s" was re-embedded', _store),
      DETAIL = 'Without it nobody knows which texts have changed since they were embedded.',
      HINT = 'CALL it again: it starts from the beginning.';
  ELSIF EXISTS (SELECT FROM ml_rag._missing_indexes(job)) THEN
    RETURN '{"state": "index"}';
  END IF;
  _found := ml_rag._reembed_pending(job, 1);
  IF cardinality(_found.places) > 0 THEN
    RETURN '{"state": "behind"}';
  ELSIF (job -> 'not_null')::boolean THEN
    EXECUTE format('SELECT count(*) FROM %s AS t WHERE t.%I IS NULL', _relation, job ->> 'next') INTO _blank;
    IF _blank > 0 THEN
      RETURN jsonb_build_object('state', 'failed', 'failed', _blank,
        'first_error', format('rows without text in a column that takes no null; '
          'delete them, or ALTER TABLE %s ALTER COLUMN %I DROP NOT NULL', _relation, job ->> 'embedding'));
    END IF;
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._reembed_settle(job jsonb, attempt integer) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: embed what has come in since, with writers held up and readers not, and switch where nobody uses the table;
-- returns what came of it: {"state": switched | busy (there are readers: nothing is left but to switch) | locked (there are
-- writers) | behind (too many rows) | index | failed, "written", "failed", "first_error"}. Whoever calls holds the lock of
-- the store's model.
-- The stronger lock is never waited for here: a reader that goes on to write waits for the lock this one holds, so that it
-- would be a deadlock, and PostgreSQL would end the reader.
-- Calls: ml_rag._limit_lock, ml_rag._reembed_pending, ml_rag._reembed_rows, ml_rag._reembed_hindrance,
-- ml_rag._replace_column
DECLARE
  _most CONSTANT integer := 16;
  _tries CONSTANT integer := 20;
  _relation text := ml_rag._relation_name((job ->> 'store')::oid);
  _pending record;
  _done record;
  _written bigint := 0;
  _hindrance jsonb;
  _is_free boolean;
BEGIN
  PERFORM ml_rag._check_embedding_column((job ->> 'store')::oid::regclass, job ->> 'embedding');
  PERFORM ml_rag._limit_lock(job, attempt);
  EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', _relation);
  _pending := ml_rag._reembed_pending(job, _most + 1);
  IF cardinality(_pending.places) > _most THEN
    RETURN '{"state": "behind"}';
  ELSIF cardinality(_pending.places) > 0 THEN
    _done := ml_rag._reembed_rows(job, _pending.places, _pending.texts);
    _written := _done.written;
    IF _done.failed > 0 THEN
      RETURN jsonb_build_object('state', 'failed', 'written', _written, 'failed', _done.failed,
        'first_error', _done.first_error);
    END IF;
    -- of rows that were refused more than one attempt knows what to say: they are still pending
  END IF;
  FOR _try IN 1.._tries LOOP
    BEGIN
      EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE NOWAIT', _relation);
      _is_free := true;
    EXCEPTION WHEN lock_not_available THEN
      _is_free := false;
    END;
    EXIT WHEN _is_free;
    PERFORM pg_sleep(0.01) WHERE _try < _tries;
  END LOOP;
  -- under the stronger lock where it was to be had: a view, for one, can be made while there are readers
  _hindrance := ml_rag._reembed_hindrance(job);
  IF _hindrance IS NOT NULL THEN
    RETURN _hindrance || jsonb_build_object('written', _written);
  ELSIF _is_free THEN
    PERFORM ml_rag._replace_column(job);
  END IF;
  RETURN jsonb_build_object('state', CASE WHEN _is_free THEN 'switched' ELSE 'busy' END, 'written', _written);
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN '{"state": "locked"}';
END
$$;

CREATE FUNCTION ml_rag._reembed_switch(job jsonb, attempt integer) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: the same where there are always readers: wait for them, and switch where nothing has come in meanwhile
-- One lock, of the strongest kind, and nothing before it: who waits for two can be in a deadlock.
-- Calls: ml_rag._limit_lock, ml_rag._reembed_hindrance, ml_rag._replace_column
DECLARE
  _hindrance jsonb;
BEGIN
  PERFORM ml_rag._limit_lock(job, attempt);
  EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', ml_rag._relation_name((job ->> 'store')::oid));
  _hindrance := ml_rag._reembed_hindrance(job);
  IF _hindrance IS NULL THEN
    PERFORM ml_rag._replace_column(job);
  END IF;
  RETURN coalesce(_hindrance, '{"state": "switched"}');
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN '{"state": "locked"}';
END
$$;

CREATE FUNCTION ml_rag._reembed_finish(job jsonb, step integer, attempt integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: after the switch, step by step, each a transaction: check the rows there are, make the column NOT NULL as
-- the old one was, gather statistics; false where others use the table: try again
-- Calls: ml_rag._limit_lock  Writes: the table's definition
DECLARE
  _relation text := ml_rag._relation_name((job ->> 'store')::oid);
  _is_checked boolean := EXISTS (SELECT FROM pg_constraint AS k
    WHERE k.conrelid = (job ->> 'store')::oid AND k.conname = 'ml_rag_reembed_not_null');
BEGIN
  PERFORM ml_rag._limit_lock(job, attempt);
  IF step = 1 AND _is_checked THEN
    EXECUTE format('ALTER TABLE %s VALIDATE CONSTRAINT ml_rag_reembed_not_null', _relation);
  ELSIF step = 2 AND _is_checked THEN
    -- reads no row, as the constraint says it
    EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL', _relation, job ->> 'embedding');
    EXECUTE format('ALTER TABLE %s DROP CONSTRAINT ml_rag_reembed_not_null', _relation);
  ELSIF step = 3 THEN
    EXECUTE format('ANALYZE %s', _relation);
  END IF;
  RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN false;
END
$$;

CREATE PROCEDURE ml_rag._run_reembed(job jsonb, INOUT outcome jsonb DEFAULT NULL, INOUT error jsonb DEFAULT NULL)
LANGUAGE plpython3u
AS $$
# purpose: fill, build, switch; commits after each step. In Python, so that no error can leave a session's lock behind.
# A procedure that commits can have no SET clause.
@BACKEND@
return backend.reembed(plpy, job)
$$;

CREATE FUNCTION ml_rag._end_reembed(job jsonb, outcome jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the result, and what the caller has to know  Calls: ml_rag._get_setting, ml_rag._full_name
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _default text := ml_rag._get_setting('embed_model_id');
BEGIN
  IF (outcome -> 'failed')::bigint > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s rows have no new embedding, so "%s" goes on with its old ones', outcome ->> 'failed', _store),
      DETAIL = format('First error: %s', outcome ->> 'first_error'),
      HINT = 'What was done is kept: call again when the rows, or the model, are mended.';
  ELSIF (outcome -> 'switched')::boolean AND job ->> 'model' <> _default THEN
    RAISE NOTICE USING MESSAGE = format('calls that name neither model nor store do not search "%s" now', _store),
      DETAIL = format('Its vectors are of %s, the default embedding model is %s.', job ->> 'model', _default),
      HINT = format('When all stores have changed: SELECT ml_rag.configure(''embed_model_id'', %L);', job ->> 'model');
  END IF;
  RETURN jsonb_build_object('vector_store', ml_rag._full_name(_store), 'embed_model_id', job -> 'model',
    'former_embed_model_id', job -> 'former') || outcome;
END
$$;

CREATE PROCEDURE ml_rag.reembed(store regclass, model_id text, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: another model for a store that stays in use
-- Calls: ml_rag._begin, ml_rag._end, ml_rag._commit, ml_rag._begin_reembed, ml_rag._run_reembed, ml_rag._raise, ml_rag._end_reembed
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used.
DECLARE
  _job pg_catalog.jsonb;
  _outcome pg_catalog.jsonb;
  _error pg_catalog.jsonb;
  _committed pg_catalog.bool;
  _call pg_catalog.int4;
BEGIN
  CALL ml_rag._commit(_committed);
  IF NOT _committed THEN
    RAISE EXCEPTION USING ERRCODE = '25001', MESSAGE = 'ml_rag.reembed cannot run inside a transaction block',
      DETAIL = 'Its first step locks the table until the end of the transaction.',
      HINT = 'CALL it by itself, with autocommit on.';
  END IF;
  _call := ml_rag._begin('ml_rag.reembed');
  BEGIN
    _job := ml_rag._begin_reembed(store, model_id, options, _call);
  EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
    PERFORM ml_rag._end(_call, SQLSTATE);
    RAISE;
  END;
  CALL ml_rag._run_reembed(_job, _outcome, _error);
  IF _error IS NOT NULL THEN
    PERFORM ml_rag._end(_call, pg_catalog.jsonb_extract_path_text(_error, 'sqlstate'));
    PERFORM ml_rag._raise(_error);
  END IF;
  result := ml_rag._end_reembed(_job, _outcome);
  PERFORM ml_rag._end(_call);
END
$$;
COMMENT ON PROCEDURE ml_rag.reembed(regclass, text, jsonb, jsonb) IS
$$changes the embedding model of a vector store that stays in use: CALL ml_rag.reembed('handbook', 'all_minilm_l6_v2')
A new column is filled beside the old one, in batches with a commit after each; rows that come in or change meanwhile are
embedded too. Searches and loads use the old vectors until the switch: one short transaction that puts the new column
in the old one's place, with its name, marker, indexes and privileges. A call that was cancelled or broke off goes on where
it was when called again; ml_rag.abandon_reembed gives up. docs/reembed.md has the rest. For the owner of an ordinary
table; not inside a transaction block.
options: SELECT * FROM ml_rag.option WHERE routine = 'reembed'.
result: {"vector_store", "embed_model_id", "former_embed_model_id", "segments" embedded by this call, "failed",
"first_error", "switched", "seconds"}. Rows that fail keep the store from switching.
Errors: 22023 bad option, model or table that is no vector store; 25001; 25006 read-only; 2BP01 objects that depend on
the column; 42P01; 42501; 42701; 55000 partitioned, no table, generated columns, hidden rows, begun with another
model, another isolation level than READ COMMITTED, its trigger switched off or another after it; 55006 another session is at it;
55P03 lock_timeout: what was done is kept; 08006; 53300; 57014; 38000.$$;
