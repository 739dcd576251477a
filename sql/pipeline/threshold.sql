-- threshold: drop what is too far.

CREATE FUNCTION ml_rag.threshold(
  hits ml_rag.hit[],
  max_distance numeric DEFAULT NULL,
  percentage_distance numeric DEFAULT NULL,
  OUT kept ml_rag.hit[],
  OUT method text,
  OUT threshold numeric
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: which of the hits are near enough, in their order, and what limit was in force
DECLARE
  _nearest numeric;
  _by_percentage numeric;
BEGIN
  IF max_distance IS NULL AND percentage_distance IS NULL THEN
    method := 'n_citations';
    threshold := (SELECT max(h.distance) FROM unnest(hits) AS h);
    kept := hits;
    RETURN;
  ELSIF percentage_distance IS NOT NULL THEN
    _nearest := (SELECT min(h.distance) FROM unnest(hits) AS h);
    _by_percentage := _nearest + percentage_distance / 100 * abs(_nearest);
  END IF;
  IF _by_percentage < max_distance OR max_distance IS NULL THEN
    method := 'percentage_distance';
    threshold := _by_percentage;
  ELSE
    method := 'max_distance';
    threshold := max_distance;
  END IF;
  -- in the order of the array, which is the order of this scan
  kept := ARRAY(SELECT h FROM unnest(hits) AS h WHERE h.distance <= threshold.threshold);
END
$$;
COMMENT ON FUNCTION ml_rag.threshold(ml_rag.hit[], numeric, numeric) IS
$$keeps the hits whose distance is at most the threshold; of two limits the smaller one
hits: in any order, which is kept. percentage_distance p: d + p/100 * |d|, where d is the nearest distance.
method: n_citations (no limit given; threshold = the largest distance), max_distance or percentage_distance.$$;
