-- privileges: who may call what, in one place. Nothing is granted to PUBLIC.

-- Roles belong to the cluster: they may be there already, and DROP EXTENSION leaves them.
DO $$
BEGIN
  IF pg_catalog.to_regrole('ml_rag_user') IS NULL THEN
    CREATE ROLE ml_rag_user NOLOGIN;
  END IF;
  IF pg_catalog.to_regrole('ml_rag_loader') IS NULL THEN
    CREATE ROLE ml_rag_loader NOLOGIN;
  END IF;
  -- nothing is granted to it: whose code may run with the rights of whoever asks, see ml_rag._trusts
  IF pg_catalog.to_regrole('ml_rag_publisher') IS NULL THEN
    CREATE ROLE ml_rag_publisher NOLOGIN;
  END IF;
END
$$;
-- who may load may also ask
GRANT ml_rag_user TO ml_rag_loader;

-- Whatever ALTER DEFAULT PRIVILEGES of whoever creates the extension gives to PUBLIC is taken away too.
REVOKE ALL ON SCHEMA ml_rag FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA ml_rag FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA ml_rag FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ml_rag FROM PUBLIC;
REVOKE ALL ON ALL PROCEDURES IN SCHEMA ml_rag FROM PUBLIC;
REVOKE ALL ON FUNCTION
  @extschema@.ml_rag_answer(text, jsonb), @extschema@.ml_rag_search(text, jsonb), @extschema@.ml_generate(text, jsonb),
  @extschema@.ml_embed_row(text, jsonb), @extschema@.ml_supported_models(), @extschema@.ml_rank(text, jsonb, jsonb),
  @extschema@.ml_rank_rows(text, text[], text[], jsonb),
  @extschema@.ml_rag_evaluate(text, jsonb), @extschema@.ml_rag_evaluate(regclass, jsonb),
  @extschema@.ml_rag_compare_runs(bigint, bigint)
FROM PUBLIC;
REVOKE ALL ON PROCEDURE
  @extschema@.ml_rag(text, jsonb, jsonb), @extschema@.ml_rag_table(text, text, jsonb, jsonb),
  @extschema@.ml_generate_table(text, text, jsonb, jsonb), @extschema@.ml_embed_table(text, text, jsonb, jsonb),
  @extschema@.vector_store_load(text, jsonb, jsonb)
FROM PUBLIC;

-- ml_rag_user: asks. The stages run with the caller's own rights, so it may call each of them; what they read is
-- decided by the privileges and row-level security of the stores.
GRANT USAGE ON SCHEMA ml_rag TO ml_rag_user;
GRANT SELECT ON ml_rag.setting, ml_rag.option, ml_rag.metric TO ml_rag_user;
GRANT SELECT ON ml_rag.setting_value TO ml_rag_user;
-- policies leave each role its own rows; a run's number and its role are not for the role to say, or it could take the
-- numbers of runs to come
REVOKE INSERT ON ml_rag.evaluation_run FROM ml_rag_user;
GRANT SELECT, DELETE ON ml_rag.evaluation_run TO ml_rag_user;
GRANT INSERT (name, started_at, seconds, source, questions, options, stores, models, versions, measures, counted, latency,
  errors) ON ml_rag.evaluation_run TO ml_rag_user;
GRANT SELECT, INSERT, DELETE ON ml_rag.evaluation_question TO ml_rag_user;
-- keyword indexes: nothing of their tables, see keyword/tables
GRANT SELECT ON ml_rag.keyword_index TO ml_rag_user;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ml_rag TO ml_rag_user;
GRANT EXECUTE ON ALL PROCEDURES IN SCHEMA ml_rag TO ml_rag_user;
GRANT EXECUTE ON FUNCTION
  @extschema@.ml_rag_answer(text, jsonb), @extschema@.ml_rag_search(text, jsonb), @extschema@.ml_generate(text, jsonb),
  @extschema@.ml_embed_row(text, jsonb), @extschema@.ml_supported_models(), @extschema@.ml_rank(text, jsonb, jsonb),
  @extschema@.ml_rank_rows(text, text[], text[], jsonb),
  @extschema@.ml_rag_evaluate(text, jsonb), @extschema@.ml_rag_evaluate(regclass, jsonb),
  @extschema@.ml_rag_compare_runs(bigint, bigint)
TO ml_rag_user;
GRANT EXECUTE ON PROCEDURE
  @extschema@.ml_rag(text, jsonb, jsonb), @extschema@.ml_rag_table(text, text, jsonb, jsonb),
  @extschema@.ml_generate_table(text, text, jsonb, jsonb), @extschema@.ml_embed_table(text, text, jsonb, jsonb)
TO ml_rag_user;

-- watching: each role its own calls and figures, those that may watch the whole server all of them
GRANT SELECT ON ml_rag.activity, ml_rag.progress, ml_rag.stats TO ml_rag_user, pg_read_all_stats;
GRANT USAGE ON SCHEMA ml_rag TO pg_read_all_stats;
GRANT EXECUTE ON FUNCTION ml_rag._activity(), ml_rag._stats(), ml_rag._import_backend(text), ml_rag._python_path(),
  ml_rag.version() TO pg_read_all_stats;
REVOKE ALL ON FUNCTION ml_rag.reset_stats(), ml_rag._reset_stats() FROM ml_rag_user;

-- the owner of the extension: changes settings, folds keyword indexes in the name of those who write
REVOKE ALL ON FUNCTION ml_rag.configure(text, text), ml_rag._fold_keywords(oid, bigint, boolean),
  ml_rag._fold(oid, bigint, boolean), ml_rag._empty_keywords(oid) FROM ml_rag_user;
-- they run with the owner's rights, for the triggers of the extension alone; _keep_keywords is for every table's owner
REVOKE ALL ON FUNCTION ml_rag._forget_keywords(), ml_rag._drop_keywords(),
  ml_rag._forget_questions() FROM ml_rag_user;

-- ml_rag_loader: makes and fills vector stores, with the caller's own rights on schemas, tables and files
DO $$
DECLARE
  _routine pg_catalog.regprocedure;
BEGIN
  FOREACH _routine IN ARRAY ARRAY[
    'ml_rag._check_file_privilege()', 'ml_rag._find_files(text)', 'ml_rag._load_files(jsonb, jsonb, jsonb)',
    'ml_rag._load_contents(jsonb, text[], bytea[])', 'ml_rag._parse_load_options(text, jsonb)',
    'ml_rag._store_name(jsonb, text, name[])', 'ml_rag._lock_store(name, name)', 'ml_rag._lock_store(oid)',
    'ml_rag._store_key(name, name)', 'ml_rag._store_key(oid)', 'ml_rag._hold_store(oid)',
    'ml_rag._share_model(oid)',
    'ml_rag._check_store(regclass, text)', 'ml_rag._make_store(name, name, text, text, text)',
    'ml_rag._load_job(regclass, text, jsonb)', 'ml_rag._begin_load(text, jsonb, name[])',
    'ml_rag._end_load(jsonb, jsonb)', 'ml_rag._document_states(regclass, text[])',
    'ml_rag._replace_document(oid, text)',
    'ml_rag._insert_segments(oid, text, bigint, integer, jsonb[], text[], text[])',
    'ml_rag.create_store(text, jsonb)', 'ml_rag.index_store(regclass, text)',
    'ml_rag.load_document(regclass, text, bytea, jsonb)', 'ml_rag.load_documents(regclass, text[], bytea[], jsonb)',
    'ml_rag.unchanged_documents(regclass, text[], text[], jsonb)', 'ml_rag.documents_below(regclass, text)',
    'ml_rag.remove_documents(regclass, text[])', '@extschema@.vector_store_load(text, jsonb, jsonb)'
  ]::pg_catalog.regprocedure[] LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON ROUTINE %s FROM ml_rag_user', _routine);
    EXECUTE pg_catalog.format('GRANT EXECUTE ON ROUTINE %s TO ml_rag_loader', _routine);
  END LOOP;
END
$$;
