#!/usr/bin/env bash
# Do the kernels do the same arithmetic on every instruction set? Compares the digests of
# csrc/tests/isa_check.cpp: natively (scalar, AVX2, AVX-512, as far as this CPU has them) and, where
# the tools are there, on emulated CPUs:
#   x86-64   core2duo and Nehalem (scalar only: nothing newer may run), Haswell (AVX2)
#   aarch64  cortex-a72 (scalar only: no dot product), neoverse-n1 and max (NEON)
# Tools for the second part (Debian): apt-get install -y g++-aarch64-linux-gnu qemu-user
# Usage: bash scripts/check_isas.sh [BUILD_FOLDER]   (default build/isas; about five minutes if new)
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/isas}
mkdir -p "$build"
results=()

compile() {  # folder, further CMake options
    local folder=$build/$1
    shift
    cmake -S . -B "$folder" -DCMAKE_BUILD_TYPE=Release -DHEADRACE_PYTHON=OFF -DHEADRACE_TESTS=ON \
        -DHEADRACE_WERROR=ON "$@" > "$folder.log"
    cmake --build "$folder" --target isa_check --parallel 2 >> "$folder.log"
}

digests() {  # name of the machine, command
    local result=$build/$1.txt
    printf '%s: ' "$1"
    shift
    "$@" 2>&1 > "$result" | grep -v "TCG doesn't support"
    results+=("$result")
}

# An inline function with a copy outside its ISA's namespace might be the one the linker keeps.
refuse_shared_symbols() {
    local shared
    shared=$(find "$1" -name 'isa_*.cpp.o' ! -name 'isa_check*' -exec nm -C {} + | awk '$2 ~ /^[WVu]$/')
    if [ -n "$shared" ]; then
        printf 'weak symbols in the objects of an ISA:\n%s\n' "$shared" >&2
        exit 1
    fi
}

compile native
refuse_shared_symbols "$build/native"
digests native "$build/native/isa_check"

if [ "$(uname -m)" = x86_64 ] && command -v qemu-x86_64 > /dev/null; then
    for cpu in core2duo Nehalem Haswell; do
        digests "x86_64-$cpu" qemu-x86_64 -cpu "$cpu" "$build/native/isa_check"
    done
else
    echo "not run: other x86-64 CPUs (no qemu-x86_64)"
fi

if command -v qemu-aarch64 > /dev/null && command -v aarch64-linux-gnu-g++ > /dev/null; then
    compile aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
    refuse_shared_symbols "$build/aarch64"
    for cpu in cortex-a72 neoverse-n1 max; do
        digests "aarch64-$cpu" qemu-aarch64 -cpu "$cpu" -L /usr/aarch64-linux-gnu \
            "$build/aarch64/isa_check"
    done
else
    echo "not run: aarch64 (no qemu-aarch64 or no aarch64-linux-gnu-g++)"
fi

# Lines are `kernel isa digest`: one digest per kernel, whatever the machine and the ISA.
different=$(awk '{print $1, $3}' "${results[@]}" | sort -u | awk '{print $1}' | uniq -d)
if [ -n "$different" ]; then
    printf 'these differ:\n%s\n' "$different" >&2
    exit 1
fi
echo "equal: $(awk '{print $1}' "${results[@]}" | sort -u | wc -l) digests," \
    "$(awk '{print FILENAME, $2}' "${results[@]}" | sort -u | wc -l) tables on ${#results[@]} machines"
