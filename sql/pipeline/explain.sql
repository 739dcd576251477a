-- explain: option explain of ml_rag: how an answer came about, of what the caller may see.

CREATE FUNCTION ml_rag._milliseconds(since timestamptz, until timestamptz DEFAULT clock_timestamp()) RETURNS float8
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: time between, to the microsecond
BEGIN
  RETURN round(extract(epoch FROM until - since) * 1000, 3)::float8;
END
$$;

CREATE FUNCTION ml_rag._explain_stores(options jsonb, stores ml_rag.store[], arms jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stores that were searched, each with what its arms say, and those that were not, with the reason
-- Those that nobody named are told of only where the caller may read their vectors: of others not even that they exist.
-- Calls: ml_rag._texts, ml_rag._why_no_store, ml_rag._why_not, ml_rag._marked_model, ml_rag._needs_embedding,
-- ml_rag._get_setting  Reads: the catalog
DECLARE
  _most CONSTANT integer := 100;
  _options jsonb := options;
  _told jsonb;
  _skipped jsonb;
BEGIN
  IF options -> 'n_citations' = '0' THEN
    RETURN '[]';
  END IF;
  IF NOT options ?| '{vector_store,embed_model_id}' AND ml_rag._needs_embedding(options) THEN
    -- what discovery goes by then
    _options := options || jsonb_build_object('embed_model_id', ml_rag._get_setting('embed_model_id'));
  END IF;
  SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object('vector_store', s.vector_store, 'searched', true,
      'embed_model_id', s.embed_model_id, 'semantic', arms -> 'semantic' -> s.vector_store,
      'keyword', arms -> 'keyword' -> s.vector_store)) ORDER BY s.place), '[]')
  INTO _told
  FROM (SELECT p.place, (stores[p.place]).* FROM generate_subscripts(stores, 1) AS p (place)) AS s;
  IF options ? 'vector_store' THEN
    SELECT coalesce(jsonb_agg(jsonb_build_object('vector_store', left(n.name, 200), 'searched', false,
        'reason', w.reason) ORDER BY n.place), '[]')
    INTO _skipped
    FROM unnest(ml_rag._texts(options -> 'vector_store')) WITH ORDINALITY AS n (name, place)
    CROSS JOIN LATERAL ml_rag._why_no_store(n.name, options) AS w
    WHERE NOT EXISTS (
      SELECT FROM unnest(stores) AS s JOIN pg_class AS c ON c.oid = s.relation
      JOIN pg_namespace AS m ON m.oid = c.relnamespace
      WHERE n.name IN (concat(m.nspname, '.', c.relname), c.relname, format('%I.%I', m.nspname, c.relname),
                       quote_ident(c.relname)))
      AND n.place <= _most;
  ELSE
    SELECT coalesce(jsonb_agg(jsonb_build_object('vector_store', f.vector_store, 'searched', false,
        'reason', w.reason) ORDER BY f.vector_store COLLATE "C"), '[]')
    INTO _skipped
    FROM (
      SELECT c.oid, CASE WHEN strpos(n.nspname, '.') = 0 THEN concat(n.nspname, '.', c.relname)
                         ELSE format('%I.%I', n.nspname, c.relname) END AS vector_store
      -- as discovery does: every column of these types is one index entry away
      FROM pg_depend AS v
      JOIN pg_attribute AS a ON a.attrelid = v.objid AND a.attnum = v.objsubid AND NOT a.attisdropped
      JOIN pg_class AS c ON c.oid = a.attrelid
      JOIN pg_namespace AS n ON n.oid = c.relnamespace
      JOIN pg_description AS d ON d.objoid = c.oid AND d.classoid = 'pg_class'::regclass AND d.objsubid = a.attnum
      WHERE v.refclassid = 'pg_type'::regclass AND v.refobjid IN ('vector'::regtype, 'halfvec'::regtype)
        AND v.refobjsubid = 0 AND v.classid = 'pg_class'::regclass AND v.objsubid > 0
        AND a.attname = coalesce(options #>> '{vector_store_columns,segment_embedding}', 'segment_embedding')
        AND c.relkind IN ('r', 'p', 'f', 'v', 'm') AND NOT pg_is_other_temp_schema(n.oid)
        AND has_schema_privilege(n.oid, 'USAGE') AND has_column_privilege(c.oid, a.attnum, 'SELECT')
        AND ml_rag._marked_model(d.description) IS NOT NULL
        AND NOT EXISTS (SELECT FROM unnest(stores) AS s WHERE s.relation = c.oid)
      ORDER BY n.nspname COLLATE "C", c.relname COLLATE "C" LIMIT _most
    ) AS f
    CROSS JOIN LATERAL ml_rag._why_not(f.oid, _options) AS w;
  END IF;
  RETURN _told || _skipped;
END
$$;

CREATE FUNCTION ml_rag._explain(options jsonb, stores ml_rag.store[], explained jsonb, method text, threshold numeric,
  citations integer, times timestamptz[], began timestamptz, generating timestamptz DEFAULT NULL,
  tokens jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the object that option explain adds to an answer; explained, times: of ml_rag._retrieve; began, generating:
-- when the call and its generation began
-- Calls: ml_rag._explain_stores, ml_rag._milliseconds
-- What is told of rows comes from hits, which are rows that the caller sees.
DECLARE
  _ended timestamptz := clock_timestamp();
BEGIN
  RETURN jsonb_build_object(
    'stores', ml_rag._explain_stores(options, stores, explained -> 'arms'),
    'candidates', jsonb_strip_nulls(explained -> 'candidates') || jsonb_build_object('citations', citations),
    'thresholds', jsonb_strip_nulls(jsonb_build_object('method', method, 'threshold', threshold,
      'max_distance', options #> '{retrieval_options,max_distance}',
      'percentage_distance', options #> '{retrieval_options,percentage_distance}',
      'nearest_distance', explained -> 'nearest', 'min_score', options #> '{rerank,min_score}',
      'best_score', explained -> 'best_score', 'n_citations', options -> 'n_citations')),
    'tokens', tokens,
    'milliseconds', jsonb_strip_nulls(jsonb_build_object(
      'discover', ml_rag._milliseconds(times[0], times[1]),
      'embed', CASE WHEN NOT options ? 'query_embedding' THEN ml_rag._milliseconds(times[1], times[2]) END,
      'search', ml_rag._milliseconds(times[2], times[4] - coalesce((explained ->> 'explaining')::interval, '0')),
      'keyword', ml_rag._milliseconds(coalesce(times[4], times[2]), times[5]),
      'fuse', CASE WHEN times[4] IS NOT NULL THEN ml_rag._milliseconds(times[5], times[3]) END,
      'threshold', ml_rag._milliseconds(times[3], times[6]),
      'rerank', ml_rag._milliseconds(times[6], times[7]),
      'expand', ml_rag._milliseconds(coalesce(times[7], times[6]), times[8]),
      'generate', ml_rag._milliseconds(generating, _ended),
      'explain', ml_rag._milliseconds(_ended - (explained ->> 'explaining')::interval, _ended),
      'total', ml_rag._milliseconds(began, _ended))));
END
$$;
