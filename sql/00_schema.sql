-- 00_schema: the schema of everything private, its types, the settings.

CREATE SCHEMA ml_rag;
COMMENT ON SCHEMA ml_rag IS 'retrieval-augmented generation: stages, settings and helpers behind the public routines';

-- The script itself looks nowhere else; CREATE EXTENSION puts the session's path back when it ends.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Every function below is created with SET search_path FROM CURRENT, and this is the path they get: nothing a caller
-- can write to, with the types and operators of pgvector wherever that extension was put.
SELECT set_config('search_path', format('pg_catalog, ml_rag, %s, pg_temp', extnamespace::regnamespace), true)
FROM pg_extension WHERE extname = 'vector';

DO $$
DECLARE
  _schema regnamespace := (SELECT extnamespace FROM pg_extension WHERE extname = 'vector');
BEGIN
  IF has_schema_privilege('public', _schema, 'CREATE') THEN
    RAISE WARNING USING MESSAGE = format('everybody may create objects in schema %s, where pgvector is', _schema),
      DETAIL = 'That schema is on the path of every function of ml_rag.',
      HINT = format('REVOKE CREATE ON SCHEMA %s FROM PUBLIC;', _schema);
  END IF;
END
$$;

-- A vector store as discovery found it. A *_column that is null does not exist in the relation.
CREATE TYPE ml_rag.store AS (
  vector_store           text,      -- schema.table, as shown in the output
  relation               regclass,
  embed_model_id         text,      -- from the marker comment; null where an unmarked relation was named
  segment_embedding      name,      -- columns, by their logical names
  segment                name,
  document_name          name,
  document_id            name,
  segment_number         name,
  metadata               name,
  embedding_type         text,      -- vector or halfvec
  dimensions             integer,   -- null where the column declares none
  document_id_type       text,      -- SQL name of its type
  segment_number_type    text,
  found                  text       -- named (with its schema); else its owner is trusted or untrusted. null = named
);

-- A segment on its way through the pipeline. An array of hits is in the order of the citations, the best one first.
CREATE TYPE ml_rag.hit AS (
  vector_store   text,
  document_name  text,
  document_id    bigint,            -- null where the column is no integer
  document_key   text,              -- what tells the store's documents apart, as text
  segment_number bigint,
  segment        text,
  distance       numeric,           -- rounded to 4 decimals; null where there is no query embedding to measure from
  metadata       jsonb,
  keyword_score  double precision,  -- BM25; null where the keyword arm did not look or the segment has none of the words
  score          double precision,  -- 0-1, of fuse: what hybrid search orders by; null without it
  rerank_score   double precision   -- 0-1, of the reranker; null without it
);

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
   'what ml_rag answers, without a model, where nothing relevant enough was found and "abstain" holds'),
  ('searched_owners', NULL,
   'whose stores are searched by calls that name none: roles, whose members count, separated by commas; "$user" is '
   'whoever asks. NULL: those of trusted owners and plain tables of others'),
  ('untrusted_ms', '1000', 'milliseconds in which a call that names no store searches those of untrusted owners, all of '
   'them together; what is left then is left out'),
  ('untrusted_mb', '10000', 'largest store of an untrusted owner, with its indexes, in MB, that is searched by calls that '
   'do not name it'),
  ('track', 'on', 'on: calls are told to ml_rag.activity, ml_rag.progress and ml_rag.stats; off: they are not')
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
      HINT = 'The look-up of a name cannot be cancelled, so give the address it stands for, or a unix socket.';
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
        HINT = 'Write names of roles with commas between them, quoted as in SQL: kb_owner, "Editors".';
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
      HINT = 'Set it to NULL to have the default back.';
  END IF;
  IF configure.name = 'track' AND configure.value NOT IN ('on', 'off') THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid value of setting track',
      DETAIL = format('Got %L; it is on or off.', left(configure.value, 100));
  END IF;
  IF configure.name = 'searched_owners' AND configure.value IS NOT NULL
    AND array_position(ml_rag._roles(configure.value), NULL) IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'a role of setting searched_owners does not exist',
      DETAIL = format('Got %L.', left(configure.value, 200)), HINT = 'In psql, \du lists the roles.';
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

CREATE FUNCTION ml_rag.version() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT '@ML_RAG_VERSION@'::pg_catalog.text $$;
COMMENT ON FUNCTION ml_rag.version() IS 'version of the SQL side of the extension';

CREATE FUNCTION ml_rag._relation_name(relation regclass) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: a relation as it is written into a statement; 42P01 where it was dropped since its oid was looked up
-- A regclass of nothing prints as a bare number, which as SQL is a syntax error. A name made of digits prints quoted.
DECLARE
  _name text := relation::text;
BEGIN
  IF _name IS NULL OR _name ~ '^([0-9]+|-)$' THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'the table does not exist, or no longer',
      DETAIL = format('A table of oid %s is not there; it may have been dropped while the call was running.',
        coalesce(relation::oid::text, 'NULL')),
      HINT = 'Call again: what is there by then is used.';
  END IF;
  RETURN _name;
END
$$;

CREATE FUNCTION ml_rag._check_writable(what text, relation regclass DEFAULT NULL) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: stop what writes before it asks a model, where the transaction cannot write (but to temporary tables)
BEGIN
  IF current_setting('transaction_read_only')::boolean
    AND NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = relation AND c.relpersistence = 't') THEN
    RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = format('%s in a read-only transaction', what),
      DETAIL = CASE WHEN pg_is_in_recovery() THEN 'This server is a standby: nobody can write here.'
        ELSE 'transaction_read_only is on; default_transaction_read_only may say so for every transaction.' END,
      HINT = CASE WHEN pg_is_in_recovery() THEN 'Connect to the primary server.'
        ELSE 'Call it in a transaction that may write: BEGIN READ WRITE, or SET default_transaction_read_only = off.' END;
  END IF;
END
$$;

CREATE FUNCTION ml_rag._raise(error jsonb) RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: raise what a PL/Python function returned as its error: {sqlstate, message, detail, hint}
-- RAISE takes no null for an option, hence a branch for each set of those there are
DECLARE
  _state text := error ->> 'sqlstate';
  _message text := error ->> 'message';
  _detail text := error ->> 'detail';
  _hint text := error ->> 'hint';
BEGIN
  IF _detail IS NOT NULL AND _hint IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, DETAIL = _detail, HINT = _hint;
  ELSIF _detail IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, DETAIL = _detail;
  ELSIF _hint IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message, HINT = _hint;
  ELSIF _message IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = _state, MESSAGE = _message;
  END IF;
END
$$;
