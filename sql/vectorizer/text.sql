-- text: what is embedded of a row of an ordinary table: columns or a template, as the expression of a
-- generated column. A generated column is right after every kind of change, by itself: COPY, upsert,
-- rollback, replication, restore.

CREATE FUNCTION ml_rag._primary_key(relation regclass, OUT key name[], OUT types text[])
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: the columns of a table's primary key, and their types  Reads: the catalog
BEGIN
  SELECT array_agg(a.attname ORDER BY k.place),
    array_agg(ml_rag._type_name(a.atttypid, a.atttypmod) ORDER BY k.place)
  INTO key, types
  FROM pg_index AS x
  CROSS JOIN LATERAL unnest(x.indkey::smallint[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
  WHERE x.indrelid = relation AND x.indisprimary AND k.place <= x.indnkeyatts;
  IF key IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('table "%s" has no primary key', relation),
      DETAIL = 'The key says which row a failure belongs to, and is in the name of its citation.',
      HINT = format('ALTER TABLE %s ADD PRIMARY KEY (…);', relation);
  END IF;
END
$$;

CREATE FUNCTION ml_rag._pieces(template text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: a template in pieces: {column}, {{, }} and what is between; what is none of them is left out
BEGIN
  RETURN ARRAY(SELECT m.piece[1] FROM regexp_matches(template, '[{][{]|[}][}]|[{][^{}]+[}]|[^{}]+', 'g')
    WITH ORDINALITY AS m (piece, place) ORDER BY m.place);
END
$$;

CREATE FUNCTION ml_rag._template(option text, value jsonb) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: option columns or document_name as a template: an array of columns is a line for each, a name
-- alone is that column
DECLARE
  _template text;
BEGIN
  IF jsonb_typeof(value) = 'string' THEN
    _template := value #>> '{}';
    IF strpos(_template, '{') = 0 THEN
      _template := concat('{', _template, '}');
    END IF;
  ELSIF jsonb_typeof(value) = 'array' AND NOT jsonb_path_exists(value,
    'strict $[*] ? (@.type() != "string")') THEN
    SELECT string_agg(concat('{', c.name, '}'), E'\n' ORDER BY c.place) INTO _template
    FROM jsonb_array_elements_text(value) WITH ORDINALITY AS c (name, place);
  END IF;
  IF coalesce(_template, '') = '' OR length(_template) > 10000
      OR array_to_string(ml_rag._pieces(_template), '') <> _template THEN
    PERFORM ml_rag._bad_option(option, value,
      'the name of a column, an array of names, or a template of them',
      'Such as "Name: {name} Description: {description}"; {{ stands for a brace.');
  END IF;
  RETURN _template;
END
$$;

CREATE FUNCTION ml_rag._template_columns(template text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
-- purpose: what stands in a template's braces, each once, in order
BEGIN
  RETURN ARRAY(SELECT substr(p.piece, 2, length(p.piece) - 2)
    FROM unnest(ml_rag._pieces(template)) WITH ORDINALITY AS p (piece, place)
               WHERE p.piece LIKE '{_%}' GROUP BY p.piece ORDER BY min(p.place));
END
$$;

CREATE FUNCTION ml_rag._text_expression(option text, relation regclass, template text,
  key name[]) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: a template as SQL; columns: null where none of them has a text; document_name: {schema}, {table}
-- and {key} stand for what they say, where the table has no column of the name  Reads: the catalog
DECLARE
  _values jsonb := '{}';
  _column text;
  _texts text[] := '{}';
  _piece text;
  _pieces text[] := '{}';
BEGIN
  FOREACH _column IN ARRAY ml_rag._template_columns(template) LOOP
    IF EXISTS (SELECT FROM pg_attribute AS a
               WHERE a.attrelid = relation AND a.attname = _column AND a.attnum > 0
                 AND NOT a.attisdropped) THEN
      _values := _values || jsonb_build_object(_column, format('coalesce(%I::text, '''')', _column));
      _texts := _texts || format('coalesce(%I::text, '''')', _column);
    ELSIF option = 'document_name' AND _column IN ('schema', 'table', 'key') THEN
      _values := _values || jsonb_build_object(_column, CASE _column
        WHEN 'key' THEN (SELECT string_agg(format('%I::text', k), ' || ''/'' || ' ORDER BY place)
                         FROM unnest(key) WITH ORDINALITY AS u (k, place))
        ELSE (SELECT quote_literal(CASE _column WHEN 'table' THEN c.relname ELSE n.nspname END)
              FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
              WHERE c.oid = relation) END);
    ELSE
      PERFORM ml_rag._bad_option(option, to_jsonb(left(template, 200)), 'columns of the table',
        format('It has no column %I; its columns: %s.', _column, (
          SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute AS a
          WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped)));
    END IF;
  END LOOP;
  IF _values = '{}' THEN
    PERFORM ml_rag._bad_option(option, to_jsonb(left(template, 200)), 'a template with a column');
  END IF;
  FOREACH _piece IN ARRAY ml_rag._pieces(template) LOOP
    _pieces := _pieces || CASE WHEN _piece LIKE '{_%}' THEN _values ->> substr(_piece, 2, length(_piece) - 2)
      -- doubled braces stand for one
      ELSE quote_literal(CASE _piece WHEN '{{' THEN '{' WHEN '}}' THEN '}' ELSE _piece END) END;
  END LOOP;
  RETURN format(CASE option WHEN 'columns' THEN 'CASE WHEN btrim(%s, E'' \t\n\r\f\x0b'') <> '''' THEN %s END'
    ELSE '%2$s' END,
    array_to_string(_texts, ' || '), array_to_string(_pieces, ' || '));
END
$$;
