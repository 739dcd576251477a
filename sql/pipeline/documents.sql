-- documents: the documents of the stores by their names: those that a question names, those that are like a
-- misspelt name.

CREATE FUNCTION ml_rag._list_documents(stores ml_rag.store[], with_titles boolean,
  first text[] DEFAULT '{}') RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the documents of the stores that the caller may see, as [[name, [titles]]], at most 20000; titles
-- are that of the metadata, and the heading that the first segment stands under. first: names that come
-- before others, and that may be longer than 2000 characters
-- Reads: the stores, as the caller
DECLARE
  _most CONSTANT integer := 20000;
  -- all names are in memory here, and any role may have written them
  _longest CONSTANT integer := 2000;
  _store ml_rag.store;
  _name text;
  _documents jsonb := '[]';
BEGIN
  FOREACH _store IN ARRAY coalesce(stores, '{}') LOOP
    EXIT WHEN jsonb_array_length(_documents) >= _most;
    _name := ml_rag._document_name(_store);
    IF _name = quote_literal(_store.vector_store) THEN
      -- its rows are called by its own name
      _documents := _documents || jsonb_build_array(jsonb_build_array(_store.vector_store, jsonb_build_array(
        (SELECT c.relname FROM pg_class AS c WHERE c.oid = _store.relation))));
      CONTINUE;
    END IF;
    _documents := _documents || coalesce(ml_rag._read_apart(_store, format($query$
      SELECT jsonb_agg(jsonb_build_array(ml_rag._valid_text(d.name), CASE WHEN %L::boolean THEN (
        SELECT coalesce(jsonb_agg(ml_rag._valid_text(t.title) ORDER BY t.place), '[]')
        FROM (VALUES (1, d.title), (2, d.heading)) AS t (place, title) WHERE t.title ~ '[^[:space:]]')
        ELSE '[]' END))
      FROM (SELECT n.name, n.title, n.heading
            FROM (SELECT DISTINCT ON (r.name) r.name, r.title, r.heading
                  FROM (SELECT %s AS name, %s AS place, %s$query$, with_titles, _name,
        CASE WHEN _store.segment_number IS NULL THEN '1' ELSE format('t.%I', _store.segment_number) END,
        CASE WHEN with_titles AND _store.metadata IS NOT NULL THEN
          format('CASE WHEN octet_length(%1$s) <= 300 THEN %1$s ELSE left(ml_rag._beginning(%1$s), 300) END'
            ' AS title,'
            ' CASE WHEN octet_length(%2$s) <= 300 THEN %2$s ELSE left(ml_rag._beginning(%2$s), 300) END'
            ' AS heading',
            format('ml_rag._as_jsonb(t.%I) ->> ''title''', _store.metadata),
            format('ml_rag._as_jsonb(t.%I) -> ''headings'' ->> -1', _store.metadata))
          ELSE 'NULL AS title, NULL AS heading' END),
      format('WHERE t.%1$I IS NOT NULL) AS r WHERE octet_length(r.name) <= %2$s OR r.name = ANY ($1)'
        ' OR octet_length(r.name) <= 4 * %2$s AND length(ml_rag._valid_text(r.name)) <= %2$s'
        ' ORDER BY r.name, r.place) AS n ORDER BY n.name = ANY ($1) DESC, n.name LIMIT %3$s) AS d',
        coalesce(_store.document_name, _store.segment), _longest, _most), first)::jsonb, '[]');
  END LOOP;
  RETURN _documents;
END
$$;

CREATE FUNCTION ml_rag._file(name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: a document's name without its folders, in lower case
BEGIN
  RETURN lower(regexp_replace(name, '^.*[/\\]', ''));
END
$$;

CREATE FUNCTION ml_rag._nearest_documents(name text, documents jsonb) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: at most three names that a name may have been meant for: those of the same file name, with or
-- without ending, in any case, else those spelt almost so
DECLARE
  _file text := ml_rag._file(name);
  _stem text := regexp_replace(_file, '\.[a-z][a-z0-9]{0,4}$', '');
  _far CONSTANT integer := length(_file) / 4;
BEGIN
  RETURN ARRAY(
    WITH listed AS MATERIALIZED (
      SELECT d ->> 0 AS name, ml_rag._file(d ->> 0) AS file FROM jsonb_array_elements(documents) AS d
    )
    SELECT d.name
    FROM (
      SELECT n.name, CASE WHEN n.file = _file THEN -2 ELSE -1 END AS far FROM listed AS n
      WHERE n.file = _file OR starts_with(n.file, _stem)
        AND regexp_replace(n.file, '\.[a-z][a-z0-9]{0,4}$', '') = _stem
      UNION ALL SELECT n.name, ml_rag._distance_of_words(n.file, _file)
      FROM (
        -- letters that the other one lacks cost a change each; what is left takes a while for each, and any
        -- role can plant many
        SELECT n.name, n.file FROM listed AS n
        WHERE abs(length(n.file) - length(_file)) <= _far
          AND length(translate(n.file, _file, '')) <= _far AND length(translate(_file, n.file, '')) <= _far
        LIMIT 500
      ) AS n
    ) AS d
    WHERE d.far <= _far GROUP BY d.name ORDER BY min(d.far), d.name COLLATE "C" LIMIT 3);
END
$$;

CREATE FUNCTION ml_rag._documents_named_in(question text, stores ml_rag.store[], options jsonb,
  OUT names text[], OUT is_summary boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the documents that a question names, of those that the options leave; null if none. is_summary:
-- whether it asks for nothing but a summary of them. What looks like the name of a file, and is not, counts
-- as the nearest one, with a warning
DECLARE
  _question text := question;
  _documents jsonb := ml_rag._list_documents(stores, true);
  _found jsonb := ml_rag._python('named_documents', jsonb_build_array(question, _documents));
  _name text;
  _nearest text[];
  _far integer[];
  _is_meant boolean;
BEGIN
  -- a word with the ending of a document's name
  FOR _name IN SELECT DISTINCT w.word[1] FROM regexp_matches(question,
    '[^\s"''<>|?*()]*[^\s"''<>|?*().,;:!]\.[A-Za-z][A-Za-z0-9]{1,4}\M', 'g') AS w (word)
               ORDER BY 1 LIMIT 10 LOOP
    CONTINUE WHEN NOT EXISTS (SELECT FROM jsonb_array_elements(_documents) AS d
                              WHERE lower(d ->> 0) LIKE '%.' || lower(regexp_replace(_name, '^.*\.', '')))
      OR EXISTS (SELECT FROM jsonb_array_elements_text(_found -> 'names') AS n
        WHERE right(lower(n), length(_name)) = lower(_name));
    _nearest := ml_rag._nearest_documents(_name, _documents);
    -- whether the first one is meant: nearer than the next one, and with the same digits, since
    -- report_2023.pdf is not a misspelt report_2024.pdf
    _far := ARRAY(SELECT ml_rag._distance_of_words(ml_rag._file(n.name), ml_rag._file(_name))
                  FROM unnest(_nearest) WITH ORDINALITY AS n (name, place) ORDER BY n.place);
    _is_meant := coalesce(_far[1] < coalesce(_far[2], _far[1] + 1)
      AND regexp_replace(ml_rag._file(_nearest[1]), '[^0-9]', '', 'g') = regexp_replace(ml_rag._file(_name),
        '[^0-9]', '', 'g'), false);
    -- without the name: warnings go into PostgreSQL's log, and questions do not
    IF _is_meant THEN
      _question := replace(_question, _name, ml_rag._file(_nearest[1]));
    END IF;
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = 'a file that the question names is not among the documents',
      DETAIL = CASE WHEN _is_meant THEN format('"%s" is searched in its place.', left(_nearest[1], 200))
        ELSE 'Documents are found by the names that the stores hold; nothing is left out for this one.' END,
      HINT = CASE WHEN cardinality(_nearest) > 0
        THEN format('Did you mean %s?', (SELECT string_agg(format('"%s"', left(n, 200)), ' or ')
          FROM unnest(_nearest) AS n))
        ELSE 'SELECT DISTINCT document_name FROM the store shows the names.' END;
  END LOOP;
  IF _question <> question THEN
    _found := ml_rag._python('named_documents', jsonb_build_array(_question, _documents));
  END IF;
  names := nullif(ARRAY(
    SELECT n FROM jsonb_array_elements_text(_found -> 'names') AS n
    WHERE coalesce(options -> 'document_name' ? n, true)
      AND NOT coalesce(options -> 'exclude_document_name' ? n, false)), '{}');
  is_summary := names IS NOT NULL AND (_found -> 'is_summary')::boolean;
END
$$;

CREATE FUNCTION ml_rag._warn_of_unknown_names(stores ml_rag.store[], options jsonb,
  hits ml_rag.hit[]) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a name of option document_name that is none of a document; of the first ones also those it may
-- have been meant for. Of exclude_document_name those that a hit has at the end of its name, or in another
-- case
-- Looked for only where no hit is of that name: to look takes longer than the search.
DECLARE
  _asked text[] := ARRAY(
    SELECT d FROM jsonb_array_elements_text(options -> 'document_name') AS d
    WHERE d NOT IN (SELECT h.document_name FROM unnest(hits) AS h
      WHERE h.document_name IS NOT NULL) LIMIT 100);
  _documents jsonb;
  _names text[];
  _name text;
  _nearest text[];
  _looked integer := 0;
BEGIN
  FOR _name, _nearest IN
    SELECT d, array_agg(DISTINCT h.document_name ORDER BY h.document_name)
    FROM jsonb_array_elements_text(options -> 'exclude_document_name') AS d
    JOIN unnest(hits) AS h ON lower(h.document_name) = lower(d)
      OR right(lower(h.document_name), length(d) + 1) = '/' || lower(d)
    GROUP BY d ORDER BY d LIMIT 10 LOOP
    -- there may be a document of that name, too
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('"%s" does not leave out "%s"', left(_name, 200),
        left(_nearest[1], 200)),
      DETAIL = 'Names in "exclude_document_name" are those that the stores hold, such as a loaded file''s '
        'whole path.',
      HINT = 'Name it as it is cited.';
  END LOOP;
  IF cardinality(_asked) = 0 THEN
    RETURN;
  END IF;
  _documents := ml_rag._list_documents(stores, false, _asked);
  _names := ARRAY(SELECT d ->> 0 FROM jsonb_array_elements(_documents) AS d);
  FOREACH _name IN ARRAY _asked LOOP
    CONTINUE WHEN _name = ANY (_names);
    _nearest := '{}';
    IF _looked < 10 THEN
      _nearest := ml_rag._nearest_documents(_name, _documents);
      _looked := _looked + 1;
    END IF;
    RAISE WARNING USING ERRCODE = '01000', MESSAGE = format('no document is named "%s"', left(_name, 200)),
      DETAIL
        = 'Names in "document_name" are those that the stores hold, such as a loaded file''s whole path.',
      HINT = CASE WHEN cardinality(_nearest) > 0
        THEN format('Did you mean %s?', (SELECT string_agg(format('"%s"', left(n, 200)), ' or ')
          FROM unnest(_nearest) AS n))
        ELSE 'With "document_names": true in query_options, documents are found by what the question calls '
          'them.' END;
  END LOOP;
END
$$;
