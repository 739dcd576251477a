-- discover: which relations are vector stores.

CREATE FUNCTION ml_rag._is_searched(relation oid, owner oid) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: whether calls that do not name a relation search it: it and what is read with it are trusted, and
-- setting searched_owners has its owner
-- Reads: ml_rag.setting_value
DECLARE
  _searched text := (SELECT v.value FROM ml_rag.setting_value AS v WHERE v.name = 'searched_owners');
BEGIN
  RETURN (_searched IS NULL OR _searched ~ '(^|,)\s*"\$user"\s*(,|$)'
    AND owner = quote_ident(current_user)::regrole
      OR ml_rag._is_member(owner, ml_rag._roles(_searched), false))
    AND ml_rag._are_trusted(ml_rag._read_with(relation));
END
$$;

CREATE FUNCTION ml_rag._discover_stores(
  vector_store text[], exclude_vector_store text[], schema text[], vector_store_columns jsonb,
  embed_model_id text, unmarked boolean, OUT stores jsonb, OUT error jsonb
)
LANGUAGE plpython3u STABLE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- plans are kept, and of a few rows of the catalog the planner would rather read all
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
AS $$
# purpose: the stage; see backend/retrieval/stores.py
@BACKEND@
return backend.discover_stores(
  plpy, vector_store, exclude_vector_store, schema, vector_store_columns, embed_model_id, unmarked,
  '@vector@')
$$;

CREATE FUNCTION ml_rag.discover(
  vector_store text[] DEFAULT NULL,
  exclude_vector_store text[] DEFAULT NULL,
  schema text[] DEFAULT NULL,
  vector_store_columns jsonb DEFAULT NULL,
  embed_model_id text DEFAULT NULL,
  unmarked boolean DEFAULT false
) RETURNS SETOF ml_rag.store
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10 SET search_path FROM CURRENT AS $$
-- purpose: the stage: the relations the caller may search  Reads: the catalog
DECLARE
  _found record;
BEGIN
  _found := ml_rag._discover_stores($1, $2, $3, $4, $5, $6);
  PERFORM ml_rag._raise(_found.error);
  RETURN QUERY SELECT * FROM jsonb_populate_recordset(NULL::ml_rag.store, _found.stores);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.discover(text[], text[], text[], jsonb, text, boolean) IS
$$the vector stores the caller may search
vector_store, exclude_vector_store: names, "schema.table" or "table". schema: names of schemas.
vector_store_columns: logical to real column names. embed_model_id: only stores of that model. unmarked: also
relations that are named in vector_store and carry no marker comment.
A vector store is a relation with the mapped columns, a vector or halfvec column whose comment contains
GENAI_OPTIONS=EMBED_MODEL_ID=<model id>, and SELECT granted to the caller. The marker can name the columns
(SEGMENT=content, DOCUMENT_NAME, DOCUMENT_ID, SEGMENT_NUMBER, METADATA); with SEGMENT the embedding can have
any name. Reading a relation can run its owner's code with the caller's rights. A relation that vector_store
does not name with its schema is therefore found only if the caller trusts its owner and the owner of its
schema (found = trusted), and those of its partitions and of what a view reads. The caller trusts itself,
superusers, the owner of the database, roles that a superuser made it a member of, and members of
ml_rag_publisher; a superuser trusts superusers only. Setting searched_owners restricts it to the stores of
some roles.$$;

CREATE FUNCTION ml_rag._find_reason(relation oid, options jsonb, OUT reason text, OUT hint text)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: _why_not, with names as they are in the catalog
-- Reads: the catalog
DECLARE
  _columns jsonb := options -> 'vector_store_columns';
  _embedding text := coalesce(_columns ->> 'segment_embedding', ml_rag._default_column(relation));
  _marked jsonb := ml_rag._marked_columns((
    SELECT col_description(a.attrelid, a.attnum) FROM pg_attribute AS a
    WHERE a.attrelid = _find_reason.relation AND a.attname = _embedding AND NOT a.attisdropped));
  _wanted text[] := ARRAY(SELECT v.value FROM jsonb_each_text(_columns) AS v UNION SELECT _embedding
                          UNION SELECT coalesce(_columns ->> 'segment', _marked ->> 'segment', 'segment'));
  _relation record;
  _column text;
  _type text;
  _comment text;
  _model text;
BEGIN
  SELECT c.oid, c.relkind, c.relowner, c.relispopulated, n.nspname,
    format('%I.%I', n.nspname, c.relname) AS full_name,
    ml_rag._names(n.nspname, c.relname) AS names, ml_rag._full_names(n.nspname, c.relname) AS full_names
  INTO _relation
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = _find_reason.relation;
  IF ml_rag._texts(options -> 'exclude_vector_store') && _relation.names THEN
    reason := concat('It is listed in "exclude_vector_store"',
      CASE WHEN options ? 'vector_store' THEN ' too' END, '.');
    RETURN;
  ELSIF NOT options -> 'schema' ? _relation.nspname THEN
    reason := format('It is in schema %I, which is not listed in "schema".', _relation.nspname);
    RETURN;
  ELSIF NOT ml_rag._texts(options -> 'vector_store') && _relation.names THEN
    reason := 'It is not listed in "vector_store".';
    hint := (SELECT format('Did you mean "%s"?', _relation.full_name)
             FROM unnest((ml_rag._texts(options -> 'vector_store'))[:20]) AS n (name)
             CROSS JOIN unnest(_relation.names) AS o (name)
             CROSS JOIN ml_rag._valid_text(o.name) AS r (name)
             WHERE ml_rag._distance_of_words(lower(left(n.name, 130)), lower(r.name)) <= least(2,
               length(r.name) / 4) LIMIT 1);
    RETURN;
  ELSIF NOT _relation.relispopulated THEN
    reason := 'It is a materialized view without data.';
    hint := format('REFRESH MATERIALIZED VIEW %s;', _relation.full_name);
    RETURN;
  END IF;
  SELECT e.column_name INTO _column FROM unnest(_wanted) AS e (column_name)
  WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
                    WHERE a.attrelid = _relation.oid AND a.attname = e.column_name AND NOT a.attisdropped)
  ORDER BY 1 LIMIT 1;
  IF _column IS NOT NULL THEN
    reason := format('It has no column %I.', _column);
    hint := coalesce(ml_rag._segments_hint(relation),
      CASE WHEN NOT EXISTS (
        SELECT FROM pg_attribute AS a
        WHERE a.attrelid = _relation.oid AND a.atttypid IN ('@vector@.vector'::regtype,
          '@vector@.halfvec'::regtype) AND NOT a.attisdropped)
      THEN CASE WHEN _relation.relkind IN ('r', 'p')
        THEN format('It has no vectors. SELECT ml_rag.create_vectorizer(%L, ''{"columns": "…"}'') makes '
          'them, and keeps them in step.', _relation.full_name)
        ELSE 'It has no vectors. ml_rag.create_vectorizer makes them in a table: let it show those of the '
          'table behind it.' END
      WHEN _columns IS NULL
      THEN format('Its owner can have its columns found: SELECT ml_rag.adopt(%L, ''{"embed_model_id": '
        '"…"}''). For one call, map them with "vector_store_columns".', _relation.full_name)
      ELSE 'Map the columns it has with "vector_store_columns".' END);
    RETURN;
  END IF;
  SELECT CASE WHEN a.atttypid NOT IN ('@vector@.vector'::regtype, '@vector@.halfvec'::regtype) THEN
    format_type(a.atttypid, NULL) END,
    col_description(a.attrelid, a.attnum)
  INTO _type, _comment
  FROM pg_attribute AS a WHERE a.attrelid = _relation.oid AND a.attname = _embedding;
  IF _type IS NOT NULL THEN
    reason := format('Column %I is of type %s, not vector or halfvec.', _embedding, _type);
    RETURN;
  END IF;
  SELECT string_agg(quote_ident(e.column_name), ', ' ORDER BY e.column_name) INTO _column
  FROM unnest(_wanted) AS e (column_name)
  WHERE NOT has_column_privilege(_relation.oid, e.column_name, 'SELECT');
  IF _column IS NOT NULL THEN
    reason := format('The caller may not SELECT %s.', _column);
    hint := format('Ask its owner for GRANT SELECT ON %s.', _relation.full_name);
    RETURN;
  END IF;
  _model := ml_rag._marked_model(_comment);
  IF _model IS NULL THEN
    reason := format('The comment of its column %I does not name an embedding model.', _embedding);
    hint :=
      format('COMMENT ON COLUMN %s.%I IS ''GENAI_OPTIONS=EMBED_MODEL_ID=…'', as the owner of the table.',
      _relation.full_name, _embedding);
  ELSIF _model <> options ->> 'embed_model_id' AND NOT EXISTS (
      SELECT FROM ml_rag._embeddings(relation) AS e WHERE e.model_id = options ->> 'embed_model_id') THEN
    SELECT format('It holds vectors of model%s %s, and the call is for %s.',
      CASE WHEN count(*) > 1 THEN 's' END,
        coalesce(string_agg(e.model_id, ', ' ORDER BY e.is_default DESC, e.model_id), _model),
          options ->> 'embed_model_id')
    INTO reason FROM ml_rag._embeddings(relation) AS e;
    hint := 'Leave "embed_model_id" out, or name stores of one model.';
  ELSIF NOT coalesce(ml_rag._texts(options -> 'vector_store') && _relation.full_names, false)
    AND NOT ml_rag._is_searched(relation, _relation.relowner) THEN
    reason := ml_rag._why_untrusted(relation);
    hint := format('Name it with its schema in "vector_store", "%s"%s.', _relation.full_name, CASE
      WHEN reason IS NULL THEN ''
      WHEN 0 = ANY (ml_rag._code_owners(ml_rag._read_with(relation))) THEN ', or begin another transaction'
      WHEN (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user) THEN
        ', or give it to a superuser'
      ELSE ', or have a superuser make that role a member of ml_rag_publisher, whom all users trust' END);
    reason := coalesce(reason, 'Its owner is not listed in setting "searched_owners".');
  ELSE
    -- the checks above are those of ml_rag.discover one by one; where they pass it has an integer-less
    -- segment_number
    reason := 'A column that "vector_store_columns" names has the wrong type.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._why_not(relation oid, options jsonb, OUT reason text, OUT hint text)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SET search_path FROM CURRENT AS $$
-- purpose: why a call does not search a relation, which is in a schema that the caller may use; options are
-- parsed ones
-- Reads: the catalog
BEGIN
  SELECT ml_rag._valid_text(r.reason), ml_rag._valid_text(r.hint) INTO reason, hint
  FROM ml_rag._find_reason(relation, options) AS r;
END
$$;

CREATE FUNCTION ml_rag._why_no_store(name text, options jsonb, OUT reason text, OUT hint text)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: why a call cannot search a relation that it names; options are parsed ones
-- Of a schema that the caller may not use it does not reveal even that a relation exists.  Reads: the catalog
DECLARE
  _relation oid;
BEGIN
  SELECT c.oid INTO _relation
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm') AND NOT pg_is_other_temp_schema(n.oid)
    AND has_schema_privilege(n.oid, 'USAGE')
    AND _why_no_store.name = ANY (ml_rag._names(n.nspname, c.relname))
  ORDER BY options -> 'schema' ? n.nspname DESC NULLS LAST, n.nspname LIMIT 1;
  IF _relation IS NULL THEN
    reason := 'No table or view of that name exists in a schema that the caller may use.';
    hint := 'A name is "schema.table" or "table", as SELECT vector_store FROM ml_rag.discover() lists them.';
    RETURN;
  END IF;
  SELECT w.reason, w.hint INTO reason, hint FROM ml_rag._why_not(_relation, options) AS w;
END
$$;

CREATE FUNCTION ml_rag._told_of(readable boolean, searched oid[])
RETURNS TABLE (oid oid, nspname name, relname name)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the relations that a call that does not search them may tell of, in schemas that the caller may
-- use; readable: only those of which the caller may read a column
-- Any role can make tables of 1600 vectors, each with a comment, and to look for a marker in all of them
-- takes a while. So those with the fewest come first, and of them as many as have 1000 together.
-- Reads: the catalog
BEGIN
  RETURN QUERY
    SELECT r.oid, r.nspname, r.relname
    FROM (
      SELECT c.oid, n.nspname, c.relname,
        sum(d.n) OVER (ORDER BY d.n, n.nspname COLLATE "C", c.relname COLLATE "C") AS comments
      -- as discovery does: every column of these types is one index entry away
      FROM (
        SELECT DISTINCT v.objid FROM pg_depend AS v
        WHERE v.refclassid = 'pg_type'::regclass AND v.refobjid IN ('@vector@.vector'::regtype,
          '@vector@.halfvec'::regtype)
          AND v.refobjsubid = 0 AND v.classid = 'pg_class'::regclass AND v.objsubid > 0 OFFSET 0) AS v
      JOIN pg_class AS c ON c.oid = v.objid
      JOIN pg_namespace AS n ON n.oid = c.relnamespace
      CROSS JOIN LATERAL (
        SELECT count(*) AS n,
          bool_or(NOT readable OR has_column_privilege(c.oid, m.objsubid::smallint, 'SELECT')) AS is_told
        FROM pg_description AS m
        WHERE m.objoid = c.oid AND m.classoid = 'pg_class'::regclass AND m.objsubid > 0) AS d
      WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm') AND NOT pg_is_other_temp_schema(n.oid)
        AND has_schema_privilege(n.oid, 'USAGE') AND d.is_told AND c.oid <> ALL (searched)
    ) AS r
    WHERE r.comments <= 1000;
END
$$;

CREATE FUNCTION ml_rag._left_out(options jsonb, OUT stores text, OUT hint text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: stores that a call does not search, at most ten beside those it names, with the reason of each,
-- and what to do about the first; null if none. options are parsed ones
-- Of a schema that the caller may not use it does not reveal even that a relation exists.  Reads: the catalog
DECLARE
  _names text[] := ml_rag._texts(options -> 'vector_store');
BEGIN
  SELECT string_agg(format('%s (%s)', l.name, rtrim(l.reason, '.')), ', '
    ORDER BY l.is_named DESC, l.name) || '.',
    (array_agg(CASE WHEN NOT options ? 'embed_model_id' AND l.reason LIKE 'It holds vectors of model%'
      THEN 'Name its model in "embed_model_id".' ELSE l.hint END
      ORDER BY l.hint IS NULL, l.hint NOT LIKE 'Did you mean %', l.is_named DESC, l.name))[1]
  INTO stores, hint
  FROM (
    SELECT left(n.name, 200) AS name, w.reason, w.hint, true AS is_named
    FROM unnest(_names[:10]) AS n (name) CROSS JOIN LATERAL ml_rag._why_no_store(n.name, options) AS w
    UNION ALL
    SELECT ml_rag._valid_text(r.name), w.reason, w.hint, false
    FROM (
      SELECT t.oid, format('%I.%I', t.nspname, t.relname) AS name
      -- what could be named in place of what was named
      FROM ml_rag._told_of(_names IS NOT NULL, CASE WHEN _names IS NULL
        THEN ARRAY(SELECT s.relation FROM unnest(ml_rag._discover(options)) AS s) ELSE '{}' END) AS t
      CROSS JOIN LATERAL (
        SELECT count(*) > 0 AS is_store FROM pg_attribute AS a
        WHERE a.attrelid = t.oid AND NOT a.attisdropped
          AND a.atttypid IN ('@vector@.vector'::regtype, '@vector@.halfvec'::regtype)
          AND ml_rag._marked_model(col_description(t.oid, a.attnum)) IS NOT NULL) AS m
      WHERE m.is_store
      ORDER BY 2 LIMIT 10) AS r
    CROSS JOIN LATERAL ml_rag._why_not(r.oid,
      jsonb_build_object('embed_model_id', ml_rag._get_setting('embed_model_id')) || options) AS w
    WHERE _names IS NULL OR w.reason = 'It is not listed in "vector_store".') AS l;
END
$$;

CREATE FUNCTION ml_rag._needs_embedding(options jsonb) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: whether a question has to be embedded; keyword search alone goes without, and so without a model
-- server, unless distances are asked for
BEGIN
  RETURN coalesce(options -> 'retrieval_options' ?| '{max_distance,percentage_distance}', false)
    OR CASE WHEN options ? 'arms'
         THEN jsonb_path_exists(options, 'lax $.arms[*] ? (
                (@.search == "semantic" || @.form starts with "vector") && !exists (@.query_embedding))')
         ELSE (options -> 'semantic_search')::boolean END;
END
$$;

CREATE FUNCTION ml_rag._check_named(options jsonb, stores ml_rag.store[]) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: warn of names that led to no store; stop stores that were named and are of different models.
-- options are parsed ones
DECLARE
  _name text;
  _why record;
BEGIN
  FOR _name IN SELECT n FROM unnest(ml_rag._texts(options -> 'vector_store')) WITH ORDINALITY AS n (n, place)
    ORDER BY n.place LOOP
    IF NOT EXISTS (
      SELECT FROM unnest(stores) AS s JOIN pg_class AS c ON c.oid = s.relation
      JOIN pg_namespace AS n ON n.oid = c.relnamespace
      WHERE _name = ANY (ml_rag._names(n.nspname, c.relname)))
    THEN
      _why := ml_rag._why_no_store(_name, options);
      RAISE WARNING USING ERRCODE = '01000',
        MESSAGE = format('"%s" is not a vector store that this call can search; ignored', left(_name, 200)),
        DETAIL = _why.reason,
        HINT = coalesce(_why.hint, 'SELECT * FROM ml_rag.discover() lists the stores that can be searched.');
    END IF;
  END LOOP;
  IF NOT options ? 'embed_model_id' AND ml_rag._needs_embedding(options)
    AND (SELECT count(DISTINCT s.embed_model_id) FROM unnest(stores) AS s) > 1 THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = 'the vector stores named were made with different embedding models',
      DETAIL = (SELECT string_agg(format('%s: %s', s.vector_store, coalesce(s.embed_model_id, 'none named')),
        ', ') || '.'
                FROM unnest(stores) AS s),
      HINT = 'Name one of the models in "embed_model_id", or stores of one model in "vector_store".';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._discover(options jsonb) RETURNS ml_rag.store[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the stores of a call, where it does not search them at once: which model counts, warnings for
-- names that led nowhere; options are parsed ones
DECLARE
  _names text[] := ml_rag._texts($1 -> 'vector_store');
  _model text := $1 ->> 'embed_model_id';
  _stores ml_rag.store[];
BEGIN
  _stores := ARRAY(SELECT s FROM ml_rag.discover(
    _names, ml_rag._texts($1 -> 'exclude_vector_store'), ml_rag._texts($1 -> 'schema'),
    $1 -> 'vector_store_columns', CASE WHEN _model IS NULL AND _names IS NULL AND ml_rag._needs_embedding($1)
         THEN ml_rag._get_setting('embed_model_id') ELSE _model END,
    $1 ? 'vector_store_columns' AND $1 ?| '{query_embedding,embed_model_id}') AS s);
  -- one name and one store: nothing to compare
  IF _names IS NOT NULL AND (cardinality(_names) <> 1 OR cardinality(_stores) <> 1) THEN
    PERFORM ml_rag._check_named($1, _stores);
  END IF;
  RETURN _stores;
END
$$;

CREATE FUNCTION ml_rag._limit_wait() RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: wait no longer than a second for a lock, until lock_timeout is put back; returns what it was
DECLARE
  _former text := current_setting('lock_timeout');
BEGIN
  IF _former = '0' OR _former::interval > interval '1 second' THEN
    PERFORM set_config('lock_timeout', '1s', true);
  END IF;
  RETURN _former;
END
$$;

CREATE FUNCTION ml_rag._as_jsonb(document json) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the metadata of a row where the column is json: null where jsonb cannot hold it (\u0000,
-- 1e999999, as deep as there is stack), since one such row must not break the search of all the others
BEGIN
  RETURN document::jsonb;
EXCEPTION WHEN data_exception OR statement_too_complex THEN
  RETURN NULL;
END
$$;

CREATE FUNCTION ml_rag._as_jsonb(document anyelement) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE AS $$
-- purpose: the same of a column of any other type. One expression, for PostgreSQL to put in the place of the
-- call: it pins no search_path, and names the schema
SELECT pg_catalog.to_jsonb(document)
$$;

CREATE FUNCTION ml_rag._document_name(store ml_rag.store) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: SQL of the name of the document of a row t: its column, else what programs keep of it in the
-- metadata, else the store's name
BEGIN
  IF store.document_name IS NOT NULL THEN
    RETURN format('t.%I::text', store.document_name);
  ELSIF store.metadata IS NULL THEN
    RETURN quote_literal(store.vector_store);
  END IF;
  RETURN format('coalesce(%s, %L)', (
    SELECT string_agg(format('nullif(ml_rag._as_jsonb(t.%I) ->> %L, %L)', store.metadata, k, ''), ', '
      ORDER BY place)
    FROM unnest('{source,file_path,file_name,url,title}'::text[]) WITH ORDINALITY AS u (k, place)),
      store.vector_store);
END
$$;
