// Sums that the machine adds faster than a compiled loop does: Accelerate's on macOS, NEON's for the half types. They
// round as the loops do, bit for bit.
#pragma once

#include "reduce/reduce.hpp"

namespace mccl {

// Null where the machine has none for this type. Pointers need no alignment; `out` may be `a` or `b`.
ReduceFn vector_sum(DType dtype);

}  // namespace mccl
