// y[t][n] = sum_k x[t][k] * w[n][k] (+ bias), float and quantised weights.
//
// Quantised: per group of 32, exact integer dots of int8 activations and weights, one for each half
// (activations have a scale per 16), then
//   f = fma(dot1, s1, dot0 * s0);  acc = fma(f, scale_w, acc);  acc = fma(min_w, s0 sum0 + s1 sum1,
//   acc)
// in group order. Float: acc = fma(w, x, acc) in k order. Each lane is one output row, so tile
// sizes, threads and ISAs cannot change a bit. Bound: weight bytes at one token, integer throughput
// from about five. Layouts: quant.h.
namespace headrace {
namespace HR_ISA {

// ---------------------------------------------------------------- integer dots of one group

// acc[t] += dot over k4 in [K0, K1) of weight rows `w` (64-byte rows) and activation words `x`.
#if defined(HR_AVX512)

template <int TT, int K0, int K1>
HR_INLINE void dot_u4(const uint8_t* w, const int32_t* x, ni* acc) {
    const __m512i low = _mm512_set1_epi8(15);
    HR_UNROLL for (int i = K0 / 2; i < K1 / 2; i++) {
        __m512i r = _mm512_loadu_si512(w + 64 * i);
        __m512i a = _mm512_and_si512(r, low);
        __m512i b = _mm512_and_si512(_mm512_srli_epi16(r, 4), low);
        HR_UNROLL for (int t = 0; t < TT; t++) {
            acc[t] = _mm512_dpbusd_epi32(acc[t], a, _mm512_set1_epi32(x[(2 * i) * TT + t]));
            acc[t] = _mm512_dpbusd_epi32(acc[t], b, _mm512_set1_epi32(x[(2 * i + 1) * TT + t]));
        }
    }
}

template <int TT, int K0, int K1>
HR_INLINE void dot_s8(const uint8_t* w, const int32_t* x, ni* acc) {
    HR_UNROLL for (int i = K0; i < K1; i++) {
        __m512i r = _mm512_loadu_si512(w + 64 * i);
        HR_UNROLL for (int t = 0; t < TT; t++) acc[t] =
            _mm512_dpbusd_epi32(acc[t], r, _mm512_set1_epi32(x[i * TT + t]));
    }
}
constexpr bool S8_IS_BIASED = true;  // dot_s8 multiplies by q + 128

#elif defined(HR_AVX2)

// Four maddubs results meet in one int16 lane: at most 4 * 2 * 15 * 127 = 15,240, no overflow.
template <int TT, int K0, int K1>
HR_INLINE void dot_u4(const uint8_t* w, const int32_t* x, ni* acc) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i s[TT];
    HR_UNROLL for (int i = K0 / 2; i < K1 / 2; i++) {
        __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * i));
        __m256i a = _mm256_and_si256(r, low);
        __m256i b = _mm256_and_si256(_mm256_srli_epi16(r, 4), low);
        HR_UNROLL for (int t = 0; t < TT; t++) {
            __m256i p = _mm256_maddubs_epi16(a, _mm256_set1_epi32(x[(2 * i) * TT + t]));
            s[t] = i == K0 / 2 ? p : _mm256_add_epi16(s[t], p);
            p = _mm256_maddubs_epi16(b, _mm256_set1_epi32(x[(2 * i + 1) * TT + t]));
            s[t] = _mm256_add_epi16(s[t], p);
            __asm__ volatile(""
                             : "+x"(s[t]));  // keep the sum in a register: GCC spills it otherwise
        }
    }
    const __m256i ones = _mm256_set1_epi16(1);
    HR_UNROLL for (int t = 0; t < TT; t++) acc[t] =
        _mm256_add_epi32(acc[t], _mm256_madd_epi16(s[t], ones));
}

// |w| <= 128 and |x| <= 127: a maddubs pair is at most 2 * 128 * 127 = 32,512, then widened at
// once.
template <int TT, int K0, int K1>
HR_INLINE void dot_s8(const uint8_t* w, const int32_t* x, ni* acc) {
    const __m256i bias = _mm256_set1_epi8(static_cast<char>(0x80));
    const __m256i ones = _mm256_set1_epi16(1);
    HR_UNROLL for (int i = K0; i < K1; i++) {
        __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * i));
        r = _mm256_xor_si256(r, bias);
        __m256i magnitude = _mm256_abs_epi8(r);
        HR_UNROLL for (int t = 0; t < TT; t++) {
            __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x[i * TT + t]), r);
            __m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_x), ones);
            acc[t] = _mm256_add_epi32(acc[t], p);
        }
    }
}
constexpr bool S8_IS_BIASED = false;

#elif defined(HR_NEON)

template <int TT, int K0, int K1>
HR_INLINE void dot_u4(const uint8_t* w, const int32_t* x, ni* acc) {
    HR_UNROLL for (int i = K0 / 2; i < K1 / 2; i++) {
        uint8x16_t r = vld1q_u8(w + 64 * i);
        int8x16_t a = vreinterpretq_s8_u8(vandq_u8(r, vdupq_n_u8(15)));
        int8x16_t b = vreinterpretq_s8_u8(vshrq_n_u8(r, 4));
        HR_UNROLL for (int t = 0; t < TT; t++) {
            acc[t] = vdotq_s32(acc[t], a, vreinterpretq_s8_s32(vdupq_n_s32(x[(2 * i) * TT + t])));
            acc[t] =
                vdotq_s32(acc[t], b, vreinterpretq_s8_s32(vdupq_n_s32(x[(2 * i + 1) * TT + t])));
        }
    }
}

template <int TT, int K0, int K1>
HR_INLINE void dot_s8(const uint8_t* w, const int32_t* x, ni* acc) {
    HR_UNROLL for (int i = K0; i < K1; i++) {
        int8x16_t r = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 64 * i), vdupq_n_u8(0x80)));
        HR_UNROLL for (int t = 0; t < TT; t++) acc[t] =
            vdotq_s32(acc[t], r, vreinterpretq_s8_s32(vdupq_n_s32(x[i * TT + t])));
    }
}
constexpr bool S8_IS_BIASED = false;

#else

HR_INLINE int32_t dot4(const int8_t* w, int32_t x) {
    int8_t b[4];
    memcpy(b, &x, 4);
    return w[0] * b[0] + w[1] * b[1] + w[2] * b[2] + w[3] * b[3];
}

template <int TT, int K0, int K1>
HR_INLINE void dot_u4(const uint8_t* w, const int32_t* x, ni* acc) {
    for (int i = K0 / 2; i < K1 / 2; i++)
        for (int l = 0; l < 16; l++) {
            int8_t a[4], b[4];
            for (int j = 0; j < 4; j++) {
                a[j] = static_cast<int8_t>(w[64 * i + 4 * l + j] & 15);
                b[j] = static_cast<int8_t>(w[64 * i + 4 * l + j] >> 4);
            }
            for (int t = 0; t < TT; t++)
                acc[t].v[l] += dot4(a, x[(2 * i) * TT + t]) + dot4(b, x[(2 * i + 1) * TT + t]);
        }
}

template <int TT, int K0, int K1>
HR_INLINE void dot_s8(const uint8_t* w, const int32_t* x, ni* acc) {
    for (int i = K0; i < K1; i++)
        for (int l = 0; l < 16; l++) {
            int8_t a[4];
            for (int j = 0; j < 4; j++) a[j] = static_cast<int8_t>(w[64 * i + 4 * l + j] ^ 0x80);
            for (int t = 0; t < TT; t++) acc[t].v[l] += dot4(a, x[i * TT + t]);
        }
}
constexpr bool S8_IS_BIASED = false;

#endif

// ---------------------------------------------------------------- quantised tiles

template <bool F32>
HR_INLINE nf load_scale(const uint8_t* p, int index) {
    return F32 ? n_load(reinterpret_cast<const float*>(p) + index)
               : n_load_f16(reinterpret_cast<const uint16_t*>(p) + index);
}

HR_INLINE float word_float(int32_t w) {
    float f;
    memcpy(&f, &w, 4);
    return f;
}

// Words of the tile block: scales of the halves, weighted sum, corrections of the halves.
template <int TT>
constexpr int S_AT = 8 * TT;
template <int TT>
constexpr int SS_AT = 10 * TT;
template <int TT>
constexpr int Z_AT = 11 * TT;

// acc[t] = dot of half H (k4 in [4 H, 4 H + 4)), zero point taken off.
template <Quant Q, int ZP, int TT, int H>
HR_INLINE void half_dot(const uint8_t* w, const int32_t* x, ni* acc) {
    const int32_t* z = x + Z_AT<TT> + H * TT;
    HR_UNROLL for (int t = 0; t < TT; t++) {
        if constexpr (Q == Quant::S8 && S8_IS_BIASED) {
            acc[t] = i_set1(z[t]);
        } else if constexpr (Q == Quant::U4 && ZP == 8) {
            acc[t] = i_sra<4>(i_set1(z[t]));  // -8 * sum: exact, z is a multiple of 128
        } else {
            acc[t] = i_zero();
        }
    }
    if constexpr (Q == Quant::U4) {
        dot_u4<TT, 4 * H, 4 * H + 4>(w, x, acc);
    } else {
        dot_s8<TT, 4 * H, 4 * H + 4>(w, x, acc);
    }
}

// One weight scale for the group: sum += (dot0 * s0 + dot1 * s1) * d + min * ss.
template <Quant Q, int ZP, bool F32, bool MIN, int TT>
HR_INLINE void add_group(const uint8_t* w, const uint8_t* scales, const uint8_t* mins, int lane,
                         const int32_t* x, nf* sum) {
    ni acc[TT];
    nf f[TT];
    half_dot<Q, ZP, TT, 0>(w, x, acc);
    HR_UNROLL for (int t = 0; t < TT; t++) f[t] =
        n_mul(i_to_f(acc[t]), n_set1(word_float(x[S_AT<TT> + t])));
    half_dot<Q, ZP, TT, 1>(w, x, acc);
    HR_UNROLL for (int t = 0; t < TT; t++) f[t] =
        n_fma(i_to_f(acc[t]), n_set1(word_float(x[S_AT<TT> + TT + t])), f[t]);
    const nf d = load_scale<F32>(scales, lane);
    HR_UNROLL for (int t = 0; t < TT; t++) sum[t] = n_fma(f[t], d, sum[t]);
    if constexpr (MIN) {
        const nf m = load_scale<F32>(mins, lane);
        HR_UNROLL for (int t = 0; t < TT; t++) sum[t] =
            n_fma(m, n_set1(word_float(x[SS_AT<TT> + t])), sum[t]);
    }
}

// A weight scale per half: sum += dot * d * s + min * s * sum(q), first half first.
template <Quant Q, int ZP, bool F32, bool MIN, int TT, int H>
HR_INLINE void add_half(const uint8_t* w, const uint8_t* scales, const uint8_t* mins, int lane,
                        const int32_t* x, nf* sum) {
    ni acc[TT];
    half_dot<Q, ZP, TT, H>(w, x, acc);
    const nf d = load_scale<F32>(scales, H * PANEL + lane);
    const int32_t* s = x + S_AT<TT> + H * TT;
    HR_UNROLL for (int t = 0; t < TT; t++) sum[t] =
        n_fma(n_mul(i_to_f(acc[t]), d), n_set1(word_float(s[t])), sum[t]);
    if constexpr (MIN) {
        const nf m = load_scale<F32>(mins, H * PANEL + lane);
        const int32_t* z = x + Z_AT<TT> + H * TT;
        HR_UNROLL for (int t = 0; t < TT; t++) {
            const float ss = word_float(s[t]) * (static_cast<float>(z[t]) * -0x1p-7f);
            sum[t] = n_fma(m, n_set1(ss), sum[t]);
        }
    }
}

// Decode is nothing but streaming weights: ask for what comes PREFETCH bytes later. The distance is
// the best of 1, 2, 4 and 8 KiB on Zen 4; past the end of the weights a prefetch does nothing.
constexpr size_t PREFETCH = 4096;

// LANES rows of one panel against TT tokens.
template <Quant Q, int ZP, bool F32, bool MIN, bool SPLIT, int TT>
HR_INLINE void quant_rows(const LinearArgs& a, const uint8_t* panel, int lane, bool is_first,
                          const int32_t* x, nf* sum) {
    constexpr int words = TILE_WORDS * TT;
    constexpr size_t quants = Q == Quant::U4 ? 256 : 512;
    constexpr size_t run = PANEL * (F32 ? 4 : 2) * (SPLIT ? 2 : 1);
    constexpr size_t bytes = quants + run * (MIN ? 2 : 1);
    HR_UNROLL for (int t = 0; t < TT; t++) sum[t] = n_zero();
    const uint8_t* group = panel;
    for (int g = 0; g < a.layout.groups; g++, group += bytes, x += words) {
        if (is_first && lane == 0) {
            HR_UNROLL for (size_t i = 0; i < bytes; i += 64)
                __builtin_prefetch(group + PREFETCH + i);
        }
        const uint8_t* w = group + 4 * lane;
        const uint8_t* scales = group + quants;
        const uint8_t* mins = scales + run;
        if constexpr (SPLIT) {
            add_half<Q, ZP, F32, MIN, TT, 0>(w, scales, mins, lane, x, sum);
            add_half<Q, ZP, F32, MIN, TT, 1>(w, scales, mins, lane, x, sum);
        } else {
            add_group<Q, ZP, F32, MIN, TT>(w, scales, mins, lane, x, sum);
        }
    }
}

// Lanes past the last row of the matrix are computed on zero weights and dropped here.
template <int TT>
HR_INLINE void store_rows(const LinearArgs& a, int row, int token, nf* sum) {
    int left = a.n - row;
    if (left >= LANES) {
        if (a.bias) {
            nf b = n_load(a.bias + row);
            HR_UNROLL for (int t = 0; t < TT; t++) sum[t] = n_add(sum[t], b);
        }
        HR_UNROLL for (int t = 0; t < TT; t++)
            n_store(a.y + static_cast<size_t>(token + t) * a.ldy + row, sum[t]);
        return;
    }
    for (int t = 0; t < TT; t++) {
        float out[16];
        n_store(out, sum[t]);
        for (int l = 0; l < left; l++)
            a.y[static_cast<size_t>(token + t) * a.ldy + row + l] =
                a.bias ? out[l] + a.bias[row + l] : out[l];
    }
}

template <Quant Q, int ZP, bool F32, bool MIN, bool SPLIT, int TT>
static void quant_panel(const LinearArgs& a, int p, int token) {
    const uint8_t* panel = a.weight + static_cast<size_t>(p) * a.layout.stride;
    const size_t group_words = static_cast<size_t>(TILE_WORDS) * a.layout.groups;
    const int32_t* x = a.xq + group_words * static_cast<size_t>(token);
    for (int lane = 0; lane < PANEL; lane += LANES) {
        nf sum[TT];
        quant_rows<Q, ZP, F32, MIN, SPLIT, TT>(a, panel, lane, token == 0, x, sum);
        store_rows<TT>(a, p * PANEL + lane, token, sum);
    }
}

// The tile of `count` < MAX_TILE tokens that is left over: its own kernel for each count.
template <Quant Q, int ZP, bool F32, bool MIN, bool SPLIT, int TT = MAX_TILE - 1>
static void quant_tail(const LinearArgs& a, int p, int token, int count) {
    if constexpr (TT > 0) {
        if (count == TT) return quant_panel<Q, ZP, F32, MIN, SPLIT, TT>(a, p, token);
        quant_tail<Q, ZP, F32, MIN, SPLIT, TT - 1>(a, p, token, count);
    }
}

template <Quant Q, int ZP, bool F32, bool MIN, bool SPLIT>
static void quant_linear(const LinearArgs& a) {
    for (int p = a.begin; p < a.end; p++) {
        int token = 0;
        for (; token + MAX_TILE <= a.tokens; token += MAX_TILE)
            quant_panel<Q, ZP, F32, MIN, SPLIT, MAX_TILE>(a, p, token);
        quant_tail<Q, ZP, F32, MIN, SPLIT>(a, p, token, a.tokens - token);
    }
}

// ---------------------------------------------------------------- float tiles

template <Quant Q>
HR_INLINE nf load_float(const uint8_t* p, size_t index) {
    if constexpr (Q == Quant::F32) return n_load(reinterpret_cast<const float*>(p) + index);
    if constexpr (Q == Quant::F16) return n_load_f16(reinterpret_cast<const uint16_t*>(p) + index);
    return n_load_bf16(reinterpret_cast<const uint16_t*>(p) + index);
}

// NP panels against TT tokens: NP * TT independent chains hide the latency of the FMA.
template <Quant Q, int NP, int TT>
static void float_tile(const LinearArgs& a, int p, int token) {
    const uint8_t* panel = a.weight + static_cast<size_t>(p) * a.layout.stride;
    const float* x = a.x + static_cast<size_t>(token) * a.ldx;
    const size_t step = a.layout.stride / a.format.element_bytes();
    for (int lane = 0; lane < PANEL; lane += LANES) {
        nf sum[NP][TT];
        HR_UNROLL for (int j = 0; j < NP; j++) HR_UNROLL for (int t = 0; t < TT; t++) sum[j][t] =
            n_zero();
        for (int k = 0; k < a.k; k++) {
            HR_UNROLL for (int j = 0; j < NP; j++) {
                nf w = load_float<Q>(panel, j * step + static_cast<size_t>(k) * PANEL + lane);
                HR_UNROLL for (int t = 0; t < TT; t++) sum[j][t] =
                    n_fma(w, n_set1(x[static_cast<size_t>(t) * a.ldx + k]), sum[j][t]);
            }
        }
        HR_UNROLL for (int j = 0; j < NP; j++)
            store_rows<TT>(a, (p + j) * PANEL + lane, token, sum[j]);
    }
}

template <Quant Q, int NP>
static void float_tokens(const LinearArgs& a, int p) {
    int token = 0;
    for (; token + 4 <= a.tokens; token += 4) float_tile<Q, NP, 4>(a, p, token);
    for (; token < a.tokens; token++) float_tile<Q, NP, 1>(a, p, token);
}

template <Quant Q>
static void float_linear(const LinearArgs& a) {
    constexpr int NP = LANES == 16 ? 4 : 2;
    int p = a.begin;
    for (; p + NP <= a.end; p += NP) float_tokens<Q, NP>(a, p);
    for (; p < a.end; p++) float_tokens<Q, 1>(a, p);
}

// ---------------------------------------------------------------- entry

// If you add a format, also edit pack.cpp and the table in docs/architecture.md.
static void linear(const LinearArgs& a) {
    const Format& f = a.format;
    switch (f.quant) {
        case Quant::F32: return float_linear<Quant::F32>(a);
        case Quant::F16: return float_linear<Quant::F16>(a);
        case Quant::BF16: return float_linear<Quant::BF16>(a);
        case Quant::U4:
            if (f.zero_point == 8) return quant_linear<Quant::U4, 8, false, false, false>(a);
            if (f.has_f32_scale) return quant_linear<Quant::U4, 0, true, true, false>(a);
            return quant_linear<Quant::U4, 0, false, true, false>(a);
        case Quant::S8:
            if (f.is_split)
                return f.has_min ? quant_linear<Quant::S8, 0, true, true, true>(a)
                                 : quant_linear<Quant::S8, 0, true, false, true>(a);
            if (f.has_f32_scale)
                return f.has_min ? quant_linear<Quant::S8, 0, true, true, false>(a)
                                 : quant_linear<Quant::S8, 0, true, false, false>(a);
            return f.has_min ? quant_linear<Quant::S8, 0, false, true, false>(a)
                             : quant_linear<Quant::S8, 0, false, false, false>(a);
    }
}

// ---------------------------------------------------------------- activations to int8

// The scale of 16 floats: largest magnitude / 127, found on the bit patterns so that NaN and
// infinity survive as the scale and reach the output of their own token instead of vanishing.
HR_INLINE float half_scale(const float* x, float* inverse) {
    ni m = i_zero();
    const ni magnitude = i_set1(0x7fffffff);
    HR_UNROLL for (int i = 0; i < HALF; i += LANES) m =
        i_max(m, i_and(f_bits(n_load(x + i)), magnitude));
    const float largest = word_float(i_hmax(m));
    // Below 1e-36 the inverse would overflow; such a half is zero at float precision anyway.
    *inverse = largest >= 1e-36f ? 127.0f / largest : 0.0f;
    return largest / 127.0f;
}

// 16 floats to int8; returns their scale, adds up their integers.
HR_INLINE float quantize_half(const float* x, int8_t* q, int32_t* sum) {
    float inverse;
    const float scale = half_scale(x, &inverse);
    *sum = 0;
    HR_UNROLL for (int i = 0; i < HALF; i += LANES) {
        // |x * inverse| <= 127 but for NaN, whose token is lost already: max keeps it off -128,
        // which has no opposite in int8
        ni v = i_max(f_to_i(n_mul(n_load(x + i), n_set1(inverse))), i_set1(-127));
        *sum += i_sum(v);
        i_store_int8(q + i, v);
    }
    return scale;
}

// One group of one token into its column of the tile block.
HR_INLINE void quantize_group(const float* x, int tokens, int32_t* out) {
    int8_t q[GROUP];
    int32_t sum[2];
    float scale[2];
    HR_UNROLL for (int h = 0; h < 2; h++) scale[h] =
        quantize_half(x + h * HALF, q + h * HALF, &sum[h]);
    const float ss =
        fmaf(scale[1], static_cast<float>(sum[1]), scale[0] * static_cast<float>(sum[0]));
    HR_UNROLL for (int i = 0; i < 8; i++) memcpy(out + i * tokens, q + 4 * i, 4);
    HR_UNROLL for (int h = 0; h < 2; h++) {
        memcpy(out + (8 + h) * tokens, &scale[h], 4);
        out[(11 + h) * tokens] = -128 * sum[h];
    }
    memcpy(out + 10 * tokens, &ss, 4);
}

static void quantize(const float* x, int ldx, int tokens, int k, int32_t* out) {
    for (int g = 0; g < k / GROUP; g++, out += TILE_WORDS * tokens)
        for (int t = 0; t < tokens; t++)
            quantize_group(x + static_cast<size_t>(t) * ldx + g * GROUP, tokens, out + t);
}

}  // namespace HR_ISA
}  // namespace headrace
