#include "torch/devices.hpp"

#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <utility>
#include <vector>

#include "device/sim.hpp"

namespace mccl {

namespace {
// Streams outlive the groups that use them, as a shim must; only the last one is used.
class Simulated {
 public:
  void set(std::shared_ptr<SimStream> stream) {
    const std::lock_guard guard(mutex_);
    current_ = stream.get();
    if (stream) all_.push_back(std::move(stream));
  }
  SimStream* current() {
    const std::lock_guard guard(mutex_);
    return current_;
  }

 private:
  std::mutex mutex_;
  SimStream* current_ = nullptr;
  std::vector<std::shared_ptr<SimStream>> all_;
};

Simulated& simulated() {
  static Simulated& instance = *new Simulated;
  return instance;
}
}  // namespace

bool reaches(const at::Device& device) {
#ifdef __APPLE__
  if (device.is_mps()) return true;
#endif
  return device.is_cpu();
}

Shim* shim_of(const at::Tensor& tensor) {
#ifdef __APPLE__
  if (tensor.is_mps()) return &mps_shim();
#endif
  return simulated().current();
}

DeviceTensor device_tensor(const at::Tensor& contiguous, bool written) {
  const auto item_nbytes = static_cast<uint64_t>(contiguous.element_size());
  // Of an MPS tensor this is the MTLBuffer, not a place in memory: nothing may be added to it.
  void* const storage = contiguous.storage().mutable_data();
  return {storage, static_cast<uint64_t>(contiguous.storage_offset()) * item_nbytes,
          static_cast<uint64_t>(contiguous.nbytes()), written};
}

void adopt_autograd_thread(HandOff& hand_off) {
  if (torch::autograd::get_current_graph_task_id() != -1) hand_off.adopt_this_thread();
}

void simulate_device(std::shared_ptr<SimStream> stream) { simulated().set(std::move(stream)); }

}  // namespace mccl
