-- arms: what each arm of a request finds, store by store. An arm and a store are the unit of work: of isolation, of explain.

CREATE FUNCTION ml_rag._other_dimensions(store ml_rag.store, query_embedding @vector@.vector) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the failure of a store whose vectors cannot be compared with the query embedding
BEGIN
  RETURN ml_rag._failure(store.vector_store, '22000', 'the query embedding and the vector store differ in dimensions',
      format('The query embedding has %s dimensions, %s.%I has %s.', @vector@.vector_dims(query_embedding),
        store.vector_store, store.segment_embedding, store.dimensions),
      'Name the store''s own model in "embed_model_id", or leave the store out with "exclude_vector_store".')
    || jsonb_build_object(
      'warning', format('"%s" has other dimensions than the query embedding; ignored', store.vector_store),
      'skipped', format('It has %s dimensions, the query embedding %s.', store.dimensions, @vector@.vector_dims(query_embedding)),
      'warning_hint', 'Correct the model in its marker comment, or leave the store out with "exclude_vector_store".');
END
$$;

CREATE FUNCTION ml_rag._search_arm(
  request ml_rag.request, arm ml_rag.arm, stores ml_rag.store[], with_text boolean, has_found boolean,
  INOUT filters ml_rag.row_filter[], INOUT told jsonb[] DEFAULT '{}',
  OUT hits ml_rag.hit[], OUT skipped text[], OUT facts jsonb
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the best segments of all stores by one arm. filters: of the stores, made where the first arm needs them; skipped:
-- stores that were left out; facts: with explain, how each store was searched: {vector_store: {…}}. has_found: whether an
-- earlier arm could search some store; else an error of all stores is one of the call. told: failures that were warned of
-- Reads: the stores, as the caller
DECLARE
  _is_keyword boolean := arm.search = 'keyword';
  _vector @vector@.vector := coalesce(arm.query_embedding, request.query_embedding);
  _is_only boolean := cardinality(stores) = 1;
  _store ml_rag.store;
  _searched_in ml_rag.store;  -- the store, or its node group
  _without_nodes ml_rag.store[] := '{}';
  _index ml_rag.keyword_index;
  _read record;
  _searched integer := 0;
  _indexed boolean := false;
  _without_index ml_rag.store[] := '{}';
  _failure jsonb;
  _failures jsonb[] := '{}';
  _place integer := 0;
BEGIN
  hits := '{}';
  FOREACH _store IN ARRAY stores LOOP
    _place := _place + 1;
    _searched_in := CASE WHEN arm.node_group IS NULL THEN _store ELSE ml_rag._nodes(_store, arm) END;
    IF _searched_in IS NULL THEN
      _without_nodes := _without_nodes || _store;
      CONTINUE;
    ELSIF _is_keyword THEN
      SELECT i.* INTO _index FROM ml_rag._keyword_index(_searched_in.relation) AS i WHERE i.segment = _searched_in.segment;
      IF NOT FOUND AND arm.node_group IS NOT NULL THEN
        _without_nodes := _without_nodes || _store;
        CONTINUE;
      ELSIF NOT FOUND THEN
        _without_index := _without_index || _store;
        CONTINUE;
      END IF;
      _indexed := true;
    ELSIF _searched_in.dimensions <> @vector@.vector_dims(_vector) AND coalesce(arm.form LIKE 'vector%', true) THEN
      _failure := ml_rag._other_dimensions(_searched_in, _vector);
      IF NOT request.skips_dimensions THEN
        PERFORM ml_rag._raise(_failure);
      END IF;
      _failures := _failures || _failure;
      CONTINUE;
    END IF;
    _read := ml_rag._read_store(CASE arm.search WHEN 'semantic' THEN 'search' ELSE arm.search END, _store, _is_only, request,
      arm, _index, with_text, NULL, filters[_place]);
    IF _store.found = 'trusted' AND _read.failure ->> 'sqlstate' = '22023'
      AND _read.failure ->> 'message' ~ '^(invalid value for option "filters"|operator is not supported)' THEN
      -- a value of filters that its column does not take: without the store the answer would be another one
      PERFORM ml_rag._raise(_read.failure || jsonb_build_object('hint', format(
        'It is the filter on "%s"; name the stores to search in "vector_store", or leave that one out.', _store.vector_store)));
    ELSIF _read.failure IS NOT NULL THEN
      _failures := _failures || _read.failure;
      CONTINUE;
    END IF;
    _searched := _searched + 1;
    filters[_place] := _read.filter;
    hits := hits || _read.hits;
    IF cardinality(hits) / 2 > arm.candidates THEN
      hits := CASE arm.search WHEN 'function' THEN ml_rag._best_scored(hits, arm.candidates, arm.is_descending)
                              ELSE ml_rag._best_of(hits, arm.candidates) END;
    END IF;
    IF request.explain THEN
      facts := coalesce(facts, '{}') || jsonb_build_object(_store.vector_store, _read.facts);
    END IF;
  END LOOP;
  IF cardinality(_without_nodes) > 0 THEN
    PERFORM ml_rag._warn_of_no_nodes(_without_nodes, arm, cardinality(_without_nodes) = cardinality(stores));
  END IF;
  IF _is_keyword AND NOT _indexed THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'no vector store has a keyword index',
      DETAIL = format('Stores: %s.', (SELECT string_agg(s.vector_store, ', ') FROM unnest(stores) AS s)),
      HINT = format('The owner of a store can create one: %s;', ml_rag._enabling(stores[1]));
  END IF;
  IF _searched = 0 AND cardinality(_failures) > 0 AND NOT has_found THEN
    PERFORM ml_rag._raise(_failures[1]);
  END IF;
  IF cardinality(_without_index) > 0 THEN
    PERFORM ml_rag._warn_of_no_index(_without_index);
  END IF;
  IF cardinality(_failures) > 0 THEN
    -- what an earlier arm has warned of is not told again
    PERFORM ml_rag._warn_of_failures(ARRAY(SELECT f FROM unnest(_failures) AS f WHERE f <> ALL (told)));
    told := told || _failures;
  END IF;
  skipped := '{}';
  IF _searched < cardinality(stores) THEN
    skipped := ARRAY(SELECT s.vector_store FROM unnest(_without_index || _without_nodes) AS s)
      || ARRAY(SELECT f ->> 'store' FROM unnest(_failures) AS f);
  END IF;
  IF request.explain AND cardinality(skipped) > 0 THEN
    facts := coalesce(facts, '{}') || ml_rag._explain_failures(_failures)
      || coalesce((SELECT jsonb_object_agg(s.vector_store, '{"skipped": "It has no keyword index."}'::jsonb)
                   FROM unnest(_without_index) AS s), '{}')
      || coalesce((SELECT jsonb_object_agg(s.vector_store, '{"skipped": "It has no such node group."}'::jsonb)
                   FROM unnest(_without_nodes) AS s), '{}');
  END IF;
  IF _searched > 1 OR arm.search = 'function' THEN
    hits := CASE arm.search WHEN 'function' THEN ml_rag._best_scored(hits, arm.candidates, arm.is_descending)
                            ELSE ml_rag._best_of(hits, arm.candidates) END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._search_arms(request ml_rag.request, retrieval ml_rag.retrieval, with_text boolean)
RETURNS ml_rag.retrieval
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the rankings of all arms, and the stores that none of them could search
-- with_text: false = candidates of ordinary tables come without their segment and metadata, see ml_rag._add_texts
DECLARE
  _arm ml_rag.arm;
  _found record;
  _filters ml_rag.row_filter[] := '{}';
  _told_failures jsonb[] := '{}';
  _has_found boolean := false;
  _stage text;
  _told boolean;
BEGIN
  IF request.options ? 'filters' THEN
    PERFORM ml_rag._warn_of_unknown_columns(retrieval.stores, request.options -> 'filters');
  END IF;
  FOREACH _arm IN ARRAY request.arms LOOP
    _stage := CASE _arm.search WHEN 'semantic' THEN 'search' ELSE _arm.search END;
    _told := ml_rag._stage(request.call, _stage);
    _found := ml_rag._search_arm(request, _arm, retrieval.stores, with_text, _has_found, _filters,
      _told_failures);
    _filters := _found.filters;
    _told_failures := _found.told;
    _has_found := _has_found OR cardinality(_found.skipped) < cardinality(retrieval.stores);
    IF retrieval.rankings IS NULL THEN
      retrieval.skipped := _found.skipped;
    ELSIF cardinality(retrieval.skipped) > 0 THEN
      retrieval.skipped := ARRAY(SELECT s FROM unnest(retrieval.skipped) AS s WHERE s = ANY (_found.skipped));
    END IF;
    retrieval.rankings := retrieval.rankings || ROW(_arm, _found.hits)::ml_rag.ranking;
    retrieval.trace := retrieval.trace || ROW(_stage, clock_timestamp(), CASE WHEN request.explain THEN
      jsonb_build_object('arm', _arm.name, 'stores', _found.facts, 'candidates', cardinality(_found.hits)) END)::ml_rag.step;
  END LOOP;
  RETURN retrieval;
END
$$;

CREATE FUNCTION ml_rag._search_by_one_arm(
  search text, stores ml_rag.store[], n integer, question text, query_embedding @vector@.vector, distance_metric text, options jsonb,
  skips_dimensions boolean, has_found boolean, OUT hits ml_rag.hit[], OUT request ml_rag.request, OUT arm ml_rag.arm
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the stages ml_rag.search and ml_rag.keyword where they are called by themselves
-- Reads: the stores, as the caller
DECLARE
  _found record;
BEGIN
  hits := '{}';
  IF coalesce(n, 0) < 1 OR coalesce(cardinality(stores), 0) = 0 THEN
    RETURN;
  END IF;
  request.question := question;
  request.options := coalesce(options, '{}');
  request.query_embedding := query_embedding;
  request.distance_metric := distance_metric;
  request.skips_dimensions := skips_dimensions;
  request.explain := false;
  arm.search := search;
  arm.candidates := n;
  _found := ml_rag._search_arm(request, arm, stores, true, has_found, '{}');
  hits := _found.hits;
END
$$;
