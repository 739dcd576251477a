-- strings: a backslash in a string of a function is one, whatever standard_conforming_strings says.
--
-- A session reads the strings of a function once, by its setting of the first call, and keeps them for all
-- roles that it serves later: with off, the pattern \s is the letter s. So functions with a backslash pin the
-- setting. Procedures that commit cannot have settings: their strings have none, but as E'…'.

DO $do$
DECLARE
  _function regprocedure;
BEGIN
  FOR _function IN
    SELECT p.oid FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
    JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
    JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
    WHERE d.deptype = 'e' AND e.extname = 'ml_rag' AND p.prokind = 'f' AND l.lanname IN ('plpgsql', 'sql')
      -- but in E'…', where it is what that says
      AND strpos(regexp_replace(p.prosrc, E'\\mE''([^''\\\\]|\\\\.)*''', '', 'g'), E'\\') > 0
  LOOP
    EXECUTE format('ALTER FUNCTION %s SET standard_conforming_strings = on', _function);
  END LOOP;
END
$do$;
