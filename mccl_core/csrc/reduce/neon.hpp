// Sums of the half types with NEON, which every arm64 has: eight elements at a time are widened to fp32, added, and
// rounded to nearest even.
#pragma once

#include <cstddef>

namespace mccl {

// As ReduceFn.
void neon_sum_half(void* out, const void* a, const void* b, size_t count, double);
void neon_sum_bfloat16(void* out, const void* a, const void* b, size_t count, double);

}  // namespace mccl
