// Monotonic time in nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>

namespace mccl {

using TimePoint = int64_t;  // ns on the steady clock
inline constexpr TimePoint kNever = std::numeric_limits<TimePoint>::max();

inline TimePoint now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline constexpr int64_t kLongest_ms = int64_t{1} << 40;  // about 35 years; more would overflow, and means never

inline TimePoint deadline_after_ms(int64_t timeout_ms) {
  return timeout_ms < 0 || timeout_ms > kLongest_ms ? kNever : now_ns() + timeout_ms * 1'000'000;
}

}  // namespace mccl
