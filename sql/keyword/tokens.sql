-- tokens: what keyword search sees in a text.

CREATE FUNCTION ml_rag.text_search_configuration(language text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the text search configuration for a language: code (en, de-AT) or name; the default if null
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
      ('ar', 'arabic'), ('ca', 'catalan'), ('da', 'danish'), ('de', 'german'), ('el', 'greek'),
      ('en', 'english'),
      ('es', 'spanish'), ('et', 'estonian'), ('eu', 'basque'), ('fi', 'finnish'), ('fr', 'french'),
      ('ga', 'irish'),
      ('hi', 'hindi'), ('hu', 'hungarian'), ('hy', 'armenian'), ('id', 'indonesian'), ('it', 'italian'),
      ('lt', 'lithuanian'), ('nb', 'norwegian'), ('ne', 'nepali'), ('nl', 'dutch'), ('nn', 'norwegian'),
      ('no', 'norwegian'), ('pt', 'portuguese'), ('ro', 'romanian'), ('ru', 'russian'), ('sr', 'serbian'),
      ('sv', 'swedish'), ('ta', 'tamil'), ('tr', 'turkish'), ('yi', 'yiddish')
    ) AS m (code, name) ON m.code = l.code
    JOIN pg_ts_config AS c ON c.cfgnamespace = 'pg_catalog'::regnamespace
      AND c.cfgname = coalesce(m.name, l.code)
  );
  IF _name IS NULL AND language !~* '^[a-z]{2,3}([-_][a-z0-9]+)*$' THEN
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('unknown language "%s"', left(language, 100)),
      DETAIL = 'Words are compared as they are, without stemming.',
      HINT = 'Use a code such as en or pt-BR, or the name of a text search configuration such as english.';
  END IF;
  RETURN coalesce(_name, 'pg_catalog.simple');
END
$$;
COMMENT ON FUNCTION ml_rag.text_search_configuration(text) IS
$$the text search configuration that keyword search takes for a language: en = english, de = german, …
language: a code (en, pt-BR) or a name (english). Null gives default_text_search_config; a language that
PostgreSQL has no configuration for, such as zh, ja or ko, gives simple, with a warning if it does not look
like a code. Returns the name with its schema.$$;

CREATE FUNCTION ml_rag._configuration(name text) RETURNS regconfig
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the configuration of a name with its schema, which the role need not have USAGE on
DECLARE
  _parts text[] := parse_ident(name);
  _found oid := (
    SELECT c.oid FROM pg_ts_config AS c JOIN pg_namespace AS n ON n.oid = c.cfgnamespace
    WHERE n.nspname = _parts[1] AND c.cfgname = _parts[2]);
BEGIN
  IF _found IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42704',
      MESSAGE = format('text search configuration "%s" does not exist', name),
      DETAIL = 'A keyword index was made with it.',
      HINT = 'Create it again, or rebuild the index with another: ml_rag.enable_keyword_search.';
  END IF;
  RETURN _found;
END
$$;

CREATE FUNCTION ml_rag._lexemes(configuration regconfig, segment text) RETURNS TABLE (lexeme text, n bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
-- a word of more than 2 kB is left out, without a message to the role that writes the row
SET client_min_messages = 'warning'
-- to compile the statement takes a hundred times as long as to run it
SET jit = off
AS $$
-- purpose: words of a text by its configuration, each with its number, whatever the length
-- A tsvector keeps 255 positions of a lexeme, up to position 16383, and has at most 1 MB: what does not fit
-- is cut at blanks, and where that does not help (a,a,a,…) after 500 characters: less than 255 words.
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
      FROM string_to_table(translate(segment, E'\t\n\u000b\f\r', '     '), ' ')
        WITH ORDINALITY AS w (word, place)
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
      SELECT substr(p.piece, s.first, c.step) FROM generate_series(1, c.length, c.step) AS s (first)
      WHERE NOT c.is_small
    ) AS s
    CROSS JOIN LATERAL ml_rag._lexemes(configuration, s.part) AS l
    GROUP BY l.lexeme;
END
$$;

CREATE FUNCTION ml_rag._scripts() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: for a regular expression in brackets: letters of Chinese, Japanese and Korean
SELECT '\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u312f\u3130-\u318f\u31a0-\u31ff\u3400-\u4dbf'
  '\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff'
$$;

CREATE FUNCTION ml_rag._usual_width(segment text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: a text with its letters of full and half width as usual ones
-- PostgreSQL sorts the accents of a letter, in a time that grows with the square of their number and in which
-- nothing can cancel it: so part by part, cut at blanks where there are some.
DECLARE
  _n integer := length(segment);
  _half integer := _n / 2;
BEGIN
  IF _n <= 5000 THEN
    RETURN normalize(segment, NFKC);
  END IF;
  _half := _half + strpos(substr(segment, _half + 1, 1000), ' ');
  RETURN ml_rag._usual_width(left(segment, _half)) || ml_rag._usual_width(substr(segment, _half + 1));
END
$$;

CREATE FUNCTION ml_rag._tokens(configuration regconfig, segment text, OUT tokens jsonb, OUT length integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET client_min_messages = 'warning'
AS $$
-- purpose: {token: number} of a text, and how many there are: what is indexed, and what is asked for
-- Chinese, Japanese and Korean have no blanks between words, and no parser of PostgreSQL knows where they
-- end: runs of their characters become pairs (東京都 = 東京, 京都), a character alone stays itself, in whatever
-- configuration.
DECLARE
  _scripts text;
  _text text := segment;
  _words text;
  _is_whole boolean;
BEGIN
  -- PostgreSQL's parser takes the hyphen of AX-4411 and 2024-01-31 for a sign, and 4411 would not find -4411
  IF strpos(_text, '-') > 0 THEN
    _text := regexp_replace(_text, '-(?=[0-9])', ' ', 'g');
  END IF;
  _words := _text;
  IF octet_length(_text) <> length(_text) THEN
    -- letters of full and half width are the same letters
    IF _text ~ '[\uff01-\uffef]' AND getdatabaseencoding() = 'UTF8' THEN
      _text := ml_rag._usual_width(_text);
    END IF;
    _scripts := format('[%s]+', ml_rag._scripts());
    _words := regexp_replace(_text, _scripts, ' ', 'g');
  END IF;
  IF _words = _text AND octet_length(_words) <= 500000 THEN
    SELECT coalesce(jsonb_object_agg(u.lexeme, cardinality(u.positions)), '{}'),
      coalesce(sum(cardinality(u.positions)), 0),
      coalesce(bool_and(cardinality(u.positions) < 255 AND u.positions[cardinality(u.positions)] < 16383),
        true)
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

CREATE FUNCTION ml_rag._words(
  configuration regconfig, segment text, as_json boolean, OUT words tsvector, OUT tokens jsonb,
    OUT length integer
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
SET client_min_messages = 'warning'
AS $$
-- purpose: what ml_rag._tokens finds in a text, as a tsvector where that says the same: to count each word of
-- it takes as long again
DECLARE
  _text text := segment;
  _vector text;
BEGIN
  IF NOT as_json AND octet_length(_text) = pg_catalog.length(_text) AND octet_length(_text) <= 500000 THEN
    IF strpos(_text, '-') > 0 THEN
      _text := regexp_replace(_text, '-(?=[0-9])', ' ', 'g');
    END IF;
    words := to_tsvector(configuration, _text);
    _vector := words::text;
    -- as in 'word':3,14 'other':7
    length := pg_catalog.length(words) + octet_length(_vector) - octet_length(replace(_vector, ',', ''));
    -- no word has a comma, a quote or a backslash, and all of it is there
    IF strpos(strip(words)::text, ',') = 0 AND strpos(_vector, '''''') = 0 AND strpos(_vector, E'\\') = 0
      AND strpos(_vector, '16383') = 0 THEN
      IF length < 255 THEN
        RETURN;
      ELSIF NOT EXISTS (SELECT FROM unnest(words) AS u WHERE cardinality(u.positions) > 254) THEN
        RETURN;
      END IF;
    END IF;
    words := NULL;
  END IF;
  SELECT t.tokens, t.length INTO tokens, length FROM ml_rag._tokens(configuration, segment) AS t;
END
$$;

CREATE FUNCTION ml_rag._token_texts(configuration regconfig, segments text[], as_json boolean) RETURNS text[]
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 100000
SET client_min_messages = 'warning'
AS $$
-- purpose: of each text what ml_rag._tokens finds: JSON, or the text of a tsvector, which is faster
-- A tsvector that was cut looks like one, but for a word that stands 255 times or at 16383: readers look.
DECLARE
  _letters text := format('[\uff01-\uffef%s]', ml_rag._scripts());
BEGIN
  RETURN ARRAY(
    SELECT CASE
      WHEN as_json OR octet_length(s.segment) > 500000 OR octet_length(s.segment) <> length(s.segment)
        AND s.segment ~ _letters
        THEN (ml_rag._tokens(configuration, s.segment)).tokens::text
      ELSE to_tsvector(configuration, CASE WHEN strpos(s.segment, '-') > 0
        THEN regexp_replace(s.segment, '-(?=[0-9])', ' ', 'g') ELSE s.segment END)::text END
    FROM unnest(segments) AS s (segment));
END
$$;

CREATE FUNCTION ml_rag._tokens_of(configuration regconfig, segments text[], as_json boolean)
RETURNS TABLE (tokens text[])
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 8
SET search_path FROM CURRENT
-- the parts are always worth workers, and the texts must not become part of a plan
SET parallel_setup_cost = 0
SET parallel_tuple_cost = 0
SET plan_cache_mode = force_generic_plan
AS $$
-- purpose: ml_rag._token_texts of many texts in their order, as eight arrays, which parallel workers make
-- side by side. Of four parts, two workers and the session would leave one for the end, alone
DECLARE
  _n integer := cardinality(segments);
BEGIN
  RETURN QUERY
    SELECT p.tokens FROM (
      SELECT 1, ml_rag._token_texts(configuration, segments[1 : _n / 8], as_json)
      UNION ALL SELECT 2, ml_rag._token_texts(configuration, segments[_n / 8 + 1 : 2 * _n / 8], as_json)
      UNION ALL SELECT 3, ml_rag._token_texts(configuration, segments[2 * _n / 8 + 1 : 3 * _n / 8], as_json)
      UNION ALL SELECT 4, ml_rag._token_texts(configuration, segments[3 * _n / 8 + 1 : 4 * _n / 8], as_json)
      UNION ALL SELECT 5, ml_rag._token_texts(configuration, segments[4 * _n / 8 + 1 : 5 * _n / 8], as_json)
      UNION ALL SELECT 6, ml_rag._token_texts(configuration, segments[5 * _n / 8 + 1 : 6 * _n / 8], as_json)
      UNION ALL SELECT 7, ml_rag._token_texts(configuration, segments[6 * _n / 8 + 1 : 7 * _n / 8], as_json)
      UNION ALL SELECT 8, ml_rag._token_texts(configuration, segments[7 * _n / 8 + 1 : _n], as_json)
    ) AS p (place, tokens) ORDER BY p.place;
END
$$;

CREATE FUNCTION ml_rag.keyword_tokens(configuration regconfig,
  segment text) RETURNS TABLE (token text, n integer)
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_ts_config AS c WHERE c.oid = configuration) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'text search configuration does not exist',
      DETAIL = format('Got %s.', coalesce(configuration::text, 'null')), HINT = '\dF in psql lists them.';
  END IF;
  RETURN QUERY SELECT t.key, t.value::integer
    FROM jsonb_each_text((ml_rag._tokens(configuration, segment)).tokens) AS t
    ORDER BY t.key COLLATE "C";
END
$$;
COMMENT ON FUNCTION ml_rag.keyword_tokens(regconfig, text) IS
$$the tokens that keyword search sees in a text or a query, and how often: keyword_tokens('english', 'Two words')
The words as the text search configuration gives them; Chinese, Japanese and Korean in pairs of characters.
Any text is
safe: nothing in it is an operator. Errors: 22023 no such configuration.$$;
