-- calibrate: which limits tell questions that the documents answer from those that they do not.

CREATE FUNCTION ml_rag._calibrate_question(question jsonb, own jsonb, rag jsonb, call integer,
  stores ml_rag.store[], OUT distance numeric, OUT score numeric)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
-- a warning that belongs to all questions was given once
SET client_min_messages = 'error'
AS $$
-- purpose: what max_distance and min_score are compared with for one question: the nearest distance, the best
-- score of rerank; null if nothing is found. A question that names whole documents is answered from them,
-- whatever the limits
DECLARE
  _found record;
  _retrieval ml_rag.retrieval;
BEGIN
  _found := ml_rag._retrieve(ml_rag._request(question ->> 'question',
    ml_rag._with_history(rag, own, question -> 'history'), call));
  _retrieval := _found.retrieval;
  PERFORM ml_rag._refuse_other_embeddings(stores, _retrieval.stores);
  IF _retrieval.method = 'document_order' AND _retrieval.missing IS NULL THEN
    distance := 0;
    score := 1;
    RETURN;
  END IF;
  SELECT max(s.facts ->> 'nearest')::numeric,
    (max(s.facts ->> 'best_score') FILTER (WHERE s.stage = 'rerank'))::numeric
  INTO distance, score FROM unnest(_retrieval.trace) AS s;
END
$$;

CREATE FUNCTION ml_rag._thresholds(measured numeric[], answerable boolean[], given numeric,
  most float8 DEFAULT 1)
RETURNS TABLE (threshold numeric, refused_wrongly float8, answered_wrongly float8, is_proposed boolean)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: thresholds half-way between what was measured, and given, each with its rates. A question is
-- answered if its measured value is at most the threshold; a null value never is. answerable: whether it
-- should be
-- The proposed threshold has the smallest sum of both rates (Youden 1950) among those that refuse at most the
-- share most wrongly; of equals, the one that refuses less.
BEGIN
  RETURN QUERY
    WITH value AS (
      SELECT m.value, count(*) FILTER (WHERE m.answerable) AS right_ones,
        count(*) FILTER (WHERE NOT m.answerable) AS wrong_ones,
        lead(m.value) OVER (ORDER BY m.value) AS next
      FROM unnest(measured, _thresholds.answerable) AS m (value, answerable)
      WHERE m.value IS NOT NULL GROUP BY m.value
    ), event AS (
      SELECT v.value AS place, v.right_ones, v.wrong_ones, NULL AS is_given FROM value AS v
      UNION ALL
      -- four decimals, as distances have; the value itself where the next one is nearer than that
      SELECT coalesce(greatest(floor((v.value + v.next) * 5000) / 10000, v.value), v.value), 0, 0, false
      FROM value AS v
      UNION ALL
      SELECT given, 0, 0, true WHERE given IS NOT NULL
    ), total AS (
      SELECT count(*) FILTER (WHERE a) AS right_ones, count(*) FILTER (WHERE NOT a) AS wrong_ones
      FROM unnest(_thresholds.answerable) AS u (a)
    ), rate AS (
      SELECT e.place, e.is_given, 1 - sum(e.right_ones) OVER w / t.right_ones AS refused,
        sum(e.wrong_ones) OVER w / t.wrong_ones
        AS answered
      FROM event AS e CROSS JOIN total AS t WINDOW w AS (ORDER BY e.place)
    )
    SELECT trim_scale(r.place), r.refused::float8, r.answered::float8,
      row_number() OVER (ORDER BY r.refused > most, r.refused + r.answered, r.refused, r.is_given,
        r.place) = 1
    FROM (SELECT r.place, min(r.refused) AS refused, min(r.answered) AS answered,
      bool_and(r.is_given) AS is_given
          FROM rate AS r WHERE r.is_given IS NOT NULL GROUP BY r.place) AS r
    ORDER BY r.place;
END
$$;

CREATE FUNCTION ml_rag._calibrate(source text, options jsonb, path text)
RETURNS TABLE (option text, threshold numeric, refused_wrongly float8, answered_wrongly float8,
  answerable integer,
               unanswerable integer, is_proposed boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: ml_rag.calibrate; path is the caller's search_path
#variable_conflict use_column
DECLARE
  _call integer := ml_rag._begin('ml_rag.calibrate');
  _table text := CASE WHEN source ~ '^[[:alpha:]_"][^[:space:]();]*$' THEN source ELSE '' END;
  _rag jsonb;
  _given jsonb;
  _questions jsonb[];
  _answerable boolean[];
  _measured record;
  _distances numeric[] := '{}';
  _scores numeric[] := '{}';
  _missing text;
  _stores ml_rag.store[];
  _keep jsonb := options -> 'keep';
  -- the share of answerable questions that a limit to be kept may refuse; null if none is to be kept
  _most float8;
  _kept record;
  _limit numeric;
BEGIN
  IF _keep = 'true' THEN
    _most := 0.1;
  ELSIF jsonb_typeof(_keep) = 'number' AND _keep::numeric BETWEEN 0 AND 1 THEN
    _most := _keep::float8;
  ELSIF _keep NOT IN ('false', 'null') THEN
    PERFORM ml_rag._bad_option('keep', _keep, 'true, false, or a share of 0 to 1');
  END IF;
  options := options - 'keep';
  _given := ml_rag._parse_rag_options(options);
  _limit := (_given #>> '{retrieval_options,max_distance}')::numeric;
  IF _given ? 'query_embedding' THEN
    PERFORM ml_rag._bad_option('query_embedding', _given -> 'query_embedding',
      'nothing: each question has its own',
      'Leave "query_embedding" out.');
  ELSIF (_given ->> 'n_citations')::integer = 0 THEN
    PERFORM ml_rag._bad_option('n_citations', '0', '1 to 100: without retrieval there is nothing to compare');
  END IF;
  IF _most IS NOT NULL AND _given ->> 'distance_metric' <> 'COSINE' THEN
    PERFORM ml_rag._bad_option('distance_metric', _given -> 'distance_metric', 'COSINE together with "keep"');
  END IF;
  -- limits that drop nothing, so that what they are compared with is known
  _rag := _given - 'explain' || '{"retrieval_options": {"max_distance": 999999.9999, "segment_overlap": 0}}'
    || CASE WHEN _given ? 'rerank' THEN jsonb_build_object('rerank', (_given -> 'rerank') - 'min_score')
      ELSE '{}' END;
  PERFORM ml_rag._progress(_call, _table, 'reading questions');
  _questions :=
    ARRAY(SELECT jsonb_array_elements(ml_rag._check_questions(ml_rag._read_questions(source, path),
    ml_rag.parse_options('evaluation_columns', NULL), '{}')));
  -- a question without a mark is answerable
  _answerable := ARRAY(SELECT coalesce(nullif(q.value -> 'answerable', 'null')::boolean, true)
                       FROM unnest(_questions) WITH ORDINALITY AS q (value, place) ORDER BY q.place);
  _missing := CASE WHEN true <> ALL (_answerable) THEN 'that the documents answer'
    WHEN false <> ALL (_answerable)
    THEN 'that the documents do not answer' END;
  IF _missing IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('questions %s are missing', _missing),
      DETAIL = 'A threshold is found between both kinds; column "answerable" is false for questions that the '
        'documents do not answer.',
      HINT = 'Add at least twenty such questions: SELECT question, true AS answerable FROM … UNION ALL '
        'SELECT question, false FROM ….';
  END IF;
  PERFORM ml_rag._hold_named(n, false)
  FROM unnest(ml_rag._texts(ml_rag._layered(_rag) -> 'vector_store')) AS n;
  -- with its warnings, once
  _stores := ml_rag._discover(_rag);
  IF cardinality(_stores) = 0 THEN
    PERFORM ml_rag._no_store(_rag);
  END IF;
  IF _most IS NOT NULL THEN
    PERFORM ml_rag._check_keeper(s, 'a limit') FROM unnest(_stores) AS s;
  END IF;
  FOR i IN 1..cardinality(_questions) LOOP
    PERFORM ml_rag._progress(_call, _table, 'asking questions', i - 1, cardinality(_questions));
    _measured := ml_rag._calibrate_question(_questions[i], jsonb_build_object('options', options),
      _rag, _call, _stores);
    _distances[i] := _measured.distance;
    _scores[i] := _measured.score;
  END LOOP;
  IF array_remove(_distances, NULL) = '{}' THEN
    RAISE EXCEPTION USING ERRCODE = 'P0002', MESSAGE = 'nothing was found for any question',
      DETAIL = 'The stores have no row that you may see and that passes the filters.',
      HINT = 'Call ml_rag_search with one of the questions and the same options.';
  END IF;
  IF _given ? 'has_own_limit' AND _given ->> 'distance_metric' = 'COSINE' THEN
    _limit := coalesce(ml_rag._kept_limit(_stores), _limit);
  END IF;
  IF _most IS NOT NULL THEN
    SELECT t.* INTO _kept FROM ml_rag._thresholds(_distances, _answerable, NULL, _most) AS t
    WHERE t.is_proposed;
    PERFORM ml_rag._mark(s.relation, s.segment_embedding,
      jsonb_build_object('MAX_DISTANCE', round(_kept.threshold, 4)))
    FROM unnest(_stores) AS s;
  END IF;
  PERFORM ml_rag._end(_call);
  RETURN QUERY
    SELECT 'max_distance', t.threshold, t.refused_wrongly, t.answered_wrongly,
      cardinality(array_positions(_answerable, true)), cardinality(array_positions(_answerable, false)),
        t.is_proposed
    FROM ml_rag._thresholds(_distances, _answerable, _limit, coalesce(_most, 1)) AS t;
  IF _given ? 'rerank' THEN
    -- a score must be at least min_score
    RETURN QUERY
      SELECT 'min_score', -t.threshold, t.refused_wrongly, t.answered_wrongly,
        cardinality(array_positions(_answerable, true)), cardinality(array_positions(_answerable, false)),
          t.is_proposed
      FROM ml_rag._thresholds(ARRAY(SELECT -s.score FROM unnest(_scores) WITH ORDINALITY AS s (score, place)
        ORDER BY s.place),
        _answerable, -(_given #>> '{rerank,min_score}')::numeric) AS t;
  END IF;
@CATCH_AND_END@
END
$$;

CREATE FUNCTION ml_rag.calibrate(questions text, options jsonb DEFAULT NULL)
RETURNS TABLE (option text, threshold numeric, refused_wrongly float8, answered_wrongly float8,
  answerable integer,
               unanswerable integer, is_proposed boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 100 AS $$
-- purpose: thresholds for the caller's own documents
-- No SET clause: the names in the query are the caller's. So every name here is qualified and no operator is
-- used.
BEGIN
  RETURN QUERY SELECT c.* FROM ml_rag._calibrate(questions, options,
    pg_catalog.current_setting('search_path')) AS c;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.calibrate(text, jsonb) IS
$$proposes max_distance, and with rerank min_score, for one's own documents: SELECT * FROM ml_rag.calibrate('questions')
questions: a table or a query that gives question, answerable (false for questions that the documents do not
answer; true if absent or null) and, if wanted, id and history. The query runs read-only, as the caller; do
not let strangers write it.
options: those of ml_rag that the questions will be asked with; thresholds among them are measured too.
"keep": true makes the max_distance that is proposed the one that "auto" stands for in the stores searched,
which the caller must own; the threshold proposed then refuses at most 10 % of the answerable questions, or
the share given in place of true.
Returns a row for each threshold between two measured values. refused_wrongly: share of the answerable
questions for which nothing is within it (0-1). answered_wrongly: share of the unanswerable ones for which
something is (0-1). answerable, unanswerable: how many questions each share is of. is_proposed: true for one
row of each option, that of the smallest sum of both shares. max_distance and min_score are measured apart.
Errors: 22023 bad option, no questions of one kind, two of one id; 42P01, 42703, 42501 and others of the
query; 25006 a query that writes; 55000 a store got another default embedding meanwhile; 57014; P0002 no
vector store, or nothing is found for any question; other errors that ml_rag_search has for one of the
questions.$$;
