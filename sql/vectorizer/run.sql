-- run: the rows of a table that wait for their embedding, batch by batch (backend/jobs/vectorizer.py).

CREATE FUNCTION ml_rag._make_run(relation regclass, options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a run of a table's vectorizer: the fields of ml_rag._embedding_job, whose store is the table that
-- is filled, and others. request: how texts are split, where it has a table of segments
DECLARE
  _options jsonb := ml_rag.parse_options('run_vectorizer', $2);
  _store regclass := relation;
  _found record;
  _key record;
  _index record;
BEGIN
  _found := ml_rag._find_vectorizer(relation);
  IF _found.options ->> 'destination' = 'table' THEN
    _store := ml_rag._segment_table(relation, true);
    _key := ml_rag._source_key(_store);
  ELSE
    _key := ml_rag._primary_key(relation);
  END IF;
  -- it may have been moved since it was made
  PERFORM ml_rag._refuse_foreign_schema(_store);
  _index := ml_rag._index_definition(_found.options -> 'index',
    _found.options ->> 'distance_metric', 'vector');
  RETURN jsonb_build_object(
    'relation', relation::oid::bigint, 'owner', coalesce(
      quote_ident(_options ->> 'owner')::regrole::oid::bigint,
      (SELECT c.relowner::bigint FROM pg_class AS c WHERE c.oid = _store)),
    -- who serves several owners has found the table by itself
    'is_judged', _options ? 'owner',
    'request', CASE WHEN _store <> relation THEN
      jsonb_build_object('embed_model_id', _found.model_id, 'chunking', _found.options -> 'chunking') END,
    'key', _key.key, 'key_types', _key.types, 'key_equals', (
      -- of an extension's type they are not in search_path
      SELECT jsonb_agg(format('OPERATOR(%I.%s)', n.nspname, o.oprname) ORDER BY k.place)
      FROM pg_index AS x CROSS JOIN LATERAL unnest(x.indclass::oid[]) WITH ORDINALITY AS k (class, place)
      JOIN pg_opclass AS c ON c.oid = k.class
      JOIN pg_amop AS m ON m.amopfamily = c.opcfamily AND m.amoplefttype = c.opcintype
        AND m.amoprighttype = c.opcintype AND m.amopstrategy = 3
      JOIN pg_operator AS o ON o.oid = m.amopopr JOIN pg_namespace AS n ON n.oid = o.oprnamespace
      WHERE x.indrelid = _store AND x.indisprimary AND k.place <= cardinality(_key.key)),
    'batches', _options -> 'batches',
    'store', _store::oid::bigint, 'vector_store', ml_rag._full_name(relation),
    'embedding', _found.model_id, 'column_name', 'segment_embedding', 'segment', 'segment', 'model_id',
    _found.model_id,
    'type', _found.type, 'index_method', _index.method, 'index_class', _index.class, 'index_options',
    _index.storage,
    'any_index', true, 'batch_size', _options -> 'batch_size', 'lock_seconds', 10);
END
$$;

CREATE FUNCTION ml_rag._warn_of_run(relation regclass, store regclass, failed bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what the caller has to know after a run; how many rows wait
DECLARE
  _trigger record := ml_rag._embedding_trigger(relation, (
    SELECT a.attnum FROM pg_attribute AS a
    WHERE a.attrelid = _warn_of_run.relation AND a.attname = 'segment_embedding' AND NOT a.attisdropped));
BEGIN
  IF NOT coalesce(CASE WHEN store = relation THEN _trigger.is_on ELSE 5 = (
      SELECT count(*) FROM pg_trigger AS t
      WHERE t.tgrelid = relation AND t.tgname ~ '^ml_rag_segments_(insert|update|delete|truncate|key)$'
        AND t.tgenabled IN ('O', 'A')) END, false) THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('a trigger of "%s" was dropped or disabled', relation),
      DETAIL = 'Texts that changed without it have kept their old embedding.',
      HINT = format('First: SELECT ml_rag.drop_vectorizer(%1$L); then: SELECT ml_rag.create_vectorizer(%1$L, '
        '''{"columns": …}'');', relation);
  ELSIF _trigger.later IS NOT NULL AND store = relation THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('trigger "%s" of "%s" runs after that of ml_rag', _trigger.later, relation),
      DETAIL = 'It could change a text whose embedding is kept. Triggers run in the order of their names.',
      HINT = format('ALTER TRIGGER %I ON %s RENAME TO …;', _trigger.later, relation);
  END IF;
  IF failed > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s of "%s" could not be embedded', CASE failed WHEN 1 THEN 'a row'
        ELSE failed || ' rows' END, relation),
      HINT = format('Why: SELECT key, sqlstate, message, detail FROM ml_rag.vectorizer_error WHERE relation '
        '= %L::regclass;', relation);
  END IF;
  RETURN ml_rag._count_waiting(relation);
END
$$;

CREATE PROCEDURE ml_rag.run_vectorizer(relation regclass, options jsonb DEFAULT NULL,
  INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: embed what waits, a commit after each step
DECLARE
  _routine CONSTANT pg_catalog.text := 'ml_rag.run_vectorizer';
  _given CONSTANT pg_catalog.jsonb := pg_catalog.jsonb_build_array(relation::pg_catalog.oid, options);
@WORK@
$$;
COMMENT ON PROCEDURE ml_rag.run_vectorizer(regclass, jsonb, jsonb) IS
$$embeds the rows of a table that wait for it, as ml-rag worker does: CALL ml_rag.run_vectorizer('shop.items')
Call it by hand or from pg_cron. Rows are embedded in batches, with a commit after each; neither readers nor
writers of the table wait for a model. Several runs share a table, and none embeds a row that another has. A
row that cannot be embedded is in ml_rag.vectorizer_error, and is tried again later; one that is changed
meanwhile comes up again. The first run that has embedded all builds the index, while writers wait. For the
owner of the table; not inside a transaction block.
options: SELECT * FROM ml_rag.option WHERE routine = 'run_vectorizer'.
result: {"relation", "embedded", "failed", "pending", "seconds"}; pending: rows that came meanwhile, or that
another run has.
Errors: 22000 the model has other dimensions by now; 22023 bad option; 25001; 25006 read-only; 42704 no
vectorizer, no such role; 42P01; 42501; 55000 its columns were dropped or renamed, hidden rows, isolation
level, another owner; 55P03 lock_timeout: what was done is kept; 08006; 53200 too many rows claimed at once
for max_locks_per_transaction; 53300; 57014; 38000.$$;

CREATE FUNCTION ml_rag.retry_vectorizer(relation regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
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
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.retry_vectorizer(regclass) IS
$$lets the next run try the rows of ml_rag.vectorizer_error again at once; returns how many; for the table's owner
Errors: 42704 the table has no vectorizer; 42P01; 42501; 55000 its columns were dropped or renamed.$$;
