-- request: the options of ml_rag, checked, with those of its stages, as the one record that all stages read.

CREATE FUNCTION ml_rag._parse_arms(arms jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: option arms, each arm checked and with its defaults
DECLARE
  _given jsonb;
  _arm jsonb;
  _parsed jsonb := '[]';
  _found record;
  _descending boolean;
  _limit text;
BEGIN
  IF jsonb_array_length(arms) NOT BETWEEN 1 AND 16 THEN
    PERFORM ml_rag._bad_option('arms', arms, 'an array of 1 to 16 objects');
  END IF;
  FOR _given IN SELECT a FROM jsonb_array_elements(arms) AS a LOOP
    IF jsonb_typeof(_given) <> 'object' OR _given ->> 'search' IS NULL THEN
      PERFORM ml_rag._bad_option('arms', arms, 'an array of objects that have "search" each',
        'Such as {"arms": [{"search": "semantic"}, {"search": "keyword", "weight": 0.3}]}.');
    END IF;
    _arm := ml_rag.parse_options('arm', _given);
    IF NOT _arm -> 'query' <@ '["question", "hypothetical_document", "synonyms", "sub_questions"]' THEN
      IF jsonb_typeof(_arm -> 'query') <> 'object'
          OR jsonb_typeof(_arm #> '{query,text}') IS DISTINCT FROM 'string'
        OR _arm -> 'query' <> jsonb_build_object('text', _arm #> '{query,text}')
        OR _arm #>> '{query,text}' !~ '[^[:space:]]' OR octet_length(_arm #>> '{query,text}') > 1000000 THEN
        PERFORM ml_rag._bad_option('query', _arm -> 'query', '"question", "hypothetical_document", '
          '"synonyms", "sub_questions", or {"text": "…"} with a text that is not blank and has at most '
          '1000000 bytes');
      END IF;
    END IF;
    PERFORM ml_rag._bad_option(o.key, o.value, format('none in a %s arm', _arm ->> 'search'),
        format('Such an arm takes %s, and what every arm takes.',
          (SELECT string_agg(format('"%s"', n), ', ')
            FROM unnest(ml_rag._arm_options(_arm ->> 'search')) AS n)))
      FROM jsonb_each(_arm) AS o
      WHERE o.key = ANY (ml_rag._arm_options(NULL)) AND o.key <> ALL (ml_rag._arm_options(_arm ->> 'search'));
    IF _arm ->> 'search' = 'function' THEN
      _found := ml_rag._find_function('arm', _arm -> 'function', _arm ? 'arguments');
      _descending := coalesce((_arm -> 'descending')::boolean, true);
      _limit := CASE WHEN _descending THEN 'max_distance' ELSE 'min_score' END;
      IF _arm ? _limit THEN
        PERFORM ml_rag._bad_option(_limit, _arm -> _limit,
          format('none where "descending" is %s', _descending),
          format('Use "%s".', CASE WHEN _descending THEN 'min_score' ELSE 'max_distance' END));
      ELSIF _arm ? 'query_embedding' AND _found.form NOT LIKE 'vector%' THEN
        PERFORM ml_rag._bad_option('query_embedding', _arm -> 'query_embedding',
          'none in an arm whose function takes texts');
      END IF;
      -- the function as it is written into a statement
      _arm := _arm || jsonb_build_object('function', _found.name, 'form', _found.form,
        'descending', _descending);
    ELSIF _arm ->> 'search' = 'keyword' AND (_arm ->> 'min_score')::numeric < 0 THEN
      PERFORM ml_rag._bad_option('min_score', _arm -> 'min_score', 'a number from 0 in a keyword arm');
    END IF;
    IF _arm ? 'embedding' AND _arm ->> 'in' <> 'segment' THEN
      PERFORM ml_rag._bad_option('embedding', _arm -> 'embedding', 'none in an arm over a node group',
        'A node group is searched with the model that made its vectors.');
    ELSIF _arm ? 'alone' AND _arm ->> 'query' <> 'hypothetical_document' THEN
      PERFORM ml_rag._bad_option('alone', _arm -> 'alone', 'none unless "query" is "hypothetical_document"');
    END IF;
    PERFORM ml_rag._vector(_arm -> 'query_embedding') WHERE _arm ? 'query_embedding';
    _parsed := _parsed || jsonb_build_array(_arm
      || jsonb_build_object('is_auto', coalesce(lower(_given ->> 'weight') = 'auto', false)));
  END LOOP;
  IF jsonb_path_exists(_parsed, 'lax $[*] ? (@.is_auto == true)')
      AND jsonb_path_exists(_parsed, 'lax $[*].weight') THEN
    PERFORM ml_rag._bad_option('weight', '"auto"', '"auto" for all arms, or numbers');
  ELSIF NOT jsonb_path_exists(_parsed, 'lax $[*] ? (!exists (@.weight) || @.weight > 0)') THEN
    PERFORM ml_rag._bad_option('weight', '0', 'more than 0 for at least one arm');
  END IF;
  RETURN _parsed;
END
$$;

CREATE FUNCTION ml_rag._parse_prompt_options(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: option prompt, checked and with its defaults
DECLARE
  _parsed jsonb := ml_rag.parse_options('prompt', options);
BEGIN
  IF coalesce(jsonb_typeof(_parsed -> 'metadata') NOT IN ('array', 'boolean')
    OR jsonb_path_exists(_parsed -> 'metadata',
      'strict $ ? (@.type() == "array")[*] ? (@.type() != "string")'), false) THEN
    PERFORM ml_rag._bad_option('metadata', _parsed -> 'metadata', 'an array of keys, true or false');
  END IF;
  RETURN _parsed;
END
$$;

CREATE FUNCTION ml_rag._check_rag_options(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the options of ml_rag, and the objects inside that have options of their own, checked and with
-- their defaults
DECLARE
  _parsed jsonb := ml_rag.parse_options('ml_rag', $1);
  _object text;
  _fields CONSTANT text[] :=
    '{document_id,segment_number,vector_store,metadata,score,keyword_score,rerank_score,rank,'
    'segment_range,highlights,node,node_distance}';
  _names text[];
  _is_limited boolean;
BEGIN
  FOREACH _object IN ARRAY '{retrieval_options,rerank,hybrid_options,index_options}'::text[] LOOP
    IF _parsed ? _object THEN
      _parsed := jsonb_set(_parsed, ARRAY[_object], ml_rag.parse_options(_object, _parsed -> _object));
    END IF;
  END LOOP;
  IF _parsed -> 'rerank' ? 'function' THEN
    IF _parsed -> 'rerank' ? 'model_id' THEN
      PERFORM ml_rag._bad_option('model_id', _parsed #> '{rerank,model_id}', 'none together with "function"');
    END IF;
    PERFORM ml_rag._find_function('rerank', _parsed #> '{rerank,function}');
  END IF;
  IF _parsed ? 'arms' THEN
    FOREACH _object IN ARRAY '{semantic_search,keyword_search}'::text[] LOOP
      IF $1 -> _object <> 'null' THEN
        PERFORM ml_rag._bad_option(_object, $1 -> _object, 'nothing together with "arms"',
          'It stands for the two usual arms: use "arms" alone.');
      END IF;
    END LOOP;
    IF NOT ml_rag._fits_arms($1 -> 'hybrid_options') THEN
      PERFORM ml_rag._bad_option('hybrid_options', $1 -> 'hybrid_options',
        '"fusion" and "rrf_k" beside "arms"',
        'Each arm has a "weight" and "candidates" of its own.');
    END IF;
    _parsed := _parsed || jsonb_build_object('arms', ml_rag._parse_arms(_parsed -> 'arms'));
    _parsed := _parsed || jsonb_build_object(
      'semantic_search', jsonb_path_exists(_parsed, 'strict $.arms[*] ? (@.search == "semantic")'),
      'keyword_search', jsonb_path_exists(_parsed, 'strict $.arms[*] ? (@.search == "keyword")'));
  ELSIF NOT (_parsed -> 'semantic_search')::boolean AND NOT (_parsed -> 'keyword_search')::boolean THEN
    PERFORM ml_rag._bad_option('semantic_search', 'false', 'true where "keyword_search" is false',
      'Set one of them, or "n_citations": 0 to ask the model without any retrieval.');
  END IF;
  IF _parsed ? 'query_options' THEN
    _parsed := jsonb_set(_parsed, '{query_options}', ml_rag._parse_query_options(_parsed -> 'query_options'));
  END IF;
  IF _parsed ? 'arms' THEN
    PERFORM ml_rag._bad_option('query', a -> 'query',
      'what query_options asks for', format('Such as "query_options": {"%s": %s}.',
      a ->> 'query', CASE a ->> 'query' WHEN 'sub_questions' THEN '3' ELSE 'true' END))
    FROM jsonb_array_elements(_parsed -> 'arms') AS a
    WHERE jsonb_typeof(a -> 'query') = 'string' AND a ->> 'query' <> 'question'
      AND NOT coalesce(_parsed -> 'query_options', '{}') ? (a ->> 'query');
  END IF;
  IF _parsed ? 'citation_fields' THEN
    _names := ARRAY(SELECT regexp_replace(f, '^metadata\..*?([^.]+)$', '\1')
      FROM jsonb_array_elements_text(_parsed -> 'citation_fields') AS f WHERE f ~ '^metadata(\.[^.]+)+$');
    IF EXISTS (SELECT FROM jsonb_array_elements_text(_parsed -> 'citation_fields') AS f
               WHERE f <> ALL (_fields) AND f !~ '^metadata(\.[^.]+)+$') THEN
      PERFORM ml_rag._bad_option('citation_fields', _parsed -> 'citation_fields', format(
        'an array of %s, and keys of the metadata such as metadata.page', array_to_string(_fields, ', ')));
    ELSIF _names && (_fields || '{segment,distance,document_name}')
      OR cardinality(_names) > (SELECT count(DISTINCT n) FROM unnest(_names) AS n) THEN
      PERFORM ml_rag._bad_option('citation_fields', _parsed -> 'citation_fields',
        'keys of the metadata whose last names differ, '
        'and from other keys of a citation', 'Use "metadata", which has all of them.');
    END IF;
  END IF;
  PERFORM ml_rag._parse_prompt_options(_parsed -> 'prompt') WHERE _parsed #> '{prompt,metadata}' IS NOT NULL;
  IF _parsed -> 'model_options' ? 'context' THEN
    PERFORM ml_rag._bad_option('context', _parsed #> '{model_options,context}',
      'none: ml_rag sets this option itself',
      'Leave "context" out of model_options; it is an option of ml_generate.');
  ELSIF _parsed -> 'model_options' ? 'system' THEN
    PERFORM ml_rag._bad_option('system', _parsed #> '{model_options,system}', 'none in model_options',
      'Use {"prompt": {"system": …}}.');
  END IF;
  IF _parsed -> 'remove_unsupported' = 'true' AND _parsed -> 'model_options' ? 'json_schema' THEN
    PERFORM ml_rag._bad_option('remove_unsupported', 'true', 'false together with "json_schema"',
      'Without some of its sentences the answer would not be JSON.');
  END IF;
  IF _parsed ->> 'abstain_text' !~ '[^[:space:]]' THEN
    PERFORM ml_rag._bad_option('abstain_text', _parsed -> 'abstain_text', 'a text that is not blank');
  END IF;
  IF _parsed ?| '{filters,required_keywords,excluded_keywords}' THEN
    PERFORM ml_rag._filter_tree(_parsed -> 'filters') WHERE _parsed ? 'filters';
    PERFORM ml_rag._check_keywords(o.key, o.value) FROM jsonb_each(_parsed) AS o
    WHERE o.key IN ('required_keywords', 'excluded_keywords');
  END IF;
  _is_limited := coalesce(_parsed -> 'retrieval_options' ? 'max_distance', false)
    OR coalesce(_parsed -> 'rerank' ? 'min_score', false);
  _parsed := jsonb_build_object(
    'n_citations',
    CASE WHEN _parsed -> 'retrieval_options' ?| '{max_distance,percentage_distance}' THEN 10 ELSE 3 END,
    'abstain', _is_limited) || _parsed;
  -- percentage_distance says nothing about relevance: the nearest segment always passes it
  IF (_parsed -> 'abstain')::boolean AND NOT _is_limited THEN
    _parsed := _parsed || jsonb_build_object('retrieval_options',
      coalesce(_parsed -> 'retrieval_options', '{}')
      || jsonb_build_object('max_distance', ml_rag.parse_options('retrieval_options',
        '{"max_distance": "auto"}') -> 'max_distance'),
      'has_own_limit', true);
  ELSIF lower($1 #>> '{retrieval_options,max_distance}') = 'auto' THEN
    _parsed := _parsed || '{"has_own_limit": true}';
  END IF;
  RETURN _parsed;
END
$$;

CREATE FUNCTION ml_rag._parse_rag_options(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the options of a call over those of the levels below, checked and with their defaults; with option
-- explain also
-- option_levels: where each came from. An error says which level it comes from
DECLARE
  _parsed jsonb;
  _level record;
  _message text;
  _detail text;
  _hint text;
BEGIN
  IF NOT EXISTS (SELECT FROM ml_rag._levels($1)) THEN
    _parsed := ml_rag._check_rag_options($1);
  ELSE
    BEGIN
      _parsed := ml_rag._check_rag_options(ml_rag._layered($1));
    EXCEPTION WHEN invalid_parameter_value THEN
      GET STACKED DIAGNOSTICS _message = MESSAGE_TEXT, _detail = PG_EXCEPTION_DETAIL,
        _hint = PG_EXCEPTION_HINT;
      FOR _level IN SELECT l.level, l.given FROM ml_rag._levels($1) AS l LOOP
        BEGIN
          PERFORM ml_rag._check_rag_options(_level.given);
        EXCEPTION WHEN invalid_parameter_value THEN
          _detail := concat_ws(' ', nullif(_detail, ''), format('It comes from %s.', _level.level));
          EXIT;
        END;
      END LOOP;
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = _message, DETAIL = _detail, HINT = _hint;
    END;
  END IF;
  IF (_parsed -> 'explain')::boolean THEN
    _parsed := _parsed || jsonb_build_object('option_levels', (
      -- as in _lay_over_filters
      SELECT json_object_agg(p.key, jsonb_build_object('value', p.value, 'from', coalesce((
          SELECT string_agg(g.level, ', ' ORDER BY g.place DESC)
          FROM (SELECT l.level, l.place FROM (
              SELECT v.level, v.given, v.ordinality AS place FROM ml_rag._levels($1) WITH ORDINALITY AS v
              UNION ALL SELECT 'call', $1, 9) AS l
            WHERE l.given ? p.key ORDER BY l.place DESC
            LIMIT CASE jsonb_typeof(p.value) WHEN 'object' THEN 9 ELSE 1 END) AS g), 'built in')))::jsonb
      FROM jsonb_each(_parsed - '{query_embedding,preset}'::text[]) AS p));
  END IF;
  RETURN _parsed;
END
$$;

CREATE FUNCTION ml_rag._request(question text, options jsonb, call integer DEFAULT NULL,
  OUT request ml_rag.request)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: what is asked, once and for all stages; options are parsed ones, call that of ml_rag._begin
DECLARE
  _retrieval jsonb := options -> 'retrieval_options';
  _hybrid jsonb := CASE WHEN (options -> 'keyword_search')::boolean
    THEN coalesce(options -> 'hybrid_options', ml_rag.parse_options('hybrid_options', NULL)) END;
  -- reciprocal rank fusion counts these two the same
  _weight double precision := CASE _hybrid ->> 'fusion' WHEN 'weighted'
    THEN (_hybrid ->> 'semantic_weight')::double precision END;
  _wanted jsonb := coalesce(options -> 'arms', (
    SELECT jsonb_agg(jsonb_build_object('search', u.search, 'query', 'question', 'is_auto', _weight IS NULL,
      'weight', u.weight, 'candidates', coalesce(_hybrid -> 'candidates', '0')) ORDER BY u.search DESC)
    FROM (VALUES ('semantic', _weight), ('keyword', 1 - _weight)) AS u (search, weight)
    WHERE (options -> concat(u.search, '_search'))::boolean));
  _weights double precision;
  _arms ml_rag.arm[];
  _least integer;
  _given jsonb;
  _of_a_kind integer;
  _n integer := 0;
BEGIN
  IF coalesce(question, '') !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the question is empty',
      HINT = 'Ask a question: CALL ml_rag(''What is AutoML?'').';
  ELSIF octet_length(question) > 1000000 THEN
    -- nothing cancels the making of a query of its words
    RAISE EXCEPTION USING ERRCODE = '54000', MESSAGE = 'the question is too long',
      DETAIL = format('It has %s bytes, and may have 1000000.', octet_length(question));
  END IF;
  request.question := question;
  request.options := options;
  request.call := call;
  request.explain := coalesce((options -> 'explain')::boolean, false);
  request.n_citations := (options ->> 'n_citations')::integer;
  IF request.n_citations = 0 THEN
    RETURN;
  END IF;
  request.distance_metric := options ->> 'distance_metric';
  request.max_distance := (_retrieval ->> 'max_distance')::numeric;
  request.percentage_distance := (_retrieval ->> 'percentage_distance')::numeric;
  request.segment_overlap := CASE options ->> 'return' WHEN 'document' THEN 200 WHEN 'node' THEN 0
    ELSE coalesce((_retrieval ->> 'segment_overlap')::integer, 0) END;
  IF options ? 'rerank' THEN
    request.rerank_model_id := CASE WHEN options -> 'rerank' ? 'function' THEN ''
      ELSE coalesce(options #>> '{rerank,model_id}', ml_rag._get_setting('rerank_model_id'), '') END;
    request.rerank_candidates := greatest(request.n_citations, (options #>> '{rerank,candidates}')::integer);
    request.min_score := (options #>> '{rerank,min_score}')::double precision;
  END IF;
  -- the arms: those of option arms, else one or two that semantic_search and keyword_search stand for
  _least := coalesce(request.rerank_candidates, request.n_citations);
  -- 0 where the one of two arms that is searched has no weight
  _weights := (SELECT coalesce(nullif(sum(coalesce((a ->> 'weight')::double precision, 1)), 0), 1)
               FROM jsonb_array_elements(_wanted) AS a);
  FOR _given IN SELECT a FROM jsonb_array_elements(_wanted) AS a LOOP
    _of_a_kind := 1 + (SELECT count(*) FROM unnest(_arms) AS a WHERE a.search = _given ->> 'search');
    _n := _n + 1;
    _arms[_n].search := _given ->> 'search';
    _arms[_n].name := concat_ws(' ', _given ->> 'search', CASE WHEN _of_a_kind > 1 THEN _of_a_kind END);
    _arms[_n].query_key := CASE jsonb_typeof(_given -> 'query') WHEN 'string' THEN _given ->> 'query' END;
    _arms[_n].query := CASE WHEN _given -> 'query' ? 'text' THEN ARRAY[_given #>> '{query,text}'] END;
    _arms[_n].query_embedding := CASE WHEN _given ? 'query_embedding'
      THEN ml_rag._vector(_given -> 'query_embedding') END;
    _arms[_n].weight := CASE WHEN NOT (_given -> 'is_auto')::boolean
      THEN coalesce((_given ->> 'weight')::double precision, 1) / _weights END;
    _arms[_n].candidates := greatest(_least, (_given ->> 'candidates')::integer);
    _arms[_n].max_distance := (_given ->> 'max_distance')::numeric;
    _arms[_n].min_score := (_given ->> 'min_score')::double precision;
    _arms[_n].function := _given ->> 'function';
    _arms[_n].form := _given ->> 'form';
    _arms[_n].is_descending := (_given -> 'descending')::boolean;
    _arms[_n].node_group := nullif(_given ->> 'in', 'segment');
    _arms[_n].embedding := _given ->> 'embedding';
    _arms[_n].arguments := _given -> 'arguments';
    _arms[_n].is_alone := (_given -> 'alone')::boolean;
  END LOOP;
  request.arms := _arms;
  request.fusion := coalesce(options #>> '{hybrid_options,fusion}', 'weighted');
  request.rrf_k := coalesce((options #>> '{hybrid_options,rrf_k}')::double precision, 60);
  IF options ? 'query_embedding' THEN
    request.query_embedding := ml_rag._vector(options -> 'query_embedding');
    IF @vector@.vector_norm(request.query_embedding) = 0 THEN
      PERFORM ml_rag._bad_option('query_embedding', options -> 'query_embedding',
        'a vector that is not all zeros', 'Such a vector has no cosine distance to anything.')
      FROM ml_rag.metric AS m WHERE m.name = request.distance_metric AND m.is_angle;
    END IF;
  END IF;
END
$$;
