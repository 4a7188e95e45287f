// Python sees five classes: Pool, Weight, KvPool, Program, and test entries for single kernels.
//
// Arguments are checked by checks.h before anything else sees them; arrays must have the right type
// and layout, none is converted. The GIL is released while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "checks.h"
#include "kernels.h"
#include "pack.h"
#include "pool.h"
#include "program.h"
#include "roof.h"

namespace nb = nanobind;
using namespace headrace;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<nb::numpy, float, nb::ndim<1>, nb::c_contig>;
using Floats2 = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

const Kernels& kernels_named(const std::string& name) {
    const Kernels* k = select_kernels(name.c_str());
    if (!k) throw std::invalid_argument("isa: '" + name + "' is not available on this CPU");
    return *k;
}

// ---------------------------------------------------------------- weights

std::unique_ptr<Weight> make_weight(int kind, const std::vector<Bytes>& parts,
                                    const std::vector<int>& rows, int k, Pool& pool) {
    int elements = 0, bytes = 0;
    require(kind_geometry(static_cast<Kind>(kind), &elements, &bytes), "kind: not known");
    require(k > 0 && k % elements == 0, "k: no multiple of the block");
    require(!parts.empty() && parts.size() == rows.size(), "parts: not as many as rows");
    size_t row_bytes = static_cast<size_t>(k / elements) * static_cast<size_t>(bytes);
    std::vector<PackPart> list;
    for (size_t i = 0; i < parts.size(); i++) {
        require(rows[i] > 0, "rows: must be positive");
        require(parts[i].size() == row_bytes * static_cast<size_t>(rows[i]),
                "parts: bytes do not agree with rows and k");
        list.push_back({parts[i].data(), rows[i]});
    }
    nb::gil_scoped_release release;
    return pack(static_cast<Kind>(kind), list.data(), static_cast<int>(list.size()), k, pool);
}

Floats weight_row(const Weight& w, int row) {
    require(row >= 0 && row < w.n, "row: out of range");
    float* out = new float[static_cast<size_t>(w.k)];
    unpack_row(w, row, out);
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return Floats(out, {static_cast<size_t>(w.k)}, owner);
}

// ---------------------------------------------------------------- program

RowOp row_op_named(const std::string& name) {
    static constexpr struct {
        const char* name;
        RowOp op;
    } NAMES[] = {
        {"embedding", RowOp::EMBEDDING},
        {"rms_norm", RowOp::RMS_NORM},
        {"rope", RowOp::ROPE},
        {"glu_silu", RowOp::GLU_SILU},
        {"glu_gelu_tanh", RowOp::GLU_GELU_TANH},
        {"add", RowOp::ADD},
        {"scale", RowOp::SCALE},
        {"softcap", RowOp::SOFTCAP},
        {"take_rows", RowOp::TAKE_ROWS},
        {"quantize", RowOp::QUANTIZE},
        {"kv_write", RowOp::KV_WRITE},
    };
    for (const auto& n : NAMES)
        if (name == n.name) return n.op;
    throw std::invalid_argument("op: '" + name + "' is not known");
}

// A program with what it borrows kept alive, and the bounds its inputs are checked against.
struct BoundProgram {
    BoundProgram(Pool& pool, const std::string& isa, KvPool& kv, int max_tokens, int max_seqs,
                 int max_rows, int vocab)
        : program(pool, kernels_named(isa), &kv, max_tokens, max_seqs, max_rows), vocab(vocab) {}
    Program program;
    int vocab;
};

Floats2 run_program(BoundProgram& b, Ints token_ids, Ints positions, Ints cu_seqlens,
                    Ints context_lens, Ints2 page_table, Ints rows) {
    StepInput in{token_ids.data(),
                 positions.data(),
                 cu_seqlens.data(),
                 context_lens.data(),
                 page_table.data(),
                 rows.data(),
                 static_cast<int>(token_ids.size()),
                 static_cast<int>(context_lens.size()),
                 static_cast<int>(rows.size()),
                 static_cast<int>(page_table.shape(1))};
    require(positions.size() == token_ids.size(), "positions: one per token");
    require(cu_seqlens.size() == context_lens.size() + 1, "cu_seqlens: one more than sequences");
    require(page_table.shape(0) == context_lens.size(), "page_table: one row per sequence");
    check_step(b.program, in, b.vocab);
    const float* logits;
    {
        nb::gil_scoped_release release;
        logits = b.program.run(in);
    }
    size_t shape[2] = {static_cast<size_t>(in.num_rows),
                       static_cast<size_t>(b.program.output_width())};
    return Floats2(const_cast<float*>(logits), 2, shape, nb::find(&b));
}

// Scope-free helper: a linear without a program, for tests and benchmarks.
Floats2 run_linear(const std::string& isa, const Weight& w, const Weight* bias,
                   nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x) {
    const Kernels& kernels = kernels_named(isa);
    require(static_cast<int>(x.shape(1)) == w.k, "x: row length differs from the weight's");
    if (bias) check_vector(*bias, w.n, "bias: not a vector as long as the weight");
    int tokens = static_cast<int>(x.shape(0));
    std::vector<int32_t> xq;
    LinearArgs a{};
    a.weight = w.data;
    a.format = w.format;
    a.layout = w.layout;
    a.n = w.n;
    a.k = w.k;
    a.end = w.panels;
    a.bias = bias ? reinterpret_cast<const float*>(bias->data) : nullptr;
    a.x = x.data();
    a.ldx = w.k;
    a.tokens = tokens;
    if (!w.format.is_float()) {
        size_t words = static_cast<size_t>(w.layout.groups) * TILE_WORDS;
        xq.resize(words * x.shape(0));
        for (int t = 0; t < tokens; t += MAX_TILE) {
            int count = tokens - t < MAX_TILE ? tokens - t : MAX_TILE;
            kernels.quantize(x.data() + static_cast<size_t>(t) * w.k, w.k, count, w.k,
                             xq.data() + words * static_cast<size_t>(t));
        }
        a.xq = xq.data();
    }
    float* out = new float[x.shape(0) * static_cast<size_t>(w.n)];
    a.y = out;
    a.ldy = w.n;
    kernels.linear(a);
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return Floats2(out, {x.shape(0), static_cast<size_t>(w.n)}, owner);
}

Floats run_exp(const std::string& isa,
               nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> x) {
    float* out = new float[x.size()];
    kernels_named(isa).exp(x.data(), static_cast<int>(x.size()), out);
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return Floats(out, {x.size()}, owner);
}

uint32_t run_read_sum(const std::string& isa, const Weight& w, Pool& pool) {
    const Kernels& kernels = kernels_named(isa);
    nb::gil_scoped_release release;
    return read_sum(pool, kernels, w);
}

double run_peak(const std::string& isa, bool is_int8, int64_t rounds, Pool& pool) {
    const Kernels& kernels = kernels_named(isa);
    require(rounds > 0, "rounds: must be positive");
    nb::gil_scoped_release release;
    return peak(pool, kernels, is_int8, rounds);
}

std::vector<std::string> available_isas() {
    std::vector<std::string> out;
    for (const char* name : {"avx512_vnni", "avx512", "avx2", "neon", "scalar"})
        if (select_kernels(name)) out.emplace_back(name);
    return out;
}

void row_op(BoundProgram& b, const std::string& op, int a, int other, int out, const Weight* weight,
            int width, int count, float value, int index) {
    RowStep s{};
    s.op = row_op_named(op);
    s.a = a;
    s.b = other;
    s.out = out;
    s.weight = weight;
    s.width = width;
    s.count = count;
    s.value = value;
    s.table = s.op == RowOp::ROPE ? index : -1;
    s.layer = s.op == RowOp::KV_WRITE ? index : -1;
    check_row_op(b.program, s, b.vocab);
    b.program.row_op(s);
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("available_isas", &available_isas);
    m.def("run_linear", &run_linear, nb::arg("isa"), nb::arg("weight"), nb::arg("bias").none(),
          nb::arg("x").noconvert());
    m.def("run_exp", &run_exp, nb::arg("isa"), nb::arg("x").noconvert());
    m.def("run_read_sum", &run_read_sum, nb::arg("isa"), nb::arg("weight"), nb::arg("pool"));
    m.def("run_peak", &run_peak, nb::arg("isa"), nb::arg("is_int8"), nb::arg("rounds"),
          nb::arg("pool"));
    m.attr("PAGE_SIZE") = PAGE;

    nb::class_<Pool>(m, "Pool")
        .def(
            "__init__",
            [](Pool* self, int num_threads) {
                check_pool_size(num_threads);
                new (self) Pool(num_threads);
            },
            nb::arg("num_threads"))
        .def_prop_ro("num_threads", &Pool::num_threads);

    nb::class_<Weight>(m, "Weight")
        .def_prop_ro("shape", [](const Weight& w) { return nb::make_tuple(w.n, w.k); })
        .def_prop_ro("num_bytes", [](const Weight& w) { return w.bytes(); })
        .def_prop_ro("is_float", [](const Weight& w) { return w.format.is_float(); })
        .def("row", &weight_row);
    m.def("make_weight", &make_weight, nb::arg("kind"), nb::arg("parts").noconvert(),
          nb::arg("rows"), nb::arg("k"), nb::arg("pool"));

    nb::class_<KvPool>(m, "KvPool")
        .def(
            "__init__",
            [](KvPool* self, int layers, int kv_heads, int head_dim, int pages, bool is_f16) {
                check_kv_size(layers, kv_heads, head_dim, pages);
                new (self) KvPool(layers, kv_heads, head_dim, pages, is_f16);
            },
            nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
            nb::arg("num_pages"), nb::arg("is_f16"))
        .def_prop_ro("num_bytes", [](const KvPool& k) { return k.num_bytes; });

    nb::class_<BoundProgram>(m, "Program")
        .def(
            "__init__",
            [](BoundProgram* self, Pool& pool, const std::string& isa, KvPool& kv, int max_tokens,
               int max_seqs, int max_rows, int vocab) {
                check_limits(max_tokens, max_seqs, max_rows, vocab);
                new (self) BoundProgram(pool, isa, kv, max_tokens, max_seqs, max_rows, vocab);
            },
            nb::arg("pool"), nb::arg("isa"), nb::arg("kv"), nb::arg("max_tokens"),
            nb::arg("max_seqs"), nb::arg("max_rows"), nb::arg("vocab"), nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 4>())
        .def("add_buffer",
             [](BoundProgram& b, int width, bool is_rows) {
                 require(width > 0, "width: must be positive");
                 return b.program.add_buffer(width, is_rows);
             })
        .def("add_quantized_buffer",
             [](BoundProgram& b, int k, bool is_rows) {
                 require(k > 0 && k % GROUP == 0, "k: must be a positive multiple of 32");
                 return b.program.add_quantized_buffer(k, is_rows);
             })
        .def("add_rope", [](BoundProgram& b, std::vector<double> f, bool i,
                            float s) { return b.program.add_rope(std::move(f), i, s); })
        .def("begin_rows", [](BoundProgram& b, bool r) { b.program.begin_rows(r); })
        .def("row_op", &row_op, nb::arg("op"), nb::arg("a"), nb::arg("b"), nb::arg("out"),
             nb::arg("weight").none(), nb::arg("width"), nb::arg("count"), nb::arg("value"),
             nb::arg("index"), nb::keep_alive<1, 6>())
        .def("begin_linears", [](BoundProgram& b, bool r) { b.program.begin_linears(r); })
        .def(
            "linear",
            [](BoundProgram& b, int in, int out, const Weight& w, const Weight* bias) {
                const LinearStep step{in, out, &w, bias};
                check_linear(b.program, step);
                b.program.linear(step);
            },
            nb::arg("input"), nb::arg("out"), nb::arg("weight"), nb::arg("bias").none(),
            nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
        .def("attend",
             [](BoundProgram& b, int q, int out, int layer, int heads, float scale, int window,
                float cap) {
                 const AttendStep step{q, out, layer, heads, scale, window, cap};
                 check_attend(b.program, step);
                 b.program.attend(step);
             })
        .def("finish",
             [](BoundProgram& b, int output, int width) {
                 check_finish(b.program, output, width);
                 b.program.finish(output, width);
             })
        .def("run", &run_program, nb::arg("token_ids").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("cu_seqlens").noconvert(),
             nb::arg("context_lens").noconvert(), nb::arg("page_table").noconvert(),
             nb::arg("rows").noconvert());
}
