#include "fake_metal.hpp"

#include <atomic>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "device/metal/calls.hpp"

namespace mccl {

namespace {

// An Objective-C object.
struct Object {
  Object() = default;
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
};

struct FakeEvent final : Object {
  explicit FakeEvent(SimStream& device) : gpu(device), word(device.make_word(0)) {}
  SimStream& gpu;
  const std::unique_ptr<Word> word;
  std::atomic<uint64_t> value{0};
};

struct FakeBuffer final : Object {
  std::byte* contents = nullptr;
  bool is_private = false;
  std::unique_ptr<std::byte[]> owned;
};

thread_local FakeMpsStream* current = nullptr;

FakeMpsStream& stream_of(void* handle) { return *static_cast<FakeMpsStream*>(handle); }
FakeEvent& event_of(metal::Event event) { return *static_cast<FakeEvent*>(static_cast<Object*>(event)); }
FakeBuffer& buffer_of(metal::Memory memory) { return *static_cast<FakeBuffer*>(static_cast<Object*>(memory)); }
void* handle_of(Object* object) { return object; }

}  // namespace

void FakeMpsStream::enter_queue() {
  {
    const std::lock_guard guard(owner_);
    if (on_queue_ == std::this_thread::get_id()) throw std::logic_error("dispatch_sync on the own queue: a deadlock");
  }
  queue_.lock();
  const std::lock_guard guard(owner_);
  on_queue_ = std::this_thread::get_id();
}

void FakeMpsStream::leave_queue() {
  {
    const std::lock_guard guard(owner_);
    on_queue_ = {};
  }
  queue_.unlock();
}

void FakeMpsStream::check_on_queue() const {
  const std::lock_guard guard(const_cast<std::mutex&>(owner_));
  if (on_queue_ != std::this_thread::get_id()) throw std::logic_error("the MPS stream was used outside its queue");
}

void FakeMpsStream::append(std::function<void(SimStream&)> command, bool needs_encoder) {
  check_on_queue();
  if (encoder_open && !needs_encoder) throw std::logic_error("encoded on a command buffer while an encoder is open");
  commands_.push_back(std::move(command));
}

void FakeMpsStream::commit() {
  check_on_queue();
  encoder_open = false;  // PyTorch closes it
  for (const auto& command : std::exchange(commands_, {})) command(gpu);
  gpu.commit();
}

namespace metal {

Stream current_stream() {
  if (current == nullptr) throw std::logic_error("no MPS stream is current on this thread");
  return current;
}

void run_on_queue(Stream stream, const std::function<void()>& body) {
  stream_of(stream).enter_queue();
  std::exception_ptr thrown;
  try {
    body();
  } catch (...) {
    thrown = std::current_exception();
  }
  stream_of(stream).leave_queue();
  if (thrown) std::rethrow_exception(thrown);
}

void end_kernels(Stream stream) {
  stream_of(stream).check_on_queue();
  stream_of(stream).encoder_open = false;
}

CommandBuffer command_buffer(Stream stream) {
  stream_of(stream).check_on_queue();
  return stream;
}

void commit(Stream stream) { stream_of(stream).commit(); }

void encode_signal(CommandBuffer commands, Event event, uint64_t value) {
  stream_of(commands).append(
      [&event = event_of(event), value](SimStream& gpu) {
        gpu.encode_kernel([&event, value] { event.value = value; });
        gpu.encode_signal(*event.word, value);
      },
      false);
}

void encode_wait(CommandBuffer commands, Event event, uint64_t value) {
  stream_of(commands).append([&event = event_of(event), value](SimStream& gpu) { gpu.encode_wait(*event.word, value); },
                             false);
}

void encode_copy(CommandBuffer commands, Memory from, uint64_t from_offset, Memory to, uint64_t to_offset,
                 uint64_t nbytes) {
  const std::byte* const source = buffer_of(from).contents + from_offset;
  std::byte* const target = buffer_of(to).contents + to_offset;
  stream_of(commands).append([=](SimStream& gpu) { gpu.encode_kernel([=] { std::memcpy(target, source, nbytes); }); },
                             false);
}

Event new_event() { return handle_of(new FakeEvent(stream_of(current_stream()).gpu)); }

Memory new_shared_memory(uint64_t nbytes) {
  auto* const buffer = new FakeBuffer;
  buffer->owned = std::make_unique_for_overwrite<std::byte[]>(nbytes);
  buffer->contents = buffer->owned.get();
  return handle_of(buffer);
}

void release(void* object) { delete static_cast<Object*>(object); }

uint64_t signaled_value(Event event) { return event_of(event).value; }

void set_signaled_value(Event event, uint64_t value) {
  event_of(event).value = value;
  event_of(event).word->raise(value);
}

void notify(Event event, uint64_t value, std::function<void()> callback) {
  event_of(event).gpu.notify(*event_of(event).word, value, std::move(callback));
}

void* shared_contents(Memory memory) { return buffer_of(memory).is_private ? nullptr : buffer_of(memory).contents; }

}  // namespace metal

FakeMetalStream::FakeMetalStream(unsigned seed, int longest_delay_us, SimWords, SimMemory memory)
    : memory_(memory), stream_(seed, longest_delay_us) {}

FakeMetalStream::~FakeMetalStream() {
  for (const auto& [_, buffer] : buffers_) metal::release(buffer);
}

template <class Call>
auto FakeMetalStream::on_this_stream(Call&& call) {
  struct Restore {
    FakeMpsStream* before;
    ~Restore() { current = before; }
  };
  const Restore restore{std::exchange(current, &stream_)};
  return call();
}

// As PyTorch does: the encoder stays open for the next kernel.
void FakeMetalStream::encode_kernel(std::function<void()> kernel) {
  metal::run_on_queue(&stream_, [&] {
    stream_.encoder_open = true;
    stream_.append([kernel = std::move(kernel)](SimStream& gpu) { gpu.encode_kernel(kernel); }, true);
  });
}

void FakeMetalStream::synchronize() {
  commit();
  stream_.gpu.synchronize();
}

HostView FakeMetalStream::host_view(const DeviceTensor& tensor) {
  void*& buffer = buffers_[tensor.storage];
  if (buffer == nullptr) {
    auto* const made = new FakeBuffer;
    made->contents = static_cast<std::byte*>(tensor.storage);
    made->is_private = memory_ == SimMemory::kPrivate;
    buffer = handle_of(made);
  }
  DeviceTensor named = tensor;
  named.storage = buffer;
  return on_this_stream([&] { return shim_.host_view(named); });
}

std::unique_ptr<Word> FakeMetalStream::make_word(uint64_t value) {
  return on_this_stream([&] { return shim_.make_word(value); });
}
void FakeMetalStream::encode_signal(Word& word, uint64_t value) {
  on_this_stream([&] { shim_.encode_signal(word, value); });
}
void FakeMetalStream::encode_wait(Word& word, uint64_t value) {
  on_this_stream([&] { shim_.encode_wait(word, value); });
}
void FakeMetalStream::encode_copy_to_host(const HostView& view) {
  on_this_stream([&] { shim_.encode_copy_to_host(view); });
}
void FakeMetalStream::encode_copy_to_device(const HostView& view) {
  on_this_stream([&] { shim_.encode_copy_to_device(view); });
}
void FakeMetalStream::commit() {
  on_this_stream([&] { shim_.commit(); });
}
void FakeMetalStream::notify(Word& word, uint64_t value, std::function<void()> callback) {
  on_this_stream([&] { shim_.notify(word, value, std::move(callback)); });
}

}  // namespace mccl
