// Elementwise reductions: out[i] = op(a[i], b[i]).
//
// fp16 and bf16 are computed in fp32 and rounded to nearest even once per call. MIN and MAX propagate NaN. Bool is
// logical: SUM is OR, PRODUCT is AND. The *finish* forms, used for the last reduction of an element, also divide by
// the world size (AVG).
#pragma once

#include <cstddef>

#include "reduce/types.hpp"

namespace mccl {

// `divisor` is read by finishing AVG kernels only. Pointers need no alignment; `out` may be `a` or `b`.
using ReduceFn = void (*)(void* out, const void* a, const void* b, size_t count, double divisor);
struct ReduceKernels {
  ReduceFn combine;
  ReduceFn finish;
};

// Throws Error (kUsage) where the dtype does not have the operator (bitwise on floating point, AVG of bool).
ReduceKernels reduce_kernels(DType dtype, ReduceOp op);

}  // namespace mccl
