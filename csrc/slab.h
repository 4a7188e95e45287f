// Memory for packed weights: large slabs on huge pages.
//
// Decode streams every weight once per step; on 4 KiB pages the walks of the page table cost a
// third of the time (docs/LOG.md). Slabs are 2 MiB aligned and asked to be huge; matrices are cut
// from them in order and a slab goes when its last matrix does.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <memory>
#include <mutex>

namespace headrace {

class Slab {
public:
    explicit Slab(size_t bytes);
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;
    ~Slab();

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Where a matrix lies, and the slab that must outlive it.
struct Span {
    std::shared_ptr<Slab> slab;
    uint8_t* data = nullptr;
};

class SlabAllocator {
public:
    // 64-byte aligned, contents undefined. Throws std::bad_alloc.
    Span take(size_t bytes);

private:
    std::mutex mutex_;
    std::shared_ptr<Slab> open_;
    size_t used_ = 0;
};

}  // namespace headrace
