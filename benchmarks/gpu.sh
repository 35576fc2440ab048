#!/usr/bin/env bash
# The engine on a GPU, also on a machine without a network that has nothing but Python and torch.
#
#   benchmarks/gpu.sh pack   here, with a network: fetches the few wheels the engine needs into build/gpu
#   benchmarks/gpu.sh        there: installs them beside its own torch and runs benchmarks/gpu.py
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(msgspec numpy redis safetensors structlog tokenizers)

if [ "${1:-}" = pack ]; then
    rm -rf build/gpu && mkdir -p build/gpu
    for python in 3.11 3.12 3.13; do
        python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" \
            --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
            -c constraints.txt -d build/gpu "${packages[@]}"
    done
    exit
fi

python=${PYTHON:-python3}
"$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || {
    echo "benchmarks/gpu.sh: $python has no torch that sees a CUDA device; set PYTHON or run it where one is." >&2
    exit 1
}
if [ -d build/gpu ]; then
    "$python" -m pip install --quiet --no-index --find-links build/gpu --no-deps --upgrade --target build/gpu/site \
        "${packages[@]}"
    export PYTHONPATH="build/gpu/site${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$python" -m benchmarks.gpu "$@"
