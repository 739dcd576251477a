-- rag: the public routines: 10 … 70 in order.

CREATE FUNCTION ml_rag._retrieve(
  query text, options jsonb, call integer DEFAULT NULL,
  OUT stores ml_rag.store[], OUT hits ml_rag.hit[], OUT method text, OUT threshold numeric, OUT missing jsonb,
  OUT times timestamptz[], OUT explained jsonb, OUT skipped text[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: question to citations: discover, embed, search, keyword, fuse, threshold, rerank, expand; options are
-- parsed ones. missing: the error (for ml_rag._raise) where no segment is left; not raised, as an answer can abstain
-- call: what ml_rag._begin has returned. times: when discovery, the embedding and the search were done; 0: when it
-- began; 4 to 8: when kNN, keywords (both are parts of the search), thresholds, reranking and neighbours were done
-- explained: with option explain, what ml_rag._explain needs to know. skipped: stores that were not searched; null = none
-- Calls: ml_rag._stage, ml_rag._discover, ml_rag._hold_models, ml_rag.embed, ml_rag._search, ml_rag._keyword, ml_rag.fuse,
-- ml_rag.threshold, ml_rag.rerank, ml_rag.expand
DECLARE
  _is_filtered boolean := options ?| '{document_name,exclude_document_name,filters,required_keywords,excluded_keywords}';
  _explain boolean := coalesce((options -> 'explain')::boolean, false);
  _retrieval jsonb := options -> 'retrieval_options';
  _n integer := (options ->> 'n_citations')::integer;
  _metric text := options ->> 'distance_metric';
  _is_semantic boolean := (options -> 'semantic_search')::boolean;
  _is_keyword boolean := (options -> 'keyword_search')::boolean;
  _rerank jsonb := options -> 'rerank';
  _candidates integer := greatest(_n, (_rerank ->> 'candidates')::integer);
  _query_embedding vector;
  _keyword_hits ml_rag.hit[];
  _kept ml_rag.hit[];
  _limit numeric;
  _found record;
  _arm record;
  _told boolean;
BEGIN
  IF coalesce(query, '') !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the query is empty',
      HINT = 'Ask a question: CALL ml_rag(''What is AutoML?'').';
  END IF;
  times[0] := clock_timestamp();
  IF _explain THEN
    explained := '{"arms": {}, "candidates": {}}';
  END IF;
  stores := '{}';
  hits := '{}';
  method := 'n_citations';
  IF _n = 0 THEN
    RETURN;
  END IF;

  IF options ? 'query_embedding' THEN
    _query_embedding := ml_rag._vector(options -> 'query_embedding');
    IF vector_norm(_query_embedding) = 0 AND (SELECT m.is_angle FROM ml_rag.metric AS m WHERE m.name = _metric) THEN
      PERFORM ml_rag._bad_option('query_embedding', options -> 'query_embedding',
        'a vector that is not all zeros', 'Such a vector has no cosine distance to anything.');
    END IF;
  END IF;
  stores := ml_rag._discover(options);
  IF _query_embedding IS NULL AND ml_rag._needs_embedding(options) AND NOT ml_rag._hold_models(stores) THEN
    -- ml_rag.reembed has just switched one
    stores := ml_rag._discover(options);
    PERFORM ml_rag._hold_models(stores);
  END IF;
  IF cardinality(stores) = 0 AND options ? 'embed_model_id' AND _query_embedding IS NULL THEN
    -- a misspelt model is the likelier reason, and this says so
    PERFORM ml_rag.embed(query, options ->> 'embed_model_id');
  END IF;
  IF cardinality(stores) = 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'P0002', MESSAGE = 'no vector store found',
      -- the options that leave stores out, beside the model
      DETAIL = format('Embedding model %s; only stores that the caller may select from count%s.',
        coalesce(options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id')),
        (SELECT ', and only those that fit ' || string_agg(format('"%s"', o.key), ', ' ORDER BY o.key)
         FROM jsonb_object_keys(options) AS o (key)
         WHERE o.key IN ('vector_store', 'exclude_vector_store', 'schema', 'vector_store_columns'))),
      HINT = 'Load documents with vector_store_load, or see SELECT * FROM ml_rag.discover() for what can be searched; '
        'some stores of other roles must be named in "vector_store", with their schema.';
  END IF;
  times[1] := clock_timestamp();
  IF _query_embedding IS NULL AND ml_rag._needs_embedding(options) THEN
    -- which also tells of its stage, and that the search comes then
    _query_embedding := ml_rag.embed(query, coalesce(options ->> 'embed_model_id', stores[1].embed_model_id));
  ELSE
    _told := ml_rag._stage(call, 'search');
  END IF;
  times[2] := clock_timestamp();

  IF _is_keyword THEN
    _candidates := greatest(_candidates,
      (ml_rag.parse_options('hybrid_options', options -> 'hybrid_options') ->> 'candidates')::integer);
  END IF;
  IF _is_semantic THEN
    _arm := ml_rag._search(stores, _query_embedding, _candidates, _metric, options,
      -- one store with a wrong marker must not break the calls of those who never named it
      NOT options ?| '{vector_store,query_embedding}', _explain);
    hits := _arm.hits;
    times[4] := clock_timestamp();
    skipped := _arm.skipped;
    IF _explain THEN
      explained := jsonb_build_object('arms', jsonb_build_object('semantic', _arm.explained),
        'candidates', jsonb_build_object('semantic', cardinality(hits)), 'explaining', _arm.explaining);
    END IF;
  END IF;
  IF _is_keyword THEN
    PERFORM ml_rag._stage(call, 'keyword');
    _arm := ml_rag._keyword(stores, query, _candidates, _query_embedding, _metric, options, _explain);
    _keyword_hits := _arm.hits;
    -- by both
    skipped := CASE WHEN _is_semantic THEN ARRAY(SELECT unnest(skipped) INTERSECT SELECT unnest(_arm.skipped))
                    ELSE _arm.skipped END;
    times[5] := clock_timestamp();
    hits := CASE WHEN _is_semantic
      THEN ARRAY(SELECT h FROM ml_rag.fuse(hits, _keyword_hits, options -> 'hybrid_options', _metric) AS h)
      ELSE _keyword_hits END;
    IF _explain THEN
      explained := jsonb_set(jsonb_set(explained, '{arms,keyword}', coalesce(_arm.explained, '{}')),
        '{candidates}', explained -> 'candidates' || jsonb_build_object('keyword', cardinality(_keyword_hits),
          'fused', CASE WHEN _is_semantic THEN cardinality(hits) END));
    END IF;
  END IF;
  times[3] := clock_timestamp();
  IF cardinality(hits) = 0 THEN
    missing := jsonb_build_object('sqlstate', 'P0002', 'message', 'no segment found',
      'detail', format('%s vector stores were searched; %s.', cardinality(stores) - coalesce(cardinality(skipped), 0),
        CASE WHEN _is_filtered AND _is_semantic THEN 'no row passed the filters'
             WHEN _is_filtered THEN 'no row passed the filters and has a word of the query'
             WHEN _is_semantic THEN 'none has a row that you may see'
             ELSE 'no segment has a word of the query' END),
      'hint', CASE WHEN _is_filtered THEN
        'Check "document_name" and "exclude_document_name", which take names as the stores hold them (a loaded '
        'file''s whole path), the keys and values of "filters" (a key inside an object is "/address/city"), the '
        'keywords, and whether the stores have rows.'
        WHEN _is_semantic THEN 'Load documents with vector_store_load.'
        ELSE 'Use other words, or search by meaning too: {"semantic_search": true}.' END);
  END IF;

  IF _is_keyword OR _retrieval ?| '{max_distance,percentage_distance}' THEN
    -- also with nothing to judge: it says which limit was in force
    _found := ml_rag.threshold(hits, (_retrieval ->> 'max_distance')::numeric,
      (_retrieval ->> 'percentage_distance')::numeric);
    method := _found.method;
    _limit := _found.threshold;
    _kept := _found.kept;
  ELSE
    -- the nearest ones, the nearest first
    _limit := hits[cardinality(hits)].distance;
    _kept := hits;
  END IF;
  threshold := round(_limit, 4);
  times[6] := clock_timestamp();
  IF _explain THEN
    explained := jsonb_set(explained, '{candidates,within_threshold}', to_jsonb(cardinality(_kept)))
      || jsonb_build_object('nearest', (SELECT min(h.distance) FROM unnest(hits) AS h));
  END IF;
  IF cardinality(_kept) = 0 THEN
    missing := coalesce(missing, jsonb_build_object('sqlstate', 'P0002',
      'message', 'no segment within the distance threshold',
      'detail', format('The nearest distance is %s, the threshold %s.',
        coalesce((SELECT min(h.distance) FROM unnest(hits) AS h)::text, 'not known'), _limit),
      'hint', 'Raise "max_distance", or leave it out.'));
    hits := '{}';
    RETURN;
  END IF;
  hits := _kept;

  IF _rerank IS NOT NULL THEN
    PERFORM ml_rag._stage(call, 'rerank',
      coalesce(_rerank ->> 'model_id', ml_rag._get_setting('rerank_model_id'), ''));
    hits := ARRAY(SELECT h FROM ml_rag.rerank(query, hits[1:greatest(_n, (_rerank ->> 'candidates')::integer)],
      _rerank - 'min_score') AS h);
    times[7] := clock_timestamp();
    IF _explain THEN
      explained := jsonb_set(explained, '{candidates,reranked}', to_jsonb(cardinality(hits)))
        || jsonb_build_object('best_score', hits[1].rerank_score);
    END IF;
    IF hits[1].rerank_score < (_rerank ->> 'min_score')::double precision THEN
      missing := jsonb_build_object('sqlstate', 'P0002', 'message', 'no segment within the score threshold',
        'detail', format('The best score is %s, min_score %s.', hits[1].rerank_score, _rerank ->> 'min_score'),
        'hint', 'Lower "min_score", or leave it out.');
      hits := '{}';
      IF method = 'n_citations' THEN
        threshold := NULL;
      END IF;
      RETURN;
    END IF;
    hits := ARRAY(SELECT hits[i] FROM generate_subscripts(hits, 1) AS i
                  WHERE hits[i].rerank_score >= coalesce((_rerank ->> 'min_score')::double precision, 0) ORDER BY i);
  END IF;
  IF cardinality(hits) > _n OR _rerank IS NOT NULL THEN
    hits := hits[1:_n];
    IF method = 'n_citations' THEN
      threshold := (SELECT max(h.distance) FROM unnest(hits) AS h);
    END IF;
  END IF;

  IF (_retrieval ->> 'segment_overlap')::integer > 0 THEN
    PERFORM ml_rag._stage(call, 'expand');
    hits := ARRAY(SELECT h FROM ml_rag.expand(stores, hits, (_retrieval ->> 'segment_overlap')::integer) AS h);
    times[8] := clock_timestamp();
  END IF;
END
$$;

CREATE FUNCTION @extschema@.ml_rag_search(query text, options jsonb DEFAULT NULL)
RETURNS TABLE (rank integer, vector_store text, document_name text, document_id bigint, segment_number integer,
               segment text, distance numeric, metadata jsonb, keyword_score double precision,
               score double precision, rerank_score double precision)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the citations of ml_rag as rows
-- Calls: ml_rag._begin, ml_rag._end, ml_rag._parse_rag_options, ml_rag._retrieve, ml_rag._explain, ml_rag._raise
DECLARE
  _call integer := ml_rag._begin('ml_rag_search', 'discover');
  _began timestamptz := clock_timestamp();
  _options jsonb;
  _retrieved record;
  _hits ml_rag.hit[];
  _missing jsonb;
  _told boolean;
BEGIN
  _options := ml_rag._parse_rag_options($2);
  _retrieved := ml_rag._retrieve($1, _options, _call);
  _hits := _retrieved.hits;
  _missing := _retrieved.missing;
  IF _retrieved.explained IS NOT NULL THEN
    RAISE NOTICE USING MESSAGE = 'explain', DETAIL = jsonb_pretty(ml_rag._explain(_options, _retrieved.stores,
      _retrieved.explained, _retrieved.method, _retrieved.threshold, cardinality(_hits), _retrieved.times, _began));
  END IF;
  IF _missing IS NOT NULL THEN
    PERFORM ml_rag._raise(_missing);
  END IF;
  FOR i IN 1..cardinality(_hits) LOOP
    rank := i;
    vector_store := _hits[i].vector_store;
    document_name := _hits[i].document_name;
    document_id := _hits[i].document_id;
    segment_number := _hits[i].segment_number;
    segment := _hits[i].segment;
    distance := _hits[i].distance;
    metadata := _hits[i].metadata;
    keyword_score := _hits[i].keyword_score;
    score := _hits[i].score;
    rerank_score := _hits[i].rerank_score;
    RETURN NEXT;
  END LOOP;
  _told := ml_rag._end(_call);
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  PERFORM ml_rag._end(_call, SQLSTATE);
  RAISE;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_search(text, jsonb) IS
$$the citations of ml_rag as rows, best first; takes the options of ml_rag
document_id is null where the store's column is no integer. keyword_score: BM25. score: 0-1, of hybrid search.
rerank_score: 0-1, of option rerank. Each is null where that stage did not run. What option explain adds to an answer
comes as the detail of a notice. Errors: as ml_rag.$$;

CREATE FUNCTION @extschema@.ml_rag_answer(query text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: question to answer document
-- Calls: ml_rag._begin, ml_rag._stage, ml_rag._end, ml_rag._parse_rag_options, ml_rag._retrieve, ml_rag._raise,
-- ml_rag._generate_text, ml_rag._explain, ml_rag._get_setting
DECLARE
  _call integer := ml_rag._begin('ml_rag', 'discover');
  _options jsonb;
  _skip_generate boolean;
  _began timestamptz := clock_timestamp();
  _retrieved record;
  _generating timestamptz;
  _generated record;
  _tokens jsonb;
  _answer jsonb;
  _told boolean;
BEGIN
  _options := ml_rag._parse_rag_options($2);
  _skip_generate := (_options -> 'skip_generate')::boolean;
  _retrieved := ml_rag._retrieve($1, _options, _call);
  IF _retrieved.missing IS NOT NULL AND (_skip_generate OR NOT (_options -> 'abstain')::boolean) THEN
    PERFORM ml_rag._raise(_retrieved.missing);
  END IF;
  _answer := jsonb_build_object(
    'citations', coalesce((
      SELECT jsonb_agg(jsonb_build_object('segment', h.segment, 'distance', h.distance,
        'document_name', h.document_name) ORDER BY h.ordinality)
      FROM unnest(_retrieved.hits) WITH ORDINALITY AS h), '[]'),
    'vector_store', ARRAY(SELECT s.vector_store FROM unnest(_retrieved.stores) AS s
                          WHERE s.vector_store <> ALL (coalesce(_retrieved.skipped, '{}'))),
    'retrieval_info', jsonb_build_object('method', _retrieved.method, 'threshold', _retrieved.threshold)
      || CASE WHEN NOT (_options -> 'keyword_search')::boolean THEN '{}'
              WHEN (_options -> 'semantic_search')::boolean THEN '{"search": "hybrid"}'
              ELSE '{"search": "keyword"}' END::jsonb);
  IF _retrieved.missing IS NOT NULL THEN
    _answer := _answer || jsonb_build_object('text',
      coalesce(_options ->> 'abstain_text', ml_rag._get_setting('abstain_text')));
  ELSIF NOT _skip_generate THEN
    PERFORM ml_rag._stage(_call, 'generate',
      coalesce(_options #>> '{model_options,model_id}', ml_rag._get_setting('generate_model_id')));
    _generating := clock_timestamp();
    _generated := ml_rag._generate_text($1, _options -> 'model_options', _retrieved.hits, _options -> 'prompt');
    _tokens := jsonb_build_object('prompt', _generated.prompt_tokens, 'generated', _generated.generated_tokens);
    _answer := _answer || jsonb_build_object('text', _generated.text);
  END IF;
  IF _retrieved.explained IS NOT NULL THEN
    _answer := _answer || jsonb_build_object('explain', ml_rag._explain(_options, _retrieved.stores,
      _retrieved.explained, _retrieved.method, _retrieved.threshold, cardinality(_retrieved.hits), _retrieved.times,
      _began, _generating, _tokens));
  END IF;
  _told := ml_rag._end(_call);
  RETURN _answer;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  PERFORM ml_rag._end(_call, SQLSTATE);
  RAISE;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_answer(text, jsonb) IS
$$answers a question from the vector stores the caller may read; the same as ml_rag, for clients that can only SELECT
Returns {"text", "citations": [{"segment", "distance", "document_name"}], "vector_store": [], "retrieval_info":
{"method", "threshold"}}. Options with ranges and defaults: SELECT * FROM ml_rag.option.
Where no segment is left and "abstain" holds, text is "abstain_text", no model is called, and citations is empty.
A marker such as [2] in the text points to that citation, counted from 1. With "explain" a further key, "explain", says
how the answer came about: docs/monitoring.md has its keys.
Errors: 22023 bad option; 22000 different dimensions; P0002 no vector store, or, where "abstain" does not hold or with
"skip_generate", nothing found or nothing within the threshold; 42501;
55000 model not available; 08006 model server; 53300 its queue is full; 57014 cancelled; 38000 the model failed.$$;

CREATE PROCEDURE @extschema@.ml_rag(query text, options jsonb DEFAULT NULL, INOUT output jsonb DEFAULT NULL)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
-- purpose: the routine  Calls: ml_rag_answer
-- MySQL's callers put the output second and the options third; with options null the third is taken for them.
BEGIN
  output := @extschema@.ml_rag_answer($1, coalesce($2, $3));
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_rag(text, jsonb, jsonb) IS
$$answers a question from the vector stores the caller may read: CALL ml_rag('What is AutoML?')
options: {"n_citations": 5, "retrieval_options": {"max_distance": "auto"}, …}; all of them with ranges and defaults:
SELECT * FROM ml_rag.option. output: the answer document, see ml_rag_answer. Errors: see ml_rag_answer.$$;
