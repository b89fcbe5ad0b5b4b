#!/usr/bin/env bash
# Runs every gate, one line each, and shows the output of those that fail. Usage: tools/lint.sh .venv/bin
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=()

gate() {
    local name=$1 started=$SECONDS
    shift
    if "$@" >"$log" 2>&1; then
        echo "lint: $name ok ($((SECONDS - started)) s)"
    else
        cat "$log"
        echo "lint: $name FAILED: $*"
        failed+=("$name")
    fi
}

gate style "$bin/ruff" check --quiet
gate format "$bin/ruff" format --check
gate types "$bin/mypy"
gate arrows "$bin/lint-imports" --no-logo
gate "dead code" "$bin/vulture"
gate dependencies "$bin/deptry" src
gate lengths "$bin/python" tools/check_lengths.py

if [ ${#failed[@]} -gt 0 ]; then
    echo "lint: ${#failed[@]} of 7 gates failed: ${failed[*]}"
    exit 1
fi
