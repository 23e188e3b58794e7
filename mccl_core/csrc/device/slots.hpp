// The release slots of one hand-off. Ops complete out of order, so each op in flight has words of its own: a single
// counter would release bucket k when k + 1 is done.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "device/shim.hpp"

namespace mccl {

struct Slot {
  // Two words with one writer each: neither has to know how far the other has come to stay monotonic.
  std::unique_ptr<Word> device;  // the stream: ready, then done
  std::unique_ptr<Word> host;    // the host: released
  uint64_t device_value;         // the highest values given to a ticket so far; on the framework's thread only
  uint64_t host_value;
};

class SlotPool {
 public:
  // Words begin at `first_value`.
  SlotPool(Shim& shim, uint64_t first_value) : shim_(shim), first_value_(first_value) {}

  // A free slot; a new one where all are in use, since waiting for one could be waiting for this very thread.
  Slot& acquire();
  void give_back(Slot& slot);
  size_t count() const;
  size_t free_count() const;

 private:
  Slot& add();

  Shim& shim_;
  const uint64_t first_value_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> free_;
};

}  // namespace mccl
