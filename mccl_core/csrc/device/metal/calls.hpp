// What the hand-off asks of Metal and of PyTorch's MPS stream: one call each, and no decision. calls_apple.cpp makes
// them; tests/cpp/fake_metal.cpp plays them on a thread, so that everything above runs on Linux, too.
//
// Handles are Objective-C objects. Calls may throw (C++); none throws across Objective-C or libdispatch.
#pragma once

#include <cstdint>
#include <functional>

namespace mccl::metal {

using Stream = void*;  // at::mps::MPSStream
using CommandBuffer = void*;
using Event = void*;   // MTLSharedEvent
using Memory = void*;  // MTLBuffer

// The stream that the framework encodes on now. The one place that knows which: PyTorch has one stream to 2.14, and one
// a thread from there on.
Stream current_stream();
// Runs `body` on the stream's serial queue, in an autorelease pool, and returns when it has run. Must not be nested.
void run_on_queue(Stream stream, const std::function<void()>& body);

// --- inside run_on_queue ---

// Closes the framework's open encoder: nothing else can be encoded on its command buffer before.
void end_kernels(Stream stream);
CommandBuffer command_buffer(Stream stream);
// Starts what has been encoded. Does not wait for it.
void commit(Stream stream);
void encode_signal(CommandBuffer commands, Event event, uint64_t value);
void encode_wait(CommandBuffer commands, Event event, uint64_t value);
void encode_copy(CommandBuffer commands, Memory from, uint64_t from_offset, Memory to, uint64_t to_offset,
                 uint64_t nbytes);

// --- any thread ---

// Null where the device has no room. Both are let go of by release().
Event new_event();
Memory new_shared_memory(uint64_t nbytes);
void release(void* object);
uint64_t signaled_value(Event event);
void set_signaled_value(Event event, uint64_t value);
// Runs `callback` once on a thread of libdispatch's, when the event has come to `value`. Never inside this call.
void notify(Event event, uint64_t value, std::function<void()> callback);
// Where the host sees this memory; null where it does not (private storage).
void* shared_contents(Memory memory);

}  // namespace mccl::metal
