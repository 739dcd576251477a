"""Overloads of every operator and function that the SQL of ml_rag uses, each for other types than those of pg_catalog,
in schema ``public``."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from support.cluster import Cluster, Connection, Database, value_of

SOURCES = Path(__file__).parents[2] / "sql"
#: an overload that runs counts, in spite of a rollback, and ends the statement
_BODY = "AS $$BEGIN PERFORM pg_catalog.nextval('public.ran'); RAISE EXCEPTION 'a planted object ran'; END$$"
_TYPE_NAMES = """
"char" name text varchar bpchar boolean smallint integer bigint real float8 numeric oid regclass regproc regprocedure
regtype regrole regnamespace regconfig json jsonb jsonpath uuid date timestamp timestamptz interval bytea tid xid bit
varbit name[] text[] oid[] regtype[] regclass[] regprocedure[] integer[] bigint[] float8[] jsonb[] oidvector int2vector
public.vector public.halfvec public.vector[]"""
_TYPES = _TYPE_NAMES.split()
#: operators that the scripts use with few types
_OTHER_TYPES = (
    "name text varchar integer bigint numeric float8 regclass regtype json jsonb interval timestamptz text[] name[]"
)
_COMPARISONS = ("=", "<>", "<", ">", "<=", ">=")
_OTHERS = ("||", "+", "-", "*", "/", "%", "->", "->>", "#>>", "?", "@>", "&&", "~", "!~", "~~", "!~~", "^@", "@?")
#: type of a parameter -> other types that PostgreSQL takes there
_FITTING = {
    "text": ("name", "varchar", '"char"'),
    "bigint": ("integer", "smallint"),
    "float8": ("integer", "bigint", "numeric", "real"),
    "numeric": ("integer", "bigint"),
    "oid": ("regclass", "regproc", "regprocedure", "regtype", "regrole", "regnamespace", "bigint", "integer"),
    "regclass": ("oid",),
    "timestamptz": ("date", "timestamp"),
    "anyelement": ("text", "name", "integer", "bigint", "float8", "oid", "regclass", "jsonb", "boolean", "numeric"),
    "anyarray": (
        "text[]",
        "name[]",
        "oid[]",
        "integer[]",
        "float8[]",
        "regtype[]",
        "regprocedure[]",
        "public.vector[]",
    ),
}
for _like in ("anynonarray", "anycompatible", "any"):
    _FITTING[_like] = _FITTING["anyelement"]
_FITTING["anycompatiblearray"] = _FITTING["anyarray"]
_SHORT = {"double precision": "float8", "timestamp with time zone": "timestamptz", '"any"': "any"}


def _run_all(owner: Connection, statements: Iterator[str]) -> None:
    """Each in a subtransaction: what is there already, or cannot be, is left out."""
    while batch := list(itertools.islice(statements, 500)):
        owner.execute(
            "DO $do$DECLARE s text; BEGIN FOREACH s IN ARRAY "
            f"ARRAY[{', '.join('$q$' + s + '$q$' for s in batch)}]"
            " LOOP BEGIN EXECUTE s; EXCEPTION WHEN OTHERS THEN NULL; END; END LOOP; END$do$"
        )


def plant(owner: Connection) -> int:
    """Returns how many operators and functions there are now."""
    owner.execute("CREATE SEQUENCE public.ran; GRANT ALL ON SEQUENCE public.ran TO PUBLIC")
    there = {
        tuple(row)
        for row in owner.execute(
            "SELECT o.oprname::text, format_type(o.oprleft, NULL), format_type(o.oprright, NULL) FROM pg_operator AS o"
        )
    }
    pairs = [(o, *p) for o in _COMPARISONS for p in itertools.product(_TYPES, _TYPES)]
    pairs += [(o, *p) for o in _OTHERS for p in itertools.product(_OTHER_TYPES.split(), _OTHER_TYPES.split())]

    def operators() -> Iterator[str]:
        for left, right in itertools.product(_TYPES, _TYPES):
            for suffix, result in (("", "boolean"), ("_text", "text")):
                signature = f"public.planted{suffix}({left}, {right}) RETURNS {result}"
                yield f"CREATE FUNCTION {signature} LANGUAGE plpgsql {_BODY}"
        for operator, left, right in pairs:
            suffix = "_text" if operator in ("||", "->>", "#>>") else ""
            if (operator, left, right) not in there:
                yield (
                    f"CREATE OPERATOR public.{operator} (LEFTARG = {left}, RIGHTARG = {right}, "
                    f"FUNCTION = public.planted{suffix})"
                )

    used = set(re.findall(r"\b([a-z_0-9]+)\(", "\n".join(path.read_text() for path in SOURCES.rglob("*.sql"))))
    signatures = owner.execute(
        "SELECT DISTINCT p.proname::text, ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) AS t),"
        " p.provariadic <> 0, format_type(p.prorettype, NULL) FROM pg_proc AS p"
        " WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = ANY (%s) AND p.pronargs BETWEEN 1 AND 4",
        [list(used)],
    ).fetchall()

    def functions() -> Iterator[str]:
        for name, types, is_variadic, result in sorted(signatures):
            types = [_SHORT.get(type_, type_) for type_ in types]
            lists = [types] if not is_variadic else [types[:-1] + ["any"] * n for n in range(4)]
            returns = "text" if result.startswith("any") else result
            for parameters in lists:
                choices = [
                    (*((type_,) if not type_.startswith("any") else ()), *_FITTING.get(type_, ()))
                    for type_ in parameters
                ]
                for chosen in itertools.islice(itertools.product(*choices), 150):
                    signature = f"public.{name}({', '.join(chosen)}) RETURNS {returns}"
                    yield f"CREATE FUNCTION {signature} LANGUAGE plpgsql {_BODY}"

    _run_all(owner, itertools.chain(operators(), functions()))
    return int(
        value_of(
            owner,
            "SELECT (SELECT count(*) FROM pg_operator WHERE oprowner = current_user::regrole)"
            " + (SELECT count(*) FROM pg_proc WHERE proowner = current_user::regrole)",
        )
    )


def ran(admin: Connection) -> bool:
    return bool(value_of(admin, "SELECT is_called FROM public.ran"))


@contextlib.contextmanager
def planted(cluster: Cluster) -> Iterator[Database]:
    """A database of its own whose owner, role stranger, has planted all that, beside pgvector and before ml_rag."""
    database = cluster.create(template="template0")
    try:
        cluster.execute("ALTER DATABASE {} OWNER TO {}", database.name, database.role("stranger"))
        admin = database.connect()
        admin.execute("CREATE EXTENSION plpython3u; CREATE EXTENSION vector SCHEMA public")
        # the default of PostgreSQL 15 and later, also where the template is older
        admin.execute("ALTER SCHEMA public OWNER TO pg_database_owner")
        planter = database.connect("stranger")
        planter.execute("SET search_path = pg_catalog")
        assert plant(planter) > 15_000
        yield database
    finally:
        database.close()
        cluster.execute("DROP DATABASE {} WITH (FORCE)", database.name)


def configure(admin: Connection, model_server: str) -> None:
    """Create the extension, with the fake models."""
    admin.execute("CREATE EXTENSION ml_rag")
    for setting, value in {
        "model_server": model_server,
        "embed_model_id": "fake-embed",
        "generate_model_id": "fake-generate",
        "rerank_model_id": "fake-rerank",
    }.items():
        admin.execute("SELECT ml_rag.configure(%s, %s)", (setting, value))
