#!/usr/bin/env bash
# Builds the plugin's wheel (with the CUDA kernels where nvcc is found), installs it into the python on PATH and runs
# the plugin's tests. About four minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")"
dist=$(mktemp -d)
trap 'rm -rf "$dist"' EXIT
export GPTFRAME_CACHE_DIR=$dist/cache
python -m pip wheel -q --no-deps -w "$dist" .
python -m pip install -q --force-reinstall --no-deps "$dist"/*.whl
python -c "import expecttest, hypothesis, pytest, setuptools" 2>/dev/null ||
  python -m pip install -q expecttest 'hypothesis>=6.100' 'pytest>=8' 'setuptools>=77'
python -m pytest -q -n 2 --dist loadfile tests
python ../../benchmarks/gelu.py --memory
