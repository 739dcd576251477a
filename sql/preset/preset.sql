-- preset: presets are made and dropped.

CREATE FUNCTION ml_rag._write_preset(name text, options jsonb, description text) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path FROM CURRENT AS $$
-- purpose: a preset is there as given, or gone (options null); whether it was there. Every member of
-- ml_rag_publisher may change every preset
-- Writes: ml_rag_internal.preset
DECLARE
  _was_there boolean;
BEGIN
  DELETE FROM ml_rag_internal.preset AS p WHERE p.name = $1;
  _was_there := FOUND;
  IF options IS NOT NULL THEN
    INSERT INTO ml_rag_internal.preset (name, options, description) VALUES ($1, $2, $3);
  END IF;
  RETURN _was_there;
END
$$;

CREATE FUNCTION ml_rag.create_preset(name text, options jsonb, description text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: options under a name, checked as those of a call
BEGIN
  IF coalesce(length(name), 0) NOT BETWEEN 1 AND 100 THEN
    RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid name of a preset',
      DETAIL = 'It must have 1 to 100 characters.';
  END IF;
  PERFORM ml_rag._check_rag_options(ml_rag._options_of_setting(format('preset "%s"', name),
    coalesce(options, 'null')::text));
  PERFORM ml_rag._write_preset(name, options, description);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.create_preset(text, jsonb, text) IS
$$gives options of ml_rag a name, for calls with {"preset": "handbook"}; an existing preset of that name is replaced
options: as in a call, without "preset". A call's own options are laid over them, objects key by key. All
users may use a preset; it carries options only, never rights. For the owner of the extension and users who
are members of ml_rag_publisher. Errors: 22023 bad name or option; 42501.$$;

CREATE FUNCTION ml_rag.drop_preset(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: a preset is gone; whether there was one
BEGIN
  RETURN ml_rag._write_preset(name, NULL, NULL);
@CATCH@
END
$$;
COMMENT ON FUNCTION ml_rag.drop_preset(text) IS
$$deletes a preset; returns whether there was one
For the owner of the extension and users who are members of ml_rag_publisher. Errors: 42501.$$;
