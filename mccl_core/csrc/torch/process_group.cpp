#include "torch/process_group.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>

#include <utility>

#include "device/stream_handoff.hpp"
#include "device/submit.hpp"
#include "torch/devices.hpp"

namespace mccl {

namespace {

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "mccl: ", name, ": one tensor a rank, got ", tensors.size());
  check_tensor(tensors[0], name);
  return tensors[0];
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* name) {
  TORCH_CHECK_VALUE(lists.size() == 1, "mccl: ", name, ": one list of tensors a rank, got ", lists.size());
  return lists[0];
}

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

Elements elements_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name) {
  return {reduction_dtype(tensor, op, name), reduce_op(op, name)};
}

}  // namespace

ProcessGroupMCCL::ProcessGroupMCCL(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, Planner planner,
                                   std::chrono::milliseconds timeout, Connector connector, Regrouper regrouper,
                                   const CompressionOptions& compression)
    : c10d::Backend(group->rank, group->world()),
      engine_(std::move(engine)),
      group_(std::move(group)),
      planner_(std::move(planner)),
      timeout_(timeout),
      connector_(std::move(connector)),
      regrouper_(std::move(regrouper)),
      compressor_(compression) {}

ProcessGroupMCCL::~ProcessGroupMCCL() {
  engine_->close_group(group_);
  leavings_->take_away();
}

c10d::ErrorType ProcessGroupMCCL::getError() {
  const auto error = engine_->failure(*group_);
  if (!error) return c10d::ErrorType::SUCCESS;
  switch (error->info().code) {
    case Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case Code::kPeerLost:
    case Code::kPeerLeft: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

void ProcessGroupMCCL::abort() {
  ErrorInfo info;
  info.code = Code::kAborted;
  info.peer = rank_;
  info.detail = "aborted the group";
  engine_->fail(group_, std::move(info));
  engine_->close_group(group_);
}

void ProcessGroupMCCL::shutdown() { engine_->close_group(group_); }

std::shared_ptr<HandOff> ProcessGroupMCCL::hand_off(Shim& shim) {
  const std::lock_guard guard(hand_off_mutex_);
  if (std::exchange(shim_, &shim) != &shim) hand_off_ = std::make_shared<StreamHandOff>(shim);
  return hand_off_;
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::start(Call call, const Staging& staging,
                                                  const std::function<OperationPtr()>& build,
                                                  const PointToPoint* point_to_point) {
  try {
    const OperationPtr op = build();
    leavings_->take_away();
    const std::shared_ptr<void> kept = leavings_->hold(staging.kept());
    op->keep_alive = kept;
    if (!call.outputs.empty()) op->nan_byte = nan_byte_of(call.outputs[0].scalar_type());
    const auto timeout = call.timeout == c10d::kUnsetTimeout ? timeout_ : call.timeout;
    op->deadline = deadline_after_ms(timeout.count());
    for (const auto& [peer, channel] : engine_->missing_links(*group_, *op)) connect(peer, channel);
    OnDevice on_device;
    if (Shim* const shim = staging.shim()) {
      on_device.hand_off = hand_off(*shim);
      adopt_autograd_thread(*on_device.hand_off);
      on_device.ticket = submit(engine_, group_, op, *on_device.hand_off, staging.views(), kept, point_to_point);
      if (staging.kernels_finish()) {
        // Encoded here and now, since nobody may ever call wait(): the stream waits for the op.
        on_device.hand_off->wait_released(on_device.ticket);
        if (const auto copy_back = staging.finish()) copy_back();
      }
    } else {
      op->finalizer = staging.finish();
      engine_->submit(group_, op, point_to_point);
    }
    ++sequence_;
    return c10::make_intrusive<OpWork>(rank_, call.type, op, std::move(call.outputs), leavings_, std::move(on_device));
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(error.info().code != Code::kUsage, error.what());
    throw_dist_backend_error(error);
  }
}

// A rank that cannot be reached is missed by all: they shall not wait for this one.
void ProcessGroupMCCL::connect(int32_t rank, int32_t channel) {
  try {
    connector_(rank, channel);
  } catch (const Error& error) {
    engine_->fail(group_, error.info());
    throw *engine_->failure(*group_);
  }
}

Verdict ProcessGroupMCCL::agree_on(const std::vector<int64_t>& ranks_to_exclude) {
  RankSet named(static_cast<size_t>(size_));
  for (const int64_t rank : ranks_to_exclude) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "mccl: shrink: rank ", rank, " is not in this group of ", size_);
    TORCH_CHECK_VALUE(rank != rank_, "mccl: shrink: rank ", rank, " cannot exclude itself; those who stay call shrink");
    named[static_cast<size_t>(rank)] = true;
  }
  try {
    return engine_->agree(group_, named, deadline_after_ms(timeout_.count()),
                          [&](int32_t rank) { connector_(rank, 0); });
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(error.info().code != Code::kUsage, error.what());
    throw_dist_backend_error(error);
  }
}

namespace {
std::vector<int32_t> ranks_in(const RankSet& set) {
  std::vector<int32_t> ranks;
  for (size_t i = 0; i < set.size(); ++i) {
    if (set[i]) ranks.push_back(static_cast<int32_t>(i));
  }
  return ranks;
}
}  // namespace

std::vector<int32_t> ProcessGroupMCCL::agree(const std::vector<int64_t>& ranks_to_exclude) {
  return ranks_in(agree_on(ranks_to_exclude).excluded);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMCCL::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                                           int shrink_flags,
                                                           const c10::intrusive_ptr<Options>& opts_override) {
  TORCH_CHECK_TYPE(!opts_override, "the backend 'mccl' takes no pg_options; set MCCL_* variables instead");
  const std::vector<int32_t> named(ranks_to_exclude.begin(), ranks_to_exclude.end());
  if (auto prepared = regrouper_(named, false)) return prepared;
  constexpr int kAbort = 1;  // torch's SHRINK_ABORT
  if ((shrink_flags & kAbort) != 0) {
    ErrorInfo info;
    info.code = Code::kAborted;
    info.peer = rank_;
    info.detail = "aborted the group in order to shrink it";
    info.advice = "All who stay must call shrink";
    engine_->fail(group_, std::move(info));
  }
  const Verdict verdict = agree_on(ranks_to_exclude);
  if (!verdict.unanimous) {
    ErrorInfo info;
    info.code = Code::kMismatch;
    info.rank = rank_;
    info.detail = "the ranks did not all name the same ones to exclude, or others were lost; they agreed on " +
                  describe(verdict.excluded);
    info.advice = "Call shrink_group again on all who stay with just these, or mccl_core.shrink(), which needs no list";
    throw_dist_backend_error(Error(std::move(info)));
  }
  return regrouper_(ranks_in(verdict.excluded), true);
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  const Elements elements = elements_of(tensor, opts.reduceOp, "all_reduce");
  premultiply(tensor, opts.reduceOp);
  Staging staging;
  const Buffer data = buffer_of(staging.in_place(tensor));
  return start({c10d::OpType::ALLREDUCE, opts.timeout, tensors}, staging,
               [&] { return compressor_.all_reduce(planner_, me(), tensors, {data}, elements); });
}

// One op over all tensors: its address space is their concatenation.
ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::allreduce_coalesced(Tensors& tensors,
                                                                const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "mccl: all_reduce_coalesced: got no tensors");
  Staging staging;
  std::vector<Buffer> buffers;
  const Elements elements = elements_of(tensors[0], opts.reduceOp, "all_reduce_coalesced");
  for (const at::Tensor& tensor : tensors) {
    check_same(tensor, tensors[0], "all_reduce_coalesced");
    premultiply(tensor, opts.reduceOp);
    buffers.push_back(buffer_of(staging.in_place(tensor)));
  }
  return start({c10d::OpType::ALLREDUCE_COALESCED, opts.timeout, tensors}, staging,
               [&] { return compressor_.all_reduce(planner_, me(), tensors, buffers, elements); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  Staging staging;
  const Buffer data = buffer_of(staging.in_place(tensor));
  return start({c10d::OpType::BROADCAST, opts.timeout, tensors}, staging, [&] {
    return mccl::broadcast(me(), static_cast<int32_t>(opts.rootRank), data, transport_dtype(tensor));
  });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "reduce");
  const Elements elements = elements_of(tensor, opts.reduceOp, "reduce");
  Staging staging;
  const bool root = opts.rootRank == rank_;
  if (root) premultiply(tensor, opts.reduceOp);
  const Buffer data = buffer_of(root ? staging.in_place(tensor) : staging.input(premultiplied(tensor, opts.reduceOp)));
  return start({c10d::OpType::REDUCE, opts.timeout, tensors}, staging,
               [&] { return mccl::reduce(me(), static_cast<int32_t>(opts.rootRank), data, elements); });
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
  return start({c10d::OpType::ALLGATHER, opts.timeout, list}, staging,
               [&] { return all_gather(planner_, me(), in, out, transport_dtype(input)); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& opts) {
  check_tensor(input, "all_gather_into_tensor");
  check_same(output, input, "all_gather_into_tensor");
  Staging staging;
  const Buffer in = buffer_of(staging.input(input));
  const auto out = slices_of(staging.output(output), size_, "all_gather_into_tensor");
  return start({c10d::OpType::_ALLGATHER_BASE, opts.timeout, {output}}, staging,
               [&] { return all_gather(planner_, me(), in, out, transport_dtype(input)); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::reduce_scatter_buffers(Staging& staging, const std::vector<Buffer>& inputs,
                                                                   const at::Tensor& output,
                                                                   const c10d::ReduceScatterOptions& opts,
                                                                   c10d::OpType type) {
  const Elements elements = elements_of(output, opts.reduceOp, "reduce_scatter");
  const Buffer out = buffer_of(staging.output(output));
  return start({type, opts.timeout, {output}}, staging,
               [&] { return compressor_.reduce_scatter(planner_, me(), inputs, out, elements); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  Staging staging;
  std::vector<Buffer> in;
  for (const at::Tensor& tensor : only(inputs, "reduce_scatter")) {
    check_same(tensor, output, "reduce_scatter");
    in.push_back(buffer_of(staging.input(premultiplied(tensor, opts.reduceOp))));
  }
  return reduce_scatter_buffers(staging, in, output, opts, c10d::OpType::REDUCE_SCATTER);
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& opts) {
  check_tensor(input, "reduce_scatter_tensor");
  check_same(output, input, "reduce_scatter_tensor");
  Staging staging;
  const auto in = slices_of(staging.input(premultiplied(input, opts.reduceOp)), size_, "reduce_scatter_tensor");
  return reduce_scatter_buffers(staging, in, output, opts, c10d::OpType::_REDUCE_SCATTER_BASE);
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
  return start({c10d::OpType::GATHER, opts.timeout, result}, staging, [&] {
    return mccl::gather(me(), static_cast<int32_t>(opts.rootRank), in, out, transport_dtype(input));
  });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::scatter(Tensors& outputs, TensorLists& inputs,
                                                    const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "scatter");
  Staging staging;
  const Buffer out = buffer_of(staging.output(output));
  std::vector<Buffer> in;
  if (opts.rootRank == rank_) {
    for (const at::Tensor& tensor : only(inputs, "scatter")) {
      check_same(tensor, output, "scatter");
      in.push_back(buffer_of(staging.input(tensor)));
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "mccl: scatter: only the root, rank ", opts.rootRank, ", may give inputs");
  }
  return start({c10d::OpType::SCATTER, opts.timeout, outputs}, staging, [&] {
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
  return start({c10d::OpType::ALLTOALL, opts.timeout, outputs}, staging,
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
  return start({c10d::OpType::ALLTOALL_BASE, opts.timeout, {output}}, staging,
               [&] { return all_to_all(me(), in, out, transport_dtype(input)); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::barrier(const c10d::BarrierOptions& opts) {
  return start({c10d::OpType::BARRIER, opts.timeout, {}}, Staging(), [&] { return mccl::barrier(me()); });
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = only(tensors, "send");
  Staging staging;
  const Buffer data = buffer_of(staging.input(tensor));
  const PointToPoint point{to, static_cast<uint32_t>(tag), true};
  return start(
      {c10d::OpType::SEND, c10d::kUnsetTimeout, tensors}, staging,
      [&] { return mccl::send(me(), to, data, transport_dtype(tensor)); }, &point);
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  Staging staging;
  const Buffer data = buffer_of(staging.output(tensor));
  const PointToPoint point{from, static_cast<uint32_t>(tag), false};
  auto work = start(
      {c10d::OpType::RECV, c10d::kUnsetTimeout, tensors}, staging,
      [&] { return receive(me(), from, data, transport_dtype(tensor)); }, &point);
  static_cast<OpWork*>(work.get())->set_source(from);
  return work;
}

}  // namespace mccl
