// How weights and quantised activations lie in memory; shared by packing, kernels and bindings.
//
// A weight matrix [N, K] becomes panels of 16 output rows. Inside a panel K runs sequentially, four
// elements of each of the 16 rows side by side (one 64-byte row per four k), so that each vector
// lane owns one output row: its arithmetic is the same for any batch, thread count or vector width.
//
//   quantised panel = blocks; one group of 32 k:   [quants][scales][mins, if any]
//     or eight groups, when scales are products:   [d: 16 f16][-dmin: 16 f16][scales: int8][mins]
//                                                  [quants]
//   quants of a group = a plane of 2, 4 or 8 bits, then for 3, 5 and 6 bits a plane of the rest;
//     64-byte row i of a plane of b bits holds k4 = i * 8 / b + j in bits [j * b, j * b + b)
//   float panel = [K][16] of f32, f16 or bf16
//
// value = scale * (q - zero_point) + min. Groups are 32 long; `is_split` means a scale per 16.
// All is one linear stream: the hardware's prefetcher follows it, which separate runs of quants,
// scales and mins do not allow (11 against 19 GB/s on one core).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

constexpr int PANEL = 16;
constexpr int GROUP = 32;
constexpr int PAGE = 16;  // tokens per KV page; twin of PAGE_SIZE in backends/ops.py
constexpr int MAX_HEAD_DIM = 512;
constexpr int SPLIT = 512;  // keys per split of attention; splits may go to different threads

// U2 to U6: unsigned bits. S8: q + 128 (what VNNI wants). IQ4, E2M1: 4 bits that index LEVELS.
enum class Quant : uint8_t { U2, U3, U4, U5, U6, IQ4, E2M1, S8, F32, F16, BF16 };
// PRODUCT: f16 per 256 k times int8 per scale, the f32 product that decoding would form.
enum class Scale : uint8_t { F16, BF16, PRODUCT };

// Non-linear 4-bit levels of IQ4_NL and IQ4_XS; E2M1 levels of MXFP4, doubled to be integers.
constexpr int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t E2M1_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Format {
    Quant quant = Quant::F32;
    uint8_t zero_point = 0;  // of U2 to U6: 0 or a power of two
    Scale scale = Scale::F16;
    bool has_min = false;
    bool is_split = false;  // a scale per 16 elements

    // Always inlined: a copy compiled for one ISA must not be the one the linker keeps.
    __attribute__((always_inline)) constexpr bool operator==(const Format& o) const {
        return quant == o.quant && zero_point == o.zero_point && scale == o.scale &&
               has_min == o.has_min && is_split == o.is_split;
    }
    constexpr bool is_float() const { return quant >= Quant::F32; }
    constexpr bool has_levels() const { return quant == Quant::IQ4 || quant == Quant::E2M1; }
    constexpr const int8_t* levels() const {
        return quant == Quant::IQ4 ? IQ4_LEVELS : E2M1_LEVELS;
    }
    constexpr size_t element_bytes() const { return quant == Quant::F32 ? 4 : 2; }  // floats
    constexpr int low_bits() const {  // of the first plane
        return quant == Quant::S8 ? 8 : quant <= Quant::U3 ? 2 : 4;
    }
    constexpr int high_bits() const {  // of the second plane; 0: there is none
        if (quant == Quant::U6) return 2;
        return quant == Quant::U3 || quant == Quant::U5 ? 1 : 0;
    }
};

// Every quantised format there is a kernel for. If you add one, also give it a kind in pack.cpp.
namespace formats {
constexpr Format U4_ZERO8{Quant::U4, 8};
constexpr Format U4_MIN{Quant::U4, 0, Scale::F16, true};
constexpr Format U5_ZERO16{Quant::U5, 16};
constexpr Format U5_MIN{Quant::U5, 0, Scale::F16, true};
constexpr Format S8{Quant::S8};
constexpr Format U2_K{Quant::U2, 0, Scale::PRODUCT, true, true};
constexpr Format U3_K{Quant::U3, 4, Scale::PRODUCT, false, true};
constexpr Format U4_K{Quant::U4, 0, Scale::PRODUCT, true};
constexpr Format U5_K{Quant::U5, 0, Scale::PRODUCT, true};
constexpr Format U6_K{Quant::U6, 32, Scale::PRODUCT, false, true};
constexpr Format IQ4{Quant::IQ4};
constexpr Format IQ4_K{Quant::IQ4, 0, Scale::PRODUCT};
constexpr Format E2M1{Quant::E2M1, 0, Scale::BF16};
constexpr Format ALL[] = {U4_ZERO8, U4_MIN, U5_ZERO16, U5_MIN, S8,    U2_K, U3_K,
                          U4_K,     U5_K,   U6_K,      IQ4,    IQ4_K, E2M1};
constexpr size_t COUNT = sizeof(ALL) / sizeof(ALL[0]);
}  // namespace formats

// Byte geometry of the groups of a quantised format, from the start of a panel.
struct GroupLayout {
    size_t block_groups = 1;
    size_t block_bytes = 0;
    size_t quant_bytes = 0;  // of a group
    size_t run = 0;          // bytes of a group's scales, and of its mins
    size_t quants = 0, scales = 0, mins = 0, min_factors = 0;  // offsets within a block

    constexpr GroupLayout() = default;
    constexpr explicit GroupLayout(const Format& f) {
        const bool is_product = f.scale == Scale::PRODUCT;
        quant_bytes = static_cast<size_t>(f.low_bits() + f.high_bits()) * GROUP * PANEL / 8;
        run = static_cast<size_t>(f.is_split ? 2 : 1) * PANEL * (is_product ? 1 : 2);
        block_groups = is_product ? 8 : 1;
        const size_t runs = run * block_groups, all_quants = quant_bytes * block_groups;
        min_factors = 2 * PANEL;
        scales = is_product ? 4 * PANEL : all_quants;
        mins = scales + runs;
        const size_t end = mins + (f.has_min ? runs : 0);
        quants = is_product ? end : 0;
        block_bytes = end + (is_product ? all_quants : 0);
    }

    size_t block_at(int g) const { return static_cast<size_t>(g) / block_groups * block_bytes; }
    size_t quants_at(int g) const { return within(g, quants, quant_bytes); }
    size_t scales_at(int g) const { return within(g, scales, run); }
    size_t mins_at(int g) const { return within(g, mins, run); }

private:
    size_t within(int g, size_t first, size_t step) const {
        return block_at(g) + first + static_cast<size_t>(g) % block_groups * step;
    }
};

struct PanelLayout {
    int groups = 0;
    GroupLayout group;
    size_t stride = 0;  // bytes from one panel to the next

    PanelLayout() = default;
    PanelLayout(const Format& f, int k) {
        size_t bytes = static_cast<size_t>(k) * PANEL * f.element_bytes();
        if (!f.is_float()) {
            groups = k / GROUP;
            group = GroupLayout(f);
            bytes = static_cast<size_t>(groups) / group.block_groups * group.block_bytes;
        }
        stride = (bytes + 63) & ~size_t{63};
    }
};

// Quantised activations: int8 with a scale per 16 elements (per 32 the divergence from float32 is
// twice as large, docs/LOG.md). Tokens lie in tiles of TT <= MAX_TILE; per group of 32 a tile block
// of words
//   q[8][TT] (four int8 of one token in each word), s[2][TT], ss[TT], z[2][TT]
// s: scale of each half; ss = s0 * sum0(q) + s1 * sum1(q), what a min multiplies; z = -128 * sum(q)
// of each half, what a bias of 128 on the weights adds too much.
constexpr int MAX_TILE = 8;
constexpr int TILE_WORDS = 13;  // per group and token
constexpr int HALF = GROUP / 2;

}  // namespace headrace
