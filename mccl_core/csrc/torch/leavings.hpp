// Tensors that the engine has let go of. The end of a tensor that Python knows needs Python's interpreter lock, which a
// caller may hold for minutes; the engine's threads must not wait for it. So they leave tensors here, and threads that
// call the backend take them away.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace mccl {

class Leavings : public std::enable_shared_from_this<Leavings> {
 public:
  // Holds the tensors until the last copy ends, on whatever thread, and from then on until take_away().
  std::shared_ptr<void> hold(std::vector<at::Tensor> tensors) {
    auto* held = new std::vector<at::Tensor>(std::move(tensors));
    return {held, [self = shared_from_this()](std::vector<at::Tensor>* last) { self->leave(last); }};
  }

  // Only where neither the engine's lock nor Python's is waited for by others.
  void take_away() {
    std::vector<std::unique_ptr<std::vector<at::Tensor>>> left;
    {
      const std::lock_guard guard(mutex_);
      left.swap(left_);
    }
  }

 private:
  void leave(std::vector<at::Tensor>* tensors) {
    const std::lock_guard guard(mutex_);
    left_.emplace_back(tensors);
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<std::vector<at::Tensor>>> left_;
};

}  // namespace mccl
