-- heatwave: HeatWave's HEATWAVE_CHAT: a conversation whose state is a setting of the session.

CREATE FUNCTION ml_rag._chat_options() RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the setting ml_rag.chat_options, checked key by key, as it was given
DECLARE
  _text text := nullif(current_setting('ml_rag.chat_options', true), '');
  _options jsonb;
  _key text;
  _each jsonb;
BEGIN
  BEGIN
    _options := coalesce(nullif(_text::jsonb, 'null'), '{}');
  EXCEPTION WHEN invalid_text_representation OR untranslatable_character THEN
    -- without its text: it may hold a conversation, and errors go into the log
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'setting ml_rag.chat_options is not JSON',
      HINT = 'Begin anew: SET ml_rag.chat_options = ''{}''.';
  END;
  PERFORM ml_rag.parse_options('heatwave_chat', _options);
  FOREACH _key IN ARRAY '{tables,chat_history}'::text[] LOOP
    FOR _each IN SELECT e FROM jsonb_array_elements(nullif(_options -> _key, 'null')) AS e LOOP
      IF jsonb_typeof(_each) = 'object' THEN
        _each := ml_rag.parse_options((CASE _key WHEN 'tables' THEN 'chat_table' ELSE 'chat_turn' END),
          _each);
      END IF;
      IF jsonb_typeof(_each) <> 'object'
        OR NOT _each ?& (CASE _key WHEN 'tables' THEN '{table_name}'
          ELSE '{user_message,chat_bot_message}' END)::text[] THEN
        PERFORM ml_rag._bad_option(_key, _options -> _key,
          CASE _key WHEN 'tables' THEN 'objects that have "table_name" each'
          ELSE 'objects that have "user_message" and "chat_bot_message" each' END);
      END IF;
    END LOOP;
  END LOOP;
  IF _options -> 'tables' <> 'null' AND _options -> 'schema_name' <> 'null' THEN
    PERFORM ml_rag._bad_option('schema_name', _options -> 'schema_name', 'none together with "tables"');
  END IF;
  IF _options -> 'model_options' ? 'task' THEN
    PERFORM ml_rag._bad_option('task', _options #> '{model_options,task}', 'none in "model_options"',
      '"task" is a key beside it.');
  END IF;
  RETURN jsonb_strip_nulls(_options);
END
$$;

CREATE FUNCTION ml_rag._heatwave_output(query text, options jsonb, answer jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the options after a turn, with what it brought
DECLARE
  _most CONSTANT integer := 100;
  _history jsonb := coalesce(options -> 'chat_history', '[]');
BEGIN
  IF answer ? 'text' THEN
    IF (options -> 're_run')::boolean THEN
      _history := _history - -1;
    END IF;
    _history := _history || jsonb_build_array(jsonb_build_object('chat_query_id', gen_random_uuid(),
      'user_message', query,
      'chat_bot_message', answer -> 'text'));
    WHILE jsonb_array_length(_history) > _most LOOP
      _history := _history - 0;
    END LOOP;
  END IF;
  RETURN options - '{re_run,prompt}'::text[] || jsonb_build_object('chat_history', _history, 'documents', (
      SELECT coalesce(jsonb_agg(jsonb_build_object('id', c -> 'document_name',
        'title', regexp_replace(c ->> 'document_name', '^.*/', ''), 'segment', c -> 'segment')
          ORDER BY place), '[]')
      FROM jsonb_array_elements(answer -> 'citations') WITH ORDINALITY AS e (c, place)),
    -- schema.table, as HeatWave has them; a schema with a dot in its name is quoted, and its table where need
    -- be
    'tables', (
      SELECT coalesce(jsonb_agg(jsonb_build_object('schema_name', replace(p.parts[1], '""', '"'),
        'table_name', CASE WHEN n ~ '^".*"$' THEN replace(btrim(p.parts[2], '"'), '""', '"')
          ELSE p.parts[2] END) ORDER BY u.place), '[]')
      FROM jsonb_array_elements_text(answer -> 'vector_store') WITH ORDINALITY AS u (n, place)
      CROSS JOIN LATERAL (
        SELECT coalesce(regexp_match(n, '^"((?:[^"]|"")+)"\.(.+)$'),
          regexp_match(n, '^([^.]*)\.(.+)$')) AS parts) AS p),
    'response', answer -> 'text', 'request_completed', true, 'error', NULL)
    || CASE WHEN answer ? 'prompt' THEN jsonb_build_object('prompt', answer -> 'prompt') ELSE '{}' END;
END
$$;

CREATE PROCEDURE @extschema@.heatwave_chat(query text, INOUT output jsonb DEFAULT NULL)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
-- purpose: HeatWave's HEATWAVE_CHAT
-- The tables that were found are not written into the setting: a store that is named is searched whether or
-- not its owner is trusted.
DECLARE
  _call integer := ml_rag._begin('heatwave_chat', 'discover');
  _began timestamptz := clock_timestamp();
  _options jsonb;
  _history jsonb;
  _rag jsonb;
  _answered record;
  -- in a function that is SECURITY DEFINER, whose caller has the setting
  _is_definer boolean;
  _told boolean;
BEGIN
  _options := ml_rag._chat_options();
  IF (_options -> 'report_progress')::boolean THEN
    RAISE NOTICE 'heatwave_chat: searching and answering';
  END IF;
  _history := coalesce(_options -> 'chat_history', '[]');
  IF (_options -> 're_run')::boolean THEN
    _history := _history - -1;
  END IF;
  -- what HeatWave's keys stand for
  _rag := ml_rag._parse_rag_options(jsonb_strip_nulls(jsonb_build_object(
    'n_citations', _options -> 'retrieve_top_k', 'skip_generate', _options -> 'skip_generate',
    'document_name', _options -> 'include_document_uris',
    'schema', CASE WHEN _options ? 'schema_name' THEN jsonb_build_array(_options -> 'schema_name') END,
    'vector_store', CASE WHEN _options ? 'tables' THEN (
      SELECT coalesce(jsonb_agg(concat(quote_ident(t ->> 'schema_name') || '.',
        quote_ident(t ->> 'table_name'))), '[]')
      FROM jsonb_array_elements(_options -> 'tables') AS t) END))
    || jsonb_build_object('model_options', coalesce(_options -> 'model_options', '{}')
      || jsonb_build_object('task', coalesce(_options -> 'task', '"generation"')),
    'query_options', jsonb_build_object('history', (
      SELECT coalesce(jsonb_agg(jsonb_build_object('role', s.role, 'content', h.turn -> s.key)
        ORDER BY h.place, s.place), '[]')
      FROM jsonb_array_elements(_history) WITH ORDINALITY AS h (turn, place)
      CROSS JOIN (VALUES (1, 'user', 'user_message'), (2, 'assistant', 'chat_bot_message')) AS s (place,
        role, key))))
    || CASE WHEN _options ? 'table_metadata'
            THEN jsonb_build_object('vector_store_columns', _options -> 'table_metadata') ELSE '{}' END);
  _is_definer := coalesce(nullif(current_setting('role'), 'none'), session_user) <> current_user;
  PERFORM ml_rag._check_named('setting ml_rag.chat_options', _rag, '{}')
  WHERE _is_definer OR session_user <> current_user;
  IF _options ? 'table_metadata' AND _is_definer THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'setting ml_rag.chat_options names columns',
      DETAIL = 'In a function that is SECURITY DEFINER it is the caller''s, who could have any column shown.',
      HINT = 'Call ml_rag_chat there, with "vector_store_columns".';
  END IF;
  -- if no store is named and none is found, the model answers alone
  IF NOT _options ?| '{tables,schema_name,include_document_uris}' AND NOT (_rag -> 'skip_generate')::boolean
    AND cardinality(ml_rag._discover(_rag)) = 0 THEN
    _rag := _rag || '{"n_citations": 0}';
  END IF;
  IF (_options -> 'return_prompt')::boolean THEN
    _rag := _rag || '{"return_prompt": true}';
  END IF;
  _answered := ml_rag._answer($1, _rag, _call, _began);
  output := ml_rag._heatwave_output($1, _options, _answered.answer);
  -- what the answer was made of may be for its owner alone
  PERFORM set_config('ml_rag.chat_options', (output - 'tables'
    - CASE WHEN _is_definer THEN '{documents,prompt}' ELSE '{}' END::text[]
    || CASE WHEN _options ? 'tables' THEN jsonb_build_object('tables', _options -> 'tables')
      ELSE '{}' END)::text, false);
  IF (_options -> 'report_progress')::boolean THEN
    RAISE NOTICE 'heatwave_chat: answered from % segments', jsonb_array_length(output -> 'documents');
  END IF;
  _told := ml_rag._end(_call, '00000', _answered.trace, _began);
@CATCH_AND_END@
END
$$;
COMMENT ON PROCEDURE @extschema@.heatwave_chat(text, jsonb) IS
$$HeatWave's chat, whose state is the session's setting ml_rag.chat_options: CALL heatwave_chat('What is AutoML?')
The setting is a JSON text: SET ml_rag.chat_options = '{"retrieve_top_k": 5}'. Its keys with ranges and
defaults: SELECT * FROM ml_rag.option WHERE routine = 'heatwave_chat'. output, which MySQL's @chat_options has
after the call: these keys, and {"chat_history": [{"chat_query_id", "user_message", "chat_bot_message"}],
"tables": [{"schema_name", "table_name"}], "documents": [{"id", "title", "segment"}], "response",
"request_completed": true, "error": null}; the setting gets it too, but for tables that it did not name. Where
no store is found and none was asked for, the model answers alone. See docs/chat.md.
Errors: 22023 the setting is not JSON, or a key of it is unknown or wrong; those of ml_rag_answer. They leave
the setting as it was.$$;
