// What the engine counts, for each kind of op and algorithm, and for each peer that ops have waited for. Under the
// engine's lock. Nothing here allocates but peer() and snapshot().
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "base/clock.hpp"
#include "transport/frame.hpp"

namespace mccl {

class Operation;
using ProcessId = std::string;  // 16 random bytes

inline constexpr size_t kKinds = static_cast<size_t>(OpKind::kCount);
inline constexpr size_t kAlgorithms = static_cast<size_t>(Algorithm::kCount);

// Of one kind of op by one algorithm.
struct OpCounters {
  uint64_t count = 0;          // ops that ended well
  uint64_t failed = 0;         // ops that ended with an error
  uint64_t nbytes = 0;         // of the caller's tensors, as torch counts them
  uint64_t sent_nbytes = 0;    // payload that this rank sent for them, as it travelled
  uint64_t bus_nbytes = 0;     // what a rank's link has to carry for them, each way
  int64_t busy_ns = 0;         // while at least one of them was under way
  int64_t queued_ns = 0;       // ready to be sent, until the first byte went out
  uint64_t parked_nbytes = 0;  // arrived before they could be used
};
template <class T>
using ByOp = std::array<T, kKinds * kAlgorithms>;
inline size_t op_index(OpKind kind, Algorithm algorithm) {
  return static_cast<size_t>(kind) * kAlgorithms + static_cast<size_t>(algorithm);
}
// ns for which ops waited for one peer's first bytes.
using PeerWaits = ByOp<int64_t>;

class Metrics {
 public:
  struct Snapshot {
    ByOp<OpCounters> ops;
    std::map<ProcessId, PeerWaits> waits;
  };

  // Stays valid as long as this object.
  PeerWaits* peer(const ProcessId& process) { return &waits_[process]; }

  // The op may send and receive from now on.
  void started(Operation& op, TimePoint now);
  // A peer's first bytes have come for an op that was there before them. The time since the last such event of the op,
  // or since its start, was spent waiting for that peer.
  static void heard(Operation& op, PeerWaits& peer, TimePoint now);
  // The first bytes of an op that had to queue go out.
  void left_queue(Operation& op, TimePoint now);
  void parked(const Fingerprint& op, uint64_t nbytes);
  // The op is over, well or not.
  void ended(const Operation& op, TimePoint now);

  Snapshot snapshot(TimePoint now) const;
  void reset(TimePoint now);

 private:
  struct UnderWay {
    uint64_t count = 0;
    TimePoint since = 0;
  };
  ByOp<OpCounters> ops_{};
  ByOp<UnderWay> under_way_{};
  std::map<ProcessId, PeerWaits> waits_;
};

}  // namespace mccl
