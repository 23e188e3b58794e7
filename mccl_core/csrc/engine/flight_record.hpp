// The latest ops of this process, for whoever has to find out why a job stands still. A ring of fixed size: an op costs
// a few stores, and no memory.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.hpp"
#include "engine/operation.hpp"

namespace mccl {

struct FlightEntry {
  uint64_t group = 0;
  uint64_t order = 0;  // of posting in this process
  uint64_t ticket = 0;
  uint32_t tag = 0;
  Fingerprint fingerprint;
  uint64_t nbytes = 0;
  OpState state = OpState::kInFlight;
  int32_t peer = -1;  // the rank that it waits for, or was waiting for when it failed
  TimePoint posted_at = 0;
  TimePoint settled_at = 0;  // 0 while it is in flight
};

class FlightRecord {
 public:
  explicit FlightRecord(size_t capacity) : ring_(capacity) {}

  // Enters an op that has its place in the order of this process; returns its number.
  uint64_t add(const Operation& op);
  // It has its ticket.
  void started(const Operation& op);
  void failed(const Operation& op, int32_t waited_for);
  void settled(const Operation& op);
  std::vector<FlightEntry> entries() const;

 private:
  // Null where the entry has been overwritten.
  FlightEntry* find(const Operation& op);

  std::vector<FlightEntry> ring_;
  uint64_t count_ = 0;
};

}  // namespace mccl
