-- adopt: tables of vectors that other programs made, found from then on like any other store.

CREATE FUNCTION ml_rag._column_like(relation oid, names text[], types regtype[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the column of one of those types that has the first of the names, in any case; null if none
-- Reads: the catalog
BEGIN
  RETURN (SELECT a.attname FROM pg_attribute AS a
          WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
            AND lower(a.attname) = ANY (names)
            AND (types IS NULL OR a.atttypid = ANY (types))
          ORDER BY array_position(names, lower(a.attname)) LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._adopted_columns(relation oid, given jsonb, OUT kind text, OUT columns jsonb)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: which column of a relation is what: as the call says, else as the program that made it has it,
-- else by usual names
-- Reads: the catalog
DECLARE
  _texts CONSTANT regtype[] := '{text,varchar}';
  _vectors CONSTANT regtype[] := ARRAY['@vector@.vector'::regtype, '@vector@.halfvec'::regtype];
  _embeddings text[] := ARRAY(SELECT a.attname FROM pg_attribute AS a
                              WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
                                AND a.atttypid = ANY (_vectors)
                              ORDER BY a.attnum);
  _names text[] := ARRAY(SELECT a.attname FROM pg_attribute AS a
                         WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
                         ORDER BY a.attnum);
  -- what the program that made it calls its columns
  _known jsonb;
  _column record;
BEGIN
  SELECT s.kind, s.columns INTO kind, _known
  FROM (VALUES
    (1, 'langchain-postgres PGVector', '{collection_id,embedding,document,cmetadata}'::text[],
      '{"segment_embedding": "embedding", "segment": "document",
       "metadata": "cmetadata", "document_id": "id"}'::jsonb),
    (2, 'langchain-postgres PGVectorStore', '{langchain_id,content,embedding}',
      '{"segment_embedding": "embedding", "segment": "content",
       "metadata": "langchain_metadata", "document_id": "langchain_id"}'),
    (3, 'LlamaIndex', '{node_id,text,metadata_,embedding}',
      '{"segment_embedding": "embedding", "segment": "text",
       "metadata": "metadata_", "document_id": "node_id"}'),
    (4, 'pgai', '{embedding_uuid,chunk_seq,chunk,embedding}',
      '{"segment_embedding": "embedding", "segment": "chunk",
       "segment_number": "chunk_seq", "document_id": "id"}'),
    (5, 'Haystack', '{id,embedding,content,blob_meta,meta}',
      '{"segment_embedding": "embedding", "segment": "content", "metadata": "meta", "document_id": "id"}')
  ) AS s (place, kind, needed, columns)
  WHERE s.needed <@ _names ORDER BY s.place LIMIT 1;
  kind := coalesce(kind, 'columns by their names');
  columns := jsonb_strip_nulls(jsonb_build_object(
      'segment_embedding', CASE cardinality(_embeddings) WHEN 1 THEN _embeddings[1]
        ELSE ml_rag._column_like(relation, '{segment_embedding,embedding,embeddings,vector}', _vectors) END,
      'segment', ml_rag._column_like(relation,
        '{segment,content,chunk,page_content,document,text,body,passage}', _texts),
      'document_name', ml_rag._column_like(relation,
        '{document_name,file_name,filename,title,source,path,uri,url,name}', _texts),
      'document_id', ml_rag._column_like(relation, '{document_id,doc_id,id}', NULL),
      'segment_number', ml_rag._column_like(relation,
        '{segment_number,chunk_number,chunk_index,chunk_seq,chunk_id}',
        '{smallint,integer,bigint}'),
      'metadata', ml_rag._column_like(relation, '{metadata,meta,cmetadata,attributes}', '{json,jsonb}')))
    || (SELECT coalesce(jsonb_object_agg(c.key, c.value), '{}') FROM jsonb_each_text(_known) AS c
      WHERE c.value = ANY (_names))
    || coalesce(given, '{}');
  FOR _column IN SELECT c.key, c.value FROM jsonb_each_text(columns) AS c LOOP
    IF NOT EXISTS (SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
                   WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
                     AND a.attname = _column.value
                     AND CASE _column.key WHEN 'segment_embedding' THEN a.atttypid = ANY (_vectors)
                       WHEN 'segment' THEN t.typcategory = 'S' ELSE true END) THEN
      PERFORM ml_rag._bad_option('vector_store_columns', jsonb_build_object(_column.key, _column.value),
        CASE _column.key WHEN 'segment_embedding' THEN 'a column of type vector or halfvec'
          WHEN 'segment' THEN 'a column of type text' ELSE 'a column of the table' END);
    ELSIF _column.value ~ '[[:space:],;]' AND _column.key <> 'segment_embedding' THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('column "%s" cannot stand in a marker', _column.value),
        DETAIL = 'Blanks, commas and semicolons end a name there.',
        HINT = 'Rename the column, or adopt a view that calls it something else.';
    END IF;
  END LOOP;
  IF columns ->> 'segment_embedding' IS NULL OR columns ->> 'segment' IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('"%s" does not tell which column holds the %s', relation::regclass,
        CASE WHEN columns ->> 'segment_embedding' IS NULL THEN 'embeddings' ELSE 'texts' END),
      DETAIL = CASE WHEN columns ->> 'segment_embedding' IS NULL THEN
        format('Columns of type vector or halfvec: %s.',
        coalesce(nullif(array_to_string(_embeddings, ', '), ''), 'none'))
        ELSE 'None has a usual name, such as content or text.' END,
      HINT = CASE WHEN cardinality(_embeddings) = 0
        THEN 'ml_rag.create_vectorizer makes embeddings in a table; a view has to show those of the table '
          'behind it.'
        ELSE 'Name it in "vector_store_columns": {"segment": …, "segment_embedding": …}.' END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._check_sample(relation regclass, columns jsonb, model_id text, n integer,
  OUT checked integer, OUT similarity numeric)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: that the model makes the vectors that are there: of rows at random, embedded again, how many were
-- checked, and the least cosine similarity of a new and an old vector; one of zeros has none to any. Of each
-- collection by itself: programs embed them with different models
-- Reads: the relation, as the caller  Errors: 22000, 22023
DECLARE
  _column text := ml_rag._column_like(relation, '{collection_id,collection_name,collection}', NULL);
  _collections text[] := ARRAY[NULL::text];
  _collection text;
  _rows record;
  _made @vector@.vector[];
  _other integer;
BEGIN
  checked := 0;
  IF _column IS NOT NULL AND n > 0 THEN
    EXECUTE format('SELECT array_agg(DISTINCT t.%I::text) FROM %s AS t', _column,
      ml_rag._relation_name(relation)) INTO _collections;
  END IF;
  FOREACH _collection IN ARRAY coalesce(_collections, '{}') LOOP
    -- embeddings and texts are read of those only that are taken
    EXECUTE
      format('SELECT array_agg(s.text::text) AS texts, array_agg(s.embedding::@vector@.vector) AS embeddings '
        'FROM ('
        'SELECT t.%I AS text, t.%I AS embedding FROM %s AS t WHERE t.%1$I ~ ''[^[:space:]]'' AND t.%2$I IS '
        'NOT NULL%4$s'
        ' ORDER BY random() LIMIT $1) AS s',
      columns ->> 'segment', columns ->> 'segment_embedding', ml_rag._relation_name(relation),
      CASE WHEN _column IS NOT NULL THEN format(' AND t.%I::text IS NOT DISTINCT FROM $2', _column) END)
        INTO _rows USING n, _collection;
    CONTINUE WHEN _rows.texts IS NULL;
    checked := checked + cardinality(_rows.texts);
    _made := ml_rag._embed_texts(_rows.texts, model_id, 'document');
    _other := (SELECT min(@vector@.vector_dims(e)) FROM unnest(_rows.embeddings) AS e
               WHERE @vector@.vector_dims(e) <> @vector@.vector_dims(_made[1]));
    IF _other IS NOT NULL THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('model %s did not make the vectors of "%s"', model_id, relation),
        DETAIL = format('They have %s dimensions, those of the model have %s.', _other,
          @vector@.vector_dims(_made[1])),
        HINT = 'Name the model that made them in "embed_model_id".';
    END IF;
    similarity := least(similarity, (
      SELECT round(min(coalesce(nullif(1 - (a.stored OPERATOR(@vector@.<=>) a.made), 'NaN'), 0))::numeric, 4)
      FROM unnest(_rows.embeddings, _made) AS a (stored, made)));
    IF similarity < 0.99 THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = format('model %s does not make the vectors of "%s"', model_id, relation),
        DETAIL = format('Of %s rows%s embedded again one has a similarity of %s to the vector that is there; '
          'at least 0.99 is expected.', cardinality(_rows.texts),
          CASE WHEN _column IS NOT NULL THEN format(' where %I is %L', _column, left(_collection, 100)) END,
          similarity),
        HINT = 'Name the model that made them in "embed_model_id". Where other text was embedded than column '
          || (columns ->> 'segment') || ' holds, such as metadata before it, "sample": 0 goes without the '
            'check.';
    END IF;
  END LOOP;
END
$$;

CREATE FUNCTION ml_rag._collection_view(relation regclass, collection text, view_name text) RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: a view of one collection of langchain_pg_embedding, created or replaced; with security_invoker, if
-- the server has that
-- Reads: langchain_pg_collection  Writes: the view, as the caller
DECLARE
  _schema name := (SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.oid = relation);
  _name text := format('%I.%I', _schema, coalesce(view_name, collection));
  _collections regclass := to_regclass(format('%I.langchain_pg_collection', _schema));
  _former regclass := to_regclass(_name);
  _id uuid;
  _names text;
BEGIN
  IF octet_length(coalesce(view_name, collection)) > 63 THEN
    -- cut off it can be that of another collection's view, whose readers would see this one
    PERFORM ml_rag._bad_option('view', to_jsonb(left(coalesce(view_name, collection), 200)),
      'a name of at most 63 bytes',
      CASE WHEN view_name IS NULL THEN 'That of the collection is longer: name the view in "view".' END);
  END IF;
  -- the call names the one relation and not the other, which may be a view of another role
  PERFORM ml_rag._hold(ARRAY[_collections::oid]) WHERE _collections IS NOT NULL;
  IF NOT EXISTS (SELECT FROM pg_class AS c JOIN pg_class AS r ON r.oid = relation AND r.relowner = c.relowner
                 WHERE c.oid = _collections) THEN
    PERFORM ml_rag._bad_option('collection', to_jsonb(collection),
      format('nothing, where schema %I has no table langchain_pg_collection of the same owner', _schema));
  END IF;
  EXECUTE format('SELECT c.uuid FROM %s AS c WHERE c.name = $1', ml_rag._relation_name(_collections))
    INTO _id USING collection;
  IF _id IS NULL THEN
    EXECUTE format('SELECT string_agg(to_json(left(n.name, 100))::text, '', '' ORDER BY n.name) '
      'FROM (SELECT c.name::text AS name FROM %s AS c ORDER BY 1 LIMIT 10) AS n',
      ml_rag._relation_name(_collections)) INTO _names;
    PERFORM ml_rag._bad_option('collection', to_jsonb(collection),
      'the name of a collection of langchain_pg_collection', 'It has: ' || _names || '.');
  END IF;
  -- a view that is replaced keeps its owner, its privileges and its triggers
  PERFORM ml_rag._hold(ARRAY[_former::oid]) WHERE _former IS NOT NULL;
  IF _former IS NOT NULL AND NOT EXISTS (
    SELECT FROM pg_class AS v JOIN pg_class AS c ON c.oid = relation
    WHERE v.oid = _former AND v.relkind = 'v'
      AND v.relowner IN (c.relowner, quote_ident(current_user)::regrole)) THEN
    RAISE EXCEPTION USING ERRCODE = '42P07', MESSAGE = format('relation "%s" already exists', _former),
      DETAIL = CASE (SELECT v.relkind FROM pg_class AS v WHERE v.oid = _former) WHEN 'v' THEN
        'It belongs to another role, which could change what it shows and run code as its readers.'
        ELSE 'It is not a view.' END,
      HINT = 'Give the view another name in "view".';
  END IF;
  EXECUTE format('CREATE %s VIEW %s %s AS SELECT t.id, t.document, t.cmetadata, t.embedding FROM %s AS t '
      'WHERE t.collection_id = %L', CASE WHEN _former IS NOT NULL THEN 'OR REPLACE' END, _name,
    CASE WHEN current_setting('server_version_num')::integer >= 150000 THEN
      'WITH (security_invoker = true)' END,
    ml_rag._relation_name(relation), _id);
  RETURN _name::regclass;
END
$$;

CREATE FUNCTION ml_rag.adopt(relation regclass, options jsonb DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the marker of a table that another program made
-- Reads: the relation  Writes: the comment of its column, as the caller
DECLARE
  _options jsonb;
  _relation regclass := relation;
  _found record;
  _column name;
  _model text;
  _sample record;
BEGIN
  _options := ml_rag.parse_options('adopt', $2);
  IF NOT EXISTS (SELECT FROM pg_class AS c
    WHERE c.oid = _relation AND c.relkind IN ('r', 'p', 'f', 'v', 'm')) THEN
    RAISE EXCEPTION USING ERRCODE = CASE WHEN EXISTS (SELECT FROM pg_class AS c WHERE c.oid = _relation) THEN
      '42809' ELSE '42P01' END,
      MESSAGE = format('%s is not a table or view', coalesce(_relation::text, 'null'));
  END IF;
  PERFORM ml_rag._check_transaction('a table cannot be adopted', _relation);
  PERFORM ml_rag._hold(ARRAY[_relation::oid]);
  PERFORM ml_rag.parse_options('vector_store_columns', _options -> 'vector_store_columns');
  _found := ml_rag._adopted_columns(_relation, jsonb_strip_nulls(_options -> 'vector_store_columns'));
  IF _options ? 'collection' AND _found.kind <> 'langchain-postgres PGVector' THEN
    PERFORM ml_rag._bad_option('collection', _options -> 'collection',
      'nothing, where the table has no collections');
  ELSIF _options ? 'view' AND NOT _options ? 'collection' THEN
    PERFORM ml_rag._bad_option('view', _options -> 'view', 'nothing without "collection"');
  END IF;
  IF ml_rag._is_vectorized(_relation, 'segment') THEN
    RAISE EXCEPTION USING ERRCODE = '55000',
      MESSAGE = format('table "%s" is a vector store already', _relation),
      DETAIL = 'It has a vectorizer, whose columns the comment of its embedding names.',
      HINT = 'Only a table that another program fills is to be adopted.';
  END IF;
  _column := _found.columns ->> 'segment_embedding';
  _model := coalesce(_options ->> 'embed_model_id', (
    SELECT ml_rag._marked_model(col_description(a.attrelid, a.attnum)) FROM pg_attribute AS a
    WHERE a.attrelid = _relation AND a.attname = _column AND NOT a.attisdropped));
  IF _model IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('the model that made the vectors of "%s" is not known', _relation),
      DETAIL = format('Column %I is of type %s; no comment names its model.', _column,
        (SELECT format_type(a.atttypid, a.atttypmod) FROM pg_attribute AS a
          WHERE a.attrelid = _relation AND a.attname = _column)),
      HINT = 'Name it in "embed_model_id": SELECT * FROM ml_supported_models() lists models with their '
        'dimensions.';
  ELSIF _model ~ '[[:space:],;]' THEN
    PERFORM ml_rag._bad_option('embed_model_id', to_jsonb(_model),
      'a name without blanks, commas and semicolons');
  END IF;
  IF _options ? 'collection' THEN
    _relation := ml_rag._collection_view(_relation, _options ->> 'collection', _options ->> 'view');
  END IF;
  _sample := ml_rag._check_sample(_relation, _found.columns, _model, (_options -> 'sample')::integer);
  PERFORM ml_rag._mark(_relation, _column, (
    SELECT jsonb_object_agg(upper(k.key), _found.columns -> k.key)
    FROM unnest('{segment,document_name,document_id,segment_number,metadata}'::text[]) AS k (key))
    || jsonb_build_object('EMBED_MODEL_ID', _model));
  IF (SELECT c.relkind IN ('r', 'p') FROM pg_class AS c WHERE c.oid = _relation)
    AND NOT EXISTS (SELECT FROM ml_rag._keyword_index(_relation)) THEN
    RAISE NOTICE USING MESSAGE = format('"%s" has no keyword index yet', _relation),
      HINT = format('To search it by words, too: SELECT ml_rag.enable_keyword_search(%L, %L);',
        ml_rag._full_name(_relation), jsonb_build_object('segment', _found.columns -> 'segment'));
  END IF;
  RETURN jsonb_build_object('vector_store', ml_rag._full_name(_relation), 'made_by', _found.kind,
    'embed_model_id', _model,
    'columns', _found.columns, 'checked', _sample.checked, 'least_similarity', _sample.similarity);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.adopt(regclass, jsonb) IS
$$makes a table of vectors that another program made a vector store: ml_rag.adopt('documents', '{"embed_model_id": "m"}')
It writes the marker comment of the column and changes nothing else, so the program works as before. It knows
the columns of langchain-postgres (PGVector and PGVectorStore), LlamaIndex, pgai, Haystack and the usual names
(content, metadata, embedding); options: SELECT * FROM ml_rag.option WHERE routine = 'adopt'. Some rows
of each collection, taken at random, are embedded again: a cosine similarity below 0.99 to the vector that is
there is an error. For the owner of the table or view.
Returns {"vector_store", "made_by", "embed_model_id", "columns", "checked", "least_similarity"}.
Errors: 22023 bad option, columns or model not known, vectors of another model; 25006 read-only; 42501; 42809,
42P01 no such table; 55000 model not available, isolation level, or the table has a vectorizer; 08006; 53300;
57014; 38000.$$;
