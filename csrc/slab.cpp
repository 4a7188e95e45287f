#include "slab.h"

#include <sys/mman.h>
#include <new>

namespace headrace {

namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
// A slab is open until it is full; what its tail wastes was never touched, so it costs no memory.
constexpr size_t SLAB = size_t{64} << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

Slab::Slab(size_t bytes) : bytes_(round_up(bytes, HUGE_PAGE)) {
    // Not reserved: a KV pool is sized for the most it may hold and touched as it fills.
    void* p = mmap(nullptr, bytes_ + HUGE_PAGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    uintptr_t start = reinterpret_cast<uintptr_t>(p);
    uintptr_t aligned = round_up(start, HUGE_PAGE);
    if (aligned > start) munmap(p, aligned - start);
    size_t tail = start + HUGE_PAGE - aligned;
    if (tail > 0) munmap(reinterpret_cast<void*>(aligned + bytes_), tail);
    data_ = reinterpret_cast<uint8_t*>(aligned);
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes_, MADV_HUGEPAGE);  // a hint: refused, all works on small pages
#endif
}

Slab::~Slab() { munmap(data_, bytes_); }

Span SlabAllocator::take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes = round_up(bytes, 64);
    if (!open_ || used_ + bytes > open_->bytes()) {
        open_ = std::make_shared<Slab>(bytes > SLAB ? bytes : SLAB);
        used_ = 0;
    }
    Span span{open_, open_->data() + used_};
    used_ += bytes;
    return span;
}

}  // namespace headrace
