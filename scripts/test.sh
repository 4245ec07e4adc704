#!/usr/bin/env bash
# Checks and tests, in .venv (made on first use). Arguments go to pytest: ./scripts/test.sh tests/unit -k balance
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

step "ruff check" ruff check
step "mypy" mypy
python -m pytest "$@"
