-- embeddings: several embeddings of the texts of one store; docs/embeddings.md tells it as a whole.
-- Each is a column whose comment says so (store/marker). No column ever changes its model: a call that has
-- found a store, and has the question embedded for one of its columns, searches that column, whatever has
-- become the default meanwhile.

CREATE FUNCTION ml_rag._check_embedding_table(store regclass, not_on_shards text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether a relation can get embeddings, and from this caller; not_on_shards: why shards of Citus
-- cannot have what it gets
DECLARE
  _parts oid[];
  _why text;
  _hint text := '';
BEGIN
  PERFORM ml_rag._own_table(store);
  PERFORM ml_rag._check_transaction('embeddings cannot be changed', store);
  _parts := ml_rag._parts(store);
  SELECT CASE
    WHEN c.relkind NOT IN ('r', 'p') THEN 'It is not a table.'
    WHEN c.relispartition THEN 'It is a partition; name the table that it is a part of.'
    WHEN c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits AS i WHERE c.oid IN (i.inhrelid, i.inhparent))
      THEN 'It inherits from another table, or another from it.'
    WHEN EXISTS (SELECT FROM pg_class AS p WHERE p.oid = ANY (_parts) AND p.relkind = 'f')
      THEN 'A partition of it is a foreign table.'
    WHEN ml_rag._is_distributed(c.oid) AND not_on_shards IS NOT NULL THEN
      'Citus distributes it: ' || not_on_shards
    WHEN ml_rag._is_distributed(c.oid) AND ml_rag._calls_of(c.oid) IS NULL THEN
      'Citus distributes it, and it has no table of calls.'
    END, CASE WHEN c.relkind IN ('v', 'm') THEN 'Name the table below it; a view of it is searched then, too.'
      WHEN ml_rag._is_distributed(c.oid) AND not_on_shards IS NULL
        THEN format('SELECT ml_rag.distribute_store(%L); makes one.', store) ELSE '' END
  INTO _why, _hint
  FROM pg_class AS c WHERE c.oid = store;
  IF _why IS NULL AND (SELECT bool_or(row_security_active(p.oid)) FROM unnest(_parts) AS p (oid)) THEN
    _why := 'Row-level security hides rows of it from its owner.';
    _hint := format('First: ALTER TABLE %1$s NO FORCE ROW LEVEL SECURITY; afterwards: ALTER TABLE %1$s FORCE '
      'ROW LEVEL SECURITY;', store);
  END IF;
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the embeddings of "%s" cannot be changed', store),
      DETAIL = _why, HINT = _hint;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._find_embedding(store regclass, name text, OUT column_name name, OUT attnum smallint,
  OUT model_id text, OUT is_default boolean)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: an embedding of a store, or the error
BEGIN
  SELECT e.column_name, e.attnum, e.model_id, e.is_default INTO column_name, attnum, model_id, is_default
  FROM ml_rag._embeddings(store) AS e WHERE e.name = _find_embedding.name;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42704',
      MESSAGE = format('"%s" has no embedding "%s"', store, coalesce(left(name, 100), 'NULL')),
      DETAIL = format('It has: %s.',
        coalesce((SELECT string_agg(e.name, ', ') FROM ml_rag._embeddings(store) AS e), 'none')),
      HINT = 'CALL ml_rag.add_embedding makes one.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._pending(store regclass, column_name name, segment name) RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: how many rows have a text and no embedding in that column
-- Reads: the store, as the caller
DECLARE
  _n bigint;
BEGIN
  PERFORM ml_rag._hold(ARRAY[store::oid]);
  -- no regular expression over what is longer than any text that is embedded
  EXECUTE format('SELECT count(*) FROM %s AS t WHERE t.%I IS NULL AND (octet_length(t.%I) > 1000000'
    ' OR t.%3$I ~ ''[^[:space:]]'')', ml_rag._indexed_rows(store), column_name, segment) INTO _n;
  RETURN _n;
END
$$;

CREATE FUNCTION ml_rag._drop_column(store regclass, column_name name, attnum smallint) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET citus.enable_unsafe_triggers = on AS $$
-- purpose: drop an embedding's column, and its trigger, which depends on it
-- Writes: the table's definition, as the caller
DECLARE
  _relation text := ml_rag._relation_name(store);
  _trigger name := (ml_rag._embedding_trigger(store, attnum)).name;
BEGIN
  IF _trigger IS NOT NULL THEN
    EXECUTE format('DROP TRIGGER %I ON %s', _trigger, _relation);
  END IF;
  EXECUTE format('ALTER TABLE %s DROP COLUMN %I', _relation, column_name);
END
$$;

CREATE FUNCTION ml_rag.use_embedding(store regclass, name text,
  allow_pending boolean DEFAULT false) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: another default embedding, by the comments alone: a lock that neither readers nor writers wait for
-- Reads: the store, as the caller  Writes: the comments of its columns
DECLARE
  _relation text;
  _former text;
  _found record;
  _trigger record;
  _pending bigint := 0;
  _one record;
BEGIN
  PERFORM ml_rag._check_embedding_table(store);
  _found := ml_rag._find_embedding(store, name);
  _trigger := ml_rag._embedding_trigger(store, _found.attnum);
  IF _found.is_default THEN
    RETURN name;
  ELSIF _trigger.later IS NOT NULL THEN
    PERFORM ml_rag._later_trigger(store, _trigger.later);
  ELSIF NOT coalesce(_trigger.is_on, false) THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the trigger of embedding "%s" of "%s" was dropped or disabled', name, store),
      DETAIL = 'It is not known which texts have changed since they were embedded.',
      HINT = format('CALL ml_rag.add_embedding(%L, %L) makes it again, from the beginning.', store, name);
  ELSIF NOT allow_pending THEN
    _pending := ml_rag._pending(store, _found.column_name, _trigger.segment);
  END IF;
  IF _pending > 0 THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('%s rows of "%s" have no embedding "%s"', _pending, store, name),
      DETAIL = 'Semantic search would not find them.',
      HINT = format('CALL ml_rag.add_embedding(%L, %L) embeds them; ml_rag.use_embedding(%1$L, %2$L, true) '
        'goes without.', store, name);
  END IF;
  PERFORM ml_rag._lock_table(store, 'SHARE UPDATE EXCLUSIVE');
  _relation := ml_rag._relation_name(store);
  -- another session may have dropped it meanwhile
  _found := ml_rag._find_embedding(store, name);
  _former := (SELECT e.name FROM ml_rag._embeddings(store) AS e WHERE e.is_default);
  FOR _one IN SELECT e.* FROM ml_rag._embeddings(store) AS e
    WHERE e.is_default OR e.attnum = _found.attnum LOOP
    EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, _one.column_name,
      -- segment_embedding is the default where no other column is
      ml_rag._mark_keys(_one.comment, jsonb_build_object('EMBEDDING', _one.name,
        'DEFAULT', CASE WHEN NOT _one.is_default AND _one.column_name <> 'segment_embedding' THEN true END)));
  END LOOP;
  IF _found.model_id <> ml_rag._get_setting('embed_model_id') THEN
    RAISE NOTICE USING
      MESSAGE = format('calls that name neither model nor store do not search "%s" now', store),
      DETAIL = format('Its vectors are of %s, the default embedding model is %s.', _found.model_id,
        ml_rag._get_setting('embed_model_id')),
      HINT = format('When all stores have changed: SELECT ml_rag.configure(''embed_model_id'', %L);',
        _found.model_id);
  END IF;
  RETURN _former;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.use_embedding(regclass, text, boolean) IS
$$makes an embedding of a vector store its default one; returns the name of the former, which stays
It is searched if a call does not name another one, and the store is found by its model. Only comments of
columns are changed, without blocking other sessions; a call that is under way ends with the embedding that it
began with, or if it measures the answers to many questions, with 55000. Node groups keep their vectors, and
are searched with the model that made them. For the table's owner. allow_pending: also if rows have none yet.
Errors: 42704 no such embedding; 55000 rows without one, or its trigger was dropped or disabled; those of
ml_rag.add_embedding about the table.$$;

CREATE FUNCTION ml_rag.drop_embedding(store regclass, name text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT SET citus.enable_unsafe_triggers = on AS $$
-- Writes: the table's definition, as the caller
DECLARE
  _found record;
  _last record;
  _made_by text;
BEGIN
  PERFORM ml_rag._own_table(store);
  PERFORM ml_rag._check_transaction('embeddings cannot be changed', store);
  _found := ml_rag._find_embedding(store, name);
  IF NOT _found.is_default THEN
    PERFORM ml_rag._lock_table(store, 'ACCESS EXCLUSIVE');
    _found := ml_rag._find_embedding(store, name);
  END IF;
  IF _found.is_default THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('embedding "%s" is the default one of "%s"', name, store),
      HINT = 'ml_rag.use_embedding makes another one the default.';
  END IF;
  -- one of ml_embed_table follows the texts without others, too (store/follow)
  _made_by := (SELECT min(obj_description(t.oid, 'pg_trigger')) FROM pg_trigger AS t
    WHERE t.tgrelid = store AND t.tgfoid = 'ml_rag._empty_embedding()'::regprocedure);
  PERFORM ml_rag._drop_column(store, _found.column_name, _found.attnum);
  SELECT t.name INTO _last FROM ml_rag._embeddings(store) AS e
  CROSS JOIN LATERAL ml_rag._embedding_trigger(store, e.attnum) AS t
  WHERE e.is_default AND t.name IS NOT NULL;
  IF NOT FOUND THEN
    NULL;
  ELSIF _made_by IS NOT NULL THEN
    EXECUTE format('COMMENT ON TRIGGER %I ON %s IS %L', _last.name, ml_rag._relation_name(store), _made_by);
  ELSIF (SELECT count(*) FROM ml_rag._embeddings(store)) = 1 THEN
    -- a store of one embedding is what it was before it got others
    EXECUTE format('DROP TRIGGER %I ON %s', _last.name, ml_rag._relation_name(store));
  END IF;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.drop_embedding(regclass, text) IS
$$drops an embedding of a vector store, with its column, index and trigger; for the table's owner
Calls that have found the store by it just then fail with 42703. Errors: 2BP01 other objects depend on the
column; 25006; 42704 no such embedding; 42P01; 42501; 55000 it is the default one, or isolation level;
55P03 lock_timeout.$$;

CREATE FUNCTION ml_rag.embeddings(store regclass)
RETURNS TABLE (name text, column_name name, embed_model_id text, type text, dimensions integer,
  indexes text[],
               segments bigint, pending bigint, is_default boolean)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 2 SET search_path FROM CURRENT AS $$
-- purpose: the embeddings of a store that the caller may read  Reads: the store, as the caller
DECLARE
  _relation text;
  _one record;
BEGIN
  PERFORM ml_rag._hold(ARRAY[store::oid]);
  _relation := ml_rag._relation_name(store);
  FOR _one IN
    SELECT e.*, coalesce((ml_rag._embedding_trigger(store, e.attnum)).segment, 'segment') AS segment
    FROM ml_rag._embeddings(store) AS e WHERE has_column_privilege(store, e.attnum, 'SELECT')
  LOOP
    name := _one.name;
    column_name := _one.column_name;
    embed_model_id := _one.model_id;
    type := _one.type;
    dimensions := _one.dimensions;
    is_default := _one.is_default;
    indexes := ARRAY(SELECT i.relname FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
                     WHERE x.indrelid = store AND x.indkey[0] = _one.attnum ORDER BY i.relname);
    EXECUTE format('SELECT count(t.%1$I), count(*) FILTER (WHERE t.%1$I IS NULL AND %2$s) FROM %3$s AS t',
        _one.column_name, CASE WHEN EXISTS (
          SELECT FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = _one.segment
            AND NOT a.attisdropped
            AND has_column_privilege(store, a.attnum, 'SELECT'))
        THEN format('(octet_length(t.%1$I) > 1000000 OR t.%1$I ~ ''[^[:space:]]'')', _one.segment)
        ELSE 'true' END, _relation)
      INTO segments, pending;
    RETURN NEXT;
  END LOOP;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.embeddings(regclass) IS
$$the embeddings of a vector store that the caller may read: SELECT * FROM ml_rag.embeddings('handbook')
The default one comes first. name: for option "embedding" of an arm, and ml_rag.use_embedding; an embedding
that was given none has its model's id.
indexes: of its column. segments: rows that have it, of those the caller sees. pending: rows with a text that
have not; CALL ml_rag.add_embedding fills them. The table is read once for each.$$;
