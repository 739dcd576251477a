#!/usr/bin/env bash
# Joins the files that sql/install.sql names into the script CREATE EXTENSION runs, build/ml_rag--VERSION.sql,
# and lays out in build/extension what is installed: with the Python of the backend and the upgrade scripts.
# A line @BACKEND@ in a PL/Python function becomes sql/backend.py.in: the Python side of this very version, once a session.
# A line @RAISE@ becomes sql/raise.sql.in: a public routine raises an error that it caught. A line @CATCH@ is the clause that catches
# all errors and raises them so, @CATCH_AND_END@ one that first reports the end of the routine's _call (sql/watch/track.sql).
# A line @WORK@ becomes sql/work.sql.in: the loop of a procedure that commits.
# @ROUTINES_OF_PIPELINE@ becomes the names of the functions that sql/pipeline makes in schema ml_rag.
# Public routines and those that are SECURITY DEFINER have SHOWN off: these settings, which any role may turn on, show the values
# that a statement gets to the client, and a function of an application that is SECURITY DEFINER can call a routine for others.
# Types of variables get their schema: PL/pgSQL looks them up once a session, in the search_path of the first call. A domain of the
# same name, such as pg_temp.text, would otherwise stay in the function, and its check run with the rights of later callers.
source "$(dirname "$0")/lib.sh"

target=$ROOT/build/ml_rag--$VERSION.sql
mkdir -p "$ROOT/build"

# the types that are not keywords of SQL; keywords always mean those of pg_catalog
CAPTURABLE='"char"|float8|json|jsonb|name|oid|pg_[a-z_]+|record|refcursor|reg[a-z]+|text|tid|timestamptz|tsvector|uuid'

SHOWN='SET debug_print_parse = off SET debug_print_rewritten = off SET debug_print_plan = off'

routines_of() { sed -nE 's/^CREATE (FUNCTION|PROCEDURE|AGGREGATE) ml_rag\.([a-z0-9_]+)\(.*/\2/p' "$ROOT/sql/$1/"*.sql | sort -u | tr '\n' ' '; }

# A file that names pgvector's schema is run by a statement that replaces @vector@ by it: PostgreSQL does so from 16 on only.
# shellcheck disable=SC2016
with_vector() {
  if grep -q '@vector@' "$1"; then
    printf 'DO $run$ BEGIN EXECUTE pg_catalog.replace($file$\n'
    cat "$1"
    printf '%s\n' '$file$, $vector$@vector@$vector$, (SELECT pg_catalog.quote_ident(n.nspname) FROM pg_catalog.pg_extension AS e' \
      '  JOIN pg_catalog.pg_namespace AS n ON n.oid = e.extnamespace WHERE e.extname = $vector$vector$vector$)); END $run$;'
  else
    cat "$1"
  fi
}

{
  printf '\\echo Use "CREATE EXTENSION ml_rag" to load this file. \\quit\n'
  while read -r command file; do
    [ "$command" = '\i' ] || continue
    [ -f "$ROOT/sql/$file" ] || die "sql/install.sql names $file, which does not exist: add it or take out its line"
    printf '\n-- %s\n\n' "$file"
    with_vector "$ROOT/sql/$file"
  done <"$ROOT/sql/install.sql"
} | sed -e 's/^@CATCH_AND_END@$/@CATCH@\n  PERFORM ml_rag._end(_call, SQLSTATE);\n@RAISE@/' -e 's/^@CATCH@$/&\n@RAISE@/' |
  sed -e 's/^@CATCH@$/EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN/' |
  sed -e "/^@WORK@\$/{r $ROOT/sql/work.sql.in" -e 'd}' | sed -e "/^@BACKEND@\$/{r $ROOT/sql/backend.py.in" -e 'd}' -e "/^@RAISE@\$/{r $ROOT/sql/raise.sql.in" -e 'd}' | sed "s/@ML_RAG_VERSION@/$VERSION/g; s/@ROUTINES_OF_PIPELINE@/$(routines_of pipeline)/" |
  sed -E -e 's/LANGUAGE [a-z0-9]+ ([A-Z ]+ )?SECURITY DEFINER/& '"$SHOWN/" \
    -e '/^CREATE (FUNCTION|PROCEDURE) (@extschema@|ml_rag)[.][a-z]/,/[$][$]/s/SET search_path FROM CURRENT/& '"$SHOWN/" |
  sed -E "/^ *DECLARE\$/,/^ *BEGIN\$/s/^( +[a-z_0-9]+( CONSTANT)?) ($CAPTURABLE)(\[\]|[ ;]|\$)/\1 pg_catalog.\3\4/" >"$target.new"
mv "$target.new" "$target"

stage=$ROOT/build/extension
rm -rf "$stage"
install -d "$stage/ml_rag-$VERSION/ml_rag/backend"
install -m 644 "$target" "$stage"
sed "s/@ML_RAG_VERSION@/$VERSION/" "$ROOT/ml_rag.control" >"$stage/ml_rag.control"
chmod 644 "$stage/ml_rag.control"
find "$ROOT/migrations" -maxdepth 1 -name 'ml_rag--*--*.sql' -exec install -m 644 -t "$stage" {} +
install -m 644 "$ROOT"/plpy/ml_rag/{__init__,archives,errors,files,progress,protocol,sentences}.py "$stage/ml_rag-$VERSION/ml_rag"
(cd "$ROOT/plpy/ml_rag/backend" && find . -name '*.py' -exec install -D -m 644 {} "$stage/ml_rag-$VERSION/ml_rag/backend/{}" \;)
