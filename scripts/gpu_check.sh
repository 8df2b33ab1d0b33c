#!/usr/bin/env bash
# Check and measure weft on a machine with an NVIDIA GPU: one command, under 10 minutes, tables to send back.
#
#   scripts/gpu_check.sh [--out DIR] [--only PART,...] [--skip-done] [--list] [--dry-run]
# Needs no network and installs nothing: the Python that runs it must have torch with CUDA, triton and
# numpy; with nanobind, cmake and ninja it builds the native parts, with pytest it runs tests. PYTHON
# names another interpreter than python3. Results go to $OUT, else to build/gpu_check. docs/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" benchmarks/gpu/check.py "$@"
