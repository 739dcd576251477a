-- settings: what an administrator chooses for a database, and where the model server is.

CREATE TABLE ml_rag.setting_value (
  name  text PRIMARY KEY,
  value text NOT NULL
);
COMMENT ON TABLE ml_rag.setting_value IS 'settings that differ from their default; change them with ml_rag.configure';
-- Only changed settings are rows, so that a restored dump never meets a row that CREATE EXTENSION made.
SELECT pg_catalog.pg_extension_config_dump('ml_rag.setting_value', '');

CREATE VIEW ml_rag.setting AS
SELECT d.name, coalesce(v.value, d.default_value) AS value, d.default_value, d.description
FROM (VALUES
  ('model_server', 'unix:/run/ml_rag/ml_rag.sock',
   'address of the model server: unix:/path/of/socket or http://host:port, host an IP address or localhost'),
  ('embed_model_id', 'all_minilm_l6_v2', 'embedding model used where no option names one'),
  ('generate_model_id', 'smollm2-135m-instruct', 'generation model used where no option names one'),
  ('rerank_model_id', 'ms-marco-minilm-l6-v2', 'cross-encoder used where no option names one'),
  ('abstain_text', 'I do not know: nothing relevant was found in the documents.',
   'what ml_rag answers, without asking a model, where nothing relevant was found and "abstain" is true'),
  ('searched_owners', NULL,
   'roles whose stores are searched by calls that name none, separated by commas; members of a role are included, "$user" '
   'is the caller. NULL: stores of trusted owners, and plain tables of others'),
  ('untrusted_ms', '1000', 'milliseconds in which a call that names no store searches all stores of untrusted owners '
   'together; the rest is left out'),
  ('untrusted_mb', '10000', 'size in MB, with indexes, up to which a store of an untrusted owner is searched by calls that '
   'do not name it'),
  ('track', 'on', 'on: calls are reported in ml_rag.activity, ml_rag.progress and ml_rag.stats; off: they are not')
) AS d (name, default_value, description)
LEFT JOIN ml_rag.setting_value AS v ON v.name = d.name;
COMMENT ON VIEW ml_rag.setting IS 'settings of this database: name, value in force, default, description';

CREATE FUNCTION ml_rag._check_address(address text) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: stop an address of the model server that cannot be one, or whose look-up could hang
DECLARE
  _parts text[] := regexp_match(address, '^http://([^/@]+):([0-9]{1,5})/?$');
  _host text := _parts[1];
  _is_good boolean;
BEGIN
  IF address IS NULL OR address ~ '^unix:/.+$' THEN
    RETURN;
  ELSIF _parts IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid address of the model server',
      DETAIL = format('Got %L; an address is unix:/path/of/socket or http://host:port.', address);
  END IF;
  BEGIN
    -- the expression above has let no slash in, so there is no netmask
    _is_good := _host = 'localhost' OR CASE WHEN _host ~ '^\[.*\]$'
      THEN family(btrim(_host, '[]')::inet) = 6 ELSE family(_host::inet) = 4 END;
  EXCEPTION WHEN invalid_text_representation THEN
    _is_good := false;
  END;
  IF NOT _is_good OR _parts[2]::integer NOT BETWEEN 1 AND 65535 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid address of the model server',
      DETAIL = format('Got %L; host is an IP address or localhost (IPv6 in brackets), port 1 to 65535.', address),
      HINT = 'Looking up a host name cannot be cancelled: use its IP address, or a unix socket.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._roles(names text) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the roles of a list, a, "B c"; null among them for one that does not exist. "$user" is left out
-- Errors: 22023 no list of names
DECLARE
  _rest text := names;
  _match text[];
  _roles oid[] := '{}';
BEGIN
  LOOP
    _match := regexp_match(_rest, '^\s*("(?:[^"]|"")+"|[[:alpha:]_][[:alnum:]_$]*)\s*(,|$)(.*)$');
    IF _match IS NULL OR _match[2] = ',' AND _match[3] !~ '\S' THEN
      RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid list of roles',
        DETAIL = format('Got %L.', left(names, 200)),
        HINT = 'Separate names of roles by commas, and quote them as in SQL: kb_owner, "Editors".';
    END IF;
    IF _match[1] <> '"$user"' THEN
      _roles := _roles || to_regrole(_match[1])::oid;
    END IF;
    EXIT WHEN _match[2] = '';
    _rest := _match[3];
  END LOOP;
  RETURN _roles;
END
$$;

CREATE FUNCTION ml_rag.configure(name text, value text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: change one setting of this database, or put it back to its default (value null)
-- Calls: ml_rag._check_address, ml_rag._roles  Reads: ml_rag.setting  Writes: ml_rag.setting_value
-- The address of the model server is a table row and no custom setting because any session may SET those.
BEGIN
  IF NOT EXISTS (SELECT FROM ml_rag.setting AS s WHERE s.name = configure.name) THEN
    RAISE EXCEPTION USING ERRCODE = '22023',
      MESSAGE = format('unknown setting %s', coalesce(quote_literal(configure.name), 'NULL')),
      DETAIL = format('Settings: %s.', (SELECT string_agg(s.name, ', ') FROM ml_rag.setting AS s));
  END IF;
  IF configure.name = 'model_server' THEN
    PERFORM ml_rag._check_address(configure.value);
  END IF;
  IF configure.name = 'abstain_text' AND configure.value !~ '\S' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the abstain text is blank',
      DETAIL = 'It is the answer where nothing relevant was found.',
      HINT = 'Set it to NULL to restore the default.';
  END IF;
  IF configure.name = 'track' AND configure.value NOT IN ('on', 'off') THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid value of setting track',
      DETAIL = format('Got %L; it is on or off.', left(configure.value, 100));
  END IF;
  IF configure.name = 'searched_owners' AND configure.value IS NOT NULL
    AND array_position(ml_rag._roles(configure.value), NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'a role of setting searched_owners does not exist',
      DETAIL = format('Got %L.', left(configure.value, 200)), HINT = '\du in psql lists the roles.';
  END IF;
  IF configure.name IN ('untrusted_ms', 'untrusted_mb') AND configure.value !~ '^[0-9]{1,9}$' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('invalid value of setting %s', configure.name),
      DETAIL = format('Got %L; it is a whole number from 0 to 999999999.', left(configure.value, 100));
  END IF;
  DELETE FROM ml_rag.setting_value AS v WHERE v.name = configure.name;
  IF configure.value IS NOT NULL THEN
    INSERT INTO ml_rag.setting_value (name, value) VALUES (configure.name, configure.value);
  END IF;
END
$$;
COMMENT ON FUNCTION ml_rag.configure(text, text) IS
$$changes a setting of this database (null = back to the default); for the owner of the extension
model_server: unix:/path/of/socket or http://host:port, host an IP address (IPv6 in brackets) or localhost, port 1-65535.
searched_owners: roles separated by commas, quoted as in SQL. untrusted_ms, untrusted_mb: 0-999999999.
Settings are listed by ml_rag.setting. Errors: 22023 unknown setting, malformed address, blank abstain_text, track that
is neither on nor off, a role that does not exist, a number out of range; 42501.$$;

CREATE FUNCTION ml_rag._get_setting(name text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: the value in force. PL/pgSQL, because it keeps the plan for the session.  Reads: ml_rag.setting
BEGIN
  RETURN (SELECT s.value FROM ml_rag.setting AS s WHERE s.name = $1);
END
$$;
