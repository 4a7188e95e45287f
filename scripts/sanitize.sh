#!/usr/bin/env bash
# Runs tests/ops with the native module under sanitizers; nothing of the working tree is touched.
#
#   scripts/sanitize.sh                      AddressSanitizer and UndefinedBehaviorSanitizer
#   scripts/sanitize.sh thread               ThreadSanitizer, over the tests with several threads
#   scripts/sanitize.sh address|thread ...   pytest arguments instead of those tests
#
# The first finding ends the run with its report. Needs g++ with its sanitizer libraries, cmake, ninja
# and a Python ($PYTHON, default python3) with the test extras. The module is built in
# build/sanitize-<kind> (minutes the first time) and imported from a copy of the package beside it.
# The sanitizer must be the first library of the process and libstdc++ must be there when it starts
# (or C++ exceptions abort), hence LD_PRELOAD. Leaks are not looked for: Python's own would drown ours.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
kind=address
case "${1:-}" in address | thread) kind=$1; shift ;; esac
build=build/sanitize-$kind

case $kind in
    address) option=ON library=libasan.so tests=(tests/ops) ;;
    thread) option=thread library=libtsan.so
        tests=(tests/ops -k "pool or thread or decod or sequences or chunks") ;;
esac
[ $# -gt 0 ] && tests=("$@")

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE= -DCMAKE_CXX_FLAGS="-O1 -g1" \
    -DHEADRACE_WERROR=ON -DHEADRACE_SANITIZE=$option -DPython_EXECUTABLE="$(command -v "$python")"
cmake --build "$build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"
rm -rf "$build/package"
mkdir -p "$build/package"
cp -R src/headrace "$build/package/"
rm -f "$build"/package/headrace/_native*.so
cp "$build"/_native*.so "$build/package/headrace/"

export PYTHONPATH=$build/package
export PYTHONMALLOC=malloc  # Python's arenas would hide what lies past the end of an array
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
export OPENBLAS_NUM_THREADS=1  # its threads are not instrumented, their races not ours
preload="$(g++ -print-file-name=$library) $(g++ -print-file-name=libstdc++.so)"
LD_PRELOAD=$preload exec "$python" -m pytest -p no:cacheprovider -p no:faulthandler --capture=no \
    --timeout=600 "${tests[@]}"
