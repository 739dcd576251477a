-- chat: an answer in a conversation whose turns are kept.

CREATE FUNCTION ml_rag._parse_chat_options(options jsonb, OUT own jsonb, OUT rag jsonb)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the options of ml_rag_chat, checked, and those of ml_rag as they were given
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
    PERFORM (own ->> 'conversation_id')::uuid;
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
END
$$;

CREATE FUNCTION ml_rag._begin_turn(own jsonb, OUT conversation_id uuid, OUT turn integer, OUT query text)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the conversation of a call (null: a new one), and with re_run the turn that it replaces, with its
-- query
-- The role is looked at beside the policy, which does not bind the superuser.
-- Reads: ml_rag.conversation, ml_rag.message
BEGIN
  conversation_id := (own ->> 'conversation_id')::uuid;
  IF conversation_id IS NULL THEN
    RETURN;
  END IF;
  PERFORM FROM ml_rag.conversation AS c WHERE c.role = current_user
    AND c.conversation_id = _begin_turn.conversation_id;
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
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'there is no turn to replace',
        DETAIL = format('Conversation %s is empty.', conversation_id), HINT = 'Leave "re_run" out.';
    END IF;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._write_turn(INOUT turn ml_rag.message)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: keep a turn, in the place that it has, or as the last one of its conversation, or of a new one.
-- Only here is the conversation locked, so that two sessions in it do not wait for each other's models
-- Writes: ml_rag.conversation, ml_rag.message
BEGIN
  turn.message_id := gen_random_uuid();
  turn.role := current_user;
  turn.created_at := clock_timestamp();
  IF turn.conversation_id IS NULL THEN
    turn.conversation_id := gen_random_uuid();
    INSERT INTO ml_rag.conversation (conversation_id, role) VALUES (turn.conversation_id, turn.role);
  ELSE
    UPDATE ml_rag.conversation AS c SET changed_at = turn.created_at
    WHERE c.role = turn.role AND c.conversation_id = turn.conversation_id;
    IF NOT FOUND THEN
      RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'the conversation was deleted during the call',
        DETAIL = format('The answer to the question in conversation %s is not kept.', turn.conversation_id),
        HINT = 'Ask again without "conversation_id".';
    END IF;
  END IF;
  IF turn.turn IS NULL THEN
    -- another statement: it sees the turns that were written while this one waited
    SELECT coalesce(max(m.turn), 0) + 1 INTO turn.turn FROM ml_rag.message AS m
    WHERE m.role = turn.role AND m.conversation_id = turn.conversation_id;
  ELSE
    UPDATE ml_rag.message AS m SET message_id = turn.message_id, created_at = turn.created_at,
      query = turn.query,
      question = turn.question, text = turn.text, citations = turn.citations, options = turn.options,
        filters = turn.filters
    WHERE m.role = turn.role AND m.conversation_id = turn.conversation_id AND m.turn = turn.turn;
    IF FOUND THEN
      RETURN;
    END IF;
  END IF;
  INSERT INTO ml_rag.message (message_id, conversation_id, role, turn, created_at, query, question, text,
    citations, options, filters)
  VALUES (turn.message_id, turn.conversation_id, turn.role, turn.turn, turn.created_at, turn.query,
    turn.question, turn.text, turn.citations, turn.options, turn.filters);
END
$$;

CREATE FUNCTION @extschema@.ml_rag_chat(query text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a turn of a conversation: its earlier turns are the history of the question
DECLARE
  _call integer := ml_rag._begin('ml_rag_chat', 'discover');
  _began timestamptz := clock_timestamp();
  _options record;
  _rag jsonb;
  _turn record;
  _history jsonb;
  _query text;
  _answered record;
  _before integer;
  _chosen jsonb;
  _kept ml_rag.message;
  _told boolean;
BEGIN
  PERFORM ml_rag._check_writable('cannot keep a conversation');
  _options := ml_rag._parse_chat_options($2);
  _turn := ml_rag._begin_turn(_options.own);
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
  _rag := _options.rag || jsonb_build_object('query_options',
    coalesce(nullif(_options.rag -> 'query_options', 'null'), '{}')
    || CASE WHEN _turn.conversation_id IS NULL THEN '{}'
      ELSE jsonb_build_object('history', coalesce(_history, '[]')) END);
  _rag := ml_rag._parse_rag_options(_rag)
    || CASE WHEN (_options.own -> 'return_prompt')::boolean THEN '{"return_prompt": true}'
      ELSE '{}' END::jsonb;
  IF _chosen IS NOT NULL THEN
    _rag := jsonb_set(_rag, '{query_options,filters_before}', _chosen);
  END IF;
  _answered := ml_rag._answer(_query, _rag, _call, _began);
  _kept := ml_rag._write_turn(ROW(NULL, _turn.conversation_id, NULL, _turn.turn, NULL, _query,
    _answered.question, _answered.answer ->> 'text', _answered.answer -> 'citations',
    coalesce(nullif($2, 'null'), '{}') - 'conversation_id',
    _answered.answer #> '{retrieval_info,query,filters}')::ml_rag.message);
  _told := ml_rag._end(_call, '00000', _answered.trace, _began);
  RETURN _answered.answer || jsonb_build_object('conversation_id', _kept.conversation_id,
    'message_id', _kept.message_id,
    'question', _answered.question);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rag_chat(text, jsonb) IS
$$answers a question in a conversation: ml_rag_chat('And how long does it take?', '{"conversation_id": "…"}')
options: those of ml_rag, and conversation_id (absent: a new conversation), re_run, return_prompt. The turns
before are the history of the search and of the answer, see docs/chat.md; they are kept in ml_rag.conversation
and ml_rag.message, where everybody sees their own. Returns the document of ml_rag_answer and
{"conversation_id", "message_id", "question": as searched with}; with return_prompt also "prompt": the
messages that the model answered.
Errors: 22023 bad option, no such conversation, or no turn to replace; 25006 read-only transaction; 55000 the
conversation was deleted during the call; those of ml_rag_answer. A call that fails keeps nothing.$$;
