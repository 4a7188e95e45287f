// One digest per kernel and ISA, so that two machines can be compared by their text output.
//
// Every kernel of every table this CPU can run gets the same inputs, made by an integer generator;
// what it writes is hashed (FNV-1a, 64 bits). Exit 1 when two ISAs disagree, or when a result
// depends on how many tokens share the call or on how attention is split. A line of output is
// `kernel isa digest`; scripts/check_isas.sh compares the lines of several machines. All NaNs count
// as one value: IEEE 754 leaves their sign and payload open, and x86 and Arm choose differently.
// Not a test of correctness: the Python tests hold the kernels against the reference.
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "../kernels.h"
#include "../pack.h"
#include "../pool.h"

namespace {

using namespace headrace;

// ---------------------------------------------------------------- inputs and digests

// splitmix64 (Steele, Lea and Flood 2014).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint32_t bits() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
    }
    int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }
    float unit() {  // in [-1, 1), exact
        return static_cast<float>(static_cast<int32_t>(bits() >> 8) - (1 << 23)) * 0x1p-23f;
    }

private:
    uint64_t state_;
};

float from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

uint32_t canonical_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return f != f ? 0x7fc00000u : bits;
}

class Digest {
public:
    void add(uint32_t word) {
        for (int i = 0; i < 4; i++) hash_ = (hash_ ^ ((word >> (8 * i)) & 255u)) * 0x100000001b3u;
    }
    void add(const std::vector<float>& values) {
        for (float f : values) add(canonical_bits(f));
    }
    uint64_t value() const { return hash_; }

private:
    uint64_t hash_ = 0xcbf29ce484222325u;
};

struct Report {
    std::map<std::string, Digest> digests;
    int failures = 0;

    Digest& operator[](const std::string& name) { return digests[name]; }
    void require(bool ok, const std::string& what) {
        if (ok) return;
        failures++;
        fprintf(stderr, "FAIL %s\n", what.c_str());
    }
};

bool is_same(const float* a, const float* b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (canonical_bits(a[i]) != canonical_bits(b[i])) return false;
    return true;
}

// What a row may hold. One kind per row: an infinity must not drown the other cases in NaN.
enum Style { PLAIN, SIGNS, HUGE_VALUES, TINY, ONE_INF, ONE_NAN, ZEROS, WIDE, EDGES, NUM_STYLES };

// Where exp clamps, where it rounds to another power of two, and what half floats can hold.
constexpr float EDGE_VALUES[] = {
    88.3f,        88.37f,      88.4f,    88.72283f, 89.0f,      89.5f,       -87.3f,
    -87.33654f,   -87.6f,      -87.7f,   -88.03f,   -88.1f,     -104.0f,     0.34657f,
    -0.34657362f, 0.34657359f, 0.5f,     1.5f,      2.5f,       1e-36f,      9e-37f,
    65504.0f,     65519.996f,  65520.0f, 6e-8f,     2.98023e-8, 6.09756e-5f, 3.4028235e38f,
};

float styled(Random& r, Style style) {
    switch (style) {
        case SIGNS: return r.bits() & 1 ? 1.0f : -1.0f;
        case HUGE_VALUES: return r.unit() * FLT_MAX;
        case TINY: return from_bits(r.bits() & 0x807fffffu);
        case ZEROS: return r.bits() & 1 ? 0.0f : -0.0f;
        case WIDE: return r.unit() * from_bits(static_cast<uint32_t>(1 + r.below(253)) << 23);
        case EDGES: return EDGE_VALUES[r.below(sizeof(EDGE_VALUES) / 4)] * (r.below(4) ? 1 : -1);
        default: return 4.0f * r.unit();
    }
}

void fill(Random& r, Style style, float* x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = styled(r, style);
    const float sign = r.bits() & 1 ? 1.0f : -1.0f;
    if (style == ONE_INF) x[r.below(static_cast<int>(n))] = sign * INFINITY;
    if (style == ONE_NAN) x[r.below(static_cast<int>(n))] = sign * NAN;
}

std::vector<float> make_row(Random& r, Style style, int n) {
    std::vector<float> x(static_cast<size_t>(n));
    fill(r, style, x.data(), x.size());
    return x;
}

Style style_of(int i) { return static_cast<Style>(i % NUM_STYLES); }

// Rows with a stride of their own; extreme: every row another style.
std::vector<float> make_rows(Random& r, bool is_extreme, int rows, int width) {
    std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(width));
    for (int i = 0; i < rows; i++)
        fill(r, is_extreme ? style_of(i) : PLAIN, &x[static_cast<size_t>(i) * width], width);
    return x;
}

// Any float at all, NaNs of every payload too.
std::vector<float> any_floats(Random& r, int n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& f : x) f = from_bits(r.bits());
    return x;
}

constexpr int TOKEN_COUNTS[] = {17, 1, 2, 3, 4, 5, 6, 7, 8, 9};
constexpr float GUARD = 12345.0f;  // what must still stand where nothing may be written

// ---------------------------------------------------------------- linear and quantize

struct KindCase {
    Kind kind;
    const char* name;
    int halves[2];  // byte offsets of the block's f16 fields; -1: none
};

constexpr KindCase KIND_CASES[] = {
    {Kind::F32, "f32", {-1, -1}},      {Kind::F16, "f16", {-1, -1}},
    {Kind::BF16, "bf16", {-1, -1}},    {Kind::Q4_0, "q4_0", {0, -1}},
    {Kind::Q4_1, "q4_1", {0, 2}},      {Kind::Q5_0, "q5_0", {0, -1}},
    {Kind::Q5_1, "q5_1", {0, 2}},      {Kind::Q8_0, "q8_0", {0, -1}},
    {Kind::Q2_K, "q2_k", {80, 82}},    {Kind::Q3_K, "q3_k", {108, -1}},
    {Kind::Q4_K, "q4_k", {0, 2}},      {Kind::Q5_K, "q5_k", {0, 2}},
    {Kind::Q6_K, "q6_k", {208, -1}},   {Kind::IQ4_NL, "iq4_nl", {0, -1}},
    {Kind::IQ4_XS, "iq4_xs", {0, -1}}, {Kind::MXFP4, "mxfp4", {-1, -1}},
};

constexpr int NUM_ROWS = 6 * PANEL + 7;  // tiles of four and two panels, a single one, a ragged one

// A half float of ordinary size; extreme: also subnormal, largest, zero, rarely infinite or NaN.
uint16_t make_half(Random& r, bool is_extreme) {
    constexpr uint16_t SPECIAL[] = {0x0001, 0x03ff, 0x7bff, 0xfbff, 0x0000, 0x8000, 0x8001};
    if (is_extreme && r.below(64) == 0) return SPECIAL[r.below(7)];
    if (is_extreme && r.below(4096) == 0) return r.bits() & 1 ? 0x7c00 : 0xfe01;
    return static_cast<uint16_t>((r.bits() & 0x83ffu) | static_cast<uint32_t>(8 + r.below(8))
                                                            << 10);
}

void make_float_element(Random& r, Kind kind, Style style, uint8_t* p) {
    uint32_t bits = canonical_bits(styled(r, style));
    uint16_t half =
        kind == Kind::F16 ? make_half(r, style != PLAIN) : static_cast<uint16_t>(bits >> 16);
    if (kind == Kind::F32) {
        memcpy(p, &bits, 4);
    } else {
        memcpy(p, &half, 2);
    }
}

// One block: random bits, sane scales. Extreme: in two rows of four all integers at one end.
void make_block(Random& r, const KindCase& c, bool is_extreme, int row, int bytes, uint8_t* p) {
    constexpr uint8_t ENDS[] = {0x00, 0xff, 0x80, 0x7f};
    const uint8_t end = ENDS[row / 4 % 4];
    for (int i = 0; i < bytes; i++) p[i] = static_cast<uint8_t>(r.bits());
    if (is_extreme && row % 4 < 2) memset(p, end, static_cast<size_t>(bytes));
    for (int at : c.halves) {
        uint16_t half = make_half(r, is_extreme);
        if (at >= 0) memcpy(p + at, &half, 2);
    }
    if (c.kind == Kind::MXFP4 && (!is_extreme || row % 3)) p[0] = 118 + p[0] % 8;
}

struct Matrix {
    std::string name;
    std::unique_ptr<Weight> weight;
};

Matrix make_matrix(const KindCase& c, bool is_extreme, Pool& pool) {
    Random r(static_cast<uint64_t>(c.kind) * 2 + is_extreme);
    int elements, bytes;
    kind_geometry(c.kind, &elements, &bytes);
    const int k = elements == 1 ? 77 : (elements == 32 ? 160 : 512);
    const int blocks = k / elements;
    std::vector<uint8_t> data(static_cast<size_t>(NUM_ROWS) * blocks * bytes);
    for (int i = 0; i < NUM_ROWS * blocks; i++) {
        uint8_t* p = &data[static_cast<size_t>(i) * bytes];
        const int row = i / blocks;
        if (elements == 1) {
            make_float_element(r, c.kind, is_extreme ? style_of(row) : PLAIN, p);
        } else {
            make_block(r, c, is_extreme, row, bytes, p);
        }
    }
    PackPart part{data.data(), NUM_ROWS};
    return {std::string(c.name) + (is_extreme ? "/extreme" : ""), pack(c.kind, &part, 1, k, pool)};
}

std::vector<Matrix> make_matrices(Pool& pool) {
    std::vector<Matrix> out;
    for (const KindCase& c : KIND_CASES)
        for (bool is_extreme : {false, true}) out.push_back(make_matrix(c, is_extreme, pool));
    return out;
}

// Rows unpacked again: the same on every machine, though no ISA takes part.
void check_packing(const std::vector<Matrix>& matrices, Report& report) {
    for (const Matrix& m : matrices) {
        std::vector<float> row(static_cast<size_t>(m.weight->k));
        for (int i = 0; i < m.weight->n; i++) {
            unpack_row(*m.weight, i, row.data());
            report["pack/" + m.name].add(row);
        }
    }
}

std::vector<int32_t> quantize_rows(const Kernels& kernels, const float* x, int ldx, int tokens,
                                   int k) {
    const size_t words = static_cast<size_t>(k / GROUP) * TILE_WORDS;
    std::vector<int32_t> out(words * static_cast<size_t>(tokens));
    for (int t = 0; t < tokens; t += MAX_TILE)
        kernels.quantize(x + static_cast<size_t>(t) * ldx, ldx, std::min(MAX_TILE, tokens - t), k,
                         &out[words * static_cast<size_t>(t)]);
    return out;
}

// y of `tokens` tokens, panels in two calls as two threads would.
std::vector<float> run_linear(const Kernels& kernels, const Weight& w, const std::vector<float>& x,
                              int ldx, int tokens, const float* bias) {
    LinearArgs a{};
    std::vector<int32_t> xq;
    if (!w.format.is_float()) xq = quantize_rows(kernels, x.data(), ldx, tokens, w.k);
    a.weight = w.data;
    a.format = w.format;
    a.layout = w.layout;
    a.n = w.n;
    a.k = w.k;
    a.bias = bias;
    a.x = x.data();
    a.ldx = ldx;
    a.xq = xq.data();
    a.tokens = tokens;
    a.ldy = w.n + 5;
    std::vector<float> y(static_cast<size_t>(tokens) * a.ldy, GUARD);
    a.y = y.data();
    a.end = w.panels / 3;
    kernels.linear(a);
    a.begin = a.end;
    a.end = w.panels;
    kernels.linear(a);
    return y;
}

void check_linear(const Kernels& kernels, const Matrix& m, Report& report) {
    Random r(77);
    const Weight& w = *m.weight;
    const int ldx = w.k + 3;
    for (bool is_extreme : {false, true}) {
        const std::string name = "linear/" + m.name + (is_extreme ? "/extreme_x" : "");
        const std::vector<float> x = make_rows(r, is_extreme, TOKEN_COUNTS[0], ldx);
        const std::vector<float> bias = make_row(r, PLAIN, w.n);
        std::vector<float> all;
        for (int tokens : TOKEN_COUNTS) {
            std::vector<float> y = run_linear(kernels, w, x, ldx, tokens, bias.data());
            if (all.empty()) all = y;
            report.require(is_same(y.data(), all.data(), y.size()),
                           name + " of " + std::to_string(tokens) + " tokens on " + kernels.name);
            report[name].add(y);
        }
        report[name].add(run_linear(kernels, w, x, ldx, 3, nullptr));
    }
}

void check_quantize(const Kernels& kernels, Report& report) {
    Random r(5);
    constexpr int K = 128;
    for (bool is_extreme : {false, true}) {
        Digest& digest = report[is_extreme ? "quantize/extreme" : "quantize"];
        for (int tokens : TOKEN_COUNTS) {
            std::vector<float> x = make_rows(r, is_extreme, tokens, K + 1);
            for (int32_t word : quantize_rows(kernels, x.data(), K + 1, tokens, K))
                digest.add(canonical_bits(from_bits(static_cast<uint32_t>(word))));
        }
    }
}

// ---------------------------------------------------------------- rows

void check_norm(const Kernels& kernels, Report& report) {
    Random r(11);
    for (int n : {1, 5, 15, 16, 17, 31, 32, 40, 64, 100, 576, 640})
        for (int i = 0; i < NUM_STYLES; i++)
            for (float eps : {0.0f, 1e-6f, 1e-5f}) {
                std::vector<float> x = make_row(r, style_of(i), n), weight = make_row(r, PLAIN, n);
                std::vector<float> y(x.size() + 16, GUARD);
                Digest& digest = report[i == PLAIN ? "rms_norm" : "rms_norm/extreme"];
                kernels.rms_norm(x.data(), weight.data(), n, eps, y.data());
                digest.add(y);
                kernels.rms_norm(x.data(), nullptr, n, eps, y.data());
                digest.add(y);
            }
}

void check_rope(const Kernels& kernels, Report& report) {
    Random r(13);
    for (int head_dim : {16, 64, 80, 96, 256})
        for (int rotary_dim : {head_dim, head_dim / 2})
            for (bool is_interleaved : {false, true})
                for (int i = 0; i < NUM_STYLES; i++) {
                    std::vector<float> x = make_row(r, style_of(i), 3 * head_dim);
                    std::vector<float> cos_sin(static_cast<size_t>(rotary_dim));
                    for (float& f : cos_sin) f = r.unit();
                    std::vector<float> y(x.size() + 16, GUARD);
                    kernels.rope(x.data(), cos_sin.data(), 3, head_dim, rotary_dim, is_interleaved,
                                 y.data());
                    report[i == PLAIN ? "rope" : "rope/extreme"].add(y);
                }
}

void check_pointwise_row(const Kernels& kernels, const std::vector<float>& a,
                         const std::vector<float>& b, const std::string& suffix, Report& report) {
    const int n = static_cast<int>(a.size());
    std::vector<float> y(a.size() + 16, GUARD);
    kernels.silu_mul(a.data(), b.data(), n, y.data());
    report["silu_mul" + suffix].add(y);
    kernels.gelu_tanh_mul(a.data(), b.data(), n, y.data());
    report["gelu_tanh_mul" + suffix].add(y);
    for (float cap : {30.0f, 50.0f, 1.0f}) {
        kernels.softcap(a.data(), n, cap, y.data());
        report["softcap" + suffix].add(y);
    }
    kernels.exp(a.data(), n, y.data());
    report["exp" + suffix].add(y);
}

void check_pointwise(const Kernels& kernels, Report& report) {
    Random r(17);
    for (int n : {1, 7, 15, 16, 17, 31, 33, 200})
        for (int i = 0; i < NUM_STYLES; i++) {
            std::vector<float> a = make_row(r, style_of(i), n), b = make_row(r, PLAIN, n);
            check_pointwise_row(kernels, a, b, i == PLAIN ? "" : "/extreme", report);
        }
    const std::vector<float> any = any_floats(r, 50000);
    check_pointwise_row(kernels, any, any_floats(r, 50000), "/any", report);
    std::vector<float> sweep(20000);  // [-100, 100): every rounding and clamping border of exp
    for (size_t i = 0; i < sweep.size(); i++)
        sweep[i] = static_cast<float>(static_cast<int>(i) - 10000) * 0.01f + 1e-4f * r.unit();
    check_pointwise_row(kernels, sweep, std::vector<float>(sweep.size(), 1.0f), "/sweep", report);
}

// ---------------------------------------------------------------- attention

constexpr int KV_HEADS = 2;

struct AttendCase {
    int head_dim, group, position, tokens, window;
    float softcap;
};

constexpr AttendCase ATTEND_CASES[] = {
    {16, 1, 0, 1, 0, 0},       {64, 3, 0, 9, 0, 0},     {64, 3, 50, 17, 0, 0},
    {64, 3, 1290, 9, 0, 0},    {64, 9, 1100, 1, 0, 0},  {64, 5, 1100, 2, 600, 0},
    {128, 4, 600, 8, 0, 0},    {80, 2, 100, 5, 33, 0},  {32, 7, 60, 6, 1, 0},
    {256, 4, 700, 3, 512, 50}, {96, 1, 513, 6, 70, 30}, {512, 8, 40, 3, 0, 50},
    {48, 1, 1023, 3, 0, 0},    {64, 2, 505, 1, 0, 0},   {64, 2, 506, 2, 0, 0},
    {64, 2, 507, 4, 0, 0},     {64, 2, 508, 7, 0, 20},  {64, 1, 2000, 1, 1024, 0},
    {112, 3, 127, 4, 64, 0},   {64, 3, 15, 8, 16, 0},
};

// A paged cache whose unwritten slots hold NaN: what a request may not see must not reach it.
struct Cache {
    std::vector<uint8_t> data;
    std::vector<int32_t> pages;
    size_t page_elements;
    bool is_f16;
};

// Keys and values are ordinary but for a few: tiny, zero, signs; the last two infinity and NaN.
Style key_style(bool is_extreme, int position, int last) {
    if (!is_extreme) return PLAIN;
    if (position == last) return ONE_NAN;
    if (position == last - 1) return ONE_INF;
    constexpr Style RARE[] = {TINY, ZEROS, SIGNS, WIDE};
    return position % 61 < 4 ? RARE[position % 61] : PLAIN;
}

Cache make_cache(const Kernels& kernels, const AttendCase& c, bool is_f16, bool is_extreme,
                 Report& report) {
    Random r(static_cast<uint64_t>(c.head_dim * 10000 + c.position));
    const int length = c.position + c.tokens, pages = (length + PAGE - 1) / PAGE;
    const std::string name = std::string("kv_write/") + (is_f16 ? "f16" : "f32");
    Cache cache;
    cache.is_f16 = is_f16;
    cache.page_elements = size_t{2} * KV_HEADS * PAGE * static_cast<size_t>(c.head_dim);
    cache.data.assign(cache.page_elements * static_cast<size_t>(pages + 1) * (is_f16 ? 2 : 4),
                      0xff);
    for (int i = 0; i < pages; i++) cache.pages.push_back((i * 7 + 3) % (pages + 1));
    if ((pages + 1) % 7 == 0) std::iota(cache.pages.begin(), cache.pages.end(), 1);
    for (int p = 0; p < length; p++) {
        const Style style = key_style(is_extreme, p, length - 1);
        std::vector<float> k = make_row(r, style, KV_HEADS * c.head_dim);
        std::vector<float> v = make_row(r, style, KV_HEADS * c.head_dim);
        kernels.kv_write({k.data(), v.data(), cache.data.data(), is_f16, KV_HEADS, c.head_dim,
                          cache.page_elements, cache.pages[static_cast<size_t>(p / PAGE)],
                          p % PAGE});
    }
    Digest& digest = report[name + (is_extreme ? "/extreme" : "")];
    for (size_t i = 0; i < cache.data.size(); i += 4) {
        uint32_t word;
        memcpy(&word, &cache.data[i], 4);
        digest.add(is_f16 ? word : canonical_bits(from_bits(word)));
    }
    return cache;
}

AttendArgs attend_args(const AttendCase& c, const Cache& cache, const std::vector<float>& q,
                       std::vector<float>& out) {
    AttendArgs a{};
    a.q = q.data();
    a.q_stride = a.out_stride = c.group * c.head_dim + 8;
    a.out = out.data();
    a.head_dim = c.head_dim;
    a.group = c.group;
    a.kv = cache.data.data() + size_t{2} * PAGE * c.head_dim * (cache.is_f16 ? 2 : 4);  // head 1
    a.is_f16 = cache.is_f16;
    a.page_elements = cache.page_elements;
    a.pages = cache.pages.data();
    a.position = c.position;
    a.tokens = c.tokens;
    a.scale = 0.125f;
    a.window = c.window;
    a.softcap = c.softcap;
    return a;
}

// Token by token, as decode would have done it.
void attend_alone(const Kernels& kernels, AttendArgs a) {
    const int tokens = a.tokens;
    a.tokens = 1;
    for (int t = 0; t < tokens; t++) {
        kernels.attend(a);
        a.q += a.q_stride;
        a.out += a.out_stride;
        a.position++;
    }
}

// Split by split, then merged.
void attend_by_splits(const Kernels& kernels, AttendArgs a, Digest& digest) {
    const int first = (a.window > 0 ? std::max(a.position + 1 - a.window, 0) : 0) / SPLIT;
    const int last = (a.position + a.tokens - 1) / SPLIT;
    const size_t step = static_cast<size_t>(a.tokens * a.group) * partial_stride(a.head_dim);
    std::vector<float> partial(step * static_cast<size_t>(last - first + 1));
    for (int s = first; s <= last; s++) {
        a.split = s;
        a.partial = &partial[step * static_cast<size_t>(s - first)];
        kernels.attend(a);
    }
    digest.add(partial);
    a.partial = partial.data();
    kernels.attend_merge(a, last - first + 1);
}

void check_attend_case(const Kernels& kernels, const AttendCase& c, bool is_f16, bool is_extreme,
                       Report& report) {
    const Cache cache = make_cache(kernels, c, is_f16, is_extreme, report);
    Random r(static_cast<uint64_t>(c.position + 1));
    const int width = c.group * c.head_dim + 8;
    const std::vector<float> q = make_rows(r, is_extreme, c.tokens, width);
    std::vector<float> out(q.size(), GUARD), alone = out, merged = out;
    const std::string suffix =
        std::string(is_f16 ? "/f16" : "/f32") + (is_extreme ? "/extreme" : "");
    const std::string where = suffix + " at " + std::to_string(c.position) + " on " + kernels.name;

    kernels.attend(attend_args(c, cache, q, out));
    report["attend" + suffix].add(out);
    attend_alone(kernels, attend_args(c, cache, q, alone));
    report.require(is_same(out.data(), alone.data(), out.size()), "attend alone" + where);
    attend_by_splits(kernels, attend_args(c, cache, q, merged), report["attend_split" + suffix]);
    report["attend_merge" + suffix].add(merged);
    report.require(is_same(out.data(), merged.data(), out.size()), "attend_merge" + where);
}

void check_attention(const Kernels& kernels, Report& report) {
    for (const AttendCase& c : ATTEND_CASES)
        for (bool is_f16 : {false, true})
            for (bool is_extreme : {false, true})
                check_attend_case(kernels, c, is_f16, is_extreme, report);
}

// ---------------------------------------------------------------- all of it

Report check(const Kernels& kernels, const std::vector<Matrix>& matrices) {
    Report report;
    check_packing(matrices, report);
    for (const Matrix& m : matrices) check_linear(kernels, m, report);
    check_quantize(kernels, report);
    check_norm(kernels, report);
    check_rope(kernels, report);
    check_pointwise(kernels, report);
    check_attention(kernels, report);
    return report;
}

void print(const Report& report, const char* isa) {
    for (const auto& [name, digest] : report.digests)
        printf("%s %s %016llx\n", name.c_str(), isa,
               static_cast<unsigned long long>(digest.value()));
}

int count_differences(const Report& a, const Report& b, const char* name_a, const char* name_b) {
    int count = 0;
    for (const auto& [name, digest] : a.digests) {
        if (b.digests.at(name).value() == digest.value()) continue;
        fprintf(stderr, "DIFFER %s: %s and %s\n", name.c_str(), name_a, name_b);
        count++;
    }
    return count;
}

}  // namespace

int main() {
    Pool pool(1);
    const std::vector<Matrix> matrices = make_matrices(pool);
    Report first;
    std::string first_name, names;
    int failures = 0;
    for (const char* isa : {"scalar", "avx2", "avx512", "avx512_vnni", "neon"}) {
        const Kernels* kernels = select_kernels(isa);
        if (!kernels) continue;
        Report report = check(*kernels, matrices);
        print(report, isa);
        failures += report.failures;
        names += std::string(" ") + isa;
        if (first_name.empty()) {
            first = report;
            first_name = isa;
        }
        failures += count_differences(first, report, first_name.c_str(), isa);
    }
    fprintf(stderr, "%zu digests on each of:%s; best: %s; %d failures\n", first.digests.size(),
            names.c_str(), select_kernels("")->name, failures);
    return failures ? 1 : 0;
}
