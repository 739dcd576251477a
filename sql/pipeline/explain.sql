-- explain: option explain of ml_rag: how an answer came about, of what the caller may see.

CREATE FUNCTION ml_rag._milliseconds(since timestamptz,
  until timestamptz DEFAULT clock_timestamp()) RETURNS float8
LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
-- purpose: time between, to the microsecond
BEGIN
  RETURN round(extract(epoch FROM until - since) * 1000, 3)::float8;
END
$$;

CREATE FUNCTION ml_rag._without_embedding(store ml_rag.store) RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: how many rows with a text a search by meaning cannot find, of those that the caller sees; null if
-- there can be none, or if they cannot be counted and the call does not name the store
-- Reads: the store, as the caller
BEGIN
  IF NOT EXISTS (
    SELECT FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
    WHERE a.attrelid = store.relation AND a.attname = store.segment_embedding AND NOT a.attnotnull
      AND c.relkind IN ('r', 'p')) THEN
    RETURN NULL;
  END IF;
  RETURN nullif(ml_rag._read_apart(store, 'SELECT count(*)', format(
    'WHERE t.%I IS NULL AND t.%I::text ~ ''[^[:space:]]''', store.segment_embedding, store.segment)), '0');
END
$$;

CREATE FUNCTION ml_rag._explain_stores(options jsonb, stores ml_rag.store[], arms jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the stores that were searched, each with what its arms say (arms: {arm: {store: {…}}}), and those
-- that were not, with the reason
-- A store that the call does not name is shown only if the caller may read its vectors; of others it does not
-- reveal even that they exist.
-- Reads: the catalog
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
  SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object('vector_store', s.vector_store,
    'searched', true,
      'embed_model_id', s.embed_model_id, 'without_embedding', ml_rag._without_embedding(stores[s.place])))
        || coalesce((
        SELECT jsonb_object_agg(a.key, a.value -> s.vector_store) FROM jsonb_each(arms) AS a
        WHERE a.value ? s.vector_store), '{}') ORDER BY s.place), '[]')
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
      WHERE n.name = ANY (ml_rag._names(m.nspname, c.relname)))
      AND n.place <= _most;
  ELSE
    SELECT coalesce(jsonb_agg(jsonb_build_object('vector_store', ml_rag._valid_text(f.vector_store),
        'searched', false, 'reason', w.reason) ORDER BY f.vector_store COLLATE "C"), '[]')
    INTO _skipped
    FROM (
      SELECT r.oid, CASE WHEN strpos(r.nspname, '.') = 0 THEN concat(r.nspname, '.', r.relname)
                         ELSE format('%I.%I', r.nspname, r.relname) END AS vector_store
      FROM ml_rag._told_of(true, ARRAY(SELECT s.relation FROM unnest(stores) AS s)) AS r
      CROSS JOIN LATERAL (
        SELECT coalesce(options #>> '{vector_store_columns,segment_embedding}', ml_rag._default_column(r.oid))
          AS name OFFSET 0) AS e
      JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attname = e.name AND NOT a.attisdropped
      WHERE has_column_privilege(r.oid, a.attnum, 'SELECT')
        AND ml_rag._marked_model(col_description(r.oid, a.attnum)) IS NOT NULL
      ORDER BY r.nspname COLLATE "C", r.relname COLLATE "C" LIMIT _most
    ) AS f
    CROSS JOIN LATERAL ml_rag._why_not(f.oid, _options) AS w;
  END IF;
  RETURN _told || _skipped;
END
$$;

CREATE FUNCTION ml_rag._stage_times(trace ml_rag.step[]) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: {stage: milliseconds} of a trace; a stage that ran several times has the sum
BEGIN
  RETURN coalesce((
    SELECT jsonb_object_agg(s.stage, s.milliseconds)
    FROM (
      SELECT t.stage, round(sum(extract(epoch FROM t.took) * 1000
        - coalesce((SELECT sum((e.value ->> 'explaining')::numeric)
          FROM jsonb_each(t.facts -> 'stores') AS e), 0)), 3)
        AS milliseconds
      FROM (
        SELECT s.stage, s.facts, s.ended - lag(s.ended) OVER (ORDER BY s.place) AS took
        FROM unnest(trace) WITH ORDINALITY AS s (stage, ended, facts, place)
      ) AS t WHERE t.took IS NOT NULL GROUP BY t.stage
    ) AS s), '{}');
END
$$;

CREATE FUNCTION ml_rag._explain(request ml_rag.request, retrieval ml_rag.retrieval, began timestamptz,
  tokens jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the object that option explain adds to an answer; began: when the call did; tokens: of
-- ml_rag._complete
-- What it says about rows comes from hits, which are rows that the caller sees.
DECLARE
  _ended timestamptz := clock_timestamp();
  _options jsonb := request.options;
  _arms jsonb := '{}';
  _candidates jsonb := '{}';
  _facts jsonb := '{}';
  _explaining numeric;
  _milliseconds jsonb := ml_rag._stage_times(retrieval.trace);
  _step ml_rag.step;
BEGIN
  FOREACH _step IN ARRAY retrieval.trace LOOP
    CASE
    WHEN _step.facts ? 'arm' THEN
      _explaining := coalesce(_explaining, 0) + (SELECT coalesce(sum((e.value ->> 'explaining')::numeric), 0)
                                                 FROM jsonb_each(_step.facts -> 'stores') AS e);
      _arms := _arms || jsonb_build_object(_step.facts ->> 'arm', (
        SELECT coalesce(jsonb_object_agg(e.key, e.value - 'explaining'), '{}')
        FROM jsonb_each(_step.facts -> 'stores') AS e));
      _candidates := _candidates || jsonb_build_object(_step.facts ->> 'arm', _step.facts -> 'candidates');
    WHEN _step.stage = 'fuse' THEN
      _candidates := _candidates || jsonb_build_object('fused', _step.facts -> 'candidates');
    WHEN _step.stage = 'threshold' THEN
      _candidates := _candidates || jsonb_build_object('within_threshold', _step.facts -> 'candidates');
      _facts := _facts || jsonb_build_object('nearest_distance', _step.facts -> 'nearest',
        'max_distance', (_step.facts ->> 'max_distance')::numeric);
    WHEN _step.stage = 'rerank' THEN
      _candidates := _candidates || jsonb_build_object('reranked', _step.facts -> 'candidates');
      _facts := _facts || jsonb_build_object('best_score', _step.facts -> 'best_score');
    ELSE
      NULL;
    END CASE;
  END LOOP;
  IF _options ? 'query_embedding' THEN
    _milliseconds := _milliseconds - 'embed';
  END IF;
  RETURN CASE WHEN _options ? 'query_options' THEN jsonb_build_object('query',
      ml_rag._query_info(request.question, request.rewritten) || jsonb_strip_nulls(jsonb_build_object(
        'model_id', (request.rewritten).model_id,
        'tokens', CASE WHEN (request.rewritten).model_id IS NOT NULL THEN jsonb_build_object(
          'prompt', (request.rewritten).prompt_tokens, 'generated',
            (request.rewritten).generated_tokens) END))) ELSE '{}' END
    || jsonb_build_object(
    'stores', ml_rag._explain_stores(_options, retrieval.stores, _arms),
    'candidates', _candidates || jsonb_build_object('citations', cardinality(retrieval.hits)),
    'thresholds', jsonb_strip_nulls(_facts || jsonb_build_object('method', retrieval.method,
      'threshold', retrieval.threshold,
      'percentage_distance', request.percentage_distance, 'min_score', request.min_score,
      'n_citations', request.n_citations)),
    'tokens', tokens,
    'options', _options -> 'option_levels',
    'statement', retrieval.statement,
    'milliseconds', _milliseconds || jsonb_strip_nulls(jsonb_build_object(
      'explain', round(_explaining + (extract(epoch FROM clock_timestamp() - _ended) * 1000)::numeric, 3),
      'total', ml_rag._milliseconds(began, _ended))));
END
$$;
