-- load: documents to vector stores: server files by vector_store_load, anything by load_documents.

CREATE PROCEDURE ml_rag._load_files(job jsonb, INOUT outcome jsonb DEFAULT NULL,
  INOUT error jsonb DEFAULT NULL)
LANGUAGE plpython3u
AS $$
# purpose: read, send, insert, commit, batch by batch; the commits are in Python so that no error between two
# batches can leave a request to the model server open. A procedure that commits can have no SET clause.
# outcome: with that of the URIs before
@BACKEND@
return backend.load_files(plpy, job, outcome)
$$;

CREATE FUNCTION ml_rag._load_contents(job jsonb, names text[], contents bytea[], OUT outcome jsonb,
  OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
@BACKEND@
return backend.load_contents(plpy, job, names, contents)
$$;

CREATE FUNCTION ml_rag._parse_chunking(options jsonb, may_be_function boolean DEFAULT false) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the object chunking; may_be_function: whether "split_by" may name a function of the caller's
DECLARE
  _known CONSTANT text[] := '{auto,paragraph,sentence,page,tokens}';
  _chunking jsonb := ml_rag.parse_options('chunking', options);
BEGIN
  -- what is not said stays so: the documents of a store are not made anew for an option that changes nothing
  IF _chunking ->> 'context' = 'none' THEN
    _chunking := _chunking - 'context';
  END IF;
  IF (_chunking ->> 'overlap_tokens')::integer > (_chunking ->> 'segment_tokens')::integer / 2 THEN
    PERFORM ml_rag._bad_option('overlap_tokens', _chunking -> 'overlap_tokens',
      format('at most half of "segment_tokens", which is %s', _chunking ->> 'segment_tokens'));
  END IF;
  IF lower(_chunking ->> 'split_by') = ANY (_known) THEN
    RETURN jsonb_set(_chunking, '{split_by}', to_jsonb(lower(_chunking ->> 'split_by')));
  ELSIF NOT may_be_function OR strpos(_chunking ->> 'split_by', '.') = 0 THEN
    PERFORM ml_rag._bad_option('split_by', _chunking -> 'split_by',
      array_to_string(_known, ', ') || CASE WHEN may_be_function THEN
        ', or the name of a function with its schema' ELSE '' END);
  END IF;
  PERFORM ml_rag._bad_option(o.key, o.value, 'none where a function splits') FROM jsonb_each(options) AS o
  WHERE o.key IN ('segment_tokens', 'overlap_tokens', 'context') AND o.value <> 'null';
  PERFORM ml_rag._find_function('split_by', _chunking -> 'split_by');
  RETURN _chunking;
END
$$;

CREATE FUNCTION ml_rag._parse_load_options(routine text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the options of a loading routine, with those of the object chunking and of file_dates, metadata
-- checked
DECLARE
  _parsed jsonb := ml_rag.parse_options($1, $2);
  _given jsonb;
  _one jsonb;
  _key text;
  _value text;
  _dates jsonb := '[]';
  _taken CONSTANT text[] :=
    '{format,file_name,file_type,file_size,source,left_out,creation_date,last_modified_date,'
    'last_accessed_date}';
BEGIN
  -- in the metadata of each segment
  PERFORM ml_rag._bad_option(m.name, CASE WHEN octet_length(m.given::text) <= 200 THEN m.given
      ELSE to_jsonb(left(m.given::text, 200)) END,
    format('an object of at most 64 kB, without the keys %s, which loads write',
      array_to_string(_taken, ', ')))
  FROM (SELECT 'metadata' AS name, _parsed -> 'metadata' AS given WHERE _parsed ? 'metadata'
    UNION ALL SELECT format('document_metadata.%s', d.key), d.value
    FROM jsonb_each(_parsed -> 'document_metadata') AS d) AS m
  WHERE jsonb_typeof(m.given) <> 'object' OR m.given ?| _taken OR octet_length(m.given::text) > 65536;
  IF _parsed ? 'describe_images' AND NOT has_function_privilege('@extschema@.ml_generate(text,jsonb)',
    'EXECUTE') THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'permission denied to have pictures described',
      DETAIL = 'Option "describe_images" sends them to a generation model, which needs EXECUTE on '
        'ml_generate.',
      HINT = 'Leave it out, or ask for the role ml_rag_user.';
  END IF;
  -- each is compiled, and held against each name, where nothing can cancel it
  PERFORM ml_rag._bad_option('document_metadata', to_jsonb(count(*)),
    'at most 1000 patterns, keys with * or ?')
  FROM jsonb_object_keys(_parsed -> 'document_metadata') AS k WHERE k ~ '[*?]' HAVING count(*) > 1000;
  IF _parsed ? 'file_dates' THEN
    -- dates as filters compare them, by code point
    FOR _given IN SELECT d FROM jsonb_array_elements(_parsed -> 'file_dates') AS d LOOP
      IF jsonb_typeof(_given) <> 'object' THEN
        PERFORM ml_rag._bad_option('file_dates', _given, 'an array of objects');
      END IF;
      _one := ml_rag.parse_options('file_dates', _given);
      FOR _key, _value IN SELECT d.key, d.value FROM jsonb_each_text(_one) AS d LOOP
        BEGIN
          IF _value !~ '^\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)?)?$'
              OR _value::timestamptz IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = '22007';
          END IF;
        EXCEPTION WHEN data_exception THEN
          PERFORM ml_rag._bad_option(_key, to_jsonb(left(_value, 100)),
            'a date as ISO 8601, such as 2026-11-22T09:30:00Z');
        END;
      END LOOP;
      _dates := _dates || jsonb_build_array(_one);
    END LOOP;
    _parsed := jsonb_set(_parsed, '{file_dates}', _dates);
  END IF;
  RETURN jsonb_set(_parsed, '{chunking}', ml_rag._parse_chunking(_parsed -> 'chunking', true));
END
$$;

CREATE FUNCTION ml_rag._load_job(store regclass, embed_model_id text, options jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: what Python needs to know to load documents into a store; options are parsed ones
-- splitter: the function of the caller's that splits; its documents come whole from the model server
DECLARE
  _store record;
  _request jsonb;
  _splitter text;
BEGIN
  _store := ml_rag._check_store(store, embed_model_id);
  IF ml_rag._is_distributed(store) AND ml_rag._calls_of(store) IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('documents cannot be loaded into "%s"', store),
      DETAIL = 'It is distributed by Citus.',
      HINT = format('SELECT ml_rag.distribute_store(%L) makes it a store.', store);
  END IF;
  IF strpos(options #>> '{chunking,split_by}', '.') > 0 THEN
    _splitter := (ml_rag._find_function('split_by', options #> '{chunking,split_by}')).name;
  END IF;
  _request := jsonb_strip_nulls(jsonb_build_object('embed_model_id', _store.model_id,
    'chunking', CASE WHEN _splitter IS NULL THEN options -> 'chunking' ELSE '{"split_by": "none"}' END,
      'language',
      options -> 'language', 'ocr', options -> 'ocr', 'describe_images', options -> 'describe_images'));
  RETURN jsonb_build_object('store', store::oid::bigint, 'relation', ml_rag._full_name(store),
    'embedding', _store.column_name, 'dimensions', _store.dimensions,
    'refresh', coalesce(options -> 'refresh', 'true'), 'file_dates', options -> 'file_dates',
    'metadata', options -> 'metadata', 'document_metadata', options -> 'document_metadata',
    'request', _request || jsonb_strip_nulls(jsonb_build_object('formats', options -> 'formats')),
    -- a document made with other options counts as changed; which formats are wanted does not change one, nor
    -- does the model, as another embedding can become the default
    -- a function of the caller's is of another definition when it was replaced
    'made_with',
      md5(concat((_request - 'embed_model_id')::text,
        pg_get_functiondef(to_regprocedure(_splitter || '(text)')))))
    || CASE WHEN _splitter IS NULL THEN '{}' ELSE jsonb_build_object('splitter', _splitter) END;
END
$$;

CREATE FUNCTION ml_rag._begin_load(uri text, options jsonb, path name[], former jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: check everything before the first file, make the store where there is none, return the job
-- former: the job of the URI before, into whose store this one goes
DECLARE
  _options jsonb := ml_rag._with_dimensions(ml_rag._parse_load_options('vector_store_load', options));
  _model text := _options ->> 'embed_model_id';
  -- a store that the call does not name must be trusted
  _is_judged boolean := coalesce((former ->> 'is_judged')::boolean, NOT _options ? 'schema_name');
  _found jsonb;
  _name record;
  _store regclass;
BEGIN
  IF uri IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the URI is missing',
      HINT = 'Name files as the server sees them: CALL vector_store_load(''file:///srv/docs/'').';
  END IF;
  PERFORM ml_rag._index_definition(_options -> 'index', _options ->> 'distance_metric', 'vector');
  PERFORM ml_rag._check_writable('documents cannot be loaded');
  _found := ml_rag._python('find_files', jsonb_build_array(uri));
  IF former IS NULL THEN
    _name := ml_rag._store_name(_options, _found ->> 'table_name', path);
    PERFORM pg_advisory_xact_lock(ml_rag._store_key(_name.schema_name, _name.table_name));
    _store := to_regclass(format('%I.%I', _name.schema_name, _name.table_name));
  ELSE
    _store := (former ->> 'store')::oid;
    PERFORM pg_advisory_xact_lock(ml_rag._store_key(_store));
  END IF;
  IF _store IS NOT NULL AND _is_judged THEN
    -- again, as any role can make this one wait for the lock
    PERFORM ml_rag._refuse_untrusted(_store);
  END IF;
  IF _store IS NULL THEN
    _is_judged := false;
    _store := ml_rag._make_store(_name.schema_name, _name.table_name,
      coalesce(_model, ml_rag._get_setting('embed_model_id')), _options ->> 'description',
      _options ->> 'language');
  END IF;
  RETURN ml_rag._load_job(_store, _model, _options) || jsonb_build_object('is_judged', _is_judged,
    'files', _found -> 'files', 'left_out', _found -> 'left_out', 'base', _found -> 'base', 'patterns',
    _found -> 'patterns',
    -- null where the caller left it open: then any index on the store will do
    'index', CASE WHEN options ->> 'distance_metric' IS NOT NULL THEN _options -> 'distance_metric' END,
    'index_options', _options -> 'index');
END
$$;

CREATE FUNCTION ml_rag._end_load(job jsonb, outcome jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the index, and the result with the store
DECLARE
  _store oid := (job ->> 'store')::oid;
BEGIN
  PERFORM pg_advisory_xact_lock(ml_rag._store_key(_store));
  PERFORM ml_rag._refuse_untrusted(_store) WHERE (job -> 'is_judged')::boolean;
  PERFORM ml_rag.index_store(_store, job ->> 'index', nullif(job -> 'index_options', 'null'));
  RETURN (SELECT outcome || jsonb_build_object('vector_store', format('%s.%s', n.nspname, c.relname))
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = _store);
END
$$;

CREATE FUNCTION ml_rag._uris(uri text) RETURNS text[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: one URI, or those of a JSON array of 1 to 100, each of which names something
DECLARE
  _given jsonb;
  _uris text[];
BEGIN
  IF uri IS NULL OR uri !~ '^\s*\[' THEN
    RETURN ARRAY[uri];
  END IF;
  BEGIN
    _given := uri::jsonb;
  EXCEPTION WHEN invalid_text_representation THEN
    NULL;
  END;
  _uris := ARRAY(SELECT u #>> '{}' FROM jsonb_array_elements(_given) WITH ORDINALITY AS e (u, place)
                 WHERE jsonb_typeof(u) = 'string' ORDER BY place);
  IF cardinality(_uris) NOT BETWEEN 1 AND 100 OR cardinality(_uris) <> jsonb_array_length(_given) THEN
    PERFORM ml_rag._bad_option('uri', to_jsonb(uri), 'a URI, or a JSON array of 1 to 100 of them',
      'Such as ''["file:///srv/handbook/", "file:///srv/faq.md"]''.');
  END IF;
  -- a misspelt one is noticed before the first is loaded
  IF cardinality(_uris) > 1 THEN
    PERFORM ml_rag._python('find_files', jsonb_build_array(u)) FROM unnest(_uris) AS u;
  END IF;
  RETURN _uris;
END
$$;

CREATE PROCEDURE @extschema@.vector_store_load(uri text, options jsonb DEFAULT NULL,
  INOUT result jsonb DEFAULT NULL)
LANGUAGE plpgsql
AS $$
-- purpose: server files to a vector store, a commit after each batch where the caller's transaction allows it
-- A procedure that commits can have no SET clause, so every name here is qualified and no operator is used.
-- Nor can it commit within a block that has an EXCEPTION clause.
DECLARE
  _call pg_catalog.int4 := ml_rag._begin('vector_store_load');
  _job pg_catalog.jsonb;
  _outcome pg_catalog.jsonb;
  _error pg_catalog.jsonb;
  _committed pg_catalog.bool;
  _nodes pg_catalog.int8;
  _filled pg_catalog.jsonb;
  _uris pg_catalog.text[];
  _uri pg_catalog.text;
BEGIN
  result := NULL;
  BEGIN
    _uris := ml_rag._uris(uri);
@CATCH_AND_END@
  END;
  FOREACH _uri IN ARRAY _uris LOOP
    BEGIN
      _job := ml_rag._begin_load(_uri, options, pg_catalog.current_schemas(false), _job);
@CATCH_AND_END@
    END;
    PERFORM ml_rag._stage(_call, 'load', pg_catalog.jsonb_extract_path_text(_job, 'request',
      'embed_model_id'));
    CALL ml_rag._load_files(_job, _outcome, _error);
    BEGIN
      PERFORM ml_rag._raise(_error);
      PERFORM ml_rag._stage(_call, 'index');
      result := ml_rag._end_load(_job, _outcome);
@CATCH_AND_END@
    END;
  END LOOP;
  LOOP
    CALL ml_rag._commit(_committed, _error);
    BEGIN
      SELECT w.job, w.result INTO _nodes, _filled
      FROM ml_rag._work(_nodes, 'fill_node_groups', pg_catalog.jsonb_build_array(
        pg_catalog.jsonb_extract_path(_job, 'store'), pg_catalog.jsonb_extract_path(_job, 'is_judged')),
        _call, _committed, _error) AS w;
      EXIT WHEN _filled IS NOT NULL;
@CATCH_AND_END@
    END;
  END LOOP;
  PERFORM ml_rag._end(_call);
END
$$;
COMMENT ON PROCEDURE @extschema@.vector_store_load(text, jsonb, jsonb) IS
$$loads files of the server into a vector store: CALL vector_store_load('file:///srv/handbook/')
uri: file:// and a path, or just an absolute path; a glob when it has ? or *; every file below when it ends in
/; a JSON array of such URIs: all of them into one store, named after the first. Hidden
files are skipped, and symbolic links that leave the folder. The table is created if it does not exist. By
default changed files are embedded again, new ones added, deleted ones removed; a document keeps its id.
options with ranges and defaults: SELECT * FROM ml_rag.option WHERE routine IN ('vector_store_load',
'chunking').
result: {"vector_store", "documents": {"loaded", "changed", "unchanged", "removed", "skipped", "failed"},
"segments", "failed": [{"document_name", "error", …}], "reasons": [{"error", "hint", "documents", "example",
"detail"}], "incomplete": [{"document_name", "left_out"}], "lost": [{"document_name", "metadata", "columns"}],
"seconds"}. A document that fails does not stop the others, and keeps the segments it had. reasons: of those
that failed, by their number.
incomplete: loaded, but for left_out, such as a damaged page. lost: keys of the metadata and columns that you
added and that differed between the segments of a document that has changed; those that were the same in all
of them are kept. unmatched: names of "document_metadata" that no document has, where there are any. Commits
after each batch outside a transaction block, so that an interrupted load can be called again and continues.
skipped: of a format that
"formats" excludes. Needs pg_read_server_files.
Errors: 22023 bad option, no such file, table that is not a vector store; 22000 different dimensions; 25006
read-only; 42501; 42P01 store dropped meanwhile; 53100 disk full; 55000; 08006; 53300; 57014; 38000.$$;

CREATE FUNCTION ml_rag.load_documents(store regclass, names text[], contents bytea[],
  options jsonb DEFAULT NULL)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: documents the client sends, into a store
-- Writes: the store, as the caller
DECLARE
  _call integer := ml_rag._begin('ml_rag.load_documents');
  _options jsonb;
  _job jsonb;
  _outcome record;
BEGIN
  _options := ml_rag._parse_load_options('load_documents', $4);
  IF names IS NULL OR contents IS NULL OR cardinality(names) <> cardinality(contents)
    OR array_position(names, NULL) IS NOT NULL OR array_position(contents, NULL) IS NOT NULL
    OR array_ndims(names) > 1 OR array_ndims(contents) > 1 OR '' = ANY (names)
    OR cardinality(names) <> (SELECT count(DISTINCT n) FROM unnest(names) AS n) THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'names and contents of the documents do not match',
      DETAIL = format('%s names, %s contents; each document needs a unique name and a content, neither of '
        'them null.', coalesce(cardinality(names), 0), coalesce(cardinality(contents), 0));
  END IF;
  IF jsonb_array_length(_options -> 'file_dates') <> cardinality(names) THEN
    PERFORM ml_rag._bad_option('file_dates', to_jsonb(jsonb_array_length(_options -> 'file_dates')),
      format('as many objects as there are names, %s', cardinality(names)));
  END IF;
  PERFORM ml_rag._check_writable('documents cannot be loaded', store);
  _job := ml_rag._load_job(store, _options ->> 'embed_model_id', _options);
  PERFORM ml_rag._stage(_call, 'load', _job #>> '{request,embed_model_id}');
  SELECT o.* INTO _outcome FROM ml_rag._load_contents(_job, names, contents) AS o;
  PERFORM ml_rag._raise(_outcome.error);
  PERFORM ml_rag._end(_call);
  RETURN _outcome.outcome;
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION ml_rag.load_documents(regclass, text[], bytea[], jsonb) IS
$$loads documents that the client sends into a vector store: load_documents('docs', '{a.pdf}', ARRAY[$1::bytea])
A document of the same name is replaced where content or options differ ("refresh": false leaves it alone),
and keeps its id. options: SELECT * FROM ml_rag.option WHERE routine IN ('load_documents', 'chunking').
Returns {"documents": {"loaded", "changed", "unchanged", "removed", "skipped", "failed"}, "segments",
"failed": [{"document_name", "error", …}], "incomplete", "lost", "seconds"}, as vector_store_load; a document
that fails does not stop the others. Call ml_rag.index_store when the last one is in. Needs SELECT, INSERT and
DELETE on the store, no privilege on files.
Errors: as vector_store_load.$$;

CREATE FUNCTION ml_rag.load_document(store regclass, document_name text, content bytea,
  options jsonb DEFAULT NULL)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
BEGIN
  RETURN ml_rag.load_documents($1, ARRAY[$2], ARRAY[$3], $4);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.load_document(regclass, text, bytea, jsonb) IS
$$loads one document that the client sends into a vector store; see ml_rag.load_documents
Errors: as vector_store_load.$$;

CREATE FUNCTION ml_rag.unchanged_documents(store regclass, names text[], sha256 text[],
  options jsonb DEFAULT NULL)
RETURNS SETOF text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: what a client need not send
DECLARE
  _options jsonb;
BEGIN
  _options := ml_rag._parse_load_options('load_documents', $4);
  RETURN QUERY SELECT jsonb_array_elements_text(ml_rag._python('unchanged_contents', jsonb_build_array(
    ml_rag._load_job(store, _options ->> 'embed_model_id', _options), ARRAY(SELECT unnest(names)),
      ARRAY(SELECT unnest(sha256)))));
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.unchanged_documents(regclass, text[], text[], jsonb) IS
$$which of the documents load_documents would leave alone, by their names and the SHA-256 (hex) of their contents
options: those of load_documents; with "refresh": false every document the store has. Errors: 22023.$$;
