-- knn: the nearest segments of one store.

CREATE FUNCTION ml_rag._hit_columns(
  store ml_rag.store, distance_metric text, with_text boolean DEFAULT true, score text DEFAULT 'NULL::float8',
  keyword_score text DEFAULT 'NULL::float8', exact boolean DEFAULT false, parameter integer DEFAULT 1,
  OUT distance text, OUT rounded text, OUT of_row text, OUT of_hit text, OUT place text
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how a row t of a store becomes an ml_rag.hit, for the statements of all arms: SELECT <of_hit> FROM
-- (SELECT <of_row> FROM store AS t WHERE … ORDER BY … LIMIT $2) AS s, $1 the vector of the question (its distance is null
-- where that is). parameter: another one than $1. distance: from t to it, what an index can serve: neither rounded nor named;
-- exact: what none can. rounded: a format that makes of it what callers get.
-- with_text: false = a row of an ordinary table gives its key instead of its segment and metadata.
-- score, keyword_score: SQL for those columns of the hit, over s. place: what settles ties, an ORDER BY list over t
-- (document, then segment).
-- Rounding and naming stand in the outer list, so that the inner query keeps to what postgres_fdw can ship to a shard.
DECLARE
  _name text := ml_rag._document_name(store);
  _id text := CASE WHEN store.document_id IS NULL THEN 'NULL' ELSE format('t.%I', store.document_id) END;
  _has_integer_id boolean := coalesce(store.document_id_type IN ('smallint', 'integer', 'bigint'), false);
  _number text := CASE WHEN store.segment_number IS NULL THEN 'NULL' ELSE format('t.%I', store.segment_number) END;
  _has_text boolean := with_text OR store.is_table IS NOT TRUE;
  _metric ml_rag.metric;
BEGIN
  SELECT m.* INTO STRICT _metric FROM ml_rag.metric AS m WHERE m.name = distance_metric;
  distance := format(CASE WHEN exact THEN '(%s) + 0' ELSE '%s' END, format('t.%I OPERATOR(@vector@.%s) $%s::@vector@.%s',
    store.segment_embedding, _metric.operator, parameter, store.embedding_type));
  rounded := format('round((%s + %%s)::numeric, 4)', _metric.shift);
  of_row := concat(_name, ' AS document_name, ', _id, ' AS document_id, ', _number, '::bigint AS segment_number, ',
    CASE WHEN _has_text THEN format('t.%I::text', store.segment) ELSE 'NULL::text' END, ' AS segment, ',
    distance, ' AS distance, ',
    CASE WHEN _has_text AND store.metadata IS NOT NULL THEN format('to_jsonb(t.%I)', store.metadata)
         ELSE 'NULL::jsonb' END, ' AS metadata',
    CASE WHEN NOT _has_text THEN ', t.ctid AS row_key' END);
  of_hit := concat(quote_literal(store.vector_store), '::text, s.document_name, ',
    CASE WHEN _has_integer_id THEN 's.document_id::bigint' ELSE 'NULL::bigint' END, ', ',
    CASE WHEN store.document_id IS NULL THEN 's.document_name' ELSE 's.document_id::text' END,
    ', s.segment_number, s.segment, ', format(rounded, 's.distance'), ', s.metadata, ', keyword_score, ', ', score,
    ', NULL::float8, ', CASE WHEN _has_text THEN 'NULL::text' ELSE 's.row_key::text' END,
    ', NULL::bigint, NULL::bigint');
  place := concat('(', _name, ') COLLATE "C", ',
    CASE WHEN _has_integer_id THEN _id ELSE format('(%s)::text COLLATE "C"', _id) END, ', (', _number, ')::bigint');
END
$$;

CREATE FUNCTION ml_rag._nearest_statement(
  store ml_rag.store, distance_metric text, condition text DEFAULT '', sort text DEFAULT 'index',
  with_text boolean DEFAULT true, has_own_vector boolean DEFAULT false, quantization text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the kNN statement of one store: $1 vector of the question, $2 limit, $3 what the condition of ml_rag.filter
-- refers to; has_own_vector: $4 is the vector that is searched with, and score its distance
-- quantization: of an index of smaller vectors, whose $5 nearest are ordered by the whole ones; $6 are row keys, where the condition
-- is on them
-- The ORDER BY … LIMIT stands at one query level with nothing but filters, which is what an index can serve and
-- what postgres_fdw can ship to a shard. Shards get a statement each, and run them side by side: that is the Append below an order
-- that theirs does not give. sort: index; exact, by an expression that no index has, neither here nor on
-- the shard, whose settings are out of our reach; total, which settles equal distances too, at the cost of rounding
-- each row's.
DECLARE
  -- what is sorted by is also what is given out, so that it is computed once
  _columns record := ml_rag._hit_columns(store, distance_metric, with_text, exact => sort = 'exact');
  _distance text := _columns.distance;
  _own text;
  _leaves regclass[] := ml_rag._leaves(store);
  _head text;
  _tail text;
  _rows text;
  _condition text := concat(' AS t WHERE ', ml_rag._has_values(ARRAY[store.segment_embedding, store.segment]), condition);
  _from text := concat(ml_rag._relation_name(store.relation), _condition);
BEGIN
  IF quantization IS NOT NULL THEN
    _from := concat('(SELECT ', CASE WHEN store.is_table THEN 't.ctid, ' END, (
        SELECT string_agg(format('t.%I', c), ', ' ORDER BY c) FROM (
          SELECT DISTINCT unnest(ARRAY[store.segment_embedding, store.segment, store.document_name, store.document_id,
            store.segment_number, store.metadata])) AS u (c) WHERE c IS NOT NULL),
      ' FROM ', _from, ' ORDER BY ', ml_rag._quantized(format('t.%I', store.segment_embedding), store.dimensions, quantization),
      CASE quantization WHEN 'binary' THEN ' OPERATOR(@vector@.<~>) '
        ELSE format(' OPERATOR(@vector@.%s) ', (SELECT m.operator FROM ml_rag.metric AS m WHERE m.name = distance_metric)) END,
      ml_rag._quantized(format('%s::@vector@.%s', CASE WHEN has_own_vector THEN '$4' ELSE '$1' END, store.embedding_type), store.dimensions,
        quantization),
      ' LIMIT $5) AS t WHERE true');
  END IF;
  IF has_own_vector THEN
    _distance := (ml_rag._hit_columns(store, distance_metric, exact => sort = 'exact', parameter => 4)).distance;
    _own := format(', %s AS own', _distance);
    _columns := ml_rag._hit_columns(store, distance_metric, with_text, format(_columns.rounded, 's.own') || '::float8');
  END IF;
  _head := concat('SELECT ', _columns.of_row, _own, ' FROM ');
  _tail := concat(' ORDER BY ', CASE WHEN sort <> 'total' THEN _distance
    ELSE concat(format(_columns.rounded, concat('(', _distance, ')')), ', ', _columns.place) END, ' LIMIT $2');
  IF _leaves IS NULL THEN
    _rows := concat(_head, _from, _tail);
  ELSE
    _distance := CASE WHEN has_own_vector THEN 'u.own' ELSE 'u.distance' END;
    _rows := concat('SELECT u.* FROM (', (
        SELECT string_agg(concat('(', _head, ml_rag._relation_name(l), _condition, _tail, ')'), ' UNION ALL ') FROM unnest(_leaves) AS l),
      ') AS u ORDER BY ', CASE sort WHEN 'total' THEN concat(format(_columns.rounded, _distance), ', u.document_name COLLATE "C", ',
        CASE WHEN store.document_id_type IN ('smallint', 'integer', 'bigint') THEN 'u.document_id'
          ELSE 'u.document_id::text COLLATE "C"' END,
        ', u.segment_number') ELSE _distance || ' + 0' END, ' LIMIT $2');
  END IF;
  RETURN concat(
    'SELECT ', _columns.of_hit, ' FROM (', _rows, format(') AS s WHERE %1$s > ''-Infinity'' AND %1$s < ''Infinity''',
      CASE WHEN has_own_vector THEN 's.own' ELSE 's.distance' END));
END
$$;

CREATE FUNCTION ml_rag._ef_search(relation oid) RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how many candidates an HNSW index keeps while it searches: what the caller has set; where that is pgvector's default
-- of 40, 200 for large tables: with 40, of the ten nearest segments of 100 000 it misses two, and of 5 000 none. Each partition has
-- an index of its own  Reads: pg_class
DECLARE
  _is_small boolean := (SELECT c.reltuples BETWEEN 0 AND 20000 FROM pg_class AS c WHERE c.oid = relation AND c.relkind <> 'p');
  _parts oid[];
BEGIN
  IF _is_small IS NULL THEN
    _parts := ml_rag._parts(relation);
    _is_small := (SELECT bool_and(c.reltuples BETWEEN 0 AND 20000) FROM pg_class AS c WHERE c.oid = ANY (_parts) AND c.relkind <> 'p');
  END IF;
  RETURN coalesce(nullif(current_setting('hnsw.ef_search', true), '40')::integer, CASE WHEN _is_small THEN 40 ELSE 200 END);
END
$$;

CREATE FUNCTION ml_rag._run_nearest(
  statement text, query_embedding @vector@.vector, n integer, arguments text[], ef_search text, seqscan text,
  own_vector @vector@.vector, rescore integer, probes text, row_keys tid[]
) RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- An approximate index goes on until n rows have passed the filters and row-level security.
SET hnsw.iterative_scan = 'relaxed_order'
SET ivfflat.iterative_scan = 'relaxed_order'
-- until the end of this function; the values are arguments
SET hnsw.ef_search = 40
SET ivfflat.probes = 1
SET enable_seqscan = on
-- compiling takes a second for a large table, and all the time is in the distance
SET jit = off
AS $$
-- purpose: run a kNN statement; the hits come in order of (distance, document, segment)
-- Reads: the store, as the caller
DECLARE
  _hits ml_rag.hit[];
BEGIN
  PERFORM set_config('hnsw.ef_search', ef_search, true), set_config('enable_seqscan', seqscan, true),
    set_config('ivfflat.probes', probes, true);
  EXECUTE format('SELECT array_agg(ROW(h.*)::ml_rag.hit ORDER BY h.%s, h.document_name COLLATE "C", h.document_id, '
      'h.document_key COLLATE "C", h.segment_number) FROM (%s) AS h (vector_store, document_name, document_id, '
      'document_key, segment_number, segment, distance, metadata, keyword_score, score, rerank_score, row_key, '
      'first_segment, last_segment)', CASE WHEN own_vector IS NULL THEN 'distance' ELSE 'score' END, statement)
    INTO _hits USING query_embedding, n, arguments, own_vector, rescore, row_keys;
  RETURN coalesce(_hits, '{}');
END
$$;

CREATE FUNCTION ml_rag._explain_nearest(
  store ml_rag.store, statement text, query_embedding @vector@.vector, n integer, arguments text[], ef_search text, seqscan text,
  own_vector @vector@.vector, rescore integer, probes text
) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- as ml_rag._run_nearest has it, or the plan would be another one
SET hnsw.iterative_scan = 'relaxed_order'
SET ivfflat.iterative_scan = 'relaxed_order'
SET hnsw.ef_search = 40
SET ivfflat.probes = 1
SET enable_seqscan = on
AS $$
-- purpose: how PostgreSQL reads a store for a kNN statement: {"plan", "indexes", "iterative_scan", "ef_search"}
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
  ELSIF store.missing IS NOT NULL OR ml_rag._has_shards(store.relation) THEN
    RETURN '{"plan": "shards"}';
  ELSIF ml_rag._is_distributed(store.relation) THEN
    RETURN '{"plan": "distributed"}';
  END IF;
  PERFORM set_config('hnsw.ef_search', ef_search, true), set_config('enable_seqscan', seqscan, true),
    set_config('ivfflat.probes', probes, true);
  EXECUTE format('EXPLAIN (FORMAT JSON, COSTS OFF) SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (%s) AS h', statement)
    INTO _plan USING query_embedding, n, arguments, own_vector, rescore;
  _names := ARRAY(SELECT DISTINCT j #>> '{}' FROM jsonb_path_query(_plan::jsonb, 'strict $.**."Index Name"', '{}', true)
                  AS j ORDER BY 1);
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
       ELSE jsonb_build_object('iterative_scan', current_setting(_method || '.iterative_scan')) END
    || CASE _method WHEN 'hnsw' THEN jsonb_build_object('ef_search', ef_search::integer)
         WHEN 'ivfflat' THEN jsonb_build_object('probes', probes::integer) ELSE '{}' END
    || CASE WHEN rescore IS NULL THEN '{}' ELSE jsonb_build_object('rescored', rescore) END;
END
$$;

CREATE FUNCTION ml_rag._may_fall_short(relation regclass) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
-- see ml_rag._index_needs
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
AS $$
-- purpose: whether a scan of the relation can end before it has seen every row: with an approximate index on it or on
-- what lies below it, and who knows what lies below a view or on a shard
-- Reads: the catalog
DECLARE
  _part oid;
BEGIN
  FOREACH _part IN ARRAY ml_rag._parts(relation) LOOP
    IF (SELECT c.relkind IN ('v', 'f') FROM pg_class AS c WHERE c.oid = _part) OR EXISTS (
      SELECT FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS a ON a.oid = i.relam
      WHERE x.indrelid = _part AND a.amname IN ('hnsw', 'ivfflat')) THEN
      RETURN true;
    END IF;
  END LOOP;
  RETURN false;
END
$$;

CREATE FUNCTION ml_rag._search_store(
  store ml_rag.store, request ml_rag.request, arm ml_rag.arm, with_text boolean, filter ml_rag.row_filter,
  OUT hits ml_rag.hit[], OUT facts jsonb
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments of one store that are nearest to the vector of a semantic arm, by (distance, document, segment)
-- facts: with explain, how the store was searched; explaining: how many milliseconds it took to find that out
-- Reads: the store, as the caller
DECLARE
  _n integer := arm.candidates;
  _own @vector@.vector := CASE WHEN arm.query_embedding OPERATOR(@vector@.<>) request.query_embedding THEN arm.query_embedding END;
  _vector @vector@.vector := coalesce(request.query_embedding, arm.query_embedding);
  _is_narrow boolean := filter.row_keys IS NOT NULL
    AND cardinality(filter.row_keys) <= ml_rag._compared_rows(store.relation, arm.candidates);
  _condition text := CASE WHEN _is_narrow THEN ' AND t.ctid = ANY ($6)' ELSE filter.condition END;
  _index_options jsonb := request.options -> 'index_options';
  _sort text := CASE WHEN _is_narrow OR (_index_options -> 'exact')::boolean THEN 'exact' ELSE 'index' END;
  -- More than n, to see whether the last place is shared: of equal distances those that come first by name are wanted, and
  -- the index does not know about names. Where very many share it, the rows are sorted by all of it. Each costs a read of
  -- the table, so few are enough; more where the index goes on past what is left out: in a relaxed order.
  _fetch integer := _n + _n / 10 + CASE WHEN filter.condition = '' THEN 1 ELSE 8 END;
  _reads integer := 0;
  _index record := ml_rag._index_needs(store.relation);
  _quantization text := CASE WHEN _sort = 'index' AND _index.has_expressions
    THEN ml_rag._quantization(store, request.distance_metric) END;
  _rescore integer := CASE WHEN _quantization IS NOT NULL THEN ml_rag._rescore(_index_options, _quantization, _fetch) END;
  -- an index goes on beyond it, but what it has gone past it does not come back to
  _ef_search text := coalesce(_index_options ->> 'ef_search',
    greatest(ml_rag._ef_search(store.relation), CASE WHEN _rescore IS NOT NULL THEN least(_rescore, 1000) END)::text);
  _probes text := coalesce(_index_options ->> 'probes', _index.probes);
  _seqscan text := current_setting('enable_seqscan');
  -- The planner does not know what it costs to read vectors that are stored out of line, and would sort tables of some
  -- thousand rows. Where nothing leaves rows out, their index is faster.
  _has_all_rows boolean := filter.condition = '' AND NOT row_security_active(store.relation);
  _began timestamptz;
BEGIN
  IF _has_all_rows AND store.is_table IS NOT TRUE THEN
    _has_all_rows := EXISTS (SELECT FROM pg_class AS c WHERE c.oid = store.relation AND c.relkind = 'p');
  END IF;
  LOOP
    _reads := _reads + 1;
    hits := ml_rag._run_nearest(
      ml_rag._nearest_statement(store, request.distance_metric, _condition, _sort, with_text, _own IS NOT NULL,
        CASE WHEN _sort = 'index' THEN _quantization END),
      _vector, _fetch, filter.arguments, _ef_search,
      CASE WHEN _has_all_rows AND _sort = 'index' THEN 'off' ELSE _seqscan END, _own, greatest(_rescore, _fetch), _probes,
      CASE WHEN _is_narrow THEN filter.row_keys END);
    IF cardinality(hits) < _n AND _sort = 'index' AND ml_rag._may_fall_short(store.relation) THEN
      _sort := 'exact';
      CONTINUE;
    END IF;
    EXIT WHEN cardinality(hits) < _fetch OR _sort = 'total' OR CASE WHEN _own IS NULL
      THEN hits[cardinality(hits)].distance > hits[_n].distance ELSE hits[cardinality(hits)].score > hits[_n].score END;
    IF _fetch > 700 THEN
      _sort := 'total';
      _fetch := _n;
    ELSE
      _fetch := _fetch * 4;
    END IF;
  END LOOP;
  IF request.explain THEN
    _began := clock_timestamp();
    facts := ml_rag._explain_nearest(store,
        ml_rag._nearest_statement(store, request.distance_metric, filter.condition, _sort, with_text, _own IS NOT NULL,
          CASE WHEN _sort = 'index' THEN _quantization END),
        _vector, _fetch, filter.arguments, _ef_search,
        CASE WHEN _has_all_rows AND _sort = 'index' THEN 'off' ELSE _seqscan END, _own,
        CASE WHEN _sort = 'index' AND _quantization IS NOT NULL THEN greatest(_rescore, _fetch) END, _probes)
      || jsonb_build_object('sort', _sort, 'reads', _reads, 'limit', _fetch, 'candidates', cardinality(hits));
    facts := facts || jsonb_build_object('explaining', extract(epoch FROM clock_timestamp() - _began) * 1000);
  END IF;
  hits := hits[1:_n];
  IF arm.max_distance IS NOT NULL THEN
    hits := ARRAY(SELECT h FROM unnest(hits) AS h WHERE coalesce(h.score::numeric, h.distance) <= arm.max_distance);
  END IF;
END
$$;
