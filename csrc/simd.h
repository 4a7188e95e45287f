// One vector vocabulary for every ISA; included once per isa_*.cpp inside that file's own
// namespace.
//
// `nf` and `ni` are the native float and int32 vectors of LANES lanes. `V` is always 16 floats (one
// panel row, one KV page), built from 16 / LANES natives, so an algorithm written on V does the
// same arithmetic in the same order on every ISA. FMA is explicit, reductions have one fixed order,
// and every file is compiled with -ffp-contract=off: results are bitwise equal across ISAs.
//
// No std templates with external linkage in here: the linker might keep a wide copy and crash an
// older CPU.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(HR_AVX512) || defined(HR_AVX2)
#include <immintrin.h>
#elif defined(HR_NEON)
#include <arm_neon.h>
#endif

// The scalar table exists for correctness on any CPU; forced inlining there only slows the
// compiler.
#if defined(HR_SCALAR)
#define HR_INLINE static inline
#define HR_UNROLL
#else
#define HR_INLINE static inline __attribute__((always_inline))
#define HR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace headrace {
namespace HR_ISA {

HR_INLINE int imin(int a, int b) { return a < b ? a : b; }
HR_INLINE int imax(int a, int b) { return a > b ? a : b; }

// IEEE half to float, exact; float to half, round to nearest even. Integer code, for any machine.
HR_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u;
    uint32_t mantissa = h & 0x3ffu;
    uint32_t bits;
    if (exponent == 31u) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent != 0u) {
        bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
    } else {
        float f = static_cast<float>(mantissa) * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

HR_INLINE uint16_t float_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {  // NaN: keep the top bits of its payload, quiet (as F16C does)
        return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    }
    if (magnitude >= 0x477ff000u)
        return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (magnitude <
        0x38800000u) {  // subnormal half: add 0.5 so that the float unit rounds to 2^-24
        float m;
        memcpy(&m, &magnitude, 4);
        m += 0.5f;
        memcpy(&magnitude, &m, 4);
        return static_cast<uint16_t>(sign | (magnitude - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// ---------------------------------------------------------------- natives

#if defined(HR_AVX512)
constexpr int LANES = 16;
using nf = __m512;
using ni = __m512i;
HR_INLINE nf n_zero() { return _mm512_setzero_ps(); }
HR_INLINE nf n_set1(float x) { return _mm512_set1_ps(x); }
HR_INLINE nf n_load(const float* p) { return _mm512_loadu_ps(p); }
HR_INLINE void n_store(float* p, nf v) { _mm512_storeu_ps(p, v); }
HR_INLINE nf n_add(nf a, nf b) { return _mm512_add_ps(a, b); }
HR_INLINE nf n_sub(nf a, nf b) { return _mm512_sub_ps(a, b); }
HR_INLINE nf n_mul(nf a, nf b) { return _mm512_mul_ps(a, b); }
HR_INLINE nf n_div(nf a, nf b) { return _mm512_div_ps(a, b); }
HR_INLINE nf n_max(nf a, nf b) { return _mm512_max_ps(a, b); }
HR_INLINE nf n_min(nf a, nf b) { return _mm512_min_ps(a, b); }
HR_INLINE nf n_fma(nf a, nf b, nf c) { return _mm512_fmadd_ps(a, b, c); }
HR_INLINE nf n_load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HR_INLINE nf n_load_bf16(const uint16_t* p) {
    __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
HR_INLINE void n_store_f16(uint16_t* p, nf v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HR_INLINE ni i_zero() { return _mm512_setzero_si512(); }
HR_INLINE ni i_set1(int32_t x) { return _mm512_set1_epi32(x); }
HR_INLINE ni i_add(ni a, ni b) { return _mm512_add_epi32(a, b); }
HR_INLINE ni i_max(ni a, ni b) { return _mm512_max_epi32(a, b); }
HR_INLINE ni i_and(ni a, ni b) { return _mm512_and_si512(a, b); }
template <int N>
HR_INLINE ni i_shl(ni a) {
    return _mm512_slli_epi32(a, N);
}
template <int N>
HR_INLINE ni i_sra(ni a) {
    return _mm512_srai_epi32(a, N);
}
HR_INLINE int32_t i_sum(ni v) { return _mm512_reduce_add_epi32(v); }
HR_INLINE int32_t i_hmax(ni v) { return _mm512_reduce_max_epi32(v); }
// Lanes as int8, saturated.
HR_INLINE void i_store_int8(int8_t* p, ni v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(v));
}
HR_INLINE nf i_to_f(ni v) { return _mm512_cvtepi32_ps(v); }
HR_INLINE ni f_to_i(nf v) { return _mm512_cvtps_epi32(v); }  // round to nearest even
HR_INLINE ni f_bits(nf v) { return _mm512_castps_si512(v); }
HR_INLINE nf i_bits(ni v) { return _mm512_castsi512_ps(v); }
HR_INLINE ni i_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
HR_INLINE ni i_or(ni a, ni b) { return _mm512_or_si512(a, b); }
HR_INLINE ni i_xor(ni a, ni b) { return _mm512_xor_si512(a, b); }
template <int N>
HR_INLINE ni i_srl(ni a) {
    return _mm512_srli_epi32(a, N);
}
HR_INLINE nf n_load_i8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
HR_INLINE ni i_table(const int8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HR_INLINE ni i_lookup(ni table, ni index) { return _mm512_shuffle_epi8(table, index); }
#if defined(HR_VNNI)
HR_INLINE ni i_dot(ni acc, ni w, ni x) { return _mm512_dpbusd_epi32(acc, w, x); }
#else
HR_INLINE ni i_maddubs(ni w, ni x) { return _mm512_maddubs_epi16(w, x); }
HR_INLINE ni i_add16(ni a, ni b) { return _mm512_add_epi16(a, b); }
HR_INLINE ni i_widen(ni a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
HR_INLINE ni i_abs8(ni a) { return _mm512_abs_epi8(a); }
HR_INLINE ni i_sign8(ni a, ni by) {  // a where by >= 0, else -a
    return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(by), _mm512_setzero_si512(), a);
}
#endif

#elif defined(HR_AVX2)
constexpr int LANES = 8;
using nf = __m256;
using ni = __m256i;
HR_INLINE nf n_zero() { return _mm256_setzero_ps(); }
HR_INLINE nf n_set1(float x) { return _mm256_set1_ps(x); }
HR_INLINE nf n_load(const float* p) { return _mm256_loadu_ps(p); }
HR_INLINE void n_store(float* p, nf v) { _mm256_storeu_ps(p, v); }
HR_INLINE nf n_add(nf a, nf b) { return _mm256_add_ps(a, b); }
HR_INLINE nf n_sub(nf a, nf b) { return _mm256_sub_ps(a, b); }
HR_INLINE nf n_mul(nf a, nf b) { return _mm256_mul_ps(a, b); }
HR_INLINE nf n_div(nf a, nf b) { return _mm256_div_ps(a, b); }
HR_INLINE nf n_max(nf a, nf b) { return _mm256_max_ps(a, b); }
HR_INLINE nf n_min(nf a, nf b) { return _mm256_min_ps(a, b); }
HR_INLINE nf n_fma(nf a, nf b, nf c) { return _mm256_fmadd_ps(a, b, c); }
HR_INLINE nf n_load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HR_INLINE nf n_load_bf16(const uint16_t* p) {
    __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
HR_INLINE void n_store_f16(uint16_t* p, nf v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HR_INLINE ni i_zero() { return _mm256_setzero_si256(); }
HR_INLINE ni i_set1(int32_t x) { return _mm256_set1_epi32(x); }
HR_INLINE ni i_add(ni a, ni b) { return _mm256_add_epi32(a, b); }
HR_INLINE ni i_max(ni a, ni b) { return _mm256_max_epi32(a, b); }
HR_INLINE ni i_and(ni a, ni b) { return _mm256_and_si256(a, b); }
template <int N>
HR_INLINE ni i_shl(ni a) {
    return _mm256_slli_epi32(a, N);
}
template <int N>
HR_INLINE ni i_sra(ni a) {
    return _mm256_srai_epi32(a, N);
}
HR_INLINE int32_t i_sum(ni v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
HR_INLINE int32_t i_hmax(ni v) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
HR_INLINE void i_store_int8(int8_t* p, ni v) {
    __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(h, h));
}
HR_INLINE nf i_to_f(ni v) { return _mm256_cvtepi32_ps(v); }
HR_INLINE ni f_to_i(nf v) { return _mm256_cvtps_epi32(v); }
HR_INLINE ni f_bits(nf v) { return _mm256_castps_si256(v); }
HR_INLINE nf i_bits(ni v) { return _mm256_castsi256_ps(v); }
HR_INLINE ni i_load(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
HR_INLINE ni i_or(ni a, ni b) { return _mm256_or_si256(a, b); }
HR_INLINE ni i_xor(ni a, ni b) { return _mm256_xor_si256(a, b); }
template <int N>
HR_INLINE ni i_srl(ni a) {
    return _mm256_srli_epi32(a, N);
}
HR_INLINE nf n_load_i8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
HR_INLINE ni i_table(const int8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HR_INLINE ni i_lookup(ni table, ni index) { return _mm256_shuffle_epi8(table, index); }
HR_INLINE ni i_maddubs(ni w, ni x) { return _mm256_maddubs_epi16(w, x); }
HR_INLINE ni i_add16(ni a, ni b) { return _mm256_add_epi16(a, b); }
HR_INLINE ni i_widen(ni a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
HR_INLINE ni i_abs8(ni a) { return _mm256_abs_epi8(a); }
HR_INLINE ni i_sign8(ni a, ni by) { return _mm256_sign_epi8(a, by); }  // 0 where by is 0

#elif defined(HR_NEON)
constexpr int LANES = 4;
using nf = float32x4_t;
using ni = int32x4_t;
HR_INLINE nf n_zero() { return vdupq_n_f32(0.0f); }
HR_INLINE nf n_set1(float x) { return vdupq_n_f32(x); }
HR_INLINE nf n_load(const float* p) { return vld1q_f32(p); }
HR_INLINE void n_store(float* p, nf v) { vst1q_f32(p, v); }
HR_INLINE nf n_add(nf a, nf b) { return vaddq_f32(a, b); }
HR_INLINE nf n_sub(nf a, nf b) { return vsubq_f32(a, b); }
HR_INLINE nf n_mul(nf a, nf b) { return vmulq_f32(a, b); }
HR_INLINE nf n_div(nf a, nf b) { return vdivq_f32(a, b); }
// x86 max returns the second operand when either is NaN: do the same.
HR_INLINE nf n_max(nf a, nf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
HR_INLINE nf n_min(nf a, nf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
HR_INLINE nf n_fma(nf a, nf b, nf c) { return vfmaq_f32(c, a, b); }
HR_INLINE nf n_load_f16(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
HR_INLINE nf n_load_bf16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
HR_INLINE void n_store_f16(uint16_t* p, nf v) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}
HR_INLINE ni i_zero() { return vdupq_n_s32(0); }
HR_INLINE ni i_set1(int32_t x) { return vdupq_n_s32(x); }
HR_INLINE ni i_add(ni a, ni b) { return vaddq_s32(a, b); }
HR_INLINE ni i_max(ni a, ni b) { return vmaxq_s32(a, b); }
HR_INLINE ni i_and(ni a, ni b) { return vandq_s32(a, b); }
template <int N>
HR_INLINE ni i_shl(ni a) {
    return vshlq_n_s32(a, N);
}
template <int N>
HR_INLINE ni i_sra(ni a) {
    return vshrq_n_s32(a, N);
}
HR_INLINE int32_t i_sum(ni v) { return vaddvq_s32(v); }
HR_INLINE int32_t i_hmax(ni v) { return vmaxvq_s32(v); }
HR_INLINE void i_store_int8(int8_t* p, ni v) {
    int16x4_t h = vqmovn_s32(v);
    vst1_lane_s32(reinterpret_cast<int32_t*>(p),
                  vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(h, h))), 0);
}
HR_INLINE nf i_to_f(ni v) { return vcvtq_f32_s32(v); }
// Out of range and NaN give INT32_MIN, as cvtps2dq does.
HR_INLINE ni f_to_i(nf v) {
    return vbslq_s32(vcltq_f32(v, vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(v), vdupq_n_s32(INT32_MIN));
}
HR_INLINE ni f_bits(nf v) { return vreinterpretq_s32_f32(v); }
HR_INLINE nf i_bits(ni v) { return vreinterpretq_f32_s32(v); }
HR_INLINE ni i_load(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
HR_INLINE ni i_or(ni a, ni b) { return vorrq_s32(a, b); }
HR_INLINE ni i_xor(ni a, ni b) { return veorq_s32(a, b); }
template <int N>
HR_INLINE ni i_srl(ni a) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), N));
}
HR_INLINE nf n_load_i8(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    int16x8_t h = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(word)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(h)));
}
HR_INLINE ni i_table(const int8_t* p) { return vreinterpretq_s32_s8(vld1q_s8(p)); }
HR_INLINE ni i_lookup(ni table, ni index) {
    return vreinterpretq_s32_s8(
        vqtbl1q_s8(vreinterpretq_s8_s32(table), vreinterpretq_u8_s32(index)));
}
HR_INLINE ni i_dot(ni acc, ni w, ni x) {
    return vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}

#else  // scalar: the same names on 16 plain floats
constexpr int LANES = 16;
struct nf {
    float v[16];
};
struct ni {
    int32_t v[16];
};
#define HR_EACH for (int l = 0; l < 16; l++)
HR_INLINE nf n_set1(float x) {
    nf r;
    HR_EACH r.v[l] = x;
    return r;
}
HR_INLINE nf n_zero() { return n_set1(0.0f); }
HR_INLINE nf n_load(const float* p) {
    nf r;
    memcpy(r.v, p, 64);
    return r;
}
HR_INLINE void n_store(float* p, nf a) { memcpy(p, a.v, 64); }
HR_INLINE nf n_add(nf a, nf b) {
    HR_EACH a.v[l] += b.v[l];
    return a;
}
HR_INLINE nf n_sub(nf a, nf b) {
    HR_EACH a.v[l] -= b.v[l];
    return a;
}
HR_INLINE nf n_mul(nf a, nf b) {
    HR_EACH a.v[l] *= b.v[l];
    return a;
}
HR_INLINE nf n_div(nf a, nf b) {
    HR_EACH a.v[l] /= b.v[l];
    return a;
}
HR_INLINE nf n_max(nf a, nf b) {
    HR_EACH a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l];
    return a;
}
HR_INLINE nf n_min(nf a, nf b) {
    HR_EACH a.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l];
    return a;
}
HR_INLINE nf n_fma(nf a, nf b, nf c) {
    HR_EACH a.v[l] = fmaf(a.v[l], b.v[l], c.v[l]);
    return a;
}
HR_INLINE nf n_load_f16(const uint16_t* p) {
    nf r;
    HR_EACH r.v[l] = half_to_float(p[l]);
    return r;
}
HR_INLINE nf n_load_bf16(const uint16_t* p) {
    nf r;
    HR_EACH {
        uint32_t b = static_cast<uint32_t>(p[l]) << 16;
        memcpy(&r.v[l], &b, 4);
    }
    return r;
}
HR_INLINE void n_store_f16(uint16_t* p, nf a) { HR_EACH p[l] = float_to_half(a.v[l]); }
HR_INLINE ni i_set1(int32_t x) {
    ni r;
    HR_EACH r.v[l] = x;
    return r;
}
HR_INLINE ni i_zero() { return i_set1(0); }
HR_INLINE ni i_add(ni a, ni b) {
    HR_EACH a.v[l] += b.v[l];
    return a;
}
HR_INLINE ni i_max(ni a, ni b) {
    HR_EACH a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l];
    return a;
}
HR_INLINE ni i_and(ni a, ni b) {
    HR_EACH a.v[l] &= b.v[l];
    return a;
}
template <int N>
HR_INLINE ni i_shl(ni a) {
    HR_EACH a.v[l] = static_cast<int32_t>(static_cast<uint32_t>(a.v[l]) << N);
    return a;
}
template <int N>
HR_INLINE ni i_sra(ni a) {
    HR_EACH a.v[l] >>= N;
    return a;
}
HR_INLINE int32_t i_sum(ni a) {
    int32_t s = 0;
    HR_EACH s += a.v[l];
    return s;
}
HR_INLINE int32_t i_hmax(ni a) {
    int32_t m = a.v[0];
    HR_EACH m = m > a.v[l] ? m : a.v[l];
    return m;
}
HR_INLINE void i_store_int8(int8_t* p, ni a) {
    HR_EACH p[l] = static_cast<int8_t>(a.v[l] > 127 ? 127 : (a.v[l] < -128 ? -128 : a.v[l]));
}
HR_INLINE nf i_to_f(ni a) {
    nf r;
    HR_EACH r.v[l] = static_cast<float>(a.v[l]);
    return r;
}
HR_INLINE ni f_to_i(nf a) {
    ni r;
    HR_EACH {  // out of range and NaN give INT32_MIN, as cvtps2dq does
        float x = a.v[l];
        r.v[l] =
            x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(lrintf(x)) : INT32_MIN;
    }
    return r;
}
HR_INLINE ni f_bits(nf a) {
    ni r;
    memcpy(r.v, a.v, 64);
    return r;
}
HR_INLINE nf i_bits(ni a) {
    nf r;
    memcpy(r.v, a.v, 64);
    return r;
}
HR_INLINE ni i_load(const uint8_t* p) {
    ni r;
    memcpy(r.v, p, 64);
    return r;
}
HR_INLINE ni i_or(ni a, ni b) {
    HR_EACH a.v[l] |= b.v[l];
    return a;
}
HR_INLINE ni i_xor(ni a, ni b) {
    HR_EACH a.v[l] ^= b.v[l];
    return a;
}
template <int N>
HR_INLINE ni i_srl(ni a) {
    HR_EACH a.v[l] = static_cast<int32_t>(static_cast<uint32_t>(a.v[l]) >> N);
    return a;
}
HR_INLINE nf n_load_i8(const uint8_t* p) {
    nf r;
    HR_EACH r.v[l] = static_cast<float>(static_cast<int8_t>(p[l]));
    return r;
}
HR_INLINE ni i_table(const int8_t* p) {
    ni r;
    HR_EACH memcpy(&r.v[l], p + l % 4 * 4, 4);
    return r;
}
HR_INLINE ni i_lookup(ni table, ni index) {  // bytes of `index` are below 16
    uint8_t in[64], levels[16], out[64];
    ni r;
    memcpy(in, index.v, 64);
    memcpy(levels, table.v, 16);
    for (int i = 0; i < 64; i++) out[i] = levels[in[i]];
    memcpy(r.v, out, 64);
    return r;
}
HR_INLINE ni i_dot(ni acc, ni w, ni x) {
    HR_EACH {
        int8_t a[4], b[4];
        memcpy(a, &w.v[l], 4);
        memcpy(b, &x.v[l], 4);
        acc.v[l] += a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
    }
    return acc;
}
#undef HR_EACH
#endif

// ---------------------------------------------------------------- V: 16 floats

constexpr int PARTS = 16 / LANES;
struct V {
    nf p[PARTS];
};

#define HR_PARTS HR_UNROLL for (int i = 0; i < PARTS; i++)
HR_INLINE V v_set1(float x) {
    V r;
    HR_PARTS r.p[i] = n_set1(x);
    return r;
}
HR_INLINE V v_zero() { return v_set1(0.0f); }
HR_INLINE V v_load(const float* s) {
    V r;
    HR_PARTS r.p[i] = n_load(s + i * LANES);
    return r;
}
HR_INLINE V v_load(const uint16_t* s) {
    V r;
    HR_PARTS r.p[i] = n_load_f16(s + i * LANES);
    return r;
}
HR_INLINE void v_store(float* d, V a) { HR_PARTS n_store(d + i * LANES, a.p[i]); }
HR_INLINE void v_store(uint16_t* d, V a) { HR_PARTS n_store_f16(d + i * LANES, a.p[i]); }
HR_INLINE V v_add(V a, V b) {
    HR_PARTS a.p[i] = n_add(a.p[i], b.p[i]);
    return a;
}
HR_INLINE V v_sub(V a, V b) {
    HR_PARTS a.p[i] = n_sub(a.p[i], b.p[i]);
    return a;
}
HR_INLINE V v_mul(V a, V b) {
    HR_PARTS a.p[i] = n_mul(a.p[i], b.p[i]);
    return a;
}
HR_INLINE V v_div(V a, V b) {
    HR_PARTS a.p[i] = n_div(a.p[i], b.p[i]);
    return a;
}
HR_INLINE V v_max(V a, V b) {
    HR_PARTS a.p[i] = n_max(a.p[i], b.p[i]);
    return a;
}
HR_INLINE V v_fma(V a, V b, V c) {
    HR_PARTS a.p[i] = n_fma(a.p[i], b.p[i], c.p[i]);
    return a;
}

// The first n of 16 floats, the rest `fill`: rows whose width is no multiple of 16.
HR_INLINE V v_load_part(const float* s, int n, float fill) {
    float t[16];
    for (int l = 0; l < 16; l++) t[l] = l < n ? s[l] : fill;
    return v_load(t);
}
HR_INLINE void v_store_part(float* d, V a, int n) {
    float t[16];
    v_store(t, a);
    for (int l = 0; l < n; l++) d[l] = t[l];
}

// Sum and maximum of 16 lanes, halving: one fixed order everywhere.
HR_INLINE float v_sum(V a) {
    float t[16];
    v_store(t, a);
    HR_UNROLL for (int width = 8; width > 0; width /= 2) HR_UNROLL for (int l = 0; l < width; l++)
        t[l] += t[l + width];
    return t[0];
}
HR_INLINE float v_hmax(V a) {
    float t[16];
    v_store(t, a);
    float m = t[0];
    HR_UNROLL for (int l = 1; l < 16; l++) m = m > t[l] ? m : t[l];
    return m;
}

// exp(x), relative error below 2e-7 in [-87.6, 88.3]; exactly 0 below -87.7 (so -inf gives 0),
// infinity above 88.4 (so a gate x / (1 + exp(-x)) shuts completely).
// Range reduction by ln 2 in two parts (Cody and Waite), then a degree-6 polynomial.
HR_INLINE nf n_exp(nf x) {
    // Constants first: x86 min and max return the second operand on NaN, so NaN stays NaN.
    x = n_min(n_set1(89.0f), n_max(n_set1(-88.03f), x));  // at 89 the exponent bits are infinity's
    ni n = f_to_i(n_mul(x, n_set1(1.44269504f)));
    nf k = i_to_f(n);
    nf r = n_fma(k, n_set1(-0.693359375f), x);
    r = n_fma(k, n_set1(2.12194440e-4f), r);
    nf p = n_set1(1.9875691500e-4f);
    p = n_fma(p, r, n_set1(1.3981999507e-3f));
    p = n_fma(p, r, n_set1(8.3334519073e-3f));
    p = n_fma(p, r, n_set1(4.1665795894e-2f));
    p = n_fma(p, r, n_set1(1.6666665459e-1f));
    p = n_fma(p, r, n_set1(5.0000001201e-1f));
    p = n_add(n_fma(p, n_mul(r, r), r), n_set1(1.0f));
    return n_mul(p, i_bits(i_shl<23>(i_add(n, i_set1(127)))));
}
HR_INLINE V v_exp(V a) {
    HR_PARTS a.p[i] = n_exp(a.p[i]);
    return a;
}
HR_INLINE float exp1(float x) {
    float t[16];
    v_store(t, v_exp(v_set1(x)));
    return t[0];
}

}  // namespace HR_ISA
}  // namespace headrace
