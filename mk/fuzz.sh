#!/usr/bin/env bash
# fuzz.sh [pytest arguments]: the fuzz tests with their whole counts, at most FUZZ_SECONDS (600) a target. FUZZ_SEED says
# which cases; the same seed makes the same ones again. The suite runs a short form of them each time.
source "$(dirname "$0")/lib.sh"

export ML_RAG_FUZZ=full FUZZ_SEED=${FUZZ_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
[[ $FUZZ_SEED =~ ^[0-9]+$ ]] || die "FUZZ_SEED is $FUZZ_SEED, and must be a whole number"
bash "$(dirname "$0")/setup.sh" fuzz
note "FUZZ_SEED=$FUZZ_SEED"
exec bash "$(dirname "$0")/test.sh" "${@:-tests/fuzz}"
