-- marker: the comment of a vector column that says which embedding model its vectors are of: read and changed
-- here only. The marker runs from GENAI_OPTIONS= to the next blank, with commas or semicolons between its
-- entries; the first one that names a model counts.
--
-- A marker can name the columns beside it:
-- GENAI_OPTIONS=EMBED_MODEL_ID=m,SEGMENT=content,DOCUMENT_NAME=title,METADATA=meta, also
-- DOCUMENT_ID and SEGMENT_NUMBER. With SEGMENT the column counts as segment_embedding, whatever its name is.
--
-- MAX_DISTANCE=<limit> is what "auto" stands for (ml_rag.calibrate). EF_SEARCH, PROBES and RESCORE are the
-- settings that searches of its index take, RECALL and TUNED_ROWS what ml_rag.tune_index measured with them,
-- of how many rows. A store can have several embeddings of its texts, each a column with a marker:
-- segment_embedding, and those whose marker has EMBEDDING=<name>. The default one is segment_embedding,
-- unless another one's marker has DEFAULT=true. The comment is all that says so: it is dumped, renamed and
-- dropped together with the column, and only the table's owner can change it.

CREATE FUNCTION ml_rag._marker_pattern() RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: a regular expression of a marker up to and with its model: what stands before that, and the model
BEGIN
  RETURN E'(GENAI_OPTIONS=(?:[^ \t\n\r\f\x0b]*?[,;])?EMBED_MODEL_ID=)([^,;= \t\n\r\f\x0b]+)'
    '(?=[,; \t\n\r\f\x0b]|$)';
END
$$;

CREATE FUNCTION ml_rag._beginning(comment text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the first 10000 characters of a comment; null if it has more than 40000 bytes
-- Discovery reads comments for all roles, and any role may write one of 1 GB, or with bytes that are not
-- characters.
BEGIN
  RETURN left(CASE WHEN octet_length(comment) <= 40000 THEN ml_rag._valid_text(comment) END, 10000);
END
$$;

CREATE FUNCTION ml_rag._marked_model(comment text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the embedding model that the comment of a column names; null if none
DECLARE
  _comment text := ml_rag._beginning($1);
  _at integer := strpos(_comment, 'GENAI_OPTIONS=');
  _model text;
BEGIN
  IF _at > 0 AND _at = strpos(_comment, 'GENAI_OPTIONS=EMBED_MODEL_ID=') THEN
    -- as it mostly is: the pattern says the same and takes ten times as long
    _model := split_part(translate(substr(_comment, _at + 29), E',;\t\n\r\f\x0b', '       '), ' ', 1);
    IF _model <> '' AND strpos(_model, '=') = 0 THEN
      RETURN _model;
    END IF;
  END IF;
  RETURN (regexp_match(_comment, ml_rag._marker_pattern()))[2];
END
$$;

CREATE FUNCTION ml_rag._marker(comment text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the marker that _marked_model reads, from its beginning to its end; null if none
DECLARE
  _at integer := strpos(comment, 'GENAI_OPTIONS=');
BEGIN
  IF _at > 0 AND _at = strpos(comment, 'GENAI_OPTIONS=EMBED_MODEL_ID=')
    AND substr(comment, _at + 29) ~ E'^[^,;= \t\n\r\f\x0b]+([,; \t\n\r\f\x0b]|$)' THEN
    -- as it mostly is, see _marked_model
    RETURN split_part(translate(substr(comment, _at), E'\t\n\r\f\x0b', '     '), ' ', 1);
  END IF;
  RETURN nullif(array_to_string(regexp_match(comment,
    concat(ml_rag._marker_pattern(), E'([^ \t\n\r\f\x0b]*)(?=[ \t\n\r\f\x0b]|$)')), ''), '');
END
$$;

CREATE FUNCTION ml_rag._marked_key(comment text, key text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the value of another key of the marker that _marked_model reads; null if missing
BEGIN
  -- its first key has no comma before it
  RETURN
    nullif(split_part(split_part(translate(replace(ml_rag._marker(ml_rag._beginning(comment)),
      'GENAI_OPTIONS=', ','), ';', ','),
    concat(',', key, '='), 2), ',', 1), '');
END
$$;

CREATE FUNCTION ml_rag._marked_columns(comment text) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the columns that a marker names, {"segment": …}, by the keys of vector_store_columns, and "key",
-- columns with + between them; null if none, as is usual
BEGIN
  IF ml_rag._beginning(comment) !~ '(SEGMENT|DOCUMENT_NAME|DOCUMENT_ID|SEGMENT_NUMBER|METADATA|KEY)=' THEN
    RETURN NULL;
  END IF;
  RETURN (
    SELECT jsonb_object_agg(lower(k.key), k.value)
    FROM (SELECT u.key, ml_rag._marked_key(comment, u.key) AS value
          FROM unnest('{SEGMENT,DOCUMENT_NAME,DOCUMENT_ID,SEGMENT_NUMBER,METADATA,KEY}'::text[]) AS u (key))
            AS k
    WHERE k.value IS NOT NULL);
END
$$;

CREATE FUNCTION ml_rag._embedding_comment(store ml_rag.store) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the comment of the vectors of a store  Reads: the catalog
BEGIN
  RETURN (SELECT col_description(a.attrelid, a.attnum) FROM pg_attribute AS a
          WHERE a.attrelid = store.relation AND a.attname = store.segment_embedding);
END
$$;

CREATE FUNCTION ml_rag._check_keeper(store ml_rag.store, what text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: stop before measuring where the caller could not keep the result in the marker; what: a limit, an
-- index setting
BEGIN
  IF NOT pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = store.relation), 'USAGE') THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('must be owner of %s to keep %s for it', store.vector_store, what),
      HINT = 'Set "keep" to false, or name stores of your own.';
  ELSIF ml_rag._marked_model(ml_rag._embedding_comment(store)) IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('%s has no marker that could keep %s', store.vector_store, what),
      HINT = 'ml_rag.adopt writes a marker.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._mark(relation regclass, column_name name, keys jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: write these keys into the marker of a column, without those of null
-- Writes: the comment of the column, as the caller  Errors: 42501
BEGIN
  PERFORM ml_rag._lock_comments(relation);
  EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', ml_rag._relation_name(relation), column_name,
    ml_rag._mark_keys((SELECT col_description(a.attrelid, a.attnum) FROM pg_attribute AS a
      WHERE a.attrelid = relation AND a.attname = column_name), keys));
END
$$;

CREATE FUNCTION ml_rag._kept_limit(stores ml_rag.store[]) RETURNS numeric
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the smallest max_distance that ml_rag.calibrate has kept for one of the stores; null if for none
BEGIN
  RETURN (
    SELECT min(k.value::numeric)
    FROM unnest(stores) AS s CROSS JOIN ml_rag._marked_key(ml_rag._embedding_comment(s),
      'MAX_DISTANCE') AS k (value)
    WHERE k.value ~ '^[0-9]{1,6}([.][0-9]{1,4})?$');
END
$$;

CREATE FUNCTION ml_rag._tuned(comment text) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: what ml_rag.tune_index has kept in a marker, {"ef_search", "probes", "rescore", "recall",
-- "tuned_rows"}, those that are there; null if it has kept nothing
BEGIN
  IF strpos(ml_rag._beginning(comment), 'TUNED_ROWS=') = 0 THEN
    RETURN NULL;
  END IF;
  RETURN (
    SELECT jsonb_object_agg(lower(k.key), m.value::numeric)
    FROM (VALUES ('EF_SEARCH', 1000), ('PROBES', 32768), ('RESCORE', 100000), ('RECALL', 1),
      ('TUNED_ROWS', 1e12)) AS k (key, most)
    CROSS JOIN ml_rag._marked_key(comment, k.key) AS m (value)
    -- CASE: a value that is not a number is not compared
    WHERE CASE WHEN m.value ~ CASE k.key WHEN 'RECALL' THEN '^[01]([.][0-9]{1,4})?$'
      ELSE '^[1-9][0-9]{0,11}$' END
      THEN m.value::numeric <= k.most END);
END
$$;

CREATE FUNCTION ml_rag._embeddings(relation oid)
RETURNS TABLE (name text, column_name name, attnum smallint, model_id text, type text, dimensions integer,
               is_default boolean, comment text)
LANGUAGE plpgsql STABLE PARALLEL SAFE ROWS 2 SET search_path FROM CURRENT AS $$
-- purpose: the embeddings of a relation, the default one first, if any; the name of one that has none is its
-- model's id
-- Reads: the catalog
BEGIN
  RETURN QUERY
    SELECT coalesce(m.name, m.model_id), m.attname, m.attnum, m.model_id,
      CASE m.atttypid WHEN '@vector@.vector'::regtype THEN 'vector' ELSE 'halfvec' END,
      nullif(m.atttypmod, -1),
      (m.is_marked OR m.is_usual) AND row_number() OVER preferred = 1, m.description
    FROM (
      SELECT a.attname, a.attnum, a.atttypid, a.atttypmod, d.description,
        ml_rag._marked_model(d.description) AS model_id,
        ml_rag._marked_key(d.description, 'EMBEDDING') AS name,
        coalesce(ml_rag._marked_key(d.description, 'DEFAULT') = 'true', false) AS is_marked,
        a.attname = 'segment_embedding' OR ml_rag._marked_key(d.description,
          'SEGMENT') IS NOT NULL AS is_usual
      FROM pg_attribute AS a
      JOIN pg_description AS d ON d.objoid = a.attrelid AND d.classoid = 'pg_class'::regclass
        AND d.objsubid = a.attnum
      WHERE a.attrelid = relation AND NOT a.attisdropped
        AND a.atttypid IN ('@vector@.vector'::regtype, '@vector@.halfvec'::regtype)
    ) AS m
    WHERE m.model_id IS NOT NULL AND (m.name IS NOT NULL OR m.is_marked OR m.is_usual)
    WINDOW preferred AS (ORDER BY m.is_marked AND m.attname <> 'segment_embedding' DESC,
      m.is_usual DESC, m.attnum)
    ORDER BY row_number() OVER preferred;
END
$$;

CREATE FUNCTION ml_rag._default_column(relation oid) RETURNS name
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the column of the default embedding; segment_embedding where the relation has none
BEGIN
  RETURN coalesce((SELECT e.column_name FROM ml_rag._embeddings(relation) AS e WHERE e.is_default),
    'segment_embedding');
END
$$;

CREATE FUNCTION ml_rag._embedding(store ml_rag.store, name text) RETURNS ml_rag.store
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the store with its embedding of that name in place of the one it was found with (name null: that
-- one); null where it has none of that name, or the caller may not read its column
-- Reads: the catalog
DECLARE
  _found record;
BEGIN
  IF name IS NULL THEN
    RETURN store;
  END IF;
  SELECT e.* INTO _found FROM ml_rag._embeddings(store.relation) AS e
  WHERE e.name = _embedding.name AND has_column_privilege(store.relation, e.attnum, 'SELECT')
  ORDER BY e.is_default DESC LIMIT 1;
  IF NOT FOUND THEN
    -- a column that vector_store_columns names has that name, too
    RETURN CASE WHEN name = store.embed_model_id THEN store END;
  END IF;
  store.segment_embedding := _found.column_name;
  store.embed_model_id := _found.model_id;
  store.embedding_type := _found.type;
  store.dimensions := _found.dimensions;
  RETURN store;
END
$$;

CREATE FUNCTION ml_rag._mark_keys(comment text, keys jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the comment with these keys in its marker, a key of null without; a comment without a marker gets
-- one at its end
DECLARE
  _marker text := ml_rag._marker(comment);
  _entries text := concat_ws(',', (
    SELECT string_agg(e.entry, ',' ORDER BY e.place)
    FROM regexp_split_to_table(substr(_marker, 15), '[,;]') WITH ORDINALITY AS e (entry, place)
    WHERE NOT keys ? split_part(e.entry, '=', 1)), (
    SELECT string_agg(concat(k.key, '=', k.value), ','
      ORDER BY k.key <> 'EMBED_MODEL_ID', k.key = 'DEFAULT', k.key)
    FROM jsonb_each_text(keys) AS k WHERE k.value IS NOT NULL));
BEGIN
  IF _marker IS NULL THEN
    RETURN concat_ws(' ', nullif(comment, ''), 'GENAI_OPTIONS=' || _entries);
  END IF;
  RETURN overlay(comment PLACING 'GENAI_OPTIONS=' || _entries
    FROM strpos(translate(comment, E'\t\n\r\f\x0b', '     ') || ' ', _marker || ' ') FOR length(_marker));
END
$$;
