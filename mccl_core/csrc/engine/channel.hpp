// A channel: one thread that sends and one that receives, and the connections that they poll. A process has one, and
// more on links that are faster than one core can serve: those have connections of their own between the same
// processes.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <thread>

#include "io/poller.hpp"

namespace mccl {

constexpr int32_t kMaxChannels = 8;
// Connections between two processes are numbered by *lane*: a channel has one lane for each direction (see Link).
constexpr int32_t kLanesPerChannel = 2;
inline int32_t channel_of_lane(int32_t lane) { return lane / kLanesPerChannel; }

struct Channel {
  explicit Channel(std::pmr::memory_resource* pool) : transmit_queue(pool) {}

  Poller receive_poller;
  Poller transmit_poller;
  std::pmr::deque<uint64_t> transmit_queue;  // connection ids; under the engine's lock
  std::thread receive_thread;
  std::thread transmit_thread;
};

}  // namespace mccl
