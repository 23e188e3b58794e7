// The shim over PyTorch's MPS stream: words are MTLSharedEvents, memory is shared with the host or staged by a blit.
// Holds no state: it encodes on whatever stream the framework encodes on at the call.
#pragma once

#include "device/shim.hpp"

namespace mccl {

class MetalStream final : public Shim {
 public:
  // `tensor.storage` is the MTLBuffer. Throws Error (kSystem) where the device has no memory left for staging.
  HostView host_view(const DeviceTensor& tensor) override;
  std::unique_ptr<Word> make_word(uint64_t value) override;
  void encode_signal(Word& word, uint64_t value) override;
  void encode_wait(Word& word, uint64_t value) override;
  void encode_copy_to_host(const HostView& view) override;
  void encode_copy_to_device(const HostView& view) override;
  void commit() override;
  void notify(Word& word, uint64_t value, std::function<void()> callback) override;
};

}  // namespace mccl
