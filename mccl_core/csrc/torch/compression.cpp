#include "torch/compression.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace mccl {

namespace {}  // namespace

Compression compression_of(const std::string& name) {
  for (uint8_t i = 0; i < static_cast<uint8_t>(Compression::kCount); ++i) {
    if (name == to_string(static_cast<Compression>(i))) return static_cast<Compression>(i);
  }
  throw_usage("no compression is called " + name);
}

// A function of what all ranks share: of the call, and of options that they have compared.
bool Compressor::applies(Elements elements, uint64_t nbytes, const char* name) const {
  if (options_.compression == Compression::kNone) return false;
  if (elements.dtype == DType::kFloat16 || elements.dtype == DType::kBFloat16) return false;  // small already
  if (!is_compressible(elements)) {
    TORCH_CHECK_TYPE(!options_.required, "mccl: ", name, ": this group was made with compression '",
                     to_string(options_.compression),
                     "', which can carry SUM, AVG and PREMUL_SUM of floating-point tensors, but got ",
                     to_string(elements.op), " of ", to_string(elements.dtype),
                     ". Use a group without compression for it, or set MCCL_COMPRESSION for the job instead: it leaves "
                     "such tensors as they are");
    return false;
  }
  if (nbytes == 0) return false;
  const uint64_t clipped = state_->clipped_count;
  if (clipped > 0) {
    TORCH_WARN_ONCE("mccl: ", clipped, " elements were beyond the range of ", to_string(options_.compression),
                    " and were clipped to its largest value. bf16 has fp32's range");
  }
  return options_.required || nbytes >= options_.min_nbytes;
}

OperationPtr Compressor::all_reduce(const Planner& planner, Member me, const std::vector<at::Tensor>& tensors,
                                    std::vector<Buffer> data, Elements elements) {
  const uint64_t nbytes = total_nbytes(data);
  if (!applies(elements, nbytes, "all_reduce") || me.world < 2) {
    return mccl::all_reduce(planner, me, std::move(data), elements);
  }
  if (options_.compression != Compression::kTopK) {
    return compressed_all_reduce(planner, me, std::move(data), elements, options_.compression, state_);
  }
  const uint64_t count = nbytes / element_nbytes(elements.dtype);
  if (count > kMostSparse || !warmed_up(count, elements.dtype)) {
    return mccl::all_reduce(planner, me, std::move(data), elements);
  }
  const auto wanted = static_cast<uint64_t>(std::ceil(options_.topk_ratio * static_cast<double>(count)));
  return sparse_all_reduce(planner, me, std::move(data), residual_of(tensors, count, elements.dtype),
                           std::clamp<uint64_t>(wanted, 1, count), elements, state_);
}

OperationPtr Compressor::reduce_scatter(const Planner& planner, Member me, std::vector<Buffer> inputs,
                                        const std::vector<Buffer>& output, Elements elements) {
  const bool topk = options_.compression == Compression::kTopK;
  TORCH_CHECK_TYPE(!(topk && options_.required),
                   "mccl: reduce_scatter: this group was made with compression 'topk', which can carry all-reduces "
                   "only. Use fp16 or bf16, or a group without compression for it");
  if (topk || !applies(elements, total_nbytes(inputs), "reduce_scatter")) {
    return mccl::reduce_scatter(planner, me, std::move(inputs), output, elements);
  }
  MCCL_ASSERT(output.size() == 1);
  return compressed_reduce_scatter(planner, me, std::move(inputs), output[0], elements, options_.compression, state_);
}

bool Compressor::warmed_up(uint64_t count, DType dtype) {
  const std::lock_guard lock(mutex_);
  uint64_t& calls = calls_[{count, dtype}];
  if (calls == options_.topk_warmup) return true;
  ++calls;
  return false;
}

ResidualPtr Compressor::residual_of(const std::vector<at::Tensor>& tensors, uint64_t count, DType dtype) {
  const std::lock_guard lock(mutex_);
  // Of tensors that are gone (DDP's buckets of the first iteration) nothing is left to send.
  std::erase_if(known_, [](const Known& known) {
    return std::ranges::any_of(known.slices, [](const Slice& slice) { return slice.storage.expired(); });
  });
  const auto is_of = [](const Slice& slice, const at::Tensor& tensor) {
    return slice.storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() &&
           slice.offset == tensor.storage_offset() && slice.count == tensor.numel();
  };
  for (const Known& known : known_) {
    if (known.dtype == dtype && std::ranges::equal(known.slices, tensors, is_of)) return known.residual;
  }
  Known& known = known_.emplace_back();
  known.dtype = dtype;
  known.residual = std::make_shared<Residual>(count, dtype);
  for (const at::Tensor& tensor : tensors) {
    known.slices.push_back({tensor.storage().getWeakStorageImpl(), tensor.storage_offset(), tensor.numel()});
  }
  return known.residual;
}

}  // namespace mccl
