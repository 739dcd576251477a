-- rank: ranking as a service: records the caller hands over, by their relevance to a query. No table is read.

CREATE FUNCTION ml_rag._bad_record(place integer, id text, detail text, hint text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the one form of every complaint about a record
BEGIN
  RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('record %s cannot be ranked', place),
    DETAIL = concat(CASE WHEN $2 IS NOT NULL THEN format('Its id is "%s": ', left($2, 100)) END, $3),
    HINT = $4;
END
$$;

CREATE FUNCTION ml_rag._rank_options(options jsonb, n integer) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: options of ml_rank for n records, with their defaults; also as Google's Ranking API spells them
DECLARE
  _options jsonb := options;
  _key record;
BEGIN
  FOR _key IN SELECT k.google, k.name FROM (VALUES
      ('topN', 'top_n'), ('ignoreRecordDetailsInResponse',
        'ignore_record_details_in_response')) AS k (google, name) LOOP
    CONTINUE WHEN jsonb_typeof(_options) IS DISTINCT FROM 'object' OR NOT _options ? _key.google;
    IF _options ? _key.name THEN
      PERFORM ml_rag._bad_option(_key.google, _options -> _key.google,
        format('none together with "%s"', _key.name));
    END IF;
    _options := _options - _key.google || jsonb_build_object(_key.name, _options -> _key.google);
  END LOOP;
  _options := ml_rag.parse_options('ml_rank', _options);
  IF n > 200 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'too many records',
      DETAIL = format('%s records; a call ranks at most 200.', n), HINT = 'Rank the most promising 200.';
  END IF;
  -- semantic-ranker-512@latest, semantic-ranker-default-004 and the like: models of Google's
  RETURN CASE WHEN starts_with(_options ->> 'model', 'semantic-ranker-') THEN _options - 'model'
    ELSE _options END;
END
$$;

CREATE FUNCTION ml_rag._rank(
  query text, texts text[], options jsonb, call integer, OUT model text, OUT places integer[],
    OUT scores double precision[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: places in texts by descending relevance, at most top_n, with their scores, and the model that
-- ranked them
-- call: what ml_rag._begin has returned
DECLARE
  _configuration regconfig := ml_rag.text_search_configuration(options ->> 'language')::regconfig;
  _scores double precision[];
BEGIN
  model := options ->> 'model';
  IF model IS NULL THEN
    model := ml_rag._get_setting('rerank_model_id');
    -- the model server knows it and lacks its files
    IF model <> 'hybrid' AND jsonb_path_exists(ml_rag._python('get', '["/v1/models"]'),
      '$.data[*] ? (@.id == $id && @.available == false)', jsonb_build_object('id', model)) THEN
      model := 'hybrid';
    END IF;
  END IF;
  PERFORM ml_rag._stage(call, 'rerank', model);
  _scores := ml_rag._relevance(query, texts, model, _configuration);
  SELECT coalesce(array_agg(s.place ORDER BY s.score DESC, s.place), '{}'),
    coalesce(array_agg(s.score ORDER BY s.score DESC, s.place), '{}')
  INTO places, scores
  FROM (
    SELECT u.place::integer, u.score FROM unnest(_scores) WITH ORDINALITY AS u (score, place)
    ORDER BY u.score DESC, u.place LIMIT (options ->> 'top_n')::integer
  ) AS s;
END
$$;

CREATE FUNCTION @extschema@.ml_rank(query text, records jsonb, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: records as JSON, in and out
DECLARE
  _call integer := ml_rag._begin('ml_rank');
  _options jsonb;
  i integer;
  _record jsonb;
  _key text;
  _texts text[] := '{}';
  _records jsonb[] := '{}';
  _ranked record;
BEGIN
  _options := ml_rag._rank_options($3,
    CASE jsonb_typeof(records) WHEN 'array' THEN jsonb_array_length(records) END);
  IF records IS NULL OR jsonb_typeof(records) <> 'array' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the records are not an array',
      DETAIL = format('Got %s.', coalesce(jsonb_typeof(records), 'NULL')),
      HINT = 'Records are a JSON array such as [{"id": "1", "title": "a title", "content": "a text"}].';
  END IF;
  FOR i, _record IN
    SELECT e.place, e.value FROM jsonb_array_elements(records) WITH ORDINALITY AS e (value, place)
    ORDER BY e.place
  LOOP
    IF jsonb_typeof(_record) <> 'object' THEN
      PERFORM ml_rag._bad_record(i, NULL, format('It is not an object but a JSON %s.', jsonb_typeof(_record)),
        'A record is an object: {"id": "1", "title": "a title", "content": "a text"}.');
    END IF;
    IF jsonb_typeof(_record -> 'id') IS DISTINCT FROM 'string' OR _record -> 'id' = '""' THEN
      PERFORM ml_rag._bad_record(i, _record ->> 'id', 'An id is a text that is not empty.',
        'Give each record an "id", a text such as "1".');
    END IF;
    _key := (SELECT min(k) FROM jsonb_object_keys(_record) AS k
      WHERE k NOT IN ('id', 'title', 'content', 'score'));
    IF _key IS NOT NULL THEN
      PERFORM ml_rag._bad_record(i, _record ->> 'id', format('It has the unknown key "%s".', left(_key, 100)),
        'A record has "id", "title" and "content"; a "score" is ignored.');
    END IF;
    FOREACH _key IN ARRAY '{title,content}'::text[] LOOP
      IF jsonb_typeof(_record -> _key) NOT IN ('string', 'null') THEN
        PERFORM ml_rag._bad_record(i, _record ->> 'id', format('Its %s is not a text.', _key),
          'Title and content are texts, or left out.');
      END IF;
    END LOOP;
    _texts[i] := concat_ws(E'\n', _record ->> 'title', _record ->> 'content');
    IF _texts[i] !~ '[^[:space:]]' THEN
      PERFORM ml_rag._bad_record(i, _record ->> 'id', 'It has neither a title nor a content.',
        'Give at least one of the two.');
    END IF;
    _records[i] := CASE WHEN (_options -> 'ignore_record_details_in_response')::boolean
      THEN jsonb_build_object('id', _record -> 'id') ELSE jsonb_strip_nulls(_record - 'score') END;
  END LOOP;
  SELECT r.* INTO _ranked FROM ml_rag._rank(query, _texts, _options, _call) AS r;
  PERFORM ml_rag._end(_call);
  RETURN jsonb_build_object('model', _ranked.model, 'records', coalesce((
    SELECT to_jsonb(array_agg(_records[r.place] || jsonb_build_object('score', r.score) ORDER BY r.rank))
    FROM unnest(_ranked.places, _ranked.scores) WITH ORDINALITY AS r (place, score, rank)), '[]'));
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rank(text, jsonb, jsonb) IS
$$ranks records by their relevance to a query: ml_rank('Why is the sky blue?', '[{"id": "1", "content": "…"}, …]')
records: at most 200 objects {"id", "title", "content"}, id a text, at least one of title and content. Query,
title and content together are cut at the model's max_tokens (512). Returns {"records": [{"id", "score",
"title", "content"}], "model"}, best first, score 0-1, equal ones in the order given. Reads no table; works in
a read-only transaction. Options: SELECT * FROM ml_rag.option WHERE routine = 'ml_rank'; also as Google's
Ranking API spells them (topN, ignoreRecordDetailsInResponse), and its models semantic-ranker-… stand for the
default model.
Errors: 22023 empty query, bad record or option, unknown model or model of another task; 55000 the named model
is not available; 08006 model server; 53300 its queue is full; 57014 cancelled; 38000 the model failed.$$;

CREATE FUNCTION @extschema@.ml_rank_rows(query text, ids text[], texts text[], options jsonb DEFAULT NULL)
RETURNS TABLE (rank integer, id text, score double precision)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 100 SET search_path FROM CURRENT AS $$
-- purpose: the same for SQL, arrays in and rows out
DECLARE
  _call integer := ml_rag._begin('ml_rank_rows');
  _options jsonb;
  _ids text[];
  _texts text[];
BEGIN
  -- as they come out of unnest: whatever the bounds of the arrays were
  _ids := ARRAY(SELECT u.id FROM unnest($2) WITH ORDINALITY AS u (id, place) ORDER BY u.place);
  _texts := ARRAY(SELECT u.text FROM unnest($3) WITH ORDINALITY AS u (text, place) ORDER BY u.place);
  _options := ml_rag._rank_options($4, cardinality(ids));
  IF ids IS NULL OR texts IS NULL OR cardinality(ids) <> cardinality(texts) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'ids and texts differ in length',
      DETAIL = format('%s ids, %s texts.', coalesce(cardinality(ids)::text, 'NULL'),
        coalesce(cardinality(texts)::text, 'NULL')),
      HINT = 'Give one text for each id.';
  END IF;
  FOR i IN 1..cardinality(_ids) LOOP
    IF coalesce(_ids[i], '') = '' THEN
      PERFORM ml_rag._bad_record(i, NULL, 'Its id is null or empty.', 'Give each text an id.');
    END IF;
    IF coalesce(_texts[i], '') !~ '[^[:space:]]' THEN
      PERFORM ml_rag._bad_record(i, _ids[i], 'Its text is null or empty.', 'Leave that text out.');
    END IF;
  END LOOP;
  RETURN QUERY
    SELECT r.rank::integer, _ids[r.place], r.score
    FROM ml_rag._rank(query, _texts, _options, _call) AS ranked,
      unnest(ranked.places, ranked.scores) WITH ORDINALITY AS r (place, score, rank)
    ORDER BY r.rank;
  PERFORM ml_rag._end(_call);
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_rank_rows(text, text[], text[], jsonb) IS
$$ranks texts by their relevance to a query, as rows (rank, id, score), best first
ids[i] belongs to texts[i]; at most 200 of them, none null or empty. Options, models and errors: see
ml_rank.$$;
