// vDSP's additions, on macOS.
#pragma once

#include <cstddef>

namespace mccl {

// As ReduceFn. vDSP wants elements at their natural alignment; others are added by a loop.
void accelerate_sum_float(void* out, const void* a, const void* b, size_t count, double);
void accelerate_sum_double(void* out, const void* a, const void* b, size_t count, double);

}  // namespace mccl
