# Sourced by scripts/demo and scripts/test: one virtual environment, installed only when something changed.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python="$root/.venv/bin/python"

# environment EXTRA: make .venv if it is missing and install this project with an extra, pinned.
environment() {
    local extra=$1 stamp sum
    local base=${PYTHON:-python3}
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "expected Python 3.11 or newer as '$base', found $("$base" --version 2>/dev/null || echo none); set PYTHON=/path/to/python3.11" >&2
        exit 2
    fi
    # unusable: half made (killed, or Python without ensurepip), or made at another path
    if [ ! -x "$python" ] || [ ! -e "$root/.venv/bin/pip" ] || ! grep -qsF "$root/.venv" "$root/.venv/bin/activate"; then
        echo "making the virtual environment $root/.venv"
        "$base" -m venv --clear "$root/.venv"
    fi
    sum=$(cat "$root/pyproject.toml" "$root/constraints.txt" | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    stamp="$root/.venv/installed-$extra"
    # what tests need contains what the runtime needs
    if [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ] || [ "$(cat "$root/.venv/installed-test" 2>/dev/null)" = "$sum" ]; then
        return
    fi
    rm -f "$root"/.venv/installed-*
    echo "installing csd-toolkit[$extra] into $root/.venv"
    "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root[$extra]" 2> >(grep -v 'is ignored: it is neither' >&2)
    echo "$sum" >"$stamp"
}
