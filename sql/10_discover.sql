-- 10_discover: which relations are vector stores.

CREATE FUNCTION ml_rag._only_computes(expression pg_node_tree) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
-- purpose: whether a stored expression (of a policy, an index, …) can run nobody's code; null, as none is there, can not
-- The catalog's dependencies do not tell: built-in functions have none, and some of those run whatever SQL a text holds
-- (query_to_xml), read any relation (table_to_xml) or take a type by its number (domain_in). So nothing counts but what
-- is known: plain nodes, built-in types, pgvector's and built-in functions that are immutable, and a few stable ones
-- that policies are made of.
DECLARE
  _known CONSTANT text[] := '{VAR,CONST,FUNCEXPR,OPEXPR,BOOLEXPR,NULLTEST,BOOLEANTEST,SCALARARRAYOPEXPR,ARRAY,ARRAYEXPR,'
    'RELABELTYPE,COERCEVIAIO,SQLVALUEFUNCTION,CASE,CASEEXPR,WHEN,CASEWHEN,CASETESTEXPR,COALESCE,COALESCEEXPR,NULLIFEXPR,'
    'DISTINCTEXPR}';
  -- arguments by which a function can reach a relation or a type that the tree does not show
  _reaching CONSTANT oid[] := ARRAY['oid'::regtype, 'regclass'::regtype, 'cstring'::regtype, 'internal'::regtype,
                                    '"any"'::regtype];
  _tree text := expression::text;
  -- looked up by arrays: a join with what regexp_matches gives would be planned for a thousand rows
  _nodes text[];
  _types oid[];
  _functions oid[];
  _operators oid[];
BEGIN
  IF _tree IS NULL THEN
    RETURN true;
  END IF;
  _nodes := ARRAY(SELECT m.f[1] FROM regexp_matches(_tree, '\{([A-Z]\w*)', 'g') AS m (f));
  _types := ARRAY(SELECT m.f[1]::oid FROM regexp_matches(_tree, ':[a-z_]*type(?:id)? (\d+)', 'g') AS m (f));
  _functions := ARRAY(SELECT m.f[1]::oid FROM regexp_matches(_tree, ':funcid (\d+)', 'g') AS m (f));
  _operators := ARRAY(SELECT m.f[1]::oid FROM regexp_matches(_tree, ':opno (\d+)', 'g') AS m (f));
  RETURN _nodes <@ _known AND NOT EXISTS (
    SELECT FROM pg_type AS t
    WHERE t.oid = ANY (_types) AND t.typnamespace <> 'pg_catalog'::regnamespace
      AND t.oid NOT IN ('vector'::regtype, 'halfvec'::regtype, 'sparsevec'::regtype)
  ) AND NOT EXISTS (
    SELECT FROM (
      SELECT f.oid, false AS is_operator FROM unnest(_functions) AS f (oid)
      UNION ALL SELECT o.oprcode, true FROM pg_operator AS o WHERE o.oid = ANY (_operators)
    ) AS f
    WHERE NOT EXISTS (
      SELECT FROM pg_proc AS p
      WHERE p.oid = f.oid AND (
        -- below 16384: made by initdb
        p.pronamespace = 'pg_catalog'::regnamespace AND p.oid < 16384
          AND (p.provolatile = 'i' AND NOT p.proargtypes::oid[] && _reaching
               OR p.provolatile <> 'v' AND f.is_operator
               OR p.proname IN ('current_setting', 'now', 'pg_has_role'))
        OR p.provolatile = 'i' AND EXISTS (
          SELECT FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid AND e.extname = 'vector'
          WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.refclassid = 'pg_extension'::regclass
            AND d.deptype = 'e')) OFFSET 0));
END
$$;

CREATE FUNCTION ml_rag._is_harmless(relation regclass) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: whether reading a relation that the caller did not name can run code of somebody the caller need not trust
-- A view, a policy or a cast of a column's type runs its functions with the rights of whoever reads, so a role with a
-- schema of its own could plant a "vector store" that works for it as soon as somebody asks a question. The planner
-- does as well: it computes what is constant in the predicates and expressions of indexes and extended statistics, in
-- check constraints and partition keys, of the relation and of all that inherit from it.
-- A superuser has too much to lose: what is checked here may be another thing by the time the rows are read.
-- Calls: ml_rag._only_computes  Reads: the catalog
BEGIN
  IF EXISTS (
    SELECT FROM pg_class AS c JOIN pg_roles AS o ON o.oid = c.relowner
    WHERE c.oid = relation AND (
      o.rolsuper OR o.rolname = current_user
      OR o.oid = (SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database())
      OR NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user) AND pg_has_role(o.oid, 'MEMBER')))
  THEN
    RETURN true;
  ELSIF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user) OR EXISTS (
    SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
      AND t.typnamespace <> 'pg_catalog'::regnamespace
      AND t.oid NOT IN ('vector'::regtype, 'halfvec'::regtype, 'sparsevec'::regtype))
  THEN
    RETURN false;
  END IF;
  RETURN NOT EXISTS (
    WITH RECURSIVE part AS (
      SELECT relation::oid AS oid
      UNION SELECT i.inhrelid FROM part AS p JOIN pg_inherits AS i ON i.inhparent = p.oid
    )
    SELECT FROM part JOIN pg_class AS c ON c.oid = part.oid
    WHERE c.relkind NOT IN ('r', 'p', 'm')
      OR EXISTS (SELECT FROM pg_policy AS p WHERE p.polrelid = c.oid AND NOT ml_rag._only_computes(p.polqual))
      OR EXISTS (SELECT FROM pg_index AS x WHERE x.indrelid = c.oid AND (x.indpred IS NOT NULL OR x.indexprs IS NOT NULL)
                 AND NOT (ml_rag._only_computes(x.indpred) AND ml_rag._only_computes(x.indexprs)))
      OR EXISTS (SELECT FROM pg_constraint AS k WHERE k.conrelid = c.oid AND k.conbin IS NOT NULL
                 AND NOT ml_rag._only_computes(k.conbin))
      OR EXISTS (SELECT FROM pg_statistic_ext AS s WHERE s.stxrelid = c.oid AND NOT ml_rag._only_computes(s.stxexprs))
      OR EXISTS (SELECT FROM pg_partitioned_table AS k WHERE k.partrelid = c.oid
                 AND NOT ml_rag._only_computes(k.partexprs))
      -- generated when it is read
      OR EXISTS (SELECT FROM pg_attribute AS a JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
                 WHERE a.attrelid = c.oid AND a.attgenerated = 'v' AND NOT ml_rag._only_computes(d.adbin)));
END
$$;

CREATE FUNCTION ml_rag.discover(
  vector_store text[] DEFAULT NULL,
  exclude_vector_store text[] DEFAULT NULL,
  schema text[] DEFAULT NULL,
  vector_store_columns jsonb DEFAULT NULL,
  embed_model_id text DEFAULT NULL,
  unmarked boolean DEFAULT false
) RETURNS SETOF ml_rag.store
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 10
SET search_path FROM CURRENT
AS $$
-- purpose: the stage: the relations the caller may search
-- Calls: ml_rag._is_harmless, ml_rag._marked_model
-- Reads: the catalog. It starts from pg_depend, where every column of type vector is one index entry away, and goes on
-- by index look-ups (OFFSET 0 keeps the planner from joining whole catalogs instead), so the cost grows with the vector
-- columns of the database and not with its tables. PL/pgSQL, because it keeps the plan for the session.
#variable_conflict use_column
DECLARE
  _embedding name := coalesce($4 ->> 'segment_embedding', 'segment_embedding');
  _segment name := coalesce($4 ->> 'segment', 'segment');
  _document_name name := coalesce($4 ->> 'document_name', 'document_name');
  _document_id name := coalesce($4 ->> 'document_id', 'document_id');
  _segment_number name := coalesce($4 ->> 'segment_number', 'segment_number');
  _metadata name := coalesce($4 ->> 'metadata', 'metadata');
  _columns name[] := ARRAY[_segment, _document_name, _document_id, _segment_number, _metadata, _embedding];
BEGIN
RETURN QUERY
WITH marked AS MATERIALIZED (
  SELECT embedding.*, relation.*,
    (SELECT ml_rag._marked_model(m.description)
     FROM pg_description AS m
     WHERE m.objoid = d.objid AND m.classoid = 'pg_class'::regclass AND m.objsubid = d.objsubid) AS embed_model_id
  FROM pg_depend AS d
  CROSS JOIN LATERAL (
    SELECT a.attname, a.attnum, a.atttypid, a.atttypmod FROM pg_attribute AS a
    WHERE a.attrelid = d.objid AND a.attnum = d.objsubid AND a.atttypid = d.refobjid AND NOT a.attisdropped OFFSET 0
  ) AS embedding
  CROSS JOIN LATERAL (
    SELECT c.oid AS relid, n.nspname,
      ARRAY[concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname),
            quote_ident(c.relname)] AS names,
      -- those of them that can be of no other relation, whatever schemas and tables somebody makes
      ARRAY[format('%I.%I', n.nspname, c.relname), CASE WHEN n.nspname !~ '^"|\.' AND c.relname !~ '^"|\.'
                                                        THEN concat(n.nspname, '.', c.relname) END] AS full_names,
      -- quoted where two pairs of schema and table could read the same
      CASE WHEN strpos(n.nspname, '.') = 0 THEN concat(n.nspname, '.', c.relname)
           ELSE format('%I.%I', n.nspname, c.relname) END AS vector_store
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    -- relispopulated: a materialized view without data cannot be read
    WHERE c.oid = d.objid AND c.relkind IN ('r', 'p', 'f', 'v', 'm') AND c.relispopulated
      AND has_schema_privilege(n.oid, 'USAGE')
      AND NOT pg_is_other_temp_schema(n.oid) OFFSET 0
  ) AS relation
  WHERE d.refclassid = 'pg_type'::regclass AND d.refobjid IN ('vector'::regtype, 'halfvec'::regtype)
    AND d.refobjsubid = 0 AND d.classid = 'pg_class'::regclass AND d.objsubid > 0
    AND embedding.attname = _embedding
    -- here, as what follows costs more: comments and columns only of those that were asked for
    AND ($1 IS NULL OR $1 && relation.names)
    AND ($2 IS NULL OR NOT $2 && relation.names)
    AND ($3 IS NULL OR relation.nspname = ANY ($3))
)
SELECT m.vector_store, m.relid::regclass, m.embed_model_id,
  m.attname, c.segment::name, c.document_name::name, c.document_id::name, c.segment_number::name, c.metadata::name,
  CASE m.atttypid WHEN 'vector'::regtype THEN 'vector' ELSE 'halfvec' END, nullif(m.atttypmod, -1),
  format_type(c.document_id_type, NULL), format_type(c.segment_number_type, NULL)
FROM marked AS m
CROSS JOIN LATERAL (
  SELECT min(a.attname::text) FILTER (WHERE a.attname = _segment) AS segment,
         min(a.attname::text) FILTER (WHERE a.attname = _document_name) AS document_name,
         min(a.attname::text) FILTER (WHERE a.attname = _document_id) AS document_id,
         min(a.atttypid) FILTER (WHERE a.attname = _document_id) AS document_id_type,
         min(a.attname::text) FILTER (WHERE a.attname = _segment_number
           AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)) AS segment_number,
         min(a.atttypid) FILTER (WHERE a.attname = _segment_number) AS segment_number_type,
         min(a.attname::text) FILTER (WHERE a.attname = _metadata) AS metadata,
         coalesce(bool_or(a.attnum = m.attnum), false) AS embedding_selectable
  FROM pg_attribute AS a
  WHERE a.attrelid = m.relid AND NOT a.attisdropped AND has_column_privilege(m.relid, a.attnum, 'SELECT')
    AND a.attname = ANY (_columns)
) AS c
WHERE (m.embed_model_id IS NOT NULL OR $6 AND $1 IS NOT NULL)
  AND ($5 IS NULL OR m.embed_model_id = $5 OR m.embed_model_id IS NULL)
  -- a table's name alone could be meant for another's
  AND (coalesce($1 && m.full_names, false) OR ml_rag._is_harmless(m.relid))
  AND c.segment IS NOT NULL AND c.embedding_selectable
  -- a column that was named is also a condition
  AND (NOT coalesce($4 ? 'document_name', false) OR c.document_name IS NOT NULL)
  AND (NOT coalesce($4 ? 'document_id', false) OR c.document_id IS NOT NULL)
  AND (NOT coalesce($4 ? 'segment_number', false) OR c.segment_number IS NOT NULL)
  AND (NOT coalesce($4 ? 'metadata', false) OR c.metadata IS NOT NULL)
ORDER BY m.vector_store COLLATE "C";
END
$$;
COMMENT ON FUNCTION ml_rag.discover(text[], text[], text[], jsonb, text, boolean) IS
$$the vector stores the caller may search
vector_store, exclude_vector_store: names, "schema.table" or "table". schema: names of schemas. vector_store_columns:
logical to real column names. embed_model_id: only stores of that model. unmarked: also relations that are named in
vector_store and carry no marker comment.
A vector store is a relation with the mapped columns, a vector or halfvec column whose comment holds
GENAI_OPTIONS=EMBED_MODEL_ID=<model id>, and SELECT granted to the caller. Of a role that is neither a superuser nor the
owner of the database nor one the caller is a member of, views, foreign tables and tables that can run code when they are
read (by policies, column types, expressions of indexes, statistics, constraints or partition keys) must be named in
vector_store with their schema: it would run with the caller's rights. For a superuser each relation of such a role must
be.$$;

CREATE FUNCTION ml_rag._why_not(relation oid, options jsonb, OUT reason text, OUT hint text)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: why a call does not search a relation, which is in a schema that the caller may use; options are parsed ones
-- Calls: ml_rag._marked_model, ml_rag._is_harmless  Reads: the catalog
DECLARE
  _columns jsonb := options -> 'vector_store_columns';
  _embedding text := coalesce(_columns ->> 'segment_embedding', 'segment_embedding');
  _wanted text[] := ARRAY(SELECT v.value FROM jsonb_each_text(_columns) AS v UNION SELECT _embedding
                          UNION SELECT coalesce(_columns ->> 'segment', 'segment'));
  _relation record;
  _column text;
  _type text;
  _comment text;
  _model text;
BEGIN
  SELECT c.oid, c.relispopulated, n.nspname, format('%I.%I', n.nspname, c.relname) AS full_name,
    ARRAY[concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname),
          quote_ident(c.relname)] AS names,
    ARRAY[format('%I.%I', n.nspname, c.relname), CASE WHEN n.nspname !~ '^"|\.' AND c.relname !~ '^"|\.'
                                                      THEN concat(n.nspname, '.', c.relname) END] AS full_names
  INTO _relation
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = _why_not.relation;
  IF ml_rag._texts(options -> 'exclude_vector_store') && _relation.names THEN
    reason := concat('It stands in "exclude_vector_store"', CASE WHEN options ? 'vector_store' THEN ' too' END, '.');
    RETURN;
  ELSIF NOT options -> 'schema' ? _relation.nspname THEN
    reason := format('It is in schema %I, which "schema" does not name.', _relation.nspname);
    RETURN;
  ELSIF NOT _relation.relispopulated THEN
    reason := 'It is a materialized view without data.';
    hint := format('REFRESH MATERIALIZED VIEW %s;', _relation.full_name);
    RETURN;
  END IF;
  SELECT e.column_name INTO _column FROM unnest(_wanted) AS e (column_name)
  WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
                    WHERE a.attrelid = _relation.oid AND a.attname = e.column_name AND NOT a.attisdropped)
  ORDER BY 1 LIMIT 1;
  IF _column IS NOT NULL THEN
    reason := format('It has no column %I.', _column);
    hint := 'Map the columns it has with "vector_store_columns".';
    RETURN;
  END IF;
  SELECT CASE WHEN a.atttypid NOT IN ('vector'::regtype, 'halfvec'::regtype) THEN format_type(a.atttypid, NULL) END,
    col_description(a.attrelid, a.attnum)
  INTO _type, _comment
  FROM pg_attribute AS a WHERE a.attrelid = _relation.oid AND a.attname = _embedding;
  IF _type IS NOT NULL THEN
    reason := format('Column %I is of type %s, not vector or halfvec.', _embedding, _type);
    RETURN;
  END IF;
  SELECT string_agg(quote_ident(e.column_name), ', ' ORDER BY e.column_name) INTO _column
  FROM unnest(_wanted) AS e (column_name)
  WHERE NOT has_column_privilege(_relation.oid, e.column_name, 'SELECT');
  IF _column IS NOT NULL THEN
    reason := format('The caller may not SELECT %s.', _column);
    hint := format('Ask its owner for GRANT SELECT ON %s.', _relation.full_name);
    RETURN;
  END IF;
  _model := ml_rag._marked_model(_comment);
  IF _model IS NULL THEN
    reason := format('The comment of its column %I does not say which model its vectors are of.', _embedding);
    hint := format('COMMENT ON COLUMN %s.%I IS ''GENAI_OPTIONS=EMBED_MODEL_ID=…''; its owner may.',
      _relation.full_name, _embedding);
  ELSIF _model <> options ->> 'embed_model_id' THEN
    reason := format('It holds vectors of model %s, and the call is for %s.', _model, options ->> 'embed_model_id');
    hint := 'Leave "embed_model_id" out, or name stores of one model.';
  ELSIF NOT coalesce(ml_rag._texts(options -> 'vector_store') && _relation.full_names, false)
    AND NOT ml_rag._is_harmless(relation) THEN
    reason := 'It is another role''s, and to read it could run that role''s code.';
    hint := format('Name it with its schema in "vector_store", "%s", where that role is to be trusted.',
      _relation.full_name);
  ELSE
    -- the checks above are those of ml_rag.discover one by one; where they pass it has an integer-less segment_number
    reason := 'A column that "vector_store_columns" names has the wrong type.';
  END IF;
END
$$;

CREATE FUNCTION ml_rag._why_no_store(name text, options jsonb, OUT reason text, OUT hint text)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path FROM CURRENT
AS $$
-- purpose: why a relation that a call named is none that it can search; options are parsed ones
-- Calls: ml_rag._why_not
-- Reads: the catalog. Of a relation in a schema that the caller may not use nothing is told, not even that it exists.
DECLARE
  _relation oid;
  _why record;
BEGIN
  SELECT c.oid INTO _relation
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm') AND NOT pg_is_other_temp_schema(n.oid)
    AND has_schema_privilege(n.oid, 'USAGE')
    AND _why_no_store.name IN (concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname),
                               quote_ident(c.relname))
  ORDER BY options -> 'schema' ? n.nspname DESC NULLS LAST, n.nspname LIMIT 1;
  IF _relation IS NULL THEN
    reason := 'There is no table or view of that name in a schema that the caller may use.';
    hint := 'A name is "schema.table" or "table", as SELECT vector_store FROM ml_rag.discover() lists them.';
    RETURN;
  END IF;
  _why := ml_rag._why_not(_relation, options);
  reason := _why.reason;
  hint := _why.hint;
END
$$;

CREATE FUNCTION ml_rag._discover(options jsonb) RETURNS ml_rag.store[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: discovery for ml_rag: which model counts, warnings for names that led nowhere; options are parsed ones
-- Calls: ml_rag.discover, ml_rag._why_no_store, ml_rag._get_setting, ml_rag._needs_embedding
DECLARE
  _names text[] := ml_rag._texts($1 -> 'vector_store');
  _model text := $1 ->> 'embed_model_id';
  _stores ml_rag.store[];
  _models text[];
  _name text;
  _why record;
BEGIN
  _stores := ARRAY(SELECT s FROM ml_rag.discover(
    _names, ml_rag._texts($1 -> 'exclude_vector_store'), ml_rag._texts($1 -> 'schema'), $1 -> 'vector_store_columns',
    CASE WHEN _model IS NULL AND _names IS NULL AND ml_rag._needs_embedding($1)
         THEN ml_rag._get_setting('embed_model_id') ELSE _model END,
    $1 ? 'vector_store_columns' AND $1 ?| '{query_embedding,embed_model_id}') AS s);
  -- one name and one store: nothing to compare
  IF _names IS NOT NULL AND (cardinality(_names) <> 1 OR cardinality(_stores) <> 1) THEN
    FOREACH _name IN ARRAY _names LOOP
      IF NOT EXISTS (
        SELECT FROM unnest(_stores) AS s JOIN pg_class AS c ON c.oid = s.relation
        JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE _name IN (concat(n.nspname, '.', c.relname), c.relname, format('%I.%I', n.nspname, c.relname), quote_ident(c.relname)))
      THEN
        _why := ml_rag._why_no_store(_name, $1);
        RAISE WARNING USING ERRCODE = '01000',
          MESSAGE = format('"%s" is no vector store that this call can search; ignored', left(_name, 200)),
          DETAIL = _why.reason,
          HINT = coalesce(_why.hint, 'SELECT * FROM ml_rag.discover() lists what can be searched.');
      END IF;
    END LOOP;
    _models := ARRAY(SELECT DISTINCT s.embed_model_id FROM unnest(_stores) AS s
                     WHERE s.embed_model_id IS NOT NULL ORDER BY 1);
    IF _model IS NULL AND cardinality(_models) > 1 AND ml_rag._needs_embedding($1) THEN
      RAISE EXCEPTION USING ERRCODE = '22023',
        MESSAGE = 'the vector stores named were made with different embedding models',
        DETAIL = (SELECT string_agg(format('%s: %s', s.vector_store, coalesce(s.embed_model_id, 'not said')), ', ') || '.'
                  FROM unnest(_stores) AS s),
        HINT = 'Name one of the models in "embed_model_id", or stores of one model in "vector_store".';
    END IF;
  END IF;
  RETURN _stores;
END
$$;

CREATE FUNCTION ml_rag._hold_models(stores ml_rag.store[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path FROM CURRENT
AS $$
-- purpose: until the end of the transaction the stores keep their models; false where one has changed since discovery
-- Between discovery and search the question is embedded, which takes its time: ml_rag.reembed must not switch a store
-- just then. A table that was read, if only no row, cannot be altered.
-- Calls: ml_rag._relation_name, ml_rag._marked_model  Reads: the stores, as the caller
DECLARE
  _store ml_rag.store;
  _comment text;
BEGIN
  -- one by one: a join over the array would be planned for more than the few there are
  FOREACH _store IN ARRAY stores LOOP
    IF (SELECT c.relkind FROM pg_class AS c WHERE c.oid = _store.relation) = 'r' THEN
      EXECUTE format('SELECT FROM %s LIMIT 0', ml_rag._relation_name(_store.relation));
    END IF;
    _comment := (SELECT d.description FROM pg_attribute AS a
      JOIN pg_description AS d ON d.objoid = a.attrelid AND d.classoid = 'pg_class'::regclass AND d.objsubid = a.attnum
      WHERE a.attrelid = _store.relation AND a.attname = _store.segment_embedding AND NOT a.attisdropped);
    IF _store.embed_model_id <> coalesce(ml_rag._marked_model(_comment), '') THEN
      RETURN false;
    END IF;
  END LOOP;
  RETURN true;
END
$$;
