-- arms: what each arm of a request finds, store by store. An arm and a store are the unit of work: of isolation, of explain.

CREATE FUNCTION ml_rag._other_dimensions(store ml_rag.store, dimensions integer) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the failure of a store whose vectors cannot be compared with the query embedding
BEGIN
  RETURN ml_rag._failure(store.vector_store, '22000', 'the query embedding and the vector store differ in dimensions',
      format('The query embedding has %s dimensions, %s.%I has %s.', dimensions,
        store.vector_store, store.segment_embedding, store.dimensions),
      'Name the store''s own model in "embed_model_id", or leave the store out with "exclude_vector_store".')
    || jsonb_build_object(
      'warning', format('"%s" has other dimensions than the query embedding; ignored', store.vector_store),
      'skipped', format('It has %s dimensions, the query embedding %s.', store.dimensions, dimensions),
      'warning_hint', 'Correct the model in its marker comment, or leave the store out with "exclude_vector_store".');
END
$$;
