-- rewrite: what is asked becomes what is searched with: option query_options.
--
-- One call to a generation model brings all that it asks for, as one JSON document (backend/rewrite.py). Each
-- text of it is searched with by arms: a part, which has its share of the score whatever they give.

CREATE FUNCTION ml_rag._count_asked(options jsonb, name text, whole integer, most integer) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: an option that is a number from 1 to most, or true, which stands for whole; null where it is
-- absent or false
DECLARE
  _value jsonb := options -> name;
BEGIN
  IF _value IS NULL OR _value = 'false' THEN
    RETURN NULL;
  ELSIF _value = 'true' THEN
    RETURN to_jsonb(whole);
  END IF;
  IF NOT EXISTS (SELECT FROM generate_series(1, most) AS n WHERE to_jsonb(n) = _value) THEN
    PERFORM ml_rag._bad_option(name, _value, format('true, or an integer from 1 to %s', most));
  END IF;
  RETURN to_jsonb(_value::integer);
END
$$;

CREATE FUNCTION ml_rag._parse_query_options(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: option query_options, checked and with its defaults; keys that ask for nothing are left out
DECLARE
  _parsed jsonb := ml_rag.parse_options('query_options', options);
  _has_history boolean := coalesce(jsonb_array_length(_parsed -> 'history') > 0, false);
BEGIN
  IF NOT coalesce(jsonb_typeof(_parsed -> 'filters') = 'boolean'
    OR jsonb_typeof(_parsed -> 'filters') = 'array'
    AND NOT jsonb_path_exists(_parsed -> 'filters', 'strict $[*] ? (@.type() != "string" || @ == "")'), true)
      THEN
    PERFORM ml_rag._bad_option('filters', _parsed -> 'filters',
      'true, or an array of names of columns and metadata keys');
  END IF;
  IF jsonb_array_length(_parsed -> 'history') > 1000 OR EXISTS (
    SELECT FROM jsonb_array_elements(_parsed -> 'history') AS t (turn)
    WHERE coalesce(jsonb_typeof(t.turn) <> 'object' OR t.turn ->> 'role' NOT IN ('user', 'assistant')
      OR jsonb_typeof(t.turn -> 'content') <> 'string' OR t.turn - '{role,content}'::text[] <> '{}', true))
        THEN
    PERFORM ml_rag._bad_option('history', _parsed -> 'history',
      'an array of at most 1000 objects {"role": "user" or "assistant", "content": text}',
      'Such as [{"role": "user", "content": "Who leads the team?"}, {"role": "assistant", "content": '
      '"Ada."}].');
  END IF;
  PERFORM ml_rag._bad_option(p.key, to_jsonb(p.text), 'a text of at most 8192 bytes that is not blank')
  FROM jsonb_each_text(_parsed -> 'prompts') AS p (key, text)
  WHERE p.text !~ '[^[:space:]]' OR octet_length(p.text) > 8192;
  IF NOT _has_history THEN
    _parsed := _parsed - 'history';
  END IF;
  RETURN jsonb_strip_nulls(_parsed || jsonb_build_object(
    'synonyms', ml_rag._count_asked(_parsed, 'synonyms', 8, 20),
    'hypothetical_document', ml_rag._count_asked(_parsed, 'hypothetical_document', 1, 4),
    'filters', CASE WHEN _parsed -> 'filters' NOT IN ('false', '[]') THEN _parsed -> 'filters' END,
    'rewrite', coalesce((_parsed -> 'rewrite')::boolean,
      _has_history AND (_parsed ? 'model_id' OR ml_rag._get_setting('query_model_id') IS NOT NULL))));
END
$$;

CREATE FUNCTION ml_rag._rewrite(question text, options jsonb, stores ml_rag.store[], rag jsonb,
  call integer DEFAULT NULL, OUT rewritten ml_rag.rewritten)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the stage: a question and its history to what is searched with; options: parsed query_options,
-- rag: those of ml_rag; call: what ml_rag._begin has returned
-- If it fails, the search continues with the question as it was asked, with a warning, unless fallback is
-- false. "filters_before" is what ml_rag_chat adds: the conditions of the turn before.
-- Raised all the same are errors of the call (22023, a model that does not exist), and what ends the
-- statement (57014 …).
DECLARE
  -- what the model is asked for, each with its number; {} = it is not asked
  _asked jsonb := jsonb_strip_nulls(jsonb_build_object(
    'question', CASE WHEN (options -> 'rewrite')::boolean THEN 1 END, 'synonyms', options -> 'synonyms',
    'hypothetical_document', options -> 'hypothetical_document', 'sub_questions', options -> 'sub_questions',
    'filters', CASE WHEN options ? 'filters' THEN 1 END));
  _model_id text;
  _keys jsonb;
  _answer record;
  _error jsonb;
BEGIN
  IF options ? 'filters' THEN
    _keys := ml_rag._filter_keys(stores, options -> 'filters');
    IF _keys = '[]' THEN
      RAISE WARNING USING ERRCODE = '01000', MESSAGE = 'there is nothing that the model may filter by',
        DETAIL = 'The stores have no column or metadata key that is described, or that a condition can be '
          'about.',
        HINT = 'Name columns in "filters" of query_options, or describe them with ml_rag.describe_filter.';
      _asked := _asked - 'filters';
    END IF;
  END IF;
  IF _asked <> '{}' THEN
    _model_id := coalesce(options ->> 'model_id', ml_rag._get_setting('query_model_id'),
      ml_rag._default_model());
    PERFORM ml_rag._stage(call, 'rewrite', _model_id);
    -- measured, what such a model writes is of no use, and takes it a minute
    _error := ml_rag._cannot_write(_model_id, 'rewrite questions');
    IF _error IS NULL THEN
      _answer := ml_rag._call_python('rewrite',
        jsonb_build_array(jsonb_build_object('question', question, 'model_id', _model_id,
        'asked', _asked, 'history', coalesce(options -> 'history', '[]'), 'history_tokens',
        options -> 'history_tokens',
        'prompts', options -> 'prompts', 'filter_keys', _keys, 'filters_before', options -> 'filters_before',
        'today', current_date)));
      _error := _answer.error;
    END IF;
    IF _error IS NULL THEN
      rewritten := jsonb_populate_record(NULL::ml_rag.rewritten, _answer.found);
      rewritten.filters := CASE WHEN rewritten.filters IS NOT NULL
        THEN ml_rag._checked_filters(stores, _keys, rewritten.filters, rag -> 'filters') END;
      rewritten.asked := CASE WHEN rewritten.filters IS NOT NULL AND rewritten.question IS NOT NULL THEN
        question END;
    ELSIF NOT (options -> 'fallback')::boolean OR _error ->> 'sqlstate' ~ '^(22023|57...)$' THEN
      PERFORM ml_rag._raise(_error);
    ELSE
      RAISE WARNING USING ERRCODE = '01000', MESSAGE = 'the search uses the question as it was asked',
        DETAIL = format('%s%s.', CASE WHEN starts_with(_error ->> 'message', format('model %s ', _model_id))
            THEN overlay(_error ->> 'message' PLACING 'M' FROM 1 FOR 1)
            ELSE format('Model %s: %s', _model_id, _error ->> 'message') END,
          coalesce(' (' || rtrim(nullif(_error ->> 'detail', ''), '.') || ')', '')),
        HINT = coalesce(_error ->> 'hint',
          'Check "model_id" of query_options, or the setting query_model_id.')
          || CASE WHEN _asked ? 'filters' THEN ' Or give the conditions yourself, in option "filters".'
            ELSE '' END;
    END IF;
  END IF;
  IF rewritten.question IS NULL AND options ? 'history' THEN
    -- the newest turns, whole ones, oldest first, then the question. No model is asked, so a token is three
    -- characters, which is more tokens than most texts have. Null where no turn fits
    rewritten.history := (
      SELECT string_agg(t.content, E'\n' ORDER BY t.place) || E'\n' || question
      FROM (
        SELECT h.place, h.turn ->> 'content' AS content,
          sum(length(h.turn ->> 'content') / 3 + 1) OVER (ORDER BY h.place DESC) AS tokens
        FROM jsonb_array_elements(options -> 'history') WITH ORDINALITY AS h (turn, place)
        WHERE h.turn ->> 'content' ~ '[^[:space:]]') AS t
      WHERE t.tokens <= coalesce((options ->> 'history_tokens')::integer, 512));
  END IF;
  IF (options -> 'document_names')::boolean THEN
    SELECT d.names, d.is_summary INTO rewritten.document_names, rewritten.is_summary
    FROM ml_rag._documents_named_in(coalesce(rewritten.question, question), stores, rag) AS d;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._query_info(question text, rewritten ml_rag.rewritten) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: what is searched with, as retrieval_info.query has it; only keys that are used
BEGIN
  RETURN jsonb_strip_nulls(jsonb_build_object('question', question, 'history', rewritten.history,
    'synonyms', nullif(rewritten.synonyms, '{}'), 'sub_questions', nullif(rewritten.sub_questions, '{}'),
    'document_names', rewritten.document_names, 'hypothetical_document',
    CASE cardinality(rewritten.hypothetical_documents) WHEN 0 THEN NULL
      WHEN 1 THEN to_jsonb(rewritten.hypothetical_documents[1])
      ELSE to_jsonb(rewritten.hypothetical_documents) END))
    || CASE WHEN rewritten.filters IS NULL THEN '{}' ELSE jsonb_build_object('filters', CASE
      WHEN jsonb_array_length(rewritten.filters -> 'and') = 1 THEN rewritten.filters #> '{and,0}'
      ELSE rewritten.filters END) END;
END
$$;

CREATE FUNCTION ml_rag.rewrite(question text, query_options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the stage where it is called by itself
DECLARE
  _call integer := ml_rag._begin('ml_rag.rewrite', 'rewrite');
  _options jsonb;
  _rewritten ml_rag.rewritten;
BEGIN
  IF coalesce(question, '') !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the question is empty',
      HINT = 'Ask a question: SELECT ml_rag.rewrite(''What is AutoML?'', ''{"synonyms": true}'').';
  END IF;
  _options := ml_rag._parse_query_options(query_options);
  _rewritten := ml_rag._rewrite(question, _options,
    CASE WHEN (_options -> 'document_names')::boolean OR _options ? 'filters' THEN
      ml_rag._discover('{"semantic_search": false}')
      END, '{}');
  PERFORM ml_rag._end(_call);
  RETURN ml_rag._query_info(coalesce(_rewritten.question, question), _rewritten);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION ml_rag.rewrite(text, jsonb) IS
$$what a question is searched with: ml_rag.rewrite('what about the other one?', '{"history": […], "rewrite": true}')
query_options: those of ml_rag, see docs/questions.md. Returns {"question", "history", "synonyms",
"hypothetical_document", "sub_questions", "filters", "document_names"}, only keys that are used;
retrieval_info.query of ml_rag has the same. Where the model fails and "fallback" is true, the question as it
was asked, with a warning.
Errors: 22023 empty question, bad option, unknown model or model of another task; with "fallback": false those
of ml_generate.$$;
