#include "device/metal/metal_stream.hpp"

#include <string>
#include <utility>

#include "base/error.hpp"
#include "device/metal/calls.hpp"

namespace mccl {

namespace {

class EventWord final : public Word {
 public:
  explicit EventWord(uint64_t value) : event_(metal::new_event()) {
    if (event_ == nullptr) throw_system("Metal made no shared event", 0);
    metal::set_signaled_value(event_, value);
  }
  ~EventWord() override { metal::release(event_); }
  void raise(uint64_t value) override {
    if (metal::signaled_value(event_) < value) metal::set_signaled_value(event_, value);
  }
  metal::Event event() const { return event_; }

 private:
  const metal::Event event_;
};

metal::Event event_of(Word& word) { return static_cast<EventWord&>(word).event(); }

void encode(const std::function<void(metal::CommandBuffer)>& commands) {
  const metal::Stream stream = metal::current_stream();
  metal::run_on_queue(stream, [&] {
    metal::end_kernels(stream);
    commands(metal::command_buffer(stream));
  });
}

}  // namespace

HostView MetalStream::host_view(const DeviceTensor& tensor) {
  if (tensor.nbytes == 0) return {{nullptr, 0}, tensor, nullptr};
  if (void* contents = metal::shared_contents(tensor.storage)) {
    return {{static_cast<std::byte*>(contents) + tensor.offset_nbytes, tensor.nbytes}, tensor, nullptr};
  }
  const metal::Memory memory = metal::new_shared_memory(tensor.nbytes);
  if (memory == nullptr) {
    throw_system("Metal has no memory for a staging buffer of " + std::to_string(tensor.nbytes) + " bytes", 0);
  }
  const std::shared_ptr<void> staging(memory, metal::release);
  return {{static_cast<std::byte*>(metal::shared_contents(memory)), tensor.nbytes}, tensor, staging};
}

std::unique_ptr<Word> MetalStream::make_word(uint64_t value) { return std::make_unique<EventWord>(value); }

void MetalStream::encode_signal(Word& word, uint64_t value) {
  encode([&](metal::CommandBuffer commands) { metal::encode_signal(commands, event_of(word), value); });
}

void MetalStream::encode_wait(Word& word, uint64_t value) {
  encode([&](metal::CommandBuffer commands) { metal::encode_wait(commands, event_of(word), value); });
}

void MetalStream::encode_copy_to_host(const HostView& view) {
  if (!view.staging) return;
  encode([&](metal::CommandBuffer commands) {
    metal::encode_copy(commands, view.tensor.storage, view.tensor.offset_nbytes, view.staging.get(), 0,
                       view.tensor.nbytes);
  });
}

void MetalStream::encode_copy_to_device(const HostView& view) {
  if (!view.staging) return;
  encode([&](metal::CommandBuffer commands) {
    metal::encode_copy(commands, view.staging.get(), 0, view.tensor.storage, view.tensor.offset_nbytes,
                       view.tensor.nbytes);
  });
}

void MetalStream::commit() {
  const metal::Stream stream = metal::current_stream();
  metal::run_on_queue(stream, [stream] { metal::commit(stream); });
}

void MetalStream::notify(Word& word, uint64_t value, std::function<void()> callback) {
  metal::notify(event_of(word), value, std::move(callback));
}

}  // namespace mccl
