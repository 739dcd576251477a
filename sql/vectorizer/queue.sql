-- queue: which vectorizers there are, and which rows wait for their embedding.
-- A pending row is one that has no embedding, and an index of those rows is the queue: it is right after a
-- rollback, a crash or a restore, since it is the table, and only roles that see the row see it. The
-- vectorizer itself is a statement trigger, which wakes the workers, and whose argument holds the options: so
-- it is dumped, renamed and dropped with its table, and only the owner can change it.

CREATE FUNCTION ml_rag._wake_workers() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: tell the workers that there may be something to embed, without saying where: any role can listen
-- It runs as the role that writes the table, which may have no privilege on ml_rag.
BEGIN
  -- a shard of Citus has it under another name: no worker listens there, and PREPARE TRANSACTION refuses
  -- a transaction that has used NOTIFY
  IF TG_NAME = 'ml_rag_vectorizer' THEN
    PERFORM pg_notify('ml_rag_vectorizer', '');
  END IF;
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._vectorized() RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the tables with a vectorizer that the caller owns  Reads: the catalog
BEGIN
  RETURN ARRAY(
    SELECT t.tgrelid FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
    WHERE t.tgfoid = 'ml_rag._wake_workers()'::regprocedure AND pg_has_role(c.relowner, 'USAGE'));
END
$$;

CREATE FUNCTION ml_rag._served() RETURNS TABLE (relation oid, changes bigint)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: the tables with a vectorizer whose owners a worker of the caller's serves. changes: of the rows of
-- what a run fills, as PostgreSQL counts them, if it has node groups or failures, which need a run also when
-- no row waits; else null. By owner: any role can make thousands of tables that look like such ones
-- Reads: the catalog, ml_rag.vectorizer_error
DECLARE
  _vectorized oid[] := ml_rag._vectorized();
BEGIN
  RETURN QUERY SELECT c.oid, CASE WHEN EXISTS (SELECT FROM ml_rag._node_groups(s.store))
      OR EXISTS (SELECT FROM ml_rag.vectorizer_error AS e WHERE e.relation = c.oid)
      THEN (SELECT sum(pg_stat_get_tuples_inserted(p) + pg_stat_get_tuples_updated(p)
          + pg_stat_get_tuples_deleted(p))::bigint FROM unnest(ml_rag._parts(s.store)) AS p) END
    FROM pg_class AS c
    CROSS JOIN LATERAL (SELECT coalesce(ml_rag._segment_table(c.oid)::oid, c.oid) AS store) AS s
    WHERE c.oid = ANY (_vectorized) AND c.relowner = ANY (ARRAY(
      SELECT o.relowner FROM (
        SELECT DISTINCT t.relowner FROM pg_class AS t WHERE t.oid = ANY (_vectorized)) AS o
      WHERE ml_rag._trusts(o.relowner)));
END
$$;

-- Conditions on indexed columns come before policies, and EXPLAIN shows how many rows they leave. So the
-- policy is such a condition itself: keys of others' rows are not even looked at.
CREATE POLICY own ON ml_rag.vectorizer_error USING (
  (SELECT jsonb_object_agg(v.relation::int4, true)
    FROM unnest(ml_rag._vectorized()) AS v (relation))[relation::oid::int4] IS NOT NULL
  AND relation = ANY ((SELECT ml_rag._vectorized())::oid[]));
CREATE POLICY own ON ml_rag.vectorizer_truncated USING (
  (SELECT jsonb_object_agg(v.relation::int4, true)
    FROM unnest(ml_rag._vectorized()) AS v (relation))[relation::oid::int4] IS NOT NULL
  AND relation = ANY ((SELECT ml_rag._vectorized())::oid[]));

CREATE FUNCTION ml_rag._has_vectorizer(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether a table has a vectorizer  Reads: the catalog
-- Roles with TRIGGER on the table can create a trigger of this name and function, or replace ours. Its
-- argument then is theirs, but only the owner adds columns, and makes a trigger another than one that is
-- simply enabled.
BEGIN
  RETURN EXISTS (SELECT FROM pg_trigger AS t
                 WHERE t.tgrelid = relation AND t.tgname = 'ml_rag_vectorizer'
                   AND t.tgfoid = 'ml_rag._wake_workers()'::regprocedure
                   AND (t.tgenabled <> 'O' OR ml_rag._has_texts(relation)));
END
$$;

CREATE FUNCTION ml_rag._find_vectorizer(relation regclass, OUT options jsonb, OUT model_id text,
  OUT type text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the vectorizer of a table, or the error
DECLARE
  _renew CONSTANT text := format('First: SELECT ml_rag.drop_vectorizer(%1$L); then: '
    'SELECT ml_rag.create_vectorizer(%1$L, ''{"columns": …}'');', relation);
BEGIN
  IF NOT ml_rag._has_vectorizer(relation) THEN
    RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('table "%s" has no vectorizer', relation),
      HINT = format('SELECT ml_rag.create_vectorizer(%L, ''{"columns": …}'') makes one.', relation);
  END IF;
  SELECT e.model_id, format('@vector@.%s(%s)', e.type, e.dimensions) INTO model_id, type
  FROM ml_rag._embeddings(coalesce(ml_rag._segment_table(relation)::oid, relation)) AS e
  WHERE e.column_name = 'segment_embedding';
  IF model_id IS NULL OR (
    SELECT count(*) FROM pg_attribute AS a
    WHERE a.attrelid = coalesce(ml_rag._segment_table(relation), relation)
      AND a.attname IN ('segment', 'segment_embedding')
      AND NOT a.attisdropped) < 2 THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the vectorizer of "%s" lacks its columns', relation),
      DETAIL = 'segment or segment_embedding was dropped or renamed, or its comment no longer names a model.',
      HINT = _renew;
  END IF;
  BEGIN
    options := (SELECT convert_from(substr(t.tgargs, 1, octet_length(t.tgargs) - 1), getdatabaseencoding())
      FROM pg_trigger AS t
                WHERE t.tgrelid = relation AND t.tgname = 'ml_rag_vectorizer');
  EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the vectorizer of "%s" lacks its options', relation),
      DETAIL = 'Trigger ml_rag_vectorizer, which holds them, was replaced.', HINT = _renew;
  END;
END
$$;

CREATE FUNCTION ml_rag._waiting(part text, relation oid, key name[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: SQL of the rows of a table, of that name, that wait for their embedding, but for those whose next
-- attempt is to come later, and those that cannot be found by their key
-- Reads: ml_rag.vectorizer_error
DECLARE
  _text text := ml_rag._key_text('t', key);
  _has_key text := CASE WHEN EXISTS (SELECT FROM pg_attribute AS a
    WHERE a.attrelid = coalesce(ml_rag._segment_table(relation), relation) AND a.attname = ANY (key)
      AND a.atttypid <> ALL ('{int2,int4,int8,uuid}'::regtype[])) THEN
        format(' AND ml_rag._is_text(%s)', _text) END;
BEGIN
  IF ml_rag._is_distributed(relation) THEN
    -- the failures are here and the rows are not; PostgreSQL hashes what is in the array
    RETURN format('FROM ONLY %s AS t WHERE t.segment_embedding IS NULL'
      ' AND concat(ml_rag._error_key(%s), '' '', ml_rag._text_hash(t.segment)) <> ALL (%L::text[])%s', part,
        _text, ARRAY(
        SELECT concat(e.key, ' ', e.text_hash) FROM ml_rag.vectorizer_error AS e
        WHERE e.relation = _waiting.relation AND e.next_attempt > now() ORDER BY e.key), _has_key);
  END IF;
  -- The key apart, and looked up row by row: next to the policy an expression does not become a condition
  -- of the index, and as a join, of which one row is expected, all failures would be read for each row
  RETURN format('FROM ONLY %s AS t CROSS JOIN LATERAL (SELECT ml_rag._error_key(%s) AS key OFFSET 0) AS k'
    ' WHERE t.segment_embedding IS NULL AND NOT EXISTS (SELECT FROM ml_rag.vectorizer_error AS e'
    ' WHERE e.relation = %s AND e.key = k.key AND e.next_attempt > now()'
    ' AND e.text_hash = ml_rag._text_hash(t.segment) OFFSET 0)%s', part, _text, relation, _has_key);
END
$$;

CREATE FUNCTION ml_rag._read_waiting(relation regclass, what text) RETURNS SETOF text
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 1 AS $$
-- purpose: an aggregate over the rows t that wait for a run, of the table or of each of its partitions
-- Reads: the table that is filled, as the caller
DECLARE
  _segments regclass := ml_rag._segment_table(relation);
  _key name[] := CASE WHEN _segments IS NULL THEN (ml_rag._primary_key(relation)).key
    ELSE (ml_rag._source_key(_segments)).key END;
  _part oid;
BEGIN
  FOR _part IN SELECT c.oid FROM pg_class AS c
               WHERE c.oid = ANY (ml_rag._parts(coalesce(_segments, relation))) AND c.relkind = 'r' LOOP
    RETURN QUERY EXECUTE format('SELECT (%s)::text %s', what,
      ml_rag._waiting(ml_rag._relation_name(_part), relation, _key));
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._count_waiting(relation regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: how many rows are pending; holds the tables that are counted, so that their names stay theirs
BEGIN
  PERFORM ml_rag._hold(ml_rag._parts(coalesce(ml_rag._segment_table(relation), relation)) || relation::oid);
  RETURN coalesce((SELECT sum(w.value::bigint) FROM ml_rag._read_waiting(relation, 'count(*)') AS w (value)),
    0);
END
$$;
