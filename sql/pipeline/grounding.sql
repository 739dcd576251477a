-- grounding: whether the sentences of an answer stand on the texts that it was made from.

CREATE FUNCTION @extschema@.ml_check_grounding(answer text, facts jsonb,
  options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: an answer and facts as JSON to what supports it
DECLARE
  _call integer := ml_rag._begin('ml_check_grounding');
  _options jsonb;
  _bad integer;
  _texts text[];
  _reply jsonb;
BEGIN
  _options := ml_rag.parse_options('ml_check_grounding', $3);
  IF coalesce(answer, '') !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the answer is empty';
  ELSIF facts IS NULL OR jsonb_typeof(facts) <> 'array'
      OR jsonb_array_length(facts) NOT BETWEEN 1 AND 200 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the facts are not an array of 1 to 200',
      DETAIL = format('Got %s.', CASE jsonb_typeof(facts) WHEN 'array' THEN
        format('%s facts', jsonb_array_length(facts))
        ELSE coalesce(jsonb_typeof(facts), 'NULL') END),
      HINT = 'Facts are a JSON array such as [{"fact_text": "a text"}], or of texts.';
  END IF;
  _bad := (SELECT min(f.place) FROM jsonb_array_elements(facts) WITH ORDINALITY AS f (fact, place)
    WHERE NOT CASE jsonb_typeof(f.fact) WHEN 'string' THEN true
      WHEN 'object' THEN f.fact - '{fact_text,attributes}'::text[] = '{}'
        AND coalesce(jsonb_typeof(f.fact -> 'fact_text') = 'string', false)
        AND coalesce(jsonb_typeof(f.fact -> 'attributes'), 'null') IN ('object', 'null')
      ELSE false END);
  IF _bad IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('fact %s cannot be read', _bad),
      DETAIL = 'A fact is a text, or an object with "fact_text" (a text) and "attributes" (an object).',
      HINT = 'Such as {"fact_text": "Trains are free.", "attributes": {"title": "Travel"}}.';
  END IF;
  _texts := ARRAY(SELECT coalesce(f.fact ->> 'fact_text', f.fact #>> '{}')
    FROM jsonb_array_elements(facts) WITH ORDINALITY AS f (fact, place) ORDER BY f.place);
  IF length(answer) + length(array_to_string(_texts, '')) > 1000000 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'answer and facts are too long',
      DETAIL = format('They have %s characters; at most 1000000 are allowed.',
        length(answer) + length(array_to_string(_texts, ''))),
      HINT = 'Give only the facts that the answer was made from.';
  END IF;
  _reply := ml_rag._python('check_grounding', jsonb_build_array(answer, _texts, '', _options,
    ml_rag.text_search_configuration(_options ->> 'language')));
  PERFORM ml_rag._end(_call);
  RETURN _reply - 'supported_text';
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_check_grounding(text, jsonb, jsonb) IS
$$says which sentences of an answer its facts support: ml_check_grounding('Trains are free.', '["Trains cost nothing.", …]')
facts: 1 to 200 texts, or objects {"fact_text", "attributes"}, with at most a million characters. Returns
{"support_score": 0-1, the mean of the claims' scores;
"cited_chunks": [{"chunk_text", "source", "index"}], where source is the place of the fact, counted from 0;
"claims": [{"start_pos", "end_pos", "claim_text", "citation_indices", "grounding_check_required", "score"}]}.
A claim is a sentence of the answer, positions are characters, the end is exclusive. A sentence that states
nothing needs no check and has a null score. A claim is supported if its score is at least citation_threshold;
citation_indices then names its cited_chunks. Reads no table; works in a read-only transaction. Options:
SELECT * FROM ml_rag.option WHERE routine = 'ml_check_grounding'.
Errors: 22023 empty answer, bad fact or option, unknown model or model of another task. With another model
than "hybrid" also 55000 model not available; 08006 model server; 53300 its queue is full; 57014 cancelled;
38000 the model failed.$$;
