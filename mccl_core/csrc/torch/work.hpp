// c10d::Work over one op of the engine.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "engine/operation.hpp"
#include "torch/leavings.hpp"

namespace mccl {

// Throws torch's DistBackendError, the type that survives backward() and that users catch.
[[noreturn]] void throw_dist_backend_error(const Error& error);

class OpWork : public c10d::Work {
 public:
  OpWork(int rank, c10d::OpType type, std::shared_ptr<Operation> op, std::vector<at::Tensor> outputs,
         std::shared_ptr<Leavings> leavings);
  ~OpWork() override { leavings_->take_away(); }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // Blocks the calling thread until the result is in memory. A timeout ends the wait, not the op.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  // Completes when the result is in memory, with the output tensors.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

  void set_source(int rank) { source_ = rank; }

 private:
  const std::shared_ptr<Operation> op_;
  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<Leavings> leavings_;
  int source_ = -1;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace mccl
