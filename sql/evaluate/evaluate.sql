-- evaluate: the ruler: many questions through the pipeline, measured, and kept.

CREATE FUNCTION ml_rag._is_measures(measures jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
-- as ground/schema.sql has it; of a constraint, which pg_restore checks
SET search_path = pg_catalog, pg_temp
AS $$
-- purpose: whether it is an object of numbers, such as {"mrr": 0.5, "recall@10": 1}, and not of too many
SELECT jsonb_typeof(measures) = 'object'
  AND jsonb_array_length(jsonb_path_query_array(measures, '$.*')) <= 1000 AND NOT EXISTS (
  SELECT FROM jsonb_each(CASE jsonb_typeof(measures) WHEN 'object' THEN measures END) AS m
  WHERE m.key !~ '^[a-z0-9_]{1,60}(@[0-9]{1,3})?$' OR jsonb_typeof(m.value) NOT IN ('number', 'null')
    OR length(m.value::text) > 40)
$$;

CREATE TABLE ml_rag.evaluation_run (
  run_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name       text,
  role       text COLLATE "C" NOT NULL DEFAULT current_user,
  started_at timestamptz NOT NULL,
  seconds    float8 NOT NULL,
  source     text NOT NULL,   -- the table or the query of the questions
  questions  integer NOT NULL,
  options    jsonb NOT NULL,  -- as given
  stores     text[] NOT NULL, -- that were searched
  models     jsonb NOT NULL,
  versions   jsonb NOT NULL,
  measures   jsonb NOT NULL,  -- means
  counted    jsonb NOT NULL,  -- over how many questions each mean is
  latency    jsonb NOT NULL,
  errors     jsonb NOT NULL,  -- SQLSTATE -> questions
  -- each role writes rows of its own here, which the superuser's pages and statements read, too
  CONSTRAINT is_readable CHECK (started_at >= '1970-01-01 00:00+00' AND started_at <= '9000-01-01 00:00+00'
    AND jsonb_typeof(options) = 'object' AND ml_rag._is_measures(measures) AND ml_rag._is_measures(counted)),
  CONSTRAINT can_be_restored CHECK (ml_rag._can_be_restored(ARRAY[name, source, stores::text],
    ARRAY[options, models, versions, latency, errors]))
);
COMMENT ON TABLE ml_rag.evaluation_run IS
$$runs of ml_rag_evaluate; each role sees its own
ml_rag.forget_evaluation deletes one.$$;

COMMENT ON SEQUENCE ml_rag.evaluation_run_run_id_seq IS 'numbers of the runs of ml_rag_evaluate';

CREATE TABLE ml_rag.evaluation_question (
  -- no foreign key: a parallel pg_restore would load this table before the other one
  run_id      bigint NOT NULL,
  question_id text NOT NULL,
  question    text,
  answer      text,           -- null where none was generated
  -- what was found, without its text, and whether it is relevant (null if unknown)
  citations   jsonb NOT NULL,
  measures    jsonb NOT NULL,
  reasons     jsonb,          -- the judge's, by measure
  latency     jsonb NOT NULL, -- stage -> milliseconds
  sqlstate    text,           -- why there is nothing
  message     text,
  role        text COLLATE "C" NOT NULL DEFAULT current_user,
  CONSTRAINT is_readable CHECK (ml_rag._is_measures(measures) AND ml_rag._is_measures(latency)
    AND jsonb_typeof(citations) = 'array' AND NOT citations @? 'strict $[*] ? (@.type() != "object")'),
  CONSTRAINT can_be_restored CHECK (ml_rag._can_be_restored(
    ARRAY[question_id, question, answer, sqlstate, message], ARRAY[citations, reasons]))
);
-- Conditions on indexed columns come before policies, and EXPLAIN shows how many rows they leave. So the role
-- comes first, and the id behind a function, which must wait for the policy.
CREATE UNIQUE INDEX ON ml_rag.evaluation_question (role, run_id, md5(question_id));
-- without a key of columns it could not be deleted from where all tables are published
ALTER TABLE ml_rag.evaluation_question REPLICA IDENTITY FULL;
-- nor may estimates, which EXPLAIN shows too, tell what others ask
ALTER TABLE ml_rag.evaluation_run ALTER name SET STATISTICS 0, ALTER role SET STATISTICS 0,
  ALTER source SET STATISTICS 0;
ALTER TABLE ml_rag.evaluation_question ALTER question_id SET STATISTICS 0, ALTER question SET STATISTICS 0,
  ALTER answer SET STATISTICS 0, ALTER sqlstate SET STATISTICS 0, ALTER message SET STATISTICS 0;
COMMENT ON TABLE ml_rag.evaluation_question IS 'the questions of the runs of ml_rag_evaluate, one by one';

SELECT pg_catalog.pg_extension_config_dump('ml_rag.evaluation_run', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.evaluation_run_run_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.evaluation_question', '');

-- Questions and answers may be confidential: only a superuser sees those of other roles.
ALTER TABLE ml_rag.evaluation_run ENABLE ROW LEVEL SECURITY;
ALTER TABLE ml_rag.evaluation_question ENABLE ROW LEVEL SECURITY;
CREATE POLICY own ON ml_rag.evaluation_run
  USING ((SELECT jsonb_build_object(current_user, true))[role] IS NOT NULL AND role = current_user)
WITH CHECK (role = current_user);
CREATE POLICY own ON ml_rag.evaluation_question
USING ((SELECT jsonb_build_object(current_user, true))[role] IS NOT NULL AND role = current_user)
WITH CHECK (role = current_user AND EXISTS (
  SELECT FROM ml_rag.evaluation_run AS r WHERE r.run_id = evaluation_question.run_id
    AND r.role = current_user));

-- DELETE is not granted, since it allows LOCK TABLE. A run is forgotten by an UPDATE of its questions to 0:
-- evaluate/forget.

CREATE FUNCTION ml_rag.forget_evaluation(run_id bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: delete one run; the role is looked at beside the policy, which does not bind the superuser
-- Writes: ml_rag.evaluation_run
BEGIN
  UPDATE ml_rag.evaluation_run AS r SET questions = 0
  WHERE r.role = current_user AND r.run_id = forget_evaluation.run_id;
  RETURN FOUND;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.forget_evaluation(bigint) IS
$$deletes a run of ml_rag_evaluate of the caller's, with its questions
Returns whether there was one. Several: SELECT ml_rag.forget_evaluation(run_id) FROM ml_rag.evaluation_run
WHERE …
Errors: 25006 read-only transaction.$$;

CREATE FUNCTION ml_rag._judge(model_id text, task text, question text, hits ml_rag.hit[], OUT score float8,
  OUT reason text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a score from 0 to 1 by a judge model, with its reason; null where it gives none, or nonsense
DECLARE
  _found jsonb;
BEGIN
  _found := (ml_rag._python('generate',
    jsonb_build_array(jsonb_build_object('prompt', format(E'%s\n\n%s', task, question),
    'documents',
      (SELECT jsonb_agg(jsonb_build_object('document_name',
        coalesce(hits[i].document_name, hits[i].vector_store),
        'text', hits[i].segment) ORDER BY i) FROM generate_subscripts(hits, 1) AS i),
    'options', jsonb_build_object('model_id', model_id, 'task', 'judgement', 'max_tokens', 192,
      'json_schema', '{"type": "object", "properties": {"reason": {"type": "string", "maxLength": 300},
        "score": {"enum": [0, 1, 2, 3, 4]}}, "required": ["reason", "score"],
        "additionalProperties": false}'::jsonb)))) ->> 'text')::jsonb;
  IF jsonb_typeof(_found -> 'score') = 'number' AND (_found -> 'score')::float8 BETWEEN 0 AND 4 THEN
    score := (_found -> 'score')::float8 / 4;
    reason := left(_found ->> 'reason', 1000);
  END IF;
EXCEPTION
  WHEN connection_failure THEN
    RAISE;
  WHEN OTHERS THEN
    NULL;
END
$$;

CREATE FUNCTION ml_rag._with_history(rag jsonb, own jsonb, history jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the options of ml_rag with the history of a question, on which defaults depend
BEGIN
  IF coalesce(history, 'null') = 'null' THEN
    RETURN rag;
  END IF;
  RETURN rag || jsonb_build_object('query_options', ml_rag._parse_query_options(
    coalesce(nullif(ml_rag._layered(own -> 'options') -> 'query_options', 'null'), '{}')
      || jsonb_build_object('history', history)));
END
$$;

CREATE FUNCTION ml_rag._evaluate_question(question jsonb, own jsonb, rag jsonb, cutoffs integer[],
  call integer, stores ml_rag.store[], OUT result ml_rag.evaluation_question)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
-- a warning that belongs to all questions was given once
SET client_min_messages = 'error'
AS $$
-- purpose: one question: retrieved, answered where asked for, measured. A history that is wrong fails its
-- question. An error is part of the result, except that of a lost model server: what comes after it would
-- measure nothing. call: what ml_rag._begin has returned. stores: those of the whole call
DECLARE
  _query text := question ->> 'question';
  _expected jsonb := question -> 'documents';
  _has_expected boolean := coalesce(jsonb_array_length(nullif(_expected, 'null')), 0) > 0;
  _generate boolean := (own -> 'generate')::boolean;
  _answerable boolean := (nullif(question -> 'answerable', 'null'))::boolean;
  _answers text[] := ml_rag._texts(nullif(question -> 'answers', 'null'));
  _cited integer := coalesce((own ->> 'cited')::integer, 2147483647);
  _hits ml_rag.hit[] := '{}';
  _gains float8[];
  _items integer[];
  _relevant boolean[];
  _found record;
  _request ml_rag.request;
  _retrieval ml_rag.retrieval;
  _completed record;
  _abstain_text text := coalesce(rag ->> 'abstain_text', ml_rag._get_setting('abstain_text'));
  _refused boolean;
  _measures jsonb := '{}';
  _groundedness record;
  _relevance record;
  _document jsonb;
  _metric jsonb;
  _value float8;
  _began timestamptz;
BEGIN
  result.question_id := question ->> 'id';
  result.question := _query;
  PERFORM ml_rag._stage(call, 'discover');
  _began := clock_timestamp();
  result.latency := '{}';
  BEGIN
    _found := ml_rag._retrieve(ml_rag._request(_query,
      ml_rag._with_history(rag, own, question -> 'history'), call));
    _request := _found.request;
    _retrieval := _found.retrieval;
    result.latency := jsonb_build_object('retrieval', ml_rag._milliseconds(_began))
      || ml_rag._stage_times(_retrieval.trace);
    _hits := _retrieval.hits;
    IF _generate THEN
      _completed := ml_rag._complete(_request, _retrieval);
      result.answer := _completed.text;
      result.latency := result.latency || ml_rag._stage_times((_completed.retrieval).trace);
    ELSIF _retrieval.missing IS NOT NULL THEN
      PERFORM ml_rag._raise(_retrieval.missing);
    END IF;
  EXCEPTION
    WHEN connection_failure THEN
      RAISE;
    WHEN OTHERS THEN
      result.sqlstate := SQLSTATE;
      result.message := SQLERRM;
      IF result.latency = '{}' THEN
        result.latency := jsonb_build_object('retrieval', ml_rag._milliseconds(_began));
      END IF;
  END;
  PERFORM ml_rag._refuse_other_embeddings(stores, _retrieval.stores);
  _refused := coalesce(result.sqlstate = 'P0002', false) OR coalesce(result.answer = _abstain_text, false)
    OR coalesce(result.answer ~* (own ->> 'refusal_pattern'), false);

  IF _has_expected THEN
    SELECT g.* INTO _gains, _items, _relevant FROM ml_rag._grade_hits(_hits, _expected, own ->> 'match') AS g;
    _measures := ml_rag._ranking_measures(_gains, _items, _expected, cutoffs)
      || jsonb_build_object(
        'citation_match', coalesce(true = ANY (_relevant[1:_cited]), false)::integer,
        'citation_share',
        coalesce((SELECT avg(c::integer)::float8 FROM unnest(_relevant[1:_cited]) AS c), 0));
  END IF;
  IF _generate AND cardinality(_answers) > 0 AND _answerable IS NOT FALSE THEN
    _measures := _measures || ml_rag._python('answer_measures',
      jsonb_build_array(CASE WHEN NOT _refused THEN result.answer END, _answers));
  END IF;
  IF _answerable IS NOT NULL THEN
    _measures := _measures || jsonb_build_object(
      CASE WHEN _answerable THEN 'refused_wrongly' ELSE 'refused_rightly' END, _refused::integer);
  END IF;
  IF result.answer IS NOT NULL THEN
    _measures := _measures || jsonb_build_object('answer_length', length(result.answer));
    IF NOT _refused THEN
      _measures := _measures || jsonb_build_object(
        'has_citation', EXISTS (SELECT FROM regexp_matches(result.answer, '\[(\d{1,3})\]', 'g') AS m (marker)
          WHERE m.marker[1]::integer BETWEEN 1 AND cardinality(_hits))::integer,
        'support', ml_rag._python('check_grounding', jsonb_build_array(result.answer,
          ARRAY(SELECT _hits[i].segment FROM generate_subscripts(_hits, 1) AS i ORDER BY i), _query,
          ml_rag.parse_options('ml_check_grounding', '{"claims": false}'),
          ml_rag.text_search_configuration(NULL))) -> 'support_score');
    END IF;
    IF own ? 'judge_model_id' AND NOT _refused THEN
      _began := clock_timestamp();
      PERFORM ml_rag._stage(call, 'judge', own ->> 'judge_model_id');
      _groundedness := ml_rag._judge(own ->> 'judge_model_id',
        'How far do the documents support this statement? Score 0 (not at all) to 4 (each part of it), after '
        'the reason in one sentence.', result.answer, _hits);
      _relevance := ml_rag._judge(own ->> 'judge_model_id',
        'How well does this answer address its question? Score 0 (not at all) to 4 (fully), after the reason '
        'in one sentence.', format(E'Question: %s\nAnswer: %s', _query, result.answer), NULL);
      _measures := _measures || jsonb_strip_nulls(jsonb_build_object('groundedness', _groundedness.score,
        'relevance', _relevance.score));
      result.reasons := nullif(jsonb_strip_nulls(jsonb_build_object('groundedness', _groundedness.reason,
        'relevance', _relevance.reason)), '{}');
      result.latency := result.latency || jsonb_build_object('judge', ml_rag._milliseconds(_began));
    END IF;
  END IF;
  IF own ? 'metrics' THEN
    _document := jsonb_build_object('text', result.answer, 'citations',
      ml_rag._citations(_hits,
        '["document_id", "segment_number", "vector_store", "metadata", "score", "rank"]', _query));
    FOR _metric IN SELECT m FROM jsonb_array_elements(own -> 'metrics') AS m LOOP
      EXECUTE format('SELECT %s($1, $2, $3)', (ml_rag._find_function('metrics', _metric)).name)
        INTO _value USING _query, _document, _answers[1];
      -- null and what is not finite are left out
      IF abs(_value) < 'Infinity' THEN
        _measures := jsonb_build_object((parse_ident(_metric #>> '{}'))[2], _value) || _measures;
      END IF;
    END LOOP;
  END IF;
  result.measures := _measures;
  result.citations := coalesce((
    SELECT to_jsonb(array_agg(jsonb_strip_nulls(jsonb_build_object(
      'vector_store', h.vector_store, 'document_name', h.document_name, 'document_id', h.document_id,
      'segment_number', h.segment_number, 'page', h.metadata -> 'page',
      'distance', h.distance, 'keyword_score', h.keyword_score, 'score', h.score, 'rerank_score',
      h.rerank_score,
      'relevant', CASE WHEN _has_expected THEN _relevant[h.place] END)) ORDER BY h.place))
    FROM (SELECT p.place, (_hits[p.place]).* FROM generate_subscripts(_hits, 1) AS p (place)
          WHERE p.place <= greatest(_cited, cutoffs[cardinality(cutoffs)])) AS h), '[]');
END
$$;

CREATE FUNCTION ml_rag._evaluate(source text, options jsonb, path text, relation regclass DEFAULT NULL)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: ml_rag_evaluate; path is the caller's search_path, relation the table that source names
-- Writes: ml_rag.evaluation_run, ml_rag.evaluation_question
DECLARE
  _call integer := ml_rag._begin('ml_rag_evaluate');
  _parsed record;
  _keep boolean;
  -- no query, whose text may hold anything
  _table text := CASE WHEN source ~ '^[[:alpha:]_"][^[:space:]();]*$' THEN source ELSE '' END;
  _failed integer := 0;
  _began timestamptz := clock_timestamp();
  _questions jsonb[];
  _result ml_rag.evaluation_question;
  _results ml_rag.evaluation_question[] := '{}';
  _stores ml_rag.store[];
  _names text[];
  _measures jsonb;
  _counted jsonb;
  _latency jsonb;
  _errors jsonb;
  _models jsonb;
  _versions jsonb;
  _run_id bigint;
  _seconds float8;
BEGIN
  _parsed := ml_rag._parse_evaluate_options(options);
  _keep := (_parsed.own -> 'keep')::boolean;
  PERFORM ml_rag._progress(_call, _table, 'reading questions');
  IF _keep AND current_setting('transaction_read_only')::boolean THEN
    RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = 'the run cannot be kept in a read-only transaction',
      HINT = 'Set "keep": false.';
  END IF;
  _questions :=
    ARRAY(SELECT jsonb_array_elements(ml_rag._check_questions(ml_rag._read_questions(source, path, relation),
    _parsed.columns, _parsed.own)));
  -- not in the block of a question, which gives back its locks when it fails
  PERFORM ml_rag._hold_named(n, false)
  FROM unnest(ml_rag._texts(ml_rag._layered(_parsed.rag) -> 'vector_store')) AS n;
  _stores := ml_rag._discover(_parsed.rag);
  IF cardinality(_stores) = 0 AND (_parsed.rag ->> 'n_citations')::integer > 0 THEN
    -- says why
    PERFORM ml_rag._retrieve(ml_rag._request(_questions[1] ->> 'question', _parsed.rag));
  END IF;
  IF _parsed.own ? 'judge_model_id' THEN
    PERFORM ml_rag._stage(_call, 'judge', _parsed.own ->> 'judge_model_id');
    BEGIN
      -- a judge that is not there would be noticed by nothing but scores that are missing at the end
      PERFORM ml_rag.generate('1', jsonb_build_object('model_id', _parsed.own -> 'judge_model_id',
        'max_tokens', 1));
    EXCEPTION WHEN external_routine_exception OR too_many_connections THEN
      NULL;  -- it is there, and had nothing to say, or others were asking it
    END;
  END IF;
  PERFORM ml_rag._warn_of_unknown_documents(_stores, _questions, _parsed.own ->> 'match');
  FOR i IN 1..cardinality(_questions) LOOP
    PERFORM ml_rag._progress(_call, _table, 'asking questions', i - 1, cardinality(_questions), _failed);
    _result := ml_rag._evaluate_question(_questions[i], _parsed.own, _parsed.rag, _parsed.cutoffs, _call,
      _stores);
    _results := array_append(_results, _result);
    _failed := _failed + (_result.sqlstate IS NOT NULL)::integer;
  END LOOP;
  PERFORM ml_rag._stage(_call, '');
  PERFORM ml_rag._progress(_call, _table, 'summing up', cardinality(_questions),
    cardinality(_questions), _failed);
  -- a run in which nothing worked has measured nothing
  IF (SELECT bool_and(r.sqlstate IS NOT NULL AND r.sqlstate <> 'P0002') AND count(DISTINCT r.sqlstate) = 1
      FROM unnest(_results) AS r) THEN
    RAISE EXCEPTION USING ERRCODE = _result.sqlstate, MESSAGE = 'every question failed',
      DETAIL = format('Error of the last one: %s.', _result.message),
      HINT = 'Call ml_rag_search with one of the questions and the same options: its error says what to do.';
  END IF;

  -- the means of each measure over the questions that have it, percentiles of each stage, how many errors
  SELECT coalesce(jsonb_object_agg(m.key, round(m.mean::numeric, 6)), '{}'),
    coalesce(jsonb_object_agg(m.key, m.n), '{}') INTO _measures, _counted
  FROM (SELECT e.key, avg(e.value::text::float8) AS mean, count(*) AS n
        FROM unnest(_results) AS r CROSS JOIN jsonb_each(r.measures) AS e GROUP BY e.key) AS m;
  SELECT coalesce(jsonb_object_agg(l.key, jsonb_build_object('p50', l.p50, 'p95', l.p95, 'mean', l.mean)),
    '{}')
  INTO _latency
  FROM (SELECT e.key, round(avg(e.value::text::numeric), 3) AS mean,
          percentile_disc(0.5) WITHIN GROUP (ORDER BY e.value::text::numeric) AS p50,
          percentile_disc(0.95) WITHIN GROUP (ORDER BY e.value::text::numeric) AS p95
        FROM unnest(_results) AS r CROSS JOIN jsonb_each(r.latency) AS e GROUP BY e.key) AS l;
  SELECT coalesce(jsonb_object_agg(s.sqlstate, s.n), '{}') INTO _errors
  FROM (SELECT r.sqlstate, count(*) AS n FROM unnest(_results) AS r
    WHERE r.sqlstate IS NOT NULL GROUP BY 1) AS s;
  -- what a run depends on beside its options
  _models := jsonb_strip_nulls(jsonb_build_object(
    'embed', (SELECT jsonb_agg(DISTINCT s.embed_model_id) FROM unnest(_stores) AS s
      WHERE s.embed_model_id IS NOT NULL),
    'generate', CASE WHEN (_parsed.own -> 'generate')::boolean THEN
      coalesce(_parsed.rag #>> '{model_options,model_id}', ml_rag._default_model()) END,
    'rerank', CASE WHEN _parsed.rag ? 'rerank' THEN
      coalesce(_parsed.rag #>> '{rerank,model_id}', ml_rag._get_setting('rerank_model_id')) END,
    'judge', _parsed.own ->> 'judge_model_id'));
  _versions := jsonb_strip_nulls(jsonb_build_object('ml_rag', ml_rag.version(),
    'postgresql', current_setting('server_version'),
    'pgvector', (SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'vector'),
    -- null where it cannot be reached: with embeddings that are there already a run needs none
    'model_server', (SELECT s.found -> 'version' FROM ml_rag._call_python('get', '["/healthz"]') AS s)));
  _names := ARRAY(SELECT s.vector_store FROM unnest(_stores) AS s ORDER BY 1);
  _seconds := ml_rag._milliseconds(_began) / 1000;
  IF _keep THEN
    INSERT INTO ml_rag.evaluation_run (name, started_at, seconds, source, questions, options, stores,
      models, versions, measures, counted, latency, errors)
    VALUES (_parsed.own ->> 'name', _began, _seconds, source, cardinality(_questions),
      coalesce(options, '{}'), _names, _models, _versions, _measures, _counted, _latency,
      _errors)
    RETURNING run_id INTO _run_id;
    INSERT INTO ml_rag.evaluation_question (run_id, question_id, question, answer, citations, measures,
      reasons, latency, sqlstate, message)
    SELECT _run_id, r.question_id, r.question, r.answer, r.citations, r.measures, r.reasons, r.latency,
      r.sqlstate, r.message
    FROM unnest(_results) AS r;
  END IF;
  PERFORM ml_rag._end(_call);
  RETURN jsonb_build_object('run_id', _run_id, 'name', _parsed.own -> 'name',
    'questions', cardinality(_questions),
    'seconds', _seconds, 'measures', _measures, 'counted', _counted, 'latency', _latency,
    'errors', _errors, 'vector_store', _names, 'models', _models,
    'versions', _versions);
@CATCH_AND_END@
END
$$;

CREATE FUNCTION @extschema@.ml_rag_evaluate(questions text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the ruler
-- No SET clause: the names in the query are the caller's. So every name here is qualified and no operator is
-- used.
BEGIN
  RETURN ml_rag._evaluate(questions, options, pg_catalog.current_setting('search_path'));
@CATCH@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_evaluate(text, jsonb) IS
$$measures retrieval and answers over many questions: ml_rag_evaluate('questions', '{"options": {"n_citations": 5}}')
questions: a table or a query that gives id, question, documents, answers, answerable, history; only question
must be there, and measures that need a missing column are left out. The query runs read-only, as the caller;
do not let strangers write it. options with ranges and defaults: SELECT * FROM ml_rag.option WHERE routine IN
('ml_rag_evaluate', 'evaluation_columns'); those of ml_rag go into "options".
Returns {"run_id", "name", "questions", "seconds", "measures": {"recall@10": 0.9, …}, "counted": over how many
questions, "latency": {stage: {"p50", "p95", "mean"} in ms}, "errors": {SQLSTATE: questions}, "vector_store",
"models", "versions"}.
A question that fails counts as one for which nothing was found. Runs are kept in ml_rag.evaluation_run and
ml_rag.evaluation_question, where each role sees its own; ml_rag_compare_runs compares two.
Errors: 22023 bad option, no questions, two of one id, malformed documents; 42P01, 42703, 42501 and others of
the query; 25006 a query that writes, or a run to be kept in a read-only transaction; 55000 a store got
another default embedding meanwhile; 57014; those of ml_rag_answer where every question fails.$$;

CREATE FUNCTION @extschema@.ml_rag_evaluate(questions regclass, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the same for a regclass
BEGIN
  IF $1 IS NULL OR ml_rag._full_name($1) IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'table of questions does not exist';
  END IF;
  RETURN ml_rag._evaluate(ml_rag._full_name($1), $2, 'pg_catalog, pg_temp', $1);
@CATCH@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_evaluate(regclass, jsonb) IS
$$the same for a table that is given as a regclass; see ml_rag_evaluate(text, jsonb)$$;
