// c10d::Work over ops of the engine.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device/handoff.hpp"
#include "engine/operation.hpp"
#include "torch/leavings.hpp"
#include "torch/nested.hpp"

namespace mccl {

// Throws torch's DistBackendError, the type that survives backward() and that users catch.
[[noreturn]] void throw_dist_backend_error(const Error& error);

// Tells once, on the thread that learns it first, that a group has failed.
class FailureReport {
 public:
  explicit FailureReport(std::function<void(const Error&)> tell) : tell_(std::move(tell)) {}
  void failed(const Error& error) {
    if (!told_.exchange(true) && tell_) tell_(error);
  }

 private:
  std::atomic<bool> told_{false};
  const std::function<void(const Error&)> tell_;
};

// How the stream of a device waits for an op; both null for the CPU's tensors.
struct OnDevice {
  std::shared_ptr<HandOff> hand_off;
  TicketPtr ticket;
};

struct WorkDescription {
  int rank;
  c10d::OpType type;
  const char* title;  // for torch's profiler
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::shared_ptr<FailureReport> report;
  std::shared_ptr<Leavings> leavings;
};

class OpWork : public c10d::Work {
 public:
  OpWork(WorkDescription description, std::shared_ptr<Operation> op);
  ~OpWork() override { leavings_->take_away(); }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // Blocks the calling thread until the result is in memory. On a device the stream waits instead, and the call
  // returns at once; with a timeout it blocks there, too. A timeout ends the wait, not the op.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  // Completes when the result is in memory, with the output tensors. It names no device, so that no event is recorded:
  // the thread that completes it must not encode. Nor must its callbacks (`then`).
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // Completes when the op is over, well or not, with a c10d::WorkResult.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  // Milliseconds from the call to the end of the op, which must be over.
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

  void set_source(int rank) { source_ = rank; }
  // Before anybody else has this work.
  void set_on_device(OnDevice on_device) { on_device_ = std::move(on_device); }
  // Tells torch's profiler, if it is on, when the op is over.
  void watch_for_profiler();
  // Where callbacks of this op's future stand; tag 0 for point-to-point messages, whose numbers differ between ranks.
  Place place() const;

 private:
  void end_profile();
  void wait_on_stream();
  void wait_on_host(std::chrono::milliseconds timeout);

  const std::shared_ptr<Operation> op_;
  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<FailureReport> report_;
  const std::shared_ptr<Leavings> leavings_;
  OnDevice on_device_;
  int source_ = -1;
  std::atomic<bool> profiled_{false};
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several works as one.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(kNoTimeout); }
  // Gives each of the works this time.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // That of the longest.
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace mccl
