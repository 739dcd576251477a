-- tune: which settings of an approximate index find what an exact search finds.

CREATE FUNCTION ml_rag._tuned_index(store ml_rag.store, distance_metric text, OUT method name,
  OUT quantization text, OUT lists integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the approximate index that a search by that metric reads: hnsw or ivfflat, halfvec or binary if it
-- is of smaller vectors, the lists of ivfflat; null without one  Reads: the catalog, ml_rag.metric
DECLARE
  _parts oid[] := ml_rag._parts(store.relation);
BEGIN
  quantization := ml_rag._quantization(store, distance_metric);
  SELECT a.amname,
    max(coalesce(substring(array_to_string(i.reloptions, ',') FROM 'lists=([0-9]+)')::integer, 100))
  INTO method, lists
  FROM ml_rag.metric AS m
  JOIN pg_index AS x ON x.indrelid = ANY (_parts) AND x.indisvalid AND x.indpred IS NULL
  JOIN pg_class AS i ON i.oid = x.indexrelid
  JOIN pg_am AS a ON a.oid = i.relam AND a.amname IN ('hnsw', 'ivfflat')
  JOIN pg_opclass AS o ON o.oid = x.indclass[0]
  LEFT JOIN pg_attribute AS c ON c.attrelid = x.indrelid AND c.attnum = x.indkey[0]
  WHERE m.name = distance_metric
    AND CASE WHEN quantization IS NULL THEN c.attname = store.segment_embedding ELSE x.indkey[0] = 0 END
    AND o.opcname = CASE quantization WHEN 'binary' THEN 'bit_hamming_ops'
      ELSE format('%s_%s_ops', coalesce(quantization, store.embedding_type), m.operator_class) END
  GROUP BY a.amname ORDER BY a.amname LIMIT 1;
END
$$;

CREATE FUNCTION ml_rag._tune_index(relation regclass, options jsonb, path text)
RETURNS TABLE (ef_search integer, probes integer, rescore integer, recall float8, milliseconds float8,
  is_kept boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: ml_rag.tune_index; path is the caller's search_path
#variable_conflict use_column
DECLARE
  _call integer := ml_rag._begin('ml_rag.tune_index');
  _name text;
  _own jsonb;
  _goal float8;
  _itself integer;
  _store ml_rag.store;
  _index record;
  _request ml_rag.request;
  _given jsonb;
  _vectors @vector@.vector[];
  _settings jsonb[];
  _began timestamptz;
  _found record;
  _segments text[];
  _of integer[];
  _times float8[];
  _measured jsonb := '[]';
  _nearest jsonb[];
  _kept jsonb;
  _rows bigint;
BEGIN
  _own := ml_rag.parse_options('tune_index', options);
  _goal := (_own ->> 'recall')::float8;
  -- a segment that is asked with is the nearest to itself, which says nothing
  _itself := CASE WHEN _own ? 'questions' THEN 0 ELSE 1 END;
  PERFORM ml_rag._hold(ARRAY[relation::oid]);
  _name := ml_rag._full_name(relation);
  _store := (ml_rag._discover(jsonb_build_object('vector_store', jsonb_build_array(_name))))[1];
  IF _store IS NULL THEN
    PERFORM ml_rag._no_store(jsonb_build_object('vector_store', jsonb_build_array(_name)));
  END IF;
  IF (_own -> 'keep')::boolean THEN
    PERFORM ml_rag._check_keeper(_store, 'settings of its index');
  END IF;
  _index := ml_rag._tuned_index(_store, _own ->> 'distance_metric');
  IF _index.method IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('%s has no approximate index for the metric %s', _store.vector_store,
        _own ->> 'distance_metric'),
      DETAIL = 'Searches compare all rows, and so find everything.',
      HINT = format('SELECT ml_rag.index_store(%L) builds an index.', _store.vector_store);
  END IF;
  _request := jsonb_populate_record(ml_rag._request('?', ml_rag._check_rag_options(jsonb_build_object(
    'vector_store', jsonb_build_array(_name), 'n_citations', (_own ->> 'n_citations')::integer + _itself,
    'distance_metric', _own -> 'distance_metric', 'retrieval_options', '{"segment_overlap": 0}'::jsonb))),
      '{"max_distance": null}');
  PERFORM ml_rag._progress(_call, _name, 'reading questions');
  IF _own ? 'questions' THEN
    _given := ml_rag._read_questions(_own ->> 'questions', path);
    IF _given -> 0 ? 'query_embedding' THEN
      _vectors := ARRAY(SELECT ml_rag._vector(r.value -> 'query_embedding')
                        FROM jsonb_array_elements(_given) WITH ORDINALITY AS r (value, place)
                        ORDER BY r.place);
    ELSE
      _given := ml_rag._check_questions(_given, ml_rag.parse_options('evaluation_columns', NULL), '{}');
      _vectors := ml_rag._embed_texts(ARRAY(SELECT r.value ->> 'question'
        FROM jsonb_array_elements(_given) WITH ORDINALITY AS r (value, place) ORDER BY r.place),
          _store.embed_model_id);
    END IF;
  ELSE -- segments taken at random
    EXECUTE format('SELECT array_agg(s.vector ORDER BY s.vector)
        FROM (SELECT t.%1$I::@vector@.vector AS vector FROM %2$s AS t
        WHERE t.%1$I IS NOT NULL AND t.%3$I IS NOT NULL ORDER BY random() LIMIT $1) AS s',
      _store.segment_embedding, ml_rag._rows_of(_store), _store.segment) INTO _vectors
        USING (_own ->> 'sample')::bigint;
  END IF;
  IF _vectors IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'P0002', MESSAGE = format('%s has no segments', _store.vector_store),
      HINT = 'Load documents, then call it again.';
  END IF;
  -- the cheapest first. A binary index orders by signs alone, so what hnsw keeps is scored again by the whole
  -- vectors, and past 1000, which is the most that it keeps, more
  _settings := CASE WHEN _index.method = 'ivfflat' THEN ARRAY(
      SELECT jsonb_build_object('probes', p)
      FROM unnest('{1,2,3,5,10,20,30,50,100,200,300,500,1000,2000,3000,5000,10000,20000}'::integer[]
        || _index.lists) AS p
      WHERE p <= _index.lists GROUP BY p ORDER BY p)
    ELSE ARRAY(
      SELECT jsonb_strip_nulls(jsonb_build_object('ef_search', least(e, 1000), 'rescore',
        CASE _index.quantization WHEN 'binary' THEN e END))
      FROM unnest('{40,60,80,100,150,200,300,400,600,800,1000,2000,4000,8000}'::integer[]) AS e
      WHERE e <= 1000 OR _index.quantization = 'binary' ORDER BY e) END;
  -- all exact searches first: they bring the table into memory
  FOR i IN 0..cardinality(_settings) LOOP
    _times := '{}';
    _of := '{0,0}';
    FOR j IN 1..cardinality(_vectors) LOOP
      PERFORM ml_rag._progress(_call, _name,
        CASE i WHEN 0 THEN 'searching exactly' ELSE 'searching the index' END,
        greatest(i - 1, 0) * cardinality(_vectors) + j - 1,
        CASE i WHEN 0 THEN 1 ELSE cardinality(_settings) END * cardinality(_vectors));
      _request := jsonb_populate_record(_request, jsonb_build_object('query_embedding', _vectors[j]::text,
        'options', _request.options || jsonb_build_object('index_options',
          CASE i WHEN 0 THEN '{"exact": true}' ELSE _settings[i] END)));
      _began := clock_timestamp();
      _found := ml_rag._retrieve(_request);
      PERFORM ml_rag._refuse_other_embeddings(ARRAY[_store], (_found.retrieval).stores);
      _times := _times || ml_rag._milliseconds(_began);
      -- each segment by its hash
      _segments := ARRAY(
        SELECT md5(concat_ws('|', h.document_key, h.segment_number, md5(h.document_name), md5(h.segment)))
        FROM unnest((_found.retrieval).hits) WITH ORDINALITY AS h ORDER BY h.ordinality);
      IF i = 0 THEN
        _nearest[j] := to_jsonb(_segments);
      END IF;
      SELECT ARRAY[_of[1] + count(*) FILTER (WHERE e.value = ANY (_segments)), _of[2] + count(*)] INTO _of
      FROM jsonb_array_elements_text(_nearest[j]) WITH ORDINALITY AS e (value, place) WHERE e.place > _itself;
    END LOOP;
    _measured := _measured || (CASE i WHEN 0 THEN '{}' ELSE _settings[i] END || jsonb_build_object('place', i,
      'recall', round(_of[1]::numeric / greatest(_of[2], 1), 4),
      'milliseconds', (SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY t) FROM unnest(_times) AS t)));
  END LOOP;
  SELECT m.value INTO _kept FROM jsonb_array_elements(_measured - 0) AS m
  ORDER BY (m.value ->> 'recall')::float8 < _goal,
    CASE WHEN (m.value ->> 'recall')::float8 < _goal THEN -(m.value ->> 'recall')::float8 END,
      (m.value ->> 'place')::integer LIMIT 1;
  IF (_kept ->> 'recall')::float8 < _goal THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('no setting of the index of %s reaches a recall of %s',
        _store.vector_store, _goal),
      DETAIL = format('The best one finds %s of the nearest segments.', _kept ->> 'recall'),
      HINT = 'Build it with greater "m" and "ef_construction", or without quantization: drop the index, then '
        'call'
        ' ml_rag.index_store with option "index".';
  END IF;
  IF (_own -> 'keep')::boolean THEN
    EXECUTE format('SELECT count(t.%I) FROM %s AS t', _store.segment_embedding,
      ml_rag._rows_of(_store)) INTO _rows;
    PERFORM ml_rag._mark(_store.relation, _store.segment_embedding, jsonb_build_object(
      'EF_SEARCH', _kept -> 'ef_search', 'PROBES', _kept -> 'probes',
      'RESCORE', _kept -> 'rescore', 'RECALL', _kept -> 'recall', 'TUNED_ROWS', _rows));
  END IF;
  PERFORM ml_rag._end(_call);
  RETURN QUERY
    SELECT m.ef_search, m.probes, m.rescore, m.recall, m.milliseconds,
      (_own -> 'keep')::boolean AND m.place = (_kept ->> 'place')::integer
    FROM jsonb_to_recordset(_measured) AS m (place integer, ef_search integer, probes integer,
      rescore integer, recall float8,
      milliseconds float8) ORDER BY m.place;
@CATCH_AND_END@
END
$$;

CREATE FUNCTION ml_rag.tune_index(store regclass, options jsonb DEFAULT NULL)
RETURNS TABLE (ef_search integer, probes integer, rescore integer, recall float8, milliseconds float8,
  is_kept boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 15 AS $$
-- purpose: settings of an index that find what is there
-- No SET clause: the names in the query are the caller's. So every name here is qualified and no operator is
-- used.
BEGIN
  RETURN QUERY SELECT t.* FROM ml_rag._tune_index(store, options,
    pg_catalog.current_setting('search_path')) AS t;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.tune_index(regclass, jsonb) IS
$$measures what the index of a vector store finds, and keeps a setting: SELECT * FROM ml_rag.tune_index('handbook')
Each question is searched exactly, then with settings from cheap to dear. The cheapest that reaches option
"recall" is kept in the comment of the vector column, if none does the best, with a WARNING; searches of the
store take it from then on, unless "index_options" or the session set another. For the table's owner; with
"keep": false for all who may search it. Options: SELECT * FROM ml_rag.option WHERE routine = 'tune_index'.
Returns a row for the exact search, in which the settings are null, and one for each setting. recall: share of
the nearest segments that it finds (0-1). milliseconds: median of a search, without embedding. is_kept: true
for the setting kept. Measure again when the table has doubled, which explain and ml-rag doctor report, or
when its index is another one.
Errors: 22023 bad option; 42501 not the owner; 55000 no approximate index, no marker, or the store got another
default embedding meanwhile; P0002 no vector store, or no segments; 57014; those of the query with
questions.$$;
