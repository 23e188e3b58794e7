#include "engine/operation.hpp"

#include <utility>

namespace mccl {

bool Operation::wait(int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  const auto settled = [&] { return state_ != OpState::kInFlight; };
  if (timeout_ms < 0 || timeout_ms > kLongest_ms) {
    settled_.wait(lock, settled);
  } else if (!settled_.wait_for(lock, std::chrono::milliseconds(timeout_ms), settled)) {
    return false;
  }
  if (state_ == OpState::kFailed) throw *failure;
  return true;
}

OpState Operation::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

std::shared_ptr<const Error> Operation::error() const {
  std::lock_guard lock(mutex_);
  return state_ == OpState::kFailed ? failure : nullptr;
}

void Operation::on_settled(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (state_ == OpState::kInFlight) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::vector<std::function<void()>> Operation::settle() {
  std::lock_guard lock(mutex_);
  state_ = failure ? OpState::kFailed : OpState::kDone;
  settled_.notify_all();
  return std::exchange(callbacks_, {});
}

}  // namespace mccl
