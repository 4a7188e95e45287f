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

using packing::half_to_float;

// One row on its way from blocks to panels. Scales and mins are 16-bit patterns as the panel stores
// them, or, for products, bytes of `sub` and `submin` with their factors in `scale` and `min`.
struct Row {
    std::vector<uint8_t> q;            // [k], as the panel stores them
    std::vector<uint16_t> scale, min;  // [k / 32], products: [k / 256]
    std::vector<int8_t> sub, submin;   // [k / 32] or [k / 16]
};

struct KindInfo {
    Kind kind;
    int elements, bytes;
    Format format;
};

constexpr KindInfo KINDS[] = {
    {Kind::F32, 1, 4, {Quant::F32}},          {Kind::F16, 1, 2, {Quant::F16}},
    {Kind::BF16, 1, 2, {Quant::BF16}},        {Kind::Q4_0, 32, 18, formats::U4_ZERO8},
    {Kind::Q4_1, 32, 20, formats::U4_MIN},    {Kind::Q5_0, 32, 22, formats::U5_ZERO16},
    {Kind::Q5_1, 32, 24, formats::U5_MIN},    {Kind::Q8_0, 32, 34, formats::S8},
    {Kind::Q2_K, 256, 84, formats::U2_K},     {Kind::Q3_K, 256, 110, formats::U3_K},
    {Kind::Q4_K, 256, 144, formats::U4_K},    {Kind::Q5_K, 256, 176, formats::U5_K},
    {Kind::Q6_K, 256, 210, formats::U6_K},    {Kind::IQ4_NL, 32, 18, formats::IQ4},
    {Kind::IQ4_XS, 256, 136, formats::IQ4_K}, {Kind::MXFP4, 32, 17, formats::E2M1},
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

float bf16_to_float(uint16_t h) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

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

// 2^(e - 127) / 2 as bf16, exact down to the subnormal ends.
uint16_t e8m0_half(uint8_t e) { return static_cast<uint16_t>(e >= 2 ? (e - 1) << 7 : 0x20 << e); }

// ---- one block to integers, scales, mins; g = index of its first group of 32

// Sixteen bytes to 32 values below 16: low nibbles first.
void split_nibbles(const uint8_t* p, uint8_t* q) {
    for (int i = 0; i < 16; i++) {
        q[i] = p[i] & 15;
        q[i + 16] = p[i] >> 4;
    }
}

void unpack_q4(const uint8_t* b, bool has_min, Row& r, size_t g) {
    r.scale[g] = read16(b);
    if (has_min) r.min[g] = read16(b + 2);
    split_nibbles(b + (has_min ? 4 : 2), &r.q[g * GROUP]);
}

void unpack_q5(const uint8_t* b, bool has_min, Row& r, size_t g) {
    uint8_t* q = &r.q[g * GROUP];
    uint32_t high;
    memcpy(&high, b + (has_min ? 4 : 2), 4);
    r.scale[g] = read16(b);
    if (has_min) r.min[g] = read16(b + 2);
    split_nibbles(b + (has_min ? 8 : 6), q);
    for (int i = 0; i < GROUP; i++) q[i] |= static_cast<uint8_t>(((high >> i) & 1) << 4);
}

void unpack_q8_0(const uint8_t* b, Row& r, size_t g) {
    r.scale[g] = read16(b);
    for (int i = 0; i < GROUP; i++) r.q[g * GROUP + i] = b[2 + i] ^ 0x80;
}

void unpack_mxfp4(const uint8_t* b, Row& r, size_t g) {
    r.scale[g] = e8m0_half(b[0]);
    split_nibbles(b + 1, &r.q[g * GROUP]);
}

// The factors of a block of 256; that of the mins is stored negative.
void take_factors(const uint8_t* d, const uint8_t* dmin, Row& r, size_t g) {
    r.scale[g / 8] = read16(d);
    if (dmin) r.min[g / 8] = read16(dmin) ^ 0x8000;
}

void unpack_q2_k(const uint8_t* b, Row& r, size_t g) {
    take_factors(b + 80, b + 82, r, g);
    for (int i = 0; i < 256; i++) {
        int run = i / 128, within = i % 128;  // 32 bytes hold 128 weights, two bits each
        r.q[g * GROUP + i] = (b[16 + 32 * run + within % 32] >> (2 * (within / 32))) & 3;
    }
    for (int j = 0; j < 16; j++) {
        r.sub[2 * g + j] = b[j] & 15;
        r.submin[2 * g + j] = static_cast<int8_t>(b[j] >> 4);
    }
}

void unpack_q3_k(const uint8_t* b, Row& r, size_t g) {
    const uint8_t *mask = b, *low = b + 32, *s = b + 96;
    take_factors(b + 108, nullptr, r, g);
    for (int i = 0; i < 256; i++) {
        int run = i / 128, within = i % 128;
        int q = (low[32 * run + within % 32] >> (2 * (within / 32))) & 3;
        int high = (mask[i % 32] >> (i / 32)) & 1;
        r.q[g * GROUP + i] = static_cast<uint8_t>(q | high << 2);
    }
    for (int j = 0; j < 16; j++) {
        int lo = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
        int hi = (s[8 + j % 4] >> (2 * (j / 4))) & 3;
        r.sub[2 * g + j] = static_cast<int8_t>((lo | (hi << 4)) - 32);
    }
}

void unpack_q45_k(const uint8_t* b, Row& r, size_t g, bool is_five) {
    const uint8_t* high = b + 16;
    const uint8_t* q = b + (is_five ? 48 : 16);
    take_factors(b, b + 2, r, g);
    for (int j = 0; j < 8; j++) {
        int scale, min;
        scale_min(b + 4, j, &scale, &min);
        r.sub[g + j] = static_cast<int8_t>(scale);
        r.submin[g + j] = static_cast<int8_t>(min);
        for (int i = 0; i < GROUP; i++) {
            uint8_t byte = q[32 * (j / 2) + i];
            int v = j % 2 ? byte >> 4 : byte & 15;
            if (is_five) v |= ((high[i] >> j) & 1) << 4;
            r.q[(g + j) * GROUP + i] = static_cast<uint8_t>(v);
        }
    }
}

void unpack_q6_k(const uint8_t* b, Row& r, size_t g) {
    const uint8_t *low = b, *high = b + 128;
    take_factors(b + 208, nullptr, r, g);
    for (int i = 0; i < 256; i++) {
        int run = i / 128, within = i % 128, quarter = within / 32, l = within % 32;
        uint8_t lo = low[64 * run + 32 * (quarter % 2) + l];
        int hi = (high[32 * run + l] >> (2 * quarter)) & 3;
        r.q[g * GROUP + i] = static_cast<uint8_t>((quarter < 2 ? lo & 15 : lo >> 4) | hi << 4);
    }
    memcpy(&r.sub[2 * g], b + 192, 16);
}

void unpack_iq4_xs(const uint8_t* b, Row& r, size_t g) {
    uint16_t high = read16(b + 2);
    take_factors(b, nullptr, r, g);
    for (size_t j = 0; j < 8; j++) {
        int lo = (b[4 + j / 2] >> (4 * (j % 2))) & 15;
        int scale = lo | (((high >> (2 * j)) & 3) << 4);
        r.sub[g + j] = static_cast<int8_t>(scale - 32);
        split_nibbles(b + 8 + 16 * j, &r.q[(g + j) * GROUP]);
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
        case Kind::IQ4_NL:  // nibbles like Q4_0's, read by a table
        case Kind::Q4_0: return unpack_q4(b, false, r, g);
        case Kind::Q4_1: return unpack_q4(b, true, r, g);
        case Kind::Q5_0: return unpack_q5(b, false, r, g);
        case Kind::Q5_1: return unpack_q5(b, true, r, g);
        case Kind::Q8_0: return unpack_q8_0(b, r, g);
        default: return;  // floats are placed as they are
    }
}

// ---- a row into its lane of a panel

// BITS of every value of a group, from bit FROM on, to a plane: its word of each 64-byte row.
template <int BITS>
void place_plane(const uint8_t* q, int from, uint8_t* at) {
    constexpr int fit = 8 / BITS;
    constexpr uint32_t mask = 0x01010101u * ((1u << BITS) - 1);
    for (int row = 0; row < 8 / fit; row++) {
        uint32_t packed = 0;
        for (int j = 0; j < fit; j++) {
            uint32_t word;
            memcpy(&word, q + 4 * (row * fit + j), 4);
            packed |= ((word >> from) & mask) << (j * BITS);
        }
        memcpy(at + 64 * row, &packed, 4);
    }
}

void place_group(const Format& f, const uint8_t* q, uint8_t* at) {
    const int low = f.low_bits(), high = f.high_bits();
    uint8_t* rest = at + low * GROUP * PANEL / 8;
    if (low == 2) place_plane<2>(q, 0, at);
    if (low == 4) place_plane<4>(q, 0, at);
    if (low == 8) place_plane<8>(q, 0, at);
    if (high == 1) place_plane<1>(q, low, rest);
    if (high == 2) place_plane<2>(q, low, rest);
}

void put16(uint8_t* p, uint16_t value) { memcpy(p, &value, 2); }

// Scales or mins of one row: `first` is where those of a lane 0 begin in the first block.
void place_scales(const Weight& w, const std::vector<uint16_t>& scale, uint8_t* at) {
    for (size_t j = 0; j < scale.size(); j++) put16(at + j * w.layout.group.block_bytes, scale[j]);
}

void place_subscales(const Weight& w, const std::vector<int8_t>& sub, size_t first, uint8_t* at) {
    const GroupLayout& layout = w.layout.group;
    const size_t per_block = layout.block_groups * (w.format.is_split ? 2 : 1);
    for (size_t j = 0; j < sub.size(); j++)
        at[j / per_block * layout.block_bytes + first + j % per_block * PANEL] =
            static_cast<uint8_t>(sub[j]);
}

void place_row(const Weight& w, const Row& r, uint8_t* panel, int lane) {
    const GroupLayout& layout = w.layout.group;
    for (int g = 0; g < w.layout.groups; g++)
        place_group(w.format, &r.q[static_cast<size_t>(g) * GROUP],
                    panel + layout.quants_at(g) + 4 * lane);
    const bool is_product = w.format.scale == Scale::PRODUCT;
    place_scales(w, r.scale, panel + (is_product ? 0 : layout.scales) + 2 * lane);
    place_scales(w, r.min, panel + (is_product ? layout.min_factors : layout.mins) + 2 * lane);
    place_subscales(w, r.sub, layout.scales, panel + lane);
    place_subscales(w, r.submin, layout.mins, panel + lane);
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

void size_row(const Weight& w, Row& r) {
    if (w.format.is_float()) return;
    const size_t groups = static_cast<size_t>(w.layout.groups);
    const bool is_product = w.format.scale == Scale::PRODUCT;
    const size_t subs = is_product ? groups * (w.format.is_split ? 2 : 1) : 0;
    const size_t scales = groups / w.layout.group.block_groups;
    r.q.resize(static_cast<size_t>(w.k));
    r.scale.resize(scales);
    r.min.resize(w.format.has_min ? scales : 0);
    r.sub.resize(subs);
    r.submin.resize(w.format.has_min ? subs : 0);
}

// ---- back to values

int get_bits(const uint8_t* plane, int bits, int k, int lane) {
    const int fit = 8 / bits, k4 = k % GROUP / 4;
    const uint8_t byte = plane[64 * (k4 / fit) + 4 * lane + k % 4];
    return (byte >> (k4 % fit * bits)) & ((1 << bits) - 1);
}

int get_integer(const Weight& w, const uint8_t* panel, int k, int lane) {
    const Format& f = w.format;
    const int low = f.low_bits(), high = f.high_bits();
    const uint8_t* plane = panel + w.layout.group.quants_at(k / GROUP);
    int q = get_bits(plane, low, k, lane);
    if (low == 8) return q - 128;
    if (f.has_levels()) return f.levels()[q];
    if (high > 0) q |= get_bits(plane + low * GROUP * PANEL / 8, high, k, lane) << low;
    return q - f.zero_point;
}

// Scale, or min, `j` of group `g`.
float get_scale(const Weight& w, const uint8_t* panel, int g, int j, int lane, bool is_min) {
    const GroupLayout& layout = w.layout.group;
    const int index = j * PANEL + lane;
    const uint8_t* run = panel + (is_min ? layout.mins_at(g) : layout.scales_at(g));
    if (w.format.scale == Scale::F16) return read_half(run + 2 * index);
    if (w.format.scale == Scale::BF16) return bf16_to_float(read16(run + 2 * index));
    const uint8_t* factors = panel + layout.block_at(g) + (is_min ? layout.min_factors : 0);
    return read_half(factors + 2 * lane) * static_cast<float>(static_cast<int8_t>(run[index]));
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
    std::vector<Row> rows(static_cast<size_t>(pool.num_threads()));
    for (Row& r : rows) size_row(*w, r);
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
                out[k] = bf16_to_float(read16(p));
            }
        }
        return;
    }
    const int per_scale = f.is_split ? 16 : 32;
    for (int k = 0; k < w.k; k++) {
        const int j = k % GROUP / per_scale;
        const float scale = get_scale(w, panel, k / GROUP, j, lane, false);
        out[k] = scale * static_cast<float>(get_integer(w, panel, k, lane));
        if (f.has_min) out[k] += get_scale(w, panel, k / GROUP, j, lane, true);
    }
}

}  // namespace headrace
