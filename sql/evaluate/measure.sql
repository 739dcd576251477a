-- measure: what a ruler reads off one question: functions of what was found and what was expected alone.

CREATE FUNCTION ml_rag._expected_documents(value jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the expected documents of a question in one form, [{"document", "grade", "metadata"}], grades
-- above 0 only
-- In: a name or id, an array of them or of objects {"document", "grade", any key of metadata}, or name ->
-- grade. Null for null, which is "unknown"; [] is "none".
DECLARE
  _items jsonb;
BEGIN
  IF coalesce(value, 'null') = 'null' THEN
    RETURN NULL;
  END IF;
  _items := CASE
    WHEN jsonb_typeof(value) = 'array' THEN value
    WHEN jsonb_typeof(value) <> 'object' OR value ? 'document' THEN jsonb_build_array(value)
    -- json: jsonb_agg takes a time that grows with the square of the texts in a value, uncancelled
    ELSE (SELECT coalesce(json_agg(jsonb_build_object('document', e.key, 'grade', e.value))::jsonb, '[]')
          FROM jsonb_each(value) AS e)
  END;
  _items := (SELECT coalesce(json_agg(CASE jsonb_typeof(i) WHEN 'object' THEN i
                                      ELSE jsonb_build_object('document', i) END)::jsonb, '[]')
             FROM jsonb_array_elements(_items) AS i);
  IF EXISTS (
    SELECT FROM jsonb_array_elements(_items) AS i
    WHERE coalesce(jsonb_typeof(i -> 'document'), '') NOT IN ('string', 'number')
      OR coalesce(jsonb_typeof(i -> 'grade'), 'null') NOT IN ('number', 'null')) THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '22023', 'message', 'invalid expected documents',
      'detail', format('Got %s.', left(value::text, 200)),
      'hint', 'A name, an array of names, an object of names and grades, or an array of '
        '{"document": "a.pdf", "grade": 1, "page": 7}, in which any further key is segment_number or one '
        'of the metadata.'));
  END IF;
  RETURN (
    SELECT coalesce(json_agg(to_jsonb(g) ORDER BY g.document, g.metadata)::jsonb, '[]') FROM (
      SELECT i ->> 'document' AS document, max(coalesce((i ->> 'grade')::float8, 1)) AS grade,
        i - '{document,grade}'::text[] AS metadata
      FROM jsonb_array_elements(_items) AS i GROUP BY 1, 3) AS g
    WHERE g.grade > 0);
END
$$;

CREATE FUNCTION ml_rag._grade_hits(hits ml_rag.hit[], expected jsonb, match text,
  OUT gains float8[], OUT items integer[], OUT relevant boolean[])
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: which expected documents were found where; expected comes from ml_rag._expected_documents
-- gains, items: by rank of the documents (not of the segments): a document counts once, at its best segment,
-- and so does a page where pages are expected. gains = the grade, items = how many expected ones are here for
-- the first time.
-- relevant: by hit.
BEGIN
  WITH item AS MATERIALIZED (
    SELECT e.place, e.value ->> 'document' AS document, (e.value -> 'grade')::float8 AS grade,
      e.value -> 'metadata' AS metadata
    FROM jsonb_array_elements(expected) WITH ORDINALITY AS e (value, place)
  ), key AS MATERIALIZED (
    SELECT array_agg(DISTINCT k) AS names FROM item AS i CROSS JOIN jsonb_object_keys(i.metadata) AS k
  ), hit AS MATERIALIZED (
    SELECT p AS place, hits[p].document_name AS name, hits[p].document_key AS key, m.metadata,
      -- what tells documents (and pages, …) apart
      ROW(hits[p].vector_store, hits[p].document_name, hits[p].document_key,
          ARRAY(SELECT m.metadata ->> n FROM unnest((SELECT k.names FROM key AS k)) AS n))::text AS document
    FROM generate_subscripts(hits, 1) AS p
    CROSS JOIN LATERAL (SELECT jsonb_build_object('segment_number', hits[p].segment_number)
      || CASE jsonb_typeof(hits[p].metadata) WHEN 'object' THEN hits[p].metadata
        ELSE '{}' END) AS m (metadata)
  ), ranked AS MATERIALIZED (
    SELECT f.document, f.place, row_number() OVER (ORDER BY f.place) AS rank
    FROM (SELECT h.document, min(h.place) AS place FROM hit AS h GROUP BY h.document) AS f
  ), matched AS MATERIALIZED (
    SELECT r.rank, r.document, i.place, i.grade FROM ranked AS r JOIN hit AS h ON h.place = r.place
    JOIN item AS i ON CASE match
        WHEN 'document_id' THEN h.key = i.document
        WHEN 'document_name' THEN h.name = i.document
        ELSE h.name = i.document OR right(h.name, length(i.document) + 1) = '/' || i.document END
      AND NOT EXISTS (SELECT FROM jsonb_each_text(i.metadata) AS m
                      WHERE m.value IS DISTINCT FROM h.metadata ->> m.key)
  ), first AS MATERIALIZED (
    SELECT f.rank, max(f.grade) AS gain, count(*)::integer AS items
    FROM (SELECT DISTINCT ON (m.place) m.rank, m.grade FROM matched AS m ORDER BY m.place, m.rank) AS f
    GROUP BY f.rank
  )
  SELECT
    (SELECT array_agg(coalesce(f.gain, 0) ORDER BY r.rank) FROM ranked AS r
      LEFT JOIN first AS f ON f.rank = r.rank),
    (SELECT array_agg(coalesce(f.items, 0) ORDER BY r.rank) FROM ranked AS r
      LEFT JOIN first AS f ON f.rank = r.rank),
    (SELECT array_agg(EXISTS (SELECT FROM matched AS m WHERE m.document = h.document) ORDER BY h.place)
      FROM hit AS h)
  INTO gains, items, relevant;
  gains := coalesce(gains, '{}');
  items := coalesce(items, '{}');
  relevant := coalesce(relevant, '{}');
END
$$;

CREATE FUNCTION ml_rag._ranking_measures(gains float8[], items integer[], expected jsonb, cutoffs integer[])
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: recall@k, nDCG@k and reciprocal rank of one ranking, as trec_eval defines them
-- Source: Järvelin and Kekäläinen 2002, gain = grade, discount log2(rank + 1).
DECLARE
  _ideal float8[] := ARRAY(SELECT (e -> 'grade')::float8 FROM jsonb_array_elements(expected) AS e
    ORDER BY 1 DESC);
  _measures jsonb := jsonb_build_object('mrr', coalesce((
    SELECT 1.0::float8 / min(i) FROM generate_subscripts(gains, 1) AS i WHERE gains[i] > 0), 0));
  _k integer;
BEGIN
  FOREACH _k IN ARRAY cutoffs LOOP
    _measures := _measures || jsonb_build_object(
      format('recall@%s', _k), coalesce((SELECT sum(n) FROM unnest(items[1:_k]) AS n),
        0)::float8 / cardinality(_ideal),
      format('ndcg@%s', _k), (
        SELECT coalesce(sum(gains[i] * ln(2::float8) / ln((i + 1)::float8)),
          0) / sum(_ideal[i] * ln(2::float8) / ln((i + 1)::float8))
        FROM generate_series(1, _k) AS i));
  END LOOP;
  RETURN _measures;
END
$$;

CREATE FUNCTION ml_rag._student_p(t float8, degrees integer) RETURNS float8
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: two-sided p value of Student's t, to about 1e-12; a finite sum for whole degrees of freedom
-- Source: Abramowitz and Stegun 26.7.3 and 26.7.4.
DECLARE
  _angle float8 := atan(abs(t) / sqrt(degrees::float8));
  _square float8 := power(cos(_angle), 2);
  _term float8;
  _sum float8 := 0;
BEGIN
  IF degrees % 2 = 1 THEN
    _term := cos(_angle);
    FOR i IN 1..(degrees - 1) / 2 LOOP
      _sum := _sum + _term;
      _term := _term * _square * (2 * i) / (2 * i + 1);
      EXIT WHEN _term < 1e-60;
    END LOOP;
    _sum := 2 / pi() * (_angle + sin(_angle) * _sum);
  ELSE
    _term := 1;
    FOR i IN 1..degrees / 2 LOOP
      _sum := _sum + _term;
      _term := _term * _square * (2 * i - 1) / (2 * i);
      EXIT WHEN _term < 1e-60;
    END LOOP;
    _sum := sin(_angle) * _sum;
  END IF;
  RETURN greatest(0, least(1, 1 - _sum));
END
$$;

CREATE FUNCTION ml_rag._refuse_other_embeddings(measured ml_rag.store[], searched ml_rag.store[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: that a question has searched the embeddings that the call measures: each finds the stores anew
-- Errors: 55000
DECLARE
  _names text := (
    SELECT string_agg(m.vector_store, ', ' ORDER BY m.vector_store)
    FROM unnest(measured) AS m JOIN unnest(searched) AS s ON s.relation = m.relation
    WHERE (s.segment_embedding, s.embed_model_id) IS DISTINCT FROM (m.segment_embedding, m.embed_model_id));
BEGIN
  IF _names IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('another embedding was made the default of %s during the call', _names),
      DETAIL = 'What is measured would be of both.', HINT = 'Call again.';
  END IF;
END
$$;
