-- read: the one place that reads a vector store in a call, and what it reads beside the arms: texts and whole documents

CREATE FUNCTION ml_rag._add_texts(store ml_rag.store, hits ml_rag.hit[]) RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: all the hits, those of one store with segment and metadata, which candidates do not carry
-- The row keys are those of the snapshot that the candidates were found in, so a row is there unless a policy has changed
-- its mind.
-- Reads: the store, as the caller
DECLARE
  _keys tid[] := ARRAY(SELECT h.row_key::tid FROM unnest(hits) AS h
                       WHERE h.vector_store = store.vector_store AND h.segment IS NULL);
BEGIN
  IF cardinality(_keys) = 0 THEN
    RETURN hits;
  END IF;
  EXECUTE format(
    'SELECT array_agg(ROW(h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, '
    'coalesce(h.segment, t.segment), h.distance, coalesce(h.metadata, t.metadata), h.keyword_score, h.score, '
    'h.rerank_score, CASE WHEN t.row_key IS NULL THEN h.row_key END, h.first_segment, h.last_segment)::ml_rag.hit ORDER BY h.place) '
    'FROM unnest($1) WITH ORDINALITY AS h (vector_store, document_name, document_id, document_key, segment_number, '
    'segment, distance, metadata, keyword_score, score, rerank_score, row_key, first_segment, last_segment, place) '
    'LEFT JOIN (SELECT t.ctid AS row_key, t.%I::text AS segment, %s AS metadata FROM %s AS t WHERE t.ctid = ANY ($2)) AS t '
    'ON t.row_key = CASE WHEN h.vector_store = $3 AND h.segment IS NULL THEN h.row_key::tid END '
    'WHERE h.vector_store <> $3 OR h.segment IS NOT NULL OR t.row_key IS NOT NULL',
    store.segment, CASE WHEN store.metadata IS NULL THEN 'NULL::jsonb' ELSE format('to_jsonb(t.%I)', store.metadata) END,
      ml_rag._relation_name(store.relation))
  INTO hits USING hits, _keys, store.vector_store;
  RETURN coalesce(hits, '{}');
END
$$;

CREATE FUNCTION ml_rag._segments_of(store ml_rag.store, filter ml_rag.row_filter, most integer, longest bigint)
RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments of one store that a filter leaves, by document and number, until there are more than most, or they have
-- more than longest bytes together
-- Reads: the store, as the caller
DECLARE
  _columns record := ml_rag._hit_columns(store, 'COSINE', true);
  _hit ml_rag.hit;
  _hits ml_rag.hit[] := '{}';
  _n integer := 0;
  _bytes bigint := 0;
BEGIN
  -- row by row, so that no more than that is in memory
  FOR _hit IN EXECUTE concat(
    'SELECT ', _columns.of_hit, ' FROM (SELECT ', _columns.of_row, ' FROM ', ml_rag._rows_of(store),
    ' AS t WHERE ', ml_rag._has_values(ARRAY[store.segment]), filter.condition,
    ' ORDER BY ', _columns.place, ' LIMIT $2) AS s') USING NULL::@vector@.vector, most + 1, filter.arguments
  LOOP
    _n := _n + 1;
    _hits[_n] := _hit;
    _bytes := _bytes + octet_length(_hit.segment);
    EXIT WHEN _bytes > longest;
  END LOOP;
  RETURN _hits;
END
$$;

CREATE FUNCTION ml_rag._read_store(
  stage text, store ml_rag.store, is_only boolean, request ml_rag.request, arm ml_rag.arm,
  index ml_rag.keyword_index, with_text boolean, INOUT hits ml_rag.hit[], INOUT filter ml_rag.row_filter,
  most integer DEFAULT NULL, longest bigint DEFAULT NULL, corpus jsonb DEFAULT NULL, OUT facts jsonb, OUT failure jsonb
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the one place where a stage (search, keyword, function, read, text, expand) reads a store. What goes wrong in one that the call
-- does not name comes back as a failure, and the wait for its lock is short; of another one it is raised.
-- search, keyword, function: hits are what the arm finds; read: the segments, see ml_rag._segments_of; text, expand: the hits
-- given, with those of the store changed. filter: null until it is made; it is given back, so that each store's is made once.
-- corpus: of ml_rag._keyword_scores
-- Reads: the store, as the caller
DECLARE
  _shards regclass[];
  _found record;
  _rows refcursor;
  _scores double precision[];
  _is_calling boolean := false;
  _former_wait text;
  _detail text;
  _hint text;
  _context text;
BEGIN
  IF store.found = 'trusted' AND NOT is_only THEN
    _former_wait := ml_rag._limit_wait(1000);
  END IF;
  PERFORM ml_rag._hold(CASE WHEN arm.node_group IS NULL THEN ml_rag._parts(store.relation) ELSE ml_rag._node_tables(store.relation) END)
  WHERE store.found = 'trusted';
  IF store.is_table IS NOT TRUE THEN
    IF (SELECT c.relkind FROM pg_class AS c WHERE c.oid = store.relation) = 'p' THEN
      -- no shard comes or goes from here on
      PERFORM ml_rag._lock_partitions(store.relation);
    END IF;
  END IF;
  IF stage = 'search' OR stage = 'keyword' OR stage = 'function' OR stage = 'read' THEN
    IF filter.condition IS NULL THEN
      IF NOT ml_rag._is_filtered(request.options) THEN
        filter.condition := '';
      ELSE
        PERFORM ml_rag._warn_of_unknown_keys(store, request.options -> 'filters');
        filter := ml_rag._row_filter(store, request.options, stage, arm.candidates,
          arm.node_group IS NULL AND (stage = 'search' OR stage = 'keyword' AND NOT index.secured));
      END IF;
    ELSIF filter.likely IS NOT NULL AND (stage <> 'keyword' OR arm.node_group IS NOT NULL) THEN
      filter.row_keys := ml_rag._passing_rows(store, filter.condition, filter.arguments);
      filter.likely := NULL;
    END IF;
  END IF;
  IF store.is_table IS NOT TRUE AND (stage = 'keyword' OR stage = 'search' AND (
      -- of a few rows without filters one statement takes less: postgres_fdw ships its ORDER BY and LIMIT, but reads vectors as text,
      -- may read all rows where it cannot ship a filter, and has no settings of an index
      arm.candidates > 50 OR filter.condition <> '' OR request.options -> 'index_options' ?| '{ef_search,probes,rescore}')) THEN
    _shards := ml_rag._asked_shards(store, stage = 'keyword');
  END IF;
  CASE (CASE WHEN arm.node_group IS NOT NULL THEN 'nodes' WHEN _shards IS NOT NULL THEN 'shards' ELSE stage END)
  WHEN 'nodes' THEN
    _found := ml_rag._search_nodes(store, index, request, arm, with_text, filter);
    hits := _found.hits;
    facts := _found.facts;
    failure := _found.failure;
  WHEN 'shards' THEN
    _found := ml_rag._search_shards(store, _shards, index, request, arm, filter);
    hits := _found.hits;
    facts := _found.facts;
    failure := _found.failure;
  WHEN 'search' THEN
    _found := ml_rag._search_store(store, request, arm, with_text, filter);
    hits := _found.hits;
    facts := _found.facts;
  WHEN 'keyword' THEN
    _found := ml_rag._keyword_store(store, index, request, arm, with_text, filter, filter.condition <> '', corpus);
    hits := _found.hits;
    facts := _found.facts;
    failure := _found.failure;
  WHEN 'function' THEN
    _rows := ml_rag._open_rows(store, request, arm, with_text, filter);
    IF _former_wait IS NOT NULL THEN
      -- all locks are there; those that the function waits for are its own
      PERFORM set_config('lock_timeout', _former_wait, true);
      _former_wait := NULL;
    END IF;
    hits := '{}';
    facts := '{"rows": 0}';
    LOOP
      _found := ml_rag._next_rows(_rows);
      EXIT WHEN _found.hits IS NULL;
      _is_calling := true;
      _scores := ml_rag._call_function(arm.function, arm.form, coalesce(array_to_string(arm.query, ' '), request.question),
        coalesce(arm.query_embedding, request.query_embedding), _found.texts, _found.embeddings);
      _is_calling := false;
      hits := ml_rag._add_scored(hits, _found.hits, _scores, arm);
      facts := jsonb_build_object('rows', (facts -> 'rows')::integer + cardinality(_scores));
    END LOOP;
    CLOSE _rows;
    facts := facts || jsonb_build_object('function', arm.function, 'limit', arm.candidates, 'candidates', cardinality(hits));
  WHEN 'read' THEN
    hits := ml_rag._segments_of(store, filter, most, longest);
  WHEN 'text' THEN
    hits := ml_rag._add_texts(store, hits);
  WHEN 'expand' THEN
    hits := ml_rag._expand_store(store, hits, request.segment_overlap);
  END CASE;
  IF failure IS NOT NULL AND is_only THEN
    PERFORM ml_rag._raise(failure);
  END IF;
  IF _former_wait IS NOT NULL THEN
    PERFORM set_config('lock_timeout', _former_wait, true);
  END IF;
EXCEPTION WHEN query_canceled OR OTHERS THEN
  GET STACKED DIAGNOSTICS _context = PG_EXCEPTION_CONTEXT, _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
  failure := ml_rag._shard_failure(store, SQLSTATE, SQLERRM, _detail, _context);
  IF failure IS NOT NULL AND (coalesce(store.found, 'named') = 'named' OR is_only) THEN
    PERFORM ml_rag._raise(failure);
  ELSIF failure IS NOT NULL THEN
    RETURN;
  ELSIF SQLSTATE = '57014' THEN
    RAISE;
  END IF;
  -- a transaction that cannot go on is no matter of a store, nor is an error of the caller's own function
  IF coalesce(store.found, 'named') = 'named' OR is_only OR SQLSTATE = '40001' OR _is_calling THEN
    RAISE;
  END IF;
  failure := ml_rag._failure(store.vector_store, SQLSTATE, SQLERRM, _detail, _hint);
  IF stage = 'expand' THEN
    failure := failure || jsonb_build_object(
      'warning', format('the neighbours of segments of "%s" cannot be read', store.vector_store),
      'skipped', format('%s: %s.', SQLSTATE, rtrim(left(SQLERRM, 500), '.')),
      'warning_hint', 'Its segments are cited without neighbours, as with "segment_overlap": 0.');
  END IF;
END
$$;

CREATE FUNCTION ml_rag._read_hits(stage text, request ml_rag.request, retrieval ml_rag.retrieval) RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the hits of a retrieval after the stage text or expand has read their stores; what fails leaves them as they are
-- Reads: the stores, as the caller
DECLARE
  _hits ml_rag.hit[] := retrieval.hits;
  _names text[] := ARRAY(SELECT DISTINCT h.vector_store FROM unnest(_hits) AS h ORDER BY 1);
  _store ml_rag.store;
  _read record;
  _failures jsonb[] := '{}';
BEGIN
  FOREACH _store IN ARRAY ARRAY(SELECT s FROM unnest(retrieval.stores) AS s WHERE s.vector_store = ANY (_names)) LOOP
    CONTINUE WHEN CASE stage
      WHEN 'expand' THEN _store.segment_number IS NULL OR coalesce(_store.document_id, _store.document_name) IS NULL
      -- those of others have their texts already
      ELSE _store.is_table IS NOT TRUE END;
    _read := ml_rag._read_store(stage, _store, cardinality(retrieval.stores) = 1, request, NULL, NULL, NULL, _hits, NULL);
    IF _read.failure IS NULL THEN
      _hits := _read.hits;
    ELSE
      _failures := _failures || _read.failure;
    END IF;
  END LOOP;
  IF cardinality(_failures) > 0 THEN
    PERFORM ml_rag._warn_of_failures(_failures);
  END IF;
  RETURN _hits;
END
$$;
