// What this machine can do at best: loops that do nothing but load, or nothing but multiply.
//
// The bare instruction that the kernels of gemm.inl lean on, on registers, in more independent
// chains than it has latency. Not kernels of a model: `headrace bench` measures others against
// them.
namespace headrace {
namespace HR_ISA {

constexpr int CHAINS = 12;  // an FMA takes 4 cycles on Zen 4 and Golden Cove and two begin in each

// HR_OPAQUE(x): the compiler must take x for changed, so that it neither hoists nor merges what
// reads it. Costs no instruction.
#if defined(HR_SCALAR)
#define HR_OPAQUE(x) __asm__ volatile("" : "+m"(x))
#elif defined(HR_NEON)
#define HR_OPAQUE(x) __asm__ volatile("" : "+w"(x))
#elif defined(HR_AVX512)
#define HR_OPAQUE(x) __asm__ volatile("" : "+v"(x))
#else
#define HR_OPAQUE(x) __asm__ volatile("" : "+x"(x))
#endif

HR_INLINE ni add_wrapped(ni a, ni b) {
#if defined(HR_SCALAR)  // vector units wrap; in C++ only unsigned integers may
    for (int l = 0; l < LANES; l++)
        a.v[l] =
            static_cast<int32_t>(static_cast<uint32_t>(a.v[l]) + static_cast<uint32_t>(b.v[l]));
    return a;
#else
    return i_add(a, b);
#endif
}

// The sum of all 32-bit words, wrapped; 64-byte rows. Four chains and the kernels' own prefetch.
static uint32_t read_sum(const uint8_t* data, size_t bytes) {
    const float* p = reinterpret_cast<const float*>(data);
    const size_t words = bytes / 4;
    ni sum[4] = {i_zero(), i_zero(), i_zero(), i_zero()};
    size_t i = 0;
    for (; i + 4 * LANES <= words; i += 4 * LANES) {
        if (i % 64 == 0) {  // four lines
            HR_UNROLL for (int l = 0; l < 4; l++)
                __builtin_prefetch(data + 4 * i + PREFETCH + 64 * static_cast<size_t>(l));
        }
        HR_UNROLL for (int c = 0; c < 4; c++) sum[c] =
            add_wrapped(sum[c], f_bits(n_load(p + i + static_cast<size_t>(c * LANES))));
    }
    for (; i < words; i += LANES) sum[0] = add_wrapped(sum[0], f_bits(n_load(p + i)));
    uint32_t lanes[LANES], all = 0;
    const ni total = add_wrapped(add_wrapped(sum[0], sum[1]), add_wrapped(sum[2], sum[3]));
    n_store(reinterpret_cast<float*>(lanes), i_bits(total));
    for (int l = 0; l < LANES; l++) all += lanes[l];
    return all;
}

// Lanes' worth of four int8 products each, added to acc by the fewest instructions there are.
HR_INLINE ni peak_dot(ni acc, ni w, ni x) {
#if defined(HR_MADDUBS)
    return i_add16(acc, i_maddubs(w, x));  // widened once per half a group in gemm.inl
#else
    return i_dot(acc, w, x);
#endif
}

// Multiplications and additions done: `rounds` of int8 dots.
static double dot_peak(int64_t rounds) {
    ni sum[CHAINS], w = i_zero(), x = i_zero();
    HR_OPAQUE(x);
    HR_UNROLL for (int c = 0; c < CHAINS; c++) sum[c] = i_zero();
    for (int64_t r = 0; r < rounds; r++) HR_UNROLL for (int c = 0; c < CHAINS; c++) {
            HR_OPAQUE(w);
            sum[c] = peak_dot(sum[c], w, x);
        }
    HR_UNROLL for (int c = 0; c < CHAINS; c++) HR_OPAQUE(sum[c]);
    return 2.0 * 4 * LANES * CHAINS * static_cast<double>(rounds);
}

// The same for float32 fused multiply-adds.
static double fma_peak(int64_t rounds) {
    const nf a = n_set1(0.999f), b = n_set1(1e-3f);
    nf sum[CHAINS];
    HR_UNROLL for (int c = 0; c < CHAINS; c++) {
        sum[c] = n_zero();
        HR_OPAQUE(sum[c]);
    }
    for (int64_t r = 0; r < rounds; r++)
        HR_UNROLL for (int c = 0; c < CHAINS; c++) sum[c] = n_fma(sum[c], a, b);
    HR_UNROLL for (int c = 0; c < CHAINS; c++) HR_OPAQUE(sum[c]);
    return 2.0 * LANES * CHAINS * static_cast<double>(rounds);
}

#undef HR_OPAQUE

}  // namespace HR_ISA
}  // namespace headrace
