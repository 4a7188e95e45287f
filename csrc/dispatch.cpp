// Which kernel table this CPU can run: the widest wins, a name overrides (tests, comparisons).
#include <string.h>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace headrace {

namespace {

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_neon() { return false; }
#elif defined(__aarch64__)
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_vnni() { return false; }
bool has_neon() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return true;  // every Apple silicon core has the dot product
#endif
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_vnni() { return false; }
bool has_neon() { return false; }
#endif

struct Candidate {
    const char* name;
    const Kernels* (*table)();
    bool (*is_supported)();
};

bool always() { return true; }

constexpr Candidate CANDIDATES[] = {
    {"avx512_vnni", kernels_avx512_vnni, has_vnni},
    {"avx512", kernels_avx512, has_avx512},
    {"avx2", kernels_avx2, has_avx2},
    {"neon", kernels_neon, has_neon},
    {"scalar", kernels_scalar, always},
};

}  // namespace

const Kernels* select_kernels(const char* name) {
    for (const Candidate& c : CANDIDATES) {
        if (name[0] != '\0' && strcmp(name, c.name) != 0) continue;
        if (c.is_supported() && c.table()) return c.table();
    }
    return nullptr;
}

}  // namespace headrace
