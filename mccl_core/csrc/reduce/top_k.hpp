// The elements of the largest magnitude, by histograms of their bits: three passes, whatever the values are.
#pragma once

#include <cstdint>
#include <span>

namespace mccl {

// Writes the indices of the out.size() elements of the largest magnitude, ascending. Infinity is above all finite
// values and NaN above infinity; of equal magnitudes the lowest indices are taken. out.size() <= values.size() < 2^32.
// Doubles are compared after rounding to float.
void select_largest(std::span<const float> values, std::span<uint32_t> out);
void select_largest(std::span<const double> values, std::span<uint32_t> out);

}  // namespace mccl
