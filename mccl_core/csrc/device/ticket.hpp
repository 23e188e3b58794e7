// One op in flight between a stream and the engine. What the engine's threads need hangs on the ticket, which outlives
// the hand-off that made it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "device/slots.hpp"

namespace mccl {

class Ticket {
 public:
  Ticket(std::shared_ptr<SlotPool> slots, std::vector<HostView> views, std::shared_ptr<void> owner);
  // The last reference is gone, so nobody waits for the slot any more: it is free.
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // --- any thread ---

  // Runs `callback` once the stream has come to the place of signal_ready: on the shim's thread, or here and now if it
  // has been there already.
  void on_ready(std::function<void()> callback);
  // The engine has let go of the buffers, for good: with the result in them or, where the op failed, with NaN. Only
  // after the stream was ready, also for a failed op (kernels would overwrite the NaN). Idempotent.
  void release();

 private:
  template <class Rules>
  friend class BasicStreamHandOff;

  void reached();  // by the stream
  void retire();   // nothing on the stream refers to this op any more
  bool copies_back() const;

  const std::shared_ptr<SlotPool> slots_;
  std::mutex mutex_;
  Slot* slot_;  // null once retired
  std::vector<HostView> views_;
  std::shared_ptr<void> owner_;
  uint64_t ready_value_;
  uint64_t done_value_;
  Word* release_word_;
  uint64_t release_value_;
  bool signalled_ = false;
  bool ready_ = false;
  bool released_ = false;
  bool waited_ = false;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace mccl
