-- rerank: reorder by relevance, with a cross-encoder or with the ranking model "hybrid", which needs none.

CREATE FUNCTION ml_rag._word_scores(query text, texts text[],
  configuration regconfig) RETURNS double precision[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
-- what takes microseconds is not worth compiling for a second, as the guessed number of words would have it
SET jit = off
AS $$
-- purpose: BM25 of each text, with the statistics of these texts alone, as 0-1; null for a query without
-- words
-- Lucene's variant, k1 1.2, b 0.75. The best text gets 1, unless it has less than 0.15 of what BM25 could
-- give for all words of the query: a text is not relevant for being the only one that shares "the".
DECLARE
  _words jsonb := (ml_rag._tokens(configuration, query)).tokens;
  _scores double precision[];
  _attainable double precision;
BEGIN
  IF _words = '{}' THEN
    RETURN NULL;
  END IF;
  WITH word AS (
    SELECT w.key AS word, w.value::integer AS times FROM jsonb_each_text(_words) AS w
  ), read AS MATERIALIZED (
    SELECT t.place, k.words, k.tokens, k.length
    FROM unnest(texts) WITH ORDINALITY AS t (text, place)
    CROSS JOIN LATERAL ml_rag._words(configuration, t.text, false) AS k
  ), posting AS (
    SELECT r.place, w.word, (r.tokens ->> w.word)::integer AS times
    FROM read AS r JOIN word AS w ON r.tokens ? w.word
    UNION ALL
    SELECT r.place, w.word, cardinality(u.positions) FROM read AS r
    CROSS JOIN LATERAL unnest(r.words) AS u JOIN word AS w ON w.word = u.lexeme
  ), weight AS (
    SELECT w.word,
      w.times * ln(1 + (cardinality(texts) - count(p.place) + 0.5) / (count(p.place) + 0.5)) AS weight
    FROM word AS w LEFT JOIN posting AS p ON p.word = w.word GROUP BY w.word, w.times
  ), norm AS (
    SELECT r.place, 1.2 * (0.25 + 0.75 * r.length / nullif(avg(r.length) OVER (), 0)) AS norm FROM read AS r
  ), scored AS (
    SELECT n.place, coalesce(sum(w.weight * p.times / (p.times + n.norm)), 0)::double precision AS score
    FROM norm AS n LEFT JOIN posting AS p ON p.place = n.place LEFT JOIN weight AS w ON w.word = p.word
    GROUP BY n.place
  )
  SELECT array_agg(s.score ORDER BY s.place), (SELECT sum(w.weight) FROM weight AS w)
  INTO _scores, _attainable
  FROM scored AS s;
  RETURN ARRAY(
    SELECT s.score / greatest(max(s.score) OVER (), 0.15 * _attainable)
    FROM unnest(_scores) WITH ORDINALITY AS s (score, place) ORDER BY s.place);
END
$$;

CREATE FUNCTION ml_rag._hybrid_scores(query text, texts text[], configuration regconfig,
  similarities double precision[] DEFAULT NULL)
RETURNS double precision[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what the ranking model "hybrid" says: 0.7 of the similarity and 0.3 of the words the text shares
-- The weight is measured: 0.65 and 0.7 were the best of 0 … 1 together on English and Chinese questions, see
-- docs/ranking.md. similarities: those that are known; if null, cosines by the default embedding model, those
-- below 0 as 0. A query without words (nothing but stop words, or emoji) leaves it to the similarity.
DECLARE
  -- what 512 tokens surely fit in; without a bound a text of 1 MB would be more than to_tsvector takes
  _query text := left(query, 8192);
  _texts text[] := ARRAY(
    SELECT left(t.text, 8192) FROM unnest(texts) WITH ORDINALITY AS t (text, place) ORDER BY t.place);
  _similarities double precision[] := similarities;
  _word_scores double precision[];
  _model_id text;
  _query_embedding @vector@.vector;
  _embedded record;
BEGIN
  IF similarities IS NULL THEN
    _model_id := ml_rag._get_setting('embed_model_id');
    _query_embedding := ml_rag.embed(_query, _model_id, 'query');
    -- a slice is what one request surely holds
    FOR i IN 1..cardinality(_texts) BY 128 LOOP
      _embedded := ml_rag._embed(_texts[i:i + 127], _model_id, 'document');
      PERFORM ml_rag._raise(_embedded.error);
      _similarities := _similarities || ARRAY(
        SELECT greatest(0,
          coalesce(nullif(1 - (v.embedding OPERATOR(@vector@.<=>) _query_embedding), 'NaN'), 0))
        FROM unnest(_embedded.vectors) WITH ORDINALITY AS v (embedding, place) ORDER BY v.place);
    END LOOP;
  END IF;
  _word_scores := ml_rag._word_scores(_query, _texts, configuration);
  -- least: rounding can bring the cosine of equal vectors a little above 1
  RETURN ARRAY(
    SELECT least(1, CASE WHEN _word_scores IS NULL THEN _similarities[i]
                         ELSE 0.7 * _similarities[i] + 0.3 * _word_scores[i] END)
    FROM generate_subscripts(_texts, 1) AS i ORDER BY i);
END
$$;

CREATE FUNCTION ml_rag._relevance(
  query text, texts text[], model_id text, configuration regconfig DEFAULT NULL
) RETURNS double precision[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: how relevant each text is to the query, 0-1, in the order of the texts; model_id: a cross-encoder,
-- or hybrid
DECLARE
  -- what a model of 8192 tokens is given of a text: a row can be of any length
  _longest CONSTANT integer := 524288;
  _scores double precision[];
  _error jsonb;
BEGIN
  IF coalesce(query, '') !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the query is empty';
  END IF;
  IF cardinality(texts) = 0 THEN
    RETURN '{}';
  END IF;
  IF model_id = 'hybrid' THEN
    RETURN ml_rag._hybrid_scores(query, texts, coalesce(configuration, get_current_ts_config()));
  END IF;
  SELECT ml_rag._texts(c.found), c.error INTO _scores, _error
  FROM ml_rag._call_python('rerank', jsonb_build_array(query, ARRAY(
    SELECT left(t.text, _longest) FROM unnest(texts) WITH ORDINALITY AS t (text, place) ORDER BY t.place),
    model_id)) AS c;
  IF _error IS NOT NULL THEN
    IF _error ->> 'sqlstate' = '55000' THEN
      _error := _error || jsonb_build_object('hint', concat_ws(E'\nOr ', _error ->> 'hint',
        'rerank without a model of its own: "model_id": "hybrid".'));
    END IF;
    PERFORM ml_rag._raise(_error);
  END IF;
  RETURN _scores;
END
$$;

CREATE FUNCTION ml_rag._rerank(query text, hits ml_rag.hit[], options jsonb,
  known text DEFAULT NULL) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10 AS $$
-- purpose: the hits in the order of their relevance to the query; equals stay in the order they came in.
-- known: what a search knows of them, whose stored vectors it has compared; a hit without a vector by its
-- words. null for nothing; fused, by meaning and words, which is all that the model "hybrid" knows; else how
-- a distance becomes a similarity
DECLARE
  _options jsonb;
  _least double precision;
  _similarities double precision[];
  _scores double precision[];
  _texts text[];
  _found record;
BEGIN
  _options := ml_rag.parse_options('rerank', options);
  _least := (_options ->> 'min_score')::double precision;
  IF coalesce(cardinality(hits), 0) = 0 THEN
    RETURN;
  END IF;
  -- the segment alone: what a store's owner wants scored (a title, a heading) belongs into it
  _texts := ARRAY(SELECT hits[i].segment FROM generate_subscripts(hits, 1) AS i ORDER BY i);
  IF _options ? 'function' THEN
    _found := ml_rag._find_function('rerank', _options -> 'function');
    _scores := ml_rag._call_function(_found.name, _found.form, query, NULL, _texts,
      metadata => ARRAY(SELECT hits[i].metadata FROM generate_subscripts(hits, 1) AS i ORDER BY i));
  ELSE
    _options := jsonb_build_object('model_id', ml_rag._get_setting('rerank_model_id')) || _options;
    IF _options ->> 'model_id' = 'hybrid' AND known = 'fused' THEN
      _scores := ARRAY(SELECT greatest(0, least(1, h.score)) FROM unnest(hits) WITH ORDINALITY AS h
        ORDER BY h.ordinality);
    ELSIF _options ->> 'model_id' = 'hybrid' AND known IS NOT NULL THEN
      _similarities := ARRAY(
        SELECT greatest(0,
          coalesce(CASE known WHEN 'complement' THEN 1 - h.distance ELSE 1 / (1 + h.distance) END, 0))::float8
        FROM unnest(hits) WITH ORDINALITY AS h ORDER BY h.ordinality);
      _scores := CASE WHEN EXISTS (SELECT FROM unnest(hits) AS h WHERE h.keyword_score > 0) THEN ARRAY(
          -- all words of the store say how rare those of the question are; halves of both by measuring
          SELECT 0.5 * coalesce(_similarities[h.ordinality] / nullif(max(_similarities[h.ordinality]) OVER (),
            0), 0)
            + 0.5 * coalesce(h.keyword_score / max(h.keyword_score) OVER (), 0)
          FROM unnest(hits) WITH ORDINALITY AS h ORDER BY h.ordinality)
        ELSE ml_rag._hybrid_scores(query, _texts, get_current_ts_config(), _similarities) END;
    ELSE
      _scores := ml_rag._relevance(query, _texts, _options ->> 'model_id');
    END IF;
  END IF;
  FOR i IN 1..cardinality(hits) LOOP
    hits[i].rerank_score := _scores[i];
  END LOOP;
  -- null: a function has left it out
  RETURN QUERY SELECT (h.hit).* FROM (
      SELECT hits[p.place] AS hit, p.place FROM generate_subscripts(hits, 1) AS p (place)
    ) AS h
    WHERE (h.hit).rerank_score IS NOT NULL AND (_least IS NULL OR (h.hit).rerank_score >= _least)
    ORDER BY (h.hit).rerank_score DESC, h.place;
END
$$;

CREATE FUNCTION ml_rag.rerank(query text, hits ml_rag.hit[],
  options jsonb DEFAULT NULL) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: the stage, where it is called by itself
BEGIN
  RETURN QUERY SELECT * FROM ml_rag._rerank(query, hits, options);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.rerank(text, ml_rag.hit[], jsonb) IS
$$the hits by their relevance to the query, best first, with rerank_score (0-1) filled
options: those of option "rerank": model_id (a cross-encoder, or hybrid: embedding similarity and BM25 over
these hits;
default: setting rerank_model_id), or function, one of the caller's, whose scores have any range and leave a
hit out by null; min_score (hits below it are dropped). The text of the segment is scored, without its
document's name; query and segment together are cut at the cross-encoder's max_tokens. Hits of equal score
keep their order. Errors: 22023 empty query, bad option, unknown model or model of another task; 42883, 42501
and 42725 no such function; those of the function; 55000 model not available; 08006 model server; 53300 its
queue is full; 57014 cancelled; 38000.$$;
