#include "engine/flight_record.hpp"

#include <algorithm>

#include "engine/group.hpp"

namespace mccl {

uint64_t FlightRecord::add(const Operation& op) {
  if (ring_.empty()) return 0;
  const uint64_t number = count_++;
  FlightEntry& entry = ring_[number % ring_.size()];
  entry = {};
  entry.group = op.group->id;
  entry.order = op.order;
  entry.fingerprint = op.fingerprint;
  entry.nbytes = op.nbytes;
  entry.posted_at = op.posted_at;
  return number;
}

FlightEntry* FlightRecord::find(const Operation& op) {
  if (ring_.empty()) return nullptr;
  FlightEntry& entry = ring_[op.flight % ring_.size()];
  return entry.order == op.order ? &entry : nullptr;
}

void FlightRecord::started(const Operation& op) {
  if (FlightEntry* entry = find(op)) {
    entry->ticket = op.ticket;
    entry->tag = op.key.tag;
  }
}

void FlightRecord::failed(const Operation& op, int32_t waited_for) {
  if (FlightEntry* entry = find(op)) entry->peer = waited_for;
}

void FlightRecord::settled(const Operation& op) {
  if (FlightEntry* entry = find(op)) {
    entry->state = op.failure ? OpState::kFailed : OpState::kDone;
    entry->settled_at = op.settled_at;
  }
}

std::vector<FlightEntry> FlightRecord::entries() const {
  std::vector<FlightEntry> result;
  const uint64_t kept = std::min<uint64_t>(count_, ring_.size());
  for (uint64_t i = count_ - kept; i < count_; ++i) result.push_back(ring_[i % ring_.size()]);
  return result;
}

}  // namespace mccl
