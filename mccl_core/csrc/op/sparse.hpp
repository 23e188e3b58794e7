// All-reduce of the largest elements only, with error feedback (Lin and others, "Deep gradient compression", 2018,
// arXiv 1712.01887; Stich and others, "Sparsified SGD with memory", 2018, arXiv 1809.07599).
//
// Each rank sends its k elements of the largest magnitude as (index, fp32 value), 8 bytes each, by an all-gather, and
// sums all of them in the order of ranks: every rank computes the same sum from the same entries. What a rank did not
// send stays in its residual and is added to the next gradient of the same tensor.
#pragma once

#include <memory>
#include <vector>

#include "op/compressed.hpp"

namespace mccl {

// What has not been sent yet, an element for each of the tensor, in the tensor's type (fp32 or fp64).
class Residual {
 public:
  Residual(uint64_t count, DType dtype) : data_(count * element_nbytes(dtype)) {}
  std::byte* data() { return data_.data(); }
  uint64_t nbytes() const { return data_.size(); }

 private:
  std::vector<std::byte> data_;
};
using ResidualPtr = std::shared_ptr<Residual>;

// The most elements that indices can count.
inline constexpr uint64_t kMostSparse = UINT32_MAX;

// In place on `data`, one or more buffers taken as their concatenation, with one residual for all their elements.
// `kept_count`: k, the same on all ranks, from 1 to the number of elements. A world of one is the caller's to serve.
OperationPtr sparse_all_reduce(const Planner& planner, Member me, std::vector<Buffer> data, ResidualPtr residual,
                               uint64_t kept_count, Elements elements, const WireStatePtr& state);

}  // namespace mccl
