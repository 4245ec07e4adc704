# Sourced by the other scripts: makes .venv in the repository's root, installs Braid into it, and activates it. Those that need
# few of the optional packages name them in `extras` before; a later script that needs more installs the rest.
#
# BRAID_VENV     another folder than .venv, for a second environment beside it (say, of another Python).
# BRAID_TORCH    what pip installs as torch, "torch==2.13.0" unless set; may carry pip's options. On Linux the default brings the
#                CUDA libraries along (some GB). Without a GPU, save them by naming PyTorch's index of CPU builds:
#                    BRAID_TORCH="torch==2.13.0 --index-url <PyTorch's CPU index>" ./scripts/quickstart.sh
# BRAID_PYTHON   the Python to make it with; else the first of python3.11, python3.12, python3 that is 3.11 or 3.12.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PIP_DISABLE_PIP_VERSION_CHECK=1
BRAID_TORCH="${BRAID_TORCH:-torch==2.13.0}"
venv="${BRAID_VENV:-.venv}"
extras="${extras:-all}"

fail() {
    echo "error: $*" >&2
    exit 1
}

# step MESSAGE COMMAND...: run a command quietly; one line says what and how long, its output shows only when it fails.
step() {
    local message="$1" started=$SECONDS log
    shift
    log="$(mktemp)"
    printf '%-58s' "$message ..."
    if ! "$@" >"$log" 2>&1; then
        echo " failed"
        tail -n 60 "$log" >&2
        rm -f "$log"
        fail "'$*' failed; its last output is above"
    fi
    rm -f "$log"
    printf ' %4d s\n' $((SECONDS - started))
}

find_python() {
    local candidate
    for candidate in ${BRAID_PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    rm -rf "$venv"
    "$1" -m venv "$venv"
}

install_braid() {
    "$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$venv/constraints.txt"
    "$venv/bin/python" -m pip install --quiet --no-compile --constraint "$venv/constraints.txt" --editable ".[$extras]"
}

# What the installed environment depends on, and its extras.
fingerprint() {
    { echo "$BRAID_TORCH" "$PWD"; cat pyproject.toml setup.py csrc/*; } | sha256sum
    echo "$1"
}

is_prepared() {
    local installed
    [[ -x "$venv/bin/python" ]] && installed="$(cat "$venv/braid.stamp" 2>/dev/null)" || return
    [[ "$installed" == "$(fingerprint all)" || "$installed" == "$(fingerprint "$extras")" ]]
}

prepare_environment() {
    if is_prepared; then
        return
    fi
    # A half-made environment, or one that was moved here with its repository, is made anew.
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || [[ "$(cat "$venv/braid.root" 2>/dev/null || echo "$PWD")" != "$PWD" ]]; then
        local python
        python="$(find_python)" || fail "no Python 3.11 or 3.12 found (tried: ${BRAID_PYTHON:-python3.11 python3.12 python3});" \
            "install one, or name it: BRAID_PYTHON=/path/to/python3.11 $0"
        "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments;" \
            "install its venv module (on Debian and Ubuntu the package python3-venv)"
        step "Making $venv with $("$python" --version)" make_venv "$python"
    fi
    echo "$PWD" >"$venv/braid.root"
    # shellcheck disable=SC2086  # BRAID_TORCH may carry options
    step "Installing ${BRAID_TORCH%% *}" "$venv/bin/python" -m pip install --quiet --no-compile $BRAID_TORCH
    step "Installing Braid, building its C++ kernels" install_braid
    "$venv/bin/python" -c 'import multimodal._kernels' 2>/dev/null ||
        echo "note: the C++ kernels did not build (is there a C++ compiler?); their slower Python references run instead"
    fingerprint "$extras" >"$venv/braid.stamp"
}

prepare_environment
source "$venv/bin/activate"
