-- bm25: the segments of one store that have most of the words.

CREATE FUNCTION ml_rag._keyword_scores(store oid, segment name, key name[], terms text[], weights integer[], n integer,
  row_keys text[] DEFAULT NULL, corpus jsonb DEFAULT NULL,
  OUT keys text[], OUT scores double precision[], OUT error jsonb)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
-- that of ml_rag._keyword_indexes: under another one the statements that both run would be planned anew each time
SET search_path FROM CURRENT
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
AS $$
# purpose: keys, each the text of a text[], and scores of the best rows, for the caller; row_keys: of
# ml_rag.row_filter, where only few rows pass, else null; corpus: of ml_rag._keyword_statistics, null = its own
# Stable, so that all that is read is of one moment: a run may be replaced by another at any time.
@BACKEND@
found, error = backend.keyword_scores(plpy, store, segment, key, terms, weights, n, row_keys, corpus)
return (*(found or (None, None)), error)
$$;

CREATE FUNCTION ml_rag._query_words(
  index ml_rag.keyword_index, request ml_rag.request, arm ml_rag.arm, OUT terms text[], OUT weights integer[]
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the words that a keyword arm looks for, and how often each stands in what it asks
BEGIN
  SELECT coalesce(array_agg(t.key ORDER BY t.key COLLATE "C"), '{}'),
    coalesce(array_agg(t.value::integer ORDER BY t.key COLLATE "C"), '{}')
  INTO terms, weights
  FROM jsonb_each_text((ml_rag._tokens(index.configuration::regconfig,
    coalesce(array_to_string(arm.query, ' '), request.question))).tokens) AS t;
END
$$;

CREATE FUNCTION ml_rag._run_keyword(
  store ml_rag.store, index ml_rag.keyword_index, terms text[], weights integer[], candidates integer,
  query_embedding @vector@.vector, distance_metric text, n integer, filter ml_rag.row_filter,
  with_text boolean, corpus jsonb, OUT hits ml_rag.hit[], OUT is_all boolean
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the n best of the candidates that the condition leaves; is_all: whether there are no further candidates;
-- corpus: of ml_rag._keyword_scores
-- Reads: the store and its index, as the caller
-- Stable, so that candidates and rows come from one snapshot.
DECLARE
  _found record;
  _columns record := ml_rag._hit_columns(store, distance_metric, with_text, keyword_score => 's.score');
  -- statistics of the visible rows are of those that do not pass, too
  _is_narrow boolean := filter.row_keys IS NOT NULL AND NOT (index.secured AND index.statistics = 'visible');
BEGIN
  SELECT s.keys, s.scores, s.error INTO _found
  FROM ml_rag._keyword_scores(index.store, index.segment, index.key, terms, weights, candidates,
    CASE WHEN _is_narrow THEN filter.row_keys::text[] END, corpus) AS s;
  PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
  is_all := cardinality(_found.keys) < candidates;
  EXECUTE concat(
    'SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (SELECT ', replace(_columns.of_hit, format(_columns.rounded, 's.distance'),
      'CASE WHEN s.distance > ''-Infinity'' AND s.distance < ''Infinity'' THEN '
      || format(_columns.rounded, 's.distance') || ' END'), ' FROM (SELECT ', _columns.of_row,
    ', c.score AS score FROM unnest($4, $5) AS c (key, score) JOIN ',
    CASE WHEN store.missing IS NULL THEN ml_rag._indexed_rows(index.store) ELSE ml_rag._rows_of(store) END, ' AS t ON ', (
      SELECT string_agg(format('t.%I = (c.key::text[])[%s]::%s', a.attname, k.place, format_type(a.atttypid, NULL)), ' AND '
        ORDER BY k.place)
      FROM unnest(index.key) WITH ORDINALITY AS k (name, place)
      JOIN pg_attribute AS a ON a.attrelid = index.store AND a.attname = k.name AND NOT a.attisdropped),
    ' WHERE ', ml_rag._has_values(ARRAY[store.segment]), filter.condition,
    ' ORDER BY c.score DESC, ', _columns.place, ' LIMIT $2) AS s) AS h')
  INTO hits USING query_embedding, n, filter.arguments, _found.keys, _found.scores;
  hits := coalesce(hits, '{}');
END
$$;

CREATE FUNCTION ml_rag._enabling(store ml_rag.store) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the statement by which an owner creates or rebuilds the keyword index of a store, for hints
BEGIN
  RETURN format('SELECT ml_rag.enable_keyword_search(%L%s)', store.relation::text,
    CASE WHEN store.segment <> 'segment' THEN format(', %L', jsonb_build_object('segment', store.segment)) END);
END
$$;

CREATE FUNCTION ml_rag._keyword_store(
  store ml_rag.store, index ml_rag.keyword_index, request ml_rag.request, arm ml_rag.arm, with_text boolean,
  filter ml_rag.row_filter, narrows boolean, corpus jsonb DEFAULT NULL,
  OUT hits ml_rag.hit[], OUT facts jsonb, OUT failure jsonb
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments of one store that have most of the words of a keyword arm, by (BM25, document, segment)
-- narrows: whether there is a filter. corpus: of ml_rag._keyword_scores. facts: with explain, how the store was searched.
-- failure: why its index cannot be used
-- Reads: the store and its index, as the caller
DECLARE
  _n integer := arm.candidates;
  _vector @vector@.vector := request.query_embedding;
  _terms text[];
  _weights integer[];
  _candidates integer;
  -- how many of the best rows of all are read first, whether they pass or not; null = only those that pass are scored
  _likely integer := filter.likely;
  _part record;
BEGIN
  SELECT w.terms, w.weights INTO _terms, _weights FROM ml_rag._query_words(index, request, arm) AS w;
  IF store.dimensions <> @vector@.vector_dims(_vector) THEN
    _vector := NULL;
  END IF;
  hits := '{}';
  -- the best ones may not pass the filters: then more are tried, then all; without filters, candidates that are
  -- not in the table mean that it was written to with triggers off, and a second look is enough
  _candidates := CASE WHEN narrows THEN 4 * _n + 100 ELSE _n END;
  IF filter.row_keys IS NOT NULL AND NOT index.secured THEN
    -- where many rows pass, n of them are among the best of all, and looking up all that pass would take longer
    _likely := ml_rag._likely_rows(index.store, _n, cardinality(filter.row_keys), true);
  END IF;
  WHILE cardinality(_terms) > 0 LOOP
    _part := ml_rag._run_keyword(store, index, _terms, _weights, coalesce(_likely, _candidates), _vector,
      request.distance_metric, _n,
      CASE WHEN _likely IS NULL THEN filter ELSE ROW(filter.condition, filter.arguments, NULL, NULL)::ml_rag.row_filter END,
      with_text, corpus);
    hits := _part.hits;
    EXIT WHEN cardinality(hits) >= _n OR _part.is_all OR NOT narrows AND _candidates > _n;
    IF _likely IS NOT NULL THEN
      _likely := NULL;
      IF filter.likely IS NOT NULL THEN
        filter.row_keys := ml_rag._passing_rows(store, filter.condition, filter.arguments);
      END IF;
      CONTINUE;
    END IF;
    -- by the share that has passed, and a reserve
    _candidates := CASE WHEN _candidates < 10000
                          THEN least(100000, _candidates * greatest(2, 1.5 * _n / greatest(1, cardinality(hits))))
                        ELSE 2147483647 END;
  END LOOP;
  IF request.explain THEN
    facts := jsonb_build_object('configuration', index.configuration, 'words', _terms, 'limit', _n,
      'candidates', cardinality(hits));
  END IF;
  IF arm.min_score IS NOT NULL THEN
    hits := ARRAY(SELECT h FROM unnest(hits) AS h WHERE h.keyword_score >= arm.min_score);
  END IF;
EXCEPTION WHEN OTHERS THEN
  IF SQLSTATE !~ '^(22|38|F0|42704$)' THEN
    RAISE;
  END IF;
  -- its configuration was dropped, or its key's type changed
  hits := '{}';
  failure := ml_rag._failure(store.vector_store, '55000',
      format('the keyword index of "%s" cannot be used', store.vector_store), SQLERRM,
      format('Its owner can rebuild it: %s;', ml_rag._enabling(store)))
    || jsonb_build_object('warning', format('the keyword index of "%s" cannot be used; ignored', store.vector_store),
      'warning_detail', SQLERRM, 'skipped', 'Its keyword index cannot be used.',
      'warning_hint', format('Its owner can rebuild it: %s;', ml_rag._enabling(store)));
END
$$;

CREATE FUNCTION ml_rag._warn_of_no_index(stores ml_rag.store[]) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: say once which stores a keyword arm left out for want of an index
DECLARE
  _names text[] := ARRAY(SELECT s.vector_store FROM unnest(stores) AS s);
BEGIN
  RAISE WARNING USING ERRCODE = '01000',
    MESSAGE = CASE cardinality(stores) WHEN 1 THEN format('"%s" has no keyword index; keyword search ignores it', _names[1])
      ELSE format('%s vector stores have no keyword index; keyword search ignores them', cardinality(stores)) END,
    DETAIL = format('Ignored: %s%s.', array_to_string(_names[1:20], ', '),
      CASE WHEN cardinality(_names) > 20 THEN ', …' END),
    HINT = CASE WHEN (SELECT c.relkind FROM pg_class AS c WHERE c.oid = stores[1].relation) IN ('r', 'p')
      THEN format('Its owner can create one: %s;', ml_rag._enabling(stores[1]))
      ELSE 'Only an ordinary table can have one: search the table behind it.' END;
END
$$;
