#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

namespace {

void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// About 50 us of pauses (40 cycles each on recent x86): longer than the gap between two steps'
// native calls when Python is quick, short enough not to burn a core between requests.
constexpr int SPINS_BEFORE_PARK = 4000;
// Waiting for another thread's chunk: after this many pauses it has probably lost its core; let it
// run.
constexpr int SPINS_BEFORE_YIELD = 2000;

}  // namespace

Pool::Pool(int num_threads) : num_threads_(num_threads) {
    for (int t = 1; t < num_threads_; t++) threads_.emplace_back([this, t] { worker(t); });
}

Pool::~Pool() {
    is_stopping_.store(true);
    number_.fetch_add(2);  // stays even: no job, only a reason to wake
    number_.notify_all();
    for (std::thread& t : threads_) t.join();
}

void Pool::prepare(Job& job, uint64_t number) {
    const int regions = job.num_regions();
    if (regions > capacity_) {
        while (busy_.load(std::memory_order_seq_cst) != 0) pause_cpu();
        counters_ = std::make_unique<Counter[]>(static_cast<size_t>(regions));
        capacity_ = regions;
    }
    const uint64_t base = number << CHUNK_BITS;
    // `next` first: a late thread of an older job that already sees the new number of chunks must
    // find the counter out of its reach, or it would claim a chunk that its job never had.
    for (int r = 0; r < regions; r++) {
        Counter& c = counters_[static_cast<size_t>(r)];
        c.next.store(base, std::memory_order_relaxed);
        c.chunks.store(job.num_chunks(r), std::memory_order_release);
        c.done.store(base, std::memory_order_relaxed);
    }
    regions_.store(regions, std::memory_order_release);
    job_ = &job;
}

void Pool::run(Job& job) {
    const uint64_t number = number_.load(std::memory_order_relaxed) + 1;  // odd: open
    prepare(job, number);
    number_.store(number, std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) > 0) number_.notify_all();
    work(number, 0);
    number_.store(number + 1, std::memory_order_seq_cst);  // before `prepare` looks at busy_
}

void Pool::work(uint64_t number, int thread) {
    const uint64_t base = number << CHUNK_BITS;
    const int regions = regions_.load(std::memory_order_acquire);
    for (int r = 0; r < regions; r++) {
        Counter& c = counters_[static_cast<size_t>(r)];
        const uint64_t end = base + static_cast<uint64_t>(c.chunks.load(std::memory_order_acquire));
        uint64_t at = c.next.load(std::memory_order_acquire);
        while (at < end) {
            if (!c.next.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel)) continue;
            job_->run_chunk(r, static_cast<int>(at - base), thread);
            c.done.fetch_add(1, std::memory_order_acq_rel);
            at = c.next.load(std::memory_order_acquire);
        }
        for (int spins = 0; c.done.load(std::memory_order_acquire) < end; spins++) {
            pause_cpu();
            if (spins > SPINS_BEFORE_YIELD) std::this_thread::yield();
        }
    }
}

void Pool::worker(int thread) {
    uint64_t seen = 0;
    while (!is_stopping_.load(std::memory_order_relaxed)) {
        uint64_t number = number_.load(std::memory_order_seq_cst);
        for (int spins = 0; number == seen && spins < SPINS_BEFORE_PARK; spins++) {
            pause_cpu();
            number = number_.load(std::memory_order_seq_cst);
        }
        if (number == seen) {
            parked_.fetch_add(1, std::memory_order_seq_cst);
            number_.wait(seen, std::memory_order_seq_cst);
            parked_.fetch_sub(1, std::memory_order_seq_cst);
            continue;
        }
        seen = number;
        if (number % 2 == 0) continue;
        busy_.fetch_add(1, std::memory_order_seq_cst);
        if (number_.load(std::memory_order_seq_cst) == number) work(number, thread);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::parallel_for(int count, const std::function<void(int, int)>& fn) {
    struct Simple final : Job {
        int count;
        const std::function<void(int, int)>* fn;
        int num_regions() const override { return 1; }
        int num_chunks(int) const override { return count; }
        void run_chunk(int, int chunk, int thread) override { (*fn)(thread, chunk); }
    } job;
    job.count = count;
    job.fn = &fn;
    std::lock_guard<std::mutex> lock(turn_);
    run(job);
}

}  // namespace headrace
