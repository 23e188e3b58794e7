// The collectives of one tensor, or one list of tensors, a rank.
#include <ATen/TensorOperators.h>
#include <ATen/ops/mul.h>

#include <utility>

#include "torch/devices.hpp"
#include "torch/integer_mean.hpp"
#include "torch/process_group.hpp"

namespace mccl {

namespace {
// PREMUL_SUM's factor; a new tensor, since only some collectives may change their input.
at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  TORCH_CHECK_TYPE(tensor.is_floating_point() || tensor.is_complex(),
                   "mccl: PREMUL_SUM needs a floating-point tensor, got ", tensor.scalar_type());
  const auto* factor = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (factor->tensor_factor.defined()) return at::mul(tensor, factor->tensor_factor).to(tensor.scalar_type());
  return at::mul(tensor, factor->double_factor);
}

void premultiply(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  const at::NoGradGuard no_grad;
  tensor.copy_(premultiplied(tensor, op));
}
}  // namespace

ProcessGroupMCCL::Reduction ProcessGroupMCCL::reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                                           const char* name) {
  const Elements elements{reduction_dtype(tensor, op, name), reduce_op(op, name)};
  const bool integers = op.op_ == c10d::ReduceOp::AVG && averages_as_integers(tensor.scalar_type());
  if (!integers || shim_of(tensor) != nullptr) return {elements, false};  // a device's values cannot be read here
  return {{DType::kInt64, ReduceOp::kAvg}, true};
}

at::Tensor ProcessGroupMCCL::reduced_in_place(Staging& staging, const at::Tensor& tensor, const c10d::ReduceOp& op,
                                              const Reduction& reduction) const {
  if (reduction.exact_mean) return staging.widened_in_place(tensor, size_);
  premultiply(tensor, op);
  return staging.in_place(tensor);
}

at::Tensor ProcessGroupMCCL::reduced_input(Staging& staging, const at::Tensor& tensor, const c10d::ReduceOp& op,
                                           const Reduction& reduction) const {
  if (reduction.exact_mean) return staging.widened_input(tensor, size_);
  return staging.input(premultiplied(tensor, op));
}

at::Tensor ProcessGroupMCCL::reduced_output(Staging& staging, const at::Tensor& tensor,
                                            const Reduction& reduction) const {
  return reduction.exact_mean ? staging.widened_output(tensor, size_) : staging.output(tensor);
}

// The division is done when all has been summed (write_means).
OperationPtr ProcessGroupMCCL::finish(OperationPtr op, const Reduction& reduction) {
  if (reduction.exact_mean) op->divisor = 1;
  return op;
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) return allreduce_sparse_tensor(tensors[0], opts);
  const at::Tensor& tensor = only(tensors, "all_reduce");
  const Reduction reduction = reduction_of(tensor, opts.reduceOp, "all_reduce");
  Staging staging;
  const Buffer data = buffer_of(reduced_in_place(staging, tensor, opts.reduceOp, reduction));
  return start({c10d::OpType::ALLREDUCE, titles_.all_reduce, opts.timeout, tensors, tensors}, staging, [&] {
    return finish(compressor_.all_reduce(planner_, me(), tensors, {data}, reduction.elements), reduction);
  });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  Staging staging;
  const Buffer data = buffer_of(staging.in_place(tensor));
  return start({c10d::OpType::BROADCAST, titles_.broadcast, opts.timeout, tensors, tensors}, staging, [&] {
    return mccl::broadcast(me(), static_cast<int32_t>(opts.rootRank), data, transport_dtype(tensor));
  });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "reduce");
  const Reduction reduction = reduction_of(tensor, opts.reduceOp, "reduce");
  Staging staging;
  const Buffer data = buffer_of(opts.rootRank == rank_ ? reduced_in_place(staging, tensor, opts.reduceOp, reduction)
                                                       : reduced_input(staging, tensor, opts.reduceOp, reduction));
  return start({c10d::OpType::REDUCE, titles_.reduce, opts.timeout, tensors, tensors}, staging, [&] {
    return finish(mccl::reduce(me(), static_cast<int32_t>(opts.rootRank), data, reduction.elements), reduction);
  });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allgather(TensorLists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only(inputs, "all_gather");
  const Tensors& list = only(outputs, "all_gather");
  Staging staging;
  const Buffer in = buffer_of(staging.input(input));
  std::vector<Buffer> out;
  for (const at::Tensor& tensor : list) {
    check_same(tensor, input, "all_gather");
    out.push_back(buffer_of(staging.output(tensor)));
  }
  return start({c10d::OpType::ALLGATHER, titles_.all_gather, opts.timeout, inputs, list}, staging,
               [&] { return all_gather(planner_, me(), {in}, out, transport_dtype(input)); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& opts) {
  check_tensor(input, "all_gather_into_tensor");
  check_same(output, input, "all_gather_into_tensor");
  Staging staging;
  const Buffer in = buffer_of(staging.input(input));
  const auto out = slices_of(staging.output(output), size_, "all_gather_into_tensor");
  return start({c10d::OpType::_ALLGATHER_BASE, titles_.all_gather, opts.timeout, {input}, {output}}, staging,
               [&] { return all_gather(planner_, me(), {in}, out, transport_dtype(input)); });
}

std::vector<Buffer> ProcessGroupMCCL::parts_to_reduce(Staging& staging, const at::Tensor& whole,
                                                      const c10d::ReduceOp& op, const Reduction& reduction,
                                                      const char* name) const {
  if (!reduction.exact_mean) return slices_of(reduced_input(staging, whole, op, reduction), size_, name);
  std::vector<Buffer> parts;
  for (const at::Tensor& piece : pieces_of(whole, size_, name)) {
    parts.push_back(buffer_of(reduced_input(staging, piece, op, reduction)));
  }
  return parts;
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::reduce_scatter_parts(Call call, Staging& staging,
                                                                 const std::vector<std::vector<Buffer>>& parts,
                                                                 const Tensors& outputs, const Reduction& reduction) {
  std::vector<Buffer> in, out;
  for (size_t rank = 0; rank < static_cast<size_t>(size_); ++rank) {
    for (const auto& of_output : parts) in.push_back(of_output[rank]);
  }
  for (const at::Tensor& output : outputs) out.push_back(buffer_of(reduced_output(staging, output, reduction)));
  call.outputs = outputs;
  return start(std::move(call), staging, [&] {
    return finish(compressor_.reduce_scatter(planner_, me(), in, out, reduction.elements), reduction);
  });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  const Tensors& list = only(inputs, "reduce_scatter");
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size_), "mccl: reduce_scatter: got ", list.size(),
                    " input tensors in a group of ", size_, "; give one for each rank");
  const Reduction reduction = reduction_of(output, opts.reduceOp, "reduce_scatter");
  Staging staging;
  std::vector<Buffer> parts;
  for (const at::Tensor& tensor : list) {
    check_same(tensor, output, "reduce_scatter");
    parts.push_back(buffer_of(reduced_input(staging, tensor, opts.reduceOp, reduction)));
  }
  return reduce_scatter_parts({c10d::OpType::REDUCE_SCATTER, titles_.reduce_scatter, opts.timeout, list, {}}, staging,
                              {parts}, outputs, reduction);
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& opts) {
  const char* name = "reduce_scatter_tensor";
  check_tensor(input, name);
  check_same(output, input, name);
  const Reduction reduction = reduction_of(output, opts.reduceOp, name);
  Staging staging;
  const auto parts = parts_to_reduce(staging, input, opts.reduceOp, reduction, name);
  return reduce_scatter_parts({c10d::OpType::_REDUCE_SCATTER_BASE, titles_.reduce_scatter, opts.timeout, {input}, {}},
                              staging, {parts}, {output}, reduction);
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::gather(TensorLists& outputs, Tensors& inputs,
                                                   const c10d::GatherOptions& opts) {
  const at::Tensor& input = only(inputs, "gather");
  Staging staging;
  const Buffer in = buffer_of(staging.input(input));
  std::vector<Buffer> out;
  Tensors result;
  if (opts.rootRank == rank_) {
    result = only(outputs, "gather");
    for (const at::Tensor& tensor : result) {
      check_same(tensor, input, "gather");
      out.push_back(buffer_of(staging.output(tensor)));
    }
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "mccl: gather: only the root, rank ", opts.rootRank, ", may give outputs");
  }
  return start({c10d::OpType::GATHER, titles_.gather, opts.timeout, inputs, result}, staging, [&] {
    return mccl::gather(me(), static_cast<int32_t>(opts.rootRank), in, out, transport_dtype(input));
  });
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14
ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::gather_single(at::Tensor& output, at::Tensor& input,
                                                          const c10d::GatherOptions& opts) {
  check_tensor(input, "gather_single");
  Staging staging;
  const Buffer in = buffer_of(staging.input(input));
  std::vector<Buffer> out;
  Tensors result;
  if (opts.rootRank == rank_) {
    check_same(output, input, "gather_single");
    out = slices_of(staging.output(output), size_, "gather_single");
    result = {output};
  }
  return start({c10d::OpType::GATHER, titles_.gather, opts.timeout, {input}, result}, staging, [&] {
    return mccl::gather(me(), static_cast<int32_t>(opts.rootRank), in, out, transport_dtype(input));
  });
}
#endif

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::scatter(Tensors& outputs, TensorLists& inputs,
                                                    const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "scatter");
  Staging staging;
  const Buffer out = buffer_of(staging.output(output));
  std::vector<Buffer> in;
  Tensors given;
  if (opts.rootRank == rank_) {
    given = only(inputs, "scatter");
    for (const at::Tensor& tensor : given) {
      check_same(tensor, output, "scatter");
      in.push_back(buffer_of(staging.input(tensor)));
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "mccl: scatter: only the root, rank ", opts.rootRank, ", may give inputs");
  }
  return start({c10d::OpType::SCATTER, titles_.scatter, opts.timeout, given, outputs}, staging, [&] {
    return mccl::scatter(me(), static_cast<int32_t>(opts.rootRank), in, out, transport_dtype(output));
  });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::alltoall(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "mccl: all_to_all: got no tensors");
  Staging staging;
  std::vector<Buffer> in, out;
  for (const at::Tensor& tensor : inputs) {
    check_same(tensor, inputs[0], "all_to_all");
    in.push_back(buffer_of(staging.input(tensor)));
  }
  for (const at::Tensor& tensor : outputs) {
    check_same(tensor, inputs[0], "all_to_all");
    out.push_back(buffer_of(staging.output(tensor)));
  }
  return start({c10d::OpType::ALLTOALL, titles_.all_to_all, opts.timeout, inputs, outputs}, staging,
               [&] { return all_to_all(me(), in, out, transport_dtype(inputs[0])); });
}

namespace {
// Splits count rows of the first dimension; none means equal parts.
std::vector<Buffer> split_rows(const at::Tensor& contiguous, const std::vector<int64_t>& splits, int64_t world) {
  if (splits.empty()) return slices_of(contiguous, world, "all_to_all_single");
  const Buffer whole = buffer_of(contiguous);
  const int64_t rows = contiguous.dim() == 0 ? 1 : contiguous.size(0);
  int64_t sum = 0;
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "mccl: all_to_all_single: negative split size ", split);
    sum += split;
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(splits.size()) == world && sum == rows,
                    "mccl: all_to_all_single: ", splits.size(), " splits that sum to ", sum, " for a tensor of ", rows,
                    " rows and ", world, " ranks. Give one split a rank; they must sum to the first dimension");
  const uint64_t row_nbytes = rows == 0 ? 0 : whole.nbytes / static_cast<uint64_t>(rows);
  std::vector<Buffer> parts;
  std::byte* at = whole.data;
  for (const int64_t split : splits) {
    parts.push_back({at, static_cast<uint64_t>(split) * row_nbytes});
    at += parts.back().nbytes;
  }
  return parts;
}
}  // namespace

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_splits,
                                                          std::vector<int64_t>& input_splits,
                                                          const c10d::AllToAllOptions& opts) {
  check_tensor(input, "all_to_all_single");
  check_same(output, input, "all_to_all_single");
  Staging staging;
  const auto in = split_rows(staging.input(input), input_splits, size_);
  const auto out = split_rows(staging.output(output), output_splits, size_);
  return start({c10d::OpType::ALLTOALL_BASE, titles_.all_to_all, opts.timeout, {input}, {output}}, staging,
               [&] { return all_to_all(me(), in, out, transport_dtype(input)); });
}

}  // namespace mccl
