// A group's state inside the engine: its members and its ops in flight. All fields are under the engine's lock, but
// those that never change.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/operation.hpp"

namespace mccl {

using ProcessId = std::string;  // 16 random bytes

struct MemberInfo {
  ProcessId process;
  std::string host;
};

struct KindCounters {
  uint64_t count = 0;
  uint64_t nbytes = 0;  // of the caller's tensor, as torch counts them
};
using Counters = std::array<KindCounters, static_cast<size_t>(OpKind::kCount)>;

class Group {
 public:
  Group(uint64_t id, int32_t rank, std::vector<MemberInfo> members)
      : id(id),
        rank(rank),
        members(std::move(members)),
        connections(this->members.size()),
        left(this->members.size()) {}

  const uint64_t id;
  const int32_t rank;
  const std::vector<MemberInfo> members;
  int32_t world() const { return static_cast<int32_t>(members.size()); }

  std::vector<std::shared_ptr<Connection>> connections;  // by rank; null until connected
  std::vector<bool> left;                                // said goodbye
  uint64_t next_ticket = 1;
  std::unordered_map<StreamKey, uint64_t, StreamKeyHash> next_sent;  // point-to-point: sequence = peer rank
  std::unordered_map<StreamKey, uint64_t, StreamKeyHash> next_received;
  std::map<uint64_t, std::shared_ptr<Operation>> in_flight;  // by order
  std::shared_ptr<const Error> failure;
  bool closed = false;
};

}  // namespace mccl
