-- add: another embedding of a store's texts, made while the store is in use, step by step.
-- What was done stands in the table itself: the column, its comment, its trigger, its rows. So a call can end
-- at any time.

-- What ml_rag.add_embedding fills; ml_rag.run_vectorizer, too.
CREATE TYPE ml_rag._embedding_job AS (
  store          regclass,
  vector_store   text,       -- schema.table, as shown
  call           integer,    -- what ml_rag._begin has returned
  embedding      text,
  column_name    name,
  default_column name,
  segment        name,       -- the column of the texts
  model_id       text,
  type           text,       -- with its dimensions
  starts_anew    boolean,    -- the column is there, and its vectors cannot be relied upon
  index_method   text,       -- the index that is wanted; null if none
  index_class    text,
  index_options  text,
  any_index      boolean,    -- the caller left it open: any index of the column will do
  batch_size     integer,
  lock_seconds   numeric
);

CREATE FUNCTION ml_rag._warn_of_subscribers(store regclass, column_name name, type text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
-- purpose: a logical replication stops at the first row whose new column the subscriber's table lacks
-- A publication with a list of columns does not send the new one.
DECLARE
  _publications text;
BEGIN
  SELECT string_agg(quote_ident(p.pubname), ', ' ORDER BY p.pubname) INTO _publications
  FROM pg_publication AS p
  WHERE EXISTS (SELECT FROM pg_get_publication_tables(p.pubname) AS t WHERE t.relid = store)
    AND NOT EXISTS (SELECT FROM pg_publication_rel AS r
                    WHERE r.prpubid = p.oid AND r.prrelid = store AND r.prattrs IS NOT NULL);
  IF _publications IS NOT NULL THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('subscribers of "%s" need its new column', store),
      DETAIL = format('It is in publication %s. The subscription of a table without column %I stops, and '
        'keeps the write-ahead log here until it resumes.', _publications, column_name),
      HINT = format('On each subscriber: ALTER TABLE %s ADD COLUMN %I %s; docs/embeddings.md has the rest.',
        ml_rag._full_name(store), column_name, type);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._is_vectorized(store oid, segment name) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: whether a vectorizer keeps the texts of a table  Reads: the catalog
BEGIN
  RETURN EXISTS (SELECT FROM pg_trigger AS g JOIN pg_proc AS p ON p.oid = g.tgfoid
                 JOIN pg_attribute AS a ON a.attrelid = store AND a.attname = segment AND a.attgenerated <> ''
                 WHERE g.tgrelid = store AND p.proname = '_wake_workers'
                   AND p.pronamespace = 'ml_rag'::regnamespace);
END
$$;

CREATE FUNCTION ml_rag._begin_embedding(store regclass, name text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: check everything before anything is made; returns the fields of ml_rag._embedding_job
DECLARE
  _options jsonb := ml_rag._with_dimensions(ml_rag.parse_options('add_embedding', $3));
  _columns jsonb := ml_rag.parse_options('vector_store_columns', _options -> 'vector_store_columns');
  _found record;
  _default name;
  _trigger record;
  _segment name;
  _model text;
  _type text;
  _index record;
  _method text;
  _dimensions integer;
  _column name;
  _starts_anew boolean;
  _wrong text;
BEGIN
  PERFORM ml_rag._check_embedding_table(store);
  IF coalesce(name, '') = '' OR name ~ '[[:space:],;]' OR octet_length(name) > 40 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid name of an embedding',
      DETAIL = format('Got %s; a name has 1 to 40 bytes, and no blanks, commas and semicolons.',
        coalesce(quote_literal(left(name, 100)), 'NULL'));
  END IF;
  SELECT e.* INTO _found FROM ml_rag._embeddings(store) AS e WHERE e.name = $2;
  _default := coalesce((SELECT e.column_name FROM ml_rag._embeddings(store) AS e WHERE e.is_default),
                       _columns ->> 'segment_embedding');
  _column := coalesce(_found.column_name, concat('segment_embedding_', name)::name);
  _trigger := ml_rag._embedding_trigger(store, coalesce(_found.attnum, (
    SELECT a.attnum FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = _default
      AND NOT a.attisdropped)));
  _segment := coalesce(_trigger.segment, _options #>> '{vector_store_columns,segment}', (
    SELECT ml_rag._marked_columns(e.comment) ->> 'segment' FROM ml_rag._embeddings(store) AS e
    WHERE e.column_name = _default),
    _columns ->> 'segment');
  SELECT string_agg(format('%I %s', w.name, replace(w.types[1]::text, '@vector@.', '')), ', '
    ORDER BY w.place) INTO _wrong
  FROM (VALUES (1, _segment, '{text,varchar}'::regtype[]),
               (2, _default, ARRAY['@vector@.vector'::regtype, '@vector@.halfvec'::regtype])) AS w (place,
                 name, types)
  WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
    WHERE a.attrelid = store AND a.attname = w.name AND a.attnum > 0
                    AND NOT a.attisdropped AND a.atttypid = ANY (w.types));
  IF _wrong IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('table "%s" is not a vector store', store),
      DETAIL = format('Columns missing or of another type: %s.', _wrong),
      HINT = coalesce(ml_rag._segments_hint(store),
        'Name its columns in "vector_store_columns": {"segment": …, "segment_embedding": …}.');
  ELSIF ml_rag._is_vectorized(store, _segment) THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the embeddings of "%s" cannot be changed', store),
      DETAIL = 'It has a vectorizer, which keeps one embedding.',
      HINT = format('For another model, first: SELECT ml_rag.drop_vectorizer(%1$L); then: '
        'SELECT ml_rag.create_vectorizer(%1$L, ''{"columns": …, "embed_model_id": …}'');', store::text);
  ELSIF EXISTS (SELECT FROM pg_attribute AS a
                WHERE a.attrelid = store AND a.attname = _segment AND a.attgenerated <> '') THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('the embeddings of "%s" cannot be changed', store),
      DETAIL = format('Column %I is generated: no trigger sees its text before it is written.', _segment),
      HINT = 'ml_embed_table embeds such a column, once.';
  ELSIF EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = _default
                AND ml_rag._marked_model(col_description(a.attrelid, a.attnum)) IS NULL) THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('column "%s" of table "%s" does not say which model its vectors are of',
        _default, store),
      HINT = format('Put the model''s id for …, and what the comment says already before it: '
        'COMMENT ON COLUMN %s.%I IS ''GENAI_OPTIONS=EMBED_MODEL_ID=…'';', store, _default);
  END IF;
  IF _trigger.later IS NOT NULL THEN
    PERFORM ml_rag._later_trigger(store, _trigger.later);
  END IF;

  _model := coalesce(_options ->> 'embed_model_id', _found.model_id, ml_rag._get_setting('embed_model_id'));
  IF _model ~ '[[:space:],;]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = 'the model id cannot stand in the marker of a vector store',
      DETAIL = format('Model id %L; blanks, commas and semicolons end the marker.', _model);
  ELSIF _found.model_id <> _model OR _found.type <> _options ->> 'type' THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('embedding "%s" of "%s" exists already, with another model or type',
      name, store),
      DETAIL = format('It is of model %s and type %s.', _found.model_id, _found.type),
      HINT = 'Use that model and type, or give another name.';
  END IF;
  _type := coalesce(_options ->> 'type', _found.type, (
    SELECT t.typname FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = store AND a.attname = _default AND NOT a.attisdropped));
  _index := ml_rag._index_definition(_options -> 'index', _options ->> 'distance_metric', _type);
  _method := _index.method;
  -- a first vector tells the dimensions, and whether the model works, before anything is made
  _dimensions := @vector@.vector_dims(ml_rag.embed('dimensions', _model));
  IF _found.dimensions <> _dimensions THEN
    RAISE EXCEPTION USING ERRCODE = '22000', MESSAGE = 'the model''s embeddings do not fit the column',
      DETAIL = format('The model answers %s dimensions, column %I has %s.', _dimensions, _column,
        _found.dimensions),
      HINT = 'The model has changed since the embedding was added: drop it, and add it again.';
  ELSIF _method IS NOT NULL AND _dimensions > (CASE WHEN _index.class ~ 'bit_hamming_ops"?$' THEN 64000
    WHEN _index.class ~ 'halfvec_[a-z0-9]+_ops"?$' THEN 4000 ELSE 2000 END) THEN
    RAISE NOTICE USING MESSAGE = format('embedding "%s" of "%s" gets no index', name, store),
      DETAIL = format('An index holds vectors of 2000 dimensions and half vectors of 4000; the column is '
        '%s(%s).', _type,
        _dimensions),
      HINT = 'Searches scan the table.';
    _method := NULL;
  END IF;
  _type := format('@vector@.%s(%s)', _type, _dimensions);

  -- what is the default, and in use, is filled but never taken away
  _starts_anew := _found.attnum IS NOT NULL AND NOT _found.is_default AND NOT coalesce(_trigger.is_on, false);
  IF _starts_anew THEN
    RAISE NOTICE USING MESSAGE = format('embedding "%s" of "%s" is made from the beginning', name, store),
      DETAIL = 'Its trigger was dropped or disabled, so it is not known which texts have changed.';
  ELSIF _found.attnum IS NULL THEN
    IF EXISTS (SELECT FROM pg_attribute AS a
      WHERE a.attrelid = store AND a.attname = _column AND NOT a.attisdropped) THEN
      RAISE EXCEPTION USING ERRCODE = '42701',
        MESSAGE = format('table "%s" has a column "%s" already', store, _column),
        HINT = format('Give another name, or ALTER TABLE %s RENAME COLUMN …;', store);
    END IF;
    PERFORM ml_rag._warn_of_subscribers(store, _column, _type);
  END IF;
  RETURN jsonb_build_object(
    'relation', store::oid::bigint, 'owner', (SELECT c.relowner::bigint FROM pg_class AS c
      WHERE c.oid = store),
    'store', store::oid::bigint, 'vector_store', ml_rag._full_name(store),
    'embedding', name, 'column_name', _column, 'default_column', _default, 'segment', _segment,
    'model_id', _model,
    'type', _type, 'starts_anew', _starts_anew, 'index_method', _method, 'index_class', _index.class,
    'index_options', _index.storage, 'any_index', NOT coalesce($3 ?| '{index,distance_metric}', false),
    'batch_size', _options -> 'batch_size', 'lock_seconds', _options -> 'lock_seconds');
END
$$;

CREATE FUNCTION ml_rag._prepare_embedding(job ml_rag._embedding_job) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the column, and a trigger for it and for the default embedding, unless they are there
-- Of a store that has several, no embedding is NOT NULL: a row that has a new text has none until it is
-- embedded.
-- Writes: the table's definition, as the caller
DECLARE
  _relation text;
  _one record;
  _default pg_attribute;
  _grant record;
BEGIN
  IF NOT job.starts_anew AND (
    SELECT bool_or(e.column_name = job.column_name)
      AND (count(*) = 1 OR bool_and((ml_rag._embedding_trigger(job.store, e.attnum)).name IS NOT NULL))
    FROM ml_rag._embeddings(job.store) AS e WHERE e.column_name = job.column_name OR e.is_default) THEN
    RETURN;
  END IF;
  PERFORM ml_rag._lock_table(job.store, 'ACCESS EXCLUSIVE', job.lock_seconds, job.call);
  _relation := ml_rag._relation_name(job.store);
  IF job.starts_anew THEN
    PERFORM ml_rag._drop_column(job.store, e.column_name, e.attnum)
    FROM ml_rag._embeddings(job.store) AS e WHERE e.name = job.embedding;
  END IF;
  SELECT e.model_id INTO _one FROM ml_rag._embeddings(job.store) AS e WHERE e.name = job.embedding;
  IF NOT FOUND THEN
    -- stored and open to whom that of the default embedding is
    SELECT a.* INTO _default FROM pg_attribute AS a
    WHERE a.attrelid = job.store AND a.attname = job.default_column AND NOT a.attisdropped;
    EXECUTE format('ALTER TABLE %s ADD COLUMN %I %s', _relation, job.column_name, job.type);
    -- Citus refuses it, and the default of the type mostly is what is there
    IF NOT ml_rag._is_distributed(job.store) THEN
      EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET STORAGE %s', _relation, job.column_name,
        CASE _default.attstorage WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'm' THEN 'MAIN'
          ELSE 'EXTENDED' END);
    END IF;
    EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', _relation, job.column_name,
      -- with the columns that the marker of the default one names
      ml_rag._mark_keys(format('GENAI_OPTIONS=EMBED_MODEL_ID=%s,EMBEDDING=%s', job.model_id, job.embedding),
        coalesce((
        SELECT jsonb_object_agg(upper(c.key), c.value)
        FROM jsonb_each_text(ml_rag._marked_columns(col_description(job.store, _default.attnum))) AS c),
          '{}')));
    FOR _grant IN SELECT * FROM aclexplode(_default.attacl) LOOP
      EXECUTE format('GRANT %s (%I) ON %s TO %s%s', _grant.privilege_type, job.column_name, _relation,
        CASE _grant.grantee WHEN 0 THEN 'PUBLIC' ELSE _grant.grantee::regrole::text END,
        CASE WHEN _grant.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
    END LOOP;
  ELSIF _one.model_id <> job.model_id THEN
    RAISE EXCEPTION USING ERRCODE = '55006',
      MESSAGE = format('another session has just added an embedding "%s" to "%s"', job.embedding, job.store),
      DETAIL = format('It is of model %s.', _one.model_id), HINT = 'Give another name.';
  END IF;
  IF NOT EXISTS (SELECT FROM ml_rag._embeddings(job.store) AS e WHERE e.is_default) THEN
    -- the default one has a column of another name, which vector_store_columns gave
    EXECUTE (
      SELECT format('COMMENT ON COLUMN %s.%I IS %L', _relation, a.attname,
        ml_rag._mark_keys(d.comment,
          jsonb_build_object('EMBEDDING', ml_rag._marked_model(d.comment), 'DEFAULT', true)))
      FROM pg_attribute AS a CROSS JOIN LATERAL (SELECT col_description(a.attrelid, a.attnum) AS comment) AS d
      WHERE a.attrelid = job.store AND a.attname = job.default_column AND NOT a.attisdropped);
  END IF;
  FOR _one IN SELECT e.column_name, (ml_rag._embedding_trigger(job.store, e.attnum)).name AS trigger
              FROM ml_rag._embeddings(job.store) AS e WHERE e.is_default OR e.name = job.embedding
  LOOP
    EXECUTE format('ALTER TABLE %s ALTER COLUMN %I DROP NOT NULL', _relation, _one.column_name);
    IF _one.trigger IS NULL THEN
      PERFORM ml_rag._follow_texts(job.store, _one.column_name, job.segment);
    END IF;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._index_embedding(job ml_rag._embedding_job, analyzes_all boolean) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the index that is wanted, unless there is one of its kind, or any if the caller left it open;
-- filling one row by row takes far longer. Writers of the table wait while it is built, and one session
-- builds it. Then come fresh statistics: of the column, or of the whole table (analyzes_all), once it has the
-- index: they decide which columns a question can state conditions on
-- Writes: an index, as the caller
DECLARE
  _is_made boolean := false;
BEGIN
  IF job.index_method IS NOT NULL
    AND pg_try_advisory_xact_lock(hashtextextended(format('ml_rag index %s %s', job.store::oid,
      job.column_name), 0)) AND NOT EXISTS (
    SELECT FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam
    JOIN pg_opclass AS o ON o.oid = x.indclass[0]
    JOIN pg_namespace AS n ON n.oid = o.opcnamespace
    WHERE x.indrelid = job.store AND x.indisvalid AND x.indnatts = 1
      AND (job.any_index AND m.amname <> 'btree' OR m.amname = job.index_method
        AND format('%I.%I', n.nspname, o.opcname) = job.index_class
           AND x.indpred IS NULL)
      -- what stands in an expression is its dependency
      AND EXISTS (SELECT FROM pg_attribute AS a JOIN pg_depend AS d ON d.refclassid = 'pg_class'::regclass
                    AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum
                  WHERE d.classid = 'pg_class'::regclass AND d.objid = x.indexrelid AND a.attrelid = job.store
                    AND a.attname = job.column_name AND NOT a.attisdropped)) THEN
    PERFORM ml_rag._lock_table(job.store, 'SHARE', job.lock_seconds, job.call);
    PERFORM ml_rag._create_index(job.store, job.index_method,
      (ml_rag._index_element(job.store, job.column_name, job.index_class)).element, job.index_options);
    _is_made := true;
  END IF;
  IF _is_made OR NOT analyzes_all THEN
    EXECUTE concat('ANALYZE ', ml_rag._relation_name(job.store),
      CASE WHEN NOT analyzes_all THEN format(' (%I)', job.column_name) END);
  END IF;
END
$$;

CREATE PROCEDURE ml_rag.add_embedding(store regclass, name text, options jsonb DEFAULT NULL,
  INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: one more embedding of a store that stays in use, a commit after each step
DECLARE
  _routine CONSTANT pg_catalog.text := 'ml_rag.add_embedding';
  _given CONSTANT pg_catalog.jsonb := pg_catalog.jsonb_build_array(store::pg_catalog.oid, name, options);
@WORK@
$$;
COMMENT ON PROCEDURE ml_rag.add_embedding(regclass, text, jsonb, jsonb) IS
$$adds another embedding of its texts to a vector store that stays in use: CALL ml_rag.add_embedding('handbook', 'e5')
A column beside segment_embedding is filled in batches, with a commit after each; rows that come or change
meanwhile are embedded too. Neither readers nor writers of the table wait for a model. The next call resumes
an interrupted one; after a finished one it fills the rows that have come since. Loads fill every embedding of
a store; a row that is inserted by hand has none, and one whose text is changed loses those that the same
statement does not set. ml_rag.use_embedding makes it the default, ml_rag.drop_embedding drops it;
docs/embeddings.md has the rest. For the owner of a table, partitioned or not; not inside a transaction block.
options: SELECT * FROM ml_rag.option WHERE routine IN ('add_embedding', 'index').
result: {"vector_store", "embedding", "embed_model_id", "segments" embedded by this call, "failed",
"first_error", "pending", "seconds"}. pending: rows without one at the end: those that failed, that others
were just changing, or that another call has: several share a table.
Errors: 22000 the model has other dimensions by now; 22023 bad option, name, model or table that is not a
vector store; 25001; 25006 read-only; 42701; 42704 dropped meanwhile; 42P01; 42501; 55000 a table or isolation
level that it cannot do, hidden rows, a trigger after its own, re-created meanwhile; 55006 another session has
just added another of that name; 55P03 lock_timeout: what was done is kept; 08006; 53300; 57014; 38000.$$;
