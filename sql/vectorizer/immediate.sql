-- immediate: rows embedded in the transaction that writes them, by triggers after each statement.
-- As with segments, they run a function that the owner of the table owns. A row that cannot be embedded is in
-- ml_rag.vectorizer_error; what every row would get, such as a model server that cannot be reached, fails the
-- statement.

CREATE FUNCTION ml_rag._hold_written(relation regclass, filled regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: what an immediate vectorizer reads and fills is what and whose it was, with triggers of trusted
-- roles only, until the end of the transaction. While the model is asked, a schema can be renamed, and a
-- child attached
BEGIN
  -- no trigger comes between the check and the rows: a child can have one of the same key, of partitions only
  -- the one that was written
  PERFORM ml_rag._hold_with(ARRAY[filled::oid], (
    SELECT CASE c.relkind WHEN 'r' THEN 'triggers' ELSE 'parts' END FROM pg_class AS c WHERE c.oid = filled));
  PERFORM ml_rag._refuse_foreign_schema(filled);
  PERFORM ml_rag._refuse_foreign_trigger(relation, filled);
END
$$;

CREATE FUNCTION ml_rag._written_keys(relation regclass) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: SQL of the keys of those rows of a statement that wait, in the order of ml_rag_new; null where
-- there are none
DECLARE
  _segments regclass := ml_rag._segment_table(relation);
  _filled regclass := coalesce(_segments, relation);
  _key name[] := (ml_rag._primary_key(relation)).key;
BEGIN
  PERFORM ml_rag._hold_written(relation, _filled);
  RETURN format('SELECT array_agg(%s) FROM ml_rag_new AS t WHERE %s', ml_rag._key_text('t', _key),
    CASE WHEN _segments IS NULL THEN 't.segment_embedding IS NULL'
      ELSE format('EXISTS (SELECT FROM ONLY %s AS s WHERE %s AND s.segment_embedding IS NULL)',
        ml_rag._full_name(_segments),
        ml_rag._same_key('s', (ml_rag._source_key(_segments)).key, 't', _key)) END);
END
$$;

CREATE FUNCTION ml_rag._embed_rows(relation regclass, keys text[]) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: embed rows that wait, some at a time, in this transaction
-- Writes: the table that is filled, as the caller
DECLARE
  _job bigint;
  _result jsonb;
BEGIN
  WHILE keys IS NOT NULL AND _result IS NULL LOOP
    SELECT w.job, w.result INTO _job, _result
    FROM ml_rag._work(_job, '_embed_rows', CASE WHEN _job IS NULL THEN
      jsonb_build_array(relation::oid, NULL, keys) END, NULL, false, NULL) AS w;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._embed_at_once(relation regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET citus.enable_ddl_propagation = off AS $$
-- purpose: the triggers and their function, which belongs to the owner of the table; no other role may make
-- triggers of it, nor have made it: see ml_rag._keep_segments
-- Writes: the table's definition and a new function, as the caller
DECLARE
  _relation text := ml_rag._full_name(relation);
  _function text;
  _owner regrole;
BEGIN
  SELECT ml_rag._function_name(relation, ml_rag._derived_name(c.relname, '_embed')), c.relowner
  INTO _function, _owner
  FROM pg_class AS c WHERE c.oid = relation;
  EXECUTE format($sql$
    CREATE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog,
      pg_temp SET "DateStyle" = 'ISO' SET extra_float_digits = 1 AS $body$
    -- made by ml_rag.create_vectorizer: embeds the rows of a statement
    DECLARE
      _keys text[];
    BEGIN
      -- as in ml_rag._keep_segments
      IF NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'ml_rag') THEN
        RETURN NULL;
      END IF;
      EXECUTE ml_rag._written_keys(TG_RELID) INTO _keys;
      PERFORM ml_rag._embed_rows(TG_RELID, _keys);
      RETURN NULL;
    END
    $body$
    $sql$, _function);
  EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC', _function);
  EXECUTE format('ALTER FUNCTION %s() OWNER TO %s', _function, _owner);
  -- after those that keep segments
  EXECUTE
    format('CREATE TRIGGER "~ml_rag_immediate_insert" AFTER INSERT ON %s REFERENCING NEW TABLE AS ml_rag_new '
    'FOR EACH STATEMENT EXECUTE FUNCTION %s()', _relation, _function);
  EXECUTE
    format('CREATE TRIGGER "~ml_rag_immediate_update" AFTER UPDATE ON %s REFERENCING NEW TABLE AS ml_rag_new '
    'FOR EACH STATEMENT EXECUTE FUNCTION %s()', _relation, _function);
END
$$;
