-- neighbours: the segments beside those that were found, and their texts as one.

CREATE FUNCTION ml_rag._rest_of(tail text, former text, b text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT SET search_path FROM CURRENT AS $$
-- purpose: what segment b adds to a text, without what the end of that and its own start share
-- tail: the end of the text (4001 characters), without blanks behind; former: the last segment before b with
-- the header of a table. If a table continues in b, its header is there again and is left out. The shared
-- text must consist of whole words: "… cat" and "table" share a letter and no text. Candidates are the places
-- in tail where the first word of b (at most 32 characters of it) stands, longest text first. Scripts that
-- are written without blanks (beyond U+2E7F) have no words to keep whole: there one character is enough.
DECLARE
  _b text := ltrim(b, E' \t\r\n');
  _start text := CASE WHEN _b ~ '^[^\x01-\u2e7f]' THEN left(_b, 1)
                      ELSE left(substring(_b FROM '^[[:alnum:]]+|^.'), 32) END;
  -- neighbours share less; in long texts of one word every place would be a candidate
  _most integer := least(length(_b), 4000);
  -- with a character before and behind what may be shared; in a long text they are found by counting
  _tail text := right(tail, _most + 1);
  _head text := left(_b, _most + 1);
  _place integer;   -- in _tail, 1-based
  _offset integer := length(_tail) - least(length(_tail), _most);
  _shared text;
  _header text := substring(_b FROM E'^\\|[^\n]*\n\\|[ :|-]+\n');
BEGIN
  IF tail ~ E'(^|\n)\\|[^\n]*$' AND strpos(former, _header) > 0 THEN
    RETURN E'\n' || substr(_b, length(_header) + 1);
  END IF;
  LOOP
    _place := strpos(substr(_tail, _offset + 1), _start);
    EXIT WHEN _place = 0 OR _start IS NULL;
    _offset := _offset + _place;
    _shared := substr(_tail, _offset);
    IF starts_with(_head, _shared) AND _shared <> '|'
      AND (_offset = 1 OR substr(_tail, _offset - 1, 2) !~ '^[[:alnum:]]{2}$'
        OR _shared ~ '^[^\x01-\u2e7f]{2}')
      AND (length(_head) = length(_shared) OR substr(_head, length(_shared), 2) !~ '^[[:alnum:]]{2}$'
           OR _shared ~ '[^\x01-\u2e7f]{2}$')
    THEN
      RETURN substr(_b, length(_shared) + 1);
    END IF;
  END LOOP;
  RETURN E'\n' || _b;
END
$$;

CREATE FUNCTION ml_rag._joined(segments text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path FROM CURRENT AS $$
-- purpose: segments in their order as one text
-- No step looks at more of it than its end: of one number there can be any number of segments.
DECLARE
  _segment text;
  _former text;
  _parts text[] := '{}';
  _part text;
  _tail text := '';
  _n integer := 0;
BEGIN
  FOREACH _segment IN ARRAY segments LOOP
    CONTINUE WHEN _segment IS NULL;
    IF _n = 0 THEN
      _part := _segment;
      _former := _segment;
    ELSE
      _parts[_n] := rtrim(_parts[_n], E' \t\r\n');
      _tail := rtrim(_tail, E' \t\r\n');
      _part := ml_rag._rest_of(_tail, _former, _segment);
    END IF;
    _n := _n + 1;
    _parts[_n] := _part;
    _tail := right(_tail || right(_part, 4001), 4001);
    -- a long row of a table, or an empty segment, has none
    _former := CASE WHEN _segment ~ E'(^|\n)\\|[^\n]*\n\\|[ :|-]+\n' THEN _segment ELSE _former END;
  END LOOP;
  RETURN array_to_string(_parts, '');
END
$$;
