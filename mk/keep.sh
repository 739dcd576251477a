#!/usr/bin/env bash
# keep.sh command…: runs it again whenever it ends, until SIGTERM. A command that refuses its very first start, by a
# status of its own, is not tried again.
set -u

ended=0 child="" pause=1 starts=0
trap 'ended=1; kill "$child" 2>/dev/null' TERM INT

# Run a command, and wait for it. SIGTERM ends it, even if it came just before the command was started.
await() {
  "$@" &
  child=$!
  if [ "$ended" -eq 1 ]; then kill "$child" 2>/dev/null; fi
  # a trapped signal ends wait, not the command
  while :; do
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null || break
  done
  if [ "$ended" -eq 1 ]; then exit 0; fi
}

while :; do
  started=$SECONDS starts=$((starts + 1))
  await "$@"
  if [ "$starts" -eq 1 ] && [ "$status" -gt 0 ] && [ "$status" -lt 128 ]; then exit "$status"; fi
  if [ $((SECONDS - started)) -ge 60 ]; then pause=1; fi
  printf 'the command ended with status %s: it is started again in %s s\n' "$status" "$pause" >&2
  await sleep "$pause"
  pause=$((pause < 16 ? pause * 2 : 30))
done
