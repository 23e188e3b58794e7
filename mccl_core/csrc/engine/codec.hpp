// What an op does with bytes that have arrived, where its elements travel in another form than they have in memory
// (op/compressed.hpp, op/sparse.hpp). The steps' ranges are then those of the wire form.
#pragma once

#include <cstddef>
#include <cstdint>

#include "schedule/step.hpp"

namespace mccl {

class Codec {
 public:
  Codec() = default;
  virtual ~Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  // Before anything moves. On the thread that submits the op or makes it ready.
  virtual void begin() = 0;
  // The bytes of `range` go to the kernel next: what of them nothing was received into has still to be written. On the
  // thread that sends, outside the lock.
  virtual void before_send(Range range) = 0;
  // In place of the step's copy or reduction: `nbytes` of whole elements, the first of which is byte `done` of the
  // step's receive. On an engine thread, outside the lock; several threads may take for different steps at once.
  virtual void take(const Step& step, uint64_t done, const std::byte* data, uint64_t nbytes) = 0;
  // Whether there is something left to do once all bytes are here: finish(), which may take its time and may throw.
  virtual bool finishes() const { return false; }
  virtual void finish() {}
  // Fills the caller's memory with NaN, for a failed op whose reader does not see the error.
  virtual void invalidate_result() = 0;
};

}  // namespace mccl
