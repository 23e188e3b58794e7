// Who waits for whom, as members of a group tell each other when an op does not move.
#pragma once

#include <cstdint>

#include "base/clock.hpp"
#include "transport/frame.hpp"

namespace mccl {

enum class WaitReason : uint8_t { kNotJoined, kNotSent, kNotTaken, kNotReady, kCount };

// What a rank lacks, and of whom.
struct Wait {
  int32_t rank = -1;
  WaitReason reason = WaitReason::kNotJoined;

  bool operator==(const Wait&) const = default;
};

// What a member has said last. One that waits for nobody names itself.
struct WaitReport {
  Wait wait;
  TimePoint at = 0;
};

struct AnnouncedOp {
  Fingerprint fingerprint;
  int32_t rank = -1;
};

}  // namespace mccl
