// Sleep until a descriptor is ready, another thread calls wake(), or a deadline passes: epoll on Linux
// (poller_epoll.cpp), kqueue on macOS (poller_kqueue.cpp). Level-triggered.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/clock.hpp"
#include "base/fd.hpp"

namespace mccl {

struct PollEvent {
  void* token;
  bool readable;
  bool writable;
};

enum class Interest : uint8_t { kNone, kRead, kWrite };

class Poller {
 public:
  Poller();

  void add(int fd, void* token, Interest interest);
  void modify(int fd, void* token, Interest interest);
  void remove(int fd);

  // Blocks; returns how many events were written to `out` (0 on a wake-up or at the deadline).
  size_t wait(std::span<PollEvent> out, TimePoint deadline);
  // Any thread; several calls before one wait() cost one system call.
  void wake();
  // In a forked child: the descriptors are closed, nothing else is touched.
  void close_descriptors();

 private:
  Fd poll_;
  Fd wake_;  // eventfd on Linux; unused with kqueue, which has EVFILT_USER
  std::atomic<bool> woken_{false};
};

}  // namespace mccl
