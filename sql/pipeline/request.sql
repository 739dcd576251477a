-- request: the options of ml_rag, checked, with those of its stages.

CREATE FUNCTION ml_rag._needs_embedding(options jsonb) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a question has to be embedded; keyword search alone goes without, and so without a model server,
-- unless distances are asked for
BEGIN
  RETURN (options -> 'semantic_search')::boolean
    OR coalesce(options -> 'retrieval_options' ?| '{max_distance,percentage_distance}', false);
END
$$;

CREATE FUNCTION ml_rag._parse_rag_options(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the options of ml_rag with those objects inside that have options of their own
-- Calls: ml_rag.parse_options
DECLARE
  _parsed jsonb := ml_rag.parse_options('ml_rag', $1);
BEGIN
  IF _parsed ? 'retrieval_options' THEN
    _parsed := jsonb_set(_parsed, '{retrieval_options}',
      ml_rag.parse_options('retrieval_options', _parsed -> 'retrieval_options'));
  END IF;
  IF _parsed ? 'rerank' THEN
    _parsed := jsonb_set(_parsed, '{rerank}', ml_rag.parse_options('rerank', _parsed -> 'rerank'));
  END IF;
  IF _parsed ? 'hybrid_options' THEN
    PERFORM ml_rag.parse_options('hybrid_options', _parsed -> 'hybrid_options');
  END IF;
  IF NOT (_parsed -> 'semantic_search')::boolean AND NOT (_parsed -> 'keyword_search')::boolean THEN
    PERFORM ml_rag._bad_option('semantic_search', 'false', 'true where "keyword_search" is false',
      'Set one of them, or "n_citations": 0 to ask the model without any retrieval.');
  END IF;
  IF _parsed -> 'model_options' ? 'context' THEN
    PERFORM ml_rag._bad_option('context', _parsed #> '{model_options,context}', 'nothing: ml_rag fills it in',
      'Leave "context" out of model_options; it is an option of ml_generate.');
  END IF;
  IF _parsed ->> 'abstain_text' !~ '\S' THEN
    PERFORM ml_rag._bad_option('abstain_text', _parsed -> 'abstain_text', 'a text that is not blank');
  END IF;
  IF _parsed ? 'prompt' THEN
    PERFORM ml_rag.parse_options('prompt', _parsed -> 'prompt');
  END IF;
  -- checked even where skip_generate leaves them unused: a mistyped option should not wait for its day
  IF _parsed ? 'model_options' THEN
    PERFORM ml_rag.parse_options('ml_generate', _parsed -> 'model_options');
  END IF;
  IF _parsed ? 'vector_store_columns' THEN
    PERFORM ml_rag.parse_options('vector_store_columns', _parsed -> 'vector_store_columns');
  END IF;
  IF _parsed ?| '{filters,required_keywords,excluded_keywords}' THEN
    PERFORM ml_rag._filter_tree(_parsed -> 'filters') WHERE _parsed ? 'filters';
    PERFORM ml_rag._check_keywords(o.key, o.value) FROM jsonb_each(_parsed) AS o
    WHERE o.key IN ('required_keywords', 'excluded_keywords');
  END IF;
  RETURN jsonb_build_object(
    'n_citations',
    CASE WHEN _parsed -> 'retrieval_options' ?| '{max_distance,percentage_distance}' THEN 10 ELSE 3 END,
    -- percentage_distance says nothing about relevance: the nearest segment always passes it
    'abstain', coalesce(_parsed -> 'retrieval_options' ? 'max_distance', false)
      OR coalesce(_parsed -> 'rerank' ? 'min_score', false)) || _parsed;
END
$$;
