-- marker: the comment of a vector column that says which embedding model its vectors are of: read and changed here only.
-- The marker runs from GENAI_OPTIONS= to the next blank; the first one that names a model counts.

CREATE FUNCTION ml_rag._marker_pattern() RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a regular expression of a marker up to and with its model: what stands before that, and the model
BEGIN
  RETURN '(GENAI_OPTIONS=[^ \t\n\r\f\v]*?EMBED_MODEL_ID=)([^,; \t\n\r\f\v]+)(?=[,; \t\n\r\f\v]|$)';
END
$$;

CREATE FUNCTION ml_rag._marked_model(comment text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the embedding model that the comment of a column names; null = none  Calls: ml_rag._marker_pattern
-- Its beginning only: anybody may write a comment of 1 GB, and discovery reads it for everybody.
DECLARE
  _comment text := left($1, 10000);
  _at integer := strpos(_comment, 'GENAI_OPTIONS=');
  _model text;
BEGIN
  IF _at > 0 AND _at = strpos(_comment, 'GENAI_OPTIONS=EMBED_MODEL_ID=') THEN
    -- as it mostly is: the pattern says the same and takes ten times as long
    _model := split_part(translate(substr(_comment, _at + 29), E',;\t\n\r\f\x0b', '       '), ' ', 1);
    IF _model <> '' THEN
      RETURN _model;
    END IF;
  END IF;
  RETURN (regexp_match(_comment, ml_rag._marker_pattern()))[2];
END
$$;

CREATE FUNCTION ml_rag._former_models(comment text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the models that a column had before ml_rag.reembed gave it the one that _marked_model reads, the last one first
-- Calls: ml_rag._marker_pattern
BEGIN
  RETURN ARRAY(
    SELECT f.model[1]
    FROM regexp_matches(
      -- the rest of the marker
      (regexp_match($1, concat(ml_rag._marker_pattern(), '([^ \t\n\r\f\v]*)(?=[ \t\n\r\f\v]|$)')))[3],
      'REEMBEDDED_FROM=([^,;]+)', 'g') WITH ORDINALITY AS f (model, place)
    ORDER BY f.place);
END
$$;

CREATE FUNCTION ml_rag._remark_model(comment text, model_id text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the comment with another model in the place of the one that _marked_model reads, and that one remembered: loads
-- must know it, or all documents would count as changed  Calls: ml_rag._marker_pattern
BEGIN
  RETURN regexp_replace(
    regexp_replace($1,
      '[,;]REEMBEDDED_FROM=' || regexp_replace(model_id, '\W', '\\\&', 'g') || '(?=[,; \t\n\r\f\v]|$)', ''),
    ml_rag._marker_pattern(), concat('\1', replace(model_id, '\', '\\'), ',REEMBEDDED_FROM=\2'));
END
$$;
