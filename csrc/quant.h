// How weights and quantised activations lie in memory; shared by packing, kernels and bindings.
//
// A weight matrix [N, K] becomes panels of 16 output rows. Inside a panel K runs sequentially, four
// elements of each of the 16 rows side by side (one 64-byte row per four k), so that each vector
// lane owns one output row: its arithmetic is the same for any batch, thread count or vector width.
//
//   quantised panel = groups of 32 k, each [quants][scales: 16 or 2 * 16][mins: as many, if any]
//     U4: 4 bits unsigned; 64-byte row i of a group holds k4 = 2i in low and 2i+1 in high nibbles
//     S8: 8 bits, stored as q + 128 (what VNNI wants); 8 rows of 64 bytes per group of 32
//   float panel = [K][16] of f32, f16 or bf16
//
// value = scale * (q - zero_point) + min. Groups are 32 long; `is_split` means a scale per 16.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headrace {

constexpr int PANEL = 16;
constexpr int GROUP = 32;
constexpr int PAGE = 16;  // tokens per KV page; twin of PAGE_SIZE in backends/ops.py
constexpr int MAX_HEAD_DIM = 512;
constexpr int SPLIT = 512;  // keys per split of attention; splits may go to different threads

enum class Quant : uint8_t { U4, S8, F32, F16, BF16 };

struct Format {
    Quant quant = Quant::F32;
    uint8_t zero_point = 0;      // U4 only: 0 or 8 (S8 is always biased by 128)
    bool has_f32_scale = false;  // scales and mins as f32 instead of f16
    bool has_min = false;
    bool is_split = false;  // a scale per 16 elements

    bool is_float() const { return quant >= Quant::F32; }
    size_t element_bytes() const { return quant == Quant::F32 ? 4 : 2; }   // float formats
    size_t quant_bytes() const { return quant == Quant::U4 ? 256 : 512; }  // per group and panel
    size_t scale_bytes() const { return has_f32_scale ? 4 : 2; }
};

// Byte geometry of one panel. One linear stream: the hardware's prefetcher follows it, which three
// separate runs of quants, scales and mins do not allow (11 against 19 GB/s on one core).
struct PanelLayout {
    int groups = 0;
    size_t scales = 0;  // offsets within a group
    size_t mins = 0;
    size_t group_bytes = 0;
    size_t stride = 0;  // bytes from one panel to the next

    PanelLayout() = default;
    PanelLayout(const Format& f, int k) {
        if (f.is_float()) {
            stride = (static_cast<size_t>(k) * PANEL * f.element_bytes() + 63) & ~size_t{63};
            return;
        }
        groups = k / GROUP;
        size_t run = static_cast<size_t>(f.is_split ? 2 : 1) * PANEL * f.scale_bytes();
        scales = f.quant_bytes();
        mins = scales + run;
        group_bytes = mins + (f.has_min ? run : 0);
        stride = (static_cast<size_t>(groups) * group_bytes + 63) & ~size_t{63};
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
