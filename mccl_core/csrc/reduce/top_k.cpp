#include "reduce/top_k.hpp"

#include <bit>
#include <vector>

#include "base/error.hpp"

namespace mccl {

namespace {
template <class T>
uint32_t magnitude_bits(T value) {
  return std::bit_cast<uint32_t>(static_cast<float>(value)) & 0x7FFFFFFFu;
}

struct Cut {
  size_t bin;       // the bin in which the last of the wanted elements is
  uint64_t within;  // how many of its elements are wanted
};

Cut cut_of(const std::vector<uint32_t>& histogram, uint64_t wanted) {
  size_t bin = histogram.size() - 1;
  while (histogram[bin] < wanted) wanted -= histogram[bin--];
  return {bin, wanted};
}

template <class T>
void select(std::span<const T> values, std::span<uint32_t> out) {
  MCCL_ASSERT(out.size() <= values.size() && values.size() <= UINT32_MAX);
  if (out.empty()) return;
  std::vector<uint32_t> histogram(1u << 15);
  for (const T value : values) ++histogram[magnitude_bits(value) >> 16];
  const Cut upper = cut_of(histogram, out.size());
  histogram.assign(1u << 16, 0);
  for (const T value : values) {
    const uint32_t bits = magnitude_bits(value);
    if (bits >> 16 == upper.bin) ++histogram[bits & 0xFFFFu];
  }
  const Cut lower = cut_of(histogram, upper.within);
  const auto threshold = static_cast<uint32_t>(upper.bin << 16 | lower.bin);
  uint64_t equal_left = lower.within;
  size_t found = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = magnitude_bits(values[i]);
    if (bits < threshold || (bits == threshold && equal_left == 0)) continue;
    equal_left -= bits == threshold;
    out[found++] = static_cast<uint32_t>(i);
  }
}
}  // namespace

void select_largest(std::span<const float> values, std::span<uint32_t> out) { select(values, out); }
void select_largest(std::span<const double> values, std::span<uint32_t> out) { select(values, out); }

}  // namespace mccl
