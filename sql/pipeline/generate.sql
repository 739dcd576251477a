-- generate: prompt to text.

CREATE FUNCTION ml_rag._write(prompt text, options jsonb, hits ml_rag.hit[], prompt_options jsonb,
  rag jsonb DEFAULT NULL, row_stores text[] DEFAULT '{}') RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what backend/answer.py writes to a prompt from the hits; rag: what it is to know of the call of
-- ml_rag
-- row_stores: those whose metadata stand in the prompt by default
DECLARE
  _options jsonb := ml_rag.parse_options('ml_generate', options);
  _model text := coalesce(_options ->> 'model_id', ml_rag._default_model());
  _prompt_options jsonb := ml_rag._parse_prompt_options(prompt_options);
  _wanted jsonb := _prompt_options -> 'metadata';
  -- characters, more than the context of any model holds. What is summarized is sent in parts, else all in
  -- one request, where each can take 6 bytes
  _longest CONSTANT integer := CASE WHEN (rag -> 'summarizes')::boolean THEN 16000000 ELSE 8000000 END;
  _documents jsonb;
BEGIN
  IF coalesce(prompt, '') !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the prompt is empty';
  END IF;
  -- not by jsonb_agg: see _citations
  SELECT to_jsonb(array_agg(jsonb_build_object('document_name', h.document_name, 'text', h.segment)
    || CASE WHEN h.metadata IS NULL THEN '{}' ELSE jsonb_build_object('metadata', h.metadata) END
      ORDER BY h.place))
  INTO _documents
  FROM (
    -- hits stand here once: each mention of them is a copy in the plan
    -- a row can be of any length, and so can its name
    SELECT left(coalesce(g.document_name, g.vector_store), 4000) AS document_name,
      left(g.segment, (_longest
        - least(_longest, sum(length(g.segment)) OVER w - length(g.segment)))::integer) AS segment,
      g.ordinality AS place,
      -- null if nothing of it is shown; of a load not what it notes for itself. A key and its value take at
      -- least 11 bytes, and a request has at most 65536 values
      CASE WHEN jsonb_typeof(g.metadata) = 'object' AND sum(pg_column_size(g.metadata)) OVER w <= 600000
        AND coalesce(_wanted <> 'false', g.vector_store = ANY (row_stores)) THEN (
        SELECT jsonb_object_agg(m.key, m.value) FROM jsonb_each_text(g.metadata) AS m
        WHERE m.value IS NOT NULL AND CASE jsonb_typeof(_wanted) WHEN 'array' THEN _wanted ? m.key
          ELSE m.key <> 'source' OR g.metadata #> '{source,sha256}' IS NULL END) END AS metadata
    FROM unnest(hits) WITH ORDINALITY AS g WINDOW w AS (ORDER BY g.ordinality ROWS UNBOUNDED PRECEDING)
  ) AS h;
  IF _options ? 'context' THEN
    _documents := coalesce(_documents, '[]')
      || jsonb_build_array(jsonb_build_object('document_name', 'context', 'text', _options -> 'context'));
  END IF;
  RETURN ml_rag._python('write',
    jsonb_build_array(jsonb_build_object('prompt', prompt, 'documents', _documents,
    'options', jsonb_build_object('model_id', _model) || (_options - 'context'), 'prompt_options',
    _prompt_options - 'metadata',
    'citations', cardinality(hits), 'rag', rag,
    'embed_model', CASE WHEN _model = 'extractive' THEN ml_rag._get_setting('embed_model_id') END)));
END
$$;

CREATE FUNCTION ml_rag.generate(
  prompt text, options jsonb DEFAULT NULL, hits ml_rag.hit[] DEFAULT NULL, prompt_options jsonb DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the stage: the answer to a prompt, from the hits (best first) where there are any
BEGIN
  RETURN ml_rag._write(prompt, options, hits, prompt_options) ->> 'text';
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.generate(text, jsonb, ml_rag.hit[], jsonb) IS
$$generates text from a prompt and, where given, from hits (best first)
options: those of ml_generate. prompt_options: {"system": text, "metadata": keys or boolean, "citation_style":
"none" or "numbered", "order": "best_first" or "best_last"}, see ml_rag.option. The first hits are used, as
many as fit the model's context; a warning is given if not all do. A marker such as [4] that refers to none of
the hits used is removed from the text, unless options has a json_schema.
Errors: as ml_generate.$$;

CREATE FUNCTION @extschema@.ml_generate(prompt text, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: ml_rag.generate as HeatWave's ML_GENERATE answers
DECLARE
  _call integer := ml_rag._begin('ml_generate', 'generate');
  _text text;
BEGIN
  _text := ml_rag.generate($1, $2);
  PERFORM ml_rag._end(_call);
  RETURN jsonb_build_object('text', _text, 'error', NULL);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_generate(text, jsonb) IS
$$generates text: ml_generate('What is SQL?', '{"max_tokens": 100}') -> {"text": …, "error": null}
Options with ranges and defaults: SELECT * FROM ml_rag.option WHERE routine = 'ml_generate'.
Errors: 22023 empty prompt, bad option, unknown model, model of another task, prompt longer than the model's
context; 55000 model not available; 08006 model server; 53300 its queue is full; 57014 cancelled; 38000 the
model failed.$$;
