-- arms: what each arm of a request finds, store by store. An arm and a store are the unit of work: of isolation, of explain.

CREATE FUNCTION ml_rag._add_texts(store ml_rag.store, hits ml_rag.hit[]) RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: all the hits, those of one store with segment and metadata, which candidates do not carry
-- The row keys are those of the snapshot that the candidates were found in, so a row is there unless a policy has changed
-- its mind.
-- Calls: ml_rag._relation_name  Reads: the store, as the caller
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
-- Calls: ml_rag._hit_columns, ml_rag._has_values, ml_rag._relation_name  Reads: the store, as the caller
DECLARE
  _columns record := ml_rag._hit_columns(store, 'COSINE', true);
  _hit ml_rag.hit;
  _hits ml_rag.hit[] := '{}';
  _n integer := 0;
  _bytes bigint := 0;
BEGIN
  -- row by row, so that no more than that is in memory
  FOR _hit IN EXECUTE concat(
    'SELECT ', _columns.of_hit, ' FROM (SELECT ', _columns.of_row, ' FROM ', ml_rag._relation_name(store.relation),
    ' AS t WHERE ', ml_rag._has_values(store, ARRAY[store.segment]), filter.condition,
    ' ORDER BY ', _columns.place, ' LIMIT $2) AS s') USING NULL::vector, most + 1, filter.arguments
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
  stage text, store ml_rag.store, is_only boolean, until timestamptz, request ml_rag.request, arm ml_rag.arm,
  index ml_rag.keyword_index, with_text boolean, INOUT hits ml_rag.hit[], INOUT filter ml_rag.row_filter,
  most integer DEFAULT NULL, longest bigint DEFAULT NULL, OUT facts jsonb, OUT failure jsonb
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the one place where a stage (search, keyword, function, read, text, expand) reads a store. What goes wrong in one that the call
-- does not name comes back as a failure, and the wait for its lock is short; of another one it is raised.
-- search, keyword, function: hits are what the arm finds; read: the segments, see ml_rag._segments_of; text, expand: the hits
-- given, with those of the store changed. filter: null until it is made; it is given back, so that each store's is made once.
-- until: of ml_rag._share
-- Calls: ml_rag._limit_wait, ml_rag._hold, ml_rag._is_filtered, ml_rag._warn_of_unknown_keys, ml_rag.filter,
-- ml_rag._passing_rows, ml_rag._untrusted_condition, ml_rag._search_nodes, ml_rag._search_store, ml_rag._keyword_store,
-- ml_rag._open_rows, ml_rag._next_rows, ml_rag._call_function, ml_rag._add_scored, ml_rag._segments_of, ml_rag._add_texts,
-- ml_rag._expand_store, ml_rag._raise, ml_rag._failure
-- Reads: the store, as the caller
DECLARE
  _is_untrusted boolean := coalesce(store.found = 'untrusted', false);
  _used ml_rag.row_filter;
  _found record;
  _rows refcursor;
  _scores double precision[];
  _is_calling boolean := false;
  _former_wait text;
  _detail text;
  _hint text;
BEGIN
  IF _is_untrusted THEN
    _former_wait := ml_rag._limit_wait(100, store.relation);
  ELSIF store.found = 'trusted' THEN
    IF NOT is_only THEN
      _former_wait := ml_rag._limit_wait(1000);
    END IF;
    PERFORM ml_rag._hold(store.relation);
  END IF;
  IF stage = 'search' OR stage = 'keyword' OR stage = 'function' OR stage = 'read' THEN
    IF filter.condition IS NULL THEN
      IF NOT ml_rag._is_filtered(request.options) THEN
        filter.condition := '';
      ELSE
        IF NOT _is_untrusted THEN
          PERFORM ml_rag._warn_of_unknown_keys(store, request.options -> 'filters');
        END IF;
        _found := ml_rag.filter(store, request.options);
        filter.condition := _found.condition;
        filter.arguments := _found.arguments;
        IF store.is_table AND NOT _is_untrusted AND filter.condition <> '' AND stage <> 'read' THEN
          filter.row_keys := ml_rag._passing_rows(store, filter.condition, filter.arguments);
        END IF;
      END IF;
    END IF;
    _used := CASE WHEN _is_untrusted
      THEN ROW(ml_rag._untrusted_condition(store, until,
          CASE WHEN stage = 'search' OR arm.form LIKE 'vector%' THEN format(' AND t.%I IS NOT NULL', store.segment_embedding)
            ELSE '' END || filter.condition),
        filter.arguments, NULL)::ml_rag.row_filter
      ELSE filter END;
  END IF;
  CASE (CASE WHEN arm.node_group IS NULL THEN stage ELSE 'nodes' END)
  WHEN 'nodes' THEN
    _found := ml_rag._search_nodes(store, index, request, arm, with_text, _used);
    hits := _found.hits;
    facts := _found.facts;
    failure := _found.failure;
    IF failure IS NOT NULL AND is_only THEN
      PERFORM ml_rag._raise(failure);
    END IF;
  WHEN 'search' THEN
    _found := ml_rag._search_store(store, request, arm, with_text OR _is_untrusted, _used);
    hits := _found.hits;
    facts := _found.facts;
  WHEN 'keyword' THEN
    _found := ml_rag._keyword_store(store, index, request, arm, with_text OR _is_untrusted, _used,
      filter.condition <> '', CASE WHEN _is_untrusted THEN until END);
    hits := _found.hits;
    facts := _found.facts;
    failure := _found.failure;
    IF failure IS NOT NULL AND is_only THEN
      PERFORM ml_rag._raise(failure);
    END IF;
  WHEN 'function' THEN
    _rows := ml_rag._open_rows(store, request, arm, with_text OR _is_untrusted, _used);
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
    hits := ml_rag._segments_of(store, _used, most, longest);
  WHEN 'text' THEN
    hits := ml_rag._add_texts(store, hits);
  WHEN 'expand' THEN
    hits := ml_rag._expand_store(store, hits, request.segment_overlap, CASE WHEN _is_untrusted THEN until END);
  END CASE;
  IF _former_wait IS NOT NULL THEN
    PERFORM set_config('lock_timeout', _former_wait, true);
  END IF;
EXCEPTION WHEN OTHERS THEN
  -- a transaction that cannot go on is no matter of a store, nor is an error of the caller's own function
  IF coalesce(store.found, 'named') = 'named' OR is_only OR SQLSTATE = '40001' OR _is_calling THEN
    RAISE;
  END IF;
  GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
  failure := ml_rag._failure(store.vector_store, SQLSTATE, SQLERRM, _detail, _hint);
  IF stage = 'expand' THEN
    failure := failure || jsonb_build_object(
      'warning', format('the neighbours of segments of "%s" cannot be read', store.vector_store),
      'skipped', format('%s: %s.', SQLSTATE, rtrim(left(SQLERRM, 500), '.')),
      'warning_hint', 'Its segments are cited without neighbours, as with "segment_overlap": 0.');
  END IF;
END
$$;

CREATE FUNCTION ml_rag._other_dimensions(store ml_rag.store, query_embedding vector) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the failure of a store whose vectors cannot be compared with the query embedding  Calls: ml_rag._failure
BEGIN
  RETURN ml_rag._failure(store.vector_store, '22000', 'the query embedding and the vector store differ in dimensions',
      format('The query embedding has %s dimensions, %s.%I has %s.', vector_dims(query_embedding),
        store.vector_store, store.segment_embedding, store.dimensions),
      'Name the store''s own model in "embed_model_id", or leave the store out with "exclude_vector_store".')
    || jsonb_build_object(
      'warning', format('"%s" has other dimensions than the query embedding; ignored', store.vector_store),
      'skipped', format('It has %s dimensions, the query embedding %s.', store.dimensions, vector_dims(query_embedding)),
      'warning_hint', 'Correct the model in its marker comment, or leave the store out with "exclude_vector_store".');
END
$$;

CREATE FUNCTION ml_rag._best_of(hits ml_rag.hit[], n integer) RETURNS ml_rag.hit[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the n best of what an arm has found in several stores: of a keyword arm those of the highest score, else the
-- nearest. Also what keeps the hits of many stores from adding up: each brings n, and a segment can have 100 kB
BEGIN
  RETURN ARRAY(
    SELECT h FROM unnest(hits) AS h
    ORDER BY h.keyword_score DESC, CASE WHEN h.keyword_score IS NULL THEN coalesce(h.score::numeric, h.distance) END,
      h.vector_store COLLATE "C", h.document_name COLLATE "C", h.document_id, h.document_key COLLATE "C", h.segment_number
    LIMIT n);
END
$$;

CREATE FUNCTION ml_rag._search_arm(
  request ml_rag.request, arm ml_rag.arm, stores ml_rag.store[], with_text boolean, has_found boolean,
  INOUT filters ml_rag.row_filter[], INOUT ends timestamptz DEFAULT NULL, arms integer DEFAULT 1,
  INOUT told jsonb[] DEFAULT '{}',
  OUT hits ml_rag.hit[], OUT skipped text[], OUT facts jsonb
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the best segments of all stores by one arm. filters: of the stores, made where the first arm needs them; skipped:
-- stores that were left out; facts: with explain, how each store was searched: {vector_store: {…}}. has_found: whether an
-- earlier arm could search some store; else an error of all stores is one of the call. ends: of ml_rag._share, null for the
-- first arm; arms: how many share that time from here on; told: failures that were warned of
-- Calls: ml_rag._untrusted_last, ml_rag._nodes, ml_rag._keyword_index, ml_rag._share, ml_rag._other_dimensions, ml_rag._raise,
-- ml_rag._warn_of_no_nodes, ml_rag._read_store, ml_rag._best_scored, ml_rag._best_of, ml_rag._enabling,
-- ml_rag._warn_of_no_index, ml_rag._warn_of_failures, ml_rag._explain_failures
-- Reads: the stores, as the caller
DECLARE
  _is_keyword boolean := arm.search = 'keyword';
  _vector vector := coalesce(arm.query_embedding, request.query_embedding);
  _is_only boolean := cardinality(stores) = 1;
  _store ml_rag.store;
  _searched_in ml_rag.store;  -- the store, or its node group
  _without_nodes ml_rag.store[] := '{}';
  _index ml_rag.keyword_index;
  _read record;
  _searched integer := 0;
  _indexed boolean := false;
  _without_index ml_rag.store[] := '{}';
  _ordered ml_rag.store[];
  _untrusted integer;
  _until timestamptz;
  _failure jsonb;
  _failures jsonb[] := '{}';
  _late text[] := '{}';
  _place integer := 0;
BEGIN
  hits := '{}';
  SELECT o.ordered, o.untrusted INTO _ordered, _untrusted FROM ml_rag._untrusted_last(stores) AS o;
  IF _is_only THEN
    -- nobody else is held up
    ends := NULL;
  ELSE
    _untrusted := _untrusted * arms;
  END IF;
  FOREACH _store IN ARRAY _ordered LOOP
    _place := _place + 1;
    _searched_in := CASE WHEN arm.node_group IS NULL THEN _store ELSE ml_rag._nodes(_store, arm) END;
    IF _searched_in IS NULL THEN
      _without_nodes := _without_nodes || _store;
      _untrusted := _untrusted - (_store.found = 'untrusted')::integer;
      CONTINUE;
    ELSIF _is_keyword THEN
      SELECT i.* INTO _index FROM ml_rag._keyword_index(_searched_in.relation) AS i WHERE i.segment = _searched_in.segment;
      IF NOT FOUND AND arm.node_group IS NOT NULL THEN
        _without_nodes := _without_nodes || _store;
        CONTINUE;
      ELSIF NOT FOUND THEN
        _without_index := _without_index || _store;
        _untrusted := _untrusted - (_store.found = 'untrusted')::integer;
        CONTINUE;
      END IF;
      _indexed := true;
    ELSIF _searched_in.dimensions <> vector_dims(_vector) AND coalesce(arm.form LIKE 'vector%', true) THEN
      _failure := ml_rag._other_dimensions(_searched_in, _vector);
      IF NOT request.skips_dimensions AND _store.found IS DISTINCT FROM 'untrusted' THEN
        PERFORM ml_rag._raise(_failure);
      END IF;
      _failures := _failures || _failure;
      _untrusted := _untrusted - (_store.found = 'untrusted')::integer;
      CONTINUE;
    END IF;
    IF _store.found = 'untrusted' THEN
      SELECT s.ends, s.untrusted, s.until INTO ends, _untrusted, _until FROM ml_rag._share(ends, _untrusted) AS s;
      IF _until IS NULL THEN
        _late := _late || _store.vector_store;
        CONTINUE;
      END IF;
    END IF;
    _read := ml_rag._read_store(CASE arm.search WHEN 'semantic' THEN 'search' ELSE arm.search END, _store, _is_only, _until, request,
      arm, _index, with_text, NULL, filters[_place]);
    IF _store.found = 'trusted' AND _read.failure ->> 'sqlstate' = '22023'
      AND _read.failure ->> 'message' ~ '^(invalid value for option "filters"|operator is not supported)' THEN
      -- a value of filters that its column does not take: without the store the answer would be another one
      PERFORM ml_rag._raise(_read.failure || jsonb_build_object('hint', format(
        'It is the filter on "%s"; name the stores to search in "vector_store", or leave that one out.', _store.vector_store)));
    ELSIF _read.failure IS NOT NULL THEN
      _failures := _failures || _read.failure;
      CONTINUE;
    END IF;
    _searched := _searched + 1;
    filters[_place] := _read.filter;
    hits := hits || _read.hits;
    IF cardinality(hits) / 2 > arm.candidates THEN
      hits := CASE arm.search WHEN 'function' THEN ml_rag._best_scored(hits, arm.candidates, arm.is_descending)
                              ELSE ml_rag._best_of(hits, arm.candidates) END;
    END IF;
    IF request.explain THEN
      facts := coalesce(facts, '{}') || jsonb_build_object(_store.vector_store, _read.facts);
    END IF;
  END LOOP;
  IF cardinality(_without_nodes) > 0 THEN
    PERFORM ml_rag._warn_of_no_nodes(_without_nodes, arm, cardinality(_without_nodes) = cardinality(stores));
  END IF;
  IF _is_keyword AND NOT _indexed THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'no vector store has a keyword index',
      DETAIL = format('Stores: %s.', (SELECT string_agg(s.vector_store, ', ') FROM unnest(stores) AS s)),
      HINT = format('The owner of a store can create one: %s;', ml_rag._enabling(stores[1]));
  END IF;
  IF _searched = 0 AND cardinality(_failures) > 0 AND NOT has_found THEN
    PERFORM ml_rag._raise(_failures[1]);
  END IF;
  IF cardinality(_without_index) > 0 THEN
    PERFORM ml_rag._warn_of_no_index(_without_index);
  END IF;
  IF cardinality(_failures) > 0 OR cardinality(_late) > 0 THEN
    -- what an earlier arm has warned of is not told again
    PERFORM ml_rag._warn_of_failures(ARRAY(SELECT f FROM unnest(_failures) AS f WHERE f <> ALL (told)), _late);
    told := told || _failures;
  END IF;
  skipped := ARRAY(SELECT s.vector_store FROM unnest(_without_index || _without_nodes) AS s)
    || ARRAY(SELECT f ->> 'store' FROM unnest(_failures) AS f) || _late;
  IF request.explain AND cardinality(skipped) > 0 THEN
    facts := coalesce(facts, '{}') || ml_rag._explain_failures(_failures, _late)
      || coalesce((SELECT jsonb_object_agg(s.vector_store, '{"skipped": "It has no keyword index."}'::jsonb)
                   FROM unnest(_without_index) AS s), '{}')
      || coalesce((SELECT jsonb_object_agg(s.vector_store, '{"skipped": "It has no such node group."}'::jsonb)
                   FROM unnest(_without_nodes) AS s), '{}');
  END IF;
  IF _searched > 1 OR arm.search = 'function' THEN
    hits := CASE arm.search WHEN 'function' THEN ml_rag._best_scored(hits, arm.candidates, arm.is_descending)
                            ELSE ml_rag._best_of(hits, arm.candidates) END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._search_arms(request ml_rag.request, retrieval ml_rag.retrieval, with_text boolean)
RETURNS ml_rag.retrieval
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the rankings of all arms, and the stores that none of them could search
-- with_text: false = candidates of ordinary tables come without their segment and metadata, see ml_rag._add_texts
-- Calls: ml_rag._stage, ml_rag._warn_of_unknown_columns, ml_rag._search_arm
DECLARE
  _arm ml_rag.arm;
  _found record;
  _filters ml_rag.row_filter[] := '{}';
  _told_failures jsonb[] := '{}';
  _has_found boolean := false;
  _semantic_ends timestamptz;
  _keyword_ends timestamptz;
  _place integer := 0;
  _stage text;
  _told boolean;
BEGIN
  IF request.options ? 'filters' THEN
    PERFORM ml_rag._warn_of_unknown_columns(retrieval.stores, request.options -> 'filters');
  END IF;
  FOREACH _arm IN ARRAY request.arms LOOP
    _place := _place + 1;
    _stage := CASE _arm.search WHEN 'semantic' THEN 'search' ELSE _arm.search END;
    _told := ml_rag._stage(request.call, _stage);
    _found := ml_rag._search_arm(request, _arm, retrieval.stores, with_text, _has_found, _filters,
      CASE _arm.search WHEN 'semantic' THEN _semantic_ends ELSE _keyword_ends END,
      (SELECT count(*)::integer FROM unnest(request.arms[_place:]) AS a
       WHERE (a.search = 'semantic') = (_arm.search = 'semantic')), _told_failures);
    _filters := _found.filters;
    _told_failures := _found.told;
    IF _arm.search = 'semantic' THEN
      _semantic_ends := _found.ends;
    ELSE
      _keyword_ends := _found.ends;
    END IF;
    _has_found := _has_found OR cardinality(_found.skipped) < cardinality(retrieval.stores);
    retrieval.skipped := CASE WHEN retrieval.rankings IS NULL THEN _found.skipped
      ELSE ARRAY(SELECT unnest(retrieval.skipped) INTERSECT SELECT unnest(_found.skipped)) END;
    retrieval.rankings := retrieval.rankings || ROW(_arm, _found.hits)::ml_rag.ranking;
    retrieval.trace := retrieval.trace || ROW(_stage, clock_timestamp(), CASE WHEN request.explain THEN
      jsonb_build_object('arm', _arm.name, 'stores', _found.facts, 'candidates', cardinality(_found.hits)) END)::ml_rag.step;
  END LOOP;
  RETURN retrieval;
END
$$;

CREATE FUNCTION ml_rag._read_hits(stage text, request ml_rag.request, retrieval ml_rag.retrieval) RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the hits of a retrieval after the stage text or expand has read their stores; what fails leaves them as they are
-- Calls: ml_rag._untrusted_last, ml_rag._share, ml_rag._read_store, ml_rag._warn_of_failures
-- Reads: the stores, as the caller
DECLARE
  _hits ml_rag.hit[] := retrieval.hits;
  _names text[] := ARRAY(SELECT DISTINCT h.vector_store FROM unnest(_hits) AS h);
  _store ml_rag.store;
  _ordered ml_rag.store[];
  _untrusted integer;
  _ends timestamptz;
  _until timestamptz;
  _read record;
  _failures jsonb[] := '{}';
  _late text[] := '{}';
BEGIN
  SELECT o.ordered, o.untrusted INTO _ordered, _untrusted
  FROM ml_rag._untrusted_last(ARRAY(SELECT s FROM unnest(retrieval.stores) AS s WHERE s.vector_store = ANY (_names))) AS o;
  FOREACH _store IN ARRAY _ordered LOOP
    CONTINUE WHEN CASE stage
      WHEN 'expand' THEN _store.segment_number IS NULL OR coalesce(_store.document_id, _store.document_name) IS NULL
      -- those of others have their texts already
      ELSE _store.is_table IS NOT TRUE OR coalesce(_store.found = 'untrusted', false) END;
    _until := NULL;
    IF _store.found = 'untrusted' THEN
      SELECT s.ends, s.untrusted, s.until INTO _ends, _untrusted, _until FROM ml_rag._share(_ends, _untrusted) AS s;
      IF _until IS NULL THEN
        _late := _late || _store.vector_store;
        CONTINUE;
      END IF;
    END IF;
    _read := ml_rag._read_store(stage, _store, cardinality(retrieval.stores) = 1, _until, request, NULL, NULL, NULL, _hits,
      NULL);
    IF _read.failure IS NULL THEN
      _hits := _read.hits;
    ELSE
      _failures := _failures || _read.failure;
    END IF;
  END LOOP;
  IF cardinality(_failures) > 0 OR cardinality(_late) > 0 THEN
    PERFORM ml_rag._warn_of_failures(_failures, _late);
  END IF;
  RETURN _hits;
END
$$;

CREATE FUNCTION ml_rag._search_by_one_arm(
  search text, stores ml_rag.store[], n integer, question text, query_embedding vector, distance_metric text, options jsonb,
  skips_dimensions boolean, has_found boolean, OUT hits ml_rag.hit[], OUT request ml_rag.request, OUT arm ml_rag.arm
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stages ml_rag.search and ml_rag.keyword where they are called by themselves
-- Calls: ml_rag._search_arm  Reads: the stores, as the caller
DECLARE
  _found record;
BEGIN
  hits := '{}';
  IF coalesce(n, 0) < 1 OR coalesce(cardinality(stores), 0) = 0 THEN
    RETURN;
  END IF;
  request.question := question;
  request.options := coalesce(options, '{}');
  request.query_embedding := query_embedding;
  request.distance_metric := distance_metric;
  request.skips_dimensions := skips_dimensions;
  request.explain := false;
  arm.search := search;
  arm.candidates := n;
  _found := ml_rag._search_arm(request, arm, stores, true, has_found, '{}');
  hits := _found.hits;
END
$$;
