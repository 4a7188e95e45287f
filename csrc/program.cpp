#include "program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <mutex>
#include <new>

namespace headrace {

namespace {

// Query tokens per attention work item: rows of an item share K and V loads in registers by fours,
// and pages in L1 beyond that. More would leave threads idle on short prompts.
constexpr int QUERY_TILE = 8;

}  // namespace

KvPool::KvPool(int layers, int kv_heads, int dim, int pages, bool f16)
    : num_layers(layers),
      num_kv_heads(kv_heads),
      head_dim(dim),
      num_pages(pages),
      is_f16(f16),
      num_bytes(static_cast<size_t>(layers) * static_cast<size_t>(pages) * page_elements() *
                (f16 ? 2 : 4)),
      slab(num_bytes) {}

Program::Program(Pool& pool, const Kernels& kernels, KvPool* kv, int max_tokens, int max_seqs,
                 int max_rows)
    : pool_(pool),
      kernels_(kernels),
      kv_(kv),
      max_tokens_(max_tokens),
      max_seqs_(max_seqs),
      max_rows_(max_rows),
      token_seq_(static_cast<size_t>(max_tokens)) {
    tiles_.reserve(static_cast<size_t>(max_tokens));
}

Program::~Program() {
    for (float* p : owned_) free(p);
}

// ---------------------------------------------------------------- recording

float* Program::allocate(size_t count) {
    size_t bytes = (count * sizeof(float) + 127) & ~size_t{63};
    float* p = static_cast<float*>(aligned_alloc(64, bytes));
    if (!p) throw std::bad_alloc();
    memset(p, 0, bytes);
    owned_.push_back(p);
    return p;
}

int Program::add(int width, bool is_rows, bool is_quantized) {
    size_t rows = static_cast<size_t>(is_rows ? max_rows_ : max_tokens_);
    float* data = allocate(rows * static_cast<size_t>(width));
    buffers_.push_back({width, is_rows, is_quantized, data});
    return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_buffer(int width, bool is_rows) { return add(width, is_rows, false); }

int Program::add_quantized_buffer(int k, bool is_rows) {
    return add(k / GROUP * TILE_WORDS, is_rows, true);
}

int Program::add_rope(std::vector<double> inv_freq, bool is_interleaved, float factor) {
    size_t per_token = 2 * inv_freq.size();
    ropes_.push_back({std::move(inv_freq), is_interleaved, factor,
                      std::vector<float>(per_token * static_cast<size_t>(max_tokens_))});
    return static_cast<int>(ropes_.size()) - 1;
}

void Program::begin_rows(bool is_rows) {
    regions_.push_back({Region::What::ROWS, is_rows, {}, {}, {}, 0});
}
void Program::row_op(const RowStep& step) { regions_.back().row_ops.push_back(step); }

void Program::begin_linears(bool is_rows) {
    regions_.push_back({Region::What::LINEARS, is_rows, {}, {}, {}, 0});
}
void Program::linear(const LinearStep& step) {
    regions_.back().linears.push_back(step);
    regions_.back().panels += step.weight->panels;
}

void Program::attend(const AttendStep& step) {
    regions_.push_back({Region::What::ATTEND, false, {}, {}, step, 0});
    regions_.push_back({Region::What::MERGE, false, {}, {}, step, 0});
}

void Program::finish(int output_buffer, int output_width) {
    output_ = output_buffer;
    output_width_ = output_width;
}

// ---------------------------------------------------------------- replay

const float* Program::run(const StepInput& input) {
    std::lock_guard<std::mutex> lock(pool_.turn());
    input_ = input;
    make_tiles();
    plan_splits();
    for (int t = 0; t < input.tokens; t++) make_rope_tables(t);
    pool_.run(*this);
    return buffers_[static_cast<size_t>(output_)].data;
}

void Program::make_tiles() {
    tiles_.clear();
    for (int s = 0; s < input_.seqs; s++) {
        int begin = input_.cu_seqlens[s], end = input_.cu_seqlens[s + 1];
        int first = input_.context_lens[s] - (end - begin);
        for (int t = begin; t < end; t++) token_seq_[static_cast<size_t>(t)] = s;
        for (int t = begin; t < end; t += QUERY_TILE) {
            int count = end - t < QUERY_TILE ? end - t : QUERY_TILE;
            tiles_.push_back({s, t, count, first + t - begin});
        }
    }
}

// One token per sequence, a long context, and too few (sequence, head) pairs for the threads. The
// merge does what one thread would have done, so splitting changes no bit.
void Program::plan_splits() {
    splits_ = 0;
    const int longest = *std::max_element(input_.context_lens, input_.context_lens + input_.seqs);
    const bool is_decode = input_.tokens == input_.seqs;
    if (!is_decode || longest <= SPLIT || num_items() >= 4 * pool_.num_threads()) return;
    splits_ = (longest + SPLIT - 1) / SPLIT;
    int heads = 0;
    for (const Region& r : regions_)
        if (r.what == Region::What::ATTEND) heads = std::max(heads, r.attend.num_heads);
    // Grows only when a context is longer than any before.
    partials_.resize(std::max(partials_.size(), static_cast<size_t>(input_.seqs) * heads * splits_ *
                                                    partial_stride(kv_->head_dim)));
}

void Program::make_rope_tables(int token) {
    for (RopeTable& r : ropes_) {
        size_t half = r.inv_freq.size();
        float* out = r.cos_sin.data() + static_cast<size_t>(token) * 2 * half;
        double position = input_.positions[token];
        for (size_t i = 0; i < half; i++) {
            double angle = position * r.inv_freq[i];
            out[i] = static_cast<float>(cos(angle)) * r.factor;
            out[half + i] = static_cast<float>(sin(angle)) * r.factor;
        }
    }
}

// Chunks small enough that no thread waits long for the last one, large enough to stream.
int Program::panels_per_chunk(const Region& r) const {
    int chunk = r.panels / (pool_.num_threads() * 4);
    return chunk < 1 ? 1 : (chunk > 64 ? 64 : chunk);
}

int Program::num_chunks(int region) const {
    const Region& r = regions_[static_cast<size_t>(region)];
    switch (r.what) {
        case Region::What::ROWS: return (rows_of(r) + MAX_TILE - 1) / MAX_TILE;
        case Region::What::LINEARS: {
            if (rows_of(r) == 0) return 0;
            int per = panels_per_chunk(r);
            return (r.panels + per - 1) / per;
        }
        case Region::What::ATTEND: return num_items() * (splits_ > 0 ? splits_ : 1);
        default: return splits_ > 0 ? num_items() : 0;
    }
}

void Program::run_chunk(int region, int chunk, int) {
    const Region& r = regions_[static_cast<size_t>(region)];
    if (r.what == Region::What::ROWS) {
        int begin = chunk * MAX_TILE, rows = rows_of(r);
        int end = begin + MAX_TILE < rows ? begin + MAX_TILE : rows;
        for (const RowStep& s : r.row_ops) run_row_op(s, begin, end);
    } else if (r.what == Region::What::LINEARS) {
        int per = panels_per_chunk(r), begin = chunk * per;
        run_linears(r, begin, begin + per < r.panels ? begin + per : r.panels);
    } else if (r.what == Region::What::ATTEND) {
        run_attend(r.attend, chunk);
    } else {
        run_merge(r.attend, chunk);
    }
}

// ---------------------------------------------------------------- row-wise ops

void Program::run_row_op(const RowStep& s, int begin, int end) {
    if (s.op ==
        RowOp::QUANTIZE) {  // rows [begin, end) are one tile: begin is a multiple of MAX_TILE
        const Buffer& out = buffers_[static_cast<size_t>(s.out)];
        int32_t* words = out.words() + static_cast<size_t>(begin) * static_cast<size_t>(out.width);
        int stride = buffers_[static_cast<size_t>(s.a)].width;
        kernels_.quantize(row(s.a, begin), stride, end - begin, s.width, words);
        return;
    }
    for (int i = begin; i < end; i++) run_row(s, i);
}

void Program::run_row(const RowStep& s, int i) {
    const float* a = s.a >= 0 ? row(s.a, i) : nullptr;
    const float* b = s.b >= 0 ? row(s.b, i) : nullptr;
    float* out = s.out >= 0 ? row(s.out, i) : nullptr;
    switch (s.op) {
        case RowOp::EMBEDDING: return unpack_row(*s.weight, input_.token_ids[i], out);
        case RowOp::RMS_NORM: {
            const float* w = s.weight ? reinterpret_cast<const float*>(s.weight->data) : nullptr;
            for (int h = 0; h < s.count; h++)
                kernels_.rms_norm(a + h * s.width, w, s.width, s.value, out + h * s.width);
            return;
        }
        case RowOp::ROPE: {
            const RopeTable& t = ropes_[static_cast<size_t>(s.table)];
            int rotary = 2 * static_cast<int>(t.inv_freq.size());
            const float* cs =
                t.cos_sin.data() + static_cast<size_t>(i) * static_cast<size_t>(rotary);
            return kernels_.rope(a, cs, s.count, s.width, rotary, t.is_interleaved, out);
        }
        case RowOp::GLU_SILU: return kernels_.silu_mul(a, b, s.width, out);
        case RowOp::GLU_GELU_TANH: return kernels_.gelu_tanh_mul(a, b, s.width, out);
        case RowOp::ADD:
            for (int j = 0; j < s.width; j++) out[j] = a[j] + b[j];
            return;
        case RowOp::SCALE:
            for (int j = 0; j < s.width; j++) out[j] = a[j] * s.value;
            return;
        case RowOp::SOFTCAP: return kernels_.softcap(a, s.width, s.value, out);
        case RowOp::TAKE_ROWS:
            memcpy(out, row(s.a, input_.rows[i]), sizeof(float) * static_cast<size_t>(s.width));
            return;
        case RowOp::KV_WRITE: return run_kv_write(s, i);
        case RowOp::QUANTIZE: return;  // by tile, above
    }
}

void Program::run_kv_write(const RowStep& s, int i) {
    int seq = token_seq_[static_cast<size_t>(i)], position = input_.positions[i];
    KvWriteArgs a{};
    a.k = row(s.a, i);
    a.v = row(s.b, i);
    a.kv = kv_->layer(s.layer);
    a.is_f16 = kv_->is_f16;
    a.num_kv_heads = kv_->num_kv_heads;
    a.head_dim = kv_->head_dim;
    a.page_elements = kv_->page_elements();
    a.page = input_.page_table[static_cast<size_t>(seq) * input_.max_pages + position / PAGE];
    a.slot = position % PAGE;
    kernels_.kv_write(a);
}

// ---------------------------------------------------------------- linears and attention

void Program::run_linears(const Region& r, int begin, int end) {
    int first = 0;
    for (const LinearStep& s : r.linears) {
        int from = begin - first, to = end - first;
        if (from < 0) from = 0;
        if (to > s.weight->panels) to = s.weight->panels;
        if (from < to) run_linear(r, s, from, to);
        first += s.weight->panels;
    }
}

void Program::run_linear(const Region& r, const LinearStep& s, int begin, int end) {
    const Buffer& in = buffers_[static_cast<size_t>(s.in)];
    const Buffer& out = buffers_[static_cast<size_t>(s.out)];
    LinearArgs a{};
    a.weight = s.weight->data;
    a.format = s.weight->format;
    a.layout = s.weight->layout;
    a.n = s.weight->n;
    a.k = s.weight->k;
    a.begin = begin;
    a.end = end;
    a.bias = s.bias ? reinterpret_cast<const float*>(s.bias->data) : nullptr;
    a.x = in.data;
    a.ldx = in.width;
    a.xq = in.words();
    a.tokens = rows_of(r);
    a.y = out.data;
    a.ldy = out.width;
    kernels_.linear(a);
}

AttendArgs Program::attend_args(const AttendStep& s, int item) const {
    const QueryTile& tile = tiles_[static_cast<size_t>(item / kv_->num_kv_heads)];
    int kv_head = item % kv_->num_kv_heads;
    int group = s.num_heads / kv_->num_kv_heads, dim = kv_->head_dim;
    size_t offset = kv_->head_elements() * static_cast<size_t>(kv_head) * (kv_->is_f16 ? 2 : 4);
    AttendArgs a{};
    a.q = row(s.q, tile.token) + kv_head * group * dim;
    a.q_stride = buffers_[static_cast<size_t>(s.q)].width;
    a.out = row(s.out, tile.token) + kv_head * group * dim;
    a.out_stride = buffers_[static_cast<size_t>(s.out)].width;
    a.head_dim = dim;
    a.group = group;
    a.kv = kv_->layer(s.layer) + offset;
    a.is_f16 = kv_->is_f16;
    a.page_elements = kv_->page_elements();
    a.pages = input_.page_table + static_cast<size_t>(tile.seq) * input_.max_pages;
    a.position = tile.position;
    a.tokens = tile.count;
    a.scale = s.scale;
    a.window = s.window;
    a.softcap = s.softcap;
    return a;
}

int Program::first_split(const AttendStep& s, const QueryTile& tile) const {
    int lowest = s.window > 0 ? std::max(tile.position + 1 - s.window, 0) : 0;
    return lowest / SPLIT;
}

void Program::run_attend(const AttendStep& s, int chunk) {
    if (splits_ == 0) return kernels_.attend(attend_args(s, chunk));
    const int item = chunk / splits_, split = chunk % splits_;
    const QueryTile& tile = tiles_[static_cast<size_t>(item / kv_->num_kv_heads)];
    if (split < first_split(s, tile) || split > tile.position / SPLIT) return;
    AttendArgs a = attend_args(s, item);
    a.partial =
        partials_.data() + static_cast<size_t>(chunk) * a.group * partial_stride(a.head_dim);
    a.split = split;
    kernels_.attend(a);
}

void Program::run_merge(const AttendStep& s, int item) {
    const QueryTile& tile = tiles_[static_cast<size_t>(item / kv_->num_kv_heads)];
    const int first = first_split(s, tile);
    AttendArgs a = attend_args(s, item);
    a.partial = partials_.data() +
                static_cast<size_t>(item * splits_ + first) * a.group * partial_stride(a.head_dim);
    kernels_.attend_merge(a, tile.position / SPLIT - first + 1);
}

}  // namespace headrace
