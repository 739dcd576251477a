-- metadata: which tables a question may be answered from, what a model is shown of each, and which of them
-- matter for it.

-- What is embedded of a table is the key of its embedding. So nothing here can be out of date: a table whose
-- name, comment or columns change, or of which another caller may read other columns, has another text.
CREATE TABLE ml_rag_internal.table_embedding (
  model_id  text NOT NULL,
  digest    bytea NOT NULL,                  -- SHA-256 of the text
  embedding @vector@.vector NOT NULL,
  made_at   timestamptz NOT NULL DEFAULT now()
);
-- not unique: two sessions may embed the same text at once, and neither waits for the other to commit
CREATE INDEX ON ml_rag_internal.table_embedding (digest, model_id);
CREATE INDEX ON ml_rag_internal.table_embedding (made_at);
-- without a key it could not be deleted from where all tables are published
ALTER TABLE ml_rag_internal.table_embedding REPLICA IDENTITY FULL;
COMMENT ON TABLE ml_rag_internal.table_embedding IS 'embeddings of the descriptions of tables, for '
  'ml_retrieve_schema_metadata; a cache';

-- cosine distance and dimensions, for roles that need no right on pgvector's schema
CREATE OPERATOR ml_rag_internal.<=> (
  FUNCTION = @vector@.cosine_distance, LEFTARG = @vector@.vector, RIGHTARG = @vector@.vector);
CREATE OPERATOR ml_rag_internal.# (FUNCTION = @vector@.vector_dims, RIGHTARG = @vector@.vector);

CREATE FUNCTION ml_rag._trusted_owners() RETURNS oid[]
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: the owners of relations and schemas whom the caller trusts  Reads: the catalog
BEGIN
  RETURN ARRAY(
    SELECT o.relowner FROM (
      SELECT c.relowner FROM pg_class AS c WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
      UNION SELECT n.nspowner FROM pg_namespace AS n
      OFFSET 0) AS o
    WHERE ml_rag._trusts(o.relowner));
END
$$;

CREATE FUNCTION ml_rag._askable_tables(schemas text[], tables text[])
RETURNS TABLE (relation oid, schema_name name, table_name name, name text, description text)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 100 SET search_path FROM CURRENT AS $$
-- purpose: the tables that the caller may read and that questions are answered from, with what is embedded of
-- each
-- What ml_rag has made of other tables' rows must be named. As for stores: reading a table can run its
-- owner's code (a view, a policy), and its comments are shown to a model. Unless
-- it is named, the caller trusts its owner and that of its schema, and those of what is read with it; the
-- owner of a schema that is named is one of them.
-- Reads: the catalog. A column's comment is left out of what is embedded: measured, it makes the
-- choice of tables worse (needed tables among the first eight: 0.97 with, 0.99 without).
#variable_conflict use_column
DECLARE
  _owners oid[] := ml_rag._trusted_owners();
BEGIN
RETURN QUERY
WITH askable AS MATERIALIZED (
  SELECT c.oid, n.nspname, c.relname, has_table_privilege(c.oid, 'SELECT') AS is_readable
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relispopulated AND NOT c.relispartition
    AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'ml_rag')
    AND ($1 IS NULL OR n.nspname = ANY ($1))
    AND ($2 IS NULL OR $2 && ml_rag._names(n.nspname, c.relname))
    AND ($2 && ml_rag._full_names(n.nspname, c.relname)
      OR (c.relowner = ANY (_owners) OR $1 IS NOT NULL AND c.relowner = n.nspowner)
        AND ($1 IS NOT NULL OR n.nspowner = ANY (_owners))
        AND (c.xmax = '0' AND n.xmax = '0' OR 0 <> ALL (ml_rag._code_owners(ARRAY[c.oid])))
        AND CASE WHEN c.relkind = 'v' OR c.relhassubclass OR c.relrowsecurity THEN NOT EXISTS (
          SELECT FROM unnest(ml_rag._code_owners(ml_rag._read_with(c.oid))) AS o (owner)
          WHERE o.owner <> ALL (_owners) AND ($1 IS NULL OR o.owner <> n.nspowner)) ELSE true END)
    AND has_schema_privilege(n.oid, 'USAGE')
    AND c.oid NOT IN (SELECT d.objid FROM pg_depend AS d WHERE d.refclassid = 'pg_extension'::regclass
                      AND d.classid = 'pg_class'::regclass AND d.deptype = 'e')
    -- what ml_rag makes of another table's rows: tables of segments, node groups
    AND ($2 IS NOT NULL OR c.oid NOT IN (
      SELECT p.polrelid FROM pg_policy AS p WHERE p.polname = 'ml_rag_source'
      UNION ALL
      SELECT d.objoid FROM pg_description AS d WHERE d.classoid = 'pg_class'::regclass AND d.objsubid = 0
        AND ml_rag._is_node_group(d.description)))
)
SELECT t.oid, t.nspname, t.relname, format('%I.%I', t.nspname, t.relname),
  left(ml_rag._valid_text(concat(t.relname, ': ', CASE WHEN octet_length(t.comment) <= 1000000 THEN
    t.comment END, '. ', array_to_string(t.columns, ', '))), 2000)
FROM (
  -- subqueries are cheaper here than a join, and than an aggregate with an order
  SELECT t.*,
    (SELECT d.description FROM pg_description AS d
     WHERE d.objoid = t.oid AND d.classoid = 'pg_class'::regclass AND d.objsubid = 0) AS comment,
    ARRAY(SELECT a.attname FROM pg_attribute AS a
          WHERE a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
            AND (t.is_readable OR has_column_privilege(t.oid, a.attnum, 'SELECT'))
              ORDER BY a.attnum) AS columns
  FROM askable AS t OFFSET 0
) AS t
WHERE t.columns <> '{}';
END
$$;

CREATE FUNCTION ml_rag._nearest_table(name text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: the table, of those that the caller may read, that a name may have been meant for
-- At most 100 names are compared, letter by letter, however many tables others have opened to all roles:
-- those of trusted owners first.
-- Reads: the catalog
DECLARE
  _owners oid[] := ml_rag._trusted_owners();
  _table text := regexp_replace(name, '^.*\.', '');
BEGIN
  RETURN (
    SELECT format('%I.%I', t.nspname, t.relname)
    FROM (
      SELECT ml_rag._valid_text(n.nspname) AS nspname, r.relname
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
      CROSS JOIN LATERAL ml_rag._valid_text(c.relname) AS r (relname)
      WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT c.relispartition
        AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'ml_rag')
        AND abs(length(r.relname) - length(_table)) <= 2
        AND has_schema_privilege(n.oid, 'USAGE') AND has_any_column_privilege(c.oid, 'SELECT')
      ORDER BY c.relowner = ANY (_owners) DESC, left(lower(r.relname), 1) = left(lower(_table), 1) DESC,
        abs(length(r.relname) - length(_table)), c.oid
      LIMIT 100) AS t
    CROSS JOIN LATERAL ml_rag._distance_of_words(lower(CASE WHEN strpos(name, '.') > 0 THEN name
      ELSE t.nspname || '.' || name END),
      lower(concat(t.nspname, '.', t.relname))) AS d
    WHERE d <= greatest(2, length(t.relname) / 3)
    ORDER BY d, 1 LIMIT 1);
END
$$;

CREATE FUNCTION ml_rag._comment_line(comment text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: a comment as the rest of a line, which it cannot leave
BEGIN
  RETURN left(btrim(regexp_replace(ml_rag._valid_text(comment), '[\s[:cntrl:]\u0085\u2028\u2029]+', ' ',
    'g')), 200);
END
$$;

CREATE FUNCTION ml_rag._table_definition(relation oid, include_comments boolean) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED AS $$
-- purpose: a table as an abridged CREATE TABLE: its columns that the caller may read, at most 100, with keys,
-- comments, samples: of an enum the first 20 labels, of a text at most eight frequent values
-- Reads: the catalog; pg_stats, which hides what the caller may not read, and all under row-level security
DECLARE
  _is_readable boolean := has_table_privilege(relation, 'SELECT');
  _attnums smallint[] := ARRAY(
    SELECT a.attnum FROM pg_attribute AS a WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
      -- a vectorizer's own columns say nothing that the others do not
      AND NOT (a.attname IN ('segment', 'document_name', 'segment_embedding')
        AND ml_rag._has_vectorizer(relation))
      AND (_is_readable OR has_column_privilege(relation, a.attnum, 'SELECT')) ORDER BY a.attnum);
BEGIN
  RETURN (
    SELECT concat(
      format('CREATE %s %I.%I (', CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW'
        ELSE 'TABLE' END,
        n.nspname, c.relname),
      CASE WHEN include_comments THEN ' -- ' || ml_rag._comment_line(obj_description(c.oid, 'pg_class')) END,
      E'\n', l.lines, CASE WHEN cardinality(_attnums) > 100 THEN
        format(E'\n  -- and %s more columns', cardinality(_attnums) - 100) END, E'\n);')
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL (
      SELECT string_agg(concat('  ', d.definition, CASE WHEN d.place < d.n THEN ',' END,
        ' -- ' || nullif(d.remark, '')),
        E'\n' ORDER BY d.place) AS lines
      FROM (
        SELECT e.definition, e.remark, row_number() OVER (ORDER BY e.place) AS place, count(*) OVER () AS n
        FROM (
          SELECT a.attnum::float8 AS place,
            concat_ws(' ', quote_ident(a.attname), format_type(a.atttypid, a.atttypmod),
              CASE WHEN a.attnotnull THEN 'NOT NULL' END) AS definition,
            concat_ws('; ', CASE WHEN include_comments THEN
              ml_rag._comment_line(col_description(relation, a.attnum)) END,
              'such as ' || coalesce((
                SELECT string_agg(quote_literal(v.value), ', ' ORDER BY v.place)
                FROM pg_stats AS s
                CROSS JOIN unnest(s.most_common_vals::text::text[]) WITH ORDINALITY AS v (value, place)
                WHERE s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = a.attname
                  AND s.inherited = (c.relkind = 'p') AND v.place <= 8
                  AND length(ml_rag._valid_text(v.value)) <= 40
                  AND a.atttypid = ANY ('{text,varchar,bpchar,"\"char\"",name}'::regtype[])), (
                SELECT string_agg(quote_literal(m.enumlabel), ', ' ORDER BY m.enumsortorder) FROM (
                  SELECT m.* FROM pg_enum AS m WHERE m.enumtypid = a.atttypid
                  ORDER BY m.enumsortorder LIMIT 20) AS m))) AS remark
          FROM pg_attribute AS a
          WHERE a.attrelid = relation AND a.attnum = ANY (_attnums[:100])
          UNION ALL
          -- keys over columns that the caller may read, on both sides
          SELECT 10000 + row_number() OVER (ORDER BY k.contype DESC, k.conname),
            pg_get_constraintdef(k.oid), ''
          FROM pg_constraint AS k
          WHERE k.conrelid = relation AND (k.contype = 'p' OR k.contype = 'f' AND k.conparentid = 0)
            AND k.conkey <@ _attnums
            AND NOT EXISTS (SELECT FROM unnest(k.confkey) AS f (attnum)
                            WHERE NOT has_column_privilege(k.confrelid, f.attnum, 'SELECT'))
        ) AS e
      ) AS d
    ) AS l
    WHERE c.oid = relation);
END
$$;

CREATE FUNCTION ml_rag._schema_metadata(query text, options jsonb, OUT metadata text, OUT tables text[],
  OUT schemas text[], OUT named text[], OUT relations oid[])
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: the definitions of the tables that matter for a question, at most n_tables, most relevant first by
-- the embeddings of their
-- descriptions: as many as fit 24 000 characters, at least one; named: option tables, names or
-- {"schema_name", "table_name"}, as names; relations: all that it may be answered from
-- Errors: 42P01 there are none
DECLARE
  _schemas text[] := ml_rag._texts(options -> 'schemas');
  _tables record;
  _distances float8[];
  _missing text;
  _table record;
  _definition text;
  _name jsonb;
BEGIN
  named := CASE WHEN options ? 'tables' THEN '{}'::text[] END;
  FOR _name IN SELECT e.value FROM jsonb_array_elements(options -> 'tables') AS e LOOP
    IF jsonb_typeof(_name) = 'object' AND jsonb_typeof(_name -> 'schema_name') = 'string'
      AND jsonb_typeof(_name -> 'table_name') = 'string'
      AND _name - '{schema_name,table_name}'::text[] = '{}' THEN
      named := named || format('%I.%I', _name ->> 'schema_name', _name ->> 'table_name');
    ELSIF jsonb_typeof(_name) = 'string' THEN
      named := named || (_name #>> '{}');
    ELSE
      PERFORM ml_rag._bad_option('tables', _name, 'names, "schema.table" or "table", or objects with the '
        'keys "schema_name" and '
        '"table_name"');
    END IF;
  END LOOP;
  IF named IS NOT NULL AND _schemas IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'options "schemas" and "tables" exclude each other',
      HINT = 'Name the tables with their schemas in "tables".';
  END IF;
  SELECT array_agg(t.relation) AS relations, array_agg(t.schema_name) AS schemas,
    array_agg(t.table_name) AS tables,
    array_agg(t.name) AS names, array_agg(t.description) AS descriptions
  INTO _tables FROM ml_rag._askable_tables(_schemas, named) AS t;
  SELECT n INTO _missing FROM unnest(named) AS n
  WHERE NOT EXISTS (SELECT FROM unnest(_tables.schemas, _tables.tables) AS t (schema_name, table_name)
                    WHERE n = ANY (ml_rag._names(t.schema_name, t.table_name)))
  LIMIT 1;
  IF _missing IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01',
      MESSAGE = format('table "%s" does not exist or cannot be queried', left(_missing, 200)),
      DETAIL = 'It needs a SELECT privilege. A table of another owner is named with its schema.',
      HINT = coalesce('Did you mean "' || ml_rag._nearest_table(_missing) || '"?',
        'Name it as "schema.table".');
  ELSIF _tables.relations IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '42P01', MESSAGE = 'no table to query',
      DETAIL = CASE WHEN _schemas IS NULL
        THEN 'Without "schemas" and "tables" only tables of trusted owners are queried: '
          'docs/nl_sql.md#which-tables.'
        ELSE 'There is none in these schemas that the caller may SELECT.' END,
      HINT = CASE WHEN _schemas IS NULL THEN 'Name schemas in "schemas", or tables in "tables".'
        ELSE 'Name the tables in "tables".' END;
  END IF;
  IF coalesce(query, '') !~ '[^[:space:]]' THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'the question is empty';
  END IF;
  _distances := ml_rag._texts(ml_rag._python('table_distances', jsonb_build_array(query, _tables.descriptions,
    coalesce(options ->> 'embed_model_id', ml_rag._get_setting('embed_model_id')))));
  FOR _table IN
    SELECT t.relation, t.schema_name, t.name
    FROM unnest(_tables.relations, _tables.schemas, _tables.names, _distances)
      AS t (relation, schema_name, name, distance)
    ORDER BY t.distance, t.name COLLATE "C" LIMIT (options ->> 'n_tables')::integer
  LOOP
    _definition := ml_rag._valid_text(ml_rag._table_definition(_table.relation,
      (options -> 'include_comments')::boolean));
    EXIT WHEN length(metadata) + length(_definition) > 24000;
    metadata := concat_ws(E'\n\n', metadata, _definition);
    tables := tables || _table.name;
    schemas := schemas || CASE WHEN _table.schema_name <> ALL (coalesce(schemas, '{}')) THEN
      _table.schema_name::text END;
  END LOOP;
  relations := _tables.relations;
  metadata := left(metadata, 40000);
  schemas := array_remove(schemas, NULL);
END
$$;

CREATE FUNCTION @extschema@.ml_retrieve_schema_metadata(query text, options jsonb DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: HeatWave's ML_RETRIEVE_SCHEMA_METADATA
DECLARE
  _call integer := ml_rag._begin('ml_retrieve_schema_metadata');
  _metadata text;
BEGIN
  _metadata := (SELECT m.metadata
    FROM ml_rag._schema_metadata($1, ml_rag.parse_options('ml_retrieve_schema_metadata', $2)) AS m);
  PERFORM ml_rag._end(_call);
  RETURN _metadata;
@CATCH_AND_END@
END
$$;
COMMENT ON FUNCTION @extschema@.ml_retrieve_schema_metadata(text, jsonb) IS
$$the tables that matter for a question, as abridged CREATE TABLE statements, most relevant first
With columns, keys, comments and frequent values, each only as far as the caller may read it; at most 100
columns a table and 40 000 characters together. Without "schemas" and "tables", tables of trusted owners:
docs/nl_sql.md#which-tables. Options: SELECT * FROM ml_rag.option WHERE routine =
'ml_retrieve_schema_metadata'.
Errors: 22023 empty question, bad option; 42P01 no table to query; 55000 model not available; 08006 model
server; 53300 its queue is full; 57014 cancelled; 38000 the model failed.$$;
