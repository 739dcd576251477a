#!/usr/bin/env bash
# pgvector 0.8 or newer for the PostgreSQL in use: the distribution's package, else built from the source package of a newer
# release of the distribution, which is fetched through an apt state of our own, so that this machine's package sources stay as they are.
source "$(dirname "$0")/lib.sh"

minimum=0.8.0
pg_config=$(need_pg_config)
control=$("$pg_config" --sharedir)/extension/vector.control
major=$("$pg_config" --version | sed 's/^[^0-9]*\([0-9]*\).*/\1/')

at_least() { [ -n "$1" ] && printf '%s\n%s\n' "$minimum" "$1" | sort -V -C; }

installed_version() { sed -n "s/^default_version = '\(.*\)'/\1/p" "$control" 2>/dev/null || true; }

at_least "$(installed_version)" && exit 0
command -v apt-get >/dev/null || die "please install pgvector $minimum or newer for PostgreSQL $major, then run this again"

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 install "$@"
}

package=postgresql-$major-pgvector
candidate=$(apt-cache policy "$package" 2>/dev/null | sed -n 's/^ *Candidate: *\([0-9].*\)/\1/p')
if [ -z "${PG_CONFIG:-}" ] && at_least "${candidate%%-*}"; then
  note "installing $package"
  apt_install "$package" || die "apt-get could not install $package: check the network, then run this again (details: $LOG)"
  exit 0
fi

# shellcheck source=/dev/null
distribution=$(. /etc/os-release && echo "$ID")
note "building pgvector from a newer source package: about a minute"
needed=()
{ command -v gcc && command -v make; } >/dev/null || needed+=(build-essential)
[ -e "$("$pg_config" --includedir-server)/postgres.h" ] || needed+=("postgresql-server-dev-$major")

# Releases that have it, oldest first, of the mirror this machine itself uses, whichever form its sources have.
mirror_of() {
  # shellcheck disable=SC2016 # apt expands these
  apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' 'Created-By: Packages' 2>/dev/null |
    awk -v origin="$1" '$2 == origin && $1 !~ /security/ { print $1; exit }'
}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg component=main suites=(trixie forky sid)
mirror=${DEBIAN_MIRROR:-$(mirror_of Debian)}
if [ "$distribution" = ubuntu ] && [ -z "${DEBIAN_MIRROR:-}" ]; then
  keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg component=universe suites=(resolute devel)
  mirror=$(mirror_of Ubuntu)
fi
[ -n "$mirror" ] || die "pgvector is not packaged here and no mirror is among the apt sources: set DEBIAN_MIRROR to the URL of one of Debian's, or install pgvector $minimum for this PostgreSQL, then run this again"
[ -e "$keyring" ] || needed+=("$(basename "$keyring" .gpg)")
if [ "${#needed[@]}" -gt 0 ]; then
  apt_install "${needed[@]}" || die "apt-get could not install ${needed[*]}: check the network, then run this again (details: $LOG)"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt drops to its own user for downloads
mkdir -p "$work"/{state/lists/partial,cache/archives/partial,source}
[ "$(id -u)" -ne 0 ] || chown -R _apt "$work/source" "$work/state/lists/partial" "$work/cache/archives/partial"
apt_private() {
  apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State="$work/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$work/cache" \
    -o APT::Update::Post-Invoke-Success::= -o Acquire::Languages=none "$@"
}

cd "$work/source" || exit
for suite in "${suites[@]}"; do
  echo "deb-src [signed-by=$keyring] $mirror $suite $component" >"$work/sources.list"
  apt_private update || continue
  apt_private source --download-only pgvector || continue
  at_least "$(find . -name 'pgvector_*.orig.tar.gz' | sed 's/.*pgvector_\(.*\)\.orig.*/\1/')" && break
  rm -f ./*
done
compgen -G 'pgvector_*.orig.tar.gz' >/dev/null ||
  die "the pgvector source package could not be fetched from $mirror: check the network, or install pgvector $minimum for PostgreSQL $major yourself, then run this again"

tar -xzf pgvector_*.orig.tar.gz --strip-components=1
# OPTFLAGS: no -march=native, so that the library survives a move to another machine; bitcode would need clang.
make -s -j"$(nproc)" OPTFLAGS="" with_llvm=no PG_CONFIG="$pg_config"
as_root make -s install OPTFLAGS="" with_llvm=no PG_CONFIG="$pg_config"
