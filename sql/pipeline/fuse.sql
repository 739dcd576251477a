-- fuse: the hits of the semantic and the keyword arm as one list.

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

CREATE FUNCTION ml_rag.fuse(
  semantic ml_rag.hit[], keyword ml_rag.hit[], options jsonb DEFAULT NULL, distance_metric text DEFAULT 'COSINE'
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 100
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the candidates of both arms, each once, by their fused score
-- Calls: ml_rag.parse_options, ml_rag._decisiveness
DECLARE
  _options jsonb := ml_rag.parse_options('hybrid_options', $3);
  _is_weighted boolean := _options ->> 'fusion' = 'weighted';
  _rrf_k double precision := (_options ->> 'rrf_k')::double precision;
  _semantic_weight double precision := (_options ->> 'semantic_weight')::double precision;
  _similarities double precision[];
  _keyword_scores double precision[] := ARRAY(SELECT h.keyword_score FROM unnest(keyword) AS h);
  _most_similar double precision;
  _best_keyword double precision;
  _decided double precision;
  _decided_keyword double precision;
  _is_complement boolean := (SELECT m.is_complement FROM ml_rag.metric AS m WHERE m.name = distance_metric);
BEGIN
  -- of an arm's own candidates; the similarity that a distance stands for, 1 for equal vectors
  _similarities := ARRAY(
    SELECT CASE WHEN _is_complement THEN 1 - h.distance ELSE 1 / (1 + h.distance) END
    FROM unnest(semantic) AS h);
  _most_similar := (SELECT max(s) FROM unnest(_similarities) AS s);
  _best_keyword := (SELECT max(s) FROM unnest(_keyword_scores) AS s);
  IF _is_weighted AND _semantic_weight IS NULL THEN
    _decided := ml_rag._decisiveness(_similarities, (SELECT min(s) FROM unnest(_similarities) AS s));
    _decided_keyword := ml_rag._decisiveness(_keyword_scores, 0);
    -- 0.6, 0.4 and thirty by measuring: docs/search.md
    _semantic_weight := CASE WHEN _decided + _decided_keyword > 0
      THEN 0.6 * _decided / (0.6 * _decided + 0.4 * _decided_keyword) ELSE 0.6 END;
  END IF;

  RETURN QUERY
    WITH hit AS (
      SELECT true AS is_semantic, p.place, semantic[p.place] AS hit FROM generate_subscripts(semantic, 1) AS p (place)
      UNION ALL
      SELECT false, p.place, keyword[p.place] FROM generate_subscripts(keyword, 1) AS p (place)
    ), numbered AS (
      -- no key of the table is at hand here; rows that are the same in all of this are told apart by counting
      SELECT h.*, row_number() OVER (PARTITION BY h.is_semantic, (h.hit).vector_store, (h.hit).document_name,
        (h.hit).document_key, (h.hit).segment_number, (h.hit).segment ORDER BY h.place) AS copy
      FROM hit AS h
    ), candidate AS (
      SELECT (n.hit).vector_store, (n.hit).document_name, min((n.hit).document_id) AS document_id,
        (n.hit).document_key, (n.hit).segment_number, (n.hit).segment, min((n.hit).distance) AS distance,
        (array_agg((n.hit).metadata))[1] AS metadata, max((n.hit).keyword_score) AS keyword_score,
        min(n.place) FILTER (WHERE n.is_semantic) AS semantic_place,
        min(n.place) FILTER (WHERE NOT n.is_semantic) AS keyword_place
      FROM numbered AS n
      GROUP BY (n.hit).vector_store, (n.hit).document_name, (n.hit).document_key, (n.hit).segment_number,
        (n.hit).segment, n.copy
    ), scored AS (
      SELECT c.*, CASE WHEN _is_weighted THEN
          CASE WHEN _most_similar > 0 THEN _semantic_weight * least(1, greatest(0,
            CASE WHEN _is_complement THEN 1 - c.distance ELSE 1 / (1 + c.distance) END) / _most_similar)
            ELSE 0 END
          + CASE WHEN _best_keyword > 0 THEN (1 - _semantic_weight) * coalesce(c.keyword_score, 0) / _best_keyword
            ELSE 0 END
        ELSE  -- as a share of what the first place in both arms gives
          (coalesce(1 / (_rrf_k + c.semantic_place), 0) + coalesce(1 / (_rrf_k + c.keyword_place), 0))
            * (_rrf_k + 1) / 2
        END AS score
      FROM candidate AS c
    )
    SELECT s.vector_store, s.document_name, s.document_id, s.document_key, s.segment_number, s.segment, s.distance,
      s.metadata, s.keyword_score, s.score, NULL::double precision
    FROM scored AS s
    ORDER BY s.score DESC, s.distance, s.vector_store COLLATE "C", s.document_name COLLATE "C", s.document_id,
      s.document_key COLLATE "C", s.segment_number;
END
$$;
COMMENT ON FUNCTION ml_rag.fuse(ml_rag.hit[], ml_rag.hit[], jsonb, text) IS
$$the hits of the semantic arm (nearest first) and of the keyword arm (best first) as one list, by score (0-1)
options: those of hybrid_options. fusion weighted: w * similarity + (1 - w) * keyword score, each divided by the largest
of its arm; similarity = 1 - distance, or 1 / (1 + distance) with EUCLIDEAN and MANHATTAN; a hit that only one arm found counts with
its true distance and the keyword score 0. w is semantic_weight; auto = by how clearly each arm tells its best
candidates from the rest. fusion rrf: the sum of 1 / (rrf_k + place), as a share of the largest possible.
Errors: 22023 bad option.$$;
