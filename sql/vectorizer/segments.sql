-- segments: the table of segments of a vectorizer whose destination is "table", for texts longer than the
-- model takes in.
--
-- The source gets the generated columns segment and document_name; each of its rows has rows in the table of
-- segments, by its key. One that waits for a run has a single row there, with its whole text and no
-- embedding, so that it is found by its words; a run puts the segments in its place. Triggers of the source
-- do what a statement did to it to the segments too, in the same transaction. They run a function that the
-- owner of the source owns, since a role that writes the source may not write the segments otherwise; what it
-- executes is made here. A policy shows the segments of those rows of the source that the reader sees. Its
-- function reads the source, and the table of segments is found by it: it follows when either table is
-- renamed.

CREATE FUNCTION ml_rag._source_key(segments regclass, OUT key name[], OUT types text[])
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the columns of a table of segments that hold the key of the source, and their types: all of its
-- own key but the number
BEGIN
  SELECT k.key[:cardinality(k.key) - 1], k.types[:cardinality(k.key) - 1] INTO key, types
  FROM ml_rag._primary_key(segments) AS k;
END
$$;

CREATE FUNCTION ml_rag._row_metadata(relation regclass, segments regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: SQL of what a row n of the source gives to the metadata of its segments: columns that the marker
-- names; null in place of a long value, as each of its segments would have it, such as the whole of the text
-- that they are parts of
-- Reads: the catalog
BEGIN
  RETURN (
    SELECT format('jsonb_build_object(%s)', string_agg(format(
      '%1$L, CASE WHEN octet_length(n.%1$I::text) <= 10000 THEN ml_rag._as_jsonb(n.%1$I) END', c.name), ', '
      ORDER BY c.place))
    FROM pg_attribute AS e
    CROSS JOIN string_to_table(ml_rag._marked_key(col_description(segments, e.attnum), 'ROW'), '+')
      WITH ORDINALITY AS c (name, place)
    JOIN pg_attribute AS a ON a.attrelid = relation AND a.attname = c.name AND a.attnum > 0
      AND NOT a.attisdropped
    WHERE e.attrelid = segments AND e.attname = 'segment_embedding');
END
$$;

CREATE FUNCTION ml_rag._segment_statements(relation regclass, operation text) RETURNS text[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: what the trigger function executes after a statement, whose rows are ml_rag_old and ml_rag_new;
-- operation KEY: where the key of a row has changed, $1 and $2 are the row before and after; ALL: all rows of
-- the source. Where the first statement finds nothing, the others have nothing to do.
-- Rows of the statement tell which keys to look at, and the source what they are by now: a trigger of the
-- table can have changed a row again, in a statement whose own triggers have run before, and one statement
-- can insert a key before the row that had it is taken away. Where row-level security hides rows of the
-- source from its owner they are what the statement has made of them.
-- A run may just put segments in the place of a row that waits: the first statement waits for its end, and
-- the next ones see what it has written. It also locks the segments that a new key has: above READ COMMITTED
-- they can be of a row that another transaction has taken away meanwhile, and then the statement fails.
-- document_id is the key where that is one integer, else a hash of it.
DECLARE
  _table regclass := ml_rag._segment_table(relation, true);
  _segments text;
  _source record := ml_rag._primary_key(relation);
  _keys record;
  _hash CONSTANT text := 'hashtextextended(coalesce(n.segment, '''') COLLATE "C", 0)';
  _metadata text := ml_rag._row_metadata(relation, _table);
  -- each segment has it, as it has the metadata
  _name CONSTANT text := 'left(n.document_name, 10000)';
  _other_name text :=
    format('(s.document_name COLLATE "C" <> %s COLLATE "C" OR s.metadata <> s.metadata || %s)', _name,
    _metadata);
  _insert text;
  _stale text;
  _missing text;
  _written CONSTANT text := CASE operation WHEN 'DELETE' THEN 'ml_rag_old' ELSE 'ml_rag_new' END;
  -- the relation that has rows as they are by now, n, and the condition that n has the key of o, a row of the
  -- statement
  _now text;
  _same text := ml_rag._same_key('n', _source.key, 'o', _source.key);
  _rows CONSTANT text := '(SELECT ($1).*) AS o, (SELECT ($2).*) AS n';
BEGIN
  -- no trigger comes between the check and the statements. No weaker lock comes before: a call that drops
  -- a node group keeps writers out, and then waits for readers
  PERFORM ml_rag._hold(ARRAY[_table::oid], operation <> 'ALL');
  PERFORM ml_rag._refuse_foreign_schema(_table);
  PERFORM ml_rag._refuse_foreign_schema(relation);
  IF operation <> 'ALL' THEN
    -- nor a trigger of what changes with the segments, where others than its owner may make one: a writer
    -- to these waits until their indexes are built
    PERFORM ml_rag._hold(ARRAY(
      SELECT c.oid FROM unnest(ml_rag._changed_with(_table)) AS t (oid) JOIN pg_class AS c ON c.oid = t.oid
      WHERE c.oid <> _table AND EXISTS (
        SELECT FROM (SELECT c.relacl AS acl
          UNION ALL SELECT n.attacl FROM pg_attribute AS n WHERE n.attrelid = c.oid) AS g
        CROSS JOIN LATERAL aclexplode(g.acl) AS a
        WHERE a.privilege_type IN ('TRIGGER', 'REFERENCES') AND a.grantee <> c.relowner)
      ORDER BY c.oid), true);
    PERFORM ml_rag._refuse_foreign_trigger(relation, _table);
  END IF;
  IF operation = 'TRUNCATE' THEN
    -- with its node groups, whose keys refer to it; their locks are waited for before the names are looked at
    PERFORM ml_rag._hold(ml_rag._node_tables(_table));
    PERFORM ml_rag._refuse_foreign_schema(t) FROM unnest(ml_rag._node_tables(_table)) AS t;
    RETURN (SELECT ARRAY['TRUNCATE ' || string_agg('ONLY ' || ml_rag._full_name(t), ', ')]
      FROM unnest(ml_rag._node_tables(_table)) AS t);
  END IF;
  _segments := 'ONLY ' || ml_rag._full_name(_table);
  -- the key of the segments is that of the source, and the number
  SELECT string_agg(quote_ident(u.key), ', ' ORDER BY u.place) AS segments,
    string_agg(format('n.%I', u.source), ', ' ORDER BY u.place) AS source,
    string_agg(format('%I = n.%I', u.key, u.source), ', ') AS set,
    string_agg(format('s.%I = n.%I', u.key, u.source), ' AND ') AS new,
    string_agg(format('s.%I = o.%I', u.key, u.source), ' AND ') AS old,
    CASE WHEN _source.types <@ '{smallint,integer,bigint}' AND cardinality(_source.types) = 1 THEN
      min(format('n.%I', u.source))
      -- another key of the same one cannot be reckoned, as that of hashtextextended can
      ELSE format('(''x'' || left(md5(%s), 16))::bit(64)::bigint', ml_rag._key_text('n', _source.key))
      END AS document_id
  INTO _keys
  FROM unnest((ml_rag._primary_key(_table)).key, _source.key) WITH ORDINALITY AS u (key, source, place)
  WHERE u.source IS NOT NULL;
  _now := CASE WHEN NOT row_security_active(relation) THEN 'ONLY ' || ml_rag._full_name(relation)
    ELSE format('(SELECT * FROM %s WHERE %L)', _written, operation <> 'DELETE') END;
  _insert := format('INSERT INTO %s AS s (%s, document_id, document_name, metadata, segment_number, segment,'
    ' text_hash) SELECT %s, %s, %s, %s, 1, n.segment, %s', ml_rag._full_name(_table), _keys.segments,
    _keys.source, _keys.document_id, _name, _metadata, _hash);
  _stale := format('%s AS o LEFT JOIN %s AS n ON %s WHERE %s AND (n.%I IS NULL OR s.text_hash <> %s',
    _written, _now, _same, _keys.old, _source.key[1], _hash);
  _missing := format('FROM %s AS o JOIN %s AS n ON %s WHERE NOT EXISTS (SELECT FROM %s AS s WHERE %s)',
    _written, _now, _same, _segments, _keys.new);
  RETURN CASE
    WHEN operation = 'ALL' THEN ARRAY[format('%s FROM %s AS n', _insert, ml_rag._full_name(relation))]
    WHEN operation IN ('INSERT', 'UPDATE', 'DELETE') THEN ARRAY[
      format('WITH locked AS MATERIALIZED (SELECT FROM %s AS s, %s OR %s OR %s) FOR UPDATE OF s)'
        ' SELECT FROM locked UNION ALL SELECT %s', _segments, _stale, _other_name,
        (operation = 'INSERT')::text, _missing),
      format('DELETE FROM %s AS s USING %s)', _segments, _stale),
      format('UPDATE %s AS s SET document_name = %s, metadata = s.metadata || %s'
        ' FROM %s AS o JOIN %s AS n ON %s WHERE %s AND %s', _segments, _name, _metadata, _written, _now,
        _same, _keys.new, _other_name),
      concat(_insert, ' ', _missing)]
    WHEN operation = 'KEY' THEN ARRAY[
      format('SELECT FROM %s AS s, %s WHERE %s OR %s FOR UPDATE OF s', _segments, _rows, _keys.old,
        _keys.new),
      -- a statement within this one has made those of the new key
      format('DELETE FROM %s AS s USING %s WHERE %s AND EXISTS (SELECT FROM %1$s AS s WHERE %4$s)',
        _segments, _rows, _keys.old, _keys.new),
      format('UPDATE %s AS s SET %s, document_id = %s FROM %s WHERE %s', _segments, _keys.set,
        _keys.document_id, _rows, _keys.old)] END;
END
$$;

CREATE FUNCTION ml_rag._segments_comment(chunking jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the comment of a table of segments: how its texts are split
BEGIN
  RETURN format('segments of the rows of another table, kept by its triggers and ml_rag.run_vectorizer; '
    'chunking: %s', chunking);
END
$$;

CREATE FUNCTION ml_rag._make_segments(relation regclass, type text, chunking jsonb) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the table of segments, with a row that waits for each of the source's; who may read all of the
-- source may read it
-- The policy reads the columns of the text, so that it takes the privilege to read them in the source.
-- Writes: a new table, as the caller
DECLARE
  _key record := ml_rag._primary_key(relation);
  _columns text := (SELECT string_agg(quote_ident(('source_' || k)::name), ', ' ORDER BY place)
    FROM unnest(_key.key) WITH ORDINALITY AS u (k, place));
  _source record;
  _name text;
  _grantee oid;
  _table text;
BEGIN
  SELECT n.nspname, ml_rag._derived_name(c.relname, '_segments') AS name, c.relkind,
    c.relowner::regrole AS owner, c.relpersistence, c.relacl INTO _source
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation;
  _name := format('%I.%I', _source.nspname, _source.name);
  IF _source.relkind = 'p' OR EXISTS (
    SELECT FROM unnest(_key.types) AS t
    WHERE t !~ '^(smallint|integer|bigint|numeric(\(\d+,\d+\))?|oid|text|character varying(\(\d+\))?|uuid)$')
      THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('"%s" cannot have a table of segments', relation),
      DETAIL = CASE _source.relkind WHEN 'p' THEN 'It is partitioned: changes made directly in a partition '
        'would be missed.'
        ELSE format('Its primary key is of type %s.', array_to_string(_key.types, ', ')) END,
      HINT = CASE _source.relkind WHEN 'p' THEN '"destination": "column" works for partitioned tables.'
        ELSE 'A key may be of integer, numeric, text and uuid columns.' END;
  ELSIF to_regclass(_name) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P07',
      MESSAGE = format('relation "%s" exists already', to_regclass(_name)),
      DETAIL = 'The table of segments has that name.',
      HINT = format('Rename the table: ALTER TABLE %s RENAME TO …; '
        'or drop it if nothing needs it.', _name);
  END IF;
  EXECUTE format('CREATE %s TABLE %s (%s, document_id bigint NOT NULL, document_name text NOT NULL,'
    ' metadata jsonb NOT NULL DEFAULT ''{}'', segment_number integer NOT NULL, segment text, text_hash '
    'bigint NOT NULL,'
    ' segment_embedding %s, PRIMARY KEY (%s, segment_number))',
    CASE _source.relpersistence WHEN 'u' THEN 'UNLOGGED' END, _name,
    (SELECT string_agg(format('%I %s NOT NULL', ('source_' || u.k)::name, u.type), ', ' ORDER BY u.place)
     FROM unnest(_key.key, _key.types) WITH ORDINALITY AS u (k, type, place)), type, _columns);
  EXECUTE format('ALTER TABLE %s OWNER TO %s', _name, _source.owner);
  EXECUTE format('COMMENT ON TABLE %s IS %L', _name, ml_rag._segments_comment(chunking));
  -- what searches ask of neighbouring segments
  EXECUTE format('CREATE INDEX ON %s (document_id, segment_number)', _name);
  -- segments are not looked up by their text, and estimates, which EXPLAIN shows to every role, would reveal
  -- hidden segments
  EXECUTE format('ALTER TABLE %s ALTER segment SET STATISTICS 0, ALTER text_hash SET STATISTICS 0', _name);
  EXECUTE format('CREATE POLICY ml_rag_source ON %s FOR SELECT USING (%s(%s))', _name,
    ml_rag._make_visible(_name::regclass, _key.types, format('EXISTS (SELECT n.segment, n.document_name FROM '
      '%s AS n WHERE %s)',
      ml_rag._full_name(relation), (SELECT string_agg(format('n.%I = $%s', k, place), ' AND ' ORDER BY place)
                                    FROM unnest(_key.key) WITH ORDINALITY AS u (k, place)))), _columns);
  FOR _grantee IN SELECT DISTINCT a.grantee FROM aclexplode(_source.relacl) AS a
    WHERE a.privilege_type = 'SELECT' LOOP
    EXECUTE format('GRANT SELECT ON %s TO %s', _name,
      CASE _grantee WHEN 0 THEN 'PUBLIC' ELSE _grantee::regrole::text END);
  END LOOP;
  EXECUTE (ml_rag._segment_statements(relation, 'ALL'))[1];
  EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', _name);
  RETURN _name::regclass;
EXCEPTION WHEN program_limit_exceeded THEN
  GET STACKED DIAGNOSTICS _table = TABLE_NAME;
  IF _table = _source.name THEN
    PERFORM ml_rag._raise_of_long_key(relation, _key.key);
  END IF;
  RAISE;
END
$$;

CREATE FUNCTION ml_rag._function_name(relation regclass, name text) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a name for the function that the triggers of a table run, with its schema: this one, or the next
-- that is free. It never replaces another function, whose owner may have granted others to execute it. What a
-- vectorizer of a dropped table has left is dropped.
-- Writes: functions, as the caller
DECLARE
  _owner oid;
  _schema name;
  _name text;
  _function regprocedure;
BEGIN
  SELECT c.relowner, n.nspname INTO _owner, _schema
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = relation;
  FOR _number IN 0..1000000 LOOP
    _name := format('%I.%I', _schema, CASE _number WHEN 0 THEN name ELSE
      (SELECT concat(max(left(name, i)), _number) FROM generate_series(1, 63) AS i
       WHERE octet_length(left(name, i)) <= 56) END);
    _function := to_regprocedure(_name || '()');
    IF EXISTS (SELECT FROM pg_proc AS p WHERE p.oid = _function AND p.proowner = _owner
               AND strpos(p.prosrc, '-- made by ml_rag.create_vectorizer:') > 0
               AND NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgfoid = p.oid)) THEN
      EXECUTE format('DROP FUNCTION %s', _function);
      _function := NULL;
    END IF;
    EXIT WHEN _function IS NULL;
  END LOOP;
  RETURN _name;
END
$$;

CREATE FUNCTION ml_rag._keep_segments(relation regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET citus.enable_ddl_propagation = off AS $$
-- purpose: the triggers of the source, and the function that they run, which belongs to its owner
-- No other role may make triggers of it: they would write into the table of segments. Citus does not make it
-- on its workers, too.
-- Writes: the table's definition and a new function, as the caller
DECLARE
  _relation text := ml_rag._full_name(relation);
  _owner regrole := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = relation);
  _function text := ml_rag._function_name(relation, (
    SELECT c.relname FROM pg_class AS c WHERE c.oid = ml_rag._segment_table(relation)));
  _key name[] := (ml_rag._primary_key(relation)).key;
  _event text;
BEGIN
  EXECUTE format($sql$
    CREATE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog,
      pg_temp AS $body$
    -- made by ml_rag.create_vectorizer: what a statement has done to a table, done to its segments
    DECLARE
      _statement text;
      _n bigint;
      _is_first boolean := true;
    BEGIN
      -- after DROP EXTENSION writes continue, and no other role can make an extension of the name
      IF NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'ml_rag') THEN
        RETURN NULL;
      END IF;
      FOREACH _statement IN ARRAY ml_rag._segment_statements(TG_RELID,
        CASE TG_LEVEL WHEN 'ROW' THEN 'KEY' ELSE TG_OP END) LOOP
        IF TG_LEVEL = 'ROW' THEN
          EXECUTE _statement USING OLD, NEW;
        ELSE
          EXECUTE _statement;
        END IF;
        GET DIAGNOSTICS _n = ROW_COUNT;
        EXIT WHEN _n = 0 AND _is_first;
        _is_first := false;
      END LOOP;
      RETURN NULL;
    END
    $body$
    $sql$, _function);
  EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC', _function);
  EXECUTE format('ALTER FUNCTION %s() OWNER TO %s', _function, _owner);
  FOR _event IN SELECT unnest('{INSERT,UPDATE,DELETE,TRUNCATE}'::text[]) LOOP
    EXECUTE format('CREATE TRIGGER %I AFTER %s ON %s %s FOR EACH STATEMENT EXECUTE FUNCTION %s()',
      'ml_rag_segments_' || lower(_event), _event, _relation, CASE _event
        WHEN 'INSERT' THEN 'REFERENCING NEW TABLE AS ml_rag_new'
        WHEN 'DELETE' THEN 'REFERENCING OLD TABLE AS ml_rag_old'
        WHEN 'UPDATE' THEN 'REFERENCING OLD TABLE AS ml_rag_old NEW TABLE AS ml_rag_new'
        ELSE '' END, _function);
  END LOOP;
  EXECUTE
    format('CREATE TRIGGER ml_rag_segments_key AFTER UPDATE ON %s FOR EACH ROW WHEN (%s) EXECUTE FUNCTION '
      '%s()', _relation,
    (SELECT string_agg(format('OLD.%1$I::text COLLATE "C" <> NEW.%1$I::text COLLATE "C"', k), ' OR ')
      FROM unnest(_key) AS k),
    _function);
END
$$;

CREATE FUNCTION ml_rag._drop_triggers(relation regclass, pattern text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: drop triggers of a table by their names, and the functions of the table's owner that they run and
-- that ml_rag has made: a role with TRIGGER can make one of such a name that runs another
-- Writes: the table's definition, as the caller
DECLARE
  _functions regprocedure[] := ARRAY(
    SELECT DISTINCT t.tgfoid FROM pg_trigger AS t
    JOIN pg_class AS c ON c.oid = t.tgrelid JOIN pg_proc AS p ON p.oid = t.tgfoid AND p.proowner = c.relowner
    WHERE t.tgrelid = relation AND t.tgname ~ pattern AND NOT t.tgisinternal
      AND strpos(p.prosrc, '-- made by ml_rag.create_vectorizer:') > 0);
  _trigger name;
  _function regprocedure;
BEGIN
  FOR _trigger IN SELECT t.tgname FROM pg_trigger AS t
                  WHERE t.tgrelid = relation AND t.tgname ~ pattern AND NOT t.tgisinternal LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', _trigger, ml_rag._full_name(relation));
  END LOOP;
  FOREACH _function IN ARRAY _functions LOOP
    EXECUTE format('DROP FUNCTION %s', _function);
  END LOOP;
END
$$;
