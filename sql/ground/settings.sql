-- settings: what an administrator chooses for a database (ground/configure), and where the model server is.

CREATE TABLE ml_rag.setting_value (
  name  text PRIMARY KEY,
  value text NOT NULL
);
COMMENT ON TABLE ml_rag.setting_value IS 'settings that differ from their default; change them with '
  'ml_rag.configure';
-- Only changed settings are rows, so that a restored dump never meets a row that CREATE EXTENSION made.
SELECT pg_catalog.pg_extension_config_dump('ml_rag.setting_value', '');

CREATE VIEW ml_rag.setting AS
SELECT d.name, coalesce(v.value, d.default_value) AS value, d.default_value, d.description
FROM (VALUES
  ('model_server', 'unix:/run/ml_rag/ml_rag.sock',
   'address of the model server: unix:/path/of/socket or http://host:port, host an IP address or localhost'),
  ('embed_model_id', 'all_minilm_l6_v2', 'embedding model used where no option names one'),
  ('generate_model_id', NULL, 'generation model used where no option names one; NULL: the first of the '
    'catalogue that is '
   'there and not marked brief, else extractive'),
  ('query_model_id', NULL, 'generation model of query_options where no option names one; NULL: that of '
    'generate_model_id, '
   'and questions with a history are not rewritten'),
  ('rerank_model_id', 'ms-marco-minilm-l6-v2', 'cross-encoder used where no option names one'),
  ('abstain_text', 'I do not know: nothing relevant was found in the documents.',
   'what ml_rag answers, without asking a model, where nothing relevant was found and "abstain" is true'),
  ('default_options', NULL,
   'options of ml_rag as JSON, for calls that do not say them, such as {"keyword_search": true}'),
  ('searched_owners', NULL,
   'roles whose stores are searched by calls that name none, separated by commas; members of a role are '
   'included, "$user" '
   'is the caller. NULL: those of all owners whom the caller trusts'),
  ('track', 'on', 'on: calls are reported in ml_rag.activity, ml_rag.progress and ml_rag.stats; off: they '
    'are not')
) AS d (name, default_value, description)
LEFT JOIN ml_rag.setting_value AS v ON v.name = d.name;
COMMENT ON VIEW ml_rag.setting IS 'settings of this database: name, value in force, default, description';

CREATE FUNCTION ml_rag._roles(names text) RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the roles of a list, a, "B c"; null among them for one that does not exist. "$user" is left out
-- Errors: 22023 no list of names
DECLARE
  _rest text := names;
  _match text[];
  _roles oid[] := '{}';
BEGIN
  LOOP
    _match := regexp_match(_rest, '^\s*("(?:[^"]|"")+"|[[:alpha:]_][[:alnum:]_$]*)\s*(,|$)(.*)$');
    IF _match IS NULL OR _match[2] = ',' AND _match[3] !~ '[^[:space:]]' THEN
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

CREATE FUNCTION ml_rag._get_setting(name text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: the value in force. PL/pgSQL, because it keeps the plan for the session.  Reads: ml_rag.setting
BEGIN
  RETURN (SELECT s.value FROM ml_rag.setting AS s WHERE s.name = $1);
END
$$;
