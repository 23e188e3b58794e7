// What a device supplies. All ordering is above it (device/stream_handoff.hpp), so that what can be tested only on the
// device is small.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/handoff.hpp"

namespace mccl {

// A counter that the stream and the host see: an MTLSharedEvent, or 32 bits of mapped memory that the stream writes
// and waits for. It only grows, has one writer (the stream or the host), and at most one use is under way at a time; so
// 32 bits may wrap, if they are compared cyclically.
class Word {
 public:
  Word() = default;
  virtual ~Word() = default;
  Word(const Word&) = delete;
  Word& operator=(const Word&) = delete;

  // By the host, from any thread. Never blocks. A value that has been passed already changes nothing.
  virtual void raise(uint64_t value) = 0;
};

// One stream. Outlives all hand-offs and tickets made over it.
class Shim {
 public:
  Shim() = default;
  virtual ~Shim() = default;
  Shim(const Shim&) = delete;
  Shim& operator=(const Shim&) = delete;

  virtual HostView host_view(const DeviceTensor& tensor) = 0;
  virtual std::unique_ptr<Word> make_word(uint64_t value) = 0;

  // --- on the framework's thread; each appends to the stream and returns ---

  virtual void encode_signal(Word& word, uint64_t value) = 0;  // raises the word
  virtual void encode_wait(Word& word, uint64_t value) = 0;    // until the host has raised the word that far
  virtual void encode_copy_to_host(const HostView& view) = 0;  // nothing to do where the memory is shared
  virtual void encode_copy_to_device(const HostView& view) = 0;
  // What has been encoded starts to run. Does not wait for it.
  virtual void commit() = 0;

  // --- any thread ---

  // Runs `callback` once, after the stream has raised the word that far, on a thread that is not the stream (it may
  // call the device's functions, and may take its time). Never inside this call.
  virtual void notify(Word& word, uint64_t value, std::function<void()> callback) = 0;
};

}  // namespace mccl
