// The machine's roof, measured by all threads of a pool at once (roof.inl); the caller has the
// clock.
#pragma once

#include <stdint.h>

#include "kernels.h"
#include "pack.h"
#include "pool.h"

namespace headrace {

// Reads a packed weight as a linear at one token does, and adds up its 32-bit words.
uint32_t read_sum(Pool& pool, const Kernels& kernels, const Weight& weight);

// Every thread does `rounds`; operations of all threads.
double peak(Pool& pool, const Kernels& kernels, bool is_int8, int64_t rounds);

}  // namespace headrace
