// Messages between two ranks, and what is made of them.
#include <algorithm>
#include <string>
#include <utility>

#include "torch/process_group.hpp"

namespace mccl {

namespace {
// Users' tags are not negative as ints.
constexpr uint32_t kMonitoredBarrierTag = 0x8000'0000u;

uint32_t checked(int tag) {
  TORCH_CHECK_VALUE(tag >= 0, "mccl: the tag of a message must not be negative, got ", tag);
  return static_cast<uint32_t>(tag);
}
}  // namespace

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = only(tensors, "send");
  Staging staging;
  const Buffer data = buffer_of(staging.input(tensor));
  const PointToPoint point{to, checked(tag), true};
  return start(
      {c10d::OpType::SEND, titles_.send, c10d::kUnsetTimeout, tensors, tensors}, staging,
      [&] { return mccl::send(me(), to, data, transport_dtype(tensor)); }, &point);
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  Staging staging;
  const Buffer data = buffer_of(staging.output(tensor));
  const PointToPoint point{from, checked(tag), false};
  auto work = start(
      {c10d::OpType::RECV, titles_.recv, c10d::kUnsetTimeout, tensors, tensors}, staging,
      [&] { return receive(me(), from, data, transport_dtype(tensor)); }, &point);
  static_cast<OpWork*>(work.get())->set_source(from);
  return work;
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  TORCH_CHECK_VALUE(size_ > 1, "mccl: recv from any source: this group has one rank; nobody can send");
  Staging staging;
  const Buffer data = buffer_of(staging.output(tensor));
  const PointToPoint point{-1, checked(tag), false};
  return start(
      {c10d::OpType::RECVANYSOURCE, titles_.recv_any_source, c10d::kUnsetTimeout, tensors, tensors}, staging,
      [&] { return receive_any(data, transport_dtype(tensor)); }, &point);
}

ProcessGroupMCCL::WorkPtr ProcessGroupMCCL::barrier(const c10d::BarrierOptions& opts) {
  return start({c10d::OpType::BARRIER, titles_.barrier, opts.timeout, {}, {}}, Staging(),
               [&] { return mccl::barrier(me()); });
}

// Each rank reports to rank 0 and waits for its answer; rank 0 says who did not report. Blocks. After a failure the
// group is in error on all ranks, as after any timeout.
void ProcessGroupMCCL::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  const auto message = [&](int peer, bool sends) {
    const PointToPoint point{peer, kMonitoredBarrierTag, sends};
    // Rank 0's patience decides, not that of the ops.
    return start(
        {c10d::OpType::BARRIER, titles_.barrier, std::max(2 * timeout, options_->timeout), {}, {}}, Staging(),
        [&] { return sends ? mccl::send(me(), peer, {}, DType::kUInt8) : receive(me(), peer, {}, DType::kUInt8); },
        &point);
  };
  if (rank_ != 0) {
    try {
      message(0, true)->wait();
      message(0, false)->wait();
    } catch (const c10::Error& error) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str("mccl: Rank ", rank_, " successfully reached monitoredBarrier, but received errors while ",
                   "waiting for send/recv from rank 0. See rank 0's log for the rank that is missing. ",
                   error.what_without_backtrace()));
    }
    return;
  }
  const auto give_up = [&](const std::string& detail) {
    ErrorInfo info;
    info.code = Code::kTimeout;
    info.detail = detail;
    engine_->fail(group_, std::move(info));
    C10_THROW_ERROR(DistBackendError, "mccl: [Rank 0]: " + detail + ". See the log of what is missing");
  };
  const std::string in = " in " + std::to_string(timeout.count()) + " ms";
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<WorkPtr> reports(1);
  for (int rank = 1; rank < size_; ++rank) reports.push_back(message(rank, false));
  std::string missing;
  int missing_count = 0;
  for (int rank = 1; rank < size_; ++rank) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    auto& report = reports[static_cast<size_t>(rank)];
    if (left.count() <= 0 && !wait_all_ranks) {
      give_up("Rank 0 timed out in monitoredBarrier after " + std::to_string(timeout.count()) + " ms");
    }
    try {
      report->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const c10::Error&) {
      if (!wait_all_ranks) give_up("Rank " + std::to_string(rank) + " failed to pass monitoredBarrier" + in);
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      ++missing_count;
    }
  }
  if (missing_count > 0) {
    give_up((missing_count > 1 ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" + in);
  }
  std::vector<WorkPtr> answers;
  for (int rank = 1; rank < size_; ++rank) answers.push_back(message(rank, true));
  for (const auto& answer : answers) answer->wait();
}

}  // namespace mccl
