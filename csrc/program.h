// A model's forward, recorded once and replayed in one call per step.
//
// The recorder (backends/cpu.py) appends ops over buffers; rows are symbolic: T tokens of the step
// or R rows whose logits are wanted. Consecutive ops that work row by row form one region without a
// barrier between them, and so do linears that read the same input. Arithmetic is in the kernels;
// here is only who does what when. Buffers are sized once for the largest step; a run allocates
// nothing.
#pragma once

#include <stdint.h>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "pool.h"

namespace headrace {

// Keys and values of all layers, zeroed by the system as pages are first touched.
struct KvPool {
    int num_layers, num_kv_heads, head_dim, num_pages;
    bool is_f16;
    size_t num_bytes;
    Slab slab;

    KvPool(int layers, int kv_heads, int dim, int pages, bool f16);
    size_t head_elements() const { return 2u * PAGE * static_cast<size_t>(head_dim); }
    size_t page_elements() const { return head_elements() * static_cast<size_t>(num_kv_heads); }
    uint8_t* layer(int index) const {
        return slab.data() + static_cast<size_t>(index) * static_cast<size_t>(num_pages) *
                                 page_elements() * (is_f16 ? 2 : 4);
    }
};

// One step's inputs; shapes as StepArrays in backends/ops.py. Checked by checks.h.
struct StepInput {
    const int32_t* token_ids;
    const int32_t* positions;
    const int32_t* cu_seqlens;
    const int32_t* context_lens;
    const int32_t* page_table;
    const int32_t* rows;
    int tokens, seqs, num_rows, max_pages;
};

struct RopeTable {
    std::vector<double> inv_freq;
    bool is_interleaved;
    float factor;
    std::vector<float> cos_sin;  // [max_tokens][2 * inv_freq.size()]
};

enum class RowOp : uint8_t {
    EMBEDDING,
    RMS_NORM,
    ROPE,
    GLU_SILU,
    GLU_GELU_TANH,
    ADD,
    SCALE,
    SOFTCAP,
    TAKE_ROWS,
    QUANTIZE,
    KV_WRITE,
};

// One row-wise op; the fields an op does not use stay zero.
struct RowStep {
    RowOp op;
    int a = -1, b = -1, out = -1;  // buffers
    const Weight* weight = nullptr;
    int width = 0;       // of one row (RMS_NORM: of the normed axis)
    int count = 1;       // RMS_NORM and ROPE: heads per row
    float value = 0.0f;  // eps, factor or cap
    int table = -1;      // ROPE
    int layer = -1;      // KV_WRITE
};

struct LinearStep {
    int in, out;
    const Weight* weight;
    const Weight* bias;
};

struct AttendStep {
    int q, out, layer, num_heads;
    float scale;
    int window;
    float softcap;
};

class Program final : public Job {
public:
    struct Buffer {
        int width;  // words of one row
        bool is_rows, is_quantized;
        float* data;
        int32_t* words() const { return reinterpret_cast<int32_t*>(data); }
    };
    struct Region {
        enum class What : uint8_t { ROWS, LINEARS, ATTEND, MERGE } what;
        bool is_rows;
        std::vector<RowStep> row_ops;
        std::vector<LinearStep> linears;
        AttendStep attend{};
        int panels = 0;
    };

    Program(Pool& pool, const Kernels& kernels, KvPool* kv, int max_tokens, int max_seqs,
            int max_rows);
    ~Program() override;

    // ---- recording
    int add_buffer(int width, bool is_rows);
    int add_quantized_buffer(int k, bool is_rows);
    int add_rope(std::vector<double> inv_freq, bool is_interleaved, float factor);
    void begin_rows(bool is_rows);  // opens a region of row-wise ops
    void row_op(const RowStep& step);
    void begin_linears(bool is_rows);  // opens a region of linears
    void linear(const LinearStep& step);
    void attend(const AttendStep& step);
    void finish(int output_buffer, int output_width);
    const std::vector<Buffer>& buffers() const { return buffers_; }
    const std::vector<Region>& regions() const { return regions_; }
    const std::vector<RopeTable>& ropes() const { return ropes_; }

    // ---- replay: logits [num_rows][output_width], valid until the next run
    const float* run(const StepInput& input);
    int output_width() const { return output_width_; }
    int max_tokens() const { return max_tokens_; }
    int max_seqs() const { return max_seqs_; }
    int max_rows() const { return max_rows_; }
    const KvPool* kv() const { return kv_; }

    // ---- Job
    int num_regions() const override { return static_cast<int>(regions_.size()); }
    int num_chunks(int region) const override;
    void run_chunk(int region, int chunk, int thread) override;

private:
    struct QueryTile {  // consecutive tokens of one sequence
        int seq, token, count, position;
    };

    float* allocate(size_t count);
    int add(int width, bool is_rows, bool is_quantized);
    int rows_of(const Region& r) const { return r.is_rows ? input_.num_rows : input_.tokens; }
    int panels_per_chunk(const Region& r) const;
    int num_items() const { return static_cast<int>(tiles_.size()) * kv_->num_kv_heads; }
    float* row(int buffer, int index) const {
        const Buffer& b = buffers_[static_cast<size_t>(buffer)];
        return b.data + static_cast<size_t>(index) * static_cast<size_t>(b.width);
    }
    void run_row_op(const RowStep& s, int begin, int end);
    void run_row(const RowStep& s, int index);
    void run_kv_write(const RowStep& s, int index);
    void run_linear(const Region& r, const LinearStep& s, int begin, int end);
    void run_linears(const Region& r, int begin, int end);
    AttendArgs attend_args(const AttendStep& s, int item) const;
    int first_split(const AttendStep& s, const QueryTile& tile) const;
    void run_attend(const AttendStep& s, int chunk);
    void run_merge(const AttendStep& s, int item);
    void make_tiles();
    void plan_splits();
    void make_rope_tables(int token);

    Pool& pool_;
    const Kernels& kernels_;
    KvPool* kv_;
    int max_tokens_, max_seqs_, max_rows_;
    int output_ = -1, output_width_ = 0;
    std::vector<Buffer> buffers_;
    std::vector<float*> owned_;
    std::vector<Region> regions_;
    std::vector<RopeTable> ropes_;
    std::vector<QueryTile> tiles_;
    std::vector<int> token_seq_;  // which sequence a token belongs to
    // Long contexts with few sequences: keys are split so that every thread has work. 0: not split.
    int splits_ = 0;
    std::vector<float> partials_;
    StepInput input_{};
};

}  // namespace headrace
