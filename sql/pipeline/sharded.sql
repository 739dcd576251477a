-- sharded: an arm of a store with shards. Each shard runs it by itself, as it runs those of its own searches, and so do the partitions
-- that are here; the best of all are what the arm finds.

CREATE FUNCTION ml_rag._keyword_statistics(store oid, segment name, key name[], terms text[], OUT statistics jsonb, OUT error jsonb)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
AS $$
# purpose: [rows, tokens, [in how many rows each term stands]] of a keyword index, for the caller
@BACKEND@
return backend.keyword_statistics(plpy, store, segment, key, terms)
$$;

CREATE FUNCTION ml_rag._add_statistics(a jsonb, b jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the statistics of two parts of a store as those of both
BEGIN
  RETURN CASE WHEN a IS NULL THEN b ELSE jsonb_build_array((a -> 0)::bigint + (b -> 0)::bigint, (a -> 1)::bigint + (b -> 1)::bigint, (
    SELECT jsonb_agg(x.n::bigint + (b -> 2 -> (x.place - 1)::integer)::bigint ORDER BY x.place)
    FROM jsonb_array_elements(a -> 2) WITH ORDINALITY AS x (n, place))) END;
END
$$;

CREATE FUNCTION ml_rag._check_statistics(shard regclass, answer jsonb, terms integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: that a shard, which can be anybody's server, has answered with counts of rows, tokens and each of the terms
DECLARE
  _counts jsonb := answer -> 'statistics';
BEGIN
  IF coalesce(jsonb_typeof(_counts) <> 'array' OR jsonb_array_length(_counts) <> 3 OR jsonb_typeof(_counts -> 2) <> 'array'
              OR jsonb_array_length(_counts -> 2) <> terms
              OR EXISTS (SELECT FROM jsonb_array_elements((_counts - 2) || (_counts -> 2)) AS c
                         WHERE jsonb_typeof(c) <> 'number' OR c::numeric NOT BETWEEN 0 AND 1e15 OR scale(c::numeric) > 0)
              -- more rows with a term than rows would turn the order round
              OR EXISTS (SELECT FROM jsonb_array_elements(_counts -> 2) AS c WHERE c::numeric > (_counts -> 0)::numeric), true) THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('unexpected answer of shard "%s"', shard),
      DETAIL = format('It has no counts of rows, tokens and %s words.', terms);
  END IF;
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

CREATE FUNCTION ml_rag._check_hits(shard regclass, answer jsonb, n integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: that a shard, which can be anybody's server, has answered with at most n hits, each of what a hit consists of
DECLARE
  _hits jsonb := answer -> 'hits';
  _types CONSTANT jsonb := '{"document_name": "string", "document_id": "number", "document_key": "string", "segment_number": "number",
    "segment": "string", "distance": "number", "keyword_score": "number", "score": "number"}';
  _why text;
BEGIN
  IF coalesce(jsonb_typeof(_hits) <> 'array', true) THEN
    _why := 'It has no list of hits.';
  ELSIF jsonb_array_length(_hits) > n THEN
    _why := format('It has %s hits; %s were asked for.', jsonb_array_length(_hits), n);
  ELSE
    _why := (
      SELECT format('The %s of a hit is %s.', t.key, left((h -> t.key)::text, 100))
      FROM jsonb_array_elements(_hits) AS h CROSS JOIN jsonb_each_text(_types) AS t
      WHERE coalesce(jsonb_typeof(h -> t.key), 'none') NOT IN (t.value, 'null')
        OR jsonb_typeof(h -> t.key) = 'null' AND t.key = 'segment'
        OR jsonb_typeof(h -> t.key) = 'number' AND CASE WHEN t.key IN ('document_id', 'segment_number')
          THEN (h ->> t.key)::numeric NOT BETWEEN -9223372036854775808 AND 9223372036854775807 OR scale((h ->> t.key)::numeric) > 0
          ELSE abs((h ->> t.key)::numeric) > 1e300 END
      LIMIT 1);
  END IF;
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('unexpected answer of shard "%s"', shard), DETAIL = _why;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._asked_shards(store ml_rag.store, is_keyword boolean) RETURNS regclass[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the shards of a store that run its arms, those that answer; null = it has none. By meaning also null where the caller may
-- not ask them all or not read the partitions: a statement can read the whole table. Words are on the shards alone.
-- Reads: the catalog
DECLARE
  _shards regclass[] := ARRAY(SELECT s.shard FROM ml_rag._shards(store.relation) AS s
                              WHERE s.shard <> ALL (coalesce(store.missing, '{}')));
BEGIN
  RETURN CASE WHEN cardinality(_shards) > 0 AND (is_keyword OR ml_rag._leaves(store) IS NOT NULL AND (
    SELECT bool_and(has_table_privilege(ml_rag._calls_of(s), 'SELECT') IS NOT FALSE) FROM unnest(_shards) AS s))
    THEN _shards END;
END
$$;

CREATE FUNCTION ml_rag._search_shards(
  store ml_rag.store, shards regclass[], index ml_rag.keyword_index, request ml_rag.request, arm ml_rag.arm, filter ml_rag.row_filter,
  OUT hits ml_rag.hit[], OUT facts jsonb, OUT failure jsonb
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what a semantic or keyword arm finds in a store with shards, as it would in one table of all rows: words are scored by what
-- all parts have counted together. filter: for the partitions that are here; shards make their own of the options.
-- facts, failure: as of ml_rag._search_store and ml_rag._keyword_store
-- Reads: the store and its shards, as the caller
DECLARE
  _is_keyword boolean := arm.search = 'keyword';
  _here ml_rag.store := ml_rag._except_shards(store, coalesce(store.missing, '{}') || shards);
  _is_here boolean := cardinality(ml_rag._leaves(_here)) > 0;
  _request jsonb;
  _found record;
  _answer record;
  _corpus jsonb;
BEGIN
  -- no more of the question than the arm needs
  _request := jsonb_build_object(
    'columns', jsonb_strip_nulls(jsonb_build_object('segment_embedding', store.segment_embedding, 'segment', store.segment,
      'document_name', store.document_name, 'document_id', store.document_id, 'segment_number', store.segment_number,
      'metadata', store.metadata)),
    'settings', (SELECT jsonb_object_agg(k, current_setting(k)) FROM unnest('{TimeZone,DateStyle,IntervalStyle}'::text[]) AS k),
    'request', jsonb_build_object('question', CASE WHEN _is_keyword THEN request.question END,
      'distance_metric', request.distance_metric, 'query_embedding', request.query_embedding::text, 'explain', request.explain,
      'options', (
        SELECT coalesce(jsonb_object_agg(o.key, o.value), '{}') FROM jsonb_each(request.options) AS o
        WHERE o.key = ANY (ml_rag._filter_options() || '{index_options}'::text[]))),
    'arm', to_jsonb(arm) || CASE WHEN _is_keyword THEN '{}' ELSE '{"query": null}' END::jsonb);
  hits := '{}';
  IF _is_keyword THEN
    _request := _request || jsonb_build_object('segment', index.segment, 'key', index.key, 'configuration', index.configuration,
      'k1', index.k1, 'b', index.b, 'statistics', index.statistics);
    _found := ml_rag._query_words(index, request, arm);
    IF cardinality(_found.terms) = 0 THEN
      RETURN;
    END IF;
    _request := _request || jsonb_build_object('terms', _found.terms);
    IF _is_here THEN
      SELECT s.statistics, s.error INTO _found
      FROM ml_rag._keyword_statistics(index.store, index.segment, index.key, _found.terms) AS s;
      PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
      _corpus := _found.statistics;
    END IF;
    FOR _answer IN SELECT a.shard, a.answer FROM ml_rag._ask_shards(shards, _request || '{"call": "statistics"}') AS a LOOP
      PERFORM ml_rag._check_statistics(_answer.shard, _answer.answer, jsonb_array_length(_request -> 'terms'));
      _corpus := ml_rag._add_statistics(_corpus, _answer.answer -> 'statistics');
    END LOOP;
    _request := _request || jsonb_build_object('corpus', _corpus);
  END IF;
  IF _is_here THEN
    IF _is_keyword THEN
      _found := ml_rag._keyword_store(_here, index, request, arm, true, filter, filter.condition <> '', _corpus);
      failure := _found.failure;
    ELSE
      _found := ml_rag._search_store(_here, request, arm, true, filter);
    END IF;
    hits := _found.hits;
    facts := _found.facts;
  END IF;
  FOR _answer IN SELECT a.shard, a.answer FROM ml_rag._ask_shards(shards, _request || jsonb_build_object('call', arm.search)) AS a LOOP
    IF NOT _is_keyword AND _answer.answer ? 'version' THEN
      -- it has another one: its rows are sorted there, and read here
      _found := ml_rag._search_store(store, request, arm, true, filter);
      hits := _found.hits;
      facts := _found.facts;
      RETURN;
    END IF;
    PERFORM ml_rag._check_hits(_answer.shard, _answer.answer, arm.candidates);
    hits := hits || ARRAY(
      SELECT jsonb_populate_record(NULL::ml_rag.hit, h || jsonb_build_object('vector_store', store.vector_store, 'rerank_score', NULL,
        'row_key', NULL, 'first_segment', NULL, 'last_segment', NULL))
      FROM jsonb_array_elements(_answer.answer -> 'hits') AS h);
    IF request.explain THEN
      facts := jsonb_set(coalesce(facts, '{}'), ARRAY['shards'],
        coalesce(facts -> 'shards', '{}') || jsonb_build_object(_answer.shard::text, _answer.answer -> 'facts'));
    END IF;
  END LOOP;
  hits := ml_rag._best_of(hits, arm.candidates);
  IF request.explain THEN
    facts := coalesce(facts, '{}') || jsonb_build_object('plan', 'shards', 'limit', arm.candidates, 'candidates', cardinality(hits));
  END IF;
END
$$;
