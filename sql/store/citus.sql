-- citus: a store as a distributed table of Citus: its shards, their keyword indexes, and the table by way of
-- which they are asked.

CREATE FUNCTION ml_rag._place_calls(store regclass) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the table of calls of a distributed store: one row in each shard, of any key that belongs there,
-- with the shard's id
-- Any role may read these numbers: requests by way of them are answered only to a role that may read the
-- store.
-- Writes: a new table, as the caller
DECLARE
  _calls text := (SELECT format('%I.%I', n.nspname, ml_rag._calls_name(c.relname)) FROM pg_class AS c
                  JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = store);
  _shards integer := (SELECT count(*) FROM pg_catalog.pg_dist_shard AS d WHERE d.logicalrelid = store);
  _type text := (SELECT format_type(a.atttypid, a.atttypmod) FROM pg_attribute AS a
                 WHERE a.attrelid = store AND a.attname = ml_rag._distribution_column(store));
BEGIN
  IF ml_rag._calls_of(store) IS NULL THEN
    -- without a key Citus moves a shard in no mode but those that the administrator names
    EXECUTE format('CREATE TABLE %s (key %s PRIMARY KEY, shard bigint NOT NULL)', _calls, _type);
    EXECUTE format('SELECT create_distributed_table(%L, ''key'', colocate_with => %L)', _calls, store);
    EXECUTE format('GRANT SELECT ON %s TO PUBLIC', _calls);
  ELSE
    EXECUTE format('DELETE FROM %s', _calls);
  END IF;
  -- enough that every shard is met: the chance that one is not is less than 1 : 10 to the 12
  EXECUTE format('INSERT INTO %s SELECT (array_agg(s.key ORDER BY s.n))[1], s.shard'
    ' FROM (SELECT k.n, k.key, get_shard_id_for_distribution_column(%L::regclass, k.key) AS shard'
    ' FROM (SELECT u.n, %s AS key FROM generate_series(1, %s) AS u (n)) AS k) AS s GROUP BY s.shard',
    _calls, store,
    CASE _type WHEN 'uuid' THEN 'md5(u.n::text)::uuid' ELSE 'u.n::' || _type END, 40 * _shards + 100);
END
$$;

CREATE FUNCTION ml_rag.distribute_store(store regclass, options jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
-- Citus says what it does
SET client_min_messages = warning
SET citus.enable_unsafe_triggers = on
AS $$
-- Writes: the store's definition, and a table beside it, as the caller
DECLARE
  _options jsonb;
  _key name;
  _index record;
  _missing text;
  _why text;
  _hint text;
BEGIN
  _options := ml_rag.parse_options('distribute_store', $2);
  PERFORM ml_rag._own_table(store);
  IF NOT ml_rag._are_trusted(ARRAY[store::oid]) THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('table "%s" is not trusted', store),
      DETAIL = ml_rag._why_untrusted(store) || ' Its triggers and rules, and those of its table of calls, '
        'would run with your rights.',
      HINT = 'Call it as the owner of the table.';
  END IF;
  PERFORM ml_rag._check_transaction('a store cannot be distributed', store);
  PERFORM ml_rag._check_store(store, NULL) WHERE NOT ml_rag._has_vectorizer(store);
  -- of a table with a vectorizer any column of Citus's, or the first of its key
  _key := CASE WHEN NOT ml_rag._has_vectorizer(store) THEN 'document_id'
    WHEN ml_rag._is_distributed(store) THEN ml_rag._distribution_column(store)
    ELSE (ml_rag._primary_key(store)).key[1] END;
  IF NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'citus') THEN
    RAISE EXCEPTION USING ERRCODE = '0A000', MESSAGE = format('"%s" cannot be distributed', store),
      DETAIL = 'Citus is not installed in this database.', HINT = 'CREATE EXTENSION citus;';
  END IF;
  SELECT w.why, w.hint INTO _why, _hint FROM (
    SELECT 'It is partitioned, or inherits from a table or another from it.',
      'Insert its rows into an ordinary store.'
    FROM pg_class AS c WHERE c.oid = store AND (c.relkind <> 'r' OR c.relispartition OR c.relhassubclass
      OR EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = store))
    UNION ALL
    SELECT 'Another table, such as a node group, refers to its rows.', NULL
    FROM pg_constraint AS k WHERE k.confrelid = store AND k.conrelid <> store
    UNION ALL
    SELECT format('It has trigger %I; so have tables whose vectorizer has "destination" table or "mode" '
      'immediate.', t.tgname), NULL
    FROM pg_trigger AS t WHERE t.tgrelid = store AND NOT t.tgisinternal AND t.tgname !~ '^truncate_trigger_'
      AND t.tgfoid
        <> ALL ('{ml_rag._keep_keywords(),ml_rag._empty_embedding(),ml_rag._wake_workers()}'::regprocedure[])
    UNION ALL
    SELECT format('Unique index %s lacks %I, by which rows are distributed.', x.indexrelid::regclass, _key),
      'Drop it.'
    FROM pg_index AS x JOIN pg_attribute AS a ON a.attrelid = store AND a.attname = _key
    WHERE x.indrelid = store AND x.indisunique AND a.attnum <> ALL (x.indkey::smallint[])
    UNION ALL
    SELECT 'Citus distributes it by another column than document_id.', NULL
    WHERE ml_rag._is_distributed(store)
      AND ml_rag._distribution_column(store) IS DISTINCT FROM coalesce(_key, '')
  ) AS w (why, hint) LIMIT 1;
  IF _why IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('"%s" cannot be distributed', store),
      DETAIL = _why,
      HINT = coalesce(_hint, '');
  END IF;
  SELECT i.* INTO _index FROM ml_rag._keyword_index(store) AS i;
  IF NOT ml_rag._is_distributed(store) THEN
    PERFORM ml_rag._lock_table(store, 'ACCESS EXCLUSIVE');
    PERFORM ml_rag.disable_keyword_search(store) WHERE _index.store IS NOT NULL;
    EXECUTE format('SELECT create_distributed_table(%L, %L, colocate_with => ''none'', shard_count => %s)',
      ml_rag._full_name(store), _key,
        coalesce(_options ->> 'shard_count', current_setting('citus.shard_count')));
    -- Citus leaves the rows in the local table, where no query sees them
    EXECUTE format('SELECT truncate_local_data_after_distributing_table(%L)', ml_rag._full_name(store));
  END IF;
  PERFORM ml_rag._place_calls(store);
  IF _index.store IS NOT NULL THEN
    PERFORM ml_rag._index_keywords(store,
      jsonb_build_object('segment', _index.segment, 'text_search_configuration', _index.configuration,
      'k1', _index.k1, 'b', _index.b, 'statistics', _index.statistics), true);
    _missing := (SELECT string_agg(a.shard, ', ' ORDER BY a.shard)
      FROM ml_rag._ask_shards(ARRAY[store], '{"call": "describe"}') AS a
                 WHERE a.answer -> 'keyword index' IS DISTINCT FROM ml_rag._describe(store) ->
                   'keyword index');
    IF _missing IS NOT NULL THEN
      RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = format('not all shards of "%s" have got its keyword index', store),
        DETAIL = format('These have not: %s.', left(_missing, 1000)),
        HINT = 'The logs of the workers say why.';
    END IF;
  END IF;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.distribute_store(regclass, jsonb) IS
$$distributes a vector store over the workers of Citus: ml_rag.distribute_store('handbook', '{"shard_count": 32}')
Its rows go to shards by document_id, those of a table with a vectorizer by its key, with a keyword index on
each if the store has one. For a store that is distributed already it rebuilds what its shards lack, as after
they were split. For the owner of the store; other sessions wait meanwhile. options: SELECT * FROM
ml_rag.option WHERE routine = 'distribute_store'.
Errors: 0A000 Citus is not installed; 22023 bad option; 25006; 42P01; 42501; 55000 the store has node groups,
partitions, or a vectorizer with segments or in mode immediate, or a shard gets no keyword index; 55P03
lock_timeout; those of Citus.$$;
