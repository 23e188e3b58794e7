// A GPU stream played by a thread, for the tests: kernels are functions that run late, one after another, on host
// memory. As on Metal, what has been encoded does not run before it is committed, the encoder belongs to one thread and
// has no lock, and news of the stream comes on a listener's thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "device/shim.hpp"

namespace mccl {

enum class SimWords { k64Bit, k32Bit };      // as Metal's events, as CUDA's words
enum class SimMemory { kShared, kPrivate };  // the host sees the tensor, or a staging copy

class SimStream final : public Shim {
 public:
  // Kernels start after a random delay of at most `longest_delay_us`, most of them at once.
  SimStream(unsigned seed, int longest_delay_us, SimWords words = SimWords::k64Bit,
            SimMemory memory = SimMemory::kShared);
  // What has not run is dropped, also a wait that is under way.
  ~SimStream() override;

  // --- the framework's calls, on its thread ---
  void encode_kernel(std::function<void()> kernel);
  // Commits, and blocks until the stream has run all of it.
  void synchronize();

  HostView host_view(const DeviceTensor& tensor) override;
  std::unique_ptr<Word> make_word(uint64_t value) override;
  void encode_signal(Word& word, uint64_t value) override;
  void encode_wait(Word& word, uint64_t value) override;
  void encode_copy_to_host(const HostView& view) override;
  void encode_copy_to_device(const HostView& view) override;
  void commit() override;
  void notify(Word& word, uint64_t value, std::function<void()> callback) override;

 private:
  class SimWord;
  struct Command {
    std::function<void()> kernel;  // or, where it is empty,
    SimWord* word;
    uint64_t value;
    bool waits;  // else raises
  };
  struct Notice {
    SimWord* word;
    uint64_t value;
    std::function<void()> callback;
  };

  void run_stream();
  void run_listener();
  void deliver_due();  // under the lock

  const int longest_delay_us_;
  const SimWords words_;
  const SimMemory memory_;
  std::mt19937 random_;           // the stream's thread
  std::vector<Command> encoder_;  // the framework's thread; unguarded on purpose

  std::mutex mutex_;
  std::condition_variable changed_;  // for the stream
  std::condition_variable idle_;     // for synchronize()
  std::condition_variable news_;     // for the listener
  std::deque<Command> queue_;
  std::vector<Notice> notices_;
  std::deque<std::function<void()>> due_;
  bool running_ = false;
  bool stopping_ = false;

  std::thread stream_;
  std::thread listener_;
};

}  // namespace mccl
