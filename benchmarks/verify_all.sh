#!/usr/bin/env bash
# Verifies every released configuration with random weights on this machine's GPU, three at a time.
#
#   benchmarks/verify_all.sh [FOLDER]
#
# Leaves verify-<model>.json in FOLDER (benchmarks/results), and what each printed in FOLDER/verify-<model>.log if it
# failed. Exit code 1 if any did. PYTHON is the interpreter; JOBS how many run at once; COMMIT what is run where there
# is no checkout. MODELS names others than all.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python} FOLDER=${1:-benchmarks/results} COMMIT=${COMMIT:-}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
WORK=$(mktemp -d)
export WORK
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$FOLDER"
verify_one() {
  local model=$1 code
  timeout "${LIMIT_S:-230}" "$PYTHON" -m sonoro verify "$model" --load-format dummy -o "$WORK/verify-$model.json" \
    ${COMMIT:+--commit "$COMMIT"} >"$WORK/$model.log" 2>&1
  code=$?
  [ -f "$WORK/verify-$model.json" ] && cp "$WORK/verify-$model.json" "$FOLDER/"
  if [ "$code" != 0 ]; then
    cp "$WORK/$model.log" "$FOLDER/verify-$model.log"
    echo "$model: exit code $code"
    tail -5 "$WORK/$model.log"
    return 1
  fi
  echo "$model: passed"
}
export -f verify_one
MODELS=${MODELS:-$("$PYTHON" -c 'from sonoro.models import registry; print(*registry.names()[1:])')}
# shellcheck disable=SC2086 (names are words)
printf '%s\n' $MODELS | xargs -P "${JOBS:-3}" -I{} bash -c 'verify_one {}' || exit 1
