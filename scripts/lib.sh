# shellcheck shell=bash
# Sourced by the other scripts: where things are, and the environment they run in.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MLX_MESH_VENV:-$root/.venv} # MLX_MESH_VENV: an environment of your own instead of .venv
python=$venv/bin/python

unset PYTHONDONTWRITEBYTECODE # compile what is imported once, not in every process

say() {
    printf '%s\n' "$*" >&2
}

# Print the first Python that is 3.11 or newer and can make environments; exit with the fix otherwise.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
        # Run it instead of looking for it: a pyenv shim exists for versions that are not active.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "No Python 3.11 or newer with the venv module was found on PATH (looked for python3.11 ... python3)."
    say "Install one and run this again:"
    say "  Debian, Ubuntu   apt-get install python3.11 python3.11-venv    (or python3 python3-venv)"
    say "  macOS            brew install python@3.11"
    exit 1
}

# ensure_environment run|dev: make the environment once; a second call with the same pyproject.toml does
# nothing and needs no network. `dev` adds the tools that tests need.
ensure_environment() {
    local kind=$1 package="$root" wanted stamp
    # On Linux the package mlx has no backend of its own; on macOS it has Metal.
    [[ $(uname -s) == Linux ]] && package="$root[cpu]"
    wanted="$package $(cksum <"$root/pyproject.toml")"
    for stamp in "$venv/.mlx-mesh-$kind" "$venv/.mlx-mesh-dev"; do # what tests need is enough to run
        if [[ -x $python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
            return
        fi
    done
    if ! "$python" -m pip --version >/dev/null 2>&1; then # also one whose making was interrupted
        local found
        found=$(find_python)
        say "Making $venv with $found"
        "$found" -m venv "$venv"
    fi
    local requirements=(--editable "$package") line
    if [[ $kind == dev ]]; then
        while IFS= read -r line; do requirements+=("$line"); done < <("$python" -c '
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["dependency-groups"]["dev"], sep="\n")' "$root/pyproject.toml")
    fi
    say "Installing mlx-mesh and what it needs into $venv (once)"
    # Compiling all modules would take as long as all the rest; the few that are imported are compiled then.
    "$python" -m pip install --quiet --quiet --no-compile "${requirements[@]}" >&2
    printf '%s' "$wanted" >"$venv/.mlx-mesh-$kind"
}

# Print the OpenBLAS library to preload into a process that runs MLX on Linux, or nothing: the wheel brings a slow
# reference BLAS. Engines started by an agent get it from the agent.
find_openblas() {
    "$python" -I -c '
from mlx_mesh.node import blas
print(blas.find_openblas() if blas.is_wanted() else "")'
}
