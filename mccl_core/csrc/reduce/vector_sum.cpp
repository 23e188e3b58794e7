#include "reduce/vector_sum.hpp"

#include "reduce/accelerate.hpp"
#include "reduce/neon.hpp"

namespace mccl {

ReduceFn vector_sum([[maybe_unused]] DType dtype) {
#if defined(__APPLE__) || defined(MCCL_ACCELERATE)
  if (dtype == DType::kFloat32) return accelerate_sum_float;
  if (dtype == DType::kFloat64) return accelerate_sum_double;
#endif
#if defined(__aarch64__)
  if (dtype == DType::kFloat16) return neon_sum_half;
  if (dtype == DType::kBFloat16) return neon_sum_bfloat16;
#endif
  return nullptr;
}

}  // namespace mccl
