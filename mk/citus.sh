#!/usr/bin/env bash
# citus.sh SOURCE: Citus, from its sources in that folder or archive, for the PostgreSQL that PG_CONFIG names, as tests need it:
# without curl, lz4 and zstd, whose headers may not be there. The folder stays as it is; nothing is fetched.
source "$(dirname "$0")/lib.sh"

given=${1:-}
[ -d "$given" ] || [ -f "$given" ] || die "usage: citus.sh SOURCE: name a folder or an archive of the sources of Citus"
pg_config=$(need_pg_config)
major=$("$pg_config" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')
[ -e "$("$pg_config" --includedir-server)/postgres.h" ] || die "the headers of PostgreSQL are missing: install postgresql-server-dev-$major, then run this again"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -d "$given" ]; then cp -R "$given/." "$work"; else tar -xf "$given" -C "$work" --strip-components=1; fi
cd "$work"
[ -e src/backend/distributed/citus.control ] || die "$given does not have the sources of Citus: name the folder that has its configure"

# PostgreSQL 15 has declared a function of this name since a minor release, and Citus 13.2.2 defines one.
if grep -q have_createdb_privilege "$("$pg_config" --includedir-server)/commands/dbcommands.h"; then
  sed -i 's/^have_createdb_privilege(void)$/citus_&/' src/include/pg_version_compat.h
fi
# or make calls autoconf, where these were copied after it
touch configure src/include/citus_config.h.in
./configure -q --without-libcurl --without-lz4 --without-zstd PG_CONFIG="$pg_config"
# what a build for another PostgreSQL has left
make -s clean
make -s -j"$(nproc)" with_llvm=no
as_root make -s install with_llvm=no
note "Citus is in $("$pg_config" --pkglibdir)"
