// An engine whose buffers are small, so that few bytes reach its limits.
#pragma once

#include "base/options.hpp"

namespace mccl {

inline Options small_engine() {
  Options o{};
  o.segment_nbytes = 32 << 10;
  o.scratch_nbytes = 32 << 10;
  o.inline_nbytes = 16 << 10;
  o.credit_nbytes = 64 << 10;
  o.eager_grant_nbytes = 64 << 10;
  o.linger_ms = 2000;
  o.heartbeat_interval_ms = 5000;
  return o;
}

}  // namespace mccl
