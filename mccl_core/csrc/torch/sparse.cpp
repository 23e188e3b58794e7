// All-reduce of sparse tensors: each rank gets all ranks' entries, and adds them up.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <algorithm>
#include <utility>

#include "torch/process_group.hpp"

namespace mccl {

namespace {
constexpr const char* kName = "all_reduce of a sparse tensor";

struct Layout {
  uint64_t indices_nbytes;
  uint64_t values_nbytes;
};

Layout layout(const at::Tensor& coalesced, int64_t entries) {
  int64_t value_numel = 1;
  for (int64_t i = coalesced.sparse_dim(); i < coalesced.dim(); ++i) value_numel *= coalesced.size(i);
  return {static_cast<uint64_t>(coalesced.sparse_dim() * entries) * sizeof(int64_t),
          static_cast<uint64_t>(entries * value_numel) * coalesced.element_size()};
}

at::Tensor bytes(uint64_t nbytes) { return at::empty({static_cast<int64_t>(nbytes)}, at::kByte); }

// A rank's entries as one piece: indices, then values.
at::Tensor packed(const at::Tensor& coalesced) {
  const at::Tensor indices = coalesced.indices().contiguous(), values = coalesced.values().contiguous();
  const Layout size = layout(coalesced, values.size(0));
  const at::Tensor pack = bytes(size.indices_nbytes + size.values_nbytes);
  auto* data = static_cast<std::byte*>(pack.data_ptr());
  std::copy_n(static_cast<const std::byte*>(indices.const_data_ptr()), size.indices_nbytes, data);
  std::copy_n(static_cast<const std::byte*>(values.const_data_ptr()), size.values_nbytes, data + size.indices_nbytes);
  return pack;
}

void add_up(const std::vector<at::Tensor>& packs, const std::vector<int64_t>& entries, const at::Tensor& like,
            const at::Tensor& into) {
  std::vector<at::Tensor> indices, values;
  for (size_t rank = 0; rank < packs.size(); ++rank) {
    const Layout size = layout(like, entries[rank]);
    const auto* data = static_cast<const std::byte*>(packs[rank].const_data_ptr());
    indices.push_back(at::empty({like.sparse_dim(), entries[rank]}, at::kLong));
    auto shape = like.values().sizes().vec();
    shape[0] = entries[rank];
    values.push_back(at::empty(shape, like.values().options()));
    std::copy_n(data, size.indices_nbytes, static_cast<std::byte*>(indices.back().data_ptr()));
    std::copy_n(data + size.indices_nbytes, size.values_nbytes, static_cast<std::byte*>(values.back().data_ptr()));
  }
  into.copy_(at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0), like.sizes(), like.options()).coalesce());
}
}  // namespace

// How many entries each rank has is exchanged before this returns: what follows must be known when it is started.
ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allreduce_sparse_tensor(const at::Tensor& tensor,
                                                                    const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(opts.reduceOp.op_ == c10d::ReduceOp::SUM, "mccl: ", kName, ": only SUM is defined");
  TORCH_CHECK(tensor.device().is_cpu(), "mccl: ", kName, ": got a tensor on ", tensor.device(), ". Use .cpu()");
  const at::Tensor coalesced = tensor.coalesce();
  // Besides the number, what all ranks must agree on.
  std::vector<int64_t> mine{coalesced._nnz(), static_cast<int64_t>(coalesced.scalar_type()), coalesced.sparse_dim(),
                            coalesced.dim()};
  constexpr size_t kMostDims = 60;
  TORCH_CHECK_VALUE(static_cast<size_t>(coalesced.dim()) <= kMostDims, "mccl: ", kName, ": too many dimensions");
  mine.resize(4 + kMostDims);
  for (int64_t i = 0; i < coalesced.dim(); ++i) mine[static_cast<size_t>(4 + i)] = coalesced.size(i);
  const auto width = static_cast<int64_t>(mine.size());
  at::Tensor about_me = at::empty({width}, at::kLong);
  std::copy(mine.begin(), mine.end(), about_me.mutable_data_ptr<int64_t>());
  at::Tensor about_all = at::empty({size_, width}, at::kLong);
  _allgather_base(about_all, about_me, {opts.timeout})->wait();

  std::vector<int64_t> entries;
  const auto* row = about_all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < size_; ++rank, row += width) {
    TORCH_CHECK_VALUE(std::equal(row + 1, row + width, mine.begin() + 1), "mccl: ", kName, ": rank ", rank,
                      " has another dtype, shape or sparse dimension than rank ", rank_,
                      "; all ranks must have the same");
    entries.push_back(row[0]);
  }
  Staging staging;
  const at::Tensor pack = staging.input(packed(coalesced));
  Tensors packs;
  std::vector<Buffer> out;
  for (const int64_t count : entries) {
    const Layout size = layout(coalesced, count);
    packs.push_back(staging.output(bytes(size.indices_nbytes + size.values_nbytes)));
    out.push_back(buffer_of(packs.back()));
  }
  staging.then([packs, entries, coalesced, tensor] { add_up(packs, entries, coalesced, tensor); });
  const std::vector<Buffer> in(static_cast<size_t>(size_), buffer_of(pack));
  return start({c10d::OpType::_ALLREDUCE_SPARSE, titles_.all_reduce, opts.timeout, {tensor}, {tensor}}, staging,
               [&] { return all_to_all(me(), in, out, DType::kUInt8); });
}

}  // namespace mccl
