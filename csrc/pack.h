// Stored blocks (GGUF and safetensors kinds) to panels; and one row back to floats, exactly.
#pragma once

#include <stdint.h>
#include <memory>

#include "quant.h"
#include "slab.h"

namespace headrace {

class Pool;

// Block kinds as stored; numbers are GGML type ids. C++ twin of formats/blocks.py.
enum class Kind : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    BF16 = 30,
    MXFP4 = 39,
};

// An owned, packed matrix [n, k].
struct Weight {
    Kind kind = Kind::F32;
    Format format;
    PanelLayout layout;
    int n = 0, k = 0, panels = 0;
    Span span;
    uint8_t* data = nullptr;  // of the span: 64-byte aligned, panels * layout.stride bytes

    size_t bytes() const { return static_cast<size_t>(panels) * layout.stride; }
};

bool kind_geometry(Kind kind, int* block_elements, int* block_bytes);  // false: unknown kind

// Source of rows: `parts` matrices stacked along n, each row `row_bytes` long.
struct PackPart {
    const uint8_t* data;
    int rows;
};

// Throws std::bad_alloc. k must be a multiple of the kind's block (checked by the caller).
std::unique_ptr<Weight> pack(Kind kind, const PackPart* parts, int num_parts, int k, Pool& pool);

// Row `row` as floats [k], with the same roundings as formats/blocks.py.
void unpack_row(const Weight& w, int row, float* out);

}  // namespace headrace
