-- work: the loop that makes all that is derived: what a job does is in backend/jobs, as statements that are
-- executed here. So the error of a trigger of the table keeps its context, which Python would lose.

CREATE PROCEDURE ml_rag._commit(INOUT committed boolean DEFAULT NULL, INOUT error jsonb DEFAULT NULL)
LANGUAGE plpython3u
AS $$
# purpose: commit where the caller's transaction allows it; false inside a transaction block or a function
# PL/pgSQL cannot try: a COMMIT inside a block with EXCEPTION is an error of its own. error: what a deferred
# constraint says
@BACKEND@
return backend.commit(plpy)
$$;

CREATE FUNCTION ml_rag._next_step(INOUT job bigint, routine text, INOUT given json, call integer,
  committed boolean, found json,
  OUT statement text, OUT vectors text[], OUT by_index boolean, OUT shard json, OUT result jsonb,
    OUT fallback jsonb, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
# purpose: the next statement of a job (a new one if null) with its parameters $1 and $2, after what the last
# one has found; if there is none, commit, or take the result; shard: where it runs, here if null
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if error := plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        nothing = dict.fromkeys(("given", "statement", "vectors", "by_index", "shard", "result", "fallback"))
        return nothing | {"job": job, "error": error}
return GD["ml_rag"].next_step(plpy, '@vector@', job, routine, given, call, committed, found)
$$;

CREATE FUNCTION ml_rag._read_by_index(statement text, given json) RETURNS json
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
-- in the order of an index or of the blocks, some rows at a time
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
-- what is switched off counts as so expensive that it would be compiled, a few rows at a time
SET jit = off
AS $$
DECLARE
  _found json;
BEGIN
  EXECUTE statement INTO _found USING given;
  RETURN _found;
END
$$;

CREATE FUNCTION ml_rag._execute(statement text, given json, vectors text[], by_index boolean) RETURNS json
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: what a statement of a job returns
DECLARE
  _found json;
BEGIN
  IF by_index THEN
    RETURN ml_rag._read_by_index(statement, given);
  END IF;
  EXECUTE statement INTO _found USING given, vectors;
  RETURN _found;
END
$$;

CREATE FUNCTION ml_rag._work(INOUT job bigint, routine text, given jsonb, call integer, committed boolean,
  failure jsonb, OUT result jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT
-- rows are found by their key as text, which with others can be that of another key
SET "DateStyle" = 'ISO' SET extra_float_digits = 1
AS $$
-- purpose: a job (a new one if null) up to its next commit, or to its result; failure: of the last commit
DECLARE
  _step record;
  _calls regclass;
  _found json;
  -- {"result", "store"}: what the routine is about is done, with this result, whatever becomes of node groups
  _fallback jsonb;
  _detail text;
  _hint text;
BEGIN
  PERFORM ml_rag._raise(failure);
  LOOP
    _step := ml_rag._next_step(job, routine, given::json, call, committed, _found);
    job := _step.job;
    _fallback := _step.fallback;
    PERFORM ml_rag._raise(_step.error);
    IF _step.statement IS NULL THEN
      result := _step.result;
      RETURN;
    ELSIF _step.shard IS NOT NULL THEN
      -- On the worker of Citus that has the shard, one of ml_rag._filled_parts, which does not move
      -- meanwhile. ShareLock, as Citus takes for an UPDATE; it takes what is sent to the worker for a SELECT
      PERFORM lock_shard_metadata(5, ARRAY[(_step.shard ->> 'shard')::bigint]);
      _calls := ml_rag._calls_of((_step.shard ->> 'store')::oid);
      PERFORM ml_rag._hold(ARRAY[_calls]::oid[]);
      EXECUTE format('SELECT ml_rag._execute($1, $2, $3, $4) FROM %s AS c WHERE c.key = %L AND c.shard = %L',
        ml_rag._relation_name(_calls), _step.shard ->> 'key', _step.shard ->> 'shard')
      INTO STRICT _found USING _step.statement, _step.given, _step.vectors, _step.by_index;
    ELSE
      _found := ml_rag._execute(_step.statement, _step.given, _step.vectors, _step.by_index);
    END IF;
  END LOOP;
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL, _hint = PG_EXCEPTION_HINT;
  PERFORM ml_rag._python('stop_work', jsonb_build_array(job));
  IF _fallback IS NULL OR SQLSTATE IN ('57014', 'P0004') THEN
    RAISE;
  ELSIF SQLSTATE = '55006' THEN
    RAISE NOTICE USING ERRCODE = '55006', MESSAGE = SQLERRM,
      DETAIL = 'What has just been written may have no nodes, as that session can be past it.',
      HINT = format('Once it is done: CALL ml_rag.refresh_node_groups(%L);', _fallback ->> 'store');
  ELSE
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('node groups of "%s" are not filled: %s', _fallback ->> 'store', SQLERRM),
      DETAIL = concat_ws(' ', SQLSTATE, _detail),
      HINT = concat_ws(' ', nullif(_hint, ''),
        format('Then CALL ml_rag.refresh_node_groups(%L);', _fallback ->> 'store'));
  END IF;
  result := _fallback -> 'result';
END
$$;

CREATE FUNCTION ml_rag._hold_names(names jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the tables of a job keep their names until the end of the transaction; refuse if a name leads to
-- another table by now. names: each with its OID  Errors: 42P01
BEGIN
  PERFORM ml_rag._hold(ARRAY(SELECT n.value::oid FROM jsonb_each_text(names) AS n));
  PERFORM ml_rag._check_name(n.key, n.value::oid) FROM jsonb_each_text(names) AS n;
END
$$;

CREATE FUNCTION ml_rag._hold_filled(held oid[], checked oid[], store regclass, owner oid,
  with_parts boolean, is_judged boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: tables that a job reads and fills are what and whose they were, until the end of the transaction;
-- a table that was given away since the job began has triggers of another role now, and so has a part of it
-- whose owner is not trusted. with_parts: all parts of them are read or filled. is_judged: the owner must be
-- trusted, too, as the caller has not named the table  Reads: the catalog
-- Errors: 42P01, 42501, 55000
DECLARE
  _owner oid;
  _found record;
BEGIN
  IF with_parts THEN
    held := ml_rag._hold_with(held, 'parts');
  ELSE
    PERFORM ml_rag._hold(held);
  END IF;
  PERFORM ml_rag._refuse_foreign_schema(c) FROM unnest(checked) AS c;
  _owner := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = store);
  IF _owner <> owner THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('table "%s" has another owner by now', store),
      DETAIL = format('It was given to role %s during the run.', quote_ident(pg_get_userbyid(_owner))),
      HINT = 'Call again, if you trust that role.';
  ELSIF is_judged AND NOT ml_rag._trusts(_owner) THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('table "%s" is not trusted any more', store),
      DETAIL = format('Its owner is role %s, which you do not trust.', quote_ident(pg_get_userbyid(_owner))),
      HINT = 'If you trust that role, call ml_rag.run_vectorizer or ml_rag.refresh_node_groups yourself.';
  END IF;
  SELECT c.oid::regclass AS part, c.relowner INTO _found FROM pg_class AS c
  WHERE c.oid = ANY (held || ml_rag._parts(store)) AND c.relowner <> owner
    AND NOT ml_rag._trusts(c.relowner) LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('part "%s" of table "%s" belongs to a role that you do not trust', _found.part, store),
      DETAIL = format('Triggers of role %s would run with your rights.',
        quote_ident(pg_get_userbyid(_found.relowner))),
      HINT = format('Give it to the owner of the table: ALTER TABLE %s OWNER TO …;', _found.part);
  END IF;
END
$$;
