-- keys: filters that a model chooses: the columns and metadata keys that it is shown, and the check of what
-- it answers.
--
-- What they mean is in the catalog: the comment of a column, and for keys of the metadata a JSON object
-- behind FILTER_KEYS= in the comment of that column. So it is dumped, renamed and dropped with the table, and
-- only the owner can change it.

CREATE FUNCTION ml_rag._metadata_keys(relation regclass, "column" name, OUT before text, OUT keys jsonb)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the described keys of a metadata column, {key: description}, and what else its comment says 
-- Reads: the catalog
DECLARE
  _comment text := (SELECT col_description(relation, a.attnum) FROM pg_attribute AS a
                    WHERE a.attrelid = relation AND a.attname = "column" AND NOT a.attisdropped);
BEGIN
  before := regexp_replace(coalesce(_comment, ''), '\s*FILTER_KEYS=.*$', '');
  keys := coalesce(substring(_comment FROM 'FILTER_KEYS=(.*)$'), '{}')::jsonb;
  IF jsonb_typeof(keys) <> 'object' THEN
    keys := '{}';
  END IF;
EXCEPTION WHEN data_exception THEN
  keys := '{}';
END
$$;

CREATE FUNCTION ml_rag.describe_filter(store regclass, key text, description text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: what a column or a key of the metadata means, for the model; null removes it
-- Writes: the comment of the column
DECLARE
  _kind "char";
  _column name;
  _described record;
  _keys jsonb;
BEGIN
  _kind := (SELECT c.relkind FROM pg_class AS c WHERE c.oid = store);
  IF coalesce(key, '') = '' OR length(key) > 200 OR length(description) > 1000 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid description of a filter',
      DETAIL = 'A key has 1 to 200 characters, a description at most 1000.',
      HINT = 'Such as SELECT ml_rag.describe_filter(''shop.products'', ''price'', ''price in dollars'').';
  END IF;
  SELECT a.attname INTO _column FROM pg_attribute AS a
  WHERE a.attrelid = store AND a.attname = key AND a.attnum > 0 AND NOT a.attisdropped AND key <> 'metadata';
  IF FOUND THEN
    IF _column = ml_rag._default_column(store) THEN
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('column "%s" holds embeddings', _column),
        HINT = 'Its comment makes the table a vector store. Describe another column, or a key of the '
          'metadata.';
    END IF;
    _keys := to_jsonb(nullif(btrim(description), ''));
  ELSE
    SELECT a.attname INTO _column FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname = 'metadata' AND NOT a.attisdropped
      AND a.atttypid IN ('json'::regtype, 'jsonb'::regtype);
    IF NOT FOUND THEN
      RAISE EXCEPTION USING ERRCODE = '42703', MESSAGE = format('column "%s" does not exist', left(key, 200)),
        DETAIL = format('%s has no column of that name, and no column "metadata" of type json or jsonb.',
          store),
        HINT = 'Name a column, or a key of the metadata.';
    END IF;
    PERFORM ml_rag._lock_comments(store);
    _described := ml_rag._metadata_keys(store, _column);
    _keys := CASE WHEN nullif(btrim(description), '') IS NULL THEN _described.keys - key
                  ELSE _described.keys || jsonb_build_object(key, btrim(description)) END;
    _keys := to_jsonb(nullif(concat_ws(' ', nullif(_described.before, ''), CASE WHEN _keys <> '{}'
      THEN 'FILTER_KEYS=' || _keys::text END), ''));
  END IF;
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', ml_rag._relation_name(store), _column, _keys #>> '{}');
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.describe_filter(regclass, text, text) IS
$$says what a column or a key of the metadata means: ml_rag.describe_filter('shop.products', 'price', 'price in dollars')
With "filters": true in query_options the model may choose conditions on what is described, beside numbers,
booleans, dates, short texts, and keys that most rows have. null removes a description. For a
column it is COMMENT ON COLUMN; keys of the metadata are kept in the comment of that column. For the owner.
Errors: 22023 empty or long key, long description, a column of embeddings; 42703 neither such a column nor
metadata; 42501.$$;

CREATE FUNCTION ml_rag._filter_keys(stores ml_rag.store[], wanted jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what the model may filter by, [{key, kind, is_list, description, values}], at most 60
-- wanted: an array of keys, or true: what is described, numbers, booleans, dates, and texts that are short by
-- the statistics, but not the primary key or the store's own columns
-- values: at most 20, of a text that has few. pg_stats hides columns that the caller may not read, and all
-- under row-level security.
-- Reads: the catalog, pg_stats; the stores, as the caller
DECLARE
  _store ml_rag.store;
  _found jsonb := '[]';
  _described jsonb;
  _common jsonb;
BEGIN
  FOREACH _store IN ARRAY coalesce(stores, '{}') LOOP
    _found := _found || (
      SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object('key', a.attname, 'kind', k.kind,
        'is_list', k.is_list, 'description', left(ml_rag._beginning(k.description), 1000),
        'values', CASE WHEN k.kind = 'text' THEN (
          SELECT jsonb_agg(v.value ORDER BY v.place)
          FROM (SELECT ml_rag._valid_text(v.value) AS value, v.place FROM unnest(coalesce((
              SELECT array_agg(l.enumlabel::text ORDER BY l.enumsortorder) FROM pg_enum AS l
              WHERE l.enumtypid = k.element), (
              SELECT CASE WHEN k.is_list THEN s.most_common_elems ELSE s.most_common_vals END::text::text[]
              FROM pg_stats AS s
              WHERE s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = a.attname
                -- negative: a share of the rows
                AND NOT s.inherited AND (k.is_list
                  OR CASE WHEN s.n_distinct < 0 THEN -s.n_distinct * c.reltuples
                    ELSE s.n_distinct END BETWEEN 1 AND 100)
            ))) WITH ORDINALITY AS v (value, place) WHERE v.place <= 20) AS v
          WHERE length(v.value) <= 60) END)) ORDER BY a.attnum), '[]')
      FROM pg_class AS c
      JOIN pg_namespace AS n ON n.oid = c.relnamespace
      JOIN pg_attribute AS a ON a.attrelid = c.oid
      CROSS JOIN LATERAL (
        SELECT e.oid AS element, e.oid <> t.oid AS is_list, col_description(c.oid, a.attnum) AS description,
          CASE WHEN e.typtype = 'e' THEN 'text'
            WHEN e.typnamespace <> 'pg_catalog'::regnamespace THEN NULL
            WHEN e.typname IN ('text', 'varchar', 'bpchar', 'name', 'uuid') THEN 'text'
            WHEN e.typname IN ('int2', 'int4', 'int8', 'numeric', 'float4', 'float8') THEN 'number'
            WHEN e.typname = 'bool' THEN 'boolean' WHEN e.typname = 'date' THEN 'date'
            WHEN e.typname IN ('timestamp', 'timestamptz') THEN 'timestamp' END AS kind
        FROM pg_type AS t JOIN pg_type AS e ON e.oid = coalesce((
          SELECT l.oid FROM pg_type AS l WHERE l.oid = t.typelem AND l.typarray = t.oid), t.oid)
        WHERE t.oid = ml_rag._base_type(a.atttypid)) AS k
      WHERE c.oid = _store.relation AND a.attnum > 0 AND NOT a.attisdropped AND k.kind IS NOT NULL
        AND a.attname <> ALL (array_remove(ARRAY[_store.segment_embedding, _store.segment, _store.metadata],
          NULL))
        AND has_column_privilege(c.oid, a.attnum, 'SELECT')
        AND NOT _found @> jsonb_build_array(jsonb_build_object('key', a.attname))
        AND (wanted ? a.attname::text OR wanted = 'true' AND (k.description IS NOT NULL
          -- a uuid is a text here
          OR a.atttypid <> 'uuid'::regtype
            AND a.attname <> ALL (
              array_remove(ARRAY[_store.document_name, _store.document_id, _store.segment_number], NULL))
            AND NOT EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary
                            AND a.attnum = ANY (i.indkey::smallint[]))
            AND (k.kind <> 'text' OR EXISTS (
              SELECT FROM pg_stats AS s
              WHERE s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = a.attname
                AND s.avg_width <= 60)))));
    CONTINUE WHEN _store.metadata IS NULL;
    IF wanted = 'true' THEN
      -- the keys that most of the first thousand rows have, with values that are not objects, at most 20
      _common := ml_rag._read_apart(_store, format(
        'WITH first AS MATERIALIZED (SELECT ml_rag._as_jsonb(t.%I) AS metadata', _store.metadata),
        $query$LIMIT 1000)
        SELECT jsonb_agg(k.key) FROM (
          SELECT e.key FROM first AS f,
            jsonb_each(CASE jsonb_typeof(f.metadata) WHEN 'object' THEN f.metadata ELSE '{}' END) AS e
          WHERE jsonb_typeof(e.value) IN ('string', 'number', 'boolean') AND length(e.key) <= 200
            AND length(e.value::text) <= 100
          GROUP BY e.key HAVING count(*) * 2 > (SELECT count(*) FROM first)
          ORDER BY e.key COLLATE "C" LIMIT 20) AS k$query$);
    END IF;
    _described := (SELECT k.keys FROM ml_rag._metadata_keys(_store.relation, _store.metadata) AS k);
    _found := _found || coalesce((
      SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object('key', k.key, 'kind', 'any', 'is_list', false,
        'description', left(_described ->> k.key, 1000))) ORDER BY k.key COLLATE "C")
      FROM (SELECT jsonb_object_keys(_described) WHERE wanted = 'true'
            UNION SELECT jsonb_array_elements_text(_common)
            UNION SELECT jsonb_array_elements_text(CASE WHEN wanted = 'true' THEN '[]'
              ELSE wanted END)) AS k (key)
      WHERE NOT _found @> jsonb_build_array(jsonb_build_object('key', k.key))
        AND NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = _store.relation AND a.attname = k.key
                        AND NOT a.attisdropped)), '[]');
  END LOOP;
  RETURN jsonb_path_query_array(_found, 'lax $[0 to 59]');
END
$$;

CREATE FUNCTION ml_rag._check_condition(stores ml_rag.store[], keys jsonb, condition jsonb,
  filters jsonb) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
-- a key that a store lacks is reported when the filter is used
SET client_min_messages = 'error'
AS $$
-- purpose: why a condition that a model has chosen is not used; null if it is. It goes through the code of
-- the caller's filters, together with these (filters)
-- Reads: the catalog
DECLARE
  _used text[];
BEGIN
  _used := ARRAY(SELECT DISTINCT n.term ->> 'key'
    FROM jsonb_path_query(ml_rag._filter_tree(condition), 'strict $.** ? (@.type() == "object" && exists '
      '(@.operator))') AS n (term)
    ORDER BY 1);
  IF cardinality(_used) = 0 THEN
    RETURN 'It has no condition.';
  END IF;
  IF EXISTS (
    SELECT FROM unnest(_used) AS u WHERE NOT keys @> jsonb_build_array(jsonb_build_object('key', u))) THEN
    RETURN 'Its key is not one that the model was shown.';
  END IF;
  PERFORM ml_rag.condition(s.*, filters, '{}') FROM unnest(stores) AS s;
  RETURN NULL;
EXCEPTION WHEN invalid_parameter_value OR data_exception OR program_limit_exceeded
  OR statement_too_complex THEN
  RETURN format('It is not valid (%s).', SQLERRM);
END
$$;

CREATE FUNCTION ml_rag._join_filters(callers jsonb, chosen jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the caller's filters and what a model has chosen, joined by AND; the caller's keep their depth
BEGIN
  RETURN CASE WHEN chosen IS NULL THEN callers WHEN callers IS NULL THEN
    jsonb_build_object('and', jsonb_build_array(chosen))
    ELSE callers || jsonb_build_object('and', coalesce(callers -> 'and', '[]')
      || jsonb_build_array(chosen)) END;
END
$$;

CREATE FUNCTION ml_rag._checked_filters(stores ml_rag.store[], keys jsonb, filters jsonb,
  callers jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what a model has chosen, an array of conditions that all must hold, without those that do not
-- check, and of at most 50; null if nothing is left. callers: the filters of the call. A warning reports what
-- is dropped, without the model's words
DECLARE
  _condition jsonb;
  _why text;
  _reasons text[] := '{}';
  _good jsonb := '[]';
BEGIN
  FOR _condition IN SELECT c FROM jsonb_array_elements(filters) AS c LIMIT 50 LOOP
    _why := ml_rag._check_condition(stores, keys, _condition,
      ml_rag._join_filters(NULL, jsonb_build_object('and', jsonb_build_array(_condition))));
    IF _why IS NULL THEN
      _good := _good || jsonb_build_array(_condition);
    ELSE
      _reasons := _reasons || _why;
    END IF;
  END LOOP;
  -- there are limits to all conditions together
  IF _good <> '[]' AND (callers IS NOT NULL OR jsonb_array_length(_good) > 1) THEN
    _why := ml_rag._check_condition(stores, keys, jsonb_build_object('and', _good),
      ml_rag._join_filters(callers, jsonb_build_object('and', _good)));
    IF _why IS NOT NULL THEN
      _reasons := _reasons || array_fill(_why, ARRAY[jsonb_array_length(_good)]);
      _good := '[]';
    END IF;
  END IF;
  IF cardinality(_reasons) > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s of %s conditions that the model has chosen are not used', cardinality(_reasons),
        jsonb_array_length(filters)),
      DETAIL = (SELECT string_agg(r, ' ')
        FROM (SELECT DISTINCT left(r, 300) FROM unnest(_reasons) AS r ORDER BY 1 LIMIT 5) AS s (r)),
      HINT = 'Describe the columns with ml_rag.describe_filter, or choose a more capable model.';
  END IF;
  RETURN CASE jsonb_array_length(_good) WHEN 0 THEN NULL ELSE jsonb_build_object('and', _good) END;
END
$$;
