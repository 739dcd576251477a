#!/usr/bin/env bash
# made_up_release.sh [install]: what upgrades are tested with beside the releases: this checkout as release 0.0.0, which
# has otherwise what tests/migration/made_up/older.sql says, sealed as a release is, and its upgrade script; in
# build/made_up, and installed into the PostgreSQL that PG_CONFIG names.
source "$(dirname "$0")/lib.sh"

made_up=0.0.0
target=$ROOT/build/made_up
tree=$target/tree

rm -rf "$target"
mkdir -p "$tree/plpy/ml_rag" "$tree/migrations"
cp -R "$ROOT"/{ml_rag.control,mk,sql} "$tree"
cp -R "$ROOT"/plpy/ml_rag/{__init__.py,archives.py,errors.py,files.py,progress.py,protocol.py,sentences.py,backend} "$tree/plpy/ml_rag"
sed -i "s/$VERSION/$made_up/" "$tree/plpy/ml_rag/__init__.py"
cp "$ROOT/tests/migration/made_up/older.sql" "$tree/sql/99_older.sql"
echo '\i 99_older.sql' >>"$tree/sql/install.sql"
bash "$tree/mk/seal.sh"
mv "$tree"/migrations/* "$target"
rm -rf "$tree"
sed -e "/^@RAISE@\$/{r $ROOT/sql/raise.sql.in" -e 'd}' -e "s/@ML_RAG_VERSION@/$VERSION/g" "$ROOT/tests/migration/made_up/upgrade.sql" >"$target/ml_rag--$made_up--$VERSION.sql"

[ "${1:-}" != install ] || bash "$(dirname "$0")/install.sh" released "$target"
