-- vectorizer: an ordinary table made searchable, and kept so; docs/own-tables.md tells it as a whole.
--
-- The table gets columns: segment, its text, and document_name, both generated; and segment_embedding, which
-- a row trigger empties where the text changes, or a table of segments beside it (vectorizer/segments).
-- vectorizer/queue says what waits.

CREATE FUNCTION ml_rag._check_vectorizer_columns(relation regclass, destination text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: that a vectorizer can be made: there is none, its columns are free, or those of one that is gone,
-- and searches read no other vectors
DECLARE
  _column name := ml_rag._default_column(relation);
BEGIN
  IF ml_rag._has_vectorizer(relation) THEN
    RAISE EXCEPTION USING ERRCODE = '42710',
      MESSAGE = format('table "%s" has a vectorizer already', relation),
      HINT = format('First: SELECT ml_rag.drop_vectorizer(%L); then create the new one.', relation);
  END IF;
  IF ml_rag._has_texts(relation) THEN
    RETURN;
  ELSIF destination = 'column' AND _column <> 'segment_embedding' THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('table "%s" has vectors already', relation),
      DETAIL = format('Searches read those of column %I, as its comment says, and would not find what a '
        'vectorizer embeds.', _column),
      HINT = format('First: COMMENT ON COLUMN %s.%I IS NULL; or choose "destination": "table".', relation,
        _column);
  END IF;
  SELECT a.attname INTO _column FROM pg_attribute AS a
  WHERE a.attrelid = relation AND a.attname IN ('segment', 'document_name', 'segment_embedding')
    AND NOT a.attisdropped
  ORDER BY a.attnum LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42701',
      MESSAGE = format('table "%s" has a column "%s" already', relation, _column),
      DETAIL = 'A vectorizer adds the columns segment, document_name and segment_embedding.',
      HINT = format('Rename the column: ALTER TABLE %s RENAME COLUMN %I TO …; or drop the column if nothing '
        'needs it.', relation, _column);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._metadata_columns(relation regclass, wanted jsonb, template name[], key name[],
  has_integer_key boolean) RETURNS name[]
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: option metadata: columns that go along with a hit. Those of the key are there unless document_id
-- is the key; a marker holds no name with a blank, comma, semicolon or plus, so by default such columns are
-- left out
-- Reads: the catalog
DECLARE
  _unfit CONSTANT text := '[[:space:],;+]';
  _column text;
BEGIN
  IF wanted IS NULL THEN
    RETURN (ARRAY(SELECT u.name FROM unnest(key || template) WITH ORDINALITY AS u (name, place)
      WHERE u.name !~ _unfit GROUP BY u.name ORDER BY min(u.place)))[:50];
  END IF;
  FOR _column IN SELECT w.name FROM jsonb_array_elements_text(wanted) AS w (name) LOOP
    IF _column ~ _unfit OR NOT EXISTS (SELECT FROM pg_attribute AS a
      WHERE a.attrelid = relation AND a.attname = _column AND a.attnum > 0 AND NOT a.attisdropped) THEN
      PERFORM ml_rag._bad_option('metadata', wanted, 'columns of the table, without blanks, commas, '
        'semicolons and + in their names',
        format('It has no column %I that can be used; its columns: %s.', _column, (
          SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute AS a
          WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped AND a.attname !~ _unfit)));
    END IF;
  END LOOP;
  IF jsonb_array_length(wanted) > 50 THEN
    PERFORM ml_rag._bad_option('metadata', to_jsonb(jsonb_array_length(wanted)), 'at most 50 columns');
  END IF;
  RETURN ARRAY(SELECT u.name
    FROM unnest(CASE WHEN has_integer_key THEN '{}' ELSE key END
      || ml_rag._texts(wanted)::name[]) WITH ORDINALITY AS u (name, place)
    WHERE u.name !~ _unfit GROUP BY u.name ORDER BY min(u.place));
END
$$;

CREATE FUNCTION ml_rag.create_vectorizer(relation regclass, options jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT SET citus.enable_unsafe_triggers = on AS $$
-- Writes: the table's definition, as the caller
DECLARE
  _options jsonb;
  _model text;
  _store regclass := relation;
  _template text;
  _name text;
  _key name[];
  -- one that document_id can be
  _has_integer_key boolean;
  _columns name[];
  _metadata name[];
  _type text;
  _is_former boolean;
BEGIN
  _options := ml_rag._with_dimensions(ml_rag.parse_options('create_vectorizer', $2));
  _model := coalesce(_options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id'));
  IF ml_rag._is_distributed(relation) AND ml_rag._distribution_column(relation) IS NOT NULL THEN
    PERFORM ml_rag._own_table(relation);
    PERFORM ml_rag._place_calls(relation);
  END IF;
  PERFORM ml_rag._check_embedding_table(relation, CASE
    WHEN _options ->> 'destination' = 'table' THEN
      'the policy of a table of segments reads its source, which a shard cannot.'
    WHEN _options ->> 'mode' = 'immediate' THEN 'its triggers run on workers, and the queue is here.' END);
  PERFORM ml_rag._check_vectorizer_columns(relation, _options ->> 'destination');
  _key := (ml_rag._primary_key(relation)).key;
  _has_integer_key := cardinality(_key) = 1 AND EXISTS (SELECT FROM pg_attribute AS a
    WHERE a.attrelid = relation AND a.attname = _key[1]
      AND a.atttypid IN ('smallint'::regtype, 'integer'::regtype, 'bigint'::regtype));
  IF _model ~ '[[:space:],;]' THEN
    PERFORM ml_rag._bad_option('embed_model_id', to_jsonb(_model),
      'a name without blanks, commas and semicolons');
  END IF;
  _template := ml_rag._template('columns', _options -> 'columns');
  _columns := ml_rag._template_columns(_template);
  _metadata := ml_rag._metadata_columns(relation, _options -> 'metadata', _columns, _key, _has_integer_key);
  _name := ml_rag._text_expression('document_name', relation,
    ml_rag._template('document_name', _options -> 'document_name'), _key);
  _template := ml_rag._text_expression('columns', relation, _template, _key);
  IF _options ->> 'destination' = 'table' THEN
    _options := jsonb_set(_options, '{chunking}', ml_rag._parse_chunking(_options -> 'chunking'));
  ELSIF _options ? 'chunking' THEN
    PERFORM ml_rag._bad_option('chunking', _options -> 'chunking', 'nothing, where "destination" is column',
      '"destination": "table" splits texts into segments.');
  END IF;
  PERFORM ml_rag._index_definition(_options -> 'index', _options ->> 'distance_metric', 'vector');
  -- a first vector tells the dimensions, and whether the model works, before anything is made
  _type := format('@vector@.vector(%s)', @vector@.vector_dims(ml_rag.embed('dimensions', _model)));
  IF _options ->> 'destination' = 'column' THEN
    PERFORM ml_rag._warn_of_subscribers(relation, 'segment_embedding', _type);
  END IF;

  PERFORM ml_rag._lock_table(relation, 'ACCESS EXCLUSIVE');
  PERFORM ml_rag._check_vectorizer_columns(relation, _options ->> 'destination');
  _is_former := ml_rag._has_texts(relation);
  IF _options ->> 'destination' = 'table' THEN
    _store := ml_rag._segment_table(relation);
    PERFORM ml_rag._hold(ARRAY[_store::oid]) WHERE _store IS NOT NULL;
  END IF;
  IF _is_former THEN
    PERFORM ml_rag._check_former(relation, _store, _template, _name, _type, _model);
    PERFORM ml_rag._drop_triggers(relation, '^~ml_rag_immediate_');
    PERFORM ml_rag._drop_queue(_store);
  ELSE
    -- in one go: the table is written anew once
    BEGIN
      EXECUTE format('ALTER TABLE %s ADD COLUMN segment text GENERATED ALWAYS AS (%s) STORED,'
        ' ADD COLUMN document_name text GENERATED ALWAYS AS (%s) STORED%s', ml_rag._relation_name(relation),
        _template, _name,
        ', ADD COLUMN segment_embedding ' || CASE _store WHEN relation THEN _type END);
    EXCEPTION WHEN invalid_object_definition THEN
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'a column of the template cannot be part of a text',
        DETAIL = format('%s.', SQLERRM),
        HINT = 'The text of a date, time, enum or array depends on settings, and a generated column cannot '
          'be used: '
          'add a text column for it that a trigger fills.';
    END;
  END IF;
  IF _store = relation THEN
    PERFORM ml_rag._take_back_column(relation, _type) WHERE _is_former;
    PERFORM ml_rag._follow_texts(relation, 'segment_embedding', 'segment');
  ELSE
    IF _store IS NULL THEN
      _store := ml_rag._make_segments(relation, _type, _options -> 'chunking');
    ELSE
      PERFORM ml_rag._take_back_segments(relation, _store, _options -> 'chunking');
    END IF;
    PERFORM ml_rag._keep_segments(relation);
    _key := (ml_rag._source_key(_store)).key;
  END IF;
  EXECUTE format('COMMENT ON COLUMN %s.segment_embedding IS %L', ml_rag._relation_name(_store),
    concat('GENAI_OPTIONS=EMBED_MODEL_ID=', _model,
      CASE WHEN _store = relation AND _has_integer_key AND _key[1] !~ '[[:space:],;+]'
        THEN ',DOCUMENT_ID=' || _key[1] END,
      CASE _store WHEN relation THEN ',KEY=' ELSE ',ROW=' END
        || nullif(array_to_string(_metadata, '+'), '')));
  IF _store <> relation THEN
    -- the metadata of the segments that are there, which the triggers keep from then on
    EXECUTE
      format('UPDATE %s AS s SET metadata = s.metadata || %s FROM %s AS n WHERE %s AND s.metadata <> '
        's.metadata || %2$s', ml_rag._relation_name(_store), ml_rag._row_metadata(relation, _store),
      ml_rag._relation_name(relation), ml_rag._same_key('s', _key, 'n', (ml_rag._primary_key(relation)).key));
  END IF;
  -- the trigger that wakes the workers holds the options, in place of one of a role that may make triggers;
  -- and an index has the rows that wait
  EXECUTE
    format('CREATE OR REPLACE TRIGGER ml_rag_vectorizer AFTER INSERT OR UPDATE OF %s OR DELETE OR TRUNCATE '
      'ON %s '
    'FOR EACH STATEMENT EXECUTE FUNCTION ml_rag._wake_workers(%L)',
    (SELECT string_agg(quote_ident(c), ', ') FROM unnest(_columns) AS c),
    ml_rag._relation_name(relation), _options || jsonb_build_object('embed_model_id', _model));
  EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER ml_rag_vectorizer', ml_rag._relation_name(relation));
  EXECUTE format('CREATE INDEX ON %s (%s) WHERE segment_embedding IS NULL', ml_rag._relation_name(_store),
    (SELECT string_agg(quote_ident(k), ', ' ORDER BY place)
      FROM unnest(_key) WITH ORDINALITY AS u (k, place)));
  IF _options ->> 'mode' = 'immediate' THEN
    PERFORM ml_rag._embed_at_once(relation);
  END IF;
  IF (_options -> 'keyword_search')::boolean THEN
    PERFORM ml_rag._index_keywords(_store,
      jsonb_strip_nulls(jsonb_build_object('language', _options -> 'language')), false);
  END IF;
  RAISE NOTICE USING MESSAGE = format('the rows of "%s" are embedded by the next run', relation),
    HINT = format('CALL ml_rag.run_vectorizer(%L), or ml-rag worker.', relation);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.create_vectorizer(regclass, jsonb) IS
$$makes an ordinary table searchable, and keeps it so: ml_rag.create_vectorizer('items', '{"columns": "{name}: {notes}"}')
The table gets the generated columns segment (the text) and document_name, and segment_embedding, which CALL
ml_rag.run_vectorizer or ml-rag worker fill; it is then found like any other vector store. A row whose text
changes has no embedding until the next run, so that a search by meaning never finds it by its former text;
the keyword index is current at once. Where only other columns change nothing is embedded. The table is
written anew and locked meanwhile. It needs a primary key; for the owner of a table, partitioned or not. What
DROP EXTENSION has left of a vectorizer is taken back, with the same options and model: only rows that may
have changed since are embedded again.
options: SELECT * FROM ml_rag.option WHERE routine IN ('create_vectorizer', 'index').
Errors: 22023 bad option, no such column, a type whose text depends on settings; 25006 read-only; 42701 a
column of that name, or those of a former vectorizer with other options; 42710 it has a vectorizer; 42P01;
42501; 54000 a key that is too long; 55000 no primary key, vectors that searches read already, or a table or
isolation level that it cannot do; 55P03 lock_timeout; 08006; 53300; 57014; 38000.$$;

CREATE FUNCTION ml_rag.drop_vectorizer(relation regclass, options jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT SET citus.enable_unsafe_triggers = on
-- of what is not there to be dropped
SET client_min_messages = warning AS $$
-- Writes:
-- the table's definition, as the caller;
-- ml_rag.vectorizer_error, ml_rag.vectorizer_truncated
DECLARE
  _options jsonb;
  _relation text;
  _trigger name;
  _segments regclass;
  _group text;
BEGIN
  _options := ml_rag.parse_options('drop_vectorizer', $2);
  _segments := ml_rag._segment_table(relation);
  PERFORM ml_rag._own_table(relation);
  PERFORM ml_rag._check_transaction('vectorizers cannot be changed', relation);
  IF NOT ml_rag._has_vectorizer(relation) AND relation NOT IN (SELECT ml_rag._former_vectorizers()) THEN
    RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('table "%s" has no vectorizer', relation),
      HINT = 'View ml_rag.vectorizer lists those there are.';
  END IF;
  PERFORM ml_rag._lock_table(relation, 'ACCESS EXCLUSIVE', segments => _segments);
  _relation := ml_rag._relation_name(relation);
  _group := (SELECT g.name FROM ml_rag._node_groups(coalesce(_segments, relation)) AS g LIMIT 1);
  IF _group IS NOT NULL AND NOT (_options -> 'keep_columns')::boolean THEN
    RAISE EXCEPTION USING ERRCODE = '2BP01',
      MESSAGE = format('node group "%s" is made of the texts of the vectorizer', _group),
      HINT = format('First: SELECT ml_rag.drop_node_group(%L, %L); or keep the columns: '
        '{"keep_columns": true}.', ml_rag._full_name(coalesce(_segments, relation)), _group);
  END IF;
  -- first, as a table without its trigger has no failures that its owner sees
  UPDATE ml_rag.vectorizer_error AS e SET attempts = 0 WHERE e.relation = drop_vectorizer.relation;
  UPDATE ml_rag.vectorizer_truncated AS t SET texts = 0 WHERE t.relation = drop_vectorizer.relation;
  FOR _trigger IN SELECT t.tgname FROM pg_trigger AS t
                  WHERE t.tgrelid = drop_vectorizer.relation
                    AND t.tgfoid = 'ml_rag._wake_workers()'::regprocedure LOOP
    EXECUTE format('DROP TRIGGER %I ON %s', _trigger, _relation);
  END LOOP;
  PERFORM ml_rag._drop_triggers(relation, '^~ml_rag_immediate_');
  PERFORM ml_rag._drop_queue(coalesce(_segments, relation));
  IF (_options -> 'keep_columns')::boolean THEN
    RETURN;
  END IF;
  IF EXISTS (SELECT FROM pg_trigger AS t
             WHERE t.tgrelid = drop_vectorizer.relation
               AND t.tgfoid = 'ml_rag._keep_keywords()'::regprocedure) THEN
    PERFORM ml_rag.disable_keyword_search(relation);
  END IF;
  EXECUTE format('DROP TRIGGER IF EXISTS "~ml_rag_segment_embedding" ON %s', _relation);
  PERFORM ml_rag._drop_triggers(relation, '^ml_rag_segments_');
  IF _segments IS NOT NULL THEN
    EXECUTE format('DROP TABLE %s', ml_rag._relation_name(_segments));
  END IF;
  EXECUTE format('ALTER TABLE %s DROP COLUMN IF EXISTS segment, DROP COLUMN IF EXISTS document_name,'
    ' DROP COLUMN IF EXISTS segment_embedding', _relation);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.drop_vectorizer(regclass, jsonb) IS
$$drops the vectorizer of a table, with the columns and the keyword index that it has added; for the table's owner
With {"keep_columns": true} they stay, and the table remains a vector store: a row whose text changes loses
its embedding, and is not embedded again. Errors: 22023 bad option; 25006; 2BP01 other objects, such as a
node group, depend on a column; 42704 it has none; 42P01; 42501; 55000 isolation level; 55P03 lock_timeout.$$;
