// The torch.distributed backend `mccl`: checks a call's tensors, turns them into buffers, hands an op to the engine.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device/shim.hpp"
#include "engine/engine.hpp"
#include "op/collective.hpp"
#include "torch/compression.hpp"
#include "torch/tensors.hpp"
#include "torch/work.hpp"

namespace mccl {

class ProcessGroupMCCL : public c10d::Backend {
 public:
  // Connects to a rank on a channel where there is no connection yet; blocks; called without any lock held. Throws
  // Error where it cannot.
  using Connector = std::function<void(int32_t rank, int32_t channel)>;
  // Makes the backend of those who stay; blocks; called without any lock held. Where they have not `agreed`, it returns
  // the one that is there already, or null.
  using Regrouper = std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int32_t>& excluded, bool agreed)>;

  ProcessGroupMCCL(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, Planner planner,
                   std::chrono::milliseconds timeout, Connector connector, Regrouper regrouper,
                   const CompressionOptions& compression);
  ~ProcessGroupMCCL() override;

  const std::string getBackendName() const override { return "mccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void abort() override;
  bool supportsShrinking() const override { return true; }
  // All who stay must call it, with the same ranks: where some had named others, or one more is lost, all of them raise
  // and are told whom they agreed to exclude.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags = 0,
                                           const c10::intrusive_ptr<Options>& opts_override = nullptr) override;
  // The first half of it: agrees on who leaves, those whom any rank names and those who are lost. Blocks.
  std::vector<int32_t> agree(const std::vector<int64_t>& ranks_to_exclude);
  uint64_t group_id() const { return group_->id; }
  void shutdown() override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts = {}) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts = {}) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts = {}) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts = {}) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts = {}) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts = {}) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts = {}) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts = {}) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts = {}) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts = {}) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts = {}) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts = {}) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts = {}) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;

 private:
  struct Call {
    c10d::OpType type;
    std::chrono::milliseconds timeout;
    Tensors outputs;
  };
  Member me() const { return {rank_, size_}; }
  Verdict agree_on(const std::vector<int64_t>& ranks_to_exclude);
  void connect(int32_t rank, int32_t channel);
  // `build` makes the op; usage errors of the core become Python's ValueError.
  WorkPtr start(Call call, const Staging& staging, const std::function<OperationPtr()>& build,
                const PointToPoint* point_to_point = nullptr);
  std::shared_ptr<HandOff> hand_off(Shim& shim);
  WorkPtr reduce_scatter_buffers(Staging& staging, const std::vector<Buffer>& inputs, const at::Tensor& output,
                                 const c10d::ReduceScatterOptions& opts, c10d::OpType type);

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  const Planner planner_;
  std::chrono::milliseconds timeout_;
  Connector connector_;
  Regrouper regrouper_;
  const std::shared_ptr<Leavings> leavings_ = std::make_shared<Leavings>();
  Compressor compressor_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex hand_off_mutex_;
  Shim* shim_ = nullptr;               // of the device that tensors have come from
  std::shared_ptr<HandOff> hand_off_;  // with it; null as long as all were the CPU's
};

}  // namespace mccl
