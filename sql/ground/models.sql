-- models: the model server and its catalogue.

CREATE FUNCTION ml_rag.model_server() RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
BEGIN
  RETURN ml_rag._python('get', '["/healthz"]');
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.model_server() IS
$$the model server's health: status, version, uptime, state of each model, confinement of document parsers
Errors: 08006 where it cannot be reached.$$;

CREATE FUNCTION ml_rag._default_model(models jsonb DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the generation model where no option names one: that of setting generate_model_id, else the first
-- of the catalogue that is there and is not there to try things out only (brief), else extractive. models:
-- those of the model server, if they are known
DECLARE
  _model text := ml_rag._get_setting('generate_model_id');
BEGIN
  IF _model IS NOT NULL THEN
    RETURN _model;
  END IF;
  IF models IS NULL THEN
    models := ml_rag._python('get', '["/v1/models"]') -> 'data';
  END IF;
  RETURN coalesce((
    SELECT m.value ->> 'id'
    FROM jsonb_array_elements(CASE jsonb_typeof(models) WHEN 'array' THEN models ELSE '[]' END)
      WITH ORDINALITY AS m (value, place)
    WHERE m.value @> '{"task": "generate", "available": true, "brief": false}'
      AND m.value ->> 'engine' <> 'extractive'
    ORDER BY m.place LIMIT 1), 'extractive');
END
$$;

CREATE FUNCTION @extschema@.ml_supported_models()
RETURNS TABLE (model_id text, task text, engine text, dimensions integer, max_tokens integer,
  available boolean,
               is_default boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the catalogue of the model server, and which of its models are this database's defaults
DECLARE
  _models jsonb;
BEGIN
  _models := ml_rag._python('get', '["/v1/models"]') -> 'data';
  BEGIN
    RETURN QUERY
      SELECT m.id, m.task, m.engine, m.dimensions, m.max_tokens, m.available,
        m.id = CASE m.task WHEN 'generate' THEN ml_rag._default_model(_models)
          ELSE split_part(ml_rag._get_setting(m.task || '_model_id'), '@', 1) END
      FROM jsonb_to_recordset(_models)
        AS m (id text, task text, engine text, dimensions integer, max_tokens integer, available boolean)
      ORDER BY m.task, m.id;
  EXCEPTION WHEN data_exception THEN
    RAISE EXCEPTION USING ERRCODE = '38000', MESSAGE = 'unexpected reply from the model server',
      DETAIL = format('No list of models: %s.', left(SQLERRM, 200));
  END;
@CATCH@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_supported_models() IS
$$the models of the model server
task: embed, generate or rerank. dimensions: of the embedding. max_tokens: longest input (embed, rerank) or
the context (generate). available: its files are there. is_default: used where no option names one.
Errors: 08006 if the model server cannot be reached.$$;

CREATE FUNCTION ml_rag._cannot_write(model_id text, purpose text) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the error, for ml_rag._raise, that a model writes no texts of its own (extractive) or is too small
-- (brief in the catalogue); its hint names a model that can. Null if this one can, or if the catalogue
-- cannot be read, which the next request reports
DECLARE
  _outcome record;
  _models jsonb;
  _own jsonb;
  _is_brief boolean;
  _other record;
BEGIN
  _outcome := ml_rag._call_python('get', '["/v1/models"]');
  IF _outcome.error ->> 'sqlstate' ~ '^57' THEN
    PERFORM ml_rag._raise(_outcome.error);
  END IF;
  _models := _outcome.found -> 'data';
  _own := jsonb_path_query_first(_models, '$[*] ? (@.id == $id)', jsonb_build_object('id', model_id));
  _is_brief := coalesce(_own @> '{"brief": true}', false);
  IF NOT _is_brief AND _own ->> 'engine' IS DISTINCT FROM 'extractive' THEN
    RETURN NULL;
  END IF;
  -- one that is there, else the one to pull that is large enough for every purpose
  SELECT m.value ->> 'id' AS id, m.value ->> 'pull' AS pull INTO _other
  FROM jsonb_array_elements(_models) WITH ORDINALITY AS m (value, place)
  WHERE m.value ->> 'task' = 'generate' AND m.value ->> 'engine' NOT IN ('fake', 'extractive')
    AND m.value -> 'brief' = 'false'
    AND (m.value -> 'available' = 'true' OR m.value ->> 'pull' IS NOT NULL)
  ORDER BY m.value -> 'available' = 'true' DESC, m.value ->> 'id' = 'qwen2.5-7b-instruct' DESC,
    m.place LIMIT 1;
  RETURN jsonb_build_object('sqlstate', '55000',
    'message', format(CASE WHEN _is_brief THEN 'model %s is too small to %s'
      ELSE 'model %s only takes sentences out of documents, and cannot %s' END, model_id, purpose),
    'hint', concat('Name a ', CASE WHEN _is_brief THEN 'larger one' ELSE 'language model' END,
      ' in "model_id"', ', such as ' || _other.id, ', after "' || _other.pull || '"', '.'));
END
$$;
