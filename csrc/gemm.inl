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

// ---------------------------------------------------------------- weights of a group

// dpbusd multiplies unsigned weights, so 8-bit ones come with a bias of 128. The others take signed
// ones; for maddubs the sign of an 8-bit weight moves to the activation.
#if defined(HR_VNNI)
constexpr bool IS_BIASED = true;
#else
constexpr bool IS_BIASED = false;
#endif
#if (defined(HR_AVX512) && !defined(HR_VNNI)) || defined(HR_AVX2)
#define HR_MADDUBS 1
#endif

HR_INLINE ni each_byte(int value) { return i_set1(static_cast<int32_t>(value * 0x01010101u)); }

// Bits [FROM, FROM + N) of every byte, moved to bit TO; all other bits are zero.
template <int N, int FROM, int TO>
HR_INLINE ni take_bits(ni r) {
    if constexpr (FROM > TO) r = i_srl<FROM - TO>(r);
    if constexpr (FROM < TO) r = i_shl<TO - FROM>(r);
    return i_and(r, each_byte(((1 << N) - 1) << TO));
}

// The four weights at K4 of each lane, one a byte: `w` is the group's quants at the first lane.
template <Format F, int K4>
HR_INLINE ni weight_bytes(const uint8_t* w, ni levels) {
    constexpr int low = F.low_bits(), high = F.high_bits(), fit = 8 / low;
    ni q = i_load(w + 64 * (K4 / fit));
    if constexpr (low == 8) return IS_BIASED ? q : i_xor(q, each_byte(0x80));
    q = take_bits<low, K4 % fit * low, 0>(q);
    if constexpr (F.has_levels()) return i_lookup(levels, q);
    if constexpr (high > 0) {
        constexpr int high_fit = 8 / high;
        const ni r = i_load(w + low * GROUP * PANEL / 8 + 64 * (K4 / high_fit));
        q = i_or(q, take_bits<high, K4 % high_fit * high, low>(r));
    }
    return q;
}

// What weight_bytes has too much: each dot starts at -zero_point * sum(x).
template <Format F>
constexpr int zero_point() {
    if (F.quant == Quant::S8 || F.has_levels()) return IS_BIASED ? 128 : 0;
    return F.zero_point;
}

// The table of levels as weight_bytes looks it up.
template <Format F>
HR_INLINE ni load_levels() {
    if constexpr (!F.has_levels()) return i_zero();
    const ni table = i_table(F.levels());
    return IS_BIASED ? i_xor(table, each_byte(0x80)) : table;
}

// ---------------------------------------------------------------- integer dots of half a group

template <int TS>
struct TileAt {  // word offsets in a tile block of TS tokens: quant.h
    static constexpr int S = 8 * TS, SS = 10 * TS, Z = 11 * TS;
};

// NB vectors of rows against TT tokens: registers.
template <int NB, int TT>
struct Ints {
    ni v[NB][TT];
};
template <int NB, int TT>
struct Floats {
    nf v[NB][TT];
};

template <Format F, int NB, int TT, int TS, int H>
HR_INLINE void start_dots(const int32_t* x, Ints<NB, TT>& acc) {
    constexpr int zp = zero_point<F>();
    HR_UNROLL for (int t = 0; t < TT; t++) {
        ni start = i_zero();
        if constexpr (zp > 0) {  // exact: z is a multiple of 128
            constexpr int shift = __builtin_ctz(128u / zp);
            start = i_set1(x[TileAt<TS>::Z + H * TS + t]);
            if constexpr (shift > 0) start = i_sra<shift>(start);
        }
        HR_UNROLL for (int b = 0; b < NB; b++) acc.v[b][t] = start;
    }
}

#if defined(HR_MADDUBS)

// Products of unsigned weights below 2^bits in one int16 lane: so many k4 that no sum overflows.
template <Format F>
constexpr int k4_per_sum() {
    if (F.low_bits() == 8 || F.has_levels()) return 1;  // 2 * 128 * 127 = 32,512
    const int largest = (1 << (F.low_bits() + F.high_bits())) - 1;
    const int fit = 32767 / (2 * 127 * largest);
    return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

template <Format F>
HR_INLINE ni multiply(ni w, ni magnitude, ni x) {
    if constexpr (F.low_bits() == 8 || F.has_levels()) return i_maddubs(magnitude, i_sign8(x, w));
    return i_maddubs(w, x);
}

template <Format F, int NB, int TT, int TS, int K4>
HR_INLINE void dot_k4(const uint8_t* const* w, const int32_t* x, ni levels, Ints<NB, TT>& sum,
                      Ints<NB, TT>& acc) {
    constexpr int many = k4_per_sum<F>();
    HR_UNROLL for (int b = 0; b < NB; b++) {
        const ni q = weight_bytes<F, K4>(w[b], levels), magnitude = i_abs8(q);
        HR_UNROLL for (int t = 0; t < TT; t++) {
            ni& s = sum.v[b][t];
            const ni p = multiply<F>(q, magnitude, i_set1(x[K4 * TS + t]));
            s = K4 % many == 0 ? p : i_add16(s, p);
            // keep the sum in a register: GCC spills it otherwise
            __asm__ volatile("" : "+v"(s));
            if constexpr (K4 % many == many - 1) acc.v[b][t] = i_add(acc.v[b][t], i_widen(s));
        }
    }
}

#else

template <Format F, int NB, int TT, int TS, int K4>
HR_INLINE void dot_k4(const uint8_t* const* w, const int32_t* x, ni levels, Ints<NB, TT>&,
                      Ints<NB, TT>& acc) {
    ni q[NB];
    HR_UNROLL for (int b = 0; b < NB; b++) q[b] = weight_bytes<F, K4>(w[b], levels);
    HR_UNROLL for (int t = 0; t < TT; t++) {
        const ni xt = i_set1(x[K4 * TS + t]);
        HR_UNROLL for (int b = 0; b < NB; b++) acc.v[b][t] = i_dot(acc.v[b][t], q[b], xt);
    }
}

#endif

// acc = dots of half H: k4 in [4 H, 4 H + 4), zero point taken off.
template <Format F, int NB, int TT, int TS, int H>
HR_INLINE void half_dots(const uint8_t* const* w, const int32_t* x, ni levels, Ints<NB, TT>& acc) {
    Ints<NB, TT> sum;
    start_dots<F, NB, TT, TS, H>(x, acc);
    dot_k4<F, NB, TT, TS, 4 * H>(w, x, levels, sum, acc);
    dot_k4<F, NB, TT, TS, 4 * H + 1>(w, x, levels, sum, acc);
    dot_k4<F, NB, TT, TS, 4 * H + 2>(w, x, levels, sum, acc);
    dot_k4<F, NB, TT, TS, 4 * H + 3>(w, x, levels, sum, acc);
}

// ---------------------------------------------------------------- quantised tiles

HR_INLINE float word_float(int32_t w) {
    float f;
    memcpy(&f, &w, 4);
    return f;
}

// Scale or min `index` of a group; `factor` is what products have in common.
template <Format F>
HR_INLINE nf load_scale(const uint8_t* run, int index, nf factor) {
    if constexpr (F.scale == Scale::F16)
        return n_load_f16(reinterpret_cast<const uint16_t*>(run) + index);
    if constexpr (F.scale == Scale::BF16)
        return n_load_bf16(reinterpret_cast<const uint16_t*>(run) + index);
    return n_mul(factor, n_load_i8(run + index));
}

// NB vectors of rows as they pass through the groups: where each vector's panel has arrived, and
// its lane in it.
template <int NB>
struct Stream {
    const uint8_t* block[NB];
    int lane;
    nf d[NB], min_d[NB];
};

template <Format F, int NB>
HR_INLINE void begin_block(Stream<NB>& s) {
    constexpr GroupLayout layout(F);
    HR_UNROLL for (int b = 0; b < NB; b++) {
        s.d[b] = s.min_d[b] = n_zero();
        if constexpr (F.scale == Scale::PRODUCT) {
            s.d[b] = n_load_f16(reinterpret_cast<const uint16_t*>(s.block[b]) + s.lane);
            const uint8_t* factors = s.block[b] + layout.min_factors;
            if constexpr (F.has_min)
                s.min_d[b] = n_load_f16(reinterpret_cast<const uint16_t*>(factors) + s.lane);
        }
    }
}

// One weight scale for the group: sum += (dot0 * s0 + dot1 * s1) * d + min * ss.
template <Format F, int NB, int TT, int TS>
HR_INLINE void add_group(const Stream<NB>& s, size_t group, const int32_t* x, ni levels,
                         Floats<NB, TT>& sum) {
    constexpr GroupLayout layout(F);
    const uint8_t* w[NB];
    Ints<NB, TT> acc;
    Floats<NB, TT> f;
    HR_UNROLL for (int b = 0; b < NB; b++) w[b] =
        s.block[b] + layout.quants + group * layout.quant_bytes + 4 * s.lane;
    half_dots<F, NB, TT, TS, 0>(w, x, levels, acc);
    HR_UNROLL for (int t = 0; t < TT; t++) {
        const nf s0 = n_set1(word_float(x[TileAt<TS>::S + t]));
        HR_UNROLL for (int b = 0; b < NB; b++) f.v[b][t] = n_mul(i_to_f(acc.v[b][t]), s0);
    }
    half_dots<F, NB, TT, TS, 1>(w, x, levels, acc);
    HR_UNROLL for (int t = 0; t < TT; t++) {
        const nf s1 = n_set1(word_float(x[TileAt<TS>::S + TS + t]));
        HR_UNROLL for (int b = 0; b < NB; b++) f.v[b][t] =
            n_fma(i_to_f(acc.v[b][t]), s1, f.v[b][t]);
    }
    HR_UNROLL for (int b = 0; b < NB; b++) {
        const uint8_t* scales = s.block[b] + layout.scales + group * layout.run;
        const nf d = load_scale<F>(scales, s.lane, s.d[b]);
        HR_UNROLL for (int t = 0; t < TT; t++) sum.v[b][t] = n_fma(f.v[b][t], d, sum.v[b][t]);
    }
    if constexpr (F.has_min) {
        nf m[NB];
        HR_UNROLL for (int b = 0; b < NB; b++) m[b] =
            load_scale<F>(s.block[b] + layout.mins + group * layout.run, s.lane, s.min_d[b]);
        HR_UNROLL for (int t = 0; t < TT; t++) {
            const nf ss = n_set1(word_float(x[TileAt<TS>::SS + t]));
            HR_UNROLL for (int b = 0; b < NB; b++) sum.v[b][t] = n_fma(m[b], ss, sum.v[b][t]);
        }
    }
}

// A weight scale per half: sum += dot * d * s + min * s * sum(q), first half first.
template <Format F, int NB, int TT, int TS, int H>
HR_INLINE void add_half(const Stream<NB>& s, size_t group, const int32_t* x, ni levels,
                        Floats<NB, TT>& sum) {
    constexpr GroupLayout layout(F);
    const uint8_t* w[NB];
    const int32_t* scale = x + TileAt<TS>::S + H * TS;
    const int32_t* z = x + TileAt<TS>::Z + H * TS;
    const int index = H * PANEL + s.lane;
    Ints<NB, TT> acc;
    HR_UNROLL for (int b = 0; b < NB; b++) w[b] =
        s.block[b] + layout.quants + group * layout.quant_bytes + 4 * s.lane;
    half_dots<F, NB, TT, TS, H>(w, x, levels, acc);
    HR_UNROLL for (int b = 0; b < NB; b++) {
        const uint8_t* scales = s.block[b] + layout.scales + group * layout.run;
        const nf d = load_scale<F>(scales, index, s.d[b]);
        HR_UNROLL for (int t = 0; t < TT; t++) sum.v[b][t] =
            n_fma(n_mul(i_to_f(acc.v[b][t]), d), n_set1(word_float(scale[t])), sum.v[b][t]);
        if constexpr (F.has_min) {
            const uint8_t* mins = s.block[b] + layout.mins + group * layout.run;
            const nf m = load_scale<F>(mins, index, s.min_d[b]);
            HR_UNROLL for (int t = 0; t < TT; t++) {
                const float ss = word_float(scale[t]) * (static_cast<float>(z[t]) * -0x1p-7f);
                sum.v[b][t] = n_fma(m, n_set1(ss), sum.v[b][t]);
            }
        }
    }
}

// Decode is nothing but streaming weights: ask for what comes PREFETCH bytes later. The distance is
// the best of 1, 2, 4 and 8 KiB on Zen 4; past the end of the weights a prefetch does nothing.
constexpr size_t PREFETCH = 4096;

HR_INLINE void prefetch_lines(const uint8_t* p, size_t bytes) {
    HR_UNROLL for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + PREFETCH + i);
}

// sum = NB vectors of rows against TT tokens of a tile block of TS.
template <Format F, int NB, int TT, int TS>
HR_INLINE void quant_rows(Stream<NB> s, int groups, bool is_first, const int32_t* x,
                          Floats<NB, TT>& sum) {
    constexpr GroupLayout layout(F);
    const ni levels = load_levels<F>();
    HR_UNROLL for (int b = 0; b < NB; b++) HR_UNROLL for (int t = 0; t < TT; t++) sum.v[b][t] =
        n_zero();
    for (int g = 0; g < groups; g += static_cast<int>(layout.block_groups)) {
        begin_block<F, NB>(s);
        if (is_first && layout.block_groups > 1) prefetch_lines(s.block[0], layout.quants);
        for (size_t j = 0; j < layout.block_groups; j++, x += TILE_WORDS * TS) {
            constexpr size_t bytes =
                layout.block_groups > 1 ? layout.quant_bytes : layout.block_bytes;
            if (is_first) prefetch_lines(s.block[0] + layout.quants + j * bytes, bytes);
            if constexpr (F.is_split) {
                add_half<F, NB, TT, TS, 0>(s, j, x, levels, sum);
                add_half<F, NB, TT, TS, 1>(s, j, x, levels, sum);
            } else {
                add_group<F, NB, TT, TS>(s, j, x, levels, sum);
            }
        }
        HR_UNROLL for (int b = 0; b < NB; b++) s.block[b] += layout.block_bytes;
    }
}

HR_INLINE const int32_t* tile_words(const LinearArgs& a, int token) {
    return a.xq + static_cast<size_t>(TILE_WORDS) * a.layout.groups * static_cast<size_t>(token);
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

template <Format F, int TT>
static void quant_panel(const LinearArgs& a, int p, int token) {
    const uint8_t* panel = a.weight + static_cast<size_t>(p) * a.layout.stride;
    const int32_t* x = tile_words(a, token);
    for (int lane = 0; lane < PANEL; lane += LANES) {
        Stream<1> s{{panel}, lane, {}, {}};
        Floats<1, TT> sum;
        quant_rows<F, 1, TT, TT>(s, a.layout.groups, token == 0 && lane == 0, x, sum);
        store_rows<TT>(a, p * PANEL + lane, token, sum.v[0]);
    }
}

// The tile of `count` < MAX_TILE tokens that is left over: its own kernel for each count.
template <Format F, int TT = MAX_TILE - 1>
static void quant_tail(const LinearArgs& a, int p, int token, int count) {
    if constexpr (TT > 0) {
        if (count == TT) return quant_panel<F, TT>(a, p, token);
        quant_tail<F, TT - 1>(a, p, token, count);
    }
}

// Two panels against half a tile: with many tokens multiplying is the bound, and so each activation
// that is loaded serves two vectors of weights.
template <Format F>
static void quant_pair(const LinearArgs& a, int p, int token) {
    constexpr int TT = MAX_TILE / 2;
    const uint8_t* panel = a.weight + static_cast<size_t>(p) * a.layout.stride;
    const Stream<2> s{{panel, panel + a.layout.stride}, 0, {}, {}};
    for (int half = 0; half < MAX_TILE; half += TT) {
        const int32_t* x = tile_words(a, token) + half;
        Floats<2, TT> sum;
        quant_rows<F, 2, TT, MAX_TILE>(s, a.layout.groups, false, x, sum);
        for (int b = 0; b < 2; b++) store_rows<TT>(a, (p + b) * PANEL, token + half, sum.v[b]);
    }
}

constexpr bool HAS_PAIRS = LANES == PANEL;
constexpr int PAIRS_PER_RUN = 4;

template <Format F>
static void quant_linear(const LinearArgs& a) {
    const int whole = a.tokens / MAX_TILE * MAX_TILE, left = a.tokens - whole;
    int p = a.begin;
    if constexpr (HAS_PAIRS) {
        // tile by tile, so that a tile's activations are in the first cache for all pairs of a run
        for (; a.tokens > MAX_TILE && p + 2 <= a.end;) {
            const int end = imin(p + 2 * PAIRS_PER_RUN, p + (a.end - p) / 2 * 2);
            for (int token = 0; token < whole; token += MAX_TILE)
                for (int q = p; q < end; q += 2) quant_pair<F>(a, q, token);
            for (; p < end; p++) quant_tail<F>(a, p, whole, left);
        }
    }
    for (; p < a.end; p++) {
        for (int token = 0; token < whole; token += MAX_TILE) quant_panel<F, MAX_TILE>(a, p, token);
        quant_tail<F>(a, p, whole, left);
    }
}

template <size_t I = 0>
static void quant_dispatch(const LinearArgs& a) {
    if constexpr (I < formats::COUNT) {
        if (a.format == formats::ALL[I]) return quant_linear<formats::ALL[I]>(a);
        quant_dispatch<I + 1>(a);
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

static void linear(const LinearArgs& a) {
    switch (a.format.quant) {
        case Quant::F32: return float_linear<Quant::F32>(a);
        case Quant::F16: return float_linear<Quant::F16>(a);
        case Quant::BF16: return float_linear<Quant::BF16>(a);
        default: return quant_dispatch(a);
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
