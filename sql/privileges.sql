-- privileges: who may call and read what: one table. What it does not name is the owner's alone; PUBLIC has nothing.

-- Roles belong to the cluster: they may be there already, and DROP EXTENSION leaves them.
DO $$
BEGIN
  IF pg_catalog.to_regrole('ml_rag_user') IS NULL THEN
    CREATE ROLE ml_rag_user NOLOGIN;
  END IF;
  IF pg_catalog.to_regrole('ml_rag_loader') IS NULL THEN
    CREATE ROLE ml_rag_loader NOLOGIN;
  END IF;
  -- whose code may run with the rights of whoever asks, see ml_rag._trusts; it may make presets
  IF pg_catalog.to_regrole('ml_rag_publisher') IS NULL THEN
    CREATE ROLE ml_rag_publisher NOLOGIN;
  END IF;
END
$$;
-- who may load may also ask
GRANT ml_rag_user TO ml_rag_loader;

-- Whatever ALTER DEFAULT PRIVILEGES of whoever creates the extension gives to PUBLIC is taken away too.
REVOKE ALL ON SCHEMA ml_rag, ml_rag_internal FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA ml_rag, ml_rag_internal FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA ml_rag, ml_rag_internal FROM PUBLIC;

DO $do$
DECLARE
  _routines regprocedure[] := ARRAY(
    SELECT p.oid FROM pg_proc AS p JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
    JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
    WHERE d.deptype = 'e' AND e.extname = 'ml_rag');
  _granted record;
  _names text[];
  _objects text[];
BEGIN
  EXECUTE format('REVOKE ALL ON ROUTINE %s FROM PUBLIC', array_to_string(_routines, ', '));

  FOR _granted IN SELECT g.* FROM (VALUES
    -- the name of a routine stands for all its signatures
    -- of ml_rag_internal only the types of rows are of use to a caller
    ('ml_rag_user', 'USAGE', 'SCHEMA', 'ml_rag ml_rag_internal'),
    ('ml_rag_publisher', 'EXECUTE', 'ROUTINE', 'create_preset drop_preset _write_preset'),
    ('ml_rag_user', 'SELECT', 'TABLE', 'preset option metric setting setting_value keyword_index activity progress stats'),
    -- Nobody has UPDATE or DELETE of a whole table, which is enough to LOCK it.
    -- policies leave each role its own rows; a run's number and its role are not for the role to say, or it could take
    -- the numbers of runs to come
    ('ml_rag_user', 'SELECT, UPDATE (questions)', 'TABLE', 'evaluation_run'),
    ('ml_rag_user', 'INSERT (name, started_at, seconds, source, questions, options, stores, models, versions, measures, '
      'counted, latency, errors)', 'TABLE', 'evaluation_run'),
    ('ml_rag_user', 'SELECT, INSERT', 'TABLE', 'evaluation_question'),

    -- who may watch the whole server
    ('pg_read_all_stats', 'USAGE', 'SCHEMA', 'ml_rag'),
    ('pg_read_all_stats', 'SELECT', 'TABLE', 'activity progress stats'),
    ('pg_read_all_stats', 'EXECUTE', 'ROUTINE', '
      version _watch _read_calls _read_as_owner _raise _fields_of_error _load_backend _python_path'),

    -- what callers write
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      ml_supported_models ml_embed_row ml_generate ml_rag_search ml_rag_answer ml_rag ml_rag_show ml_rag_table
      ml_generate_table ml_embed_table ml_rank ml_rank_rows ml_check_grounding ml_rag_evaluate ml_rag_compare_runs ml_rag_chat heatwave_chat
      ml_retrieve_schema_metadata ml_nl_sql nl_sql'),
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', 'vector_store_load'),
    -- the stages of a call and what they call, which run with the caller's own rights: all of pipeline/
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '@ROUTINES_OF_PIPELINE@'),
    -- ground/schema
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', 'version _relation_name _check_writable _raise _fields_of_error _full_name _is_distributed
      _distribution_column'),
    -- ground/settings
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_check_address _roles _get_setting'),
    -- ground/trust
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _is_member _trusts _parts _read_with _are_trusted _why_untrusted _refuse_foreign_schema _hold _hold_trusted
      _refuse_foreign_trigger'),
    -- ground/python
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_python_path _load_backend _call_python _python'),
    -- ground/models
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', 'model_server _default_model _too_small'),
    -- ground/options
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_arm_options'),
    -- ground/parse
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_bad_option _distance_of_words _unknown_option parse_options _texts _with_dimensions'),
    -- watch/track
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _begin_call _enter_stage _end_call _statement_error _end_statement _begin _begin_question _stage _end
      _progress'),
    -- watch/watch
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_read_calls _watch'),
    -- keyword/tables
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _read_as_owner _write_as_owner _keyword_indexes _keyword_index _indexed_rows _key_values _visible_keys'),
    -- keyword/tokens
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      text_search_configuration _lexemes _scripts _tokens _words _token_texts _tokens_of keyword_tokens _numpy'),
    -- keyword/index
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _key_and_segment _keyword_rows _raise_of_columns _may_merge _keep_keywords
      _build_keyword_index _drop_keyword_index _merge_own_keywords _own_table _indexable_key _has_foreign_partition
      _drop_keyword_triggers _make_keyword_triggers disable_keyword_search
      _keyword_definition _fill_keyword_index _index_keywords enable_keyword_search merge_keyword_index fold_keyword_index'),
    -- store/marker
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _marker_pattern _marked_model _marker _marked_key _marked_columns _mark_keys _embedding_comment _check_keeper _keep _kept_limit _tuned
      _mark_embedding _embeddings _default_column _embedding'),
    -- store/policy
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_make_visible _drop_visible'),
    -- store/lock
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '_store_key _lock_store'),
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_lock_embedding _lock_table'),
    -- batch/work
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_commit _next_step _stop_work _read_by_index _execute _execute_on _work _hold_filled'),
    -- batch/job
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_column_reference _column_type _begin_table'),
    -- batch/run
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_write_row _run_row'),
    -- store/index
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_index_definition _index_element _create_index'),
    -- store/store
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '
      _refuse_untrusted _store_name _check_store _make_store _document_states _label_document _own_columns _replace_document
      _other_embeddings _insert_segments index_store create_store documents_below remove_documents'),
    -- store/serve
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _describe_index _describe _open_shard _shard_request _answer_request _shard_answer _answer_on_worker'),
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '_serve'),
    -- store/shards
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '
      _partition _check_server _check_sharding _make_shard _check_shard _check_not_taken _follow_partitions _move_partition attach_shard
      detach_shard'),
    -- store/citus
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '_shard_key _check_distribution _place_calls distribute_store'),
    -- store/load
    ('ml_rag_loader', 'EXECUTE', 'ROUTINE', '
      _check_file_privilege _find_files _uris _into_same_store _add_loads _load_files _load_contents _unchanged_contents
      _check_given _parse_file_dates
      _parse_load_options _load_job _begin_load
      _failure_reasons _end_load load_documents load_document unchanged_documents'),
    -- store/follow
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _empty_embedding _embedding_trigger _later_trigger _text_columns _has_texts
      _follow_texts _notice_changes'),
    -- store/embeddings
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _check_embedding_table _find_embedding _pending _drop_column use_embedding drop_embedding embeddings'),
    -- store/add
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _warn_of_subscribers _check_texts _begin_embedding _add_column
      _prepare_embedding _index_embedding _warn_of_embedding add_embedding'),
    -- nodes
    ('ml_rag_user', 'SELECT', 'TABLE', 'node_group node_group_error'),
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _node_calls _asks_model _node_function _transform
      _node_group _check_merge _change_merged _merged_nodes _node_options _node_policy
      _grant_readers _make_node_group drop_node_group _drop_node_tables
      _node_sources _pending_nodes _look_up _node_facts _lock_node_group _index_group
      _count_calls _begin_node_group create_node_group _begin_refresh refresh_node_groups _begin_filling
      _node_status _node_errors'),
    -- store/adopt
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _known_shape _column_like _adopted_columns _compare_sample _check_sample _collection_view adopt'),
    -- vectorizer/text
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_primary_key _key_text _pieces _template _template_columns _text_expression'),
    -- vectorizer/error: a policy leaves each role those of its own tables; nobody may lock all of them, hence neither DELETE nor UPDATE
    ('ml_rag_user', 'SELECT, INSERT', 'TABLE', 'vectorizer_error vectorizer_truncated'),
    ('ml_rag_user', 'UPDATE (attempts, sqlstate, message, detail, failed_at, next_attempt, text_hash)', 'TABLE', 'vectorizer_error'),
    ('ml_rag_user', 'UPDATE (texts)', 'TABLE', 'vectorizer_truncated'),
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_text_hash _note_failures retry_vectorizer'),
    -- vectorizer/segments, with what it shares with store/load
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _parse_chunking _segment_table _find_segments _source_key _same_key _row_metadata _fill_metadata _segment_statements
      _segments_comment _make_segments _keep_segments _drop_triggers'),
    -- vectorizer/queue
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _wake_workers _vectorized _has_vectorizer _find_vectorizer _waiting _queue _read_waiting
      _count_waiting'),
    -- vectorizer/immediate
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_written_keys _embed_rows _embed_at_once'),
    -- vectorizer/former
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _former_vectorizers _expression _check_former _changed_since _drop_queue _take_back_column _take_back_segments'),
    -- vectorizer/vectorizer
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _check_vectorizer_columns _add_vectorizer_columns _is_integer_key _metadata_columns create_vectorizer drop_vectorizer'),
    -- vectorizer/run
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _make_run _index_vectorizer _warn_of_run run_vectorizer'),
    -- vectorizer/status
    ('ml_rag_user', 'SELECT', 'TABLE', 'vectorizer'),
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_vectorizers'),
    -- rank/rank
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_check_rank_count _bad_record _rank _rank_options'),
    -- nlsql/metadata
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _named_tables _trusted_owners _askable_tables _nearest_table _comment_line _samples _table_definition
      _relevant_tables
      _schema_metadata'),
    -- nlsql/statement
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _signatures _refusal _type_that_runs_code _parsed _statement_columns _statement_refusal
      _statement_tree _statement_row _limit_temporary_files _fits'),
    ('ml_rag_user', 'SELECT', 'TABLE', 'callable_function'),
    -- nlsql/question
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_check_examples'),
    -- chat: policies leave each role its own conversations
    ('ml_rag_user', 'SELECT, INSERT (conversation_id, role), UPDATE (changed_at)', 'TABLE', 'conversation'),
    ('ml_rag_user', 'SELECT, INSERT, UPDATE (message_id, created_at, query, question, text, citations, options, filters)',
      'TABLE', 'message'),
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _parse_chat_options _chat_history _chosen_before _begin_turn _write_turn forget forget_conversation
      _chat_options _heatwave_rag_options _heatwave_answer _chat_tables _heatwave_output'),
    -- evaluate/measure
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _expected_documents _grade_hits _ranking_measures _discounted _normalise_answer _answer_measures _student_p'),
    -- evaluate/questions
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _read_questions _parse_evaluate_options _check_questions _metric_names _warn_of_unknown_documents'),
    -- evaluate/evaluate
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '
      _is_measures _judge _own_measures _with_history _evaluate_question _summary _run_environment _evaluate
      forget_evaluation'),
    -- evaluate/compare
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_check_same_questions'),
    -- evaluate/calibrate
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_calibrate_question _thresholds _kept_refusals _calibrate calibrate'),
    -- evaluate/tune
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_tuned_index _index_settings _nearest_segments _tuning_vectors _tune_index
      tune_index'),
    -- evaluate/make
    ('ml_rag_user', 'EXECUTE', 'ROUTINE', '_ask_writer _is_unanswered _sample_segments make_questions')
  ) AS g (role, privilege, kind, names) LOOP
    _names := regexp_split_to_array(btrim(_granted.names, E' \n'), '\s+');
    _objects := CASE _granted.kind
      WHEN 'SCHEMA' THEN _names
      WHEN 'TABLE' THEN ARRAY(SELECT 'ml_rag.' || n FROM unnest(_names) AS n)
      -- where there is none of the name, the name alone, which is an error then
      ELSE ARRAY(SELECT coalesce(p.oid::regprocedure::text, n) FROM unnest(_names) AS n
                 LEFT JOIN pg_proc AS p ON p.proname = n AND p.oid = ANY (_routines)) END;
    EXECUTE format('GRANT %s ON %s %s TO %I', _granted.privilege, _granted.kind, array_to_string(_objects, ', '), _granted.role);
  END LOOP;
END
$do$;
