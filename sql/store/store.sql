-- store: vector stores as tables: make, check, write, index. store/load fills them.

CREATE FUNCTION ml_rag._refuse_untrusted(store oid) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: that a table to load into, whose schema the call does not name, is of roles whose code may run
-- with the caller's rights, until the end of the transaction
BEGIN
  IF NOT ml_rag._hold_trusted(ARRAY[store]) THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('table "%s" is not trusted', store::regclass),
      DETAIL = concat_ws(' ', ml_rag._why_untrusted(store),
        'A role that you do not trust could read what is loaded, and run code with your rights.'),
      HINT = format('If the table is meant, name it with its schema, which is %I.',
        (SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
          WHERE c.oid = store));
  END IF;
END
$$;

CREATE FUNCTION ml_rag._store_name(options jsonb, default_name text, path name[], OUT schema_name name,
  OUT table_name name)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: which table: the options, else the first in the caller's search_path, else where the caller may
-- create it
-- A name without its schema is not a sign of trust: documents are not written to a table of a role whose code
-- the caller would not run, which could be of any name, have triggers, and be readable for its owner; nor to
-- one with such a partition, or in such a role's schema.
BEGIN
  table_name := coalesce(options ->> 'table_name', default_name);
  IF octet_length(coalesce(options ->> 'table_name', '')) > 63 THEN
    PERFORM ml_rag._bad_option('table_name', options -> 'table_name', 'at most 63 bytes');
  END IF;
  IF strpos(options ->> 'table_name', '.') > 0 AND NOT options ? 'schema_name'
    AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.relname = _store_name.table_name) THEN
    PERFORM ml_rag._bad_option('table_name', options -> 'table_name', 'the name of a table alone',
      'Its schema goes into "schema_name"; with that given, a name may hold a dot.');
  END IF;
  IF options ? 'schema_name' THEN
    SELECT n.nspname INTO schema_name FROM pg_namespace AS n WHERE n.nspname = options ->> 'schema_name';
    IF NOT FOUND THEN
      PERFORM ml_rag._bad_option('schema_name', options -> 'schema_name', 'a schema that exists',
        'CREATE SCHEMA makes one.');
    END IF;
    RETURN;
  END IF;
  SELECT p.entry INTO schema_name FROM unnest(path) WITH ORDINALITY AS p (entry, place)
  JOIN pg_namespace AS n ON n.nspname = p.entry
  LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = _store_name.table_name
  WHERE CASE WHEN c.oid IS NOT NULL THEN ml_rag._are_trusted(ml_rag._read_with(c.oid))
             ELSE has_schema_privilege(n.oid, 'CREATE') AND n.nspname !~ '^pg_' END
  ORDER BY c.oid IS NULL, p.place LIMIT 1;
  IF NOT FOUND THEN
    PERFORM ml_rag._refuse_untrusted(c.oid) FROM unnest(path) WITH ORDINALITY AS p (entry, place)
    JOIN pg_namespace AS n ON n.nspname = p.entry
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = _store_name.table_name
    ORDER BY p.place LIMIT 1;
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'no schema to create the vector store in',
      DETAIL = format('The search_path is: %s.', coalesce(nullif(array_to_string(path, ', '), ''),
        'nothing')),
      HINT = format('In "schema_name", name a schema in which you may create tables, or have an '
        'administrator run: GRANT CREATE ON SCHEMA %I TO %I.',
        coalesce((SELECT p.entry FROM unnest(path) WITH ORDINALITY AS p (entry, place)
          JOIN pg_namespace AS n ON n.nspname = p.entry AND n.nspname !~ '^pg_'
          ORDER BY p.place LIMIT 1), 'public'), current_user);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_store(store regclass, embed_model_id text, OUT model_id text,
  OUT dimensions integer, OUT column_name name)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether documents can be loaded into a relation, and its default embedding; if embed_model_id is
-- null, the model is that of its marker
DECLARE
  _wrong text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = store) THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'vector store does not exist',
      DETAIL = coalesce('A table with OID ' || store::oid || ' does not exist.', 'The table is NULL.'),
      HINT = 'ml_rag.create_store and vector_store_load create one.';
  ELSIF (SELECT c.relkind NOT IN ('r', 'p') FROM pg_class AS c WHERE c.oid = store) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('relation "%s" is not a table', store);
  END IF;
  column_name := ml_rag._default_column(store);
  SELECT string_agg(format('%s %s', w.name, replace(w.types[1]::text, '@vector@.', '')), ', '
    ORDER BY w.place) INTO _wrong
  FROM (VALUES (1, 'document_name', '{text,varchar}'::regtype[]), (2, 'metadata', '{jsonb}'),
               (3, 'document_id', '{bigint,integer,numeric}'), (4, 'segment_number', '{integer,bigint}'),
               (5, 'segment', '{text,varchar}'),
               (6, column_name, ARRAY['@vector@.vector'::regtype, '@vector@.halfvec'::regtype])) AS w (place,
               name, types)
  WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname = w.name AND a.attnum > 0
                    AND NOT a.attisdropped AND a.atttypid = ANY (w.types));
  IF _wrong IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('table "%s" is not a vector store', store),
      DETAIL = format('Columns missing or of another type: %s.', _wrong),
      HINT = coalesce(ml_rag._segments_hint(store),
        CASE WHEN EXISTS (SELECT FROM pg_trigger AS t
            WHERE t.tgrelid = store AND t.tgname = 'ml_rag_vectorizer') THEN
          format('It has a vectorizer: INSERT rows and CALL ml_rag.run_vectorizer(%L), or name another '
            'table.', store) END,
        'In "table_name", name a table that does not exist yet; it is created with the right columns.');
  END IF;
  SELECT nullif(a.atttypmod, -1), ml_rag._marked_model(col_description(store, a.attnum))
  INTO dimensions, model_id
  FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = column_name;
  IF model_id IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('column "%s" of table "%s" has no comment that names its embedding model',
        column_name, store),
      HINT = format('Put the model''s id for …, and what the comment says already before it: '
        'COMMENT ON COLUMN %s.%I IS ''GENAI_OPTIONS=EMBED_MODEL_ID=…'';', store, column_name);
  ELSIF model_id <> embed_model_id THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('vector store "%s" holds vectors of another model', store),
      DETAIL = format('It holds vectors of %s; the call is for %s.', model_id, embed_model_id),
      HINT = 'Name another table in "table_name", or leave "embed_model_id" out.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._make_store(schema_name name, table_name name, model_id text, description text,
  language text, partitions integer DEFAULT NULL)
RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: an empty vector store, with its keyword index; partitions: by document, null for none
-- Writes: a new table, as the caller
DECLARE
  -- a first vector tells the dimensions, and whether the model works, before anything is made
  _dimensions integer := @vector@.vector_dims(ml_rag.embed('dimensions', model_id));
  _name text := format('%I.%I', schema_name, table_name);
  -- names that are cut at 63 bytes, and those of their array types, must not meet
  _prefix text := (SELECT max(left(table_name, i)) FROM generate_series(1, 63) AS i
    WHERE octet_length(left(table_name, i)) <= 50);
  _message text;
  _hint text;
BEGIN
  IF model_id ~ '[[:space:],;]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = 'model id cannot be used in the marker of a vector store',
      DETAIL = format('Model id %L; blanks, commas and semicolons end the marker.', model_id);
  END IF;
  EXECUTE format($sql$
    CREATE TABLE %s (
      document_name     text NOT NULL,
      metadata          jsonb NOT NULL,
      document_id       bigint NOT NULL,
      segment_number    integer NOT NULL,
      segment           text NOT NULL,
      segment_embedding @vector@.vector(%s) NOT NULL,
      PRIMARY KEY (document_id, segment_number)
    )%s$sql$, _name, _dimensions,
      CASE WHEN partitions IS NOT NULL THEN ' PARTITION BY HASH (document_id)' END);
  FOR _place IN 0..coalesce(partitions, 0) - 1 LOOP
    EXECUTE format('CREATE TABLE %I.%I PARTITION OF %s FOR VALUES WITH (MODULUS %s, REMAINDER %s)',
      schema_name, concat(_prefix, '_p', _place), _name, partitions, _place);
  END LOOP;
  -- segments are not looked up by their whole text, and estimates, which EXPLAIN shows to every role, would
  -- tell of hidden ones
  EXECUTE format('ALTER TABLE %s ALTER segment SET STATISTICS 0', _name);
  -- what refresh asks for each file, and what the filters on documents use
  EXECUTE format('CREATE INDEX ON %s (document_name)', _name);
  EXECUTE format('COMMENT ON COLUMN %s.segment_embedding IS %L', _name,
    'GENAI_OPTIONS=EMBED_MODEL_ID=' || model_id);
  IF description IS NOT NULL THEN
    EXECUTE format('COMMENT ON TABLE %s IS %L', _name, description);
  END IF;
  BEGIN
    PERFORM ml_rag._index_keywords(_name::regclass, jsonb_build_object('language', language), true);
  EXCEPTION WHEN object_not_in_prerequisite_state THEN
    -- a server without numpy can still be searched by vectors
    GET STACKED DIAGNOSTICS _message = MESSAGE_TEXT, _hint = PG_EXCEPTION_HINT;
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('%s gets no keyword index: %s', _name, _message),
      HINT = _hint;
  END;
  RETURN _name::regclass;
END
$$;

CREATE FUNCTION ml_rag._document_states(store regclass, names text[])
RETURNS TABLE (document_name text, metadata jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: which of the documents the store has, and the metadata of a segment of each  Reads: the store, as
-- the caller
BEGIN
  PERFORM ml_rag._hold(ARRAY[store::oid]);
  RETURN QUERY EXECUTE format(CASE WHEN ml_rag._is_distributed(store)
    -- Citus takes no LIMIT for each name
    THEN 'SELECT DISTINCT ON (s.document_name) s.document_name::text, s.metadata FROM %s AS s WHERE '
      's.document_name = ANY ($1)'
    ELSE 'SELECT u.name, t.metadata FROM unnest($1) AS u (name)'
      ' CROSS JOIN LATERAL (SELECT s.metadata FROM %s AS s WHERE s.document_name = u.name LIMIT 1) AS t' END,
        ml_rag._relation_name(store))
  USING names;
END
$$;

CREATE FUNCTION ml_rag._label_document(store oid, name text, given jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: add to the metadata of a document, whose keys are no longer those of its file
-- Writes: the store, as the caller
BEGIN
  PERFORM pg_advisory_xact_lock(ml_rag._store_key(store));
  PERFORM ml_rag._hold(ARRAY[store]);
  EXECUTE format($sql$
    UPDATE %s AS s SET metadata = coalesce(jsonb_set(s.metadata || $2, '{source,keys}',
      (s.metadata #> '{source,keys}') - ARRAY(SELECT jsonb_object_keys($2))), s.metadata || $2)
    WHERE s.document_name = $1$sql$, ml_rag._relation_name(store)) USING name, given;
END
$$;

CREATE FUNCTION ml_rag._own_columns(store oid)
RETURNS TABLE (name name, type text, is_unique boolean, fills_itself boolean)
LANGUAGE sql STABLE PARALLEL SAFE AS $$
-- purpose: the columns of a store that its owner has added, and that the caller may read and write
-- is_unique: segments of one document cannot share a value. fills_itself: by its default, such as nextval(…)
SELECT a.attname, ml_rag._type_name(a.atttypid, a.atttypmod),
  EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = $1 AND i.indisunique AND a.attnum = ANY (i.indkey)
    AND NOT (SELECT n.attnum FROM pg_attribute AS n WHERE n.attrelid = $1 AND n.attname = 'segment_number')
      = ANY (i.indkey)),
  a.attidentity = 'd' OR coalesce(strpos(pg_get_expr(d.adbin, $1), '(') > 0, false)
FROM pg_attribute AS a LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND a.attidentity <> 'a'
  AND a.attname NOT IN ('document_name', 'metadata', 'document_id', 'segment_number', 'segment')
  AND NOT EXISTS (SELECT FROM ml_rag._embeddings($1) AS e WHERE e.attnum = a.attnum)
  AND has_column_privilege($1, a.attnum, 'SELECT') AND has_column_privilege($1, a.attnum, 'INSERT')
$$;

CREATE FUNCTION ml_rag._replace_document(store oid, name text, load_keys text[],
  OUT id bigint, OUT kept jsonb, OUT lost jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT
-- values that are kept go through text
SET "DateStyle" = 'ISO' SET extra_float_digits = 1
AS $$
-- purpose: delete what the store has of a document; returns the id its new segments get, and what its owner
-- has added
-- kept: {"metadata", "columns"}, values that all its segments had; lost: the names of others, or null.
-- load_keys: keys of the metadata that every load writes; source.keys has those that came from the file.
-- A document keeps its id, a new one gets the next; the lock makes that safe. Where row-level security may
-- hide rows from the caller the next one may be taken: there the id is drawn from so many that another's is
-- hardly ever met, and backend/store.py tries again if it is. The id is drawn, too, if a row has the last,
-- which each role that may write rows can give to one.
-- Writes: the store, as the caller
DECLARE
  _relation text;
  _columns text;
  _values text;
  _most bigint;
  _is_taken boolean := true;
BEGIN
  PERFORM pg_advisory_xact_lock(ml_rag._store_key(store));
  PERFORM ml_rag._hold(ARRAY[store]);
  _relation := ml_rag._relation_name(store);
  SELECT string_agg(format(', s.%I::text AS c%s', c.name, c.place), '' ORDER BY c.place),
    string_agg(format('(%L, g.c%s, %L::boolean, %L::boolean)', c.name, c.place, c.is_unique, c.fills_itself),
      ', '
      ORDER BY c.place)
  INTO _columns, _values
  FROM (SELECT o.*, row_number() OVER () AS place FROM ml_rag._own_columns(store) AS o) AS c;
  EXECUTE format($sql$
    WITH gone AS (
      DELETE FROM %s AS s WHERE s.document_name = $1
      RETURNING s.document_id, CASE jsonb_typeof(s.metadata) WHEN 'object' THEN s.metadata END AS metadata,
        CASE jsonb_typeof(s.metadata #> '{source,keys}') WHEN 'array' THEN s.metadata #> '{source,keys}'
          ELSE '["page", "slide", "sheet", "section", "headings"]' END AS keys%s),
    own AS (
      SELECT v.kind, v.name, min(v.value COLLATE "C") AS value, bool_or(v.fills_itself) AS fills_itself,
        CASE WHEN count(v.value) = 0 THEN true ELSE NOT bool_or(v.is_unique)
          AND count(v.value) = (SELECT count(*) FROM gone)
          AND min(v.value COLLATE "C") = max(v.value COLLATE "C") END
          AS is_kept
      FROM gone AS g CROSS JOIN LATERAL (
        SELECT 'metadata' AS kind, e.key AS name, e.value::text AS value, false AS is_unique,
          false AS fills_itself
        FROM jsonb_each(g.metadata) AS e
        WHERE e.key <> ALL ($2)
          AND NOT EXISTS (SELECT FROM jsonb_array_elements_text(g.keys) AS k WHERE k = e.key)
        %s) AS v
      GROUP BY v.kind, v.name)
    SELECT (SELECT min(g.document_id) FROM gone AS g), jsonb_build_object(
        'metadata',
        coalesce((json_object_agg(o.name, o.value::json)
          FILTER (WHERE o.is_kept AND o.kind = 'metadata'))::jsonb, '{}'),
        'columns',
        coalesce(jsonb_object_agg(o.name, o.value) FILTER (WHERE o.is_kept AND o.kind = 'columns'), '{}')),
      nullif(jsonb_strip_nulls(jsonb_build_object(
        'metadata', jsonb_agg(o.name ORDER BY o.name COLLATE "C")
          FILTER (WHERE NOT o.is_kept AND o.kind = 'metadata'),
        'columns', jsonb_agg(o.name ORDER BY o.name COLLATE "C")
          FILTER (WHERE NOT o.is_kept AND NOT o.fills_itself AND o.kind = 'columns'))), '{}')
    FROM own AS o$sql$, _relation, _columns, ' UNION ALL SELECT ''columns'', c.* FROM (VALUES ' || _values
      || ') AS c (name, value, is_unique, fills_itself)')
  INTO id, kept, lost USING name, load_keys;
  IF id IS NOT NULL THEN
    RETURN;
  END IF;
  -- up to 2^53, which JSON's readers keep exactly
  _most := CASE (SELECT a.atttypid FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname = 'document_id')
    WHEN 'integer'::regtype THEN 2147483647 ELSE 9007199254740991 END;
  -- shards can hide rows, too
  IF NOT row_security_active(store) AND NOT EXISTS (SELECT FROM ml_rag._shards(store)) THEN
    EXECUTE format('SELECT CASE WHEN m.id < $1 THEN m.id::bigint + 1 END'
      ' FROM (SELECT coalesce(max(s.document_id), 0) FROM %s AS s) AS m (id)', _relation) INTO id USING _most;
    IF id IS NOT NULL THEN
      RETURN;
    END IF;
  END IF;
  WHILE _is_taken LOOP
    id := 1 + floor(random() * _most)::bigint;
    EXECUTE format('SELECT EXISTS (SELECT FROM %s AS s WHERE s.document_id = $1)', _relation)
      INTO _is_taken USING id;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._insert_segments(
  store oid, name text, id bigint, kept jsonb, first integer, metadata jsonb[], segments text[],
  columns name[], vectors text[]
) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT
-- values that are kept go through text
SET "DateStyle" = 'ISO' SET extra_float_digits = 1
AS $$
-- purpose: segments of one document, numbered from first; vectors: a row a column, as many as segments
-- kept: as _replace_document returns it
-- Writes: the store, as the caller
DECLARE
  _own record;
  _vectors record;
BEGIN
  SELECT string_agg(format(', %I', o.name), '' ORDER BY o.name) AS names,
    string_agg(format(', ($7 ->> %L)::%s', o.name, o.type), '' ORDER BY o.name) AS items
  INTO _own FROM ml_rag._own_columns(store) AS o WHERE kept -> 'columns' ? o.name::text;
  SELECT string_agg(format(', %I', u.c), '' ORDER BY u.i) AS names,
    string_agg(format(', $6[%s][u.place]::@vector@.vector', u.i), '' ORDER BY u.i) AS items
  INTO _vectors FROM unnest(columns) WITH ORDINALITY AS u (c, i);
  EXECUTE format($sql$
    INSERT INTO %s (document_name, metadata, document_id, segment_number, segment%s)
    SELECT $1, $8 || u.metadata, $2, $3 + u.place - 1, u.segment%s
    FROM unnest($4, $5) WITH ORDINALITY AS u (metadata, segment, place)
    $sql$, ml_rag._relation_name(store), concat(_vectors.names, _own.names),
      concat(_vectors.items, _own.items))
  USING name, id, first, metadata, segments, vectors, kept -> 'columns', kept -> 'metadata';
END
$$;

CREATE FUNCTION ml_rag.index_store(store regclass, distance_metric text DEFAULT NULL,
  index jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the approximate index of a store, where there is none for the metric, the keyword index tidied,
-- and fresh statistics. That no index is wanted is remembered in the marker, as INDEX=none
-- Writes: an index, as the caller
DECLARE
  _metric text;
  _column name;
  _comment text;
  _attnum smallint;
  _index record;
  _element record;
  _is_wanted boolean;
  _indexed boolean;
  _relation text;
BEGIN
  _metric := ml_rag.parse_options('vector_store_load',
    jsonb_build_object('distance_metric', distance_metric)) ->> 'distance_metric';
  PERFORM ml_rag._hold(ARRAY[store::oid]);
  _relation := ml_rag._relation_name(store);
  IF NOT pg_has_role(current_user, (SELECT c.relowner FROM pg_class AS c WHERE c.oid = store), 'USAGE') THEN
    RAISE NOTICE USING MESSAGE = format('index and statistics of "%s" are not updated', store),
      HINT = format('After many changes its owner should call SELECT ml_rag.index_store(%L);', _relation);
    RETURN;
  END IF;
  _column := ml_rag._default_column(store);
  SELECT a.attnum, col_description(a.attrelid, a.attnum) INTO _attnum, _comment
  FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = _column AND NOT a.attisdropped;
  IF _attnum IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('table "%s" is not a vector store', store),
      DETAIL = format('It has no column %I.', _column),
      HINT = coalesce(ml_rag._segments_hint(store),
        'ml_rag.create_vectorizer adds one to an ordinary table.');
  END IF;
  _index := ml_rag._index_definition(index, _metric, (
    SELECT t.typname FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = store AND a.attnum = _attnum));
  _element := ml_rag._index_element(store, _column, _index.class);
  _is_wanted := _index.method IS NOT NULL
    AND (index IS NOT NULL OR ml_rag._marked_key(_comment, 'INDEX') IS DISTINCT FROM 'none');
  IF index IS NOT NULL AND _comment <> ml_rag._mark_keys(_comment,
      jsonb_build_object('INDEX', CASE WHEN NOT _is_wanted THEN 'none' END)) THEN
    PERFORM ml_rag._mark(store, _column,
      jsonb_build_object('INDEX', CASE WHEN NOT _is_wanted THEN 'none' END));
  END IF;
  SELECT EXISTS (
    SELECT FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam AND m.amname IN ('hnsw', 'ivfflat')
    JOIN pg_opclass AS o ON o.oid = x.indclass[0]
    JOIN pg_namespace AS n ON n.oid = o.opcnamespace
    -- one of an expression may be one of the column
    WHERE x.indrelid = store AND x.indkey[0] IN (0, _attnum)
      AND (index IS NULL OR m.amname = _index.method)
      AND (index IS NULL AND distance_metric IS NULL
        OR format('%I.%I', n.nspname, o.opcname) = _index.class)) INTO _indexed;
  IF _indexed OR NOT _is_wanted THEN
    NULL;
  ELSIF _element.dimensions > _element.most THEN
    RAISE NOTICE USING MESSAGE = format('"%s" gets no index', store),
      DETAIL = format('Such an index is limited to %s dimensions; the column is %s(%s).', _element.most,
        _element.type, _element.dimensions),
      HINT = 'Searches scan the table. With "quantization" halfvec an index holds 4000 dimensions, with '
        'binary 64000.';
  ELSIF _element.dimensions > 0 THEN
    PERFORM ml_rag._create_index(store, _index.method, _element.element, _index.storage);
  ELSIF EXISTS (SELECT FROM pg_class AS c WHERE c.oid = store AND c.relkind IN ('r', 'p', 'm')) THEN
    RAISE NOTICE USING MESSAGE = format('"%s" gets no index', store),
      DETAIL = format('Column %I does not say how many dimensions its vectors have.', _column),
      HINT = format('Searches scan the table. ALTER TABLE %s ALTER COLUMN %I TYPE %s(…); then call this '
        'again.', _relation, _column, _element.type);
  END IF;
  PERFORM ml_rag.merge_keyword_index(store)
  WHERE EXISTS (SELECT FROM ml_rag._keyword_index(index_store.store));
  IF NOT EXISTS (SELECT FROM ml_rag._shards(store)) THEN
    EXECUTE format('ANALYZE %s', _relation);
  ELSE
    -- that would read all rows of the shards
    FOR _relation IN
      SELECT ml_rag._relation_name(p.relid) FROM pg_partition_tree(store) AS p
      JOIN pg_class AS c ON c.oid = p.relid WHERE c.relkind = 'r'
    LOOP
      EXECUTE format('ANALYZE %s', _relation);
    END LOOP;
  END IF;
@CATCH@
END
$$;
CREATE FUNCTION ml_rag.index_store(store regclass, distance_metric text, index text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the same with JSON as a text, the type that a literal is taken for: so that a bare word can be
-- distinguished from it
DECLARE
  _index jsonb;
BEGIN
  BEGIN
    _index := index::jsonb;
  EXCEPTION WHEN data_exception OR program_limit_exceeded OR statement_too_complex THEN
    PERFORM ml_rag._bad_option('index', to_jsonb(index), 'a JSON object',
      'The type of an index is one of its keys: SELECT ml_rag.index_store(''…'', ''COSINE'', ''{"type": '
      '"hnsw"}'').');
  END;
  PERFORM ml_rag.index_store(store, distance_metric, _index);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.index_store(regclass, text, text) IS
$$as the one above; index is the text of a JSON object$$;

COMMENT ON FUNCTION ml_rag.index_store(regclass, text, jsonb) IS
$$builds the approximate index of a vector store for a metric, unless it has one, and gathers statistics
distance_metric: a name in ml_rag.metric; if null, COSINE, and any approximate index that the store has is
enough. index: as option index of vector_store_load; if null, hnsw, unless the store was made with none. An
existing index of another kind stays: drop it if it is no longer wanted. vector_store_load calls it at its
end; call it after load_documents.
Errors: 22023, 42P01.$$;

CREATE FUNCTION ml_rag.create_store(name text, options jsonb DEFAULT NULL) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a vector store to load into, made unless it is there
DECLARE
  _options jsonb;
  _parts text[];
  _store regclass;
BEGIN
  _options := ml_rag._with_dimensions(ml_rag.parse_options('create_store', $2));
  BEGIN
    _parts := parse_ident(create_store.name);
  EXCEPTION WHEN invalid_parameter_value THEN
    NULL;
  END;
  IF cardinality(_parts) IS DISTINCT FROM 2 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid name of a vector store',
      DETAIL = format('Got %s; expected ''schema.table''.',
        coalesce(quote_literal(left(create_store.name, 200)), 'NULL')),
      HINT = 'Name its schema, too: SELECT ml_rag.create_store(''public.handbook'');';
  END IF;
  PERFORM ml_rag._store_name(jsonb_build_object('schema_name', _parts[1], 'table_name', _parts[2]),
    NULL, NULL);
  PERFORM pg_advisory_xact_lock(ml_rag._store_key(_parts[1]::name, _parts[2]::name));
  _store := to_regclass(format('%I.%I', _parts[1], _parts[2]));
  IF _store IS NULL THEN
    PERFORM ml_rag._check_writable('a vector store cannot be made');
    IF (ml_rag._index_definition(_options -> 'index', _options ->> 'distance_metric',
      'vector')).method = 'ivfflat' THEN
      PERFORM ml_rag._bad_option('index', _options -> 'index', 'hnsw or none, as the store is empty',
        'The lists of ivfflat are made from the rows: name it in vector_store_load, or in ml_rag.index_store '
        'after a load.');
    END IF;
    _store := ml_rag._make_store(_parts[1], _parts[2],
      coalesce(_options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id')),
      _options ->> 'description', _options ->> 'language', (_options -> 'partitions')::integer);
    PERFORM ml_rag.index_store(_store, _options ->> 'distance_metric', _options -> 'index')
    WHERE _options ? 'index';
  ELSE
    PERFORM ml_rag._check_store(_store, _options ->> 'embed_model_id');
  END IF;
  PERFORM ml_rag._serve(_store) WHERE (_options -> 'shard')::boolean;
  RETURN _store;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.create_store(text, jsonb) IS
$$creates an empty vector store, or checks the one that exists: ml_rag.create_store('public.handbook')
options: embed_model_id, dimensions (of models trained for it), description, language (of its keyword index),
index and distance_metric (of a new store), partitions,
shard (of one that is there, too: also opens its view to whom the store is open by now).
Errors: 22023 bad option, table that is not a vector store or of another model; 25006 read-only; 42501; 55000
model not available; 08006.$$;

CREATE FUNCTION ml_rag.documents_below(store regclass, prefix text) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: but for names that no client can read, which are none of a file
-- Reads: the store, as the caller
BEGIN
  PERFORM ml_rag._check_store(store, NULL);
  PERFORM ml_rag._hold(ARRAY[store::oid]);
  RETURN QUERY EXECUTE format(
    'SELECT d.name FROM (SELECT DISTINCT s.document_name::text FROM %s AS s'
    ' WHERE starts_with(s.document_name, $1) OFFSET 0) AS d (name) WHERE ml_rag._is_text(d.name)',
    ml_rag._relation_name(store)) USING prefix;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.documents_below(regclass, text) IS
$$names of the documents of a vector store that begin with a prefix, such as the path of a folder
Errors: 22023 not a vector store; 42501.$$;

CREATE FUNCTION ml_rag.remove_documents(store regclass, names text[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- Writes: the store, as the caller
DECLARE
  _n bigint;
BEGIN
  PERFORM ml_rag._check_store(store, NULL);
  PERFORM pg_advisory_xact_lock(ml_rag._store_key(store::oid));
  PERFORM ml_rag._hold(ARRAY[store::oid]);
  EXECUTE format($sql$
    WITH gone AS (
      -- a source that is a text is LangChain's
      DELETE FROM %s AS s WHERE s.document_name = ANY ($1) AND s.metadata #> '{source,sha256}' IS NOT NULL
      RETURNING s.document_name
    )
    SELECT count(DISTINCT g.document_name) FROM gone AS g$sql$, ml_rag._relation_name(store))
  INTO _n USING names;
  RETURN _n;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.remove_documents(regclass, text[]) IS
$$removes documents that were loaded into a vector store; returns how many were removed
Rows that were not made by a load are kept. Errors: 22023 not a vector store; 42501.$$;
