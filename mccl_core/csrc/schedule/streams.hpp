// One rank's schedule seen from the wire, and how far it has come: for each peer and channel the bytes to it and the
// bytes from it, part after part in the order of the steps. For the simulator, which knows no bytes, only how many.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "schedule/step.hpp"

namespace mccl {

using Ticks = int64_t;  // picoseconds: sums are exact, so that a tie is a tie
constexpr Ticks kNeverTicks = std::numeric_limits<Ticks>::max();

// A step's half: what it sends, or what it receives. Its gate names a part of this rank's streams: of those to peers
// for kSent, of those from peers otherwise.
struct Part {
  uint64_t nbytes = 0;
  int32_t gate_stream = -1;
  int32_t gate_part = -1;
  GateKind gate = GateKind::kOpen;
  bool park = false;
};

struct Stream {
  int32_t peer = -1;
  int32_t channel = 0;
  std::vector<Part> parts;
};

struct StreamPlan {
  std::vector<Stream> out;
  std::vector<Stream> in;
  uint64_t nbytes = 0;  // of all parts, both ways
};

// Throws Error (kUsage) for a schedule with an empty step or a gate that names no such step.
StreamPlan plan_streams(const Schedule& schedule);

// The index of the peer's stream on the channel, or -1.
int32_t find_stream(const std::vector<Stream>& streams, int32_t peer, int32_t channel);

struct OutProgress {
  size_t part = 0;          // being sent; == parts.size() when all is on the wire
  uint64_t sent = 0;        // of that part, put on the wire
  Ticks leaves_at = 0;      // when the last byte put on the wire has left
  int32_t peer_index = -1;  // of the matching stream in the peer's plan, once looked up
  int32_t turn = -1;        // of the connection, among those of this rank
  bool queued = false;      // may have sendable bytes
  bool starved = false;     // waits for a grant or credit
};

struct InProgress {
  size_t part = 0;         // being received
  uint64_t received = 0;   // of that part: can be used, and is about to be complete
  uint64_t parked = 0;     // arrived behind a gate
  uint64_t on_credit = 0;  // of the parked bytes
  size_t granted = 0;      // parts that the sender may send without credit
  Ticks complete_at = 0;   // when all that has come so far is there
  bool starved = false;    // its sender waits for a grant
};

// One op at one rank. A time that is asked for is that at which something becomes true by itself: it may be in the
// future, and is kNeverTicks where it depends on what has not happened yet.
class OpProgress {
 public:
  explicit OpProgress(std::shared_ptr<const StreamPlan> plan);

  Ticks gate_opens_at(const Part& part) const;
  // Bytes of the out stream's current part whose gate is open at `now`.
  uint64_t open_nbytes(size_t out_index, Ticks now) const;
  // Books bytes that leave until `leaves_at`. Returns whether that was the end of a part.
  bool sent(size_t out_index, uint64_t nbytes, Ticks leaves_at);
  // Takes parked bytes as far as gates allow at `now`. Returns how many.
  uint64_t drain(size_t in_index, Ticks now);
  // How many parts of the in stream are granted at `now`.
  size_t grant(size_t in_index, Ticks now);

  bool complete() const { return todo_nbytes_ == 0; }
  Ticks settles_at() const { return settles_at_; }  // when its last bytes so far have left, and are there

  const StreamPlan& plan() const { return *plan_; }
  std::vector<OutProgress> out;
  std::vector<InProgress> in;
  bool posted = false;
  bool waits = false;  // something here waits for a gate: look again when a part has been sent or received

 private:
  std::shared_ptr<const StreamPlan> plan_;
  uint64_t todo_nbytes_;
  Ticks settles_at_ = 0;
};

}  // namespace mccl
