// The kernels compiled for AVX-512 without VNNI: every algorithm is in the .inl files, only the
// flags differ.
#include "kernels.h"

#if defined(__x86_64__)
#define HR_AVX512 1
#define HR_ISA avx512
#include "simd.h"

#include "attention.inl"
#include "gemm.inl"
#include "norm.inl"
#include "pointwise.inl"
#include "roof.inl"

namespace headrace {

const Kernels* kernels_avx512() {
    static constexpr Kernels table = {
        "avx512",         avx512::linear,   avx512::quantize,      avx512::rms_norm,
        avx512::rope,     avx512::silu_mul, avx512::gelu_tanh_mul, avx512::softcap,
        avx512::kv_write, avx512::attend,   avx512::attend_merge,  avx512::exp_row,
        avx512::read_sum, avx512::dot_peak, avx512::fma_peak,
    };
    return &table;
}

}  // namespace headrace
#else
namespace headrace {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace headrace
#endif
