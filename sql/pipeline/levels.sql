-- levels: options of ml_rag by name and for everybody: what a call does not say is taken from a preset and
-- from settings.

CREATE TABLE ml_rag_internal.preset (
  name        text COLLATE "C" PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 100),
  options     jsonb NOT NULL CHECK (jsonb_typeof(options) = 'object'),
  description text,
  CONSTRAINT can_be_restored CHECK (ml_rag._can_be_restored(ARRAY[name, description], ARRAY[options]))
);
COMMENT ON TABLE ml_rag_internal.preset IS 'the presets of this database; ml_rag.create_preset and '
  'ml_rag.drop_preset change them';
SELECT pg_catalog.pg_extension_config_dump('ml_rag_internal.preset', '');

CREATE VIEW ml_rag.preset AS SELECT p.name, p.options, p.description FROM ml_rag_internal.preset AS p;
COMMENT ON VIEW ml_rag.preset IS
$$options of ml_rag by name: {"preset": "handbook"} in a call
Made by ml_rag.create_preset, deleted by ml_rag.drop_preset. A preset carries options only, never rights.$$;

CREATE FUNCTION ml_rag._fits_arms(hybrid_options jsonb) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: whether hybrid_options say no more than how arms are fused, which can stand beside option arms
BEGIN
  RETURN jsonb_typeof(hybrid_options) IS DISTINCT FROM 'object'
    OR jsonb_strip_nulls(hybrid_options) - '{fusion,rrf_k}'::text[] = '{}';
END
$$;

CREATE FUNCTION ml_rag._lay_over_filters(lower jsonb, higher jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: the same of option filters: a column or key that a higher level names has its condition of there.
-- "and", "or" and "not" name none: what both levels have under one of these holds, under "and". Done twice it
-- changes nothing
DECLARE
  -- json: jsonb_object_agg takes a time that grows with the square of the texts in a value, uncancelled
  _both jsonb := (SELECT coalesce(json_object_agg(l.key, l.value)::jsonb, '{}') FROM jsonb_each(lower) AS l
    WHERE l.key IN ('and', 'or', 'not') AND higher ? l.key AND l.value <> higher -> l.key);
  _there jsonb := CASE jsonb_typeof(higher -> 'and') WHEN 'array' THEN higher -> 'and' ELSE '[]' END;
  _held jsonb := (
    SELECT json_agg(c.condition ORDER BY c.condition)::jsonb
    FROM (SELECT a AS condition FROM jsonb_array_elements(
            CASE jsonb_typeof(_both -> 'and') WHEN 'array' THEN _both -> 'and' END) AS a
          UNION ALL SELECT jsonb_build_object(b.key, b.value) FROM jsonb_each(_both - 'and') AS b) AS c
    WHERE c.condition NOT IN (SELECT t FROM jsonb_array_elements(_there) AS t));
  _laid jsonb := lower || higher || (
    SELECT coalesce(json_object_agg(h.key, (lower -> h.key) || h.value)::jsonb, '{}')
    FROM jsonb_each(higher) AS h
    WHERE h.key NOT IN ('and', 'or', 'not') AND jsonb_typeof(h.value) = 'object'
      AND jsonb_typeof(lower -> h.key) = 'object');
BEGIN
  RETURN CASE WHEN _held IS NULL THEN _laid
    ELSE _laid || jsonb_build_object('and', coalesce(_laid -> 'and', '[]') || _held) END;
END
$$;

CREATE FUNCTION ml_rag._lay_over(lower jsonb, higher jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the options of a higher level over those of a lower one; objects key by key
DECLARE
  _arms CONSTANT text[] := '{semantic_search,keyword_search}';
  _key text;
  _value jsonb;
BEGIN
  -- two ways to say what is searched, which exclude each other
  IF higher ? 'arms' THEN
    lower := lower - _arms - CASE WHEN ml_rag._fits_arms(lower -> 'hybrid_options') THEN ''
      ELSE 'hybrid_options' END;
  ELSIF higher ?| _arms OR NOT ml_rag._fits_arms(higher -> 'hybrid_options') THEN
    lower := lower - 'arms';
  END IF;
  FOR _key, _value IN SELECT e.key, e.value FROM jsonb_each(higher) AS e LOOP
    IF jsonb_typeof(_value) = 'object' AND jsonb_typeof(lower -> _key) = 'object' THEN
      _value := CASE _key WHEN 'filters' THEN ml_rag._lay_over_filters(lower -> _key, _value)
        ELSE ml_rag._lay_over(lower -> _key, _value) END;
    END IF;
    lower := lower || jsonb_build_object(_key, _value);
  END LOOP;
  RETURN lower;
END
$$;

CREATE FUNCTION ml_rag._options_of_setting(name text, value text) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: the options that a setting holds as text
DECLARE
  _options jsonb;
BEGIN
  BEGIN
    _options := value::jsonb;
  EXCEPTION WHEN invalid_text_representation OR untranslatable_character OR statement_too_complex THEN
    NULL;
  END;
  IF jsonb_typeof(_options) IS DISTINCT FROM 'object' OR _options ? 'preset' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('invalid value of setting %s', name),
      DETAIL = CASE WHEN _options ? 'preset' THEN 'It names a preset, which only a call may do.'
        ELSE 'It is not a JSON object.' END,
      HINT = 'It holds options of ml_rag, such as {"keyword_search": true}.';
  END IF;
  RETURN _options;
END
$$;

CREATE FUNCTION ml_rag._hold_named(name text, is_judged boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: what a call finds by a name with a schema, as a store that it names, until the end of the
-- transaction. While its lock was waited for, the name can have come to be another relation's
-- is_judged: false if that is not trusted  Reads: the catalog  Errors: 42P01
DECLARE
  _held oid[];
  _found oid[];
BEGIN
  IF strpos(name, '.') = 0 THEN
    RETURN true;
  END IF;
  FOR _round IN 1..10 LOOP
    _found := ARRAY(SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
      WHERE _hold_named.name = ANY (ml_rag._full_names(n.nspname, c.relname))
        AND c.relkind IN ('r', 'p', 'f', 'v', 'm')
      ORDER BY c.oid);
    IF _found = _held THEN
      RETURN true;
    ELSIF NOT is_judged THEN
      PERFORM ml_rag._hold(_found);
    ELSIF ml_rag._hold_trusted(_found) IS NOT TRUE THEN
      RETURN false;
    END IF;
    _held := _found;
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = format('table "%s" does not exist any more', name),
    DETAIL = 'Each time that it was locked, another one had its name.', HINT = 'Try again.';
END
$$;

CREATE FUNCTION ml_rag._check_named(level text, options jsonb, given jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL UNSAFE AS $$
-- purpose: refuse that options which others can have written name what runs code of a role that the caller
-- does not trust: what is named runs unasked. So it is with a preset, for a superuser, as members of
-- ml_rag_publisher can change any, whom all others trust; and with a setting of the session where the role is
-- not that of the session: another one can have left it, or called a function that is SECURITY DEFINER
-- A store without its schema is found only if it is trusted. given: what the call says itself
-- Reads: the catalog  Errors: 42501
DECLARE
  _named text := (
    SELECT v.name FROM unnest(ml_rag._texts(options -> 'vector_store')) AS v (name)
    WHERE (given ? 'vector_store') IS NOT TRUE AND NOT ml_rag._hold_named(v.name, true)
    UNION ALL SELECT a ->> 'function'
    FROM jsonb_path_query(options, 'lax $.arms[*] ? (exists (@.function))') AS a
    WHERE (given ? 'arms') IS NOT TRUE
    UNION ALL SELECT options #>> '{rerank,function}'
    WHERE options #> '{rerank,function}' IS NOT NULL AND given #> '{rerank,function}' IS NULL
    LIMIT 1);
BEGIN
  IF _named IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = format('%s names what you do not trust', level),
      DETAIL = format('"%s" can run code of a role that role %s does not trust.', left(_named, 200),
        quote_ident(current_user)),
      HINT = 'Name it in a call of ml_rag, or ask as another role.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._levels(options jsonb) RETURNS TABLE (level text, given jsonb)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 3 AS $$
-- purpose: what is laid under the options of a call, lowest first: the database's, the role's or session's, a
-- preset's
-- Reads: ml_rag.setting_value, ml_rag.preset
DECLARE
  _session text := nullif(current_setting('ml_rag.options', true), '');
  _is_own boolean;
BEGIN
  FOR given IN SELECT ml_rag._options_of_setting('default_options', v.value) FROM ml_rag.setting_value AS v
    WHERE v.name = 'default_options' LOOP
    level := 'setting default_options';
    RETURN NEXT;
  END LOOP;
  -- only a superuser sets it for a role or a database; what is set for another role is not for this one
  _is_own := _session IS NOT NULL AND (
    session_user = current_user AND current_setting('role') IN ('none', current_user) OR EXISTS (
    SELECT FROM pg_db_role_setting AS d
    WHERE concat('ml_rag.options=', _session) = ANY (d.setconfig)
      AND d.setrole IN (0, quote_ident(current_user)::regrole)
      AND d.setdatabase IN (0,
        (SELECT b.oid FROM pg_database AS b WHERE b.datname = current_database()))));
  -- in a function that is SECURITY DEFINER it is the caller's, who could have other columns and rows shown
  -- than the function shows
  IF _session IS NOT NULL AND (_is_own OR current_setting('role') = current_user) THEN
    level := 'setting ml_rag.options';
    given := ml_rag._options_of_setting('ml_rag.options', _session);
    PERFORM ml_rag._check_named(level, given, $1) WHERE NOT _is_own;
    RETURN NEXT;
  END IF;
  IF jsonb_typeof($1 -> 'preset') = 'string' THEN
    level := format('preset "%s"', left($1 ->> 'preset', 100));
    given := (SELECT p.options FROM ml_rag.preset AS p WHERE p.name = $1 ->> 'preset');
    IF given IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('%s does not exist', level),
        HINT = 'SELECT * FROM ml_rag.preset lists the presets; ml_rag.create_preset makes one.';
    END IF;
    PERFORM ml_rag._check_named(level, given, $1)
    WHERE ml_rag._is_superuser_now(quote_ident(current_user)::regrole);
    RETURN NEXT;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._layered(options jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the options of a call laid over the levels below; as they are if there are none. Done twice it
-- changes nothing
-- Reads: ml_rag.setting_value
DECLARE
  _laid jsonb := '{}';
  _given jsonb;
BEGIN
  IF coalesce(current_setting('ml_rag.options', true), '') = '' AND (options ? 'preset') IS NOT TRUE
    AND NOT EXISTS (SELECT FROM ml_rag.setting_value AS v WHERE v.name = 'default_options')
    OR jsonb_typeof(options) NOT IN ('object', 'null') THEN
    RETURN options;
  END IF;
  FOR _given IN SELECT l.given FROM ml_rag._levels(options) AS l LOOP
    _laid := ml_rag._lay_over(_laid, _given);
  END LOOP;
  RETURN ml_rag._lay_over(_laid, coalesce(nullif(options, 'null'), '{}'));
END
$$;
