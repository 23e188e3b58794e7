#include "engine/operation.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace mccl {

namespace {
bool is_floating_point(DType dtype) {
  constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
  return std::ranges::find(kFloats, dtype) != std::end(kFloats);
}
}  // namespace

Operation::Operation(Fingerprint fingerprint, Schedule schedule, Buffers buffers)
    : fingerprint(fingerprint), steps(std::move(schedule.steps)), buffers(std::move(buffers)), states(steps.size()) {
  if (is_floating_point(fingerprint.dtype)) nan_byte = std::byte{0xFF};
}

bool Operation::wait(int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  struct Waiter {
    std::atomic<int>& count;
    explicit Waiter(std::atomic<int>& count) : count(count) { ++count; }
    ~Waiter() { --count; }
  } waiter(waiters_);
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

void Operation::copy_own_blocks() const {
  for (const auto& [from, to] : own_blocks) {
    MCCL_ASSERT(from.nbytes == to.nbytes);
    if (from.nbytes > 0 && from.data != to.data) std::memmove(to.data, from.data, from.nbytes);
  }
  if (codec) codec->begin();
}

void Operation::invalidate_result() const {
  if (codec) {
    codec->invalidate_result();
    return;
  }
  if (!nan_byte) return;
  for (const Buffer& result : results) {
    if (result.nbytes > 0) std::memset(result.data, std::to_integer<int>(*nan_byte), result.nbytes);
  }
}

std::vector<std::function<void()>> Operation::settle() {
  std::lock_guard lock(mutex_);
  state_ = failure ? OpState::kFailed : OpState::kDone;
  settled_.notify_all();
  return std::exchange(callbacks_, {});
}

}  // namespace mccl
