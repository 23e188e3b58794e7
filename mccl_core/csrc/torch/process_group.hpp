// The torch.distributed backend `mccl`: checks a call's tensors, turns them into buffers, hands an op to the engine.
//
// Files: process_group.cpp (life, errors), groups.cpp (groups from this one), collectives.cpp, coalesced.cpp (several
// tensors in a call, several calls in one work), messages.cpp (point-to-point, barriers), sparse.cpp.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/headeronly/version.h>
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
  // Makes a group whose ranks meet in a store.
  using Maker = std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store>, int rank, int size,
                                                                std::chrono::milliseconds timeout, std::string name)>;

  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("mccl", timeout) {}
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14
    c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return c10::make_intrusive<Options>(*this); }
#endif
  };

  struct Parts {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Group> group;
    Planner planner;
    std::chrono::milliseconds timeout;
    Connector connector;
    Regrouper regrouper;
    CompressionOptions compression;
    Maker maker;
    std::function<void(const Error&)> on_failure;
    std::string name;  // how profiles call the backend
  };

  explicit ProcessGroupMCCL(Parts parts);
  ~ProcessGroupMCCL() override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // --- process_group.cpp ---
  const std::string getBackendName() const override { return "mccl"; }
  OptionsPtr getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}  // all ranks count from zero
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void enableCollectivesTiming() override {}  // always on
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  bool supportsShrinking() const override { return true; }
  // All who stay must call it, with the same ranks: where some had named others, or one more is lost, all of them raise
  // and are told whom they agreed to exclude.
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags = 0,
                    const OptionsPtr& opts_override = nullptr) override;
  // The first half of it: agrees on who leaves, those whom any rank names and those who are lost. Blocks.
  std::vector<int32_t> agree(const std::vector<int64_t>& ranks_to_exclude);
  uint64_t group_id() const { return group_->id; }
  bool supportsSplitting() const override { return true; }
  // A group of some of the ranks, in this order; null on the others.
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks, const OptionsPtr& opts) override;
  BackendPtr merge(const StorePtr& store, const OptionsPtr& opts, const int& rank, const int& size) override;

  // --- collectives.cpp ---
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts = {}) override;
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
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts = {}) override;
#endif

  // --- coalesced.cpp ---
  // Calls between start and end go out at once, as always; end returns a work for all of them.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts = {}) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts = {}) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts = {}) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts = {}) override;

  // --- messages.cpp ---
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts = {}) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks = false) override;

 private:
  struct Call {
    c10d::OpType type;
    const std::string& title;
    std::chrono::milliseconds timeout;
    Tensors inputs;
    Tensors outputs;
  };
  Member me() const { return {rank_, size_}; }
  // `build` makes the op; usage errors of the core become Python's ValueError.
  WorkPtr start(Call call, const Staging& staging, const std::function<OperationPtr()>& build,
                const PointToPoint* point_to_point = nullptr);
  OnDevice submit_from_device(const OperationPtr& op, const Staging& staging, const std::shared_ptr<void>& kept,
                              const PointToPoint* point_to_point);
  std::shared_ptr<HandOff> hand_off(Shim& shim);
  void connect(int32_t rank, int32_t channel);
  Verdict agree_on(const std::vector<int64_t>& ranks_to_exclude);

  // What a reduction reads and writes, and how. `exact_mean`: AVG of integers, which travels widened.
  struct Reduction {
    Elements elements;
    bool exact_mean;
  };
  static Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* name);
  at::Tensor reduced_in_place(Staging& staging, const at::Tensor& tensor, const c10d::ReduceOp& op,
                              const Reduction& reduction) const;
  at::Tensor reduced_input(Staging& staging, const at::Tensor& tensor, const c10d::ReduceOp& op,
                           const Reduction& reduction) const;
  at::Tensor reduced_output(Staging& staging, const at::Tensor& tensor, const Reduction& reduction) const;
  static OperationPtr finish(OperationPtr op, const Reduction& reduction);
  // The world parts of a tensor that is to be reduced and scattered.
  std::vector<Buffer> parts_to_reduce(Staging& staging, const at::Tensor& whole, const c10d::ReduceOp& op,
                                      const Reduction& reduction, const char* name) const;
  // `parts`: for each of the outputs, world parts. `call` lacks its outputs.
  WorkPtr reduce_scatter_parts(Call call, Staging& staging, const std::vector<std::vector<Buffer>>& parts,
                               const Tensors& outputs, const Reduction& reduction);
  WorkPtr allreduce_sparse_tensor(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Group> group_;
  const Planner planner_;
  const c10::intrusive_ptr<Options> options_;
  const Connector connector_;
  const Regrouper regrouper_;
  const Maker maker_;
  const std::shared_ptr<Leavings> leavings_ = std::make_shared<Leavings>();
  Compressor compressor_;
  const std::shared_ptr<FailureReport> report_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex hand_off_mutex_;
  Shim* shim_ = nullptr;               // of the device that tensors have come from
  std::shared_ptr<HandOff> hand_off_;  // with it; null as long as all were the CPU's
  std::mutex coalescing_mutex_;
  std::optional<std::vector<WorkPtr>> coalescing_;  // between startCoalescing and endCoalescing

  struct Titles {  // as torch's own backends have them
    explicit Titles(const std::string& name);
    const std::string all_reduce, broadcast, reduce, all_gather, reduce_scatter, gather, scatter, all_to_all, barrier,
        send, recv, recv_any_source;
  };
  const Titles titles_;
};

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* name);
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* name);

}  // namespace mccl
