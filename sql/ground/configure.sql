-- configure: settings are changed.

CREATE FUNCTION ml_rag.configure(name text, value text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: change one setting of this database, or put it back to its default (value null)
-- Reads: ml_rag.setting  Writes: ml_rag.setting_value
-- The address of the model server is a table row and no custom setting because any session may SET those.
DECLARE
  _error jsonb;
  _parts text[] := regexp_match(value, '^http://([^/@]+):([0-9]{1,5})/?$');
  _is_good boolean := false;
  _task text;
  _listed record;
  _model record;
BEGIN
  IF NOT EXISTS (SELECT FROM ml_rag.setting AS s WHERE s.name = configure.name) THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('unknown setting %s', coalesce(quote_literal(configure.name), 'NULL')),
      DETAIL = format('Settings: %s.', (SELECT string_agg(s.name, ', ' ORDER BY s.name)
        FROM ml_rag.setting AS s)),
      HINT = coalesce((SELECT format('Did you mean "%s"?', s.name) FROM ml_rag.setting AS s,
          ml_rag._distance_of_words(lower(coalesce(configure.name, '')), s.name) AS d
         WHERE d <= greatest(2, length(s.name) / 3) ORDER BY d, s.name LIMIT 1),
        (SELECT format('It is an option, for all calls: SELECT ml_rag.configure(''default_options'', '
          '''{"%s": …}'').', o.name)
         FROM ml_rag.option AS o WHERE o.routine = 'ml_rag' AND o.name = configure.name),
        'SELECT * FROM ml_rag.setting describes them.');
  END IF;
  IF configure.name = 'model_server' THEN
    -- one that cannot be an address, or whose look-up could hang
    IF configure.value !~ '^unix:/.+$' AND _parts IS NULL THEN
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid address of the model server',
        DETAIL = format('Got %L; an address is unix:/path/of/socket or http://host:port.', configure.value),
        HINT = 'Examples: unix:/run/ml_rag/ml_rag.sock, http://127.0.0.1:8080.';
    END IF;
    BEGIN
      -- the expression above excludes slashes, and with them netmasks
      _is_good := _parts IS NULL OR _parts[2]::integer BETWEEN 1 AND 65535 AND (_parts[1] = 'localhost'
        OR CASE WHEN _parts[1] ~ '^\[.*\]$' THEN family(btrim(_parts[1], '[]')::inet) = 6
          ELSE family(_parts[1]::inet) = 4 END);
    EXCEPTION WHEN invalid_text_representation THEN
      NULL;
    END;
    IF NOT _is_good THEN
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid address of the model server',
        DETAIL = format('Got %L; host is an IP address or localhost (IPv6 in brackets), port 1 to 65535.',
          configure.value),
        HINT = 'Looking up a host name cannot be cancelled: use its IP address, or a unix socket.';
    END IF;
  END IF;
  IF configure.name = 'abstain_text' AND configure.value !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the abstain text is blank',
      DETAIL = 'It is the answer where nothing relevant was found.',
      HINT = 'Set it to NULL to restore the default.';
  END IF;
  IF configure.name = 'track' AND configure.value NOT IN ('on', 'off') THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid value of setting track',
      DETAIL = format('Got %L; allowed: on or off.', left(configure.value, 100));
  END IF;
  IF configure.name = 'searched_owners' AND configure.value IS NOT NULL
    AND array_position(ml_rag._roles(configure.value), NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'role in setting "searched_owners" does not exist',
      DETAIL = format('Got %L.', left(configure.value, 200)), HINT = '\du in psql lists the roles.';
  END IF;
  PERFORM ml_rag._check_rag_options(ml_rag._options_of_setting(configure.name, configure.value))
  WHERE configure.name = 'default_options' AND configure.value IS NOT NULL;
  DELETE FROM ml_rag.setting_value AS v WHERE v.name = configure.name;
  IF configure.value IS NOT NULL THEN
    INSERT INTO ml_rag.setting_value (name, value) VALUES (configure.name, configure.value);
  END IF;
  IF configure.name = 'model_server' THEN
    _error := (SELECT r.error FROM ml_rag._call_python('reach', '[]') AS r);
    IF _error ->> 'sqlstate' LIKE '57%' THEN
      PERFORM ml_rag._raise(_error);
    ELSIF _error IS NOT NULL THEN
      -- no error: the server may be started later
      RAISE WARNING USING ERRCODE = '01000',
        MESSAGE = format('the address is set, but %s', _error ->> 'message'),
        DETAIL = coalesce(_error ->> 'detail', _error ->> 'sqlstate'),
        HINT = coalesce(_error ->> 'hint', 'ml-rag doctor checks the connection and the models.');
    END IF;
  ELSIF right(configure.name, 9) = '_model_id' AND configure.value <> 'hybrid' THEN
    _task := replace(left(configure.name, -9), 'query', 'generate');
    SELECT r.found -> 'data' AS models, r.error INTO _listed
    FROM ml_rag._call_python('get', '["/v1/models"]') AS r;
    IF _listed.error ->> 'sqlstate' LIKE '57%' THEN
      PERFORM ml_rag._raise(_listed.error);
    END IF;
    SELECT m.available, m.pull INTO _model
    FROM jsonb_to_recordset(_listed.models) AS m (id text, task text, available boolean, pull text)
    WHERE m.task = _task AND m.id = split_part(configure.value, '@', 1);
    -- no errors: the model may be added later
    IF _listed.error IS NULL AND NOT FOUND THEN
      RAISE WARNING USING ERRCODE = '01000',
        MESSAGE = format('%s is set, but the model server has no model "%s" that can %s', configure.name,
          left(configure.value, 200), _task),
        DETAIL = 'Calls that name no model will fail.',
        HINT = concat('Did you mean "' || ml_rag._nearest_key(
            ARRAY(SELECT m.id FROM jsonb_to_recordset(_listed.models) AS m (id text, task text)
              WHERE m.task = _task) || CASE _task WHEN 'rerank' THEN '{hybrid}'::text[] END,
            nullif(split_part(configure.value, '@', 1), '')) || '"? ',
          'SELECT * FROM ml_supported_models() lists its models; docs/models.md#models-of-your-own says '
          'how to add one.');
    ELSIF NOT _model.available THEN
      RAISE WARNING USING ERRCODE = '01000',
        MESSAGE = format('%s is set, but the files of model "%s" are missing', configure.name,
          configure.value),
        DETAIL = 'Calls that name no model will fail.',
        HINT = coalesce('Get them with: ' || _model.pull,
          'SELECT * FROM ml_supported_models() lists the models that are there.');
    END IF;
  END IF;
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.configure(text, text) IS
$$changes a setting of this database (null restores the default); for the owner of the extension
model_server: unix:/path/of/socket or http://host:port, host an IP address (IPv6 in brackets) or localhost,
port 1-65535.
default_options: options of ml_rag as JSON, for calls that do not give them. searched_owners: roles separated
by commas, quoted as in SQL. If nothing answers at the address of the model server, there is a warning, and
the address is set all the same; so is a model that the model server does not have. Settings are listed by
ml_rag.setting. Errors: 22023 unknown setting,
malformed address, blank abstain_text, track that is neither on nor off, a role that does not exist, a bad
option; 42501.$$;
