-- python: the door to the Python that runs in the backend. SQL version == Python version.

CREATE FUNCTION ml_rag._python_path() RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path FROM CURRENT AS $$
-- purpose: where the Python that runs in the backend was installed; found anew so that pg_upgrade cannot make
-- it stale
-- Security definer because pg_config shows paths to its owner only. It takes no argument.
SELECT setting || '/extension/ml_rag-' || ml_rag.version() FROM pg_config WHERE name = 'SHAREDIR'
$$;

-- A function that is written in PL/Python returns its error as a value, and the SQL function around it raises
-- that (ml_rag._raise): only so do message, detail and SQLSTATE come out clean.

CREATE FUNCTION ml_rag._load_backend() RETURNS jsonb
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
# purpose: once a session, import the Python side of this very version as GD["ml_rag"]; returns what went
# wrong
import importlib
import json
import sys

found = plpy.execute("SELECT ml_rag._python_path() AS path, ml_rag.version() AS version")[0]
present = getattr(sys.modules.get("ml_rag"), "__file__", None) or ""
if not present.startswith(found["path"] + "/"):  # what another version of the extension left in this session
    for name in [n for n in sys.modules if n == "ml_rag" or n.startswith("ml_rag.")]:
        del sys.modules[name]
sys.path[:] = [found["path"]] + [p for p in sys.path if "/extension/ml_rag-" not in p]
try:
    door = importlib.import_module("ml_rag.backend.door")
except Exception as e:  # a Python that is too old shows as a SyntaxError
    return json.dumps({
        "sqlstate": "55000", "message": "the Python side of ml_rag cannot be imported",
        "detail": f"{type(e).__name__}: {e}; looked in {found['path']}.",
        "hint": "Run make install with the PG_CONFIG of this server. Where a newer version is installed "
        "already: ALTER EXTENSION ml_rag UPDATE."})
if door.VERSION != found["version"]:
    return json.dumps({
        "sqlstate": "55000", "message": "the SQL and the Python side of ml_rag differ in version",
        "detail": f"SQL {found['version']}, Python {door.VERSION}.",
        "hint": "Run make install, then ALTER EXTENSION ml_rag UPDATE, and connect again."})
GD["ml_rag"] = door
$$;

CREATE FUNCTION ml_rag._call_python(function text, given jsonb, OUT found jsonb, OUT error jsonb)
LANGUAGE plpython3u VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
# purpose: what one of the functions of backend/bridge.py that are marked as doors returns, of these arguments
@BACKEND@
return backend.call_by_name(plpy, function, given)
$$;

CREATE FUNCTION ml_rag._python(function text, given jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path FROM CURRENT AS $$
-- purpose: the same, or its error
DECLARE
  _called record := ml_rag._call_python(function, given);
BEGIN
  PERFORM ml_rag._raise(_called.error);
  RETURN _called.found;
END
$$;
