#include "checks.h"

#include <new>

namespace headrace {

namespace {

constexpr int MAX_THREADS = 256;    // twin of backends/cpu.py
constexpr double MAX_BYTES = 1e14;  // no machine has more; sizes stay far from overflow

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

// Buffer `id` holds rows of `width` floats (or `width` quantised elements) of the given axis.
void check_buffer(const Program& p, const char* name, int id, int width, bool is_rows,
                  bool is_quantized = false) {
    const auto& buffers = p.buffers();
    if (id < 0 || static_cast<size_t>(id) >= buffers.size())
        fail(std::string(name) + ": there is no buffer " + std::to_string(id));
    const Program::Buffer& b = buffers[static_cast<size_t>(id)];
    const int words = is_quantized ? width / GROUP * TILE_WORDS : width;
    if (b.width != words)
        fail(std::string(name) + ": buffer " + std::to_string(id) + " has rows of " +
             std::to_string(b.width) + ", not " + std::to_string(words));
    if (b.is_rows != is_rows) fail(std::string(name) + ": tokens and rows asked for are mixed");
    if (b.is_quantized != is_quantized)
        fail(std::string(name) + ": floats and quantised activations are mixed");
}

void check_layer(const Program& p, int layer) {
    require(layer >= 0 && layer < p.kv()->num_layers, "layer: out of range");
}

const Program::Region& open_region(const Program& p, Program::Region::What what) {
    require(!p.regions().empty() && p.regions().back().what == what,
            "op: no region of its sort is open");
    return p.regions().back();
}

void check_rope(const Program& p, const RowStep& s) {
    require(s.table >= 0 && static_cast<size_t>(s.table) < p.ropes().size(),
            "index: there is no such rope");
    const RopeTable& t = p.ropes()[static_cast<size_t>(s.table)];
    require(2 * t.inv_freq.size() <= static_cast<size_t>(s.width),
            "index: the rope turns more than head_dim elements");
}

}  // namespace

void check_vector(const Weight& w, int n, const char* message) {
    require(w.format.quant == Quant::F32 && w.k == 1 && w.n == n, message);
}

void check_pool_size(int num_threads) {
    require(num_threads > 0 && num_threads <= MAX_THREADS, "num_threads: must be 1 to 256");
}

void check_kv_size(int layers, int kv_heads, int head_dim, int pages) {
    require(layers > 0, "num_layers: must be positive");
    require(kv_heads > 0 && kv_heads <= (1 << 16), "num_kv_heads: must be 1 to 65536");
    require(head_dim > 0 && head_dim <= MAX_HEAD_DIM && head_dim % PANEL == 0,
            "head_dim: must be a multiple of 16 up to 512");
    require(pages > 0, "num_pages: must be positive");
    if (8.0 * PAGE * layers * kv_heads * head_dim * pages > MAX_BYTES) throw std::bad_alloc();
}

void check_limits(int max_tokens, int max_seqs, int max_rows, int vocab) {
    require(max_tokens > 0, "max_tokens: must be positive");
    require(max_seqs > 0, "max_seqs: must be positive");
    require(max_rows > 0, "max_rows: must be positive");
    require(vocab > 0, "vocab: must be positive");
}

// ---------------------------------------------------------------- recording

void check_row_op(const Program& p, const RowStep& s, int vocab) {
    const bool is_rows = open_region(p, Program::Region::What::ROWS).is_rows;
    require(s.op == RowOp::EMBEDDING || s.op == RowOp::KV_WRITE || s.width > 0,
            "width: must be positive");
    require(s.count > 0 && s.count <= (1 << 20) && s.width <= (1 << 30) / s.count,
            "count: out of range");
    const int width = s.width * s.count;
    switch (s.op) {
        case RowOp::EMBEDDING:
            require(!is_rows, "op: an embedding is of tokens");
            require(s.weight && s.weight->n >= vocab, "weight: fewer rows than token ids");
            return check_buffer(p, "out", s.out, s.weight->k, false);
        case RowOp::KV_WRITE: {
            require(!is_rows, "op: keys and values are of tokens");
            const int heads = p.kv()->num_kv_heads * p.kv()->head_dim;
            check_layer(p, s.layer);
            check_buffer(p, "a", s.a, heads, false);
            return check_buffer(p, "b", s.b, heads, false);
        }
        case RowOp::TAKE_ROWS:
            require(is_rows, "op: what it takes are rows asked for");
            check_buffer(p, "a", s.a, width, false);
            return check_buffer(p, "out", s.out, width, true);
        case RowOp::QUANTIZE:
            require(s.width % GROUP == 0, "width: must be a multiple of 32");
            check_buffer(p, "a", s.a, width, is_rows);
            return check_buffer(p, "out", s.out, width, is_rows, true);
        case RowOp::ROPE:
            require(!is_rows, "op: rope needs the positions of tokens");
            check_rope(p, s);
            break;
        case RowOp::RMS_NORM:
            if (s.weight) check_vector(*s.weight, s.width, "weight: not a vector of that width");
            break;
        case RowOp::GLU_SILU:
        case RowOp::GLU_GELU_TANH:
        case RowOp::ADD: check_buffer(p, "b", s.b, width, is_rows); break;
        case RowOp::SCALE:
        case RowOp::SOFTCAP: break;
    }
    check_buffer(p, "a", s.a, width, is_rows);
    check_buffer(p, "out", s.out, width, is_rows);
}

void check_linear(const Program& p, const LinearStep& s) {
    const bool is_rows = open_region(p, Program::Region::What::LINEARS).is_rows;
    check_buffer(p, "input", s.in, s.weight->k, is_rows, !s.weight->format.is_float());
    check_buffer(p, "out", s.out, s.weight->n, is_rows);
    if (s.bias) check_vector(*s.bias, s.weight->n, "bias: not a vector as long as the weight");
}

void check_attend(const Program& p, const AttendStep& s) {
    check_layer(p, s.layer);
    require(s.num_heads > 0 && s.num_heads <= (1 << 20) && s.num_heads % p.kv()->num_kv_heads == 0,
            "num_heads: must be a multiple of num_kv_heads");
    require(s.window >= 0, "window: must not be negative");
    check_buffer(p, "q", s.q, s.num_heads * p.kv()->head_dim, false);
    check_buffer(p, "out", s.out, s.num_heads * p.kv()->head_dim, false);
}

void check_finish(const Program& p, int output, int width) {
    check_buffer(p, "output", output, width, true);
}

// ---------------------------------------------------------------- replay

namespace {

void check_sequence(const Program& p, const StepInput& in, int s) {
    const int begin = in.cu_seqlens[s], end = in.cu_seqlens[s + 1], context = in.context_lens[s];
    require(begin < end, "cu_seqlens: a sequence has no tokens");
    require(end <= in.tokens, "cu_seqlens: must run from 0 to the number of tokens");
    require(context >= end - begin, "context_lens: shorter than the tokens of the step");
    const int pages = (context - 1) / PAGE + 1;
    require(pages <= in.max_pages, "page_table: too few pages for the context");
    const int32_t* table = in.page_table + static_cast<size_t>(s) * in.max_pages;
    for (int i = 0; i < pages; i++)
        require(table[i] >= 0 && table[i] < p.kv()->num_pages, "page_table: page id out of range");
    const int first = context - (end - begin);
    for (int t = begin; t < end; t++)
        require(in.positions[t] == first + t - begin,
                "positions: must be consecutive and end at the context length");
}

}  // namespace

void check_step(const Program& p, const StepInput& in, int vocab) {
    require(p.output_width() > 0, "run: the program was not finished");
    require(in.tokens > 0 && in.tokens <= p.max_tokens(), "token_ids: count out of range");
    require(in.seqs > 0 && in.seqs <= p.max_seqs(), "context_lens: count out of range");
    require(in.num_rows <= p.max_rows(), "rows: count out of range");
    require(in.cu_seqlens[0] == 0 && in.cu_seqlens[in.seqs] == in.tokens,
            "cu_seqlens: must run from 0 to the number of tokens");
    for (int s = 0; s < in.seqs; s++) check_sequence(p, in, s);
    for (int t = 0; t < in.tokens; t++)
        require(in.token_ids[t] >= 0 && in.token_ids[t] < vocab, "token_ids: id out of range");
    for (int r = 0; r < in.num_rows; r++)
        require(in.rows[r] >= 0 && in.rows[r] < in.tokens, "rows: index out of range");
}

}  // namespace headrace
