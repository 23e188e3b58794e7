#include "torch/process_group.hpp"

#include <limits>
#include <utility>

#include "device/stream_handoff.hpp"
#include "device/submit.hpp"
#include "torch/devices.hpp"

namespace mccl {

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "mccl: ", name, ": one tensor a rank, got ", tensors.size());
  check_tensor(tensors[0], name);
  return tensors[0];
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* name) {
  TORCH_CHECK_VALUE(lists.size() == 1, "mccl: ", name, ": one list of tensors a rank, got ", lists.size());
  return lists[0];
}

ProcessGroupMCCL::Titles::Titles(const std::string& name)
    : all_reduce(name + ":all_reduce"),
      broadcast(name + ":broadcast"),
      reduce(name + ":reduce"),
      all_gather(name + ":all_gather"),
      reduce_scatter(name + ":reduce_scatter"),
      gather(name + ":gather"),
      scatter(name + ":scatter"),
      all_to_all(name + ":all_to_all"),
      barrier(name + ":barrier"),
      send(name + ":send"),
      recv(name + ":recv"),
      recv_any_source(name + ":recvAnySource") {}

ProcessGroupMCCL::ProcessGroupMCCL(Parts parts)
    : c10d::Backend(parts.group->rank, parts.group->world()),
      engine_(std::move(parts.engine)),
      group_(std::move(parts.group)),
      planner_(std::move(parts.planner)),
      options_(c10::make_intrusive<Options>(parts.timeout)),
      connector_(std::move(parts.connector)),
      regrouper_(std::move(parts.regrouper)),
      maker_(std::move(parts.maker)),
      compressor_(parts.compression),
      report_(std::make_shared<FailureReport>(std::move(parts.on_failure))),
      titles_(parts.name) {}

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

// A rank that cannot be reached is missed by all: they shall not wait for this one.
void ProcessGroupMCCL::connect(int32_t rank, int32_t channel) {
  try {
    connector_(rank, channel);
  } catch (const Error& error) {
    engine_->fail(group_, error.info());
    throw *engine_->failure(*group_);
  }
}

OnDevice ProcessGroupMCCL::submit_from_device(const OperationPtr& op, const Staging& staging,
                                              const std::shared_ptr<void>& kept, const PointToPoint* point_to_point) {
  OnDevice on_device;
  on_device.hand_off = hand_off(*staging.shim());
  adopt_autograd_thread(*on_device.hand_off);
  on_device.ticket = submit(engine_, group_, op, *on_device.hand_off, staging.views(), kept, point_to_point);
  if (staging.kernels_finish()) {
    // Encoded here and now, since nobody may ever call wait(): the stream waits for the op.
    on_device.hand_off->wait_released(on_device.ticket);
    if (const auto copy_back = staging.finish()) copy_back();
  }
  return on_device;
}

namespace {
std::function<void()> finalizer_of(const Staging& staging, const Operation* op) {
  const auto copy_back = staging.finish();
  if (staging.last().empty()) return copy_back;
  return [copy_back, last = staging.last(), op] {
    if (copy_back) copy_back();
    for (const auto& function : last) {
      if (!op->failure) function();
    }
  };
}

// For an op that its group refused, having failed: the results are as after a failed op.
void invalidate_refused(Operation& op, const Staging& staging, const std::vector<at::Tensor>& outputs) {
  const bool submitted = op.posted_at != 0;
  if (submitted) {  // the engine has it, and fails it
    try {
      op.wait(-1);
    } catch (const Error&) {
    }
  }
  if (staging.shim() == nullptr) {
    if (submitted) return;
    op.invalidate_result();
    if (const auto copy_back = staging.finish()) copy_back();
    return;
  }
  if (!op.nan_byte || op.results.empty()) return;
  for (const at::Tensor& output : outputs) output.fill_(std::numeric_limits<double>::quiet_NaN());
}
}  // namespace

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::start(Call call, const Staging& staging,
                                                  const std::function<OperationPtr()>& build,
                                                  const PointToPoint* point_to_point) {
  OperationPtr op;
  const std::vector<at::Tensor> outputs = call.outputs;
  try {
    op = build();
    leavings_->take_away();
    const std::shared_ptr<void> kept = leavings_->hold(staging.kept());
    op->keep_alive = kept;
    if (!call.outputs.empty()) op->nan_byte = nan_byte_of(call.outputs[0].scalar_type());
    const auto timeout = call.timeout == c10d::kUnsetTimeout ? options_->timeout : call.timeout;
    op->deadline = deadline_after_ms(timeout.count());
    for (const auto& [peer, channel] : engine_->missing_links(*group_, *op)) connect(peer, channel);
    if (point_to_point == nullptr) op->nested = next_nested_name();
    WorkDescription description{rank_,   call.type, call.title.c_str(), std::move(call.inputs), std::move(call.outputs),
                                report_, leavings_};
    auto work = c10::make_intrusive<OpWork>(std::move(description), op);
    if (staging.shim() != nullptr) {
      work->set_on_device(submit_from_device(op, staging, kept, point_to_point));
    } else {
      op->finalizer = finalizer_of(staging, op.get());
      engine_->submit(group_, op, point_to_point);
    }
    if (point_to_point == nullptr) ++sequence_;
    work->watch_for_profiler();
    const std::lock_guard guard(coalescing_mutex_);
    if (coalescing_) coalescing_->push_back(work);
    return work;
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(error.info().code != Code::kUsage, error.what());
    report_->failed(error);
    if (op) invalidate_refused(*op, staging, outputs);
    throw_dist_backend_error(error);
  }
}

}  // namespace mccl
