// AVG of integers: the mean of all ranks' values, exact, then truncated towards zero. Their sum may not fit the type,
// so that something wider travels: int64 for narrower types, quotient and remainder by the world size for 64-bit ones.
#pragma once

#include <ATen/core/Tensor.h>

namespace mccl {

// True for AVG of this element type.
bool averages_as_integers(at::ScalarType type);
// What is to be summed: int64, `numel` elements or twice as many.
at::Tensor widened(const at::Tensor& tensor, int64_t world);
at::Tensor empty_widened(const at::Tensor& like);
// Writes the means to `into` from the sums.
void write_means(const at::Tensor& sums, const at::Tensor& into, int64_t world);

}  // namespace mccl
