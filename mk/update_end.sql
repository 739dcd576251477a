-- What was noted at the beginning is done again. pg_init_privs must not learn of it: pg_dump leaves out what is there.
DO $$
DECLARE
  _object record;
  _one record;
  _oid oid;
  _sub integer;
  _initially aclitem[];
BEGIN
  PERFORM set_config('allow_system_table_mods', 'on', true);
  FOR _object IN
    SELECT n.class, n.object, n.part, jsonb_agg(n) AS noted
    FROM jsonb_to_recordset(current_setting('ml_rag.update_noted')::jsonb)
      AS n (class regclass, object text, part name, kind text, granted boolean, privilege text, grantable boolean, role text)
    GROUP BY n.class, n.object, n.part
  LOOP
    _oid := CASE _object.class WHEN 'pg_proc'::regclass THEN to_regprocedure(_object.object)::oid
      WHEN 'pg_class'::regclass THEN to_regclass(_object.object)::oid
      WHEN 'pg_namespace'::regclass THEN to_regnamespace(_object.object)::oid
      ELSE to_regtype(_object.object)::oid END;
    _sub := CASE WHEN _object.part IS NULL THEN 0 ELSE (
      SELECT a.attnum FROM pg_attribute AS a
      WHERE a.attrelid = _oid AND a.attname = _object.part AND NOT a.attisdropped) END;
    CONTINUE WHEN _oid IS NULL OR _sub IS NULL;
    -- without what was granted by hand, and with what was revoked, it is what the extension itself grants
    BEGIN
      FOR _one IN SELECT * FROM jsonb_to_recordset(_object.noted)
        AS n (kind text, granted boolean, privilege text, role text) WHERE n.granted
      LOOP
        EXECUTE format('REVOKE %s%s ON %s %s FROM %s CASCADE', _one.privilege, ' (' || quote_ident(_object.part) || ')',
          _one.kind, _object.object, _one.role);
      END LOOP;
      _initially := (SELECT i.initprivs FROM pg_init_privs AS i
                     WHERE i.classoid = _object.class AND i.objoid = _oid AND i.objsubid = _sub);
      RAISE EXCEPTION USING ERRCODE = 'MLR00';
    EXCEPTION WHEN SQLSTATE 'MLR00' THEN
      NULL; -- taken back, with all that CASCADE took
    END;
    FOR _one IN SELECT * FROM jsonb_to_recordset(_object.noted)
      AS n (kind text, granted boolean, privilege text, grantable boolean, role text)
    LOOP
      EXECUTE format('%s %s%s ON %s %s %s %s%s', CASE WHEN _one.granted THEN 'GRANT' ELSE 'REVOKE' END, _one.privilege,
        ' (' || quote_ident(_object.part) || ')', _one.kind, _object.object,
        CASE WHEN _one.granted THEN 'TO' ELSE 'FROM' END, _one.role,
        CASE WHEN _one.granted AND _one.grantable THEN ' WITH GRANT OPTION' END);
    END LOOP;
    DELETE FROM pg_init_privs AS i WHERE i.classoid = _object.class AND i.objoid = _oid AND i.objsubid = _sub;
    INSERT INTO pg_init_privs (objoid, classoid, objsubid, privtype, initprivs)
    SELECT _oid, _object.class, _sub, 'e', _initially WHERE _initially IS NOT NULL;
    -- from PostgreSQL 17 on a role that stands there cannot be dropped
    DELETE FROM pg_shdepend AS d
    WHERE d.dbid = (SELECT b.oid FROM pg_database AS b WHERE b.datname = current_database())
      AND d.classid = _object.class AND d.objid = _oid AND d.objsubid = _sub AND d.deptype = 'i'
      AND NOT EXISTS (SELECT FROM aclexplode(_initially) AS i WHERE d.refobjid IN (i.grantee, i.grantor));
  END LOOP;
  PERFORM set_config('allow_system_table_mods', 'off', true);
END
$$;
