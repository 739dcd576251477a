-- bm25: the segments of one store that have most of the words.

CREATE FUNCTION ml_rag._keyword_scores(store oid, segment name, key name[], terms text[], weights integer[], n integer,
  until double precision DEFAULT NULL, row_keys text[] DEFAULT NULL, corpus jsonb DEFAULT NULL,
  OUT keys text[], OUT scores double precision[], OUT error jsonb)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
-- that of ml_rag._keyword_indexes: under another one the statements that both run would be planned anew each time
SET search_path = pg_catalog, ml_rag, pg_temp
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
AS $$
# purpose: keys, each the text of a text[], and scores of the best rows, for the caller; until: seconds since 1970;
# row_keys: of ml_rag.row_filter, where only few rows pass, else null; corpus: of ml_rag._keyword_statistics, null = its own
# Stable, so that all that is read is of one moment: a run may be replaced by another at any time.
@BACKEND@
found, error = backend.keyword_scores(plpy, store, segment, key, terms, weights, n, until, row_keys, corpus)
return (*(found or (None, None)), error)
$$;

CREATE FUNCTION ml_rag._key_equals(relation regclass, key name[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: SQL of whether a row t has the key of a row c, the text of a text[]  Reads: the catalog
BEGIN
  RETURN (SELECT string_agg(format('t.%I = (c.key::text[])[%s]::%s', a.attname, k.place, format_type(a.atttypid, NULL)), ' AND ')
          FROM unnest(key) WITH ORDINALITY AS k (name, place)
          JOIN pg_attribute AS a ON a.attrelid = relation AND a.attname = k.name AND NOT a.attisdropped);
END
$$;

CREATE FUNCTION ml_rag._key_distances(
  relations regclass[], key name[], embedding name, metric text, query_embedding vector, keys text[]
) RETURNS double precision[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how far rows that are here are from a vector, in the order of their keys; null for a row that is not there, or without a
-- vector or a column of vectors to compare with
-- Reads: the tables, as the caller
DECLARE
  _columns text := (SELECT string_agg(format('t.%I', k), ', ') FROM unnest(key || embedding) AS k);
  _distances double precision[];
BEGIN
  IF query_embedding IS NULL OR cardinality(relations) = 0 OR cardinality(keys) = 0 THEN
    RETURN array_fill(NULL::double precision, ARRAY[cardinality(keys)]);
  END IF;
  EXECUTE concat('SELECT array_agg(s.distance ORDER BY s.place) FROM (SELECT c.place, t.', quote_ident(embedding), ' ',
    (SELECT m.operator FROM ml_rag.metric AS m WHERE m.name = metric), ' $1::', (
      SELECT format_type(a.atttypid, NULL) FROM pg_attribute AS a
      WHERE a.attrelid = relations[1] AND a.attname = embedding AND NOT a.attisdropped),
    ' AS distance FROM unnest($2) WITH ORDINALITY AS c (key, place) LEFT JOIN (',
    (SELECT string_agg(format('SELECT %s FROM %s AS t', _columns, ml_rag._relation_name(r)), ' UNION ALL ') FROM unnest(relations) AS r),
    ') AS t ON ', ml_rag._key_equals(relations[1], key), ') AS s')
  INTO _distances USING query_embedding, keys;
  RETURN _distances;
END
$$;

CREATE FUNCTION ml_rag._check_scores(shard regclass, answer jsonb, width integer, n integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: that a shard, which can be anybody's server, has answered with at most n keys of so many parts, and as many finite scores
-- and distances
DECLARE
  _ties CONSTANT integer := 1000; -- rows as good as the last: TIES of ml_rag.backend.keyword
  _keys jsonb := answer -> 'keys';
  _why text;
BEGIN
  IF coalesce(jsonb_typeof(_keys) <> 'array' OR jsonb_typeof(answer -> 'scores') <> 'array'
              OR jsonb_typeof(answer -> 'distances') <> 'array', true) THEN
    _why := 'It has no lists of keys, scores and distances.';
  ELSIF jsonb_array_length(_keys) <> jsonb_array_length(answer -> 'scores')
    OR jsonb_array_length(_keys) <> jsonb_array_length(answer -> 'distances') THEN
    _why := 'It has another number of scores or distances than of keys.';
  ELSIF jsonb_array_length(_keys) > n::bigint + _ties THEN
    _why := format('It has %s keys; %s were asked for.', jsonb_array_length(_keys), n);
  ELSIF EXISTS (SELECT FROM jsonb_array_elements(_keys) AS e (k)
                WHERE jsonb_typeof(k) <> 'string' OR cardinality((k #>> '{}')::text[]) <> width) THEN
    _why := format('A key is not of %s parts.', width);
  ELSIF EXISTS (SELECT FROM jsonb_array_elements(answer -> 'scores') AS e (s)
                WHERE jsonb_typeof(s) <> 'number' OR abs(s::numeric) > 1e300) THEN
    _why := 'A score is no finite number.';
  ELSIF EXISTS (SELECT FROM jsonb_array_elements(answer -> 'distances') AS e (d)
                WHERE CASE jsonb_typeof(d) WHEN 'number' THEN abs(d::numeric) > 1e300 WHEN 'null' THEN false
                  ELSE d #>> '{}' NOT IN ('NaN', 'Infinity', '-Infinity') END) THEN
    _why := 'A distance is no number.';
  END IF;
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('unexpected answer of shard "%s"', shard), DETAIL = _why;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._scores_of_shards(
  store ml_rag.store, index ml_rag.keyword_index, terms text[], weights integer[], query_embedding vector, distance_metric text, n integer,
  OUT keys text[], OUT scores double precision[], OUT distances double precision[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the best rows of each part of a store with shards, in two rounds: what all parts have counted together, then the scores by
-- that, and how far these rows are from the vector. Keys as of ml_rag._keyword_scores; the index of the store itself has the rows of
-- the partitions that are here
-- Reads: the indexes, and vectors of the store, as the caller
DECLARE
  _request jsonb := jsonb_build_object('terms', terms, 'weights', weights, 'n', n, 'segment', index.segment, 'key', index.key,
    'configuration', index.configuration, 'k1', index.k1, 'b', index.b, 'statistics', index.statistics,
    'embedding', store.segment_embedding, 'metric', distance_metric, 'vector', query_embedding::text);
  _shards regclass[] := ARRAY(SELECT s.shard FROM ml_rag._shards(store.relation) AS s
                              WHERE s.shard <> ALL (coalesce(store.missing, '{}')));
  _here regclass[] := ARRAY(SELECT p.relid FROM pg_partition_tree(store.relation) AS p
                            WHERE p.isleaf AND pg_relation_filenode(p.relid) IS NOT NULL);
  _found record;
  _part record;
  _corpus jsonb;
BEGIN
  IF cardinality(_here) > 0 THEN
    SELECT s.statistics, s.error INTO _found FROM ml_rag._keyword_statistics(index.store, index.segment, index.key, terms) AS s;
    PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
    _corpus := _found.statistics;
  END IF;
  FOR _part IN SELECT a.answer FROM ml_rag._ask_shards(_shards, _request || '{"call": "statistics"}') AS a LOOP
    _corpus := ml_rag._add_statistics(_corpus, _part.answer -> 'statistics');
  END LOOP;
  keys := '{}';
  IF cardinality(_here) > 0 THEN
    SELECT s.keys, s.scores, s.error INTO _found
    FROM ml_rag._keyword_scores(index.store, index.segment, index.key, terms, weights, n, NULL, NULL, _corpus) AS s;
    PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
    keys := _found.keys;
    scores := _found.scores;
    distances := ml_rag._key_distances(_here, index.key, store.segment_embedding, distance_metric, query_embedding, keys);
  END IF;
  FOR _part IN SELECT a.shard, a.answer
               FROM ml_rag._ask_shards(_shards, _request || jsonb_build_object('call', 'scores', 'corpus', _corpus)) AS a LOOP
    PERFORM ml_rag._check_scores(_part.shard, _part.answer, cardinality(index.key), n);
    keys := keys || ml_rag._texts(_part.answer -> 'keys');
    scores := scores || ml_rag._texts(_part.answer -> 'scores')::double precision[];
    distances := distances || ml_rag._texts(_part.answer -> 'distances')::double precision[];
  END LOOP;
  -- the best of all shards: whole rows are read of them
  SELECT coalesce(array_agg(b.key), '{}'), coalesce(array_agg(b.score), '{}'), coalesce(array_agg(b.distance), '{}')
  INTO keys, scores, distances
  FROM (SELECT u.* FROM unnest(keys, scores, distances) AS u (key, score, distance)
        ORDER BY u.score DESC FETCH FIRST (n) ROWS WITH TIES) AS b;
END
$$;

CREATE FUNCTION ml_rag._keys_condition(index ml_rag.keyword_index, keys text[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a condition on a row t that a shard can be asked for, which a join with what is here is not: that it has one of the keys; of
-- many keys, that each column has the value of some ($4)
DECLARE
  _one text;
  _many text;
BEGIN
  SELECT string_agg(replace(format('t.%I = ', a.attname), '%', '%%') || '%L::' || replace(a.type, '%', '%%'), ' AND ' ORDER BY u.place),
    string_agg(format('t.%I = ANY (ARRAY(SELECT (k.key::text[])[%s]::%s FROM unnest($4) AS k (key)))', a.attname, u.place, a.type), ' AND ')
  INTO _one, _many
  FROM unnest(index.key) WITH ORDINALITY AS u (name, place)
  JOIN (SELECT c.attrelid, c.attname, format_type(c.atttypid, NULL) AS type FROM pg_attribute AS c WHERE NOT c.attisdropped) AS a
    ON a.attrelid = index.store AND a.attname = u.name;
  RETURN CASE WHEN cardinality(keys) BETWEEN 1 AND 200
    THEN (SELECT format('(%s)', string_agg(format('(%s)', format(_one, VARIADIC k.key::text[])), ' OR ')) FROM unnest(keys) AS k (key))
    ELSE _many END;
END
$$;

CREATE FUNCTION ml_rag._run_keyword(
  store ml_rag.store, index ml_rag.keyword_index, terms text[], weights integer[], candidates integer,
  query_embedding vector, distance_metric text, n integer, filter ml_rag.row_filter,
  until timestamptz, with_text boolean, OUT hits ml_rag.hit[], OUT is_all boolean
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the n best of the candidates that the condition leaves; is_all: whether there are no further candidates;
-- until: when a store of an untrusted owner has had its time, else null
-- Reads: the store and its index, as the caller
-- Stable, so that candidates and rows come from one snapshot.
DECLARE
  _found record;
  _columns record := ml_rag._hit_columns(store, distance_metric, with_text, keyword_score => 's.score');
  -- statistics of the visible rows are of those that do not pass, too
  _is_narrow boolean := filter.row_keys IS NOT NULL AND NOT (index.secured AND index.statistics = 'visible');
  _has_shards boolean := store.is_table IS NOT TRUE AND ml_rag._has_shards(index.store);
BEGIN
  IF _has_shards THEN
    SELECT s.keys, s.scores, s.distances, NULL::jsonb AS error INTO _found
    FROM ml_rag._scores_of_shards(store, index, terms, weights, query_embedding, distance_metric, candidates) AS s;
    -- vectors of shards would come as text
    _columns.of_row := replace(_columns.of_row, _columns.distance, 'c.distance');
  ELSE
    SELECT s.keys, s.scores, NULL::double precision[] AS distances, s.error INTO _found
    FROM ml_rag._keyword_scores(index.store, index.segment, index.key, terms, weights, candidates,
      extract(epoch FROM until)::double precision, CASE WHEN _is_narrow THEN filter.row_keys END) AS s;
  END IF;
  PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
  is_all := cardinality(_found.keys) < candidates;
  EXECUTE concat(
    'SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (SELECT ', replace(_columns.of_hit, format(_columns.rounded, 's.distance'),
      'CASE WHEN s.distance > ''-Infinity'' AND s.distance < ''Infinity'' THEN '
      || format(_columns.rounded, 's.distance') || ' END'), ' FROM (SELECT ', _columns.of_row,
    ', c.score AS score FROM unnest($4, $5, $6) AS c (key, score, distance) JOIN ',
    CASE WHEN _has_shards THEN ml_rag._rows_of(store) ELSE ml_rag._indexed_rows(index.store) END, ' AS t ON ',
    ml_rag._key_equals(index.store, index.key),
    ' WHERE ', CASE WHEN _has_shards THEN ml_rag._keys_condition(index, _found.keys) || ' AND ' END,
    ml_rag._has_values(store, ARRAY[store.segment]), filter.condition,
    ' ORDER BY c.score DESC, ', _columns.place, ' LIMIT $2) AS s) AS h')
  INTO hits USING query_embedding, n, filter.arguments, _found.keys, _found.scores, _found.distances;
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
  filter ml_rag.row_filter, narrows boolean, until timestamptz,
  OUT hits ml_rag.hit[], OUT facts jsonb, OUT failure jsonb
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments of one store that have most of the words of a keyword arm, by (BM25, document, segment)
-- narrows: whether the filter has more than the limits of an untrusted store. until: when a store of an untrusted owner has
-- had its time, else null. facts: with explain, how the store was searched. failure: why its index cannot be used
-- Reads: the store and its index, as the caller
DECLARE
  _n integer := arm.candidates;
  _vector vector := request.query_embedding;
  _terms text[];
  _weights integer[];
  _candidates integer;
  -- how many of the best rows of all are read first, whether they pass or not; null = only those that pass are scored
  _likely integer := filter.likely;
  _part record;
  _most CONSTANT integer := 65536; -- candidates of an untrusted store: about a second
BEGIN
  SELECT coalesce(array_agg(t.key ORDER BY t.key COLLATE "C"), '{}'),
    coalesce(array_agg(t.value::integer ORDER BY t.key COLLATE "C"), '{}')
  INTO _terms, _weights
  FROM jsonb_each_text((ml_rag._tokens(index.configuration::regconfig,
    coalesce(array_to_string(arm.query, ' '), request.question))).tokens) AS t;
  IF store.dimensions <> vector_dims(_vector) THEN
    _vector := NULL;
  END IF;
  hits := '{}';
  -- the best ones may not pass the filters: then more are tried, then all; without filters, candidates that are
  -- not in the table mean that it was written to with triggers off, and a second look is enough
  _candidates := CASE WHEN narrows THEN 4 * _n + 100 ELSE _n END;
  IF filter.row_keys IS NOT NULL AND until IS NULL AND NOT index.secured THEN
    -- where many rows pass, n of them are among the best of all, and looking up all that pass would take longer
    _likely := ml_rag._likely_rows(index.store, _n, cardinality(filter.row_keys));
  END IF;
  WHILE cardinality(_terms) > 0 LOOP
    _part := ml_rag._run_keyword(store, index, _terms, _weights, coalesce(_likely, _candidates), _vector,
      request.distance_metric, _n,
      CASE WHEN _likely IS NULL THEN filter ELSE ROW(filter.condition, filter.arguments, NULL, NULL)::ml_rag.row_filter END,
      until, with_text);
    hits := _part.hits;
    EXIT WHEN cardinality(hits) >= _n OR _part.is_all OR NOT narrows AND _candidates > _n;
    IF _likely IS NOT NULL THEN
      _likely := NULL;
      IF filter.likely IS NOT NULL THEN
        filter.row_keys := ml_rag._passing_rows(store, filter.condition, filter.arguments);
      END IF;
      CONTINUE;
    END IF;
    IF until IS NOT NULL AND (_candidates >= _most OR clock_timestamp() > until) THEN
      PERFORM ml_rag._out_of_time();
    END IF;
    _candidates := CASE WHEN until IS NOT NULL THEN least(_candidates * 50, _most)
                        -- by the share that has passed, and a reserve
                        WHEN _candidates < 10000
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
