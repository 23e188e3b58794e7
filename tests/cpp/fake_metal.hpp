// Metal and PyTorch's MPS stream, played by a thread: the calls of device/metal/calls.hpp, with what Apple's own would
// refuse or hang on made an error. Over it runs the shim of production, device/metal/metal_stream.cpp.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/metal/metal_stream.hpp"
#include "device/sim.hpp"

namespace mccl {

// PyTorch's MPSStream: a command buffer, perhaps with an open encoder, and the queue that guards both. What has been
// committed runs on a SimStream.
class FakeMpsStream {
 public:
  FakeMpsStream(unsigned seed, int longest_delay_us) : gpu(seed, longest_delay_us) {}

  void enter_queue();
  void leave_queue();
  void check_on_queue() const;  // throws std::logic_error elsewhere

  // Both on the queue.
  void append(std::function<void(SimStream&)> command, bool needs_encoder);
  void commit();

  SimStream gpu;
  bool encoder_open = false;

 private:
  std::mutex queue_;
  std::thread::id on_queue_;
  std::mutex owner_;  // of on_queue_
  std::vector<std::function<void(SimStream&)>> commands_;
};

// What the tests ask of a stream (device/sim.hpp has the same). Plain pointers serve as tensors: each gets a fake
// MTLBuffer.
class FakeMetalStream final : public Shim {
 public:
  FakeMetalStream(unsigned seed, int longest_delay_us, SimWords words = SimWords::k64Bit,
                  SimMemory memory = SimMemory::kShared);
  ~FakeMetalStream() override;

  void encode_kernel(std::function<void()> kernel);
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
  template <class Call>
  auto on_this_stream(Call&& call);

  const SimMemory memory_;
  FakeMpsStream stream_;
  MetalStream shim_;
  std::map<void*, void*> buffers_;  // a tensor's memory, its fake MTLBuffer; on the framework's thread
};

}  // namespace mccl
