// The one interface between a device's stream and the engine (docs/hand-off.md).
//
//   O1  the engine reads a buffer only after the kernels that write it
//   O2  the device reads the result only after the engine has written it
//   O3  only the framework's thread encodes on the stream
//
// and a buffer is held until wait_released() has returned and the stream has executed that wait. One op's way:
//
//   calling thread    host_view, begin, signal_ready ........................ wait_released, the next kernels
//   stream            ... kernels, [ready] ................................. [waits for release] ... kernels
//   engine's threads             Ticket::on_ready: reads and writes, Ticket::release
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/buffers.hpp"

namespace mccl {

class Ticket;  // one op in flight on a device (device/ticket.hpp)
using TicketPtr = std::shared_ptr<Ticket>;

// A tensor's memory as the framework names it.
struct DeviceTensor {
  void* storage = nullptr;  // an MTLBuffer on Metal, a pointer elsewhere
  uint64_t offset_nbytes = 0;
  uint64_t nbytes = 0;
  bool written = true;  // the engine writes to it, too
};

// The same memory as the engine sees it: shared with the device, or a staging buffer.
struct HostView {
  Buffer memory;
  DeviceTensor tensor;
  std::shared_ptr<void> staging;  // null where the memory is shared
};

class HandOff {
 public:
  HandOff() = default;
  virtual ~HandOff() = default;
  HandOff(const HandOff&) = delete;
  HandOff& operator=(const HandOff&) = delete;

  // All four on the framework's thread, which is that of the first begin(); another thread's call throws Error
  // (kUsage).

  virtual HostView host_view(const DeviceTensor& tensor) = 0;
  // Opens an op. `owner` keeps the tensors alive. Never blocks. Null where there is nothing to order.
  virtual TicketPtr begin(std::vector<HostView> views, std::shared_ptr<void> owner) = 0;
  // What has been encoded so far is what the engine waits for; it starts to run.
  virtual void signal_ready(const TicketPtr& ticket) = 0;
  // What is encoded from here on runs after Ticket::release. Does not block; again for the same ticket does nothing.
  // A ticket that is let go of without this call is recycled all the same.
  virtual void wait_released(const TicketPtr& ticket) = 0;

  // Lets one more thread encode, for a framework that runs part of the caller's program on a thread of its own while
  // the caller blocks (as autograd does with backward). Idempotent. An adopted thread's call binds nobody.
  virtual void adopt_this_thread() = 0;
};

}  // namespace mccl
