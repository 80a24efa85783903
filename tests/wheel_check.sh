#!/usr/bin/env bash
# Build a wheel, install it in an empty environment, and run the default experiment for a few steps from elsewhere.
# usage: wheel_check.sh BUILD_PYTHON PYTHON CONSTRAINTS
set -euo pipefail
build_python=$1 python=$2 constraints=$(realpath "$3")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$build_python" -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet -c "$constraints" "$work"/dist/*.whl
cd "$work"
"$work/venv/bin/python" -m exp --help >help.txt
"$work/venv/bin/python" -m exp backend=cpu max_steps=3 data.lookback=96 output_dir="$work/run"
"$work/venv/bin/python" -c "import json; r = json.load(open('$work/run/result.json')); assert r['status'] == 'completed', r"
echo "wheel: ok"
