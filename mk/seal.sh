#!/usr/bin/env bash
# seal.sh: what this version installs, as the archive of a release, migrations/ml_rag--VERSION.tar.gz; its checksum, and
# that of the upgrade script that leads here, in migrations/SHA256SUMS. migrations/README.md says when.
source "$(dirname "$0")/lib.sh"

archive=ml_rag--$VERSION.tar.gz
[ ! -e "$ROOT/migrations/$archive" ] || die "ml_rag $VERSION is sealed already: raise the version in plpy/ml_rag/__init__.py"
bash "$(dirname "$0")/build.sh"
tar -C "$ROOT/build/extension" --owner=0 --group=0 --numeric-owner --sort=name \
  -czf "$ROOT/migrations/$archive" "ml_rag--$VERSION.sql" "ml_rag-$VERSION"
cd "$ROOT/migrations"
find . -name "$archive" -o -name "ml_rag--*--$VERSION.sql" | sed 's|^./||' | sort | xargs sha256sum >>SHA256SUMS
