// The function table of plain-pointer kernels: the whole contract between an ISA and the program.
//
// Each isa_*.cpp fills one table. No allocation, no exceptions, no Python below this line; sizes
// and alignment were checked above it.
#pragma once

#include <stdint.h>

#include "quant.h"

namespace headrace {

// Panels [begin, end) of a weight against T tokens.
struct LinearArgs {
    const uint8_t* weight;
    Format format;
    PanelLayout layout;
    int n, k;
    int begin, end;
    const float* bias;  // [n] or null
    const float* x;     // float formats: [T][ldx]
    int ldx;
    const int32_t* xq;  // quantised formats: tiles
    int tokens;
    float* y;  // [T][ldy]
    int ldy;
};

// One query tile (consecutive tokens of one sequence) against one KV head.
struct AttendArgs {
    const float* q;  // first token's first head of the group
    int q_stride;    // floats from token to token
    float* out;      // same geometry as q
    int out_stride;
    int head_dim;
    int group;       // query heads per KV head
    const void* kv;  // this layer, this KV head
    bool is_f16;
    size_t page_elements;  // elements from page to page
    const int32_t* pages;
    int position;  // of the first token
    int tokens;
    float scale;
    int window;
    float softcap;
    // When set: only keys of split `split`, and each row's result goes here unmerged.
    float* partial;  // [splits][tokens * group][partial_stride]
    int split;
};

// A row's weighted values, then its largest score and sum; a multiple of 16 floats.
constexpr size_t partial_stride(int head_dim) { return static_cast<size_t>(head_dim) + 16; }

struct KvWriteArgs {
    const float* k;  // [num_kv_heads][head_dim] of one token
    const float* v;
    void* kv;  // this layer
    bool is_f16;
    int num_kv_heads, head_dim;
    size_t page_elements;
    int page, slot;
};

struct Kernels {
    const char* name;
    void (*linear)(const LinearArgs&);
    // x [tokens][ldx] -> one tile block (tokens <= MAX_TILE).
    void (*quantize)(const float* x, int ldx, int tokens, int k, int32_t* out);
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
    void (*rope)(const float* x, const float* cos_sin, int heads, int head_dim, int rotary_dim,
                 bool is_interleaved, float* y);
    void (*silu_mul)(const float* gate, const float* up, int n, float* y);
    void (*gelu_tanh_mul)(const float* gate, const float* up, int n, float* y);
    void (*softcap)(const float* x, int n, float cap, float* y);
    void (*kv_write)(const KvWriteArgs&);
    void (*attend)(const AttendArgs&);
    void (*attend_merge)(const AttendArgs&, int splits);
    void (*exp)(const float* x, int n, float* y);  // for tests
    // The machine's roof, for benchmarks: roof.inl.
    uint32_t (*read_sum)(const uint8_t* data, size_t bytes);  // bytes: a multiple of 64
    double (*dot_peak)(int64_t rounds);
    double (*fma_peak)(int64_t rounds);
};

// Null when the running CPU lacks the ISA or it was not compiled in.
const Kernels* kernels_scalar();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_neon();
const Kernels* select_kernels(const char* name);  // "" picks the best; null when unavailable

}  // namespace headrace
