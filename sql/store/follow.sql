-- follow: the trigger that keeps an embedding true to its text: of a store that has several, and of
-- ml_embed_table. If a text changes and its embedding does not, the embedding is emptied: a vector of another
-- text is never searched.

CREATE FUNCTION ml_rag._empty_embedding() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
-- purpose: a text that has changed without its embedding has none
-- It runs as the role that writes the table, which may have no privilege on ml_rag, and touches only the row:
-- without pgvector's schema in its path, as other roles may be allowed to create operators there. The column,
-- whatever its name by now, is the one that the trigger's own condition names, and for a partition that of
-- the whole table. A snapshot that is older than the trigger or the column's name does not show it.
-- Reads: the catalog  Errors: 40001
DECLARE
  _relation oid := coalesce(pg_partition_root(TG_RELID), TG_RELID);
  _given record := NEW;
BEGIN
  IF TG_NARGS = 1 AND EXISTS (SELECT FROM pg_attribute AS a
    WHERE a.attrelid = TG_RELID AND a.attname = 'segment_embedding'
                              AND NOT a.attisdropped) THEN
    -- a vectorizer's, as long as the column has its name: the rest takes many times as long
    NEW.segment_embedding := NULL;
    RETURN NEW;
  END IF;
  NEW := jsonb_populate_record(NEW, (
    SELECT jsonb_object_agg(a.attname, NULL)
    FROM pg_trigger AS t
    JOIN pg_depend AS d ON d.classid = 'pg_trigger'::regclass AND d.objid = t.oid
      AND d.refclassid = 'pg_class'::regclass AND d.refobjid = t.tgrelid
    JOIN pg_attribute AS a ON a.attrelid = t.tgrelid AND a.attnum = d.refobjsubid
      AND a.atttypid IN (
        SELECT v.objid FROM pg_extension AS e
        JOIN pg_depend AS v ON v.refclassid = 'pg_extension'::regclass AND v.refobjid = e.oid
          AND v.classid = 'pg_type'::regclass
          AND v.deptype = 'e'
        WHERE e.extname = 'vector')
    WHERE t.tgrelid = _relation AND t.tgname = TG_NAME));
  IF NEW *= _given THEN
    RAISE EXCEPTION USING ERRCODE = '40001',
      MESSAGE = format('an embedding of "%s" has been added or changed since the transaction began',
        TG_RELID::regclass),
      DETAIL = 'The snapshot of the transaction does not show it.',
      HINT = 'Try again, in a new transaction.';
  END IF;
  RETURN NEW;
END
$$;

CREATE FUNCTION ml_rag._text_columns(store regclass, segment name) RETURNS name[]
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the columns that a text is in: itself, or those that it is generated of  Reads: the catalog
DECLARE
  _attnum smallint;
BEGIN
  SELECT a.attnum INTO _attnum FROM pg_attribute AS a
  WHERE a.attrelid = store AND a.attname = segment AND a.attgenerated <> '';
  IF NOT FOUND THEN
    RETURN ARRAY[segment];
  END IF;
  RETURN ARRAY(
    SELECT DISTINCT b.attname FROM pg_attrdef AS e
    JOIN pg_depend AS d ON d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid
      OR d.classid = 'pg_class'::regclass AND d.objid = e.adrelid AND d.objsubid = e.adnum
    JOIN pg_attribute AS b ON b.attrelid = e.adrelid AND b.attnum = d.refobjsubid
    WHERE e.adrelid = store AND e.adnum = _attnum AND d.refclassid = 'pg_class'::regclass
      AND d.refobjid = store
      AND d.refobjsubid NOT IN (0, _attnum) ORDER BY b.attname);
END
$$;

CREATE FUNCTION ml_rag._embedding_trigger(relation oid, attnum smallint, OUT name name, OUT segment name,
  OUT is_on boolean, OUT later name)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the trigger that keeps an embedding true to its text: the column of the text, null if it is
-- generated, whether it has been on all the time (ENABLE TRIGGER makes another state of it), and another
-- trigger that runs after it; null if there is none
-- Reads: the catalog
DECLARE
  _parts oid[] := ml_rag._parts(relation);
BEGIN
  SELECT t.tgname, (
      SELECT a.attname FROM pg_depend AS d
      JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
      WHERE d.classid = 'pg_trigger'::regclass AND d.objid = t.oid AND d.refclassid = 'pg_class'::regclass
        AND d.refobjid = relation AND d.refobjsubid NOT IN (0, _embedding_trigger.attnum)
        AND NOT EXISTS (SELECT FROM pg_attribute AS g WHERE g.attrelid = relation AND g.attgenerated <> ''
                        AND NOT g.attisdropped
                        AND a.attname = ANY (ml_rag._text_columns(relation, g.attname))) LIMIT 1)
  INTO name, segment
  FROM pg_trigger AS t
  WHERE t.tgrelid = relation AND t.tgfoid = 'ml_rag._empty_embedding()'::regprocedure AND EXISTS (
    SELECT FROM pg_depend AS d
    WHERE d.classid = 'pg_trigger'::regclass AND d.objid = t.oid AND d.refclassid = 'pg_class'::regclass
      AND d.refobjid = relation AND d.refobjsubid = _embedding_trigger.attnum)
  ORDER BY t.tgname LIMIT 1;
  is_on := (SELECT bool_and(t.tgenabled = 'A') AND count(*) = cardinality(_parts) FROM pg_trigger AS t
            WHERE t.tgrelid = ANY (_parts) AND t.tgname = _embedding_trigger.name);
  later := (SELECT t.tgname FROM pg_trigger AS t
            -- for each row, before, update (the catalog's bits)
            WHERE t.tgrelid = ANY (_parts) AND t.tgtype & 19 = 19 AND NOT t.tgisinternal
              AND t.tgname > _embedding_trigger.name AND t.tgfoid <> 'ml_rag._empty_embedding()'::regprocedure
            ORDER BY t.tgname LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._later_trigger(store regclass, name name) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: complain about a trigger that could change the text after ours has looked at it
BEGIN
  RAISE EXCEPTION USING ERRCODE = '55000',
    MESSAGE = format('trigger "%s" of "%s" runs after that of ml_rag', name, store),
    DETAIL = 'It could change a text whose embedding is kept. Triggers run in the order of their names.',
    HINT = format('ALTER TRIGGER %I ON %s RENAME TO …; where it has changed texts, drop the embedding and '
      'add it again.', name, store);
END
$$;

CREATE FUNCTION ml_rag._has_texts(relation oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether segment and document_name are generated, as a vectorizer makes them  Reads: the catalog
BEGIN
  RETURN 2 = (SELECT count(*) FROM pg_attribute AS a
              WHERE a.attrelid = relation AND a.attname IN ('segment', 'document_name')
                AND a.attgenerated = 's'
                AND a.atttypid = 'text'::regtype AND NOT a.attisdropped);
END
$$;

CREATE FUNCTION ml_rag._follow_texts(store regclass, column_name name, segment name) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
-- the trigger reads and writes nothing but the row
SET citus.enable_unsafe_triggers = on
AS $$
-- purpose: from now on an embedding is emptied where its text changes without it
-- Writes: the table's definition, as the caller
DECLARE
  _relation text := ml_rag._relation_name(store);
  -- after most names, so that it sees what other triggers have made of the row
  _name name := concat('~ml_rag_', column_name);
  _later name;
BEGIN
  EXECUTE format('CREATE TRIGGER %I BEFORE UPDATE ON %s FOR EACH ROW '
    'WHEN ((%3$s) AND OLD.%4$I OPERATOR(@vector@.=) NEW.%4$I) EXECUTE FUNCTION ml_rag._empty_embedding(%5$s)',
    _name, _relation,
    (SELECT string_agg(format('OLD.%1$I::text COLLATE "C" IS DISTINCT FROM NEW.%1$I::text COLLATE "C"', c),
      ' OR ')
     FROM unnest(ml_rag._text_columns(store, segment)) AS c), column_name,
    -- a vectorizer's
    CASE WHEN column_name = 'segment_embedding' AND ml_rag._has_texts(store) THEN quote_literal(column_name)
      ELSE '' END);
  -- also for what a logical replication applies
  EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', _relation, _name);
  _later := (ml_rag._embedding_trigger(store, (SELECT a.attnum FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname = column_name AND NOT a.attisdropped))).later;
  IF _later IS NOT NULL THEN
    PERFORM ml_rag._later_trigger(store, _later);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._notice_changes(store regclass, column_name name, segment name) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the same for ml_embed_table, where it can be; where not, a notice
DECLARE
  _owner oid;
  _why text;
BEGIN
  SELECT c.relowner INTO _owner FROM pg_class AS c
  WHERE c.oid = store AND c.relkind IN ('r', 'p')
    AND EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = column_name
                AND (ml_rag._embedding_trigger(store, a.attnum)).name IS NULL);
  IF NOT FOUND THEN
    RETURN;
  ELSIF NOT pg_has_role(_owner, 'USAGE') THEN
    _why := 'Its trigger can be made by the owner of the table only.';
  ELSE
    BEGIN
      PERFORM ml_rag._lock_table(store, 'SHARE ROW EXCLUSIVE');
      PERFORM ml_rag._follow_texts(store, column_name, segment);
      -- it stays when further embeddings are dropped
      EXECUTE format('COMMENT ON TRIGGER %I ON %s IS %L', (
        SELECT (ml_rag._embedding_trigger(store, a.attnum)).name FROM pg_attribute AS a
        WHERE a.attrelid = store AND a.attname = column_name AND NOT a.attisdropped),
        ml_rag._relation_name(store), 'made by ml_embed_table: empties the embedding of a text that changes');
    EXCEPTION WHEN object_not_in_prerequisite_state THEN
      GET STACKED DIAGNOSTICS _why = MESSAGE_TEXT;
      _why := concat(upper(left(_why, 1)), substr(_why, 2), '.');
    END;
  END IF;
  IF _why IS NOT NULL THEN
    RAISE NOTICE USING MESSAGE = format('changed texts of "%s" will keep their embedding', store),
      DETAIL = _why,
      HINT = format('Set %I to NULL where a text changes, and call ml_embed_table again.', column_name);
  END IF;
END
$$;
