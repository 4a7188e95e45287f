// The only checker between Python and the kernels: shapes, ranges, page ids, token ids, and that
// the recorded ops fit their buffers. Each error is a std::invalid_argument that names the bad
// argument; below the bindings nothing is checked again.
#pragma once

#include <stdexcept>
#include <string>

#include "program.h"

namespace headrace {

// Messages are literals: a step checks thousands of conditions, none may build a string.
inline void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
}

// A panel weight that is a plain vector of n floats (a bias, a norm's gain).
void check_vector(const Weight& w, int n, const char* message);

void check_pool_size(int num_threads);
void check_kv_size(int layers, int kv_heads, int head_dim, int pages);
void check_limits(int max_tokens, int max_seqs, int max_rows, int vocab);

// ---- recording
void check_row_op(const Program& p, const RowStep& s, int vocab);
void check_linear(const Program& p, const LinearStep& s);
void check_attend(const Program& p, const AttendStep& s);
void check_finish(const Program& p, int output, int width);

// ---- replay
void check_step(const Program& p, const StepInput& in, int vocab);

}  // namespace headrace
