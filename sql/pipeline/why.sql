-- why: where on its way through the stages a segment that was expected got lost, and which option would let it in.

CREATE TYPE ml_rag.why_step AS (
  stage    text,
  arm      text,              -- of search and keyword: the arm's name; else null
  is_kept  boolean,           -- whether the segment goes on to the next stage
  rank     integer,           -- its place after the stage; null where it has none
  distance numeric,
  score    double precision,  -- keyword: BM25; function: what it gave; fuse, rerank: 0-1
  detail   text,
  hint     text               -- what would let it in; null where it is kept
);
COMMENT ON TYPE ml_rag.why_step IS 'what one stage did to a segment, of ml_rag.why_not';

CREATE FUNCTION ml_rag._place_of(hits ml_rag.hit[], wanted ml_rag.hit) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: where among hits the first stands that is of the same store, document and number; null = nowhere
BEGIN
  RETURN (SELECT min(h.ordinality) FROM unnest(hits) WITH ORDINALITY AS h
    WHERE h.vector_store = wanted.vector_store AND h.document_name IS NOT DISTINCT FROM wanted.document_name
      AND h.document_key IS NOT DISTINCT FROM wanted.document_key
      AND h.segment_number IS NOT DISTINCT FROM wanted.segment_number);
END
$$;

CREATE FUNCTION ml_rag._without_filters(options jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: options without those that leave rows out
BEGIN
  RETURN options - ml_rag._filter_options();
END
$$;

CREATE FUNCTION ml_rag._segments_like(request ml_rag.request, stores ml_rag.store[], options jsonb, document_name text,
  segment_number bigint, page integer) RETURNS ml_rag.hit[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the segments of a document that these options leave; segment_number and page: only those of it
-- Reads: the stores, as the caller
BEGIN
  IF NOT coalesce(options -> 'document_name' ? document_name, true) THEN
    RETURN '{}';
  END IF;
  request.options := options || jsonb_build_object('document_name', ARRAY[document_name]);
  IF page IS NOT NULL THEN
    request.options := request.options || jsonb_build_object('filters',
      ml_rag._join_filters(options -> 'filters', jsonb_build_object('page', page)));
  END IF;
  RETURN ARRAY(SELECT h FROM unnest((ml_rag._read_documents(request, stores)).hits) AS h
               WHERE h.segment_number = _segments_like.segment_number OR _segments_like.segment_number IS NULL);
END
$$;

CREATE FUNCTION ml_rag._why_unknown(stores ml_rag.store[], document_name text, segments ml_rag.hit[],
  page integer) RETURNS ml_rag.why_step
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the step of a segment that is in no store; segments: those of its document that are
DECLARE
  _nearest text[];
BEGIN
  IF cardinality(segments) > 0 THEN
    RETURN ROW('discover', NULL, false, NULL, NULL, NULL, CASE WHEN page IS NOT NULL
        THEN format('The document has no such segment of page %s.', page)
        ELSE coalesce((SELECT 'The document has no segment of that number; its segments are '
            || min(h.segment_number) || ' to ' || max(h.segment_number) || '.' FROM unnest(segments) AS h),
          'The segments of the document have no numbers.') END,
      format('Leave "%s" out, and the best segment of the document is followed.',
        CASE WHEN page IS NOT NULL THEN 'page' ELSE 'segment_number' END))::ml_rag.why_step;
  END IF;
  _nearest := ml_rag._nearest_documents(document_name, ml_rag._list_documents(stores, false));
  RETURN ROW('discover', NULL, false, NULL, NULL, NULL,
    format('None of the vector stores that are searched (%s) has a row of that document that you may see.',
      (SELECT string_agg(s.vector_store, ', ') FROM unnest(stores[1:20]) AS s)),
    CASE WHEN cardinality(_nearest) > 0
      THEN format('Did you mean %s?', (SELECT string_agg(format('"%s"', left(n, 200)), ' or ') FROM unnest(_nearest) AS n))
      ELSE 'Option "explain" says which other stores there are, and why they are not searched.' END)::ml_rag.why_step;
END
$$;

CREATE FUNCTION ml_rag._why_filtered(request ml_rag.request, stores ml_rag.store[], document_name text, segment_number bigint,
  page integer)
RETURNS ml_rag.why_step
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the step of a segment that the filters leave out: which of them do
-- Reads: the stores, as the caller
DECLARE
  _all jsonb := request.options;
  _names text[] := '{}';
  _name text;
BEGIN
  FOREACH _name IN ARRAY ml_rag._filter_options() LOOP
    IF _all ? _name AND cardinality(ml_rag._segments_like(request, stores,
        ml_rag._without_filters(_all) || jsonb_build_object(_name, _all -> _name), document_name, segment_number, page)) = 0 THEN
      _names := _names || format('"%s"', _name);
    END IF;
  END LOOP;
  RETURN ROW('filter', NULL, false, NULL, NULL, NULL,
    format('It does not pass %s.', coalesce(nullif(array_to_string(_names, ' and '), ''), 'the filters together')),
    CASE WHEN '"filters"' = ANY (_names) AND (request.rewritten).filters IS NOT NULL
      THEN format('A model chose the conditions %s: leave "filters" out of query_options, or change that option.',
        left((request.rewritten).filters::text, 500))
      WHEN '"document_name"' = ANY (_names) AND (request.rewritten).document_names IS NOT NULL
      THEN 'The question names other documents: leave "document_names" out of query_options.'
      ELSE format('Leave %s out, or change what it asks for.',
        coalesce(nullif(array_to_string(_names, ' and '), ''), 'one of them')) END)::ml_rag.why_step;
END
$$;

CREATE FUNCTION ml_rag._arm_alone(request ml_rag.request, arm ml_rag.arm, store text) RETURNS ml_rag.retrieval
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what one arm finds, in one store, or null = in all of the call
-- Reads: the stores, as the caller
DECLARE
  _found record;
BEGIN
  request.arms := ARRAY[arm];
  request.options := request.options - '{query_options,rerank,retrieval_options,partial}'::text[]
    || CASE WHEN store IS NULL THEN '{}' ELSE jsonb_build_object('vector_store', ARRAY[store]) END;
  request.max_distance := NULL;
  request.percentage_distance := NULL;
  request.rerank_model_id := NULL;
  request.rerank_candidates := NULL;
  request.n_citations := 1000000;
  request.explain := false;
  _found := ml_rag._retrieve(request, 'all');
  RETURN _found.retrieval;
END
$$;

CREATE FUNCTION ml_rag._why_arm(request ml_rag.request, stores ml_rag.store[], arm ml_rag.arm, hits ml_rag.hit[],
  wanted ml_rag.hit, OUT step ml_rag.why_step)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what an arm did to a segment that passes the filters; hits: what it brought
-- Where it did not bring the segment it is run again, without its limits: over the document alone for distance and score,
-- then with as many candidates as an option can ask for, for the place.
-- Reads: the stores, as the caller
DECLARE
  _most CONSTANT integer := 10000;
  _is_semantic boolean := arm.search = 'semantic';
  _max_distance numeric := arm.max_distance;
  _min_score double precision := arm.min_score;
  _value numeric;  -- what the limits of the arm are compared with
  _options jsonb := request.options;
  _brought integer := arm.candidates;
  _alone ml_rag.retrieval;
  _hit ml_rag.hit;
  _where text;
BEGIN
  step.stage := CASE WHEN _is_semantic THEN 'search' ELSE arm.search END;
  step.arm := arm.name;
  step.rank := ml_rag._place_of(hits, wanted);
  step.is_kept := step.rank IS NOT NULL;
  IF step.is_kept THEN
    _hit := hits[step.rank];
    step.detail := format('It is number %s of %s candidates.', step.rank, cardinality(hits));
  ELSE
    arm.candidates := _most;
    arm.max_distance := NULL;
    arm.min_score := NULL;
    request.options := _options || jsonb_build_object('document_name', ARRAY[wanted.document_name]);
    _alone := ml_rag._arm_alone(request, arm, wanted.vector_store);
    _hit := _alone.ranked[ml_rag._place_of(_alone.ranked, wanted)];
  END IF;
  step.distance := CASE WHEN _is_semantic THEN coalesce(_hit.score::numeric, _hit.distance) ELSE _hit.distance END;
  step.score := CASE WHEN NOT _is_semantic THEN coalesce(_hit.keyword_score, _hit.score) END;
  _value := CASE WHEN _is_semantic THEN step.distance ELSE step.score::numeric END;
  IF step.is_kept THEN
    RETURN;
  ELSIF cardinality(_alone.skipped) > 0 THEN
    step.detail := format('The arm cannot search %s.', wanted.vector_store);
    step.hint := 'The warning says why.';
  ELSIF _hit.vector_store IS NULL AND arm.search = 'function' THEN
    step.detail := format('The function %s gives it no score, or one beyond the best %s.', arm.function, _most);
    step.hint := 'Call the function with the text of the segment.';
  ELSIF _hit.vector_store IS NULL AND arm.node_group IS NOT NULL THEN
    step.detail := format('Node group "%s" has no node of it that the arm finds.', arm.node_group);
    step.hint := 'The view of node groups shows how many nodes are pending, and why some failed.';
  ELSIF _hit.vector_store IS NULL AND _is_semantic THEN
    step.detail := 'It has no embedding yet.';
    step.hint := format('CALL ml_rag.run_vectorizer(%L) embeds the rows of a table with a vectorizer; '
      'others are embedded by ml_embed_table.',
      wanted.vector_store);
  ELSIF _hit.vector_store IS NULL THEN
    step.detail := format('It has none of the words that the arm searches for: "%s".',
      left(coalesce(array_to_string(arm.query, ' '), request.question), 500));
    step.hint := concat(CASE WHEN 'semantic' IN (SELECT a.search FROM unnest(request.arms) AS a) THEN 'Give'
        ELSE 'Add semantic search, or give' END, ' the arm other words: {"query": {"text": "…"}}',
      CASE WHEN _options -> 'query_options' ? 'synonyms' THEN '' ELSE ', or synonyms by query_options' END, '.');
  ELSIF _value > _max_distance THEN
    step.detail := format('The arm gives it %s, and its max_distance is %s.', round(_value, 4), _max_distance);
    step.hint := format('"max_distance": %s lets it in.', ceil(_value * 10000) / 10000);
  ELSIF _value < _min_score THEN
    step.detail := format('The arm gives it %s, and its min_score is %s.', round(_value, 4), _min_score);
    step.hint := format('"min_score": %s lets it in.', floor(_value * 10000) / 10000);
  ELSE
    request.options := _options;
    _alone := ml_rag._arm_alone(request, arm, NULL);
    step.rank := ml_rag._place_of(_alone.ranked, wanted);
    step.detail := CASE WHEN step.rank IS NULL THEN format('It is not among the best %s, and the arm brings %s.', _most, _brought)
                        ELSE format('It is number %s, and the arm brings %s candidates.', step.rank, _brought) END;
    _where := CASE WHEN _options ? 'arms' THEN '"candidates" of the arm'
                   WHEN (_options -> 'keyword_search')::boolean THEN '"candidates" of hybrid_options'
                   WHEN _options ? 'rerank' THEN '"candidates" of rerank' ELSE '"n_citations"' END;
    step.hint := CASE WHEN step.rank IS NULL THEN 'Ask in words that are nearer to it, or leave other rows out with "filters".'
                      ELSE format('%s of at least %s lets it in.', _where, step.rank) END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._why_far(retrieval ml_rag.retrieval, most numeric, hits ml_rag.hit[], wanted ml_rag.hit, OUT step ml_rag.why_step,
  OUT kept ml_rag.hit[])
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what the threshold did to a segment, and all the hits that it keeps; most: what it is
DECLARE
  _hit ml_rag.hit := hits[ml_rag._place_of(hits, wanted)];
  _nearest numeric := (SELECT min(h.distance) FROM unnest(hits) AS h);
BEGIN
  kept := ARRAY(SELECT hits[i] FROM generate_subscripts(hits, 1) AS i WHERE hits[i].distance <= most ORDER BY i);
  step.stage := 'threshold';
  step.rank := ml_rag._place_of(kept, wanted);
  step.is_kept := step.rank IS NOT NULL;
  step.distance := _hit.distance;
  step.score := _hit.score;
  step.detail := format('Its distance is %s, the threshold %s.', coalesce(_hit.distance::text, 'not known'), round(most, 4));
  IF NOT step.is_kept THEN
    step.hint := CASE
      WHEN _hit.distance IS NULL THEN 'Leave the threshold out: the segment has no embedding to measure from.'
      WHEN retrieval.method = 'max_distance' THEN format('{"retrieval_options": {"max_distance": %s}} lets it in.', _hit.distance)
      WHEN _nearest <> 0 THEN format('{"retrieval_options": {"percentage_distance": %s}} lets it in.',
        ceil((_hit.distance - _nearest) / abs(_nearest) * 100))
      ELSE 'Use "max_distance" instead of "percentage_distance": the nearest distance is 0.' END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._why_cited(request ml_rag.request, hits ml_rag.hit[], wanted ml_rag.hit, OUT step ml_rag.why_step)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a segment is one of those that are cited; hits: all that are left, in their order
BEGIN
  step.stage := 'citations';
  step.rank := ml_rag._place_of(hits, wanted);
  step.is_kept := step.rank <= request.n_citations;
  step.detail := format('It is number %s, and %s are cited.', step.rank, request.n_citations);
  IF NOT step.is_kept THEN
    step.hint := CASE WHEN step.rank <= 100 THEN format('{"n_citations": %s} lets it in.', step.rank)
                      ELSE 'Rerank the candidates, or ask in words that are nearer to it.' END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._why_beside(request ml_rag.request, retrieval ml_rag.retrieval, wanted ml_rag.hit) RETURNS ml_rag.why_step
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the step of a segment that is not cited itself, but stands beside one that is; null = it does not
DECLARE
  _beside bigint := (
    SELECT h.segment_number FROM unnest(retrieval.hits) WITH ORDINALITY AS h
    WHERE h.ordinality <= request.n_citations AND h.vector_store = wanted.vector_store AND h.document_key = wanted.document_key
      AND abs(h.segment_number - wanted.segment_number) <= request.segment_overlap
      AND coalesce(h.rerank_score >= request.min_score, true)
    ORDER BY h.ordinality LIMIT 1);
BEGIN
  IF _beside IS NULL THEN
    RETURN NULL;
  END IF;
  RETURN ROW('expand', NULL, true, NULL, NULL, NULL, format('Its text is cited all the same, as the neighbour of segment %s.', _beside),
    NULL)::ml_rag.why_step;
END
$$;

CREATE FUNCTION ml_rag._why_reranked(request ml_rag.request, kept ml_rag.hit[], reranked ml_rag.hit[], wanted ml_rag.hit,
  OUT step ml_rag.why_step)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: what the reranker did to a segment; kept: the hits before it, reranked: all that it has judged, in their new order
DECLARE
  _before integer := ml_rag._place_of(kept, wanted);
BEGIN
  step.stage := 'rerank';
  step.rank := ml_rag._place_of(reranked, wanted);
  step.distance := reranked[step.rank].distance;
  step.score := reranked[step.rank].rerank_score;
  step.is_kept := coalesce(step.score >= coalesce(request.min_score, 0), false);
  IF step.rank IS NULL THEN
    step.detail := format('It is number %s, and the first %s are reranked.', _before, request.rerank_candidates);
    step.hint := format('{"rerank": {"candidates": %s}} lets it be reranked.', _before);
  ELSE
    step.detail := format('It was number %s and is number %s, with score %s.', _before, step.rank, round(step.score::numeric, 4));
    IF NOT step.is_kept THEN
      step.detail := step.detail || format(' min_score is %s.', request.min_score);
      step.hint := format('{"rerank": {"min_score": %s}} lets it in.', trunc(step.score::numeric, 4));
    END IF;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._retrieve_all(INOUT request ml_rag.request, OUT retrieval ml_rag.retrieval)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a retrieval whose hits are all those that are left after the thresholds and the reranker, each by itself; request
-- comes back with what was searched with
DECLARE
  _n_citations integer := request.n_citations;
  _min_score double precision := request.min_score;
  _overlap integer := request.segment_overlap;
  _found record;
BEGIN
  request.n_citations := 1000000;
  request.min_score := NULL;
  request.segment_overlap := 0;
  request.explain := false;
  _found := ml_rag._retrieve(request, 'all');
  retrieval := _found.retrieval;
  request := _found.request;
  request.n_citations := _n_citations;
  request.min_score := _min_score;
  request.segment_overlap := _overlap;
END
$$;

CREATE FUNCTION ml_rag._why_ranked(request ml_rag.request, retrieval ml_rag.retrieval, hits ml_rag.hit[], wanted ml_rag.hit)
RETURNS ml_rag.why_step[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the steps of a segment that passes the filters, from the arms on; hits: what the arms have found as one list
DECLARE
  _place integer := ml_rag._place_of(hits, wanted);
  _ranking ml_rag.ranking;
  _found record;
  _step ml_rag.why_step;
  _steps ml_rag.why_step[] := '{}';
BEGIN
  FOREACH _ranking IN ARRAY retrieval.rankings LOOP
    _steps := _steps || ml_rag._why_arm(request, retrieval.stores, _ranking.arm, _ranking.hits, wanted);
  END LOOP;
  IF cardinality(retrieval.rankings) > 1 THEN
    _steps := _steps || ROW('fuse', NULL, _place IS NOT NULL, _place, hits[_place].distance, hits[_place].score,
      CASE WHEN _place IS NULL THEN 'No arm brought it.' ELSE format('It is number %s of %s.', _place, cardinality(hits)) END,
      CASE WHEN _place IS NULL THEN 'See the hints of the arms.' END)::ml_rag.why_step;
  END IF;
  IF _place IS NULL THEN
    RETURN _steps;
  END IF;
  IF coalesce(request.max_distance, request.percentage_distance) IS NOT NULL THEN
    _found := ml_rag._why_far(retrieval, retrieval.threshold, hits, wanted);
    _step := _found.step;
    _steps := _steps || _step;
    IF NOT _step.is_kept THEN
      RETURN _steps;
    END IF;
    hits := _found.kept;
  END IF;
  IF request.rerank_model_id IS NOT NULL THEN
    _step := ml_rag._why_reranked(request, hits, retrieval.hits, wanted);
    _steps := _steps || _step;
    IF NOT _step.is_kept THEN
      RETURN _steps;
    END IF;
    hits := retrieval.hits;
  END IF;
  RETURN _steps || ml_rag._why_cited(request, hits, wanted);
END
$$;

CREATE FUNCTION ml_rag._follow(query text, options jsonb, document text, segment_number bigint, page integer,
  call integer)
RETURNS ml_rag.why_step[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the steps of ml_rag.why_not, up to the stage that drops the segment; options are parsed ones
DECLARE
  _request ml_rag.request;
  _retrieval ml_rag.retrieval;
  _found record;
  _segments ml_rag.hit[];
  _known ml_rag.hit[];  -- all of the document
  _full_name text;
  _passing ml_rag.hit[];
  _wanted ml_rag.hit;
  _hits ml_rag.hit[];
  _steps ml_rag.why_step[] := '{}';
  _beside ml_rag.why_step;
BEGIN
  IF options -> 'n_citations' = '0' THEN
    PERFORM ml_rag._bad_option('n_citations', '0', '1 to 100: without retrieval nothing is searched');
  END IF;
  _found := ml_rag._retrieve_all(ml_rag._request(query, options, call));
  _request := _found.request;
  _retrieval := _found.retrieval;

  _segments := ml_rag._segments_like(_request, _retrieval.stores, ml_rag._without_filters(_request.options), document,
    segment_number, page);
  IF cardinality(_segments) = 0 THEN
    _known := ml_rag._segments_like(_request, _retrieval.stores, ml_rag._without_filters(_request.options), document, NULL, NULL);
    IF cardinality(_known) = 0 THEN
      -- a name without its folders, which the only document has that is named so
      SELECT min(d ->> 0) INTO _full_name FROM jsonb_array_elements(ml_rag._list_documents(_retrieval.stores, false)) AS d
      WHERE regexp_replace(d ->> 0, '^.*[/\\]', '') = document HAVING count(DISTINCT d ->> 0) = 1;
    END IF;
    IF _full_name IS NOT NULL THEN
      document := _full_name;
      _segments := ml_rag._segments_like(_request, _retrieval.stores, ml_rag._without_filters(_request.options), document,
        segment_number, page);
      _known := ml_rag._segments_like(_request, _retrieval.stores, ml_rag._without_filters(_request.options), document, NULL, NULL);
    END IF;
  END IF;
  IF cardinality(_segments) = 0 THEN
    RETURN ARRAY[ml_rag._why_unknown(_retrieval.stores, document, _known, page)];
  END IF;
  _passing := _segments;
  IF ml_rag._is_filtered(_request.options) THEN
    _passing := ml_rag._segments_like(_request, _retrieval.stores, _request.options, document, segment_number, page);
    _steps := ARRAY[CASE WHEN cardinality(_passing) = 0
      THEN ml_rag._why_filtered(_request, _retrieval.stores, document, segment_number, page)
      ELSE ROW('filter', NULL, true, NULL, NULL, NULL, 'It passes the filters.', NULL)::ml_rag.why_step END];
  END IF;
  IF cardinality(_passing) > 0 AND _retrieval.method = 'document_order' THEN
    RETURN _steps || ROW('read', NULL, true, NULL, NULL, NULL, 'The document is read as a whole.', NULL)::ml_rag.why_step;
  END IF;

  _hits := _retrieval.ranked;
  -- of a document the segment that comes farthest
  SELECT s.* INTO _wanted FROM unnest(CASE WHEN cardinality(_passing) > 0 THEN _passing ELSE _segments END) AS s
  ORDER BY ml_rag._place_of(_retrieval.hits, s), ml_rag._place_of(_hits, s), s.segment_number LIMIT 1;
  IF cardinality(_passing) > 0 THEN
    _steps := _steps || ml_rag._why_ranked(_request, _retrieval, _hits, _wanted);
  END IF;
  IF NOT _steps[cardinality(_steps)].is_kept THEN
    _beside := ml_rag._why_beside(_request, _retrieval, _wanted);
    _steps := _steps || CASE WHEN _beside.stage IS NOT NULL THEN ARRAY[_beside] ELSE '{}' END;
  END IF;
  RETURN _steps;
END
$$;

CREATE FUNCTION ml_rag.why_not(query text, options jsonb, document text, segment_number bigint DEFAULT NULL,
  page integer DEFAULT NULL)
RETURNS SETOF ml_rag.why_step
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: what became of a segment in a call
DECLARE
  _call integer := ml_rag._begin('ml_rag.why_not');
  _steps ml_rag.why_step[];
BEGIN
  IF coalesce(document, '') !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the name of the document is empty',
      HINT = 'Name it as citations do: SELECT * FROM ml_rag.why_not(''What is AutoML?'', ''{}'', ''/docs/automl.pdf'', 3).';
  END IF;
  _steps := ml_rag._follow(query, ml_rag._parse_rag_options(options), document, segment_number, page, _call);
  PERFORM ml_rag._end(_call);
  RETURN QUERY SELECT s.* FROM unnest(_steps) AS s;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  PERFORM ml_rag._end(_call, SQLSTATE);
@RAISE@
END
$$;
COMMENT ON FUNCTION ml_rag.why_not(text, jsonb, text, bigint, integer) IS
$$why a call with this question and these options does not cite a segment, or cites it: one row a stage, in their order
document: its name, as the store has it and citations show it, or without its folders where one document only has it.
segment_number: null = the segment of the document that comes farthest. page: only segments of it, as key page of the
metadata has it. The call is made again, without an answer. is_kept: whether the segment goes on to the next stage; of several
arms one that keeps it is enough. The last row is the stage that drops it, with the option that would let it in as hint, or citations; it is
expand where the text is cited all the same, as that of a neighbour. rank, distance, score: after that stage; score is BM25 in
keyword, what a function gave, and 0-1 in fuse and rerank. Of a document that the caller may not see, the rows are those of one
that is not there.
What fits the model's context is not told: see retrieval_info. Errors: as ml_rag_search, but for nothing found; 22023 no name;
54000 a document of more than 10000 segments.$$;
