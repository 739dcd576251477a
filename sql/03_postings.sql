-- 03_postings: the keyword indexes: their tables, and the views through which they are read and made.
-- 84_index keeps them, 32_keyword asks them; docs/keyword.md says why they are as they are.

-- Rows get a number of their own, which is never used again. A run is a sealed part of an index: up to 65536 rows with
-- their postings, which never change; what is deleted from it is noted beside. New rows wait in keyword_new and deleted
-- ones in keyword_gone until they are folded into runs, so that writers only ever append and never wait for each other.

CREATE TYPE ml_rag.keyword_candidate AS (key text[], score double precision);

CREATE TABLE ml_rag.keyword_store (
  store         regclass PRIMARY KEY,
  segment       name NOT NULL,              -- column of the text
  key           name[] NOT NULL,            -- columns that tell rows apart
  configuration text NOT NULL,              -- text search configuration, with its schema
  k1            double precision NOT NULL CHECK (k1 BETWEEN 0 AND 100),
  b             double precision NOT NULL CHECK (b BETWEEN 0 AND 1),
  statistics    text NOT NULL CHECK (statistics IN ('all', 'visible')),
  folding       bigint NOT NULL DEFAULT 0   -- set by the owner to have a batch folded; locked by whoever folds
);
CREATE SEQUENCE ml_rag.keyword_number;
CREATE TABLE ml_rag.keyword_row (
  id     bigint NOT NULL,
  store  regclass NOT NULL,
  length integer NOT NULL,                  -- tokens
  key    text[] COLLATE "C" NOT NULL,
  -- with the store: owners write here, and must not take the numbers of others' rows
  PRIMARY KEY (store, id)
);
CREATE INDEX ON ml_rag.keyword_row (store, key);
CREATE TABLE ml_rag.keyword_new (
  store  regclass NOT NULL,
  batch  bigint NOT NULL,                   -- 0, or the number of the statement that folds its rows itself
  id     bigint NOT NULL,
  length integer NOT NULL,
  tokens jsonb NOT NULL,                    -- token: how often
  PRIMARY KEY (store, batch, id)
);
CREATE TABLE ml_rag.keyword_gone (
  store  regclass NOT NULL,
  id     bigint NOT NULL,
  length integer NOT NULL,
  PRIMARY KEY (store, id)
);
CREATE TABLE ml_rag.keyword_run (
  run         bigint PRIMARY KEY,
  store       regclass NOT NULL,
  rows        integer NOT NULL,
  total       bigint NOT NULL,              -- of the lengths
  gone_rows   integer NOT NULL DEFAULT 0,
  gone_total  bigint NOT NULL DEFAULT 0,
  first_id    bigint NOT NULL,
  last_id     bigint NOT NULL,
  ids         bytea NOT NULL,               -- by slot (0 …), ascending, less first_id; see backend/keyword.py
  lengths     bytea NOT NULL,               -- by slot
  gone        bytea                         -- a bit for each slot; null = none
);
CREATE INDEX ON ml_rag.keyword_run (store);
CREATE TABLE ml_rag.keyword_posting (
  run      bigint NOT NULL,
  store    regclass NOT NULL,
  term     text COLLATE "C" NOT NULL,
  postings bytea NOT NULL,                  -- slots, and how often the term stands in each
  PRIMARY KEY (store, term, run)
);
CREATE INDEX ON ml_rag.keyword_posting (run);

-- read in pieces, and numbers that differ compress badly
ALTER TABLE ml_rag.keyword_run ALTER ids SET STORAGE EXTERNAL, ALTER lengths SET STORAGE EXTERNAL,
  ALTER gone SET STORAGE EXTERNAL;
ALTER TABLE ml_rag.keyword_posting ALTER postings SET STORAGE EXTERNAL;
-- tokens of a usual segment stay in the row, uncompressed: each query looks through them
ALTER TABLE ml_rag.keyword_new ALTER tokens SET STORAGE EXTERNAL;
ALTER TABLE ml_rag.keyword_new SET (toast_tuple_target = 8160);

COMMENT ON TABLE ml_rag.keyword_store IS 'tables with a keyword index, and how each is made and scored';
COMMENT ON TABLE ml_rag.keyword_row IS 'rows of the keyword indexes: number, key in the store, length in tokens';
COMMENT ON TABLE ml_rag.keyword_new IS 'rows that wait to be folded into a run';
COMMENT ON TABLE ml_rag.keyword_gone IS 'deleted rows that wait to be noted in their run';
COMMENT ON TABLE ml_rag.keyword_run IS 'sealed parts of the keyword indexes';
COMMENT ON TABLE ml_rag.keyword_posting IS 'which rows of a run hold a term, and how often';
COMMENT ON SEQUENCE ml_rag.keyword_number IS 'numbers of rows and runs; never used twice, as sessions remember runs';

SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_store', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_row', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_new', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_gone', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_run', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_posting', '');
SELECT pg_catalog.pg_extension_config_dump('ml_rag.keyword_number', '');

-- Nobody reads these tables but their owner. Others read the views below: of a view the tables are read with its
-- owner's rights, while the functions in it run as whoever asks, so that the conditions speak of the caller. All of them
-- are barriers: no function of the caller sees a row before the view's own conditions have passed it.

CREATE VIEW ml_rag.keyword_index WITH (security_barrier) AS
SELECT i.store, i.segment, i.key, i.configuration, i.k1, i.b, i.statistics, row_security_active(i.store) AS secured
FROM ml_rag.keyword_store AS i JOIN pg_class AS c ON c.oid = i.store
WHERE c.relkind = 'r' AND has_schema_privilege(c.relnamespace, 'USAGE') AND cardinality(i.key) + 1 = (
  SELECT count(*) FROM pg_attribute AS a
  WHERE a.attrelid = i.store AND a.attname = ANY (i.key || i.segment) AND NOT a.attisdropped
    AND has_column_privilege(a.attrelid, a.attnum, 'SELECT')
    -- what is compared with or made of a value of these is nobody's code
    AND a.atttypid = ANY ('{smallint,integer,bigint,numeric,oid,text,character varying,uuid}'::regtype[]));
COMMENT ON VIEW ml_rag.keyword_index IS
'keyword indexes of the tables whose text and key the caller may read; secured: row-level security applies to the caller';

-- A caller who may read the whole table may read its whole index.
CREATE VIEW ml_rag.keyword_whole_row WITH (security_barrier) AS
SELECT r.store, r.id, r.key
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_row AS r ON r.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_new WITH (security_barrier) AS
SELECT n.store, n.id, n.length, n.tokens
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_new AS n ON n.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_gone WITH (security_barrier) AS
SELECT g.store, g.id, g.length
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_gone AS g ON g.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_run WITH (security_barrier) AS
SELECT r.tableoid AS origin, r.*
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_run AS r ON r.store = i.store WHERE NOT i.secured;
CREATE VIEW ml_rag.keyword_whole_posting WITH (security_barrier) AS
SELECT p.store, p.term, p.run, p.postings
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_posting AS p ON p.store = i.store WHERE NOT i.secured;

COMMENT ON VIEW ml_rag.keyword_whole_row IS 'rows of the indexes of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_new IS 'rows not yet in a run, of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_gone IS 'deleted rows not yet noted, of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_run IS 'runs of the indexes of tables that the caller may read wholly';
COMMENT ON VIEW ml_rag.keyword_whole_posting IS 'postings of the indexes of tables that the caller may read wholly';

-- A caller to whom row-level security applies gets what the index has of the rows that the caller can see. The caller's
-- own rights decide which these are (_visible_keys reads the table as the caller); the functions that cut
-- the postings down to them are pure: calling them by themselves shows nothing.
CREATE FUNCTION ml_rag._visible_keys(store regclass, key name[]) RETURNS SETOF text[]
LANGUAGE plpgsql STABLE PARALLEL UNSAFE ROWS 10000 COST 100000
SET search_path FROM CURRENT
AS $$
-- purpose: keys of the rows that the caller can see  Reads: the store, as the caller
BEGIN
  IF to_regclass(store::text) IS NOT NULL AND (
    SELECT bool_and(has_column_privilege(a.attrelid, a.attnum, 'SELECT')) AND count(*) = cardinality(key)
    FROM pg_attribute AS a WHERE a.attrelid = store AND a.attname = ANY (key) AND NOT a.attisdropped
  ) THEN
    RETURN QUERY EXECUTE format('SELECT ARRAY[%s] FROM ONLY %s AS t',
      (SELECT string_agg(format('concat(t.%I)', k), ', ' ORDER BY place) FROM unnest(key) WITH ORDINALITY AS u (k, place)),
      store);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._visible_slots(ids bytea, first_id bigint, visible bytea) RETURNS bytea
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE STRICT COST 100000
SET search_path FROM CURRENT
AS $$
# purpose: of the rows of a run, a byte for each slot: 1 where its id is among the visible (8 bytes each, big-endian)
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().visible_slots(ids, first_id, visible)
$$;

CREATE FUNCTION ml_rag._visible_rows(slots bytea, ids bytea, first_id bigint, lengths bytea) RETURNS bytea
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE STRICT COST 10000
SET search_path FROM CURRENT
AS $$
# purpose: slot, id and length of the visible rows of a run; null where there are none
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().visible_rows(slots, ids, first_id, lengths)
$$;

CREATE FUNCTION ml_rag._visible_postings(slots bytea, postings bytea) RETURNS bytea
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE STRICT COST 1000
SET search_path FROM CURRENT
AS $$
# purpose: those postings whose slots are visible; null where there are none
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().visible_postings(slots, postings)
$$;

CREATE FUNCTION ml_rag._live_rows(postings bytea, gone bytea, ids bytea, first_id bigint, gone_ids bigint[])
RETURNS bigint
LANGUAGE plpython3u IMMUTABLE PARALLEL UNSAFE COST 1000
SET search_path FROM CURRENT
AS $$
# purpose: how many of the postings are of rows that are not deleted
if "ml_rag" not in GD or GD["ml_rag"].VERSION != "@ML_RAG_VERSION@":
    if plpy.execute("SELECT ml_rag._load_backend() AS error")[0]["error"]:
        return None
return GD["ml_rag"].keyword().live_rows(postings, gone, ids, first_id, gone_ids)
$$;

-- Run by run: term '' is the run itself (_visible_rows), all others are postings of it (_visible_postings), of the terms
-- in ml_rag.keyword_terms only: the planner would not look for them by a condition outside. Run 0 is what is in no run
-- yet: a row and its tokens.
CREATE VIEW ml_rag.keyword_visible WITH (security_barrier) AS
SELECT i.store, h.run, h.term, h.hits, h.id, h.length, h.n
FROM ml_rag.keyword_index AS i
CROSS JOIN LATERAL (
  SELECT string_agg(int8send(r.id), ''::bytea) AS packed, array_agg(r.id) AS ids
  FROM ml_rag._visible_keys(i.store, i.key) AS k (key)
  JOIN ml_rag.keyword_row AS r ON r.store = i.store AND r.key = k.key
) AS v
CROSS JOIN LATERAL (
  SELECT r.run, p.term, p.hits, NULL::bigint AS id, NULL::integer AS length, NULL::integer AS n
  FROM ml_rag.keyword_run AS r
  CROSS JOIN LATERAL (SELECT ml_rag._visible_slots(r.ids, r.first_id, v.packed) AS slots OFFSET 0) AS s
  CROSS JOIN LATERAL (
    SELECT '' COLLATE "C" AS term, ml_rag._visible_rows(s.slots, r.ids, r.first_id, r.lengths) AS hits
    UNION ALL
    SELECT q.term, ml_rag._visible_postings(s.slots, q.postings)
    FROM (SELECT DISTINCT unnest(nullif(current_setting('ml_rag.keyword_terms', true), '')::text[]) COLLATE "C") AS a (term)
    JOIN ml_rag.keyword_posting AS q ON q.store = i.store AND q.term = a.term AND q.run = r.run
  ) AS p
  WHERE r.store = i.store
  UNION ALL
  SELECT 0, t.key COLLATE "C", NULL, n.id, n.length, t.value::integer
  FROM ml_rag.keyword_new AS n
  CROSS JOIN LATERAL (SELECT e.key, e.value FROM jsonb_each_text(n.tokens) AS e UNION ALL SELECT '', '0') AS t
  WHERE n.store = i.store AND n.id IN (SELECT unnest(v.ids))
) AS h
-- a term that only hidden rows have must not show as an empty list
WHERE i.secured AND (h.hits IS NOT NULL OR h.run = 0);
COMMENT ON VIEW ml_rag.keyword_visible IS
'what the keyword indexes have of the rows that row-level security lets the caller see';

CREATE FUNCTION ml_rag._is_visible(store regclass, key name[], value text[]) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL UNSAFE COST 10000
SET search_path FROM CURRENT
AS $$
-- purpose: whether the caller can see the row of a key  Reads: the store, as the caller
DECLARE
  _visible boolean;
BEGIN
  EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s AS t WHERE %s)', store, (
    SELECT string_agg(format('t.%I = ($1[%s])::%s', a.attname, u.place, format_type(a.atttypid, NULL)), ' AND ')
    FROM unnest(key) WITH ORDINALITY AS u (k, place)
    JOIN pg_attribute AS a ON a.attrelid = store AND a.attname = u.k AND NOT a.attisdropped))
  INTO _visible USING value;
  RETURN _visible;
END
$$;

CREATE VIEW ml_rag.keyword_visible_row WITH (security_barrier) AS
SELECT r.store, r.id, r.key
FROM ml_rag.keyword_index AS i JOIN ml_rag.keyword_row AS r ON r.store = i.store
WHERE i.secured AND ml_rag._is_visible(i.store, i.key, r.key);
COMMENT ON VIEW ml_rag.keyword_visible_row IS 'rows of the indexes that row-level security lets the caller see';

-- The statistics of a score span the whole table, unless its index says otherwise.
CREATE VIEW ml_rag.keyword_total WITH (security_barrier) AS
SELECT i.store, t.rows, t.total
FROM ml_rag.keyword_index AS i
CROSS JOIN LATERAL (
  SELECT sum(s.rows)::bigint AS rows, sum(s.total)::bigint AS total FROM (
    SELECT r.rows - r.gone_rows, r.total - r.gone_total FROM ml_rag.keyword_run AS r WHERE r.store = i.store
    UNION ALL
    SELECT count(*), sum(n.length) FROM ml_rag.keyword_new AS n WHERE n.store = i.store
    UNION ALL
    SELECT -count(*), -sum(g.length) FROM ml_rag.keyword_gone AS g WHERE g.store = i.store
  ) AS s (rows, total)
) AS t
WHERE i.statistics = 'all' OR NOT i.secured;
COMMENT ON VIEW ml_rag.keyword_total IS 'number of rows and of their tokens, where statistics span the whole table';

-- Only terms that are asked for: a list of all of them would be what hidden rows say, word by word.
CREATE VIEW ml_rag.keyword_term WITH (security_barrier) AS
SELECT i.store, h.term, sum(h.n)::bigint AS rows
FROM ml_rag.keyword_index AS i
CROSS JOIN LATERAL (
  SELECT array_agg(g.id) AS ids, min(g.id) AS first, max(g.id) AS last
  FROM ml_rag.keyword_gone AS g WHERE g.store = i.store
) AS g
CROSS JOIN LATERAL (
  SELECT p.term, ml_rag._live_rows(p.postings, r.gone,
    CASE WHEN g.last >= r.first_id AND g.first <= r.last_id THEN r.ids END, r.first_id, g.ids) AS n
  FROM ml_rag.keyword_posting AS p JOIN ml_rag.keyword_run AS r ON r.run = p.run
  WHERE p.store = i.store
    AND p.term IN (SELECT unnest(nullif(current_setting('ml_rag.keyword_terms', true), '')::text[]) COLLATE "C")
  UNION ALL
  SELECT t.key COLLATE "C", 1
  FROM ml_rag.keyword_new AS n CROSS JOIN LATERAL jsonb_object_keys(n.tokens) AS t (key)
  WHERE n.store = i.store
    AND t.key IN (SELECT unnest(nullif(current_setting('ml_rag.keyword_terms', true), '')::text[]))
    AND NOT EXISTS (SELECT FROM ml_rag.keyword_gone AS x WHERE x.store = i.store AND x.id = n.id)
) AS h
WHERE i.statistics = 'all' OR NOT i.secured
GROUP BY i.store, h.term;
COMMENT ON VIEW ml_rag.keyword_term IS
'how many rows hold each of the terms in ml_rag.keyword_terms (a text[]), where statistics span the whole table';

-- The owner of a table makes its index; the check is on the caller's own rights.
CREATE VIEW ml_rag.keyword_own_store WITH (security_barrier) AS
SELECT i.* FROM ml_rag.keyword_store AS i
WHERE pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = i.store), 'USAGE') WITH CASCADED CHECK OPTION;
CREATE VIEW ml_rag.keyword_own_row WITH (security_barrier) AS
SELECT i.* FROM ml_rag.keyword_row AS i
WHERE pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = i.store), 'USAGE') WITH CASCADED CHECK OPTION;
CREATE VIEW ml_rag.keyword_own_new WITH (security_barrier) AS
SELECT i.* FROM ml_rag.keyword_new AS i
WHERE pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = i.store), 'USAGE') WITH CASCADED CHECK OPTION;
COMMENT ON VIEW ml_rag.keyword_own_store IS 'keyword indexes of the caller''s own tables, to be made, changed, dropped';
COMMENT ON VIEW ml_rag.keyword_own_row IS 'rows of the keyword indexes of the caller''s own tables';
COMMENT ON VIEW ml_rag.keyword_own_new IS 'rows that wait, of the keyword indexes of the caller''s own tables';

CREATE FUNCTION ml_rag._empty_keywords(store oid) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: forget all rows of an index; waits for whoever folds it
-- Writes: ml_rag.keyword_row, keyword_new, keyword_gone, keyword_posting, keyword_run
BEGIN
  PERFORM FROM ml_rag.keyword_store AS i WHERE i.store = _empty_keywords.store FOR UPDATE;
  DELETE FROM ml_rag.keyword_row AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_new AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_gone AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_posting AS r WHERE r.store = _empty_keywords.store;
  DELETE FROM ml_rag.keyword_run AS r WHERE r.store = _empty_keywords.store;
END
$$;

CREATE FUNCTION ml_rag._forget_keywords() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: an index goes with its row in ml_rag.keyword_store  Calls: ml_rag._empty_keywords
BEGIN
  -- nobody but the owner may make triggers of it (90_privileges); on another table OLD.store could be anything
  IF TG_RELID = 'ml_rag.keyword_store'::regclass THEN
    PERFORM ml_rag._empty_keywords(OLD.store);
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER forget AFTER DELETE ON ml_rag.keyword_store
FOR EACH ROW EXECUTE FUNCTION ml_rag._forget_keywords();

CREATE FUNCTION ml_rag._drop_keywords() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
-- purpose: an index goes with its table  Writes: ml_rag.keyword_store
BEGIN
  DELETE FROM ml_rag.keyword_store AS i USING pg_event_trigger_dropped_objects() AS d
  WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND i.store = d.objid;
END
$$;
CREATE EVENT TRIGGER ml_rag_drop_keywords ON sql_drop WHEN TAG IN ('DROP TABLE', 'DROP SCHEMA', 'DROP OWNED',
  'DROP EXTENSION', 'DROP TYPE', 'DROP SERVER') EXECUTE FUNCTION ml_rag._drop_keywords();
