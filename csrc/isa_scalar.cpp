// The kernels compiled for scalar: every algorithm is in the .inl files, only the flags differ.
#include "kernels.h"

#if 1
#define HR_SCALAR 1
#define HR_ISA scalar
#include "simd.h"

#include "attention.inl"
#include "gemm.inl"
#include "norm.inl"
#include "pointwise.inl"
#include "roof.inl"

namespace headrace {

const Kernels* kernels_scalar() {
    static constexpr Kernels table = {
        "scalar",         scalar::linear,   scalar::quantize,      scalar::rms_norm,
        scalar::rope,     scalar::silu_mul, scalar::gelu_tanh_mul, scalar::softcap,
        scalar::kv_write, scalar::attend,   scalar::attend_merge,  scalar::exp_row,
        scalar::read_sum, scalar::dot_peak, scalar::fma_peak,
    };
    return &table;
}

}  // namespace headrace
#else
namespace headrace {
const Kernels* kernels_scalar() { return nullptr; }
}  // namespace headrace
#endif
