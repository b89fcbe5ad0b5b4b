#!/usr/bin/env bash
# Makes .venv with the given extras, and installs the shared libraries that the transfer engine loads.
# Usage: tools/setup_env.sh engine,mooncake,dev
# Does nothing where .venv is up to date: its stamp holds a digest of what it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
stamp=.venv/.stamp-${extras//,/-}

# Two calls of make at once must not write into one environment.
exec 9>.venv.lock
if command -v flock >/dev/null; then
    flock -n 9 || { echo "setup: waiting for another setup to end" >&2; flock 9; }
fi

say() { echo "setup: $*" >&2; }

quietly() {
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        say "failed: $*"
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

has_library() { PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | grep -q "^[[:space:]]*$1 "; }

shared_libraries() {
    local missing=() root=()
    [ "$(uname -s)" = Linux ] || return 0
    [[ ",$extras," == *,mooncake,* ]] || return 0
    has_library libibverbs.so.1 || missing+=(libibverbs1)
    has_library libnuma.so.1 || missing+=(libnuma1)
    has_library libcurl.so.4 || missing+=(libcurl4)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] && command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        root=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || { [ "$(id -u)" != 0 ] && [ ${#root[@]} -eq 0 ]; }; then
        say "the Mooncake transfer engine needs ${missing[*]}, which this user cannot install: ask for"
        say "  apt-get install --no-install-recommends ${missing[*]}"
        say "until then everything runs but --transfer mooncake"
        return 0
    fi
    say "apt-get install ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    quietly "${root[@]}" apt-get update
    quietly "${root[@]}" apt-get install -y --no-install-recommends "${missing[@]}"
}

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    say "needs Python 3.11 or 3.12, and finds neither; PYTHON=/path/to/python3.11 names one"
    return 1
}

shared_libraries
digest=$(cat pyproject.toml constraints.txt <(pwd) | cksum)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then
    exit 0
fi
started=$SECONDS
# The scripts in an environment that was copied with its folder still start the old one.
if [ -f .venv/.home ] && [ "$(cat .venv/.home)" != "$PWD" ]; then
    rm -rf .venv
fi
rm -f "$stamp"
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    if ! quietly "$python" -m venv --clear .venv; then
        say "where the venv module is missing: apt-get install python3-venv"
        exit 1
    fi
fi
say "installing cpkv[$extras] with the versions of constraints.txt"
quietly .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$extras]"
pwd >.venv/.home
echo "$digest" >"$stamp"
say "done in $((SECONDS - started)) s"
