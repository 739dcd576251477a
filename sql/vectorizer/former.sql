-- former: what is left of a vectorizer when the extension is dropped, and how ml_rag.create_vectorizer takes
-- it back.
--
-- DROP EXTENSION drops the triggers, and with them the options. The columns, the table of segments and the
-- indexes stay, and from then on a changed row keeps the embedding of its former text. xmin shows which
-- rows have changed: before the triggers are dropped, the comment of the embedding gets the key KEPT_UNTIL,
-- the first transaction that may have written without them. Segments have the hash of the text that they were
-- made of.

CREATE FUNCTION ml_rag._note_kept() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT SET lock_timeout = '2s' AS $$
-- purpose: KEPT_UNTIL=<system>.<database>.<transaction> in the markers of tables whose vectorizer may be
-- about to go
-- It is not known what is dropped, if anything: a mark that is older than the loss is as good, only more rows
-- are embedded again; without one all are. So who locks a table of theirs does not hold up the statement,
-- which need not be about it, and one's own tables come first.
-- Writes: the comments of embeddings
DECLARE
  _one record;
BEGIN
  IF current_query() !~* 'ml_rag'
    OR NOT (SELECT pg_has_role(e.extowner, 'USAGE') FROM pg_extension AS e WHERE e.extname = 'ml_rag') THEN
    RETURN;
  END IF;
  FOR _one IN
    SELECT c.oid, d.description AS comment,
      (SELECT s.system_identifier FROM pg_control_system() AS s) AS system,
      (SELECT b.oid FROM pg_database AS b WHERE b.datname = current_database()) AS database
    FROM pg_class AS c
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attname = 'segment_embedding' AND NOT a.attisdropped
    JOIN pg_description AS d ON d.classoid = 'pg_class'::regclass AND d.objoid = c.oid
      AND d.objsubid = a.attnum
    WHERE ml_rag._marked_model(d.description) IS NOT NULL
      AND ml_rag._has_vectorizer(c.oid)
      -- on all the time, in all partitions
      AND 'A' = ALL (SELECT t.tgenabled FROM pg_trigger AS t
        JOIN unnest(ml_rag._parts(c.oid)) AS p (oid) ON p.oid = t.tgrelid
                     WHERE t.tgfoid = 'ml_rag._empty_embedding()'::regprocedure)
    ORDER BY c.relowner <> quote_ident(current_user)::regrole, c.oid
  LOOP
    BEGIN
      EXECUTE format('COMMENT ON COLUMN %s.segment_embedding IS %L', ml_rag._full_name(_one.oid::regclass),
        ml_rag._mark_keys(_one.comment, jsonb_build_object('KEPT_UNTIL',
          concat_ws('.', _one.system, _one.database, pg_snapshot_xmin(pg_current_snapshot())))));
    EXCEPTION WHEN lock_not_available THEN
      PERFORM set_config('lock_timeout', '1ms', true);
    WHEN OTHERS THEN
      -- dropped or renamed meanwhile, and an index may have the name by now
      NULL;
    END;
  END LOOP;
END
$$;
CREATE EVENT TRIGGER ml_rag_note_kept ON ddl_command_start
  WHEN TAG IN ('DROP EXTENSION', 'DROP SCHEMA', 'DROP OWNED')
EXECUTE FUNCTION ml_rag._note_kept();

CREATE FUNCTION ml_rag._former_vectorizers() RETURNS SETOF regclass
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: the tables that had a vectorizer and have none: the index of the rows that wait is there. Of the
-- caller's
-- Reads: the catalog
BEGIN
  RETURN QUERY
    SELECT f.relation::regclass
    FROM (
      SELECT coalesce((
          -- of a table of segments the source, see ml_rag._segment_table
          SELECT d.refobjid FROM pg_policy AS p
          JOIN pg_depend AS f ON f.classid = 'pg_policy'::regclass AND f.objid = p.oid
            AND f.refclassid = 'pg_proc'::regclass
          JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = f.refobjid
            AND d.refclassid = 'pg_class'::regclass
          WHERE p.polrelid = c.oid AND p.polname = 'ml_rag_source' AND d.refobjid <> c.oid LIMIT 1),
            c.oid) AS relation
      FROM pg_index AS x JOIN pg_class AS c ON c.oid = x.indrelid
      JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attname = 'segment_embedding' AND NOT a.attisdropped
      WHERE x.indpred IS NOT NULL AND NOT c.relispartition
        AND pg_get_expr(x.indpred, x.indrelid) = '(segment_embedding IS NULL)'
        AND ml_rag._marked_model(col_description(c.oid, a.attnum)) IS NOT NULL) AS f
    JOIN pg_class AS c ON c.oid = f.relation AND pg_has_role(c.relowner, 'USAGE')
    WHERE NOT ml_rag._has_vectorizer(f.relation) AND ml_rag._has_texts(f.relation)
    GROUP BY f.relation ORDER BY f.relation;
END
$$;

CREATE FUNCTION ml_rag._check_former(relation regclass, store regclass, segment text, document_name text,
  type text, model text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: that what is left is what would be made now. Constraints have both expressions written alike
-- Writes: the table's definition, as the caller; it is as before afterwards
DECLARE
  _relation text := ml_rag._relation_name(relation);
  _former record;
  _found text;
  _differs text;
BEGIN
  SELECT max(d.source) FILTER (WHERE d.attname = 'segment') AS segment,
    max(d.source) FILTER (WHERE d.attname = 'document_name') AS document_name INTO _former
  FROM (SELECT a.attname, pg_get_expr(d.adbin, d.adrelid) AS source
    FROM pg_attribute AS a JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = relation AND NOT a.attisdropped) AS d;
  EXECUTE format('ALTER TABLE %s ADD CONSTRAINT ml_rag_now CHECK (ARRAY[%s, %s] IS NULL) NOT VALID,'
    ' ADD CONSTRAINT ml_rag_before CHECK (ARRAY[%s, %s] IS NULL) NOT VALID', _relation, segment,
    document_name, _former.segment, _former.document_name);
  IF 1 < (SELECT count(DISTINCT pg_get_constraintdef(c.oid)) FROM pg_constraint AS c
          WHERE c.conrelid = relation AND c.conname IN ('ml_rag_now', 'ml_rag_before')) THEN
    _differs := format('segment is %s, document_name is %s', _former.segment, _former.document_name);
  END IF;
  EXECUTE format('ALTER TABLE %s DROP CONSTRAINT ml_rag_now, DROP CONSTRAINT ml_rag_before', _relation);
  SELECT format('%s of model %s', format_type(a.atttypid, a.atttypmod),
    ml_rag._marked_model(col_description(a.attrelid, a.attnum)))
  INTO _found FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = 'segment_embedding'
    AND NOT a.attisdropped;
  IF store IS DISTINCT FROM relation AND EXISTS (
    SELECT FROM pg_attribute AS a WHERE a.attrelid = relation AND a.attname = 'segment_embedding'
      AND NOT a.attisdropped) THEN
    _differs := 'the embeddings are in the table';
  ELSIF store = relation AND ml_rag._segment_table(relation) IS NOT NULL THEN
    _differs := format('the segments are in table %s', ml_rag._segment_table(relation));
  ELSIF _differs IS NULL AND _found <> format('%s of model %s', type, model) THEN
    _differs := format('segment_embedding is %s', _found);
  END IF;
  IF _differs IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42701',
      MESSAGE = format('table "%s" has the columns of a former vectorizer', relation),
      DETAIL = format('They are of other options: %s.', _differs),
      HINT = concat('With the same options and model they are taken back. To embed all rows anew, first: ',
        CASE WHEN relation IN (SELECT ml_rag._former_vectorizers()) THEN
          format('SELECT ml_rag.drop_vectorizer(%L);', relation)
        ELSE format('drop columns segment, document_name and segment_embedding of %s.', _relation) END);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._drop_queue(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: drop the index of the rows that wait  Writes: the table's definition, as the caller
DECLARE
  _index regclass;
BEGIN
  FOR _index IN SELECT x.indexrelid FROM pg_index AS x
                WHERE x.indrelid = store AND pg_get_expr(x.indpred,
                  x.indrelid) = '(segment_embedding IS NULL)' LOOP
    EXECUTE format('DROP INDEX %s', _index);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._take_back_column(relation regclass, type text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: empty the embeddings that may be of a former text: those written since KEPT_UNTIL, or all.
-- Transactions have numbers of 32 bits here: an old row can be taken for a new one, never the other way
-- round.
-- Reads: the catalog  Writes: the table, as the caller
DECLARE
  _embedding record;
  _kept bigint;
  _changed text := 'true';
  _part oid;
BEGIN
  SELECT a.attnum, regexp_match(ml_rag._marked_key(col_description(a.attrelid, a.attnum), 'KEPT_UNTIL'),
      format('^%s\.%s\.(\d{1,18})$', s.system_identifier, b.oid)) AS kept
  INTO _embedding
  FROM pg_attribute AS a, pg_control_system() AS s, pg_database AS b
  WHERE a.attrelid = relation AND a.attname = 'segment_embedding' AND NOT a.attisdropped
    AND b.datname = current_database();
  _kept := _embedding.kept[1];
  IF (ml_rag._embedding_trigger(relation, _embedding.attnum)).is_on THEN
    _changed := 'false';
  ELSIF pg_snapshot_xmax(pg_current_snapshot())::text::bigint - _kept BETWEEN 0 AND 2000000000
    -- whose workers count transactions by themselves
    AND NOT ml_rag._is_distributed(relation) THEN
    _changed := format('(t.xmin::text::bigint - %s + 4294967296) %% 4294967296 < 2147483648',
      _kept % 4294967296);
  END IF;
  IF NOT EXISTS (SELECT FROM pg_attribute AS a
                 WHERE a.attrelid = relation AND a.attname = 'segment_embedding' AND NOT a.attisdropped) THEN
    EXECUTE format('ALTER TABLE %s ADD COLUMN segment_embedding %s', ml_rag._relation_name(relation), type);
  END IF;
  EXECUTE format('DROP TRIGGER IF EXISTS "~ml_rag_segment_embedding" ON %s', ml_rag._relation_name(relation));
  FOR _part IN SELECT c.oid FROM pg_class AS c
    WHERE c.oid = ANY (ml_rag._parts(relation)) AND c.relkind = 'r' LOOP
    EXECUTE
      format('UPDATE ONLY %s AS t SET segment_embedding = NULL WHERE t.segment_embedding IS NOT NULL AND %s',
      ml_rag._relation_name(_part), _changed);
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._take_back_segments(relation regclass, segments regclass, chunking jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the segments of rows that are gone or have another text, or all where texts were split in another
-- way, make place for one that waits
-- Writes: the table of segments, as the caller
DECLARE
  _segments text := ml_rag._relation_name(segments);
  _key name[] := (ml_rag._primary_key(relation)).key;
  _is_of text := ml_rag._same_key('s', (ml_rag._source_key(segments)).key, 'n', _key);
  _of text := format('%s AS n WHERE %s', ml_rag._relation_name(relation), _is_of);
BEGIN
  PERFORM ml_rag._drop_triggers(relation, '^ml_rag_segments_');
  EXECUTE format('DELETE FROM %s AS s WHERE %s OR NOT EXISTS (SELECT FROM %s'
    ' AND s.text_hash = hashtextextended(coalesce(n.segment, '''') COLLATE "C", 0))', _segments,
    (obj_description(segments, 'pg_class') IS DISTINCT FROM ml_rag._segments_comment(chunking))::text, _of);
  EXECUTE
    format('UPDATE %s AS s SET document_name = left(n.document_name, 10000) FROM %s'
      ' AND s.document_name COLLATE "C" <> left(n.document_name, 10000)', _segments, _of);
  EXECUTE format('%s WHERE NOT EXISTS (SELECT FROM %s AS s WHERE %s)',
    (ml_rag._segment_statements(relation, 'ALL'))[1], _segments,
    _is_of);
  EXECUTE format('COMMENT ON TABLE %s IS %L', _segments, ml_rag._segments_comment(chunking));
END
$$;
