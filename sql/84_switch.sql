-- 84_switch: what a re-embedding changes of the table itself: the new column, its indexes, and the moment in which it
-- takes the old one's place. Each step waits for the table's lock a little and then lets the others through.

CREATE FUNCTION ml_rag._limit_lock(job jsonb, attempt integer) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how long the calling function, which has a SET lock_timeout of its own, waits for a lock: others wait behind
-- it, so that it is little at first, and never more than the option says
BEGIN
  PERFORM set_config('lock_timeout', format('%sms',
    round(1000 * least((job ->> 'lock_seconds')::numeric, 0.5 * 2 ^ least(attempt, 20)))), true);
END
$$;

CREATE FUNCTION ml_rag._begin_column(job jsonb, attempt integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: make column and trigger, unless a call that was stopped has; false where others use the table: try again
-- Calls: ml_rag._limit_lock, ml_rag.abandon_reembed  Writes: column, comment and trigger of the store, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _next name := job ->> 'next';
  _trigger name;
BEGIN
  IF (job -> 'begun')::boolean THEN
    RETURN true;
  END IF;
  PERFORM ml_rag._limit_lock(job, attempt);
  PERFORM ml_rag.abandon_reembed(_store);
  EXECUTE format('ALTER TABLE %s ADD COLUMN %I %s', _relation, _next, job ->> 'type');
  EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET STORAGE %s', _relation, _next, (
    SELECT CASE a.attstorage WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'm' THEN 'MAIN' ELSE 'EXTENDED' END
    FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = job ->> 'embedding' AND NOT a.attisdropped));
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, _next, concat('ml_rag.reembed MODEL=', job ->> 'model'));
  -- its name is the last one, so that it sees what other triggers have made of the row
  _trigger := concat('zz_ml_rag_reembed_', (
    SELECT a.attnum FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = _next AND NOT a.attisdropped));
  EXECUTE format('CREATE TRIGGER %I BEFORE UPDATE ON %s FOR EACH ROW '
    'WHEN (OLD.%I::text COLLATE "C" IS DISTINCT FROM NEW.%3$I::text COLLATE "C") '
    'EXECUTE FUNCTION ml_rag._outdate_embedding(%4$L)', _trigger, _relation, job ->> 'segment', _next);
  -- also for what a logical replication applies
  EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', _relation, _trigger);
  RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN false;
END
$$;

CREATE FUNCTION ml_rag._missing_indexes(job jsonb) RETURNS TABLE (name name, definition text)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: indexes of the old column that the new one lacks and can have  Calls: ml_rag._kept_indexes
DECLARE
  _store regclass := (job ->> 'store')::oid;
  -- pgvector's limits of hnsw and ivfflat
  _can_have boolean := (job ->> 'dimensions')::integer <= CASE WHEN job ->> 'type' ~ 'halfvec' THEN 4000 ELSE 2000 END;
BEGIN
  RETURN QUERY
    SELECT k.name, k.definition FROM ml_rag._kept_indexes(_store, job ->> 'embedding') AS k
    WHERE _can_have AND (k.definition, k.copy) NOT IN (
      SELECT n.definition, n.copy FROM ml_rag._kept_indexes(_store, job ->> 'next') AS n);
END
$$;

CREATE FUNCTION ml_rag._reembed_index(job jsonb, attempt integer) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
AS $$
-- purpose: build one index that is missing: first that of the rows to be embedded, then what the old column has; returns
-- built, locked (others write to the table: try again) or null, none is missing
-- Nobody can write to the table meanwhile. An index that was built by hand, concurrently, is not missing.
-- Calls: ml_rag._limit_lock, ml_rag._missing_indexes  Writes: an index, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _definition text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
                 WHERE x.indrelid = _store AND x.indisvalid AND i.relname = job ->> 'pending') THEN
    _definition := format('%I ON %s ((1)) WHERE %%1$I IS NULL', job ->> 'pending', replace(_relation, '%', '%%'));
  ELSE
    _definition := (SELECT m.definition FROM ml_rag._missing_indexes(job) AS m LIMIT 1);
  END IF;
  IF _definition IS NOT NULL THEN
    PERFORM ml_rag._limit_lock(job, attempt);
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE MODE', _relation);
    EXECUTE format('CREATE INDEX ' || _definition, job ->> 'next');
    RETURN 'built';
  END IF;
  RETURN NULL;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
  RETURN 'locked';
END
$$;

CREATE FUNCTION ml_rag._replace_column(job jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the new column becomes the store's: name, marker, indexes' names, privileges; takes no time but the lock's
-- Calls: ml_rag._kept_indexes  Writes: the table's definition, as the caller
DECLARE
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _old name := job ->> 'embedding';
  _next name := job ->> 'next';
  _column record;
  _indexes jsonb;
  _privileges jsonb;
  _comment text;
  _row record;
BEGIN
  SELECT a.attnum, a.attnotnull, nullif(a.attstattarget, -1) AS attstattarget, a.attacl INTO _column
  FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = _old AND NOT a.attisdropped;
  SELECT jsonb_agg(jsonb_build_object('new', n.name, 'old', k.name)) INTO _indexes
  FROM ml_rag._kept_indexes(_store, _old) AS k
  JOIN ml_rag._kept_indexes(_store, _next) AS n ON n.definition = k.definition AND n.copy = k.copy;
  SELECT jsonb_agg(jsonb_build_object('privilege', g.privilege_type, 'grantable', g.is_grantable,
    'role', CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END)) INTO _privileges
  FROM aclexplode(_column.attacl) AS g;
  -- the new model, and the one that the rows were loaded with: loads must know it, or all documents would count as changed
  _comment := regexp_replace(regexp_replace(col_description(_store, _column.attnum),
      '[,;]REEMBEDDED_FROM=' || regexp_replace(job ->> 'model', '\W', '\\\&', 'g') || '(?=[,; \t\n\r\f\v]|$)', ''),
    '(GENAI_OPTIONS=[^ \t\n\r\f\v]*?EMBED_MODEL_ID=)([^,; \t\n\r\f\v]+)(?=[,; \t\n\r\f\v]|$)',
    concat('\1', replace(job ->> 'model', '\', '\\'), ',REEMBEDDED_FROM=\2'));

  EXECUTE format('DROP TRIGGER %I ON %s', concat('zz_ml_rag_reembed_', (
    SELECT a.attnum FROM pg_attribute AS a WHERE a.attrelid = _store AND a.attname = _next AND NOT a.attisdropped)),
    _relation);
  -- more than one where the table comes out of a dump: there it had another number
  EXECUTE (SELECT format('DROP INDEX %s', string_agg(format('%I.%I', n.nspname, i.relname), ', '))
           FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
           JOIN pg_namespace AS n ON n.oid = i.relnamespace
           WHERE x.indrelid = _store AND i.relname ~ '^ml_rag_reembed_\d+$');
  EXECUTE format('ALTER TABLE %s DROP COLUMN %I', _relation, _old);
  EXECUTE format('ALTER TABLE %s RENAME COLUMN %I TO %I', _relation, _next, _old);
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, _old, _comment);
  IF _column.attnotnull THEN
    -- enforced from now on; what is there is checked afterwards, while the table is in use
    EXECUTE format('ALTER TABLE %s ADD CONSTRAINT ml_rag_reembed_not_null CHECK (%I IS NOT NULL) NOT VALID', _relation,
      _old);
  END IF;
  IF _column.attstattarget IS NOT NULL THEN
    EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET STATISTICS %s', _relation, _old, _column.attstattarget);
  END IF;
  FOR _row IN SELECT i.new, i.old, n.nspname FROM jsonb_to_recordset(_indexes) AS i (new name, old name)
    CROSS JOIN pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = _store
  LOOP
    EXECUTE format('ALTER INDEX %I.%I RENAME TO %I', _row.nspname, _row.new, _row.old);
  END LOOP;
  FOR _row IN SELECT * FROM jsonb_to_recordset(_privileges) AS p (privilege text, grantable boolean, role text) LOOP
    EXECUTE format('GRANT %s (%I) ON %s TO %s %s', _row.privilege, _old, _relation, _row.role,
      CASE WHEN _row.grantable THEN 'WITH GRANT OPTION' END);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._reembed_switch(job jsonb, attempt integer) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET lock_timeout = '1s'
SET enable_seqscan = off
AS $$
-- purpose: embed what has come in since, and switch, in one transaction; returns what came of it:
-- {"state": switched | locked (others use the table) | behind (too many rows for a lock) | index (one is missing) |
-- failed, "written", "failed", "first_error"}. Whoever calls holds the lock of the store's model.
-- One lock, of the strongest kind, and nothing before it: who waits for two can be in a deadlock.
-- Calls: ml_rag._limit_lock, ml_rag._check_embedding_column, ml_rag._reembedding, ml_rag._missing_indexes,
-- ml_rag._reembed_pending, ml_rag._reembed_rows, ml_rag._replace_column
DECLARE
  _most CONSTANT integer := 16;
  _store regclass := (job ->> 'store')::oid;
  _relation text := ml_rag._relation_name(_store);
  _pending record;
  _done record;
  _written bigint := 0;
  _blank bigint;
BEGIN
  PERFORM ml_rag._check_embedding_column(_store, job ->> 'embedding');
  PERFORM ml_rag._limit_lock(job, attempt);
  EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', _relation);
  PERFORM ml_rag._check_embedding_column(_store, job ->> 'embedding');
  IF NOT coalesce((ml_rag._reembedding(_store)).follows, false) THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('a trigger was dropped or switched off while "%s" was re-embedded', _store),
      DETAIL = 'Without it nobody knows which texts have changed since they were embedded.',
      HINT = 'CALL it again: it starts from the beginning.';
  END IF;
  IF EXISTS (SELECT FROM ml_rag._missing_indexes(job)) THEN
    RETURN '{"state": "index"}';
  END IF;
  _pending := ml_rag._reembed_pending(job, _most + 1);
  IF cardinality(_pending.places) > _most THEN
    RETURN '{"state": "behind"}';
  ELSIF cardinality(_pending.places) > 0 THEN
    _done := ml_rag._reembed_rows(job, _pending.places, _pending.texts);
    IF _done.failed > 0 THEN
      RETURN jsonb_build_object('state', 'failed', 'written', _done.written, 'failed', _done.failed,
        'first_error', _done.first_error);
    ELSIF _done.refused > 0 THEN
      -- more than one attempt knows what to say of them
      RETURN jsonb_build_object('state', 'behind', 'written', _done.written);
    END IF;
    _written := _done.written;
  END IF;
  IF (job -> 'not_null')::boolean THEN
    EXECUTE format('SELECT count(*) FROM %s AS t WHERE t.%I IS NULL', _relation, job ->> 'next') INTO _blank;
    IF _blank > 0 THEN
      RETURN jsonb_build_object('state', 'failed', 'written', _written, 'failed', _blank,
        'first_error', format('rows without text in a column that takes no null; '
          'delete them, or ALTER TABLE %s ALTER COLUMN %I DROP NOT NULL', _relation, job ->> 'embedding'));
    END IF;
  END IF;
  PERFORM ml_rag._replace_column(job);
  RETURN jsonb_build_object('state', 'switched', 'written', _written);
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

CREATE FUNCTION ml_rag.abandon_reembed(store regclass) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._own_table, ml_rag._hold_reembed, ml_rag._reembedding  Writes: the table's definition, as the caller
DECLARE
  _relation text;
  _found boolean := false;
  _next name;
  _trigger name;
BEGIN
  PERFORM ml_rag._own_table(store);
  PERFORM ml_rag._hold_reembed(store);
  _relation := ml_rag._relation_name(store);
  LOOP
    _next := (ml_rag._reembedding(store)).next;
    EXIT WHEN _next IS NULL;
    FOR _trigger IN
      SELECT t.tgname FROM pg_trigger AS t
      WHERE t.tgrelid = store AND t.tgfoid = 'ml_rag._outdate_embedding()'::regprocedure AND NOT t.tgisinternal
    LOOP
      EXECUTE format('DROP TRIGGER %I ON %s', _trigger, _relation);
    END LOOP;
    EXECUTE format('ALTER TABLE %s DROP COLUMN %I', _relation, _next);
    _found := true;
  END LOOP;
  RETURN _found;
END
$$;
COMMENT ON FUNCTION ml_rag.abandon_reembed(regclass) IS
$$gives up a re-embedding that has not switched: drops the new column with its vectors and its trigger; for the owner
Returns false where there was none. The store goes on with its old vectors. Errors: 42P01; 42501; 55006 it is running:
cancel that call first.$$;

CREATE PROCEDURE ml_rag._run_reembed(job jsonb, INOUT outcome jsonb DEFAULT NULL, INOUT error jsonb DEFAULT NULL)
LANGUAGE plpython3u
AS $$
# purpose: fill, build, switch; commits after each step. In Python, so that no error can leave a session's lock behind.
# A procedure that commits can have no SET clause.
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None, error
return GD["ml_rag"].reembed(plpy, job)
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
model, another isolation level than READ COMMITTED, its trigger switched off; 55006 another session is at it; 08006;
53300; 57014; 38000.$$;
