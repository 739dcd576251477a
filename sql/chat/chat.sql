-- chat: an answer in a conversation whose turns are kept.

CREATE FUNCTION ml_rag._begin_turn(options jsonb, OUT own jsonb, OUT rag jsonb, OUT conversation_id uuid,
  OUT created_at timestamptz, OUT turn integer, OUT query text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the options of ml_rag_chat, checked, and those of ml_rag as they were given; the conversation of a
-- call (null: a new one), and with re_run the turn that it replaces, with its query
-- The role is looked at beside the policy, which does not bind the superuser.
-- Reads: ml_rag.conversation, ml_rag.message
BEGIN
  IF coalesce(jsonb_typeof(options), 'null') NOT IN ('object', 'null') THEN
    PERFORM ml_rag.parse_options('ml_rag_chat', options);
  END IF;
  -- as in _lay_over_filters; and "-" compares each key with each one that it takes away
  SELECT coalesce(json_object_agg(o.key, o.value) FILTER (WHERE k.name IS NOT NULL)::jsonb, '{}'),
    coalesce(json_object_agg(o.key, o.value) FILTER (WHERE k.name IS NULL)::jsonb, '{}')
  INTO own, rag
  FROM jsonb_each(nullif(options, 'null')) AS o
  LEFT JOIN ml_rag.option AS k ON k.routine = 'ml_rag_chat' AND k.name = o.key;
  -- what is spelt like one of these is not one of ml_rag
  PERFORM ml_rag._unknown_option('ml_rag_chat', r.key) FROM jsonb_object_keys(rag) AS r (key)
  WHERE length(r.key) > 3 AND NOT EXISTS (SELECT FROM ml_rag.option AS o
    WHERE o.routine = 'ml_rag' AND o.name = r.key)
    AND EXISTS (SELECT FROM ml_rag.option AS o WHERE o.routine = 'ml_rag_chat'
                AND (strpos(o.name, lower(r.key)) > 0
                  OR ml_rag._distance_of_words(lower(r.key), o.name) <= 2));
  own := ml_rag.parse_options('ml_rag_chat', own);
  BEGIN
    conversation_id := own ->> 'conversation_id';
  EXCEPTION WHEN invalid_text_representation THEN
    PERFORM ml_rag._bad_option('conversation_id', own -> 'conversation_id', 'a uuid');
  END;
  IF rag -> 'query_options' ? 'history' THEN
    PERFORM ml_rag._bad_option('history', rag #> '{query_options,history}',
      'none: the turns of the conversation are the history');
  END IF;
  IF (own -> 're_run')::boolean AND NOT own ? 'conversation_id' THEN
    PERFORM ml_rag._bad_option('re_run', 'true', 'true together with conversation_id');
  END IF;
  IF conversation_id IS NULL THEN
    RETURN;
  END IF;
  SELECT c.created_at INTO created_at FROM ml_rag.conversation AS c
  WHERE c.role = current_user AND c.conversation_id = _begin_turn.conversation_id;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'conversation does not exist',
      DETAIL = format('Role %s has no conversation %s.', current_user, conversation_id),
      HINT = 'Leave "conversation_id" out to begin a new one; ml_rag.conversation has those that there are.';
  END IF;
  IF (own -> 're_run')::boolean THEN
    SELECT m.turn, m.query INTO turn, query FROM ml_rag.message AS m
    WHERE m.role = current_user AND m.conversation_id = _begin_turn.conversation_id
    ORDER BY m.turn DESC LIMIT 1;
    IF NOT FOUND THEN
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'conversation has no turn to replace',
        DETAIL = format('Conversation %s is empty.', conversation_id), HINT = 'Leave "re_run" out.';
    END IF;
  END IF;
END
$$;

CREATE FUNCTION @extschema@.ml_rag_chat(query text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a turn of a conversation: its earlier turns are the history of the question
-- Writes: ml_rag.conversation, ml_rag.message
DECLARE
  _call integer := ml_rag._begin('ml_rag_chat', 'discover');
  _began timestamptz := clock_timestamp();
  _rag jsonb;
  _turn record;
  _history jsonb;
  _query text;
  _answered record;
  _before integer;
  _chosen jsonb;
  _conversation uuid;
  _message uuid;
  _now timestamptz;
  _told boolean;
BEGIN
  PERFORM ml_rag._check_writable('cannot keep a conversation');
  _turn := ml_rag._begin_turn($2);
  _query := coalesce($1, _turn.query);
  _before := coalesce(_turn.turn, 2147483647);
  -- the answered turns before this one, the newest, at most 500 of a million characters together; what the
  -- model chose in the last
  SELECT jsonb_agg(jsonb_build_object('role', s.role, 'content', s.content) ORDER BY t.turn, s.place)
      FILTER (WHERE s.role IS NOT NULL),
    (array_agg(t.filters ORDER BY t.turn DESC))[1] INTO _history, _chosen
  FROM (
    SELECT m.turn, m.query, m.text, m.filters,
      sum(length(m.query) + length(m.text)) OVER (ORDER BY m.turn DESC) AS characters
    FROM ml_rag.message AS m
    WHERE m.role = current_user AND m.conversation_id = _turn.conversation_id AND m.turn < _before
      AND m.text IS NOT NULL
    ORDER BY m.turn DESC LIMIT 500
  ) AS t LEFT JOIN LATERAL (VALUES (1, 'user', t.query), (2, 'assistant', t.text)) AS s (place, role, content)
    ON t.characters <= 1000000;
  _rag := _turn.rag || jsonb_build_object('query_options',
    coalesce(nullif(_turn.rag -> 'query_options', 'null'), '{}')
    || CASE WHEN _turn.conversation_id IS NULL THEN '{}'
      ELSE jsonb_build_object('history', coalesce(_history, '[]')) END);
  _rag := ml_rag._parse_rag_options(_rag)
    || CASE WHEN (_turn.own -> 'return_prompt')::boolean THEN '{"return_prompt": true}'
      ELSE '{}' END::jsonb;
  IF _chosen IS NOT NULL THEN
    _rag := jsonb_set(_rag, '{query_options,filters_before}', _chosen);
  END IF;
  _answered := ml_rag._answer(_query, _rag, _call, _began);
  -- Only here is the conversation locked, so that two sessions in it do not wait for each other's models.
  _now := clock_timestamp();
  _conversation := coalesce(_turn.conversation_id, gen_random_uuid());
  IF _turn.conversation_id IS NULL THEN
    INSERT INTO ml_rag.conversation (conversation_id, role) VALUES (_conversation, current_user);
  ELSE
    UPDATE ml_rag.conversation AS c SET changed_at = _now
    -- another one can have its id by now
    WHERE c.role = current_user AND c.conversation_id = _conversation AND c.created_at = _turn.created_at;
    IF NOT FOUND THEN
      RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'the conversation was deleted during the call',
        DETAIL = format('The answer to the question in conversation %s is not kept.', _conversation),
        HINT = 'Ask again without "conversation_id".';
    END IF;
  END IF;
  -- in the place that it has, or as the last one. Another statement: it sees the turns that were written
  -- while this one waited
  INSERT INTO ml_rag.message AS m (message_id, conversation_id, role, turn, created_at, query, question, text,
    citations, options, filters)
  VALUES (gen_random_uuid(), _conversation, current_user, coalesce(_turn.turn, (
      SELECT coalesce(max(o.turn), 0) + 1 FROM ml_rag.message AS o
      WHERE o.role = current_user AND o.conversation_id = _conversation)),
    _now, _query, _answered.question, _answered.answer ->> 'text', _answered.answer -> 'citations',
    coalesce(nullif($2, 'null'), '{}') - 'conversation_id',
    _answered.answer #> '{retrieval_info,query,filters}')
  ON CONFLICT ON CONSTRAINT message_pkey DO UPDATE SET message_id = excluded.message_id,
    created_at = excluded.created_at, query = excluded.query, question = excluded.question,
    text = excluded.text, citations = excluded.citations, options = excluded.options,
    filters = excluded.filters
  RETURNING m.message_id INTO _message;
  _told := ml_rag._end(_call, '00000', _answered.trace, _began);
  RETURN _answered.answer || jsonb_build_object('conversation_id', _conversation, 'message_id', _message,
    'question', _answered.question);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_chat(text, jsonb) IS
$$answers a question in a conversation: ml_rag_chat('And how long does it take?', '{"conversation_id": "…"}')
options: those of ml_rag, and conversation_id (absent: a new conversation), re_run, return_prompt. The turns
before are the history of the search and of the answer, see docs/chat.md; they are kept in ml_rag.conversation
and ml_rag.message, where each role sees its own. Returns the document of ml_rag_answer and
{"conversation_id", "message_id", "question": as searched with}; with return_prompt also "prompt": the
messages that the model answered.
Errors: 22023 bad option, no such conversation, or no turn to replace; 25006 read-only transaction; 55000 the
conversation was deleted during the call; those of ml_rag_answer. A call that fails keeps nothing.$$;
