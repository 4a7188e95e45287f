// The kernels compiled for AVX-512 with VNNI: every algorithm is in the .inl files, only the flags
// differ.
#include "kernels.h"

#if defined(__x86_64__)
#define HR_AVX512 1
#define HR_VNNI 1
#define HR_ISA avx512_vnni
#include "simd.h"

#include "attention.inl"
#include "gemm.inl"
#include "norm.inl"
#include "pointwise.inl"
#include "roof.inl"

namespace headrace {

const Kernels* kernels_avx512_vnni() {
    static constexpr Kernels table = {
        "avx512_vnni",
        avx512_vnni::linear,
        avx512_vnni::quantize,
        avx512_vnni::rms_norm,
        avx512_vnni::rope,
        avx512_vnni::silu_mul,
        avx512_vnni::gelu_tanh_mul,
        avx512_vnni::softcap,
        avx512_vnni::kv_write,
        avx512_vnni::attend,
        avx512_vnni::attend_merge,
        avx512_vnni::exp_row,
        avx512_vnni::read_sum,
        avx512_vnni::dot_peak,
        avx512_vnni::fma_peak,
    };
    return &table;
}

}  // namespace headrace
#else
namespace headrace {
const Kernels* kernels_avx512_vnni() { return nullptr; }
}  // namespace headrace
#endif
