-- run: the rows of a table that wait for their embedding, batch by batch: claim, embed, write, each in a transaction of
-- its own. Claims are advisory locks of rows: several runs share a table, a run that is killed leaves nothing behind, and
-- no lock of a row or table is held while the model is asked.

-- What a run works on, from one transaction to the next.
CREATE TYPE ml_rag._vectorizer_run AS (
  step       text,                    -- what comes next: claim, embed, write, sweep, index; null = it is done
  relation   regclass,                -- the table that has the vectorizer
  owner      oid,                     -- of the table that is filled
  request    jsonb,                   -- it has a table of segments: how texts are split; else null
  job        ml_rag._embedding_job,   -- what it has in common with filling an embedding; its store is the table that is filled
  key        name[],                  -- the columns of the primary key in the table that is filled, and their types
  key_types  text[],
  parts      oid[],                   -- the table, or its partitions that are still to be read
  after      text,                    -- the key of the last row that was read
  keys       text[],                  -- a batch: keys, claims, errors
  claims     bigint[],
  errors     jsonb[],
  found      ml_rag._segments,        -- of a batch
  truncated  bigint,                  -- texts that the model has cut, so far, and those of them that are counted already
  counted    bigint,
  batches    integer,                 -- how many may still be read; null = all
  is_partial boolean                  -- it ended by that
);

CREATE FUNCTION ml_rag._make_run(relation regclass, options jsonb, call integer) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a run of a table's vectorizer; options are parsed ones
DECLARE
  _store regclass := relation;
  _found record;
  _key record;
  _index record;
BEGIN
  _found := ml_rag._find_vectorizer(relation);
  IF _found.options ->> 'destination' = 'table' THEN
    _store := ml_rag._find_segments(relation);
    _key := ml_rag._source_key(_store);
  ELSE
    _key := ml_rag._primary_key(relation);
  END IF;
  -- it may have been moved since it was made
  PERFORM ml_rag._refuse_foreign_schema(_store);
  _index := ml_rag._index_definition(_found.options -> 'index', _found.options ->> 'distance_metric', 'vector');
  RETURN jsonb_populate_record(NULL::ml_rag._vectorizer_run, jsonb_build_object(
    'step', 'claim', 'relation', relation::oid::bigint,
    'owner', (SELECT c.relowner::bigint FROM pg_class AS c WHERE c.oid = _store), 'request', CASE WHEN _store <> relation THEN
      jsonb_build_object('embed_model_id', _found.model_id, 'chunking', _found.options -> 'chunking') END,
    'truncated', 0, 'counted', 0, 'key', to_jsonb(_key.key), 'key_types', to_jsonb(_key.types), 'batches', options -> 'batches',
    'job', jsonb_build_object(
      'store', _store::oid::bigint, 'vector_store', ml_rag._full_name(relation), 'call', call,
      'embedding', _found.model_id, 'column_name', 'segment_embedding', 'segment', 'segment', 'model_id', _found.model_id,
      'type', _found.type, 'index_method', _index.method, 'index_class', _index.class, 'index_options', _index.storage,
      'any_index', true, 'batch_size', options -> 'batch_size', 'lock_seconds', 10, 'began', clock_timestamp(),
      'segments', 0, 'failed', 0, 'found', 0)));
END
$$;

CREATE FUNCTION ml_rag._begin_vectorizer(relation regclass, options jsonb, call integer) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: check everything before the first row; returns the run
DECLARE
  _options jsonb := ml_rag.parse_options('run_vectorizer', $2);
BEGIN
  PERFORM ml_rag._check_embedding_table(relation);
  RETURN ml_rag._make_run(relation, _options, call);
END
$$;

CREATE FUNCTION ml_rag._unclaim(claims bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
BEGIN
  PERFORM pg_advisory_unlock(c) FROM unnest(claims) AS c;
END
$$;

CREATE FUNCTION ml_rag._claim(run ml_rag._vectorizer_run) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- by the index of the rows that wait, some at a time
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
-- purpose: the next rows that wait and that no other run has claimed, in the order of their keys
-- At most 4 MB of texts at once, 1 MB where each becomes many segments.
-- Reads: the table, as the caller
DECLARE
  _run record := run;
  _keys name[] := run.key;
  _part oid := run.parts[1];
  _columns text := (SELECT string_agg(format('t.%I', k), ', ' ORDER BY place) FROM unnest(run.key) WITH ORDINALITY AS u (k, place));
  _types text[] := run.key_types;
  _size integer := (run.job).batch_size;
  _bytes bigint := 0;
  _claim bigint;
  _row record;
  _places tid[] := '{}';
BEGIN
  _run.keys := '{}';
  _run.claims := '{}';
  FOR _row IN EXECUTE format('SELECT t.ctid AS place, %s AS key, octet_length(t.segment) AS bytes %s%s ORDER BY %s',
    ml_rag._row_key(_keys), ml_rag._waiting(_part, run.relation, _keys),
    CASE WHEN run.after IS NOT NULL THEN format(' AND (%s) > (%s)', _columns,
      (SELECT string_agg(format('$1[%s]::%s', i, t), ', ' ORDER BY i) FROM unnest(_types) WITH ORDINALITY AS u (t, i))) END,
    _columns) USING run.after::text[]
  LOOP
    _claim := hashtextextended(format('ml_rag vectorizer %s %s', (run.job).store::oid, _row.key), 0);
    IF pg_try_advisory_lock(_claim) THEN
      _places := _places || _row.place;
      _run.keys := array_append(_run.keys, _row.key);
      _run.claims := array_append(_run.claims, _claim);
      _bytes := _bytes + coalesce(_row.bytes, 0);
    END IF;
    _run.after := _row.key;
    EXIT WHEN cardinality(_places) >= _size OR _bytes > CASE WHEN run.request IS NULL THEN 4000000 ELSE 1000000 END;
  END LOOP;
  IF cardinality(_places) = 0 THEN
    _run.parts := _run.parts[2:];
    _run.after := NULL;
    _run.keys := NULL;
    RETURN _run;
  END IF;
  RETURN ml_rag._read_claimed(_run, _places);
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  PERFORM ml_rag._unclaim(_run.claims);
  RAISE;
END
$$;

CREATE FUNCTION ml_rag._read_claimed(run ml_rag._vectorizer_run, places tid[]) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the texts of claimed rows, read after the claim: another run may have finished one before it. What needs no
-- model to be refused is  Reads: the table, as the caller
DECLARE
  _run record := run;
  _job record := run.job;
BEGIN
  EXECUTE format('SELECT array_agg(r.place ORDER BY r.n), array_agg(r.key ORDER BY r.n), array_agg(r.text ORDER BY r.n),'
      ' array_agg(CASE WHEN r.bytes > 1000000 THEN jsonb_build_object(''sqlstate'', ''54000'', ''message'','
      ' ''the text is too long'', ''detail'', format(''It has %%s bytes; at most 1000000 are embedded.'', r.bytes),'
      ' ''final'', true) WHEN coalesce(r.text, '''') !~ ''\S'' THEN jsonb_build_object(''sqlstate'', ''22023'','
      ' ''message'', ''the text is empty'', ''final'', true) END ORDER BY r.n) FROM ('
      'SELECT u.place, u.key, u.n, octet_length(t.segment) AS bytes, t.segment AS text'
      ' FROM unnest($1, $2) WITH ORDINALITY AS u (place, key, n) JOIN ONLY %s AS t ON t.ctid = u.place'
      ' WHERE t.segment_embedding IS NULL) AS r', ml_rag._relation_name(_run.parts[1]))
    INTO _job.places, _run.keys, _job.texts, _run.errors USING places, _run.keys;
  _job.part := _run.parts[1];
  _run.job := _job;
  _run.step := CASE WHEN _run.keys IS NULL THEN 'claim' ELSE 'embed' END;
  RETURN _run;
END
$$;

CREATE FUNCTION ml_rag._embed_claimed(run ml_rag._vectorizer_run) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a batch's vectors, or segments; no table is touched while the model is asked
DECLARE
  _run record := run;
  _job record := run.job;
  _good integer[] := ARRAY(SELECT i FROM generate_subscripts(run.errors, 1) AS i WHERE run.errors[i] IS NULL ORDER BY i);
  _all text[] := (run.job).texts;
  _texts text[] := ARRAY(SELECT _all[i] FROM unnest(_good) WITH ORDINALITY AS u (i, n) ORDER BY n);
  _vectors @vector@.vector[] := array_fill(NULL::@vector@.vector, ARRAY[cardinality(_all)]);
  _errors jsonb[] := run.errors;
  _embedded record;
  _found record;
BEGIN
  IF run.request IS NULL THEN
    _embedded := ml_rag._embed_apart(_texts, (run.job).model_id);
    FOR _i IN 1..cardinality(_good) LOOP
      _vectors[_good[_i]] := _embedded.vectors[_i];
      _errors[_good[_i]] := _embedded.errors[_i];
    END LOOP;
    _job.vectors := _vectors;
    _run.job := _job;
    _run.truncated := _run.truncated + _embedded.truncated;
  ELSIF cardinality(_good) > 0 THEN
    SELECT o.found, o.error INTO _embedded FROM ml_rag._embed_segments(_texts, run.request) AS o;
    PERFORM ml_rag._raise(_embedded.error) WHERE _embedded.error IS NOT NULL;
    _found := _embedded.found;
    FOR _i IN 1..cardinality(_good) LOOP
      _errors[_good[_i]] := _found.errors[_i];
    END LOOP;
    _found.texts := ARRAY(SELECT _good[t] FROM unnest(_found.texts) WITH ORDINALITY AS u (t, n) ORDER BY n);
    _run.found := _found;
  ELSE
    _run.found := NULL;
  END IF;
  _run.errors := _errors;
  _run.step := 'write';
  RETURN _run;
END
$$;

CREATE FUNCTION ml_rag._write_segments(run ml_rag._vectorizer_run) RETURNS ml_rag._embedding_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments of rows that still have that text and that nobody else is changing, in the place of those that wait
-- Writes: the table of segments, as the caller
DECLARE
  _job record := run.job;
  _found ml_rag._segments := run.found;
  _relation text := ml_rag._relation_name(_job.store);
  _columns text := (SELECT string_agg(quote_ident(k), ', ' ORDER BY place) FROM unnest(run.key) WITH ORDINALITY AS u (k, place));
  _written bigint;
BEGIN
  EXECUTE format($sql$
    WITH made AS MATERIALIZED (
      SELECT p.n, p.number, p.segment, p.metadata::jsonb AS metadata, p.vector::%2$s AS vector
      FROM unnest($3, $4, $5, $6, $7) AS p (n, number, segment, metadata, vector)
    ), free AS MATERIALIZED (
      SELECT t.ctid AS place, t.*, u.n FROM unnest($1, $2) WITH ORDINALITY AS u (place, text, n)
      JOIN %1$s AS t ON t.ctid = u.place
      WHERE u.n = ANY ($3) AND t.segment_embedding IS NULL AND t.segment COLLATE "C" = u.text
      FOR NO KEY UPDATE OF t SKIP LOCKED
    ), written AS (
      UPDATE %1$s AS t SET segment = m.segment, metadata = m.metadata, segment_embedding = m.vector
      FROM free AS f JOIN made AS m ON m.n = f.n AND m.number = 1 WHERE t.ctid = f.place
      RETURNING 1
    ), more AS (
      INSERT INTO %1$s (%3$s, document_id, document_name, text_hash, segment_number, segment, metadata, segment_embedding)
      SELECT %4$s, f.document_id, f.document_name, f.text_hash, m.number, m.segment, m.metadata, m.vector
      FROM free AS f JOIN made AS m ON m.n = f.n AND m.number > 1
    )
    SELECT count(*) FROM written$sql$, _relation, _job.type, _columns,
    (SELECT string_agg(format('f.%I', k), ', ' ORDER BY place) FROM unnest(run.key) WITH ORDINALITY AS u (k, place)))
  INTO _written USING _job.places, _job.texts, _found.texts, _found.numbers, _found.segments, _found.metadata, _found.vectors;
  _job.found := _job.found + _written;
  _job.segments := _job.segments + _written;
  _job.places := NULL;
  _job.texts := NULL;
  RETURN _job;
END
$$;

CREATE FUNCTION ml_rag._write_claimed(run ml_rag._vectorizer_run) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a batch's embeddings and errors; a row that was changed meanwhile, or is being changed, comes up again
-- Writes: the table, as the caller
DECLARE
  _run record := run;
  _before record := run.job;
  _job record := CASE WHEN run.request IS NULL THEN ml_rag._write_batch(run.job) ELSE ml_rag._write_segments(run) END;
  _errors jsonb[] := run.errors;
  _kept integer[];
BEGIN
  IF _job.failed > _before.failed THEN
    EXECUTE format('SELECT array_agg(u.n) FROM unnest($1, $2, $3) WITH ORDINALITY AS u (place, text, vector, n)'
        ' JOIN ONLY %s AS t ON t.ctid = u.place'
        ' WHERE u.vector IS NOT NULL AND t.segment_embedding IS NULL AND t.segment COLLATE "C" = u.text',
        ml_rag._relation_name(_before.part)) INTO _kept USING _before.places, _before.texts, _before.vectors;
    FOR _i IN 1..coalesce(cardinality(_kept), 0) LOOP
      _errors[_kept[_i]] := jsonb_build_object('sqlstate', '55000', 'message', 'a trigger of the table keeps the row as it is');
    END LOOP;
  END IF;
  _job.failed := _before.failed + ml_rag._note_failures(_run.relation, _run.keys, _before.texts, _errors);
  _run.job := _job;
  _run.found := NULL;
  _run.batches := _run.batches - 1;
  _run.is_partial := _run.batches = 0;
  _run.step := CASE WHEN _run.is_partial THEN 'sweep' ELSE 'claim' END;
  RETURN _run;
END
$$;

CREATE FUNCTION ml_rag._next_claim(run ml_rag._vectorizer_run) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the next batch; the table is gone through again until nothing is found, as rows come meanwhile
DECLARE
  _run record := run;
  _job record := run.job;
BEGIN
  IF coalesce(cardinality(_run.parts), 0) > 0 THEN
    RETURN ml_rag._claim(_run);
  ELSIF _run.parts IS NOT NULL AND _job.found = 0 THEN
    _run.step := 'sweep';
    RETURN _run;
  END IF;
  _run.parts := ARRAY(SELECT c.oid FROM pg_class AS c
                      WHERE c.oid = ANY (ml_rag._parts(_job.store)) AND c.relkind = 'r' ORDER BY c.oid);
  _job.found := 0;
  _run.job := _job;
  _run.step := CASE WHEN cardinality(_run.parts) = 0 THEN 'sweep' ELSE 'claim' END;
  RETURN _run;
END
$$;

CREATE FUNCTION ml_rag._sweep_errors(run ml_rag._vectorizer_run) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: errors of rows that are deleted, have another key or an embedding by now are forgotten
-- Writes: ml_rag.vectorizer_error
BEGIN
  EXECUTE format('UPDATE ml_rag.vectorizer_error AS e SET attempts = 0 WHERE e.relation = $1 AND NOT EXISTS ('
    'SELECT FROM %s AS t WHERE t.segment_embedding IS NULL AND %s = e.key)', ml_rag._relation_name((run.job).store),
    ml_rag._row_key(run.key)) USING run.relation;
END
$$;

CREATE FUNCTION ml_rag._index_vectorizer(run ml_rag._vectorizer_run) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the index of the embeddings, once they are there for the first time: filling one row by row takes far longer
-- One run makes it.
DECLARE
  _store oid := (run.job).store;
BEGIN
  IF (run.job).index_method IS NOT NULL AND (run.job).segments > 0
    AND pg_try_advisory_xact_lock(hashtextextended(format('ml_rag vectorizer index %s', _store), 0))
    AND NOT EXISTS (
      SELECT FROM pg_index AS x JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[0]
      WHERE x.indrelid = _store AND x.indisvalid AND a.attname = 'segment_embedding') THEN
    PERFORM ml_rag._index_embedding(run.job);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._warn_of_truncation(run ml_rag._vectorizer_run) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: tell that the model has cut texts, and what splits them
BEGIN
  IF run.truncated > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('the model cut the texts of %s rows of "%s"', run.truncated, run.relation),
      DETAIL = format('They are longer than model %s takes in; searches by meaning do not see the rest.', (run.job).model_id),
      HINT = format('To split texts into segments, first: SELECT ml_rag.drop_vectorizer(%1$L); then: '
        'SELECT ml_rag.create_vectorizer(%1$L, ''{"columns": …, "destination": "table"}'');', run.relation::text);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._count_truncated(run ml_rag._vectorizer_run) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: add the texts that the model has cut to those of the vectorizer; in a short transaction, as runs wait for each other
-- Writes: ml_rag.vectorizer_truncated
DECLARE
  _run record := run;
BEGIN
  IF run.truncated > run.counted THEN
    INSERT INTO ml_rag.vectorizer_truncated AS t (relation, texts) VALUES (run.relation, run.truncated - run.counted)
    ON CONFLICT ON CONSTRAINT vectorizer_truncated_pkey DO UPDATE SET texts = t.texts + excluded.texts;
    _run.counted := run.truncated;
  END IF;
  RETURN _run;
END
$$;

CREATE FUNCTION ml_rag._run_step(run ml_rag._vectorizer_run) RETURNS ml_rag._vectorizer_run
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a run's next step, in a transaction of its own; claims are given back after the commit of what they were for
DECLARE
  _run record := run;
  _store oid := (run.job).store;
BEGIN
  IF run.step <> 'embed' THEN
    PERFORM ml_rag._hold(ARRAY[run.relation, _store] || run.parts[1:1]);
    PERFORM ml_rag._refuse_foreign_schema(_store);
    PERFORM ml_rag._refuse_other_owner(_store, run.owner);
  END IF;
  CASE run.step
  WHEN 'claim' THEN
    PERFORM ml_rag._unclaim(_run.claims);
    _run.claims := NULL;
    RETURN ml_rag._next_claim(ml_rag._count_truncated(_run));
  WHEN 'embed' THEN
    PERFORM ml_rag._tell_embedding(run.job, 'embedding', 'embed', (run.job).model_id);
    RETURN ml_rag._embed_claimed(run);
  WHEN 'write' THEN
    RETURN ml_rag._write_claimed(run);
  WHEN 'sweep' THEN
    PERFORM ml_rag._unclaim(_run.claims);
    _run.claims := NULL;
    _run := ml_rag._count_truncated(_run);
    PERFORM ml_rag._sweep_errors(run);
    _run.step := CASE WHEN _run.is_partial THEN NULL ELSE 'index' END;
  WHEN 'index' THEN
    PERFORM ml_rag._tell_embedding(run.job, 'building index', 'index');
    PERFORM ml_rag._index_vectorizer(run);
    _run.step := NULL;
  END CASE;
  RETURN _run;
END
$$;

CREATE FUNCTION ml_rag._end_vectorizer(run ml_rag._vectorizer_run) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the result, and what the caller has to know
DECLARE
  _relation regclass := run.relation;
  _trigger record := ml_rag._embedding_trigger(_relation, (
    SELECT a.attnum FROM pg_attribute AS a
    WHERE a.attrelid = run.relation AND a.attname = 'segment_embedding' AND NOT a.attisdropped));
BEGIN
  IF NOT coalesce(run.request IS NULL AND _trigger.is_on OR run.request IS NOT NULL AND ml_rag._has_segment_triggers(_relation), false) THEN
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('a trigger of "%s" was dropped or disabled', _relation),
      DETAIL = 'Texts that changed without it have kept their old embedding.',
      HINT = format('First: SELECT ml_rag.drop_vectorizer(%1$L); then: SELECT ml_rag.create_vectorizer(%1$L, ''{"columns": …}'');',
        _relation);
  ELSIF _trigger.later IS NOT NULL AND run.request IS NULL THEN
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('trigger "%s" of "%s" runs after that of ml_rag', _trigger.later, _relation),
      DETAIL = 'It could change a text whose embedding is kept. Triggers run in the order of their names.',
      HINT = format('ALTER TRIGGER %I ON %s RENAME TO …;', _trigger.later, _relation);
  END IF;
  PERFORM ml_rag._hold(ml_rag._parts((run.job).store));
  IF (run.job).failed > 0 THEN
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('%s rows of "%s" could not be embedded', (run.job).failed, _relation),
      HINT = format('Why: SELECT key, sqlstate, message, detail FROM ml_rag.vectorizer_error WHERE relation = %L::regclass;',
        _relation);
  END IF;
  PERFORM ml_rag._warn_of_truncation(run);
  RETURN jsonb_build_object('relation', (run.job).vector_store, 'embedded', (run.job).segments, 'failed', (run.job).failed,
    'pending', ml_rag._count_waiting(_relation), 'seconds', round(extract(epoch FROM clock_timestamp() - (run.job).began), 3));
END
$$;

CREATE PROCEDURE ml_rag.run_vectorizer(relation regclass, options jsonb DEFAULT NULL, INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: embed what waits, a commit after each step
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used. Nor can it
-- commit within a block that has an EXCEPTION clause.
DECLARE
  _call pg_catalog.int4;
  _run ml_rag._vectorizer_run;
  _committed pg_catalog.bool;
  _error pg_catalog.jsonb;
  _nodes ml_rag._node_run;
BEGIN
  CALL ml_rag._commit(_committed, _error);
  IF NOT _committed THEN
    RAISE EXCEPTION USING ERRCODE = '25001', MESSAGE = 'ml_rag.run_vectorizer cannot run inside a transaction block',
      DETAIL = 'It commits after each batch.',
      HINT = 'CALL it by itself, with autocommit on.';
  END IF;
  _call := ml_rag._begin('ml_rag.run_vectorizer');
  BEGIN
    _run := ml_rag._begin_vectorizer(relation, options, _call);
  EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
    PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
  END;
  LOOP
    CALL ml_rag._commit(_committed, _error);
    BEGIN
      PERFORM ml_rag._raise(_error);
      IF _run.step IS NULL THEN
        result := ml_rag._end_vectorizer(_run);
      ELSE
        _run := ml_rag._run_step(_run);
      END IF;
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      PERFORM ml_rag._unclaim(_run.claims);
      PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
    END;
    EXIT WHEN result IS NOT NULL;
  END LOOP;
  LOOP
    CALL ml_rag._commit(_committed, _error);
    BEGIN
      PERFORM ml_rag._raise(_error);
      _nodes := ml_rag._next_nodes(relation, _nodes, _call);
    EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
      PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
    END;
    EXIT WHEN _nodes.store IS NULL;
  END LOOP;
  PERFORM ml_rag._end(_call);
END
$$;
COMMENT ON PROCEDURE ml_rag.run_vectorizer(regclass, jsonb, jsonb) IS
$$embeds the rows of a table that wait for it, as ml-rag worker does: CALL ml_rag.run_vectorizer('shop.items')
By hand or from pg_cron. Rows are embedded in batches, with a commit after each; nobody waits for a model: not who reads the
table, nor who writes to it. Several runs share a table, none embeds a row that another has. A row that cannot be embedded is
in ml_rag.vectorizer_error, and is tried again later; one that is changed meanwhile comes up again. The first run that has
embedded all builds the index, while writers wait. For the owner of the table; not inside a transaction block.
options: SELECT * FROM ml_rag.option WHERE routine = 'run_vectorizer'.
result: {"relation", "embedded", "failed", "pending", "seconds"}; pending: rows that came meanwhile, or that another run has.
Errors: 22000 the model has other dimensions by now; 22023 bad option; 25001; 25006 read-only; 42704 no vectorizer; 42P01;
42501; 55000 its columns were dropped or renamed, hidden rows, isolation level; 55P03 lock_timeout: what was done is kept;
08006; 53200 too many rows claimed at once for max_locks_per_transaction; 53300; 57014; 38000.$$;

CREATE FUNCTION ml_rag.retry_vectorizer(relation regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- Writes: ml_rag.vectorizer_error
DECLARE
  _n bigint;
BEGIN
  PERFORM ml_rag._own_table(relation);
  PERFORM ml_rag._find_vectorizer(relation);
  UPDATE ml_rag.vectorizer_error AS e SET next_attempt = now()
  WHERE e.relation = retry_vectorizer.relation AND e.next_attempt > now();
  GET DIAGNOSTICS _n = ROW_COUNT;
  PERFORM pg_notify('ml_rag_vectorizer', '');
  RETURN _n;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
@RAISE@
END
$$;
COMMENT ON FUNCTION ml_rag.retry_vectorizer(regclass) IS
$$lets the next run try the rows of ml_rag.vectorizer_error again at once; returns how many; for the table's owner
Errors: 42704 the table has no vectorizer; 42P01; 42501; 55000 its columns were dropped or renamed.$$;
