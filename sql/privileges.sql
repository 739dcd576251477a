-- privileges: who may call and read what: one table. What it does not name is the owner's alone; PUBLIC has
-- nothing.

-- Roles belong to the cluster: they may be there already, and DROP EXTENSION leaves them.
DO $$
BEGIN
  IF pg_catalog.to_regrole('ml_rag_user') IS NULL THEN
    CREATE ROLE ml_rag_user NOLOGIN;
  END IF;
  IF pg_catalog.to_regrole('ml_rag_loader') IS NULL THEN
    CREATE ROLE ml_rag_loader NOLOGIN;
  END IF;
  -- its code may run with the rights of any caller, see ml_rag._trusts; it may make presets
  IF pg_catalog.to_regrole('ml_rag_publisher') IS NULL THEN
    CREATE ROLE ml_rag_publisher NOLOGIN;
  END IF;
  -- what handles rows and names of others with more than their rights runs as it, not as a superuser; no
  -- other role may
  IF pg_catalog.to_regrole('ml_rag_internal') IS NULL THEN
    CREATE ROLE ml_rag_internal NOLOGIN;
  ELSIF EXISTS (
    SELECT FROM pg_catalog.pg_roles AS r WHERE r.rolname = 'ml_rag_internal' AND (
      r.rolcanlogin OR r.rolsuper OR r.rolcreaterole OR r.rolbypassrls OR r.rolreplication OR EXISTS (
        SELECT FROM pg_catalog.pg_auth_members AS m WHERE m.roleid = r.oid))) THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'role "ml_rag_internal" is in use',
      DETAIL = 'Functions of ml_rag run as it. It must have no members and no attributes, such as LOGIN.',
      HINT = 'DROP ROLE ml_rag_internal, or REVOKE it from its members and take its attributes away.';
  END IF;
END
$$;
-- who may load may also ask
GRANT ml_rag_user TO ml_rag_loader;
GRANT ml_rag_user TO ml_rag_internal;

DO $do$
DECLARE
  -- what ALTER DEFAULT PRIVILEGES of the role that creates the extension gives, to PUBLIC or a role, is taken
  -- away
  _others text := concat_ws(', ', 'PUBLIC', (
    SELECT string_agg(DISTINCT g.grantee::regrole::text, ', ')
    FROM pg_default_acl AS d CROSS JOIN LATERAL aclexplode(d.defaclacl) AS g
    WHERE d.defaclrole = quote_ident(current_user)::regrole AND g.grantee NOT IN (0, d.defaclrole)));
  _routines regprocedure[] := ARRAY(
    SELECT p.oid FROM pg_proc AS p JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
    JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
    WHERE d.deptype = 'e' AND e.extname = 'ml_rag');
  -- inner functions of the owner, and of those who load
  _owner text[] := string_to_array(
    '_add_options _empty_keywords _index_shards _keep_schemas _note_kept _reset_stats _tell_dropper', ' ');
  _loader text[] := string_to_array(
    '_begin_load _check_server _check_sharding _check_store _check_unread '
    '_document_states _end_load _follow_partitions _insert_segments _label_document _load_contents '
    '_load_files _load_job _make_store _move_partition _own_columns _parse_load_options '
    '_partition _refuse_untrusted '
    '_replace_document _serve _store_key _store_name _uris', ' ');
  _inner text := (SELECT string_agg(DISTINCT p.proname, ' ') FROM pg_proc AS p
    WHERE p.oid = ANY (_routines) AND p.proname ~ '^_' AND NOT p.prosecdef
      AND p.proname <> ALL (_owner || _loader));
  _granted record;
  _names text[];
  _objects text[];
  _table name;
BEGIN
  -- before the first REVOKE, which records what a dump takes for the privileges that they come with
  ALTER FUNCTION ml_rag._keep_keywords() OWNER TO ml_rag_internal;
  ALTER FUNCTION ml_rag._read_as_owner() OWNER TO ml_rag_internal;
  ALTER FUNCTION ml_rag._settle_keywords() OWNER TO ml_rag_internal;
  ALTER FUNCTION ml_rag._write_as_owner() OWNER TO ml_rag_internal;

  EXECUTE format('REVOKE ALL ON SCHEMA ml_rag, ml_rag_internal FROM %s', _others);
  EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA ml_rag, ml_rag_internal FROM %s', _others);
  EXECUTE format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA ml_rag, ml_rag_internal FROM %s', _others);
  EXECUTE format('REVOKE ALL ON ROUTINE %s FROM %s', array_to_string(_routines, ', '), _others);

  -- policies, as pg_read_all_data and pg_write_all_data have every privilege
  FOREACH _table IN ARRAY '{keyword_store,keyword_row,keyword_new,keyword_gone,keyword_owed,keyword_run,'
      'keyword_posting,table_embedding}'::name[] LOOP
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON ml_rag_internal.%1$I TO ml_rag_internal;'
      ' CREATE POLICY internal ON ml_rag_internal.%1$I TO ml_rag_internal USING (true);'
      ' ALTER TABLE ml_rag_internal.%1$I ENABLE ROW LEVEL SECURITY', _table);
  END LOOP;
  GRANT USAGE ON SEQUENCE ml_rag_internal.keyword_number TO ml_rag_internal;

  FOR _granted IN SELECT g.* FROM (VALUES
    -- the name of a routine stands for all its signatures
    -- of ml_rag_internal only the types of rows are of use to a caller
    ('ml_rag_user', 'USAGE', 'SCHEMA', 'ml_rag ml_rag_internal'),
    ('ml_rag_publisher', 'EXECUTE', 'ROUTINE', 'create_preset drop_preset _write_preset'),
    ('ml_rag_user', 'SELECT', 'TABLE', 'preset option metric setting setting_value keyword_index activity '
      'progress stats'),
    -- UPDATE or DELETE of a whole table, which allows LOCK TABLE, is not granted. Policies leave each role
    -- its own rows; a role does not set the number or role of a run, or it could take those of later runs
    ('ml_rag_user', 'SELECT, UPDATE (questions)', 'TABLE', 'evaluation_run'),
    ('ml_rag_user', 'INSERT (name, started_at, seconds, source, questions, options, stores, models, '
      'versions, measures, '
      'counted, latency, errors)', 'TABLE', 'evaluation_run'),
    ('ml_rag_user', 'SELECT, INSERT', 'TABLE', 'evaluation_question'),

    ('ml_rag_internal', 'EXECUTE', 'ROUTINE', '_analyze_keywords _empty_keywords'),

    -- who may watch the whole server
    ('pg_read_all_stats', 'USAGE', 'SCHEMA', 'ml_rag'),
    ('pg_read_all_stats', 'SELECT', 'TABLE', 'activity progress stats'),
    ('pg_read_all_stats', 'EXECUTE', 'ROUTINE', '
      version _watch _read_calls _read_as_owner _raise _fields_of_error _load_backend _python_path'),

    -- what callers write
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      ml_supported_models ml_embed_row ml_generate ml_rag_search ml_rag_answer ml_rag ml_rag_show ml_rag_table
      ml_generate_table ml_embed_table ml_rank ml_rank_rows ml_check_grounding ml_rag_evaluate
      ml_rag_compare_runs ml_rag_chat heatwave_chat ml_retrieve_schema_metadata ml_nl_sql nl_sql
      add_embedding adopt calibrate create_node_group create_vectorizer disable_keyword_search drop_embedding
      drop_node_group drop_vectorizer embeddings enable_keyword_search fold_keyword_index forget
      forget_conversation forget_evaluation keyword_tokens make_questions merge_keyword_index model_server
      parse_options refresh_node_groups retry_vectorizer run_vectorizer text_search_configuration tune_index
      use_embedding version'),
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '
      attach_shard create_store detach_shard distribute_store documents_below index_store load_document
      load_documents remove_documents unchanged_documents vector_store_load'),
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '@ROUTINES_OF_PIPELINE@'),
    -- what those call: inner functions, with the caller's own rights; these have the owner's
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '@inner
      _keep_keywords _limit_temporary_files _python_path _read_as_owner _write_as_owner'),
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '@loader'),
    ('ml_rag_user', 'SELECT', 'TABLE', 'node_group node_group_error vectorizer callable_function'),
    -- vectorizer/error: a policy leaves each role those of its own tables; neither DELETE nor UPDATE is
    -- granted, since it would allow LOCK TABLE
    ('ml_rag_user', 'SELECT, INSERT', 'TABLE', 'vectorizer_error vectorizer_truncated'),
    ('ml_rag_user', 'UPDATE (attempts, sqlstate, message, detail, failed_at, next_attempt, text_hash)',
      'TABLE', 'vectorizer_error'),
    ('ml_rag_user', 'UPDATE (texts)', 'TABLE', 'vectorizer_truncated'),
    -- chat: policies leave each role its own conversations
    ('ml_rag_user', 'SELECT, INSERT (conversation_id, role), UPDATE (changed_at)', 'TABLE', 'conversation'),
    ('ml_rag_user', 'SELECT, INSERT, UPDATE (message_id, created_at, query, question, text, citations, '
      'options, filters)',
      'TABLE', 'message')
  ) AS g (role, privilege, kind, names) LOOP
    _names := regexp_split_to_array(btrim(replace(replace(_granted.names, '@inner', _inner), '@loader',
      array_to_string(_loader, ' ')), E' \n'), '\s+');
    _objects := CASE _granted.kind
      WHEN 'SCHEMA' THEN _names
      WHEN 'TABLE' THEN ARRAY(SELECT 'ml_rag.' || n FROM unnest(_names) AS n)
      -- where there is none of the name, the name alone, which is an error then
      ELSE ARRAY(SELECT coalesce(p.oid::regprocedure::text, n) FROM unnest(_names) AS n
                 LEFT JOIN pg_proc AS p ON p.proname = n AND p.oid = ANY (_routines)) END;
    EXECUTE format('GRANT %s ON %s %s TO %I', _granted.privilege, _granted.kind,
      array_to_string(_objects, ', '), _granted.role);
  END LOOP;
END
$do$;
