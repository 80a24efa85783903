#!/usr/bin/env bash
# Install exp and the simulated card in an empty environment, from a folder of wheels and without an index, run the default
# experiment for a few steps from elsewhere, install exp over itself, and remove it (docs/guide/operate.md).
# usage: wheel_check.sh BUILD_PYTHON PYTHON CONSTRAINTS
set -euo pipefail
build_python=$1 python=$2 constraints=$(realpath "$3")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'echo "wheels: line $LINENO of $0 failed: $BASH_COMMAND"' ERR
quiet() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }; }
quiet "$build_python" -m pip wheel -c "$constraints" --wheel-dir "$work/wheelhouse" . ./simulators/gcu  # as make wheelhouse
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --no-index --find-links "$work/wheelhouse" exp-accelerators exp-simulated-gcu
cd "$work"
"$work/venv/bin/python" -m exp --help >help.txt
"$work/venv/bin/python" -m exp backend=cpu max_steps=3 data.lookback=96 output_dir="$work/run"
"$work/venv/bin/python" -c "import json; r = json.load(open('$work/run/result.json')); assert r['status'] == 'completed', r"
"$work/venv/bin/python" -m exp backend=gcu backend.simulate=true nproc=2 max_steps=3 data.lookback=96 output_dir="$work/dry"
"$work/venv/bin/python" -c "import json; r = json.load(open('$work/dry/result.json')); assert r['simulated'], r"
"$work/venv/bin/python" -m exp backend=cpu experiment=dinov3_dubai max_steps=1 model.backbone.depth=1 data.size=64 plots=false \
    output_dir="$work/tiles"
"$work/venv/bin/python" -m exp backend=cpu experiment=dinov3_eurosat max_steps=1 model.backbone.depth=1 output_dir="$work/scenes"
"$work/venv/bin/python" -m exp -m backend=cpu,gcu_simulated max_steps=2 data.lookback=96 plots=false output_dir="$work/sweep"
test -s "$work/sweep/report.html"
"$work/venv/bin/python" -m exp launcher=submitit launcher.dry_run=true launcher.nodes=2 nproc=8 backend=gcu \
    launcher.gres=gcu:8 >"$work/script.txt"
grep -q -- --nodes=2 "$work/script.txt"
"$work/venv/bin/python" -m exp task=clean run="$work/run" task.remove=true | grep -q removed
"$work/venv/bin/python" -m exp task=env >env.txt
grep -q 'exp: 0.1.0' env.txt
# Over itself, and away: run folders stay.
"$work/venv/bin/python" -m pip install --quiet --no-index --find-links "$work/wheelhouse" --force-reinstall --no-deps exp-accelerators
"$work/venv/bin/python" -m exp backend=cpu task=eval init_from="$work/run" output_dir="$work/eval"
"$work/venv/bin/python" -m pip uninstall --quiet --yes exp-accelerators
! "$work/venv/bin/python" -c 'import exp' 2>/dev/null
test -s "$work/run/result.json"
echo "wheels: ok"
