// Completion threads: what an op still has to do when its bytes are there, and its callbacks.
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
thread_local bool completing = false;  // this thread runs a completion
thread_local bool yielded = false;     // and has let the next one start
}  // namespace

void Engine::enqueue_completion(Completion completion) {
  constexpr size_t kMostThreads = 64;  // that have not yielded
  std::lock_guard lock(completion_mutex_);
  completion_queue_.push_back(std::move(completion));
  if (idle_completion_threads_ == 0 && completion_threads_.size() < kMostThreads + yielded_completions_) {
    completion_threads_.emplace_back([this] { completion_loop(); });
  }
  completion_wake_.notify_one();
}

void Engine::completion_loop() {
  constexpr int64_t kStuck_ms = 50;
  std::unique_lock lock(completion_mutex_);
  while (true) {
    ++idle_completion_threads_;
    while (completion_queue_.empty() ? !completion_stopping_
                                     : running_completions_ > 0 && now_ns() < completion_stuck_at_) {
      if (completion_queue_.empty()) {
        completion_wake_.wait(lock);
      } else {
        completion_wake_.wait_for(lock, std::chrono::nanoseconds(completion_stuck_at_ - now_ns()));
      }
    }
    --idle_completion_threads_;
    if (completion_queue_.empty()) return;
    Completion completion = std::move(completion_queue_.front());
    completion_queue_.pop_front();
    ++running_completions_;
    completion_stuck_at_ = deadline_after_ms(kStuck_ms);
    lock.unlock();
    completing = true;
    complete(completion);
    completion = {};  // what it holds ends outside the lock
    completing = false;
    lock.lock();
    --(std::exchange(yielded, false) ? yielded_completions_ : running_completions_);
  }
}

void Engine::yield_completion() {
  if (!completing || std::exchange(yielded, true)) return;
  std::lock_guard lock(completion_mutex_);
  --running_completions_;
  ++yielded_completions_;
  if (completion_queue_.empty()) return;
  if (idle_completion_threads_ == 0) completion_threads_.emplace_back([this] { completion_loop(); });
  completion_wake_.notify_one();
}

void Engine::complete(Completion& completion) {
  Operation& op = *completion.op;
  if (completion.settles) {
    if (op.failure && op.invalidates) op.invalidate_result();
    try {
      if (op.codec && !op.failure) op.codec->finish();
      if (op.finalizer) op.finalizer();
    } catch (const std::exception& fault) {
      ErrorInfo info;
      info.code = Code::kSystem;
      info.op = to_string(op.fingerprint.kind);
      info.ticket = op.ticket;
      info.detail = std::string("the result could not be copied into the tensor: ") + fault.what();
      if (!op.failure) op.failure = std::make_shared<const Error>(std::move(info));
    }
    op.finalizer = nullptr;
    op.keep_alive.reset();
    if (op.codec) op.workspace.reset();
    completion.callbacks = op.settle();
  }
  for (const auto& callback : completion.callbacks) callback();
}

}  // namespace mccl
