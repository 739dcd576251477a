-- embed: texts to vectors.

CREATE FUNCTION ml_rag._embed(texts text[], model_id text, input_type text, truncate boolean DEFAULT true,
  OUT vectors @vector@.vector[], OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
@BACKEND@
return backend.embed(plpy, texts, model_id, input_type, truncate)
$$;

CREATE FUNCTION ml_rag._embed_texts(
  texts text[], model_id text, input_type text DEFAULT 'query', truncate boolean DEFAULT true,
    otherwise text DEFAULT NULL
) RETURNS @vector@.vector[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: texts to their vectors, in one request; otherwise: a hint of what can be done without a model
DECLARE
  _embedded record;
BEGIN
  IF EXISTS (SELECT FROM unnest(texts) AS t WHERE coalesce(t, '') !~ '[^[:space:]]') THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the text to embed is empty';
  END IF;
  BEGIN
    _embedded := ml_rag._embed(texts, coalesce(model_id, ml_rag._get_setting('embed_model_id')),
      input_type, truncate);
  EXCEPTION WHEN data_exception THEN
    -- numbers that are none: the backend hands them on as text, and pgvector is the first to read them
    RAISE EXCEPTION USING ERRCODE = '38000', MESSAGE = 'unexpected reply from the model server',
      DETAIL = left(SQLERRM, 200);
  END;
  IF _embedded.error IS NOT NULL THEN
    PERFORM ml_rag._raise(_embedded.error || CASE WHEN otherwise IS NULL
      OR _embedded.error ->> 'sqlstate' = '22023' THEN '{}'
      -- a hint that ends with a command stays one that can be copied
      ELSE jsonb_build_object('hint', concat_ws(CASE WHEN _embedded.error ->> 'hint' ~ '[.!?]$' THEN ' '
        ELSE E'\n' END, _embedded.error ->> 'hint', otherwise)) END);
  END IF;
  RETURN _embedded.vectors;
END
$$;

CREATE FUNCTION ml_rag.embed(query text, model_id text DEFAULT NULL, input_type text DEFAULT 'query',
  truncate boolean DEFAULT true) RETURNS @vector@.vector
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the stage: one text to its vector
BEGIN
  RETURN (ml_rag._embed_texts(ARRAY[query], model_id, input_type, truncate))[1];
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.embed(text, text, text, boolean) IS
$$embeds one text; the dimensions are those of the model; model_id 'ID@256' cuts to 256
input_type: query, document or null; some models put a prefix before one of them. A text beyond the model's
limit is cut; truncate false: it is an error.
Errors: 22023 empty text, text too long, unknown model or model of another task; 55000; 08006; 53300;
38000.$$;

CREATE FUNCTION ml_rag._vector(value jsonb) RETURNS @vector@.vector
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: option query_embedding, an array or the text form of a vector, as a vector
BEGIN
  RETURN ($1 #>> '{}')::@vector@.vector;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
  PERFORM ml_rag._bad_option('query_embedding', $1, 'an array of numbers, or the text form of a vector',
    -- pgvector's own words hold the whole value
    'Give 1 to 16000 finite numbers: [0.1, -0.2, 0.3], or "[0.1,-0.2,0.3]".');
END
$$;

CREATE FUNCTION @extschema@.ml_embed_row(text text, options jsonb DEFAULT NULL) RETURNS @vector@.vector
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: ml_rag.embed under the name and with the options of the public routines
DECLARE
  _call integer;
  _options jsonb;
  _embedding @vector@.vector;
BEGIN
  IF $1 IS NULL THEN
    RETURN NULL;
  END IF;
  _call := ml_rag._begin('ml_embed_row', 'embed');
  BEGIN
    _options := ml_rag._with_dimensions(ml_rag.parse_options('ml_embed_row', $2));
    _embedding := ml_rag.embed($1, _options ->> 'embed_model_id', NULL, (_options -> 'truncate')::boolean);
    PERFORM ml_rag._end(_call);
    RETURN _embedding;
@CATCH_AND_END@
  END;
END
$$;
COMMENT ON FUNCTION @extschema@.ml_embed_row(text, jsonb) IS
$$embeds one text: ml_embed_row('a text', '{"embed_model_id": "all_minilm_l6_v2"}')
Returns a vector of the model's dimensions, or of as many as option "dimensions" says, null for null; a text
beyond the model's limit is cut, or with "truncate": false an error. Errors: 22023 empty text, text too long,
bad option, unknown model or model of another task, dimensions that its vectors cannot be cut to; 55000 model
not available; 08006 model server; 53300; 38000.$$;
