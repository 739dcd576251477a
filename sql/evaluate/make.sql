-- make: questions made of the segments of a store, to measure it with if none have been written.

CREATE FUNCTION ml_rag._ask_writer(model_id text, asked text, segments text[], answer jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what a model writes about segments, as an object with these properties; null for what is none
BEGIN
  RETURN (ml_rag._python('generate', jsonb_build_array(jsonb_build_object('prompt', asked,
    'documents',
      (SELECT jsonb_agg(jsonb_build_object('document_name', 'text', 'text', s.text) ORDER BY s.place)
                  FROM unnest(segments) WITH ORDINALITY AS s (text, place)),
    'options', jsonb_build_object('model_id', model_id, 'task', 'judgement', 'max_tokens', 256,
      'json_schema', jsonb_build_object(
      'type', 'object', 'properties', answer, 'required', ARRAY(SELECT jsonb_object_keys(answer)),
      'additionalProperties', false)),
    'prompt_options',
      '{"system": "You write questions that test a search engine. Answer with JSON only."}'::jsonb)))
    ->> 'text')::jsonb;
EXCEPTION WHEN invalid_text_representation OR external_routine_exception THEN
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag.make_questions(store regclass, options jsonb DEFAULT NULL)
RETURNS TABLE (question text, reference text, document_name text, segment_number integer, answerable boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 25 SET search_path FROM CURRENT AS $$
-- Reads: the store, as the caller
#variable_conflict use_column
DECLARE
  _call integer := ml_rag._begin('ml_rag.make_questions', 'generate');
  _options jsonb;
  _model text;
  _name text;
  _store ml_rag.store;
  _filter record;
  _sampled text;
  _segment record;
  _best text[];
  _written jsonb;
  _wanted integer[];
  _left integer[];
  _language text;
  _seen text[] := '{}';
  _answerable CONSTANT text := 'Write one question that the text above answers, as somebody would ask it who '
    'has not seen the text,'
    ' complete in itself and in the language of the text; and its answer, in a few words of the text.';
  _unanswerable CONSTANT text := 'Write one question on the subject of the text above, in its language and '
    'complete in itself, about a'
    ' detail that somebody might ask for and that the text does not give.';
  _text CONSTANT jsonb := '{"question": {"type": "string", "maxLength": 500}}';
  _text_of_answer CONSTANT jsonb := '{"answer": {"type": "string", "maxLength": 500}}';
BEGIN
  _options := ml_rag.parse_options('make_questions', $2);
  _model := coalesce(_options ->> 'model_id', ml_rag._default_model());
  PERFORM ml_rag._raise(ml_rag._cannot_write(_model, 'make questions'));
  PERFORM ml_rag._hold(ARRAY[$1::oid]);
  _name := ml_rag._full_name($1);
  SELECT s.* INTO _store FROM unnest(ml_rag._discover(ml_rag._parse_rag_options(
    jsonb_build_object('vector_store', jsonb_build_array(_name))))) AS s;
  IF _store.relation IS NULL THEN
    PERFORM ml_rag._no_store(ml_rag._parse_rag_options(jsonb_build_object('vector_store',
      jsonb_build_array(_name))));
  END IF;
  _wanted := ARRAY[(_options ->> 'n')::integer, (_options ->> 'unanswerable')::integer];
  _left := _wanted;
  _language := CASE WHEN _options ? 'language' THEN format(' Its language: %s.', _options ->> 'language')
    ELSE '' END;
  -- segments drawn by the seed; short ones, which say little, last; more than are asked for: some say nothing
  _filter := ml_rag.filter(_store,
    -- null would take the place of those of the settings
    ml_rag._parse_rag_options(CASE WHEN _options ? 'filters'
      THEN jsonb_build_object('filters', _options -> 'filters') END), '$3');
  _sampled := format($sql$
    SELECT (%1$s)::text AS document_name, t.%3$I::text AS segment,
      CASE WHEN %2$s BETWEEN -2147483648 AND 2147483647 THEN %2$s END::integer AS segment_number
        FROM %4$s AS t
    WHERE t.%3$I IS NOT NULL%5$s
    ORDER BY length(t.%3$I) < 80, hashtextextended(concat_ws('|', %1$s, %2$s, md5(t.%3$I)) COLLATE "C",
      $1) LIMIT $2
    $sql$, coalesce(ml_rag._document_name(_store), 'NULL'),
    CASE WHEN _store.segment_number IS NULL THEN 'NULL::integer'
      ELSE format('t.%I', _store.segment_number) END,
    _store.segment,
    ml_rag._relation_name(_store.relation), _filter.condition);
  FOR _segment IN EXECUTE _sampled USING (_options ->> 'seed')::bigint, 2 * (_left[1] + _left[2]) + 10,
    _filter.arguments LOOP
    EXIT WHEN _left[1] <= 0 AND _left[2] <= 0;
    -- of the kind that is more behind
    answerable := _left[1]::float8 / greatest(_wanted[1], 1) >= _left[2]::float8 / greatest(_wanted[2], 1);
    _written := ml_rag._ask_writer(_model, CASE WHEN answerable THEN _answerable ELSE _unanswerable END
      || _language,
      ARRAY[_segment.segment], CASE WHEN answerable THEN _text || _text_of_answer ELSE _text END);
    question := btrim(left(_written ->> 'question', 2000));
    reference := CASE WHEN answerable THEN btrim(left(_written ->> 'answer', 2000)) END;
    CONTINUE WHEN coalesce(question, '') !~ '[^[:space:]]' OR lower(question) = ANY (_seen)
      OR answerable AND coalesce(reference, '') !~ '[^[:space:]]';
    IF NOT answerable THEN
      _best := ARRAY(SELECT h.segment
        FROM unnest(((ml_rag._retrieve(ml_rag._request(question, ml_rag._parse_rag_options(jsonb_build_object(
          'vector_store', jsonb_build_array(_name), 'n_citations', 5))))).retrieval).hits) AS h);
      CONTINUE WHEN NOT coalesce(_best = '{}' OR ml_rag._ask_writer(_model,
        format('Do the documents above contain the answer to this question? %s', question), _best,
        '{"is_answered": {"type": "boolean"}}') -> 'is_answered' = 'false', false);
    END IF;
    _seen := _seen || lower(question);
    _left[2 - answerable::integer] := _left[2 - answerable::integer] - 1;
    document_name := CASE WHEN answerable THEN _segment.document_name END;
    segment_number := CASE WHEN answerable THEN _segment.segment_number END;
    RETURN NEXT;
  END LOOP;
  IF _left[1] > 0 OR _left[2] > 0 THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s questions fewer than asked for', greatest(_left[1], 0) + greatest(_left[2], 0)),
      DETAIL = format('%s answerable and %s unanswerable ones are missing.', greatest(_left[1], 0),
        greatest(_left[2], 0)),
      HINT = 'The store has too few segments, or the model wrote too many that cannot be used.';
  END IF;
  PERFORM ml_rag._end(_call);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION ml_rag.make_questions(regclass, jsonb) IS
$$questions made of a sample of the segments of a vector store, for ml_rag_evaluate and ml_rag.calibrate
A generation model writes for each segment a question that it answers, and the answer; and questions that the
store does not
answer: those for which the model finds no answer in the best five segments. reference: the answer;
document_name and
segment_number: the segment; both null where answerable is false. Look at some of them before you rely on
them.
options: SELECT * FROM ml_rag.option WHERE routine = 'make_questions'.
Errors: 22023 bad option, unknown model or model of another task; P0002 not a store that can be searched;
42P01; 42501; 55000 model not available, too small, or extractive; 08006 model server; 53300; 57014.$$;
