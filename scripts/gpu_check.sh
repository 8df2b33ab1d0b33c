#!/usr/bin/env bash
# Check and measure weft on a machine with an NVIDIA GPU: one command, under 10 minutes, a table and a JSON file.
#
#   scripts/gpu_check.sh [--out FILE] [--only PART,...]
# Needs no network and installs nothing: the Python that runs it must have torch with CUDA, triton, numpy,
# nanobind, cmake, ninja and pytest. PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" benchmarks/gpu/check.py "$@"
