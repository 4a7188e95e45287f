// A small thread pool that runs a list of steps with its threads kept hot between them.
//
// A job is a list of regions, each cut into chunks; chunks are claimed one by one and a region is
// over when its chunks are done, not when every thread has arrived. So a thread that the system has
// put aside holds nobody up unless it owns a chunk, and throughput falls by no more than its share.
// Counters carry the job's number, which only grows: a thread that wakes late finds newer numbers,
// claims nothing and touches no job, so nobody waits for it. Callers take turns: a job, and
// whatever must not change under it, belongs to whoever holds `turn()`. Between jobs, workers spin
// briefly, then park on a futex.
#pragma once

#include <stdint.h>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "slab.h"

namespace headrace {

class Job {
public:
    virtual ~Job() = default;
    virtual int num_regions() const = 0;
    virtual int num_chunks(int region) const = 0;
    virtual void run_chunk(int region, int chunk, int thread) = 0;
};

class Pool {
public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }
    SlabAllocator& slabs() { return slabs_; }

    // One caller at a time: held during `run`.
    std::mutex& turn() { return turn_; }

    // Runs every region in order; the caller holds `turn()` and takes part as thread 0.
    void run(Job& job);

    // fn(thread, index) for index in [0, count); takes its turn.
    void parallel_for(int count, const std::function<void(int, int)>& fn);

private:
    struct alignas(64) Counter {
        std::atomic<uint64_t> next{0};  // job number << CHUNK_BITS | next chunk
        std::atomic<uint64_t> done{0};  // job number << CHUNK_BITS | chunks done
        std::atomic<int> chunks{0};
    };
    static constexpr int CHUNK_BITS = 24;

    void work(uint64_t number, int thread);
    void worker(int thread);
    void prepare(Job& job, uint64_t number);

    int num_threads_;
    std::mutex turn_;
    SlabAllocator slabs_;
    std::vector<std::thread> threads_;
    std::unique_ptr<Counter[]> counters_;
    int capacity_ = 0;
    std::atomic<int> regions_{0};
    Job* job_ = nullptr;               // read only by the owner of a claimed chunk
    std::atomic<uint64_t> number_{0};  // of the newest job; even: none is open
    std::atomic<int> busy_{0};         // workers inside work(): the counters must outlive them
    std::atomic<int> parked_{0};
    std::atomic<bool> is_stopping_{false};
};

}  // namespace headrace
