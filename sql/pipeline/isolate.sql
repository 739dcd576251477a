-- isolate: what keeps a store that a call does not name from failing the call or holding it up.
--
-- Such a store is read in a block of its own and without a long wait for a lock. What goes wrong there leaves
-- it out, with a warning.

CREATE FUNCTION ml_rag._failure(store text, sqlstate text, message text, detail text, hint text) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the error of a store as ml_rag._raise and ml_rag._warn_of_failures take it
BEGIN
  RETURN jsonb_strip_nulls(jsonb_build_object('store', store, 'sqlstate', sqlstate,
    'message', left(message, 500),
    'detail', left(nullif(detail, ''), 500), 'hint', left(nullif(hint, ''), 500)));
END
$$;

CREATE FUNCTION ml_rag._is_of_server(context text, VARIADIC written text[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: whether an error is one of another server. It can have any SQLSTATE, words and context there, but
-- postgres_fdw adds a line, which what is written here, a statement or names in it, can only look like
DECLARE
  _one text;
BEGIN
  FOREACH _one IN ARRAY written LOOP
    context := replace(context, _one, '');
  END LOOP;
  RETURN strpos(E'\n' || context, E'\nremote SQL command: ') > 0;
END
$$;

CREATE FUNCTION ml_rag._warn_of_failures(failures jsonb[]) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: say which stores were left out, and why. A failure may bring its own words: warning, skipped (the
-- reason), warning_detail, warning_hint. Of many the last ones are named together.
DECLARE
  _most CONSTANT integer := 20;
  _failure jsonb;
BEGIN
  FOREACH _failure IN ARRAY coalesce(failures[1:_most], '{}') LOOP
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = coalesce(_failure ->> 'warning',
        format('"%s" cannot be searched; ignored', _failure ->> 'store')),
      DETAIL = CASE WHEN _failure ? 'warning' THEN
        coalesce(_failure ->> 'warning_detail', _failure ->> 'skipped')
                    ELSE
                      concat(format('%s: %s.', _failure ->> 'sqlstate', rtrim(_failure ->> 'message', '.')),
                      ' ' || (_failure ->> 'detail')) END,
      HINT = CASE WHEN _failure ? 'warning' THEN _failure ->> 'warning_hint'
                  ELSE 'Leave it out with "exclude_vector_store". To get its error instead, name it with its '
                    'schema in "vector_store".' END;
  END LOOP;
  IF cardinality(failures) > _most THEN
    RAISE WARNING USING ERRCODE = '01000',
      MESSAGE = format('%s more vector stores cannot be searched; ignored', cardinality(failures) - _most),
      DETAIL = (SELECT string_agg(f ->> 'store', ', ') FROM unnest(failures[_most + 1:2 * _most]) AS f)
        || CASE WHEN cardinality(failures) > 2 * _most THEN ', ….' ELSE '.' END,
      HINT = 'Option "explain" says why of each; setting "searched_owners" leaves out those of some roles.';
  END IF;
END
$$;
