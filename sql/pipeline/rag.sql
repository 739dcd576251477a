-- rag: the public routines: all stages in order.

CREATE FUNCTION ml_rag._not_found(options jsonb, stores ml_rag.store[], skipped integer, filters text[],
  waiting jsonb)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the error that says that no arm has found anything; skipped: how many of the stores were left out;
-- filters: the options that leave rows out; waiting: a store whose rows wait for its vectorizer, see
-- ml_rag._waiting_in
-- Reads: the metadata of some rows of the stores, as the caller
DECLARE
  _key text;
  _keys text[] := '{}';
  _nearest_key text;
  _other_type text;
  _nearest text;
  _is_filtered boolean := coalesce(options ?| filters, false);
  _is_semantic boolean := (options -> 'semantic_search')::boolean;
  _is_by_function boolean := options @> '{"arms": [{"search": "function"}]}';
  _run text := waiting ->> 'hint';
BEGIN
  FOR _key IN SELECT DISTINCT n.term ->> 'key' FROM jsonb_path_query(CASE WHEN options ? 'filters'
                THEN ml_rag._filter_tree(options -> 'filters') END,
                  'strict $.** ? (exists (@.operator))') AS n (term) LOOP
    CONTINUE WHEN EXISTS (SELECT FROM unnest(stores) AS s
      WHERE NOT (ml_rag._filter_target(s, _key)).in_metadata);
    _nearest := coalesce(_nearest, ml_rag._nearest_column(stores, _key));
    _keys := _keys || _key;
  END LOOP;
  IF _nearest IS NULL AND cardinality(_keys) > 0 THEN
    WITH known AS MATERIALIZED (
      SELECT DISTINCT m.key, m.type FROM unnest(stores[:20]) AS s
      CROSS JOIN LATERAL ml_rag._metadata_types(s, 100) AS m
    )
    SELECT (SELECT min(coalesce(
              -- as others write keys of the metadata, and keys inside objects
              ml_rag._nearest_key(ARRAY(SELECT n.key FROM known AS n), u.bare),
              (SELECT '/' || replace(u.bare, '.', '/') FROM known AS n
               WHERE n.key = split_part(u.bare, '.', 1) AND u.bare !~ '[/~]' LIMIT 1)))
            FROM (SELECT k, regexp_replace(k, '^/?metadata[./]', '', 'i') AS bare
                  FROM unnest(_keys) AS k) AS u
            WHERE u.k NOT IN (SELECT n.key FROM known AS n) AND NOT starts_with(u.bare, '/')),
      -- a text is not equal to a number, nor before or after one
      (SELECT format('The values of "%s" in the metadata are of type %s, and "filters" compares them with a '
        '%s.', left(g.key, 100),
         g.types, g.given)
       FROM (
         SELECT t.term ->> 'key' AS key, jsonb_typeof(v) AS given,
           (SELECT string_agg(DISTINCT n.type, ', ') FROM known AS n WHERE n.key = t.term ->> 'key') AS types
         FROM jsonb_path_query(ml_rag._filter_tree(options -> 'filters'),
           'strict $.** ? (exists (@.operator))') AS t (term)
         CROSS JOIN jsonb_array_elements(t.term -> 'values') AS v
         WHERE t.term ->> 'key' = ANY (_keys) AND t.term ->> 'operator' NOT IN ('like', 'ilike')) AS g
       WHERE strpos(g.types, g.given) = 0 AND g.types <> 'null' AND g.given <> 'null'
       ORDER BY g.key, g.given LIMIT 1)
    INTO _nearest_key, _other_type;
  END IF;
  RETURN jsonb_build_object('sqlstate', 'P0002', 'message', 'no segment found',
    'detail', format('Vector stores searched: %s. %s.%s',
      cardinality(stores) - skipped,
      CASE WHEN _is_filtered AND _is_semantic THEN 'No row passed the filters'
           WHEN _is_filtered AND _is_by_function THEN
             'No row that passed the filters is a candidate of the function'
           WHEN _is_filtered THEN 'No row that passed the filters contains a word of the question'
           WHEN _run IS NOT NULL THEN 'No row that you may see has an embedding'
           WHEN _is_semantic THEN 'None has a row that you may see'
           WHEN _is_by_function THEN 'No row is a candidate of the function'
           ELSE 'No segment contains a word of the question' END,
      CASE WHEN _run IS NOT NULL THEN
        format(' Rows of "%s" wait for their embedding.', waiting ->> 'store') END),
    'hint', CASE WHEN _nearest IS NOT NULL THEN format('Did you mean column "%s"?', _nearest)
      WHEN _nearest_key IS NOT NULL THEN
        format('Did you mean "%s", a key of the metadata?', left(_nearest_key, 100))
      WHEN _other_type IS NOT NULL THEN _other_type
      WHEN _is_filtered THEN
      (SELECT format('Check %s, and whether the stores have rows.%s', string_agg(CASE o.key
           WHEN 'document_name' THEN '"document_name" (names as the stores hold them: a loaded file''s whole '
             'path)'
           WHEN 'filters' THEN 'the keys and values of "filters" (a key inside an object is "/address/city")'
           ELSE format('"%s"', o.key) END, ', ' ORDER BY o.key), ' ' || _run)
       FROM jsonb_object_keys(options) AS o (key) WHERE o.key = ANY (filters))
      WHEN _run IS NOT NULL THEN _run
      WHEN _is_semantic THEN
        'Load documents with vector_store_load, or ask the owner whether a row-level security policy hides '
        'them from you.'
      WHEN _is_by_function THEN 'It leaves a row out by giving null or NaN, the arm by "min_score" or '
        '"max_distance".'
      ELSE 'Use other words, or add semantic search: {"semantic_search": true}.' END)
    || CASE WHEN _run IS NULL THEN '{}' ELSE jsonb_build_object('waiting', waiting) END;
END
$$;

CREATE FUNCTION ml_rag._with_left_out(error jsonb, options jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: an error that says that nothing was found, and which stores of a call that names none were left
-- out
DECLARE
  _left record := ml_rag._left_out(options);
BEGIN
  RETURN CASE WHEN options ? 'vector_store' OR _left.stores IS NULL THEN error
    ELSE error || jsonb_build_object(
    'detail', concat_ws(' ', error ->> 'detail', 'Left out: ' || _left.stores),
    'hint', concat_ws(' ', error ->> 'hint', 'To search those left out: ' || lower(left(_left.hint, 1))
      || substr(_left.hint, 2))) END;
END
$$;

CREATE FUNCTION ml_rag._no_store(options jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the error that says that discovery has found nothing, with the stores that it left out and why
DECLARE
  _left record := ml_rag._left_out(options);
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'P0002', MESSAGE = 'no vector store found',
    -- the options that leave stores out, beside the model
    DETAIL = format('Only stores of embedding model %s on which the caller has SELECT are considered%s.%s',
      coalesce(options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id')),
      (SELECT ', and only those that fit ' || string_agg(format('"%s"', o.key), ', ' ORDER BY o.key)
       FROM jsonb_object_keys(options) AS o (key)
       WHERE o.key IN ('vector_store', 'exclude_vector_store', 'schema', 'vector_store_columns')),
         ' Left out: ' || _left.stores),
    HINT = coalesce(_left.hint,
      concat(CASE WHEN options ? 'embed_model_id' THEN 'Check "embed_model_id". ' END,
      'SELECT * FROM ml_rag.discover() lists what can be searched. Load documents with vector_store_load. '
      'Some stores of other roles must be named in "vector_store", with their schema.'));
END
$$;

CREATE FUNCTION ml_rag._embed_means(texts jsonb, model_id text, otherwise text) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: of each array of texts the mean of their vectors, as text, in one request; otherwise: what can be
-- done without a model
DECLARE
  _all text[] := ARRAY(SELECT DISTINCT t FROM jsonb_array_elements(texts) AS g
    CROSS JOIN jsonb_array_elements_text(g) AS t ORDER BY 1);
  _vectors @vector@.vector[] := ml_rag._embed_texts(_all, model_id, otherwise => otherwise);
BEGIN
  RETURN (
    SELECT jsonb_agg((SELECT @vector@.avg(_vectors[array_position(_all, t)])::text
      FROM jsonb_array_elements_text(g.texts) AS t)
      ORDER BY g.place)
    FROM jsonb_array_elements(texts) WITH ORDINALITY AS g (texts, place));
END
$$;

CREATE FUNCTION ml_rag._retrieve(INOUT request ml_rag.request,
  told text DEFAULT '', OUT retrieval ml_rag.retrieval)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: question to citations. That nothing was found is not raised but stands in "missing": an answer can
-- abstain. request comes back with what was searched with. told: all = with what each arm has found
DECLARE
  _found jsonb := ml_rag._compiled(request.question, to_jsonb(request), request.query_embedding::text,
    'hits ' || told, request.call);
BEGIN
  request := jsonb_populate_record(request, _found -> 'request');
  retrieval := jsonb_populate_record(NULL::ml_rag.retrieval, _found -> 'retrieval');
END
$$;

CREATE FUNCTION ml_rag._complete(request ml_rag.request, INOUT retrieval ml_rag.retrieval, OUT text text,
  OUT tokens jsonb, OUT messages jsonb, OUT finish_reason text, OUT grounding jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the text of an answer: written from the hits, or the abstain text; the rest as backend/answer.py
-- has it. Raised is that nothing was found where the call does not abstain
DECLARE
  _options jsonb := request.options;
  _model text := coalesce(_options #>> '{model_options,model_id}', ml_rag._default_model());
  _written jsonb;
BEGIN
  IF retrieval.missing IS NOT NULL THEN
    IF NOT (_options -> 'abstain')::boolean THEN
      PERFORM ml_rag._raise(retrieval.missing);
    END IF;
    IF retrieval.missing ? 'waiting' THEN
      RAISE WARNING USING ERRCODE = '01000', MESSAGE = 'no segment found, and rows wait for their embedding',
        DETAIL = retrieval.missing ->> 'detail', HINT = retrieval.missing ->> 'hint';
    END IF;
    text := coalesce(_options ->> 'abstain_text', ml_rag._get_setting('abstain_text'));
    RETURN;
  END IF;
  IF _model = 'extractive' AND coalesce(cardinality(retrieval.hits), 0) = 0 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'model "extractive" answers from documents only',
      DETAIL = '"n_citations" is 0, so it is given none.',
      HINT = 'Ask for at least one citation, or name a language model: {"model_options": {"model_id": "…"}}.';
  END IF;
  PERFORM ml_rag._stage(request.call, 'generate', _model);
  -- a question that was rewritten stands alone; where it has lost conditions, the model reads that asked
  _written := ml_rag._write(coalesce((request.rewritten).asked, request.question),
    coalesce(_options -> 'model_options', '{}') || jsonb_build_object('model_id', _model), retrieval.hits,
    _options -> 'prompt', jsonb_build_object('call', request.call, 'question', request.question,
      'asked', _options - 'query_embedding',
      'explains', request.explain, 'summarizes', retrieval.method = 'document_order', 'is_summary',
      (request.rewritten).is_summary,
      'stands_alone', (request.rewritten).question IS NOT NULL AND (request.rewritten).asked IS NULL,
      'embed_model', retrieval.stores[1].embed_model_id,
      'known_cosines',
      CASE WHEN _model = 'extractive' AND NOT _options @> '{"model_options": {"task": "summarization"}}'
        THEN ml_rag._known_cosines(request, retrieval.stores, retrieval.hits) END)
    || CASE WHEN _options ?| '{grounding,min_support,remove_unsupported}' THEN jsonb_build_object(
      'grounding', ml_rag.parse_options('ml_check_grounding', _options -> 'grounding'),
      'language', ml_rag.text_search_configuration(_options #>> '{grounding,language}')) ELSE '{}' END,
    ARRAY(
      -- those of rows of tables with a vectorizer: their markers name columns
      SELECT s.vector_store FROM unnest(retrieval.stores) AS s
      CROSS JOIN ml_rag._embedding_comment(s) AS d (comment)
      WHERE coalesce(ml_rag._marked_key(d.comment, 'KEY'), ml_rag._marked_key(d.comment, 'ROW')) IS NOT NULL
      ORDER BY 1));
  SELECT w.* INTO text, tokens, messages, finish_reason, grounding
  FROM jsonb_to_record(_written) AS w (text text, tokens jsonb, messages jsonb, finish_reason text,
    grounding jsonb);
  retrieval.trace := retrieval.trace
    || ARRAY(SELECT s FROM jsonb_populate_recordset(NULL::ml_rag.step, _written -> 'trace') AS s);
  IF text IS NULL THEN
    retrieval.hits := '{}';
  END IF;
  text := coalesce(text, _options ->> 'abstain_text', ml_rag._get_setting('abstain_text'));
END
$$;

CREATE FUNCTION ml_rag._citations(hits ml_rag.hit[], fields jsonb, question text,
  stores ml_rag.store[] DEFAULT NULL)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the citations of an answer document, best first; fields: option citation_fields, the keys that
-- each has besides; stores: where the hits are from, the first one's language says which words are stop words
DECLARE
  _citations jsonb;
  _highlights jsonb;
BEGIN
  fields := coalesce(fields, '[]');
  IF fields ? 'highlights' THEN
    _highlights := ml_rag._python('highlights', jsonb_build_array(question,
      ARRAY(SELECT h.segment FROM unnest(hits) WITH ORDINALITY AS h ORDER BY h.ordinality),
        coalesce((SELECT i.configuration
          FROM unnest(stores) AS s CROSS JOIN LATERAL ml_rag._keyword_index(s.relation) AS i
          JOIN pg_ts_config AS c ON true
          JOIN pg_namespace AS n ON n.oid = c.cfgnamespace AND has_schema_privilege(n.oid, 'USAGE')
            AND format('%I.%I', n.nspname, c.cfgname) = i.configuration
          WHERE s.vector_store = hits[1].vector_store LIMIT 1), ml_rag.text_search_configuration(NULL))));
  END IF;
  -- jsonb_agg and jsonb_object_agg take the square of the number of strings in a value, such as metadata
  -- can have, and look at no cancel meanwhile
  SELECT to_jsonb(array_agg(jsonb_build_object('segment', h.segment, 'distance', h.distance,
    'document_name', h.document_name)
      || (jsonb_build_object(
            'document_id', coalesce(to_jsonb(h.document_id), to_jsonb(h.document_key)), 'segment_number',
            h.segment_number,
            'vector_store', h.vector_store, 'metadata', h.metadata, 'score', h.score, 'keyword_score',
            h.keyword_score,
            'rerank_score', h.rerank_score, 'rank', h.ordinality, 'node', h.node, 'node_distance',
            h.node_distance,
            'segment_range', jsonb_build_array(coalesce(h.first_segment, h.segment_number),
              coalesce(h.last_segment, h.segment_number))) - ARRAY(
            SELECT f.key FROM unnest('{document_id,segment_number,vector_store,metadata,score,keyword_score,
              rerank_score,rank,node,node_distance,segment_range}'::text[]) AS f (key)
            WHERE NOT fields ? f.key))
      || (SELECT coalesce(json_object_agg((string_to_array(f, '.'))[array_upper(string_to_array(f, '.'), 1)],
            h.metadata #> (string_to_array(f, '.'))[2:])::jsonb, '{}')
          FROM jsonb_array_elements_text(fields) AS f WHERE f LIKE 'metadata.%')
      || CASE WHEN fields ? 'highlights' THEN
        jsonb_build_object('highlights', _highlights -> (h.ordinality - 1)::integer)
           ELSE '{}' END ORDER BY h.ordinality))
  INTO _citations
  FROM unnest(hits) WITH ORDINALITY AS h;
  RETURN coalesce(_citations, '[]');
END
$$;

CREATE FUNCTION @extschema@.ml_rag_search(query text, options jsonb DEFAULT NULL)
RETURNS TABLE (rank integer, vector_store text, document_name text, document_id bigint,
  segment_number integer,
               segment text, distance numeric, metadata jsonb, keyword_score double precision,
               score double precision, rerank_score double precision)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: the citations of ml_rag as rows
DECLARE
  _call integer := ml_rag._begin('ml_rag_search', 'discover');
  _began timestamptz := clock_timestamp();
  _found record;
  _request ml_rag.request;
  _retrieval ml_rag.retrieval;
  _rows jsonb;
  _told boolean;
BEGIN
  _rows := ml_rag._compiled($1, $2, NULL, 'rows', _call);
  IF _rows IS NOT NULL THEN
    RETURN QUERY
      SELECT row_number() OVER ()::integer, h.vector_store, h.document_name, h.document_id,
        CASE WHEN h.segment_number BETWEEN -2147483648 AND 2147483647 THEN h.segment_number END::integer,
        h.segment, h.distance, h.metadata, h.keyword_score, h.score, NULL::float8
      FROM jsonb_populate_recordset(NULL::ml_rag.hit, _rows) AS h;
    RETURN;
  END IF;
  _found := ml_rag._retrieve(ml_rag._request($1, ml_rag._parse_rag_options($2), _call));
  _request := _found.request;
  _retrieval := _found.retrieval;
  IF _request.explain THEN
    RAISE NOTICE USING MESSAGE = 'explain',
      DETAIL = jsonb_pretty(ml_rag._explain(_request, _retrieval, _began));
  END IF;
  IF _retrieval.missing IS NOT NULL THEN
    PERFORM ml_rag._raise(ml_rag._with_left_out(_retrieval.missing, _request.options));
  END IF;
  RETURN QUERY
    SELECT h.ordinality::integer, h.vector_store, h.document_name, h.document_id,
      CASE WHEN h.segment_number BETWEEN -2147483648 AND 2147483647 THEN h.segment_number END::integer,
      h.segment, h.distance, h.metadata, h.keyword_score, h.score, h.rerank_score
    FROM unnest(_retrieval.hits) WITH ORDINALITY AS h ORDER BY h.ordinality;
  _told := ml_rag._end(_call, '00000', _retrieval.trace, _began);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_search(text, jsonb) IS
$$the citations of ml_rag as rows, best first; takes the options of ml_rag
document_id is null if the store's column is not an integer, segment_number if it exceeds one.
keyword_score: BM25. score: 0-1, of hybrid search. rerank_score: 0-1, of option rerank. Each is null if that
stage did not run. With option explain, the explanation is the detail of a notice. Errors: as ml_rag.$$;

CREATE FUNCTION ml_rag._answer(query text, options jsonb, call integer, began timestamptz, OUT answer jsonb,
  OUT question text, OUT trace ml_rag.step[])
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: question to answer document, and the question as it was searched with; options are parsed ones
DECLARE
  _found record;
  _request ml_rag.request;
  _retrieval ml_rag.retrieval;
  _skip_generate boolean;
  _missing jsonb;
  _explained jsonb;
  _completed record;
  _tokens jsonb;
  _grounding jsonb;
BEGIN
  _found := ml_rag._retrieve(ml_rag._request($1, $2, $3));
  _request := _found.request;
  _retrieval := _found.retrieval;
  _skip_generate := (_request.options -> 'skip_generate')::boolean;
  IF _retrieval.missing IS NOT NULL AND (_skip_generate OR NOT (_request.options -> 'abstain')::boolean) THEN
    _missing := ml_rag._with_left_out(_retrieval.missing, _request.options);
    IF _request.explain THEN
      -- as the last line of the detail; without what was searched with: details go into PostgreSQL's log
      _explained := ml_rag._explain(_request, _retrieval, $4) - '{query,statement,options}'::text[];
      _missing := _missing || jsonb_build_object('detail', concat_ws(E'\n', _missing ->> 'detail', 'explain: '
        || (_explained || jsonb_build_object('stores', (
          SELECT coalesce(jsonb_agg((
            SELECT jsonb_object_agg(f.key, CASE WHEN jsonb_typeof(f.value) = 'object' THEN f.value - 'words'
              ELSE f.value END)
            FROM jsonb_each(s.store) AS f) ORDER BY s.place), '[]')
          FROM jsonb_array_elements(_explained -> 'stores') WITH ORDINALITY AS s (store, place))))::text));
    END IF;
    PERFORM ml_rag._raise(_missing);
  END IF;
  IF NOT _skip_generate THEN
    _completed := ml_rag._complete(_request, _retrieval);
    _retrieval := _completed.retrieval;
    _tokens := _completed.tokens;
    _grounding := _completed.grounding;
    answer := jsonb_build_object('text', _completed.text)
      || CASE WHEN _completed.messages IS NULL THEN '{}'
        ELSE jsonb_build_object('prompt', _completed.messages) END
      || CASE WHEN NOT (_request.options -> 'return_usage')::boolean THEN '{}'
        ELSE jsonb_build_object('usage', jsonb_build_object(
           'prompt_tokens', _tokens -> 'prompt', 'generated_tokens', _tokens -> 'generated',
           'finish_reason', _completed.finish_reason)) END;
  END IF;
  answer := coalesce(answer, '{}') || jsonb_build_object(
    'citations', ml_rag._citations(_retrieval.hits, _request.options -> 'citation_fields', _request.question,
      _retrieval.stores),
    'vector_store', ARRAY(SELECT s.vector_store FROM unnest(_retrieval.stores) AS s
                          WHERE s.vector_store <> ALL (coalesce(_retrieval.skipped, '{}'))),
    'retrieval_info', jsonb_build_object('method', _retrieval.method, 'threshold', _retrieval.threshold)
      || CASE WHEN _retrieval.missing_shards IS NULL THEN '{}'
              ELSE jsonb_build_object('missing_shards', _retrieval.missing_shards) END
      || CASE WHEN _grounding IS NULL THEN '{}' ELSE jsonb_build_object('grounding', _grounding) END
      || CASE WHEN NOT _skip_generate AND _retrieval.method <> 'document_order'
          AND _request.options @> '{"prompt": {"citation_style": "numbered"}}'
        THEN '{"citation_style": "numbered"}' ELSE '{}' END::jsonb
      || CASE WHEN (_request.arms[1]).search = 'function' AND cardinality(_request.arms) = 1 THEN
        '{"search": "function"}'
              WHEN _request.options @> '{"arms": [{"search": "function"}]}' THEN '{"search": "hybrid"}'
              WHEN NOT (_request.options -> 'keyword_search')::boolean THEN '{}'
              WHEN (_request.options -> 'semantic_search')::boolean THEN '{"search": "hybrid"}'
              ELSE '{"search": "keyword"}' END::jsonb
      || CASE WHEN _request.options ? 'query_options'
              THEN jsonb_build_object('query', ml_rag._query_info(_request.question, _request.rewritten))
              ELSE '{}' END);
  IF _request.explain THEN
    answer := answer || jsonb_build_object('explain', ml_rag._explain(_request, _retrieval, $4, _tokens));
  END IF;
  question := _request.question;
  trace := _retrieval.trace;
END
$$;

CREATE FUNCTION @extschema@.ml_rag_answer(query text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: question to answer document
DECLARE
  _call integer := ml_rag._begin('ml_rag', 'discover');
  _began timestamptz := clock_timestamp();
  _answer jsonb;
  _answered record;
  _told boolean;
BEGIN
  _answer := ml_rag._compiled($1, $2, NULL, 'citations', _call);
  IF _answer IS NOT NULL THEN
    RETURN _answer;
  END IF;
  _answered := ml_rag._answer($1, ml_rag._parse_rag_options($2), _call, _began);
  _told := ml_rag._end(_call, '00000', _answered.trace, _began);
  RETURN _answered.answer;
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_answer(text, jsonb) IS
$$answers a question from the vector stores the caller may read; the same as ml_rag, for clients that can only SELECT
Returns {"text", "citations": [{"segment", "distance", "document_name"}], "vector_store": [],
"retrieval_info": {"method", "threshold"}}. Options with ranges and defaults: SELECT * FROM ml_rag.option.
If no segment is left and "abstain" is true, text is "abstain_text", no model is called, and citations is
empty. Where retrieval_info has "citation_style": "numbered", a marker such as [2] in the text refers to that
citation, counted from 1. With "explain", a further key "explain" shows how the answer came about:
docs/monitoring.md describes it; where nothing is found, it is the last line of the error's detail. With
"return_usage", "usage" has prompt_tokens, generated_tokens and finish_reason (stop or length), null where no
model was asked. With "query_options", retrieval_info has a key "query": what was searched with; with
"partial", a key "missing_shards" where some did not answer.
Errors: 22023 bad option; 22000 different dimensions; P0002 no vector store, or, if "abstain" is false or with
"skip_generate", nothing found or nothing within the threshold; 42501; 54000 a question of more than 1000000
bytes, or more than one statement takes; 55000 model not available; 08006 model server or shard; 53300 its
queue is full; 57014 cancelled; 38000 the model failed.$$;

CREATE FUNCTION ml_rag._answer_to_stream(query text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the answer document; where its text can come in pieces, that is empty, and "prompt" has what is to
-- be sent for it to /v1/chat/completions of the model server ("completion") and where that is ("server")
DECLARE
  _call integer := ml_rag._begin('ml_rag', 'discover');
  _began timestamptz := clock_timestamp();
  _answered record;
  _told boolean;
BEGIN
  _answered := ml_rag._answer($1, ml_rag._parse_rag_options($2) || '{"hold": true}', _call, _began);
  _told := ml_rag._end(_call, '00000', _answered.trace, _began);
  RETURN _answered.answer;
@CATCH_AND_END@
END
$$;

CREATE PROCEDURE @extschema@.ml_rag(query text, options jsonb DEFAULT NULL, INOUT output jsonb DEFAULT NULL)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
-- purpose: the routine
-- MySQL's callers put the output second and the options third; with options null the third is taken for them.
BEGIN
  output := @extschema@.ml_rag_answer($1, coalesce($2, $3));
@CATCH@
END
$$;
COMMENT ON PROCEDURE @extschema@.ml_rag(text, jsonb, jsonb) IS
$$answers a question from the vector stores the caller may read: CALL ml_rag('What is AutoML?')
options: {"n_citations": 5, "retrieval_options": {"max_distance": "auto"}, …}; all of them with ranges and
defaults: SELECT * FROM ml_rag.option. output: the answer document, see ml_rag_answer. Errors: see
ml_rag_answer.$$;

CREATE FUNCTION @extschema@.ml_rag_show(query text, options jsonb DEFAULT NULL) RETURNS TABLE (answer text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: the answer document as lines to read: the text, then of each citation document and best passage
DECLARE
  _document jsonb;
BEGIN
  _document := @extschema@.ml_rag_answer($1, CASE WHEN $2 ? 'citation_fields' THEN $2
    ELSE coalesce($2, '{}') || '{"citation_fields": ["highlights", "metadata.page", "metadata.title"]}' END);
  RETURN QUERY SELECT l.line FROM regexp_split_to_table(_document ->> 'text', '\n')
    WITH ORDINALITY AS l (line, n)
    ORDER BY l.n;
  RETURN QUERY SELECT '' WHERE _document ? 'text' AND _document -> 'citations' <> '[]';
  RETURN QUERY
    SELECT format('[%s] %s%s%s%s: %s', c.n, left(c.citation ->> 'title', 200) || ', ',
      c.citation ->> 'document_name',
      ', page ' || (c.citation ->> 'page'),
      ', distance ' || (c.citation ->> 'distance'),
      CASE WHEN length(p.passage) > 240 THEN left(p.passage, 239) || '…' ELSE p.passage END)
    FROM jsonb_array_elements(_document -> 'citations') WITH ORDINALITY AS c (citation, n)
    CROSS JOIN LATERAL (SELECT c.citation ->> 'segment' AS segment,
      c.citation #> '{highlights,0}' AS best) AS s
    CROSS JOIN LATERAL (SELECT trim(regexp_replace(coalesce(substr(s.segment,
      (s.best ->> 'start')::integer + 1,
      (s.best ->> 'end')::integer - (s.best ->> 'start')::integer), s.segment), '\s+', ' ',
        'g')) AS passage) AS p
    ORDER BY c.n;
@CATCH@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_show(text, jsonb) IS
$$answers a question in lines to read, for psql: the text, and below it the documents it stands on
Of each citation: its number, the title of its document, its name, page and distance, if it has them, and the
passage that answers best, or the beginning of the segment; at most 240 characters. Takes the options of
ml_rag; "citation_fields" without "highlights" shows the beginnings. Errors: see ml_rag_answer.$$;
