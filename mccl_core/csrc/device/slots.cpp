#include "device/slots.hpp"

namespace mccl {

Slot& SlotPool::add() {
  slots_.push_back(std::make_unique<Slot>(
      Slot{shim_.make_word(first_value_), shim_.make_word(first_value_), first_value_, first_value_}));
  free_.reserve(slots_.capacity());  // give_back() allocates nothing
  return *slots_.back();
}

Slot& SlotPool::acquire() {
  const std::lock_guard guard(mutex_);
  if (free_.empty()) return add();
  Slot& slot = *free_.back();
  free_.pop_back();
  return slot;
}

void SlotPool::give_back(Slot& slot) {
  const std::lock_guard guard(mutex_);
  free_.push_back(&slot);
}

size_t SlotPool::count() const {
  const std::lock_guard guard(mutex_);
  return slots_.size();
}

size_t SlotPool::free_count() const {
  const std::lock_guard guard(mutex_);
  return free_.size();
}

}  // namespace mccl
