// c10d::Work over one op of the engine.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device/handoff.hpp"
#include "engine/operation.hpp"
#include "torch/leavings.hpp"

namespace mccl {

// Throws torch's DistBackendError, the type that survives backward() and that users catch.
[[noreturn]] void throw_dist_backend_error(const Error& error);

// How the stream of a device waits for an op; both null for the CPU's tensors.
struct OnDevice {
  std::shared_ptr<HandOff> hand_off;
  TicketPtr ticket;
};

class OpWork : public c10d::Work {
 public:
  OpWork(int rank, c10d::OpType type, std::shared_ptr<Operation> op, std::vector<at::Tensor> outputs,
         std::shared_ptr<Leavings> leavings, OnDevice on_device = {});
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
  uint64_t getSequencenumber() const override;

  void set_source(int rank) { source_ = rank; }

 private:
  void wait_on_stream();
  void wait_on_host(std::chrono::milliseconds timeout);

  const std::shared_ptr<Operation> op_;
  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<Leavings> leavings_;
  const OnDevice on_device_;
  int source_ = -1;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace mccl
