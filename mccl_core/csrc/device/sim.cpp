#include "device/sim.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace mccl {

class SimStream::SimWord final : public Word {
 public:
  SimWord(SimStream& stream, uint64_t value) : stream_(stream), value_(value) {}

  void raise(uint64_t value) override {
    const std::lock_guard guard(stream_.mutex_);
    raise_locked(value);
    stream_.changed_.notify_all();
  }
  void raise_locked(uint64_t value) {
    if (!reached(value)) value_ = value;
  }
  bool reached(uint64_t value) const {
    if (stream_.words_ == SimWords::k64Bit) return value_ >= value;
    return static_cast<int32_t>(static_cast<uint32_t>(value_) - static_cast<uint32_t>(value)) >= 0;
  }

 private:
  SimStream& stream_;
  uint64_t value_;
};

SimStream::SimStream(unsigned seed, int longest_delay_us, SimWords words, SimMemory memory)
    : longest_delay_us_(longest_delay_us), words_(words), memory_(memory), random_(seed) {
  stream_ = std::thread([this] { run_stream(); });
  listener_ = std::thread([this] { run_listener(); });
}

SimStream::~SimStream() {
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  news_.notify_all();
  stream_.join();
  listener_.join();
  due_.clear();
  std::exchange(notices_, {}).clear();  // the last reference to a ticket may be here, and with it words of this stream
}

void SimStream::encode_kernel(std::function<void()> kernel) {
  encoder_.push_back({std::move(kernel), nullptr, 0, false});
}

void SimStream::encode_signal(Word& word, uint64_t value) {
  encoder_.push_back({nullptr, static_cast<SimWord*>(&word), value, false});
}

void SimStream::encode_wait(Word& word, uint64_t value) {
  encoder_.push_back({nullptr, static_cast<SimWord*>(&word), value, true});
}

HostView SimStream::host_view(const DeviceTensor& tensor) {
  auto* data = static_cast<std::byte*>(tensor.storage) + tensor.offset_nbytes;
  if (memory_ == SimMemory::kShared) return {{data, tensor.nbytes}, tensor, nullptr};
  const auto staging = std::make_shared_for_overwrite<std::byte[]>(tensor.nbytes);
  return {{staging.get(), tensor.nbytes}, tensor, staging};
}

void SimStream::encode_copy_to_host(const HostView& view) {
  if (!view.staging) return;
  encode_kernel([memory = view.memory, tensor = view.tensor] {
    std::memcpy(memory.data, static_cast<std::byte*>(tensor.storage) + tensor.offset_nbytes, memory.nbytes);
  });
}

void SimStream::encode_copy_to_device(const HostView& view) {
  if (!view.staging) return;
  encode_kernel([memory = view.memory, tensor = view.tensor] {
    std::memcpy(static_cast<std::byte*>(tensor.storage) + tensor.offset_nbytes, memory.data, memory.nbytes);
  });
}

std::unique_ptr<Word> SimStream::make_word(uint64_t value) { return std::make_unique<SimWord>(*this, value); }

void SimStream::commit() {
  const std::lock_guard guard(mutex_);
  for (Command& command : encoder_) queue_.push_back(std::move(command));
  encoder_.clear();
  changed_.notify_all();
}

void SimStream::synchronize() {
  commit();
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return queue_.empty() && !running_; });
}

void SimStream::notify(Word& word, uint64_t value, std::function<void()> callback) {
  const std::lock_guard guard(mutex_);
  notices_.push_back({static_cast<SimWord*>(&word), value, std::move(callback)});
  deliver_due();
}

void SimStream::deliver_due() {
  const auto pending = [](const Notice& notice) { return !notice.word->reached(notice.value); };
  const auto due = std::stable_partition(notices_.begin(), notices_.end(), pending);
  if (due == notices_.end()) return;
  for (auto notice = due; notice != notices_.end(); ++notice) due_.push_back(std::move(notice->callback));
  notices_.erase(due, notices_.end());
  news_.notify_one();
}

void SimStream::run_stream() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    Command command = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    if (command.kernel) {
      lock.unlock();
      // A kernel's run time.
      if (random_() % 8 == 0 && longest_delay_us_ > 0) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(random_() % static_cast<unsigned>(longest_delay_us_ + 1)));
      }
      command.kernel();
      command.kernel = nullptr;  // what it holds ends outside the lock
      lock.lock();
    } else if (command.waits) {
      changed_.wait(lock, [&] { return stopping_ || command.word->reached(command.value); });
      if (stopping_) return;
    } else {
      command.word->raise_locked(command.value);
      deliver_due();
    }
    running_ = false;
    if (queue_.empty()) idle_.notify_all();
  }
}

void SimStream::run_listener() {
  std::unique_lock lock(mutex_);
  while (true) {
    news_.wait(lock, [&] { return stopping_ || !due_.empty(); });
    if (stopping_) return;
    auto callback = std::move(due_.front());
    due_.pop_front();
    lock.unlock();
    callback();
    callback = nullptr;
    lock.lock();
  }
}

}  // namespace mccl
