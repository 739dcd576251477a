-- 32_keyword: the best segments over the stores by their words (BM25).

CREATE FUNCTION ml_rag.text_search_configuration(language text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the text search configuration for a language: code (en, de-AT) or name; null = the database's default
DECLARE
  _name text;
BEGIN
  IF language IS NULL THEN
    RETURN (SELECT format('%I.%I', n.nspname, c.cfgname) FROM pg_ts_config AS c
      JOIN pg_namespace AS n ON n.oid = c.cfgnamespace WHERE c.oid = get_current_ts_config());
  END IF;
  _name := (
    SELECT format('pg_catalog.%I', c.cfgname)
    FROM (SELECT lower(substring(language FROM '^[A-Za-z]+')) AS code) AS l
    LEFT JOIN (VALUES
      ('ar', 'arabic'), ('ca', 'catalan'), ('da', 'danish'), ('de', 'german'), ('el', 'greek'), ('en', 'english'),
      ('es', 'spanish'), ('et', 'estonian'), ('eu', 'basque'), ('fi', 'finnish'), ('fr', 'french'), ('ga', 'irish'),
      ('hi', 'hindi'), ('hu', 'hungarian'), ('hy', 'armenian'), ('id', 'indonesian'), ('it', 'italian'),
      ('lt', 'lithuanian'), ('nb', 'norwegian'), ('ne', 'nepali'), ('nl', 'dutch'), ('nn', 'norwegian'),
      ('no', 'norwegian'), ('pt', 'portuguese'), ('ro', 'romanian'), ('ru', 'russian'), ('sr', 'serbian'),
      ('sv', 'swedish'), ('ta', 'tamil'), ('tr', 'turkish'), ('yi', 'yiddish')
    ) AS m (code, name) ON m.code = l.code
    JOIN pg_ts_config AS c ON c.cfgnamespace = 'pg_catalog'::regnamespace AND c.cfgname = coalesce(m.name, l.code)
  );
  IF _name IS NULL AND language !~* '^[a-z]{2,3}([-_][a-z0-9]+)*$' THEN
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('the language "%s" is not known', left(language, 100)),
      DETAIL = 'Words are compared as they stand, without their endings taken off.',
      HINT = 'Take a code such as en or pt-BR, or the name of a text search configuration such as english.';
  END IF;
  RETURN coalesce(_name, 'pg_catalog.simple');
END
$$;
COMMENT ON FUNCTION ml_rag.text_search_configuration(text) IS
$$the text search configuration that keyword search takes for a language: en = english, de = german, …
language: a code (en, pt-BR) or a name (english); null = default_text_search_config; one that PostgreSQL has no
configuration for, such as zh, ja or ko, = simple, with a warning where it looks like no code. Returns the name with its
schema.$$;

CREATE FUNCTION ml_rag._lexemes(configuration regconfig, segment text) RETURNS TABLE (lexeme text, n bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
-- a word of more than 2 kB is left out, and that is no news to whoever writes a row
SET client_min_messages = 'warning'
AS $$
-- purpose: words of a text by its configuration, each with its number, whatever the length
-- A tsvector keeps 255 positions of a lexeme, up to position 16383, and has at most 1 MB: what does not fit is cut at
-- blanks, and where that does not help (a,a,a,…) after 500 characters, which is less than 255 words.
-- Calls: ml_rag._lexemes
DECLARE
  _vector tsvector;
  _small integer;
BEGIN
  IF octet_length(segment) <= 500000 THEN
    _vector := to_tsvector(configuration, segment);
    IF length(segment) <= 500 OR NOT EXISTS (
      SELECT FROM unnest(_vector) AS u
      WHERE cardinality(u.positions) > 254 OR u.positions[cardinality(u.positions)] > 16382
    ) THEN
      RETURN QUERY SELECT u.lexeme, cardinality(u.positions)::bigint FROM unnest(_vector) AS u;
      RETURN;
    END IF;
  END IF;
  -- once and not for each piece: to count characters takes as long as there are
  _small := least(length(segment), 10000);
  RETURN QUERY
    SELECT l.lexeme, sum(l.n)::bigint
    FROM (
      -- not by a regular expression, which takes 20 µs for each word
      SELECT string_agg(w.word, ' ' ORDER BY w.place) AS piece
      FROM string_to_table(translate(segment, E'\t\n\u000b\f\r', '     '), ' ') WITH ORDINALITY AS w (word, place)
      GROUP BY w.place / 200
    ) AS p
    CROSS JOIN LATERAL (
      SELECT length(p.piece) AS length, length(p.piece) < _small AS is_small,
        -- ten parts, which are cut again, down to 500: a part from far behind is found by counting characters
        500 * ceil(greatest(length(p.piece), 5000) / 5000.0)::integer AS step
    ) AS c
    CROSS JOIN LATERAL (
      SELECT p.piece AS part WHERE c.is_small
      UNION ALL
      SELECT substr(p.piece, s.first, c.step) FROM generate_series(1, c.length, c.step) AS s (first) WHERE NOT c.is_small
    ) AS s
    CROSS JOIN LATERAL ml_rag._lexemes(configuration, s.part) AS l
    GROUP BY l.lexeme;
END
$$;

CREATE FUNCTION ml_rag._tokens(configuration regconfig, segment text, OUT tokens jsonb, OUT length integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
SET client_min_messages = 'warning'
AS $$
-- purpose: {token: number} of a text, and how many there are: what is indexed, and what is asked for
-- Chinese, Japanese and Korean have no blanks between words, and no parser of PostgreSQL knows where they end: runs of
-- their characters become pairs (東京都 = 東京, 京都), a character alone stays itself, in whatever configuration.
-- Calls: ml_rag._lexemes
DECLARE
  _scripts CONSTANT text := '[\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u312f\u3130-\u318f\u31a0-\u31ff\u3400-\u4dbf'
    '\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]+';
  _text text := segment;
  _words text;
  _is_whole boolean;
BEGIN
  -- PostgreSQL's parser takes the hyphen of AX-4411 and 2024-01-31 for a sign, and 4411 would not find -4411
  IF strpos(_text, '-') > 0 THEN
    FOR digit IN 0..9 LOOP
      _text := replace(_text, '-' || digit, ' ' || digit);
    END LOOP;
  END IF;
  _words := _text;
  IF octet_length(_text) <> length(_text) THEN
    -- letters of full and half width are the same letters
    IF _text ~ '[\uff01-\uffef]' AND getdatabaseencoding() = 'UTF8' THEN
      _text := normalize(_text, NFKC);
    END IF;
    _words := regexp_replace(_text, _scripts, ' ', 'g');
  END IF;
  IF _words = _text AND octet_length(_words) <= 500000 THEN
    SELECT coalesce(jsonb_object_agg(u.lexeme, cardinality(u.positions)), '{}'), coalesce(sum(cardinality(u.positions)), 0),
      coalesce(bool_and(cardinality(u.positions) < 255 AND u.positions[cardinality(u.positions)] < 16383), true)
    INTO tokens, length, _is_whole FROM unnest(to_tsvector(configuration, _words)) AS u;
    IF _is_whole THEN
      RETURN;
    END IF;
  END IF;
  IF _words = _text THEN
    SELECT coalesce(jsonb_object_agg(l.lexeme, l.n), '{}'), coalesce(sum(l.n), 0) INTO tokens, length
    FROM ml_rag._lexemes(configuration, _words) AS l;
  ELSE
    SELECT coalesce(jsonb_object_agg(t.token, t.n), '{}'), coalesce(sum(t.n), 0) INTO tokens, length
    FROM (
      SELECT a.token, sum(a.n) AS n
      FROM (
        SELECT l.lexeme AS token, l.n FROM ml_rag._lexemes(configuration, _words) AS l
        UNION ALL
        SELECT concat(c.one, c.two), 1
        FROM regexp_matches(_text, _scripts, 'g') AS m (run)
        CROSS JOIN LATERAL string_to_array(m.run[1], NULL) AS s (letters)
        CROSS JOIN LATERAL unnest(s.letters, s.letters[2:]) AS c (one, two)
        WHERE c.two IS NOT NULL OR cardinality(s.letters) = 1
      ) AS a
      GROUP BY a.token
    ) AS t;
  END IF;
END
$$;

CREATE FUNCTION ml_rag.keyword_tokens(configuration regconfig, segment text) RETURNS TABLE (token text, n integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- Calls: ml_rag._tokens
BEGIN
  IF NOT EXISTS (SELECT FROM pg_ts_config AS c WHERE c.oid = configuration) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'there is no such text search configuration',
      DETAIL = format('Got %s.', coalesce(configuration::text, 'null')), HINT = 'In psql, \dF lists them.';
  END IF;
  RETURN QUERY SELECT t.key, t.value::integer FROM jsonb_each_text((ml_rag._tokens(configuration, segment)).tokens) AS t
    ORDER BY t.key COLLATE "C";
END
$$;
COMMENT ON FUNCTION ml_rag.keyword_tokens(regconfig, text) IS
$$the tokens that keyword search sees in a text or a query, and how often: keyword_tokens('english', 'Two words')
The words as the text search configuration gives them; Chinese, Japanese and Korean in pairs of characters. Any text is
safe: nothing in it is an operator. Errors: 22023 no such configuration.$$;

CREATE FUNCTION ml_rag._numpy(OUT version text, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
# purpose: the version of numpy that keyword search runs with, or why it cannot
@BACKEND@
return backend.numpy_version(plpy)
$$;

CREATE FUNCTION ml_rag._keyword_scores(store oid, segment name, key name[], terms text[], weights integer[], n integer,
  OUT candidates ml_rag.keyword_candidate[], OUT error jsonb)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- planning its statements anew for each query takes longer than all the rest
SET plan_cache_mode = force_generic_plan
AS $$
# Stable, so that all that is read is of one moment: a run may be replaced by another at any time.
@BACKEND@
return backend.keyword_scores(plpy, store, segment, key, terms, weights, n)
$$;

CREATE FUNCTION ml_rag._run_keyword(
  store ml_rag.store, index ml_rag.keyword_index, terms text[], weights integer[], candidates integer,
  query_embedding vector, distance_metric text, n integer, condition text, arguments text[],
  OUT hits ml_rag.hit[], OUT is_all boolean
)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the n best of the candidates that the condition leaves; is_all: whether there are no further candidates
-- Calls: ml_rag._keyword_scores, ml_rag._raise, ml_rag._hit_columns, ml_rag._relation_name  Reads: the store and its index, as the caller
-- Stable for the same reason: candidates and rows are of one moment.
DECLARE
  _found record;
  _columns record := ml_rag._hit_columns(store, distance_metric, 's.score');
BEGIN
  SELECT s.candidates, s.error INTO _found
  FROM ml_rag._keyword_scores(index.store, index.segment, index.key, terms, weights, candidates) AS s;
  PERFORM ml_rag._raise(_found.error) WHERE _found.error IS NOT NULL;
  is_all := cardinality(_found.candidates) < candidates;
  EXECUTE concat(
    'SELECT array_agg(ROW(h.*)::ml_rag.hit) FROM (SELECT ', _columns.of_hit, ' FROM (SELECT ', _columns.of_row,
    ', c.score AS score FROM unnest($4) AS c JOIN ONLY ', ml_rag._relation_name(index.store), ' AS t ON ', (
      SELECT string_agg(format('t.%I = (c.key[%s])::%s', a.attname, k.place, format_type(a.atttypid, NULL)), ' AND ')
      FROM unnest(index.key) WITH ORDINALITY AS k (name, place)
      JOIN pg_attribute AS a ON a.attrelid = index.store AND a.attname = k.name AND NOT a.attisdropped),
    format(' WHERE t.%I IS NOT NULL', store.segment), condition,
    ' ORDER BY c.score DESC, ', _columns.place, ' LIMIT $2) AS s) AS h')
  INTO hits USING query_embedding, n, arguments, _found.candidates;
  hits := coalesce(hits, '{}');
END
$$;

CREATE FUNCTION ml_rag._keyword(
  stores ml_rag.store[], query text, n integer, query_embedding vector, distance_metric text, options jsonb,
  explain boolean, OUT hits ml_rag.hit[], OUT explained jsonb, OUT skipped text[]
)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: ml_rag.keyword as an array and, where asked for, how each store was searched: {vector_store: {…}}. skipped:
-- stores that were left out; null = none
-- Calls: ml_rag._keyword_index, ml_rag._untrusted_last, ml_rag._share, ml_rag._limit_wait, ml_rag._untrusted_condition, ml_rag._failure,
-- ml_rag._warn_of_failures, ml_rag._explain_failures, ml_rag._warn_of_unknown_keys, ml_rag.filter, ml_rag._tokens, ml_rag._run_keyword
-- Reads: the stores and their indexes, as the caller
DECLARE
  -- most calls have no filter: those need not ask store by store
  _filters boolean := coalesce(
    options ?| '{document_name,exclude_document_name,filters,required_keywords,excluded_keywords}', false);
  _store ml_rag.store;
  _index ml_rag.keyword_index;
  _condition text := '';
  _arguments text[];
  _terms text[];
  _weights integer[];
  _candidates integer;
  _part record;
  _all ml_rag.hit[] := '{}';
  _searched boolean := false;
  _why text;
  _is_untrusted boolean;
  _ordered ml_rag.store[];
  _untrusted integer;
  _ends timestamptz;
  _until timestamptz;
  _lock_timeout text;
  _failures jsonb[] := '{}';
  _late text[] := '{}';
  _detail text;
  _hint text;
  _reads_index boolean;
  _read integer := 0;
  _narrows boolean;
  _most CONSTANT integer := 65536; -- candidates of an untrusted store: about a second
BEGIN
  hits := '{}';
  IF n IS NULL OR n < 1 OR coalesce(cardinality(stores), 0) = 0 THEN
    RETURN;
  END IF;
  SELECT o.ordered, o.untrusted INTO _ordered, _untrusted FROM ml_rag._untrusted_last(stores) AS o;
  FOREACH _store IN ARRAY _ordered LOOP
    _is_untrusted := coalesce(_store.found = 'untrusted', false);
    SELECT i.* INTO _index FROM ml_rag._keyword_index(_store.relation) AS i WHERE i.segment = _store.segment;
    IF NOT FOUND THEN
      IF cardinality(stores) > 1 THEN
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('"%s" has no keyword index; not searched by words', _store.vector_store),
          HINT = CASE WHEN (SELECT c.relkind FROM pg_class AS c WHERE c.oid = _store.relation) = 'r'
            THEN format('Its owner can make one: SELECT ml_rag.enable_keyword_search(%L);', _store.relation::text)
            ELSE 'Only an ordinary table can have one: search the table behind it.' END;
        IF explain THEN
          explained := coalesce(explained, '{}') || jsonb_build_object(_store.vector_store,
            '{"skipped": "It has no keyword index."}'::jsonb);
        END IF;
      END IF;
      skipped := skipped || _store.vector_store;
      _untrusted := _untrusted - _is_untrusted::integer;
      CONTINUE;
    END IF;
    _searched := true;
    IF _is_untrusted THEN
      SELECT s.ends, s.untrusted, s.until INTO _ends, _untrusted, _until FROM ml_rag._share(_ends, _untrusted) AS s;
      IF _until IS NULL THEN
        _late := _late || _store.vector_store;
        CONTINUE;
      END IF;
    END IF;
    BEGIN
      _reads_index := false;
      _lock_timeout := NULL;
      IF _is_untrusted THEN
        _lock_timeout := ml_rag._limit_wait(100);
      ELSIF _store.found = 'trusted' AND cardinality(stores) > 1 THEN
        _lock_timeout := ml_rag._limit_wait(1000);
      END IF;
      _condition := '';
      IF _filters THEN
        IF NOT _is_untrusted AND NOT coalesce((options -> 'semantic_search')::boolean, false) THEN
          -- else the other arm has
          PERFORM ml_rag._warn_of_unknown_keys(_store, options -> 'filters');
        END IF;
        SELECT f.condition, f.arguments INTO _condition, _arguments FROM ml_rag.filter(_store, _keyword.options) AS f;
      END IF;
      _narrows := _condition <> '';
      IF _is_untrusted THEN
        _condition := ml_rag._untrusted_condition(_store, _until, _condition);
      END IF;
      _reads_index := true;
      SELECT coalesce(array_agg(t.key ORDER BY t.key COLLATE "C"), '{}'),
        coalesce(array_agg(t.value::integer ORDER BY t.key COLLATE "C"), '{}')
      INTO _terms, _weights
      FROM jsonb_each_text((ml_rag._tokens(_index.configuration::regconfig, _keyword.query)).tokens) AS t;
      IF explain THEN
        explained := coalesce(explained, '{}') || jsonb_build_object(_store.vector_store, jsonb_build_object(
          'configuration', _index.configuration, 'words', _terms, 'limit', n, 'candidates', 0));
      END IF;
      -- the best ones may not pass the filters: then many more are tried, then all; without filters, candidates that are
      -- not in the table mean that it was written to with triggers off, and a second look is enough
      _candidates := CASE WHEN _narrows THEN 4 * n + 100 ELSE n END;
      SELECT '{}'::ml_rag.hit[] AS hits, true AS is_all INTO _part;
      WHILE cardinality(_terms) > 0 LOOP
        SELECT r.hits, r.is_all INTO _part
        FROM ml_rag._run_keyword(_store, _index, _terms, _weights, _candidates,
          CASE WHEN _store.dimensions IS NULL OR _store.dimensions = vector_dims(_keyword.query_embedding)
               THEN _keyword.query_embedding END,
          _keyword.distance_metric, n, _condition, _arguments) AS r;
        EXIT WHEN cardinality(_part.hits) >= n OR _part.is_all OR NOT _narrows AND _candidates > n;
        IF _is_untrusted AND (_candidates >= _most OR clock_timestamp() > _until) THEN
          PERFORM ml_rag._out_of_time();
        END IF;
        _candidates := CASE WHEN _is_untrusted THEN least(_candidates * 50, _most)
                            WHEN _candidates < 10000 THEN _candidates * 50 ELSE 2147483647 END;
      END LOOP;
      IF _lock_timeout IS NOT NULL THEN
        PERFORM set_config('lock_timeout', _lock_timeout, true);
      END IF;
      _read := _read + 1;
    EXCEPTION WHEN OTHERS THEN
      IF _reads_index AND SQLSTATE ~ '^(22|38|F0|42704$)' THEN
        -- Its configuration was dropped, its key's type changed, or its owner wrote into it. That must not stop those who
        -- never named the store.
        _why := SQLERRM;
        IF cardinality(stores) = 1 THEN
          RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = format('the keyword index of "%s" cannot be used', _store.vector_store), DETAIL = _why,
            HINT = format('Its owner can make it anew: SELECT ml_rag.enable_keyword_search(%L);', _store.relation::text);
        END IF;
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('the keyword index of "%s" cannot be used; ignored', _store.vector_store), DETAIL = _why,
          HINT = format('Its owner can make it anew: SELECT ml_rag.enable_keyword_search(%L);', _store.relation::text);
        IF explain THEN
          explained := coalesce(explained, '{}') || jsonb_build_object(_store.vector_store,
            '{"skipped": "Its keyword index cannot be used."}'::jsonb);
        END IF;
        skipped := skipped || _store.vector_store;
        _read := _read + 1;
        CONTINUE;
      ELSIF coalesce(_store.found, 'named') = 'named' OR cardinality(stores) = 1 OR SQLSTATE = '40001' THEN
        RAISE;
      END IF;
      GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
      _failures := _failures || ml_rag._failure(_store.vector_store, SQLSTATE, SQLERRM, _detail, _hint);
      CONTINUE;
    END;
    _all := _all || _part.hits;
    IF explain THEN
      explained := jsonb_set(explained, ARRAY[_store.vector_store, 'candidates'], to_jsonb(cardinality(_part.hits)));
    END IF;
  END LOOP;
  IF NOT _searched THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'no vector store has a keyword index',
      DETAIL = format('Stores: %s.', (SELECT string_agg(s.vector_store, ', ') FROM unnest(stores) AS s)),
      HINT = format('The owner of a store can make one: SELECT ml_rag.enable_keyword_search(%L);',
        stores[1].relation::text);
  END IF;
  IF _read = 0 AND cardinality(_failures) > 0 AND NOT coalesce((options -> 'semantic_search')::boolean, false) THEN
    PERFORM ml_rag._raise(_failures[1]);
  END IF;
  IF cardinality(_failures) > 0 OR cardinality(_late) > 0 THEN
    PERFORM ml_rag._warn_of_failures(_failures, _late);
    skipped := skipped || ARRAY(SELECT f ->> 'store' FROM unnest(_failures) AS f) || _late;
    IF explain THEN
      explained := coalesce(explained, '{}') || ml_rag._explain_failures(_failures, _late);
    END IF;
  END IF;
  hits := ARRAY(
    SELECT ROW(h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment,
      CASE WHEN h.distance > '-Infinity' AND h.distance < 'Infinity' THEN h.distance END, h.metadata, h.keyword_score, h.score, h.rerank_score)::ml_rag.hit
    FROM unnest(_all) AS h
    ORDER BY h.keyword_score DESC, h.vector_store COLLATE "C", h.document_name COLLATE "C", h.document_id,
      h.document_key COLLATE "C", h.segment_number
    LIMIT n);
END
$$;

CREATE FUNCTION ml_rag.keyword(
  stores ml_rag.store[],
  query text,
  n integer DEFAULT 3,
  query_embedding vector DEFAULT NULL,
  distance_metric text DEFAULT 'COSINE',
  options jsonb DEFAULT NULL
) RETURNS SETOF ml_rag.hit
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the n segments of all stores that speak most of the query's words
-- Calls: ml_rag._keyword  Reads: the stores and their indexes, as the caller
DECLARE
  _found record := ml_rag._keyword(stores, query, n, query_embedding, distance_metric, options, false);
BEGIN
  RETURN QUERY SELECT h.vector_store, h.document_name, h.document_id, h.document_key, h.segment_number, h.segment,
      h.distance, h.metadata, h.keyword_score, h.score, h.rerank_score
    FROM unnest(_found.hits) WITH ORDINALITY AS h ORDER BY h.ordinality;
END
$$;
COMMENT ON FUNCTION ml_rag.keyword(ml_rag.store[], text, integer, vector, text, jsonb) IS
$$the n segments of the stores that match the words of the query best, best first
keyword_score is BM25 (Lucene's variant), from the statistics of the segment's own store; segments without any of the
words do not come. Equal scores go by store, document and segment. distance is filled where query_embedding is given and
fits. options: those of ml_rag that leave rows out, see ml_rag.filter; they apply before the limit. A store without a
keyword index, or with one that cannot be used, is left out with a warning. Errors: 55000 no store has one, the only
store's cannot be used, or numpy is missing; those of ml_rag.filter.$$;
