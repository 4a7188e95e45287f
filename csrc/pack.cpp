// Repacking: every stored block kind becomes integers, scales and mins of one of a few panel
// formats.
//
// Nothing is re-quantised: integers are the stored ones, and scales are kept as f16 where the file
// has f16, else as the f32 product that decoding would form (k-quants: d * sub-scale). Block
// layouts: the GGUF specification; see formats/blocks.py for the readable twin.
#include "pack.h"

#include <stdlib.h>
#include <string.h>
#include <new>
#include <vector>

#include "pool.h"

#define HR_SCALAR 1
#define HR_ISA packing
#include "simd.h"

namespace headrace {

namespace {

using packing::float_to_half;
using packing::half_to_float;

// One row on its way from blocks to panels.
struct Row {
    std::vector<uint8_t> q;    // [k], as the panel stores it
    std::vector<float> scale;  // [k / 32] or [k / 16]
    std::vector<float> min;
};

struct KindInfo {
    Kind kind;
    int elements, bytes;
    Format format;
};

constexpr KindInfo KINDS[] = {
    {Kind::F32, 1, 4, {Quant::F32}},
    {Kind::F16, 1, 2, {Quant::F16}},
    {Kind::BF16, 1, 2, {Quant::BF16}},
    {Kind::Q4_0, 32, 18, {Quant::U4, 8, false, false, false}},
    {Kind::Q4_1, 32, 20, {Quant::U4, 0, false, true, false}},
    {Kind::Q5_0, 32, 22, {Quant::S8, 0, false, false, false}},
    {Kind::Q5_1, 32, 24, {Quant::S8, 0, false, true, false}},
    {Kind::Q8_0, 32, 34, {Quant::S8, 0, false, false, false}},
    {Kind::Q2_K, 256, 84, {Quant::S8, 0, true, true, true}},
    {Kind::Q3_K, 256, 110, {Quant::S8, 0, true, false, true}},
    {Kind::Q4_K, 256, 144, {Quant::U4, 0, true, true, false}},
    {Kind::Q5_K, 256, 176, {Quant::S8, 0, true, true, false}},
    {Kind::Q6_K, 256, 210, {Quant::S8, 0, true, false, true}},
    {Kind::IQ4_NL, 32, 18, {Quant::S8, 0, false, false, false}},
    {Kind::IQ4_XS, 256, 136, {Quant::S8, 0, true, false, false}},
    {Kind::MXFP4, 32, 17, {Quant::S8, 0, true, false, false}},
};

const KindInfo* find(Kind kind) {
    for (const KindInfo& info : KINDS)
        if (info.kind == kind) return &info;
    return nullptr;
}

uint16_t read16(const uint8_t* p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}
float read_half(const uint8_t* p) { return half_to_float(read16(p)); }
uint8_t biased(int q) { return static_cast<uint8_t>(q + 128); }

// Non-linear 4-bit levels of IQ4_NL and IQ4_XS; E2M1 levels of MXFP4, doubled to be integers.
constexpr int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t E2M1_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

int nibble(const uint8_t* q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

// 12 bytes of eight 6-bit scales and eight 6-bit mins (Q4_K, Q5_K).
void scale_min(const uint8_t* s, int j, int* scale, int* min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
        *min = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
    }
}

float e8m0_half(uint8_t e) {  // 2^(e - 127) / 2, exact down to the subnormal ends
    uint32_t bits = e >= 2 ? static_cast<uint32_t>(e - 1) << 23 : 0x00200000u << e;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// ---- one block to integers, scales, mins; g = index of its first group of 32

// Sixteen bytes to 32 values below 16: low nibbles first.
void split_nibbles(const uint8_t* p, uint8_t* q) {
    for (int i = 0; i < 16; i++) {
        q[i] = p[i] & 15;
        q[i + 16] = p[i] >> 4;
    }
}

void unpack_q4(const uint8_t* b, bool has_min, Row& r, size_t g) {
    r.scale[g] = read_half(b);
    if (has_min) r.min[g] = read_half(b + 2);
    split_nibbles(b + (has_min ? 4 : 2), &r.q[g * GROUP]);
}

void unpack_q5(const uint8_t* b, bool has_min, Row& r, size_t g) {
    uint8_t* q = &r.q[g * GROUP];
    uint32_t high;
    memcpy(&high, b + (has_min ? 4 : 2), 4);
    r.scale[g] = read_half(b);
    if (has_min) r.min[g] = read_half(b + 2);
    split_nibbles(b + (has_min ? 8 : 6), q);
    const int zero_point = has_min ? 0 : 16;
    for (int i = 0; i < GROUP; i++) q[i] = biased((q[i] | (((high >> i) & 1) << 4)) - zero_point);
}

void unpack_q8_0(const uint8_t* b, Row& r, size_t g) {
    r.scale[g] = read_half(b);
    for (int i = 0; i < GROUP; i++) r.q[g * GROUP + i] = b[2 + i] ^ 0x80;
}

void unpack_iq4_nl(const uint8_t* b, Row& r, size_t g) {
    r.scale[g] = read_half(b);
    for (int i = 0; i < GROUP; i++) r.q[g * GROUP + i] = biased(IQ4_LEVELS[nibble(b + 2, i)]);
}

void unpack_mxfp4(const uint8_t* b, Row& r, size_t g) {
    r.scale[g] = e8m0_half(b[0]);
    for (int i = 0; i < GROUP; i++) r.q[g * GROUP + i] = biased(E2M1_LEVELS[nibble(b + 1, i)]);
}

void unpack_q2_k(const uint8_t* b, Row& r, size_t g) {
    float d = read_half(b + 80), dmin = read_half(b + 82);
    for (int i = 0; i < 256; i++) {
        int run = i / 128, within = i % 128;  // 32 bytes hold 128 weights, two bits each
        int q = (b[16 + 32 * run + within % 32] >> (2 * (within / 32))) & 3;
        r.q[g * GROUP + i] = biased(q);
    }
    for (int j = 0; j < 16; j++) {
        r.scale[2 * g + j] = d * static_cast<float>(b[j] & 15);
        r.min[2 * g + j] = -(dmin * static_cast<float>(b[j] >> 4));
    }
}

void unpack_q3_k(const uint8_t* b, Row& r, size_t g) {
    const uint8_t *mask = b, *low = b + 32, *s = b + 96;
    float d = read_half(b + 108);
    for (int i = 0; i < 256; i++) {
        int run = i / 128, within = i % 128;
        int q = (low[32 * run + within % 32] >> (2 * (within / 32))) & 3;
        int has_high = (mask[i % 32] >> (i / 32)) & 1;
        r.q[g * GROUP + i] = biased(has_high ? q : q - 4);
    }
    for (int j = 0; j < 16; j++) {
        int lo = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
        int hi = (s[8 + j % 4] >> (2 * (j / 4))) & 3;
        r.scale[2 * g + j] = d * static_cast<float>((lo | (hi << 4)) - 32);
    }
}

void unpack_q45_k(const uint8_t* b, Row& r, size_t g, bool is_five) {
    float d = read_half(b), dmin = read_half(b + 2);
    const uint8_t* high = b + 16;
    const uint8_t* q = b + (is_five ? 48 : 16);
    for (int j = 0; j < 8; j++) {
        int scale, min;
        scale_min(b + 4, j, &scale, &min);
        r.scale[g + j] = d * static_cast<float>(scale);
        r.min[g + j] = -(dmin * static_cast<float>(min));
        for (int i = 0; i < GROUP; i++) {
            uint8_t byte = q[32 * (j / 2) + i];
            int v = j % 2 ? byte >> 4 : byte & 15;
            if (is_five) v |= ((high[i] >> j) & 1) << 4;
            r.q[(g + j) * GROUP + i] = is_five ? biased(v) : static_cast<uint8_t>(v);
        }
    }
}

void unpack_q6_k(const uint8_t* b, Row& r, size_t g) {
    const uint8_t *low = b, *high = b + 128;
    float d = read_half(b + 208);
    for (int i = 0; i < 256; i++) {
        int run = i / 128, within = i % 128, quarter = within / 32, l = within % 32;
        uint8_t lo = low[64 * run + 32 * (quarter % 2) + l];
        int v =
            (quarter < 2 ? lo & 15 : lo >> 4) | (((high[32 * run + l] >> (2 * quarter)) & 3) << 4);
        r.q[g * GROUP + i] = biased(v - 32);
    }
    for (int j = 0; j < 16; j++)
        r.scale[2 * g + j] = d * static_cast<float>(static_cast<int8_t>(b[192 + j]));
}

void unpack_iq4_xs(const uint8_t* b, Row& r, size_t g) {
    float d = read_half(b);
    uint16_t high = read16(b + 2);
    for (int j = 0; j < 8; j++) {
        int lo = (b[4 + j / 2] >> (4 * (j % 2))) & 15;
        int scale = lo | (((high >> (2 * j)) & 3) << 4);
        r.scale[g + j] = d * static_cast<float>(scale - 32);
        for (int i = 0; i < GROUP; i++)
            r.q[(g + j) * GROUP + i] = biased(IQ4_LEVELS[nibble(b + 8 + 16 * j, i)]);
    }
}

void unpack_block(Kind kind, const uint8_t* b, Row& r, size_t g) {
    switch (kind) {
        case Kind::MXFP4: return unpack_mxfp4(b, r, g);
        case Kind::Q2_K: return unpack_q2_k(b, r, g);
        case Kind::Q3_K: return unpack_q3_k(b, r, g);
        case Kind::Q4_K: return unpack_q45_k(b, r, g, false);
        case Kind::Q5_K: return unpack_q45_k(b, r, g, true);
        case Kind::Q6_K: return unpack_q6_k(b, r, g);
        case Kind::IQ4_XS: return unpack_iq4_xs(b, r, g);
        case Kind::IQ4_NL: return unpack_iq4_nl(b, r, g);
        case Kind::Q4_0: return unpack_q4(b, false, r, g);
        case Kind::Q4_1: return unpack_q4(b, true, r, g);
        case Kind::Q5_0: return unpack_q5(b, false, r, g);
        case Kind::Q5_1: return unpack_q5(b, true, r, g);
        case Kind::Q8_0: return unpack_q8_0(b, r, g);
        default: return;  // floats are placed as they are
    }
}

// ---- a row into its lane of a panel

size_t quant_offset(const Weight& w, int k, int lane) {
    size_t group = static_cast<size_t>(k) / GROUP, k4 = static_cast<size_t>(k % GROUP) / 4;
    size_t row = w.format.quant == Quant::U4 ? k4 / 2 : k4;
    return group * w.layout.group_bytes + 64 * row + 4u * static_cast<size_t>(lane) + k % 4;
}

// Offset of scale `j` of a lane, from the panel; its min lies layout.mins - layout.scales further.
size_t scale_offset(const Weight& w, size_t j, int lane) {
    size_t per_group = w.format.is_split ? 2 : 1;
    size_t index = j % per_group * PANEL + static_cast<size_t>(lane);
    return j / per_group * w.layout.group_bytes + w.layout.scales + index * w.format.scale_bytes();
}

void put_scale(const Format& f, uint8_t* p, float value) {
    if (f.has_f32_scale) {
        memcpy(p, &value, 4);
    } else {
        uint16_t half = float_to_half(value);  // exact: the value came from an f16
        memcpy(p, &half, 2);
    }
}

float get_scale(const Format& f, const uint8_t* p) {
    if (!f.has_f32_scale) return read_half(p);
    float value;
    memcpy(&value, p, 4);
    return value;
}

// Four values at a time: one word of the lane in a 64-byte row (U4: two words share it).
void place_group(const Weight& w, const uint8_t* q, uint8_t* at) {
    uint32_t low, high;
    if (w.format.quant == Quant::S8) {
        for (int i = 0; i < 8; i++) memcpy(at + 64 * i, q + 4 * i, 4);
        return;
    }
    for (int i = 0; i < 4; i++) {
        memcpy(&low, q + 8 * i, 4);
        memcpy(&high, q + 8 * i + 4, 4);
        low |= high << 4;
        memcpy(at + 64 * i, &low, 4);
    }
}

void place_row(const Weight& w, const Row& r, uint8_t* panel, int lane) {
    const Format& f = w.format;
    for (int g = 0; g < w.layout.groups; g++)
        place_group(w, &r.q[static_cast<size_t>(g) * GROUP],
                    panel + static_cast<size_t>(g) * w.layout.group_bytes + 4 * lane);
    for (size_t j = 0; j < r.scale.size(); j++) {
        uint8_t* at = panel + scale_offset(w, j, lane);
        put_scale(f, at, r.scale[j]);
        if (f.has_min) put_scale(f, at + w.layout.mins - w.layout.scales, r.min[j]);
    }
}

void place_float_row(const Weight& w, const uint8_t* row, uint8_t* panel, int lane) {
    size_t size = w.format.element_bytes();
    for (int k = 0; k < w.k; k++)
        memcpy(panel + (static_cast<size_t>(k) * PANEL + lane) * size, row + k * size, size);
}

const uint8_t* row_data(const PackPart* parts, int row, size_t row_bytes) {
    while (row >= parts->rows) row -= (parts++)->rows;
    return parts->data + static_cast<size_t>(row) * row_bytes;
}

void pack_panel(Weight& w, const KindInfo& info, const PackPart* parts, int p, Row& r) {
    uint8_t* panel = w.data + static_cast<size_t>(p) * w.layout.stride;
    size_t row_bytes = static_cast<size_t>(w.k / info.elements) * info.bytes;
    memset(panel, 0, w.layout.stride);
    for (int lane = 0; lane < PANEL && p * PANEL + lane < w.n; lane++) {
        const uint8_t* row = row_data(parts, p * PANEL + lane, row_bytes);
        if (w.format.is_float()) {
            place_float_row(w, row, panel, lane);
            continue;
        }
        for (int b = 0; b < w.k / info.elements; b++)
            unpack_block(info.kind, row + static_cast<size_t>(b) * info.bytes, r,
                         static_cast<size_t>(b) * (info.elements / GROUP));
        place_row(w, r, panel, lane);
    }
}

}  // namespace

bool kind_geometry(Kind kind, int* block_elements, int* block_bytes) {
    const KindInfo* info = find(kind);
    if (!info) return false;
    *block_elements = info->elements;
    *block_bytes = info->bytes;
    return true;
}

std::unique_ptr<Weight> pack(Kind kind, const PackPart* parts, int num_parts, int k, Pool& pool) {
    const KindInfo* info = find(kind);
    auto w = std::make_unique<Weight>();
    for (int i = 0; i < num_parts; i++) w->n += parts[i].rows;
    w->kind = kind;
    w->k = k;
    w->format = info->format;
    w->layout = PanelLayout(w->format, k);
    w->panels = (w->n + PANEL - 1) / PANEL;
    w->span = pool.slabs().take(w->bytes());
    w->data = w->span.data;
    size_t scales = static_cast<size_t>(w->layout.groups) * (w->format.is_split ? 2 : 1);
    std::vector<Row> rows(static_cast<size_t>(pool.num_threads()));
    for (Row& r : rows) {
        if (w->format.is_float()) break;
        r.q.resize(static_cast<size_t>(k));
        r.scale.resize(scales);
        if (w->format.has_min) r.min.resize(scales);
    }
    pool.parallel_for(w->panels, [&](int thread, int p) {
        pack_panel(*w, *info, parts, p, rows[static_cast<size_t>(thread)]);
    });
    return w;
}

void unpack_row(const Weight& w, int row, float* out) {
    const uint8_t* panel = w.data + static_cast<size_t>(row / PANEL) * w.layout.stride;
    const Format& f = w.format;
    const int lane = row % PANEL;
    if (f.is_float()) {
        for (int k = 0; k < w.k; k++) {
            const uint8_t* p = panel + (static_cast<size_t>(k) * PANEL + lane) * f.element_bytes();
            if (f.quant == Quant::F32) {
                memcpy(out + k, p, 4);
            } else if (f.quant == Quant::F16) {
                out[k] = read_half(p);
            } else {
                uint32_t bits = static_cast<uint32_t>(read16(p)) << 16;
                memcpy(out + k, &bits, 4);
            }
        }
        return;
    }
    const int per_scale = f.is_split ? 16 : 32;
    for (int k = 0; k < w.k; k++) {
        uint8_t byte = panel[quant_offset(w, k, lane)];
        int q = f.quant == Quant::S8 ? byte - 128
                                     : ((k % 8) >= 4 ? byte >> 4 : byte & 15) - f.zero_point;
        const uint8_t* at = panel + scale_offset(w, static_cast<size_t>(k / per_scale), lane);
        out[k] = get_scale(f, at) * static_cast<float>(q);
        if (f.has_min) out[k] += get_scale(f, at + w.layout.mins - w.layout.scales);
    }
}

}  // namespace headrace
