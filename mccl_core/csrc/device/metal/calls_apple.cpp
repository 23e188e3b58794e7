// The only file that talks to Metal. It is C++: with PyTorch's headers, whose Objective-C types are void* then, and
// messages sent by name. `make macos` checks each name against Apple's metal-cpp, and this file's code against PyTorch.
#include <ATen/mps/MPSAllocatorInterface.h>
#include <ATen/mps/MPSStream.h>
#undef nil  // MPSStream.h defines it
#include <objc/message.h>
#include <objc/runtime.h>

#include <exception>
#include <utility>

#include "device/metal/calls.hpp"

extern "C" void* objc_autoreleasePoolPush(void);
extern "C" void objc_autoreleasePoolPop(void*);

namespace mccl::metal {

namespace {

template <class Result, class... Arguments>
Result send(void* object, const char* selector, Arguments... arguments) {
  return reinterpret_cast<Result (*)(void*, SEL, Arguments...)>(objc_msgSend)(object, sel_registerName(selector),
                                                                              arguments...);
}

class AutoreleasePool {
 public:
  AutoreleasePool() = default;
  ~AutoreleasePool() { objc_autoreleasePoolPop(pool_); }
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  void* const pool_ = objc_autoreleasePoolPush();
};

at::mps::MPSStream* torch_stream(Stream stream) { return static_cast<at::mps::MPSStream*>(stream); }
void* device() { return at::mps::getCurrentMPSStream()->device(); }

constexpr unsigned long kStorageModeShared = 0;  // MTLResourceStorageModeShared: MTLStorageModeShared << 4

// One for all events: a listener costs a queue.
void* listener() {
  static void* const made = [] {
    void* const type = objc_getClass("MTLSharedEventListener");
    void* const raw = send<void*>(type, "alloc");
    return send<void*>(raw, "init");
  }();
  return made;
}

}  // namespace

Stream current_stream() { return at::mps::getCurrentMPSStream(); }

void run_on_queue(Stream stream, const std::function<void()>& body) {
  __block std::exception_ptr thrown;
  const auto* run = &body;
  dispatch_sync(torch_stream(stream)->queue(), ^{
    const AutoreleasePool pool;
    try {
      (*run)();
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

void end_kernels(Stream stream) { torch_stream(stream)->endKernelCoalescing(); }
CommandBuffer command_buffer(Stream stream) { return torch_stream(stream)->commandBuffer(); }
void commit(Stream stream) { torch_stream(stream)->synchronize(at::mps::SyncType::COMMIT); }

void encode_signal(CommandBuffer commands, Event event, uint64_t value) {
  send<void>(commands, "encodeSignalEvent:value:", event, value);
}

void encode_wait(CommandBuffer commands, Event event, uint64_t value) {
  send<void>(commands, "encodeWaitForEvent:value:", event, value);
}

void encode_copy(CommandBuffer commands, Memory from, uint64_t from_offset, Memory to, uint64_t to_offset,
                 uint64_t nbytes) {
  void* const encoder = send<void*>(commands, "blitCommandEncoder");
  send<void>(encoder, "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:", from,
             static_cast<unsigned long>(from_offset), to, static_cast<unsigned long>(to_offset),
             static_cast<unsigned long>(nbytes));
  send<void>(encoder, "endEncoding");
}

Event new_event() {
  const AutoreleasePool pool;
  return send<void*>(device(), "newSharedEvent");
}

Memory new_shared_memory(uint64_t nbytes) {
  const AutoreleasePool pool;
  return send<void*>(device(), "newBufferWithLength:options:", static_cast<unsigned long>(nbytes), kStorageModeShared);
}

void release(void* object) { send<void>(object, "release"); }

uint64_t signaled_value(Event event) {
  const AutoreleasePool pool;  // the engine's threads have none
  return send<uint64_t>(event, "signaledValue");
}

void set_signaled_value(Event event, uint64_t value) {
  const AutoreleasePool pool;
  send<void>(event, "setSignaledValue:", value);
}

void notify(Event event, uint64_t value, std::function<void()> callback) {
  const AutoreleasePool pool;
  // An exception here has no caller to go to: it ends the process.
  auto block = ^(void*, uint64_t) {
    [&]() noexcept { callback(); }();
  };
  send<void>(event, "notifyListener:atValue:block:", listener(), value, block);
}

void* shared_contents(Memory memory) {
  if (send<unsigned long>(memory, "storageMode") != 0) return nullptr;  // MTLStorageModeShared
  return send<void*>(memory, "contents");
}

}  // namespace mccl::metal
