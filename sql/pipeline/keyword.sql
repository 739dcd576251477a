-- keyword: the best segments over the stores by their words (BM25).

CREATE FUNCTION ml_rag._keyword_scores(store oid, segment name, key name[], terms text[], weights integer[], n integer,
  until timestamptz DEFAULT NULL, OUT candidates ml_rag.keyword_candidate[], OUT error jsonb)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
AS $$
# Stable, so that all that is read is of one moment: a run may be replaced by another at any time.
@BACKEND@
return backend.keyword_scores(plpy, store, segment, key, terms, weights, n, until)
$$;

CREATE FUNCTION ml_rag._run_keyword(
  store ml_rag.store, index ml_rag.keyword_index, terms text[], weights integer[], candidates integer,
  query_embedding vector, distance_metric text, n integer, condition text, arguments text[],
  until timestamptz, OUT hits ml_rag.hit[], OUT is_all boolean
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the n best of the candidates that the condition leaves; is_all: whether there are no further candidates;
-- until: when a store of an untrusted owner has had its time, else null
-- Calls: ml_rag._keyword_scores, ml_rag._raise, ml_rag._hit_columns, ml_rag._relation_name  Reads: the store and its index, as the caller
-- Stable for the same reason: candidates and rows are of one moment.
DECLARE
  _found record;
  _columns record := ml_rag._hit_columns(store, distance_metric, 's.score');
BEGIN
  SELECT s.candidates, s.error INTO _found
  FROM ml_rag._keyword_scores(index.store, index.segment, index.key, terms, weights, candidates, until) AS s;
  PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
  is_all := cardinality(_found.candidates) < candidates;
  EXECUTE concat(
    'SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (SELECT ', _columns.of_hit, ' FROM (SELECT ', _columns.of_row,
    ', c.score AS score FROM unnest($4) AS c JOIN ONLY ', ml_rag._relation_name(index.store), ' AS t ON ', (
      SELECT string_agg(format('t.%I = (c.key[%s])::%s', a.attname, k.place, format_type(a.atttypid, NULL)), ' AND ')
      FROM unnest(index.key) WITH ORDINALITY AS k (name, place)
      JOIN pg_attribute AS a ON a.attrelid = index.store AND a.attname = k.name AND NOT a.attisdropped),
    format(' WHERE t.%I IS NOT NULL', store.segment), condition,
    ' ORDER BY c.score DESC, ', _columns.place, ' LIMIT $2) AS s) AS h')
  INTO hits USING query_embedding, n, arguments, _found.candidates;
  hits := coalesce(hits, '{}');
END
$$;

CREATE FUNCTION ml_rag._enabling(store ml_rag.store) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the statement by which an owner makes the keyword index of a store, for hints
BEGIN
  RETURN format('SELECT ml_rag.enable_keyword_search(%L%s)', store.relation::text,
    CASE WHEN store.segment <> 'segment' THEN format(', %L', jsonb_build_object('segment', store.segment)) END);
END
$$;

CREATE FUNCTION ml_rag._keyword(
  stores ml_rag.store[], query text, n integer, query_embedding vector, distance_metric text, options jsonb,
  explain boolean, OUT hits ml_rag.hit[], OUT explained jsonb, OUT skipped text[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: ml_rag.keyword as an array and, where asked for, how each store was searched: {vector_store: {…}}. skipped:
-- stores that were left out; null = none
-- Calls: ml_rag._keyword_index, ml_rag._untrusted_last, ml_rag._share, ml_rag._limit_wait, ml_rag._untrusted_condition, ml_rag._failure,
-- ml_rag._warn_of_failures, ml_rag._explain_failures, ml_rag._warn_of_unknown_keys, ml_rag.filter, ml_rag._tokens, ml_rag._run_keyword
-- Reads: the stores and their indexes, as the caller
DECLARE
  -- most calls have no filter: those need not ask store by store
  _filters boolean := coalesce(
    options ?| '{document_name,exclude_document_name,filters,required_keywords,excluded_keywords}', false);
  _store ml_rag.store;
  _index ml_rag.keyword_index;
  _condition text := '';
  _arguments text[];
  _terms text[];
  _weights integer[];
  _candidates integer;
  _part record;
  _all ml_rag.hit[] := '{}';
  _searched boolean := false;
  _why text;
  _is_untrusted boolean;
  _ordered ml_rag.store[];
  _untrusted integer;
  _ends timestamptz;
  _until timestamptz;
  _lock_timeout text;
  _failures jsonb[] := '{}';
  _late text[] := '{}';
  _detail text;
  _hint text;
  _reads_index boolean;
  _read integer := 0;
  _narrows boolean;
  _most CONSTANT integer := 65536; -- candidates of an untrusted store: about a second
BEGIN
  hits := '{}';
  IF n IS NULL OR n < 1 OR coalesce(cardinality(stores), 0) = 0 THEN
    RETURN;
  END IF;
  SELECT o.ordered, o.untrusted INTO _ordered, _untrusted FROM ml_rag._untrusted_last(stores) AS o;
  FOREACH _store IN ARRAY _ordered LOOP
    _is_untrusted := coalesce(_store.found = 'untrusted', false);
    SELECT i.* INTO _index FROM ml_rag._keyword_index(_store.relation) AS i WHERE i.segment = _store.segment;
    IF NOT FOUND THEN
      IF cardinality(stores) > 1 THEN
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('"%s" has no keyword index; not searched by words', _store.vector_store),
          HINT = CASE WHEN (SELECT c.relkind FROM pg_class AS c WHERE c.oid = _store.relation) = 'r'
            THEN format('Its owner can make one: %s;', ml_rag._enabling(_store))
            ELSE 'Only an ordinary table can have one: search the table behind it.' END;
        IF explain THEN
          explained := coalesce(explained, '{}') || jsonb_build_object(_store.vector_store,
            '{"skipped": "It has no keyword index."}'::jsonb);
        END IF;
      END IF;
      skipped := skipped || _store.vector_store;
      _untrusted := _untrusted - _is_untrusted::integer;
      CONTINUE;
    END IF;
    _searched := true;
    IF _is_untrusted THEN
      SELECT s.ends, s.untrusted, s.until INTO _ends, _untrusted, _until FROM ml_rag._share(_ends, _untrusted) AS s;
      IF _until IS NULL THEN
        _late := _late || _store.vector_store;
        CONTINUE;
      END IF;
    END IF;
    BEGIN
      _reads_index := false;
      _lock_timeout := NULL;
      IF _is_untrusted THEN
        _lock_timeout := ml_rag._limit_wait(100);
      ELSIF _store.found = 'trusted' AND cardinality(stores) > 1 THEN
        _lock_timeout := ml_rag._limit_wait(1000);
      END IF;
      _condition := '';
      IF _filters THEN
        IF NOT _is_untrusted AND NOT coalesce((options -> 'semantic_search')::boolean, false) THEN
          -- else the other arm has
          PERFORM ml_rag._warn_of_unknown_keys(_store, options -> 'filters');
        END IF;
        SELECT f.condition, f.arguments INTO _condition, _arguments FROM ml_rag.filter(_store, _keyword.options) AS f;
      END IF;
      _narrows := _condition <> '';
      IF _is_untrusted THEN
        _condition := ml_rag._untrusted_condition(_store, _until, _condition);
      END IF;
      _reads_index := true;
      SELECT coalesce(array_agg(t.key ORDER BY t.key COLLATE "C"), '{}'),
        coalesce(array_agg(t.value::integer ORDER BY t.key COLLATE "C"), '{}')
      INTO _terms, _weights
      FROM jsonb_each_text((ml_rag._tokens(_index.configuration::regconfig, _keyword.query)).tokens) AS t;
      IF explain THEN
        explained := coalesce(explained, '{}') || jsonb_build_object(_store.vector_store, jsonb_build_object(
          'configuration', _index.configuration, 'words', _terms, 'limit', n, 'candidates', 0));
      END IF;
      -- the best ones may not pass the filters: then many more are tried, then all; without filters, candidates that are
      -- not in the table mean that it was written to with triggers off, and a second look is enough
      _candidates := CASE WHEN _narrows THEN 4 * n + 100 ELSE n END;
      SELECT '{}'::ml_rag.hit[] AS hits, true AS is_all INTO _part;
      WHILE cardinality(_terms) > 0 LOOP
        SELECT r.hits, r.is_all INTO _part
        FROM ml_rag._run_keyword(_store, _index, _terms, _weights, _candidates,
          CASE WHEN _store.dimensions IS NULL OR _store.dimensions = vector_dims(_keyword.query_embedding)
               THEN _keyword.query_embedding END,
          _keyword.distance_metric, n, _condition, _arguments, CASE WHEN _is_untrusted THEN _until END) AS r;
        EXIT WHEN cardinality(_part.hits) >= n OR _part.is_all OR NOT _narrows AND _candidates > n;
        IF _is_untrusted AND (_candidates >= _most OR clock_timestamp() > _until) THEN
          PERFORM ml_rag._out_of_time();
        END IF;
        _candidates := CASE WHEN _is_untrusted THEN least(_candidates * 50, _most)
                            WHEN _candidates < 10000 THEN _candidates * 50 ELSE 2147483647 END;
      END LOOP;
      IF _lock_timeout IS NOT NULL THEN
        PERFORM set_config('lock_timeout', _lock_timeout, true);
      END IF;
      _read := _read + 1;
    EXCEPTION WHEN OTHERS THEN
      IF _reads_index AND SQLSTATE ~ '^(22|38|F0|42704$)' THEN
        -- Its configuration was dropped, its key's type changed, or its owner wrote into it. That must not stop those who
        -- never named the store.
        _why := SQLERRM;
        IF cardinality(stores) = 1 THEN
          RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = format('the keyword index of "%s" cannot be used', _store.vector_store), DETAIL = _why,
            HINT = format('Its owner can make it anew: %s;', ml_rag._enabling(_store));
        END IF;
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('the keyword index of "%s" cannot be used; ignored', _store.vector_store), DETAIL = _why,
          HINT = format('Its owner can make it anew: %s;', ml_rag._enabling(_store));
        IF explain THEN
          explained := coalesce(explained, '{}') || jsonb_build_object(_store.vector_store,
            '{"skipped": "Its keyword index cannot be used."}'::jsonb);
        END IF;
        skipped := skipped || _store.vector_store;
        _read := _read + 1;
        CONTINUE;
      ELSIF coalesce(_store.found, 'named') = 'named' OR cardinality(stores) = 1 OR SQLSTATE = '40001' THEN
        RAISE;
      END IF;
      GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
      _failures := _failures || ml_rag._failure(_store.vector_store, SQLSTATE, SQLERRM, _detail, _hint);
      CONTINUE;
    END;
    _all := _all || _part.hits;
    IF explain THEN
      explained := jsonb_set(explained, ARRAY[_store.vector_store, 'candidates'], to_jsonb(cardinality(_part.hits)));
    END IF;
  END LOOP;
  IF NOT _searched THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'no vector store has a keyword index',
      DETAIL = format('Stores: %s.', (SELECT string_agg(s.vector_store, ', ') FROM unnest(stores) AS s)),
      HINT = format('The owner of a store can make one: %s;', ml_rag._enabling(stores[1]));
  END IF;
  IF _read = 0 AND cardinality(_failures) > 0 AND NOT coalesce((options -> 'semantic_search')::boolean, false) THEN
    PERFORM ml_rag._raise(_failures[1]);
  END IF;
  IF cardinality(_failures) > 0 OR cardinality(_late) > 0 THEN
    PERFORM ml_rag._warn_of_failures(_failures, _late);
    skipped := skipped || ARRAY(SELECT f ->> 'store' FROM unnest(_failures) AS f) || _late;
    IF explain THEN
      explained := coalesce(explained, '{}') || ml_rag._explain_failures(_failures, _late);
    END IF;
  END IF;
  hits := ARRAY(
    SELECT ROW(h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment,
      CASE WHEN h.distance > '-Infinity' AND h.distance < 'Infinity' THEN h.distance END, h.metadata, h.keyword_score, h.score, h.rerank_score)::ml_rag.hit
    FROM unnest(_all) AS h
    ORDER BY h.keyword_score DESC, h.vector_store COLLATE "C", h.document_name COLLATE "C", h.document_id,
      h.document_key COLLATE "C", h.segment_number
    LIMIT n);
END
$$;

CREATE FUNCTION ml_rag.keyword(
  stores ml_rag.store[],
  query text,
  n integer DEFAULT 3,
  query_embedding vector DEFAULT NULL,
  distance_metric text DEFAULT 'COSINE',
  options jsonb DEFAULT NULL
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the n segments of all stores that speak most of the query's words
-- Calls: ml_rag._keyword  Reads: the stores and their indexes, as the caller
DECLARE
  _found record := ml_rag._keyword(stores, query, n, query_embedding, distance_metric, options, false);
BEGIN
  RETURN QUERY SELECT h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment,
      h.distance, h.metadata, h.keyword_score, h.score, h.rerank_score
    FROM unnest(_found.hits) WITH ORDINALITY AS h ORDER BY h.ordinality;
END
$$;
COMMENT ON FUNCTION ml_rag.keyword(ml_rag.store[], text, integer, vector, text, jsonb) IS
$$the n segments of the stores that match the words of the query best, best first
keyword_score is BM25 (Lucene's variant), from the statistics of the segment's own store; segments without any of the
words do not come. Equal scores go by store, document and segment. distance is filled where query_embedding is given and
fits. options: those of ml_rag that leave rows out, see ml_rag.filter; they apply before the limit. A store without a
keyword index, or with one that cannot be used, is left out with a warning. Errors: 55000 no store has one, the only
store's cannot be used, or numpy is missing; those of ml_rag.filter.$$;
