-- index: option index: the approximate index of a column of embeddings, of whole or of smaller vectors.

CREATE FUNCTION ml_rag._index_definition(options jsonb, distance_metric text, type text, OUT method text,
  OUT class text, OUT storage text)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: option index, for a column of that type, as the parts of CREATE INDEX; method is null for none
-- class: one of another type than the column's is of smaller vectors, see ml_rag._index_element
-- Reads: ml_rag.metric, the catalog
DECLARE
  _options jsonb := ml_rag.parse_options('index', options);
  _method text := _options ->> 'type';
  _quantization text := _options ->> 'quantization';
  _metric ml_rag.metric;
  _key text;
BEGIN
  SELECT k INTO _key FROM jsonb_object_keys(_options) AS k
  WHERE k = ANY (CASE _method WHEN 'hnsw' THEN '{lists}' WHEN 'ivfflat' THEN '{m,ef_construction}'
                 ELSE '{lists,m,ef_construction}' END::text[]) ORDER BY k LIMIT 1;
  IF _key IS NOT NULL THEN
    PERFORM ml_rag._bad_option(_key, _options -> _key, format('nothing, where "type" is %s', _method),
      '"m" and "ef_construction" belong to hnsw, "lists" to ivfflat.');
  ELSIF (_options ->> 'ef_construction')::integer < 2 * coalesce((_options ->> 'm')::integer, 16) THEN
    PERFORM ml_rag._bad_option('ef_construction', _options -> 'ef_construction',
      'at least twice "m", which is 16 by default');
  ELSIF _method = 'none' AND _quantization <> 'none' THEN
    PERFORM ml_rag._bad_option('quantization', _options -> 'quantization', 'none, where "type" is none');
  ELSIF _quantization = 'halfvec' AND type = 'halfvec' THEN
    PERFORM ml_rag._bad_option('quantization', _options -> 'quantization',
      'none or binary, where the column is halfvec');
  ELSIF _method = 'none' THEN
    RETURN;
  END IF;
  SELECT m.* INTO _metric FROM ml_rag.metric AS m WHERE m.name = distance_metric;
  IF _quantization = 'binary' AND NOT _metric.is_complement THEN
    PERFORM ml_rag._bad_option('quantization', _options -> 'quantization',
      format('none or halfvec with %s', distance_metric),
      'One bit a number keeps the direction of a vector, which COSINE and DOT compare.');
  END IF;
  SELECT format('%I.%I', n.nspname, o.opcname) INTO class
  FROM pg_opclass AS o JOIN pg_am AS a ON a.oid = o.opcmethod JOIN pg_namespace AS n ON n.oid = o.opcnamespace
  JOIN pg_depend AS d ON d.classid = 'pg_opclass'::regclass AND d.objid = o.oid AND d.deptype = 'e'
  JOIN pg_extension AS e ON e.oid = d.refobjid AND e.extname = 'vector'
  WHERE a.amname = _method AND o.opcname = CASE _quantization
    WHEN 'none' THEN format('%s_%s_ops', type, _metric.operator_class)
    WHEN 'halfvec' THEN format('halfvec_%s_ops', _metric.operator_class) ELSE 'bit_hamming_ops' END;
  IF class IS NULL THEN
    PERFORM ml_rag._bad_option('distance_metric', to_jsonb(distance_metric),
      format('a metric of %s', _method),
      'hnsw has all of them.');
  END IF;
  method := _method;
  storage := (SELECT format(' WITH (%s)', string_agg(format('%s = %s', o.key, o.value), ', ' ORDER BY o.key))
              FROM jsonb_each_text(_options - '{type,quantization}'::text[]) AS o HAVING count(*) > 0);
END
$$;

CREATE FUNCTION ml_rag._index_element(store oid, column_name name, class text, OUT element text,
  OUT most integer, OUT dimensions integer, OUT type text)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
-- purpose: what an index with an operator class of ml_rag._index_definition is of: the column, or smaller
-- vectors made of it
-- most: dimensions that such an index can have  Reads: the catalog
DECLARE
  _quantization text;
BEGIN
  SELECT t.typname, nullif(a.atttypmod, -1) INTO type, dimensions
  FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
  WHERE a.attrelid = store AND a.attname = column_name AND NOT a.attisdropped;
  _quantization := CASE WHEN class ~ 'bit_hamming_ops"?$' THEN 'binary'
                        WHEN type = 'vector' AND class ~ 'halfvec_[a-z0-9]+_ops"?$' THEN 'halfvec' END;
  element := CASE WHEN _quantization IS NULL THEN quote_ident(column_name)
                  ELSE format('(%s)', ml_rag._quantized(quote_ident(column_name), dimensions,
                    _quantization)) END || ' ' || class;
  most := CASE WHEN _quantization = 'binary' THEN 64000 WHEN _quantization = 'halfvec'
    OR type = 'halfvec' THEN 4000 ELSE 2000 END;
END
$$;

CREATE FUNCTION ml_rag._create_index(store regclass, method text, element text, storage text) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
-- purpose: build an approximate index; says so where that takes long, since PostgreSQL lets no notice through
-- meanwhile
-- Writes: an index, as the caller
DECLARE
  _bytes numeric := (SELECT sum(pg_table_size(p)) FROM unnest(ml_rag._parts(store)) AS p);
BEGIN
  IF _bytes > 64 * 1024 * 1024 THEN
    RAISE NOTICE USING MESSAGE = format('building an index of "%s", which has %s', store,
      pg_size_pretty(_bytes)),
      HINT = 'SELECT * FROM pg_stat_progress_create_index shows how far it is.';
  END IF;
  EXECUTE format('CREATE INDEX ON %s USING %I (%s)%s', ml_rag._relation_name(store), method,
    element, storage);
END
$$;
