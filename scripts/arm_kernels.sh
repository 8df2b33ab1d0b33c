#!/bin/sh
# Compile the native kernels for Arm and run their C++ tests in an emulator: NEON, and bfloat16.
#
#     scripts/arm_kernels.sh [CASES]
#
# Needs an AArch64 cross compiler and qemu-user; on Debian: g++-aarch64-linux-gnu qemu-user.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cpu=$root/src/weft/kernels/cpu
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile() {
  aarch64-linux-gnu-g++ -std=c++20 -O2 -Wall -Wno-psabi -ffp-contract=fast -I"$cpu" "$@"
}
compile -c "$cpu/tile.cpp" -DWEFT_ISA=baseline -o "$out/neon.o"
compile -march=armv8.2-a+bf16 -c "$cpu/tile.cpp" -DWEFT_ISA=wide -o "$out/bf16.o"
compile -static -DWEFT_WIDE=wide "$root/tests/native/attention_fuzz.cpp" "$cpu/attention.cpp" \
  "$cpu/check.cpp" "$cpu/pool.cpp" "$out/neon.o" "$out/bf16.o" -o "$out/fuzz" -pthread
qemu-aarch64 -cpu max "$out/fuzz" "${1:-20}"

# pool, products of floats and integers, layers, choice of tokens
cd "$cpu"
for march in armv8-a armv8.2-a+bf16; do
  compile -march=$march -ffp-contract=off -c quant_tile.cpp -DWEFT_ISA=baseline -o "$out/quant.o"
  compile -static -march=$march -DWEFT_ISA=baseline "$root/tests/kernels/layers.cpp" sample.cpp \
    dispatch.cpp experts.cpp layer.cpp matrix.cpp ops.cpp panel.cpp pool.cpp post.cpp quant.cpp \
    "$out/quant.o" rate.cpp scan.cpp \
    -o "$out/layers" -pthread
  qemu-aarch64 -cpu max "$out/layers" 5
done
