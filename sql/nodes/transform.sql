-- transform: a text to its nodes: sentences, paragraphs, what a function of the owner's makes of it, what a
-- model writes.

CREATE FUNCTION ml_rag._asks_model(transform text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
  RETURN transform = ANY ('{summary,keyphrases,questions,entities,context}');
END
$$;

CREATE FUNCTION ml_rag._node_function(transform text, store oid DEFAULT NULL) RETURNS regprocedure
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the function that a transform names; the caller may execute it and trusts its owner: it runs with
-- the caller's rights, also where that one loads into a table of the owner's. So may the owner of the store,
-- who can name any: a superuser may execute pg_ls_dir, say
DECLARE
  _function regprocedure;
  _found record;
BEGIN
  BEGIN
    _function := to_regprocedure(transform || '(text)');
  EXCEPTION WHEN syntax_error OR invalid_name OR invalid_schema_name OR feature_not_supported
    OR data_exception THEN
    NULL;
  END;
  IF _function IS NULL OR cardinality(parse_ident(transform)) <> 2 OR NOT EXISTS (
    SELECT FROM pg_proc AS p WHERE p.oid = _function AND p.prokind = 'f' AND p.proretset
      AND p.prorettype = 'text'::regtype) THEN
    PERFORM ml_rag._bad_option('transform', to_jsonb(left(transform, 200)),
      'sentence, paragraph, summary, keyphrases, questions, entities, context, or '
        '"schema.function" that takes text and returns setof text');
  END IF;
  SELECT p.proowner AS owner, n.oid AS schema, n.nspname AS schema_name,
    n.nspowner AS schema_owner INTO _found
  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE p.oid = _function;
  IF NOT has_schema_privilege(_found.schema, 'USAGE') OR NOT has_function_privilege(_function, 'EXECUTE') THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('permission denied for function %s', _function);
  ELSIF EXISTS (SELECT FROM pg_class AS c WHERE c.oid = store
    AND NOT (has_schema_privilege(c.relowner, _found.schema, 'USAGE')
      AND has_function_privilege(c.relowner, _function, 'EXECUTE'))) THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('the owner of "%s" may not execute function %s', store::regclass, _function),
      DETAIL = 'It would run with the rights of the role that fills the node group.';
  ELSIF NOT ml_rag._trusts(_found.schema_owner) THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('function %s is in a schema of a role that is not trusted', _function),
      DETAIL = format('The owner of schema %I, %s, could put another function in its place, which would run '
        'with the rights of the role that fills the node group.', _found.schema_name,
          quote_ident(pg_get_userbyid(_found.schema_owner))),
      HINT = 'Move the function: ALTER FUNCTION … SET SCHEMA …; a node group that names it is created anew.';
  ELSIF NOT ml_rag._trusts(_found.owner) THEN
    RAISE EXCEPTION USING ERRCODE = '42501',
      MESSAGE = format('function %s belongs to a role that is not trusted', _function),
      DETAIL = 'It would run with the rights of the role that fills the node group.',
      HINT = 'Let the owner of the table call ml_rag.refresh_node_groups.';
  END IF;
  RETURN _function;
END
$$;

CREATE FUNCTION ml_rag._transform(options jsonb, segment text, around jsonb, OUT nodes text[],
  OUT error jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the nodes of one text, which is null if it is too long (nodes/fill); what goes wrong with it comes
-- back as its error. options: of the node group, with its store
DECLARE
  _transform text := options ->> 'transform';
  _function regprocedure := CASE WHEN NOT ml_rag._asks_model(_transform)
    AND _transform <> ALL ('{sentence,paragraph}')
                                 THEN ml_rag._node_function(_transform, (options ->> 'store')::oid) END;
  -- regular expressions over it cannot be cancelled
  _most CONSTANT integer := 10000000;
  _made record;
  _detail text;
BEGIN
  IF segment IS NULL OR _function IS NULL AND octet_length(segment) > _most THEN
    error := jsonb_build_object('sqlstate', '54000', 'message', 'the text is too long',
      'detail', format('Nodes are made of at most %s bytes.', _most));
  ELSIF _function IS NULL THEN
    _made := ml_rag._call_python('make_nodes', jsonb_build_array(options, segment, around));
    -- what each text would get: no model, no server; a cancelled call
    PERFORM ml_rag._raise(_made.error) WHERE _made.error ->> 'sqlstate' NOT IN ('38000', '22000');
    nodes := ml_rag._texts(_made.found);
    error := _made.error;
  ELSE
    BEGIN
      -- in FROM all of its rows would be made first
      EXECUTE (SELECT format('SELECT array_agg(f.node) FROM (SELECT %I.%I($1) AS node LIMIT 10001) AS f',
                 n.nspname, p.proname)
               FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE p.oid = _function)
        INTO nodes USING segment;
    EXCEPTION WHEN assert_failure OR OTHERS THEN
      GET STACKED DIAGNOSTICS _detail = PG_EXCEPTION_DETAIL;
      error := jsonb_build_object('sqlstate', SQLSTATE, 'message', left(SQLERRM, 500),
        'detail', nullif(left(_detail, 500), ''));
    END;
  END IF;
  nodes := ARRAY(SELECT u.node FROM unnest(nodes) WITH ORDINALITY AS u (node, place)
    WHERE u.node ~ '[^[:space:]]' ORDER BY u.place);
  IF error IS NULL AND (cardinality(nodes) > 10000
    OR (SELECT max(octet_length(n)) > 1000000 FROM unnest(nodes) AS n)) THEN
    error := jsonb_build_object('sqlstate', '54000', 'message', 'too many or too long nodes',
      'detail', format('It has %s nodes; at most 10000 of 1000000 bytes each are kept.', cardinality(nodes)));
  END IF;
  IF error IS NOT NULL THEN
    nodes := '{}';
  END IF;
END
$$;
