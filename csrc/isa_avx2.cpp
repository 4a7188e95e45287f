// The kernels compiled for avx2: every algorithm is in the .inl files, only the flags differ.
#include "kernels.h"

#if defined(__x86_64__)
#define HR_AVX2 1
#define HR_ISA avx2
#include "simd.h"

#include "attention.inl"
#include "gemm.inl"
#include "norm.inl"
#include "pointwise.inl"
#include "roof.inl"

namespace headrace {

const Kernels* kernels_avx2() {
    static constexpr Kernels table = {
        "avx2",         avx2::linear,   avx2::quantize,      avx2::rms_norm,
        avx2::rope,     avx2::silu_mul, avx2::gelu_tanh_mul, avx2::softcap,
        avx2::kv_write, avx2::attend,   avx2::attend_merge,  avx2::exp_row,
        avx2::read_sum, avx2::dot_peak, avx2::fma_peak,
    };
    return &table;
}

}  // namespace headrace
#else
namespace headrace {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace headrace
#endif
