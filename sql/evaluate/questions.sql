-- questions: what the ruler is asked to measure: options, and questions from a table or a query.

CREATE FUNCTION ml_rag._read_questions(source text, path text, relation regclass DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the rows of a table or a query as JSON objects, in their order; names mean what they mean to the
-- caller. relation: the table, where it was given by its OID
-- A query can do no more than the caller: it is one statement (a loop takes no two), a subquery, so that it
-- changes nothing by itself, and read-only, so that no function in it does. What it did all the same, such as
-- a temporary table's rows, is rolled back.
-- Reads: what the caller names, as the caller
DECLARE
  _query text := regexp_replace(source, ';\s*$', '');
  _path text := current_setting('search_path');
  _relation regclass;
  _is_name boolean := true;
  _rows jsonb;
BEGIN
  IF source IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'no questions given',
      HINT = 'Name a table or a query: ml_rag_evaluate(''SELECT id, question FROM questions'').';
  END IF;
  BEGIN
    PERFORM parse_ident(source);
  EXCEPTION WHEN invalid_parameter_value THEN
    _is_name := false;
  END;
  IF _is_name THEN
    -- after set_config names are looked up in the caller's path: all are qualified here
    PERFORM pg_catalog.set_config('search_path', path, true);
    _relation := coalesce(relation, source::pg_catalog.regclass);
    PERFORM pg_catalog.set_config('search_path', _path, true);
    PERFORM ml_rag._hold(ARRAY[_relation::pg_catalog.oid]);
    _query := pg_catalog.format('TABLE %s', ml_rag._full_name(_relation));
  END IF;
  _query := pg_catalog.format(
    E'SELECT pg_catalog.json_agg(pg_catalog.to_jsonb("a row".*))::pg_catalog.jsonb FROM (\n%s\n) AS "a row"',
    _query);
  BEGIN
    PERFORM pg_catalog.set_config('search_path', path, true);
    PERFORM pg_catalog.set_config('transaction_read_only', 'on', true);
    FOR _rows IN EXECUTE _query LOOP
      NULL;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'MLR00';
  EXCEPTION WHEN SQLSTATE 'MLR00' THEN
    NULL;
  END;
  RETURN _rows;
END
$$;

CREATE FUNCTION ml_rag._parse_evaluate_options(options jsonb, OUT own jsonb, OUT rag jsonb, OUT columns jsonb,
  OUT cutoffs integer[])
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the options of ml_rag_evaluate, those of ml_rag inside, names of columns, the cut-offs in order
DECLARE
  _one jsonb;
  _names text[] := '{}';
  _name text;
  _generate boolean;
BEGIN
  own := ml_rag.parse_options('ml_rag_evaluate', options);
  -- the output of explain would be shown nowhere
  rag := ml_rag._parse_rag_options(own -> 'options') - 'explain';
  columns := ml_rag.parse_options('evaluation_columns', own -> 'columns');
  IF rag ? 'query_embedding' THEN
    PERFORM ml_rag._bad_option('query_embedding', rag -> 'query_embedding',
      'nothing: each question has its own',
      'Leave "query_embedding" out of "options".');
  END IF;
  IF jsonb_array_length(own -> 'k') NOT BETWEEN 1 AND 20 OR EXISTS (
    SELECT FROM jsonb_array_elements(own -> 'k') AS e
    WHERE jsonb_typeof(e) <> 'number' OR (e #>> '{}') !~ '^[0-9]+$' OR length(e #>> '{}') > 3
      OR (e #>> '{}')::integer NOT BETWEEN 1 AND 100) THEN
    PERFORM ml_rag._bad_option('k', own -> 'k', '1 to 20 integers from 1 to 100');
  END IF;
  cutoffs := ARRAY(SELECT DISTINCT (e #>> '{}')::integer FROM jsonb_array_elements(own -> 'k') AS e
    ORDER BY 1);
  -- metrics of the caller's are called by their functions, without schema
  FOR _one IN SELECT m FROM jsonb_array_elements(own -> 'metrics') AS m LOOP
    PERFORM ml_rag._find_function('metrics', _one);
    _name := (parse_ident(_one #>> '{}'))[2];
    IF _name !~ '^[a-z0-9_]{1,60}$' OR _name = ANY (_names) THEN
      PERFORM ml_rag._bad_option('metrics', _one, 'functions of different names of a-z, 0-9 and _');
    END IF;
    _names := _names || _name;
  END LOOP;
  IF cardinality(_names) > 20 THEN
    PERFORM ml_rag._bad_option('metrics', to_jsonb(cardinality(_names)), 'at most 20 functions');
  END IF;
  BEGIN
    PERFORM '' ~ (own ->> 'refusal_pattern');
  EXCEPTION WHEN invalid_regular_expression THEN
    PERFORM ml_rag._bad_option('refusal_pattern', own -> 'refusal_pattern', 'a regular expression', SQLERRM);
  END;
  _generate := (own -> 'generate')::boolean OR own ? 'judge_model_id';
  own := own || jsonb_build_object('generate', _generate);
  -- More is looked at than a caller gets, so that k documents are found though several segments are of one;
  -- not where the number of segments has a part in the answer.
  IF NOT _generate AND (own -> 'options' -> 'n_citations') IS NULL
    AND coalesce((rag #>> '{retrieval_options,segment_overlap}')::integer, 0) = 0 THEN
    own := own || jsonb_build_object('cited', rag -> 'n_citations');
    rag := rag || jsonb_build_object('n_citations',
      greatest((rag ->> 'n_citations')::integer, least(100, 3 * cutoffs[cardinality(cutoffs)])));
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_questions(rows jsonb, columns jsonb, own jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the questions in one form, [{id, question, documents, answers, answerable, history}], sampled;
-- null if the column is missing. history is checked with the options of the question
DECLARE
  _wrong text;
  _questions jsonb;
BEGIN
  IF rows IS NULL THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '22023', 'message', 'no questions found',
      'hint', 'The table or query has no row that you may read.'));
  END IF;
  -- a column that was named must be there; the others may be missing
  SELECT string_agg(c.value, ', ') INTO _wrong FROM jsonb_each_text(columns) AS c
  WHERE NOT rows -> 0 ? c.value AND (c.key = 'question' OR own -> 'columns' ? c.key);
  IF _wrong IS NOT NULL THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '42703',
      'message', 'the questions lack a column', 'detail', format('Missing: %s; there are: %s.', _wrong,
        (SELECT string_agg(k, ', ') FROM jsonb_object_keys(rows -> 0) AS k)),
      -- only ml_rag_evaluate has the option
      'hint', CASE WHEN own = '{}' THEN 'Give a query that names them so, such as '
        'SELECT title AS question, answerable FROM ….'
        ELSE 'Name your columns in "columns", such as {"question": "text"}.' END));
  END IF;
  SELECT json_agg(to_jsonb(q) ORDER BY q.place)::jsonb INTO _questions
  FROM (
    SELECT r.place, coalesce(r.value ->> (columns ->> 'id'), r.place::text) AS id,
      r.value ->> (columns ->> 'question') AS question,
      ml_rag._expected_documents(r.value -> (columns ->> 'documents')) AS documents,
      CASE jsonb_typeof(r.value -> (columns ->> 'answers'))
        WHEN 'array' THEN r.value -> (columns ->> 'answers')
        WHEN 'string' THEN jsonb_build_array(r.value -> (columns ->> 'answers')) END AS answers,
      CASE WHEN jsonb_typeof(r.value -> (columns ->> 'answerable')) = 'boolean'
        THEN r.value -> (columns ->> 'answerable') END AS answerable,
      r.value -> (columns ->> 'history') AS history
    FROM jsonb_array_elements(rows) WITH ORDINALITY AS r (value, place)
    -- a seed shuffles, the same way each time
    ORDER BY CASE WHEN own ? 'seed' THEN
      hashtextextended(coalesce(r.value ->> (columns ->> 'id'), r.place::text),
        (own ->> 'seed')::bigint) END, r.place
    LIMIT (own ->> 'limit')::bigint) AS q;
  SELECT q ->> 'id' INTO _wrong FROM jsonb_array_elements(_questions) AS q GROUP BY 1
  HAVING count(*) > 1 LIMIT 1;
  IF FOUND THEN
    PERFORM ml_rag._raise(jsonb_build_object('sqlstate', '22023', 'message', 'two questions have one id',
      'detail', format('Id %s.', left(_wrong, 200)), 'hint',
        'Ids tell the questions apart when runs are compared.'));
  END IF;
  RETURN _questions;
END
$$;

CREATE FUNCTION ml_rag._warn_of_unknown_documents(stores ml_rag.store[], questions jsonb[],
  match text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: expected documents that no store has, before the first question is asked: they would count as not
-- found
-- Reads: the stores, as the caller
DECLARE
  _most CONSTANT integer := 20000;
  _expected text[] := ARRAY(
    SELECT d ->> 'document' FROM unnest(questions) AS q
    CROSS JOIN jsonb_array_elements(nullif(q -> 'documents', 'null')) AS d
    GROUP BY 1 ORDER BY 1);
  _unknown text[] := _expected;
  _names text[] := '{}';
  _found text[];
  _store ml_rag.store;
  _column name;
  _near text;
BEGIN
  FOREACH _store IN ARRAY coalesce(stores, '{}') LOOP
    EXIT WHEN cardinality(_unknown) = 0;
    _column := CASE match WHEN 'document_id' THEN _store.document_id ELSE _store.document_name END;
    _found := CASE WHEN _column IS NOT NULL THEN ml_rag._read_apart(_store, format(
        'SELECT array_agg(n.name) FROM (SELECT DISTINCT t.%I::text AS name', _column), ') AS n')::text[]
      -- its rows are called by its own name
      WHEN match <> 'document_id' THEN ARRAY[_store.vector_store] END;
    _names := _names || _found[1:_most];
    -- by the last part of a path, so that it is a hash join
    _unknown := ARRAY(
      SELECT u FROM unnest(_unknown) AS u
      WHERE NOT EXISTS (
        SELECT FROM unnest(_found) AS f
        WHERE split_part(f, '/', -1) = split_part(u, '/', -1)
          AND (f = u OR match = 'path_end' AND right(f, length(u) + 1) = '/' || u))
      ORDER BY 1);
  END LOOP;
  IF cardinality(_unknown) = 0 OR cardinality(stores) = 0 THEN
    RETURN;
  END IF;
  -- what has most of its runs of three letters
  SELECT string_agg(format('"%s"', left(n.name, 100)), ', ' ORDER BY n.share DESC, n.name) INTO _near
  FROM (
    SELECT d.name, avg((strpos(lower(d.name), substr(w.word, i, 3)) > 0)::integer) AS share
    FROM (SELECT lower(left(_unknown[1], 100)) AS word) AS w
    CROSS JOIN generate_series(1, greatest(1, length(w.word) - 2)) AS i
    CROSS JOIN (SELECT DISTINCT x AS name FROM unnest(_names[1:_most]) AS x) AS d
    GROUP BY d.name ORDER BY 2 DESC, 1 LIMIT 3) AS n
  WHERE n.share >= 0.4;
  RAISE WARNING USING ERRCODE = '01000',
    MESSAGE = format('%s of %s expected documents are in none of the vector stores', cardinality(_unknown),
      cardinality(_expected)),
    DETAIL = format('They count as not found. The first: "%s". Searched: %s.', left(_unknown[1], 200),
      (SELECT string_agg(s.vector_store, ', ') FROM unnest(stores) AS s)),
    HINT = concat('Did you mean ' || _near || '? ', '"match" says how names are compared; row-level security '
      'may hide documents.');
END
$$;
