-- bm25: the segments of one store that have most of the words.

CREATE FUNCTION ml_rag._keyword_scores(store oid, segment name, key name[], terms text[], weights integer[], n integer,
  row_keys text[] DEFAULT NULL, corpus jsonb DEFAULT NULL,
  OUT keys text[], OUT scores double precision[], OUT error jsonb)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
-- that of ml_rag._keyword_indexes: under another one the statements that both run would be planned anew each time
SET search_path FROM CURRENT
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
AS $$
# purpose: keys, each the text of a text[], and scores of the best rows, for the caller; row_keys: of
# ml_rag.row_filter, where only few rows pass, else null; corpus: of ml_rag._keyword_statistics, null = its own
# Stable, so that all that is read is of one moment: a run may be replaced by another at any time.
@BACKEND@
found, error = backend.keyword_scores(plpy, store, segment, key, terms, weights, n, row_keys, corpus)
return (*(found or (None, None)), error)
$$;

CREATE FUNCTION ml_rag._enabling(store ml_rag.store) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the statement by which an owner creates or rebuilds the keyword index of a store, for hints
BEGIN
  RETURN format('SELECT ml_rag.enable_keyword_search(%L%s)', store.relation::text,
    CASE WHEN store.segment <> 'segment' THEN format(', %L', jsonb_build_object('segment', store.segment)) END);
END
$$;

CREATE FUNCTION ml_rag._broken_index(store ml_rag.store, why text) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the failure of a store whose keyword index cannot be used: its configuration was dropped, or its key's type changed
BEGIN
  RETURN ml_rag._failure(store.vector_store, '55000',
      format('the keyword index of "%s" cannot be used', store.vector_store), why,
      format('Its owner can rebuild it: %s;', ml_rag._enabling(store)))
    || jsonb_build_object('warning', format('the keyword index of "%s" cannot be used; ignored', store.vector_store),
      'warning_detail', why, 'skipped', 'Its keyword index cannot be used.',
      'warning_hint', format('Its owner can rebuild it: %s;', ml_rag._enabling(store)));
END
$$;

CREATE FUNCTION ml_rag._warn_of_no_index(stores ml_rag.store[], is_all boolean) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: say once which stores a keyword arm left out for want of an index; where that is all of them it is an error
DECLARE
  _names text[] := ARRAY(SELECT s.vector_store FROM unnest(stores) AS s);
BEGIN
  IF is_all THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'no vector store has a keyword index',
      DETAIL = format('Stores: %s.', array_to_string(_names, ', ')),
      HINT = format('The owner of a store can create one: %s;', ml_rag._enabling(stores[1]));
  END IF;
  RAISE WARNING USING ERRCODE = '01000',
    MESSAGE = CASE cardinality(stores) WHEN 1 THEN format('"%s" has no keyword index; keyword search ignores it', _names[1])
      ELSE format('%s vector stores have no keyword index; keyword search ignores them', cardinality(stores)) END,
    DETAIL = format('Ignored: %s%s.', array_to_string(_names[1:20], ', '),
      CASE WHEN cardinality(_names) > 20 THEN ', …' END),
    HINT = CASE WHEN (SELECT c.relkind FROM pg_class AS c WHERE c.oid = stores[1].relation) IN ('r', 'p')
      THEN format('Its owner can create one: %s;', ml_rag._enabling(stores[1]))
      ELSE 'Only an ordinary table can have one: search the table behind it.' END;
END
$$;
