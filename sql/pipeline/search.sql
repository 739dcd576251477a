-- search: the nearest segments over the stores.

CREATE FUNCTION ml_rag._hit_columns(
  store ml_rag.store, distance_metric text, keyword_score text DEFAULT 'NULL::float8',
  OUT distance text, OUT rounded text, OUT of_row text, OUT of_hit text, OUT place text
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how a row t of a store becomes an ml_rag.hit, for the statements of both arms: SELECT <of_hit> FROM
-- (SELECT <of_row> FROM store AS t WHERE … ORDER BY … LIMIT $2) AS s, $1 the query vector (its distance is null where
-- that is). distance: from t to $1, what an index can serve: neither rounded nor named. rounded: a format that makes of it
-- what callers get. keyword_score: SQL for that
-- column of the hit, over s. place: what settles ties, an ORDER BY list over t (document, then segment).
-- Rounding and naming stand in the outer list, so that the inner query keeps to what postgres_fdw can ship to a shard.
DECLARE
  _name text := CASE WHEN store.document_name IS NULL THEN quote_literal(store.vector_store)
                     ELSE format('t.%I::text', store.document_name) END;
  _id text := CASE WHEN store.document_id IS NULL THEN 'NULL' ELSE format('t.%I', store.document_id) END;
  _has_integer_id boolean := coalesce(store.document_id_type IN ('smallint', 'integer', 'bigint'), false);
  _number text := CASE WHEN store.segment_number IS NULL THEN 'NULL' ELSE format('t.%I', store.segment_number) END;
  _metric ml_rag.metric;
BEGIN
  SELECT m.* INTO STRICT _metric FROM ml_rag.metric AS m WHERE m.name = distance_metric;
  distance := format('t.%I %s $1::%s', store.segment_embedding, _metric.operator, store.embedding_type);
  rounded := format('round((%s + %%s)::numeric, 4)', _metric.shift);
  of_row := concat(_name, ' AS document_name, ', _id, ' AS document_id, ', _number, '::bigint AS segment_number, ',
    format('t.%I::text', store.segment), ' AS segment, ', distance, ' AS distance, ',
    CASE WHEN store.metadata IS NULL THEN 'NULL::jsonb' ELSE format('to_jsonb(t.%I)', store.metadata) END,
    ' AS metadata');
  of_hit := concat(quote_literal(store.vector_store), '::text, s.document_name, ',
    CASE WHEN _has_integer_id THEN 's.document_id::bigint' ELSE 'NULL::bigint' END, ', ',
    CASE WHEN store.document_id IS NULL THEN 's.document_name' ELSE 's.document_id::text' END,
    ', s.segment_number, s.segment, ',
    format(rounded, 's.distance'), ', s.metadata, ',
    keyword_score, ', NULL::float8, NULL::float8');
  place := concat('(', _name, ') COLLATE "C", ',
    CASE WHEN _has_integer_id THEN _id ELSE format('(%s)::text COLLATE "C"', _id) END, ', (', _number, ')::bigint');
END
$$;

CREATE FUNCTION ml_rag._nearest_statement(
  store ml_rag.store, distance_metric text, condition text DEFAULT '', sort text DEFAULT 'index'
) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the kNN statement of one store: $1 query vector, $2 limit, $3 what the condition of ml_rag.filter refers to
-- Calls: ml_rag._hit_columns, ml_rag._relation_name
-- The ORDER BY … LIMIT stands at one query level with nothing but filters, which is what an index can serve and
-- what postgres_fdw can ship to a shard. sort: index; exact, by an expression that no index has, neither here nor on
-- the shard, whose settings are out of our reach; total, which settles equal distances too, at the cost of rounding
-- each row's.
DECLARE
  _columns record := ml_rag._hit_columns(store, distance_metric);
BEGIN
  RETURN concat(
    'SELECT ', _columns.of_hit, ' FROM (SELECT ', _columns.of_row, ' FROM ', ml_rag._relation_name(store.relation),
    format(' AS t WHERE t.%I IS NOT NULL AND t.%I IS NOT NULL', store.segment_embedding, store.segment), condition,
    ' ORDER BY ', CASE sort
      WHEN 'index' THEN _columns.distance
      WHEN 'exact' THEN format('(%s) + 0', _columns.distance)
      ELSE concat(format(_columns.rounded, concat('(', _columns.distance, ')')), ', ', _columns.place)
    END,
    ' LIMIT $2) AS s WHERE s.distance > ''-Infinity'' AND s.distance < ''Infinity''');
END
$$;

CREATE FUNCTION ml_rag._run_nearest(statement text, query_embedding vector, n integer, arguments text[])
RETURNS ml_rag.hit[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- An approximate index goes on until n rows have passed the filters and row-level security.
SET hnsw.iterative_scan = 'relaxed_order'
SET ivfflat.iterative_scan = 'relaxed_order'
-- compiling takes a second for a large table, all the time is in the distance, and no clock ends it
SET jit = off
AS $$
-- purpose: run a kNN statement; the hits come in order of (distance, document, segment)
-- Reads: the store, as the caller
DECLARE
  _hits ml_rag.hit[];
BEGIN
  EXECUTE format('SELECT array_agg(ROW(h.*)::ml_rag.hit ORDER BY h.distance, h.document_name COLLATE "C", h.document_id, '
      'h.document_key COLLATE "C", h.segment_number) FROM (%s) AS h (vector_store, document_name, document_id, '
      'document_key, segment_number, segment, distance, metadata, keyword_score, score, rerank_score)', statement)
    INTO _hits USING query_embedding, n, arguments;
  RETURN coalesce(_hits, '{}');
END
$$;

CREATE FUNCTION ml_rag._explain_nearest(
  store ml_rag.store, statement text, query_embedding vector, n integer, arguments text[]
) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- as ml_rag._run_nearest has it, or the plan would be another one
SET hnsw.iterative_scan = 'relaxed_order'
SET ivfflat.iterative_scan = 'relaxed_order'
AS $$
-- purpose: how PostgreSQL reads a store for a kNN statement: {"plan", "indexes", "iterative_scan"}
-- The plan itself stays here. It holds the conditions of policies and the relations behind views, and its estimates
-- come from rows that the caller may not see: told is only which indexes of the store itself, or of its partitions, are
-- used. Nothing is run, and what planning runs has just been run by the search.
DECLARE
  _kind "char" := (SELECT c.relkind FROM pg_class AS c WHERE c.oid = store.relation);
  _plan json;
  _names text[];
  _indexes jsonb;
  _method text;
BEGIN
  IF _kind IN ('v', 'f') THEN
    RETURN jsonb_build_object('plan', CASE _kind WHEN 'v' THEN 'view' ELSE 'foreign table' END);
  END IF;
  EXECUTE format('EXPLAIN (FORMAT JSON, COSTS OFF) SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (%s) AS h', statement)
    INTO _plan USING query_embedding, n, arguments;
  _names := ARRAY(SELECT DISTINCT j #>> '{}' FROM jsonb_path_query(_plan::jsonb, 'strict $.**."Index Name"', '{}', true)
                  AS j);
  SELECT coalesce(jsonb_agg(jsonb_build_object('index', i.relname, 'method', m.amname) ORDER BY i.relname), '[]'),
    coalesce(min(m.amname) FILTER (WHERE m.amname IN ('hnsw', 'ivfflat')), 'exact')
  INTO _indexes, _method
  FROM (SELECT store.relation::oid AS oid UNION SELECT p.relid FROM pg_partition_tree(store.relation) AS p
        UNION SELECT h.inhrelid FROM pg_inherits AS h WHERE h.inhparent = store.relation) AS part
  JOIN pg_index AS x ON x.indrelid = part.oid
  JOIN pg_class AS i ON i.oid = x.indexrelid
  JOIN pg_am AS m ON m.oid = i.relam
  WHERE i.relname = ANY (_names);
  RETURN jsonb_build_object('plan', _method, 'indexes', _indexes)
    || CASE WHEN _method = 'exact' THEN '{}'
       ELSE jsonb_build_object('iterative_scan', current_setting(_method || '.iterative_scan')) END;
END
$$;

CREATE FUNCTION ml_rag._may_fall_short(relation regclass) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a scan of the relation can end before it has seen every row: with an approximate index on it or on
-- what lies below it, and who knows what lies below a view or on a shard
SELECT c.relkind = 'v' OR EXISTS (
  SELECT FROM (SELECT c.oid AS relid UNION ALL SELECT p.relid FROM pg_partition_tree(c.oid) AS p WHERE c.relkind = 'p'
               UNION ALL SELECT i.inhrelid FROM pg_inherits AS i WHERE i.inhparent = c.oid) AS part
  JOIN pg_class AS pc ON pc.oid = part.relid
  WHERE pc.relkind = 'f' OR EXISTS (
    SELECT FROM pg_index AS x
    JOIN pg_class AS ic ON ic.oid = x.indexrelid
    JOIN pg_am AS a ON a.oid = ic.relam AND a.amname IN ('hnsw', 'ivfflat')
    WHERE x.indrelid = part.relid))
FROM pg_class AS c WHERE c.oid = relation
$$;

CREATE FUNCTION ml_rag._search(
  stores ml_rag.store[], query_embedding vector, n integer, distance_metric text, options jsonb,
  skip_other_dimensions boolean, explain boolean, OUT hits ml_rag.hit[], OUT explained jsonb, OUT explaining interval,
  OUT skipped text[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: ml_rag.search as an array and, where asked for, how each store was searched: {vector_store: {…}}, and what
-- time it took to find that out. skipped: stores that were left out; null = none
-- Calls: ml_rag._untrusted_last, ml_rag._share, ml_rag._limit_wait, ml_rag._untrusted_condition, ml_rag._failure,
-- ml_rag._warn_of_failures, ml_rag._raise, ml_rag._warn_of_unknown_keys, ml_rag.filter, ml_rag._nearest_statement,
-- ml_rag._run_nearest, ml_rag._may_fall_short, ml_rag._explain_nearest
-- Reads: the stores, as the caller
DECLARE
  -- most calls have no filter: those need not ask store by store
  _filters boolean := coalesce(
    options ?| '{document_name,exclude_document_name,filters,required_keywords,excluded_keywords}', false);
  _condition text;
  _arguments text[];
  _store ml_rag.store;
  _hits ml_rag.hit[];
  _all ml_rag.hit[] := '{}';
  _searched integer := 0;
  _fetch integer;
  _sort text;
  _reads integer;
  _began timestamptz;
  _is_untrusted boolean;
  _ordered ml_rag.store[];
  _untrusted integer;
  _ends timestamptz;
  _until timestamptz;
  _lock_timeout text;
  _failure jsonb;
  _failures jsonb[] := '{}';
  _late text[] := '{}';
  _detail text;
  _hint text;
BEGIN
  hits := '{}';
  IF n IS NULL OR n < 1 THEN
    RETURN;
  END IF;
  SELECT o.ordered, o.untrusted INTO _ordered, _untrusted FROM ml_rag._untrusted_last(stores) AS o;
  FOREACH _store IN ARRAY _ordered LOOP
    _is_untrusted := coalesce(_store.found = 'untrusted', false);
    IF _store.dimensions <> vector_dims(query_embedding) THEN
      _failure := ml_rag._failure(_store.vector_store, '22000',
        'the query embedding and the vector store differ in dimensions',
        format('The query embedding has %s dimensions, %s.%I has %s.', vector_dims(query_embedding),
          _store.vector_store, _store.segment_embedding, _store.dimensions),
        'Name the store''s own model in "embed_model_id", or leave the store out with "exclude_vector_store".');
      IF NOT skip_other_dimensions AND NOT _is_untrusted THEN
        PERFORM ml_rag._raise(_failure);
      END IF;
      _failures := _failures || (_failure || jsonb_build_object(
        'warning', format('"%s" has other dimensions than the query embedding; ignored', _store.vector_store),
        'skipped', format('It has %s dimensions, the query embedding %s.', _store.dimensions, vector_dims(query_embedding)),
        'warning_hint', 'Its marker comment names the wrong model, or leave it out with "exclude_vector_store".'));
      _untrusted := _untrusted - _is_untrusted::integer;
      CONTINUE;
    END IF;
    IF _is_untrusted THEN
      SELECT s.ends, s.untrusted, s.until INTO _ends, _untrusted, _until FROM ml_rag._share(_ends, _untrusted) AS s;
      IF _until IS NULL THEN
        _late := _late || _store.vector_store;
        CONTINUE;
      END IF;
    END IF;
    BEGIN
      _lock_timeout := NULL;
      IF _is_untrusted THEN
        _lock_timeout := ml_rag._limit_wait(100);
      ELSIF _store.found = 'trusted' AND cardinality(stores) > 1 THEN
        _lock_timeout := ml_rag._limit_wait(1000);
      END IF;
      _condition := '';
      IF _filters THEN
        IF NOT _is_untrusted THEN
          PERFORM ml_rag._warn_of_unknown_keys(_store, options -> 'filters');
        END IF;
        SELECT f.condition, f.arguments INTO _condition, _arguments FROM ml_rag.filter(_store, _search.options) AS f;
      END IF;
      IF _is_untrusted THEN
        _condition := ml_rag._untrusted_condition(_store, _until, _condition);
      END IF;
      -- More than n, to see whether the last place is shared: of equal distances those that come first by name are
      -- wanted, and the index does not know about names. Where very many share it, the rows are sorted by all of it.
      -- Each costs a read of the table, so one is enough, except where the index goes on past what is left out: in a
      -- relaxed order.
      _fetch := n + CASE WHEN _condition = '' THEN 1 ELSE 8 END;
      _sort := CASE WHEN _is_untrusted AND ml_rag._sorts_ahead(_store.relation) THEN 'exact' ELSE 'index' END;
      _reads := 0;
      LOOP
        _reads := _reads + 1;
        _hits := ml_rag._run_nearest(ml_rag._nearest_statement(_store, _search.distance_metric, _condition, _sort),
          query_embedding, _fetch, _arguments);
        IF cardinality(_hits) < n AND _sort = 'index' AND ml_rag._may_fall_short(_store.relation) THEN
          _sort := 'exact';
          CONTINUE;
        END IF;
        EXIT WHEN cardinality(_hits) < _fetch OR _sort = 'total'
          OR _hits[cardinality(_hits)].distance > _hits[n].distance;
        IF _fetch > 700 OR _is_untrusted THEN
          _sort := 'total';
          _fetch := n;
        ELSE
          _fetch := _fetch * 4;
        END IF;
      END LOOP;
      IF explain THEN
        _began := clock_timestamp();
        explained := coalesce(explained, '{}') || jsonb_build_object(_store.vector_store,
          ml_rag._explain_nearest(_store, ml_rag._nearest_statement(_store, _search.distance_metric, _condition, _sort),
            query_embedding, _fetch, _arguments)
          || jsonb_build_object('sort', _sort, 'reads', _reads, 'limit', _fetch, 'candidates', cardinality(_hits)));
        explaining := coalesce(explaining, '0') + (clock_timestamp() - _began);
      END IF;
      IF _lock_timeout IS NOT NULL THEN
        PERFORM set_config('lock_timeout', _lock_timeout, true);
      END IF;
      _searched := _searched + 1;
      _all := _all || _hits;
    EXCEPTION WHEN OTHERS THEN
      -- a transaction that cannot go on is no matter of a store
      IF coalesce(_store.found, 'named') = 'named' OR cardinality(stores) = 1 OR SQLSTATE = '40001' THEN
        RAISE;
      END IF;
      GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
      _failures := _failures || ml_rag._failure(_store.vector_store, SQLSTATE, SQLERRM, _detail, _hint);
    END;
  END LOOP;
  IF _searched = 0 AND cardinality(_failures) > 0 THEN
    PERFORM ml_rag._raise(_failures[1]);
  END IF;
  IF cardinality(_failures) > 0 OR cardinality(_late) > 0 THEN
    PERFORM ml_rag._warn_of_failures(_failures, _late);
    skipped := ARRAY(SELECT f ->> 'store' FROM unnest(_failures) AS f) || _late;
    IF explain THEN
      explained := coalesce(explained, '{}') || ml_rag._explain_failures(_failures, _late);
    END IF;
  END IF;
  IF _searched < 2 THEN
    hits := _all[1:n];
    RETURN;
  END IF;
  hits := ARRAY(
    SELECT h FROM unnest(_all) AS h
    ORDER BY h.distance, h.vector_store COLLATE "C", h.document_name COLLATE "C", h.document_id,
      h.document_key COLLATE "C", h.segment_number
    LIMIT n);
END
$$;

CREATE FUNCTION ml_rag.search(
  stores ml_rag.store[],
  query_embedding vector,
  n integer DEFAULT 3,
  distance_metric text DEFAULT 'COSINE',
  options jsonb DEFAULT NULL,
  skip_other_dimensions boolean DEFAULT false
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the n nearest segments of all stores, by (distance, store, document, segment)
-- Calls: ml_rag._search  Reads: the stores, as the caller
DECLARE
  _found record := ml_rag._search(stores, query_embedding, n, distance_metric, options, skip_other_dimensions, false);
BEGIN
  RETURN QUERY SELECT h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment,
      h.distance, h.metadata, h.keyword_score, h.score, h.rerank_score
    FROM unnest(_found.hits) WITH ORDINALITY AS h ORDER BY h.ordinality;
END
$$;
COMMENT ON FUNCTION ml_rag.search(ml_rag.store[], vector, integer, text, jsonb, boolean) IS
$$the n nearest segments of the stores, nearest first
distance_metric: a name in ml_rag.metric; distances are rounded to 4 decimals. Equal distances go
by store, document and segment. options: those of ml_rag that leave rows out, see ml_rag.filter; they apply before the
limit. Rows whose segment or embedding is null are skipped. Errors: 22000 different dimensions; with
skip_other_dimensions a warning instead, where another store has the right ones; those of ml_rag.filter. What goes wrong
in a store whose "found" is trusted or untrusted leaves it out with a warning, where another one can be searched.$$;
