// The kernels compiled for neon: every algorithm is in the .inl files, only the flags differ.
#include "kernels.h"

#if defined(__aarch64__)
#define HR_NEON 1
#define HR_ISA neon
#include "simd.h"

#include "attention.inl"
#include "gemm.inl"
#include "norm.inl"
#include "pointwise.inl"
#include "roof.inl"

namespace headrace {

const Kernels* kernels_neon() {
    static constexpr Kernels table = {
        "neon",         neon::linear,   neon::quantize,      neon::rms_norm,
        neon::rope,     neon::silu_mul, neon::gelu_tanh_mul, neon::softcap,
        neon::kv_write, neon::attend,   neon::attend_merge,  neon::exp_row,
        neon::read_sum, neon::dot_peak, neon::fma_peak,
    };
    return &table;
}

}  // namespace headrace
#else
namespace headrace {
const Kernels* kernels_neon() { return nullptr; }
}  // namespace headrace
#endif
