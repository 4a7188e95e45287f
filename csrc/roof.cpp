#include "roof.h"

#include <algorithm>
#include <vector>

namespace headrace {

namespace {

constexpr size_t CHUNK = size_t{1} << 20;  // as much as a chunk of a large linear

}  // namespace

uint32_t read_sum(Pool& pool, const Kernels& kernels, const Weight& weight) {
    const size_t bytes = weight.bytes();
    const int chunks = static_cast<int>((bytes + CHUNK - 1) / CHUNK);
    std::vector<uint32_t> sums(static_cast<size_t>(chunks));
    pool.parallel_for(chunks, [&](int, int chunk) {
        const size_t begin = static_cast<size_t>(chunk) * CHUNK;
        sums[static_cast<size_t>(chunk)] =
            kernels.read_sum(weight.data + begin, std::min(CHUNK, bytes - begin));
    });
    uint32_t sum = 0;
    for (uint32_t s : sums) sum += s;
    return sum;
}

double peak(Pool& pool, const Kernels& kernels, bool is_int8, int64_t rounds) {
    // Many chunks: one for each thread might all be taken by the first to come.
    constexpr int PER_THREAD = 32;
    const int chunks = pool.num_threads() * PER_THREAD;
    const int64_t share = (rounds + PER_THREAD - 1) / PER_THREAD;
    std::vector<double> ops(static_cast<size_t>(chunks));
    pool.parallel_for(chunks, [&](int, int chunk) {
        ops[static_cast<size_t>(chunk)] =
            is_int8 ? kernels.dot_peak(share) : kernels.fma_peak(share);
    });
    double sum = 0;
    for (double o : ops) sum += o;
    return sum;
}

}  // namespace headrace
