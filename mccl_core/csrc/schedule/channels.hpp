// A collective over several channels: each carries a part of its bytes by a schedule of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step.hpp"

namespace mccl {

// What one channel does: its schedule's addresses below range.nbytes are those of the range in the op's address space,
// and those from there on are its scratch.
struct ChannelPart {
  Schedule schedule;
  Range range;
};

// One schedule for all parts, by index of their channel. The ranges follow each other from 0 on; no step reaches from
// its range into its scratch. A single part is returned as it is.
Schedule merge_channels(std::vector<ChannelPart> parts);

}  // namespace mccl
