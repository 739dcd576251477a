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
