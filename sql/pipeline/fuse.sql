-- fuse: what the arms have found as one list.

CREATE FUNCTION ml_rag._decisiveness(scores double precision[], nothing double precision) RETURNS double precision
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: how clearly an arm tells its best candidates from the others, 0-1; nothing is the score that counts as 0
-- An arm that has something to say gives a few segments much more than the rest; one that has not (a model that does
-- not know the language, words that stand everywhere) gives all of them about the same. One minus the mean of the best
-- thirty, where the first counts 1 and those missing 0.
DECLARE
  _range double precision := (SELECT max(s) FROM unnest(scores) AS s) - nothing;
BEGIN
  IF coalesce(_range <= 0, true) THEN
    RETURN 0;
  END IF;
  RETURN (SELECT 1 - sum(greatest(b.s - nothing, 0) / _range) / 30
          FROM (SELECT s FROM unnest(scores) AS s ORDER BY s DESC LIMIT 30) AS b);
END
$$;

CREATE FUNCTION ml_rag._with_row_keys(hits ml_rag.hit[]) RETURNS ml_rag.hit[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the hits of one arm, each with a row key: rows that have none (of views, foreign and partitioned tables) are
-- known by what they hold, and those that are the same in all of it are told apart by counting
DECLARE
  _row record;
BEGIN
  FOR _row IN
    SELECT h.ordinality AS place, md5(concat_ws('|', coalesce(md5(h.document_name), '-'), coalesce(md5(h.document_key), '-'),
      coalesce(h.segment_number::text, '-'), md5(h.segment), row_number() OVER (PARTITION BY h.vector_store, h.document_name,
        h.document_key, h.segment_number, h.segment ORDER BY h.ordinality))) AS key
    FROM unnest(hits) WITH ORDINALITY AS h WHERE h.row_key IS NULL
  LOOP
    hits[_row.place].row_key := _row.key;
  END LOOP;
  RETURN hits;
END
$$;

CREATE FUNCTION ml_rag._auto_weights(is_semantic boolean[], decided double precision[]) RETURNS double precision[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: weights of arms by how clear each of them is, which together are 1
-- 0.6, 0.4 and thirty by measuring: docs/search.md. Several arms of a kind share what is the kind's.
DECLARE
  _n integer := cardinality(is_semantic);
  _prior double precision[];
  _weights double precision[];
  _all double precision;
BEGIN
  FOR i IN 1.._n LOOP
    _prior[i] := CASE WHEN is_semantic[i] THEN 0.6::float8 ELSE 0.4 END
      / cardinality(array_positions(is_semantic, is_semantic[i]));
  END LOOP;
  _all := (SELECT sum(p.prior * p.decided) FROM unnest(_prior, decided) AS p (prior, decided));
  FOR i IN 1.._n LOOP
    _weights[i] := CASE WHEN _all > 0 THEN _prior[i] * decided[i] / _all
                        ELSE _prior[i] / (SELECT sum(p) FROM unnest(_prior) AS p) END;
  END LOOP;
  _weights[_n] := 1 - (SELECT coalesce(sum(w), 0) FROM unnest(_weights[1:_n - 1]) AS w);
  RETURN _weights;
END
$$;

CREATE FUNCTION ml_rag._fuse(rankings ml_rag.ranking[], fusion text, rrf_k double precision, distance_metric text)
RETURNS ml_rag.hit[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the candidates of all arms, each once, by their fused score (0-1)
-- weighted: the sum of weight * what an arm gives, divided by the best it gives. A semantic arm gives the similarity that its
-- distance stands for (1 for equal vectors), a keyword arm its score, one with a function the share of its range
-- (ml_rag._as_shares). What an arm did not find counts 0 there, but for a semantic arm that searched with the question: there the
-- true distance is known. rrf: the sum of 1 / (rrf_k + rank), as a share of the largest possible.
DECLARE
  _n integer := cardinality(rankings);
  _is_weighted boolean := fusion = 'weighted';
  _is_complement boolean := (SELECT m.is_complement FROM ml_rag.metric AS m WHERE m.name = distance_metric);
  _is_semantic boolean[];
  _is_function boolean[];
  _is_own boolean[];         -- of a vector other than the question's
  _weights double precision[];
  _best double precision[];  -- what the arm gives its best candidate
  _decided double precision[];
  _parts integer[];
  _part integer;
  _members integer[];
  _shares double precision[];
  _values double precision[];
  _largest double precision;
  _nothing double precision;
  _own boolean;
  _known double precision := 0;  -- weight of the arms whose distance every hit has, and their best similarity
  _nearest double precision;
BEGIN
  FOR i IN 1.._n LOOP
    rankings[i].hits := ml_rag._with_row_keys(rankings[i].hits);
    _is_semantic[i] := (rankings[i].arm).search = 'semantic';
    _is_function[i] := (rankings[i].arm).search = 'function';
    IF _is_function[i] THEN
      rankings[i].hits := ml_rag._as_shares(rankings[i].hits, (rankings[i].arm).is_descending);
    END IF;
    SELECT array_agg(v.value), max(v.value), CASE WHEN _is_semantic[i] THEN min(v.value) ELSE 0 END,
      coalesce(bool_or(v.is_own), false) INTO _values, _largest, _nothing, _own
    FROM (
      SELECT CASE WHEN _is_function[i] THEN h.score
                  WHEN NOT _is_semantic[i] THEN h.keyword_score
                  WHEN _is_complement THEN 1 - coalesce(h.score::numeric, h.distance)
                  ELSE 1 / (1 + coalesce(h.score::numeric, h.distance)) END::double precision AS value,
        _is_semantic[i] AND h.score IS NOT NULL AS is_own
      FROM unnest(rankings[i].hits) AS h
    ) AS v;
    _best[i] := _largest;
    _is_own[i] := _own;
    _weights[i] := (rankings[i].arm).weight;
    _parts[i] := coalesce((rankings[i].arm).part, 1);
    _decided[i] := CASE WHEN _is_weighted AND _weights[i] IS NULL THEN ml_rag._decisiveness(_values, _nothing) END;
  END LOOP;
  IF _is_weighted THEN
    FOREACH _part IN ARRAY ARRAY(SELECT DISTINCT p FROM unnest(_parts) AS p ORDER BY 1) LOOP
      _members := array_positions(_parts, _part);
      IF _decided[_members[1]] IS NOT NULL THEN
        _shares := ml_rag._auto_weights(ARRAY(SELECT _is_semantic[m] FROM unnest(_members) AS m),
          ARRAY(SELECT _decided[m] FROM unnest(_members) AS m));
      ELSE
        _shares := ARRAY(SELECT _weights[m] / coalesce(nullif(sum(_weights[m]) OVER (), 0), 1) FROM unnest(_members) AS m);
      END IF;
      FOR i IN 1..cardinality(_members) LOOP
        _weights[_members[i]] := _shares[i] * coalesce((rankings[_members[i]].arm).share, 1);
      END LOOP;
    END LOOP;
  END IF;
  FOR i IN 1.._n LOOP
    IF _is_semantic[i] AND NOT _is_own[i] AND _best[i] > 0 THEN
      _known := _known + _weights[i];
      _nearest := _best[i];
    END IF;
  END LOOP;
  RETURN ARRAY(
    SELECT ROW(c.vector_store, c.document_name, c.document_id, c.document_key, c.segment_number, c.segment, c.distance,
      c.metadata, c.keyword_score, c.score, NULL, CASE WHEN c.segment IS NULL THEN c.row_key END, NULL, NULL)::ml_rag.hit
    FROM (
      SELECT f.vector_store, f.row_key, min(f.document_name) AS document_name, min(f.document_id) AS document_id,
        min(f.document_key) AS document_key, min(f.segment_number) AS segment_number, min(f.segment) AS segment,
        min(f.distance) AS distance, (array_agg(f.metadata) FILTER (WHERE f.metadata IS NOT NULL))[1] AS metadata,
          max(f.keyword_score) AS keyword_score,
        CASE WHEN _is_weighted THEN
          CASE WHEN _known > 0 THEN _known * least(1, greatest(0,
            CASE WHEN _is_complement THEN 1 - min(f.distance) ELSE 1 / (1 + min(f.distance)) END) / _nearest) ELSE 0 END
          + coalesce(sum(f.value), 0)
        ELSE sum(1 / (rrf_k + f.ordinality)) * (rrf_k + 1) / _n END AS score
      FROM (
        SELECT h.*, CASE WHEN _best[r.arm] > 0 THEN
            CASE WHEN _is_function[r.arm] THEN _weights[r.arm] * h.score
                 WHEN NOT _is_semantic[r.arm] THEN _weights[r.arm] * h.keyword_score / _best[r.arm]
                 WHEN _is_own[r.arm] THEN _weights[r.arm] * least(1, greatest(0,
                   CASE WHEN _is_complement THEN 1 - h.score ELSE 1 / (1 + h.score) END) / _best[r.arm]) END END AS value
        FROM unnest(rankings) WITH ORDINALITY AS r (settings, hits, arm)
        CROSS JOIN LATERAL unnest(r.hits) WITH ORDINALITY AS h
      ) AS f GROUP BY f.vector_store, f.row_key
    ) AS c
    ORDER BY c.score DESC, c.distance, c.vector_store COLLATE "C", c.document_name COLLATE "C", c.document_id,
      c.document_key COLLATE "C", c.segment_number);
END
$$;

CREATE FUNCTION ml_rag.fuse(
  semantic ml_rag.hit[], keyword ml_rag.hit[], options jsonb DEFAULT NULL, distance_metric text DEFAULT 'COSINE'
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 100
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the candidates of a semantic and a keyword arm, each once, by their fused score
DECLARE
  _options jsonb := ml_rag.parse_options('hybrid_options', $3);
  _rankings ml_rag.ranking[];
  _arms ml_rag.arm[] := ml_rag._arms(jsonb_build_object('semantic_search', true, 'keyword_search', true,
    'hybrid_options', _options), 0);
BEGIN
  _rankings := ARRAY[ROW(_arms[1], coalesce(semantic, '{}')), ROW(_arms[2], coalesce(keyword, '{}'))];
  RETURN QUERY SELECT h.* FROM unnest(
    ml_rag._fuse(_rankings, _options ->> 'fusion', (_options ->> 'rrf_k')::double precision, distance_metric)) AS h;
END
$$;
COMMENT ON FUNCTION ml_rag.fuse(ml_rag.hit[], ml_rag.hit[], jsonb, text) IS
$$the hits of the semantic arm (nearest first) and of the keyword arm (best first) as one list, by score (0-1)
options: those of hybrid_options. fusion weighted: w * similarity + (1 - w) * keyword score, each divided by the largest
of its arm; similarity as ml_rag.metric has it; a hit that only one arm found has its true distance, or keyword score 0. w
is semantic_weight; auto = by how much the best candidates of each arm stand out. fusion rrf: the sum of 1 / (rrf_k + rank),
as a share of the largest possible.
Errors: 22023 bad option.$$;
