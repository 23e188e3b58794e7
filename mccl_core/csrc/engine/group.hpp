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
  uint64_t nbytes = 0;       // of the caller's tensor, as torch counts them
  uint64_t sent_nbytes = 0;  // payload that this rank has sent for them
};
using Counters = std::array<KindCounters, static_cast<size_t>(OpKind::kCount)>;

// How this rank reaches a member. Where two ranks send each other much at the same time, on one socket, the kernel
// makes the two directions wait for each other: a group of two has a *lane* for each direction.
struct Link {
  std::shared_ptr<Connection> send;
  std::shared_ptr<Connection> receive;
  // The member said goodbye there. It does so on both lanes: on each, all that it sent before comes first.
  bool send_closed = false;
  bool receive_closed = false;

  bool left() const { return send_closed || receive_closed; }
  bool complete() const { return send && receive; }
};

class Group {
 public:
  Group(uint64_t id, int32_t rank, std::vector<MemberInfo> members)
      : id(id), rank(rank), members(std::move(members)), links(this->members.size()) {}

  const uint64_t id;
  const int32_t rank;
  const std::vector<MemberInfo> members;
  int32_t world() const { return static_cast<int32_t>(members.size()); }

  int32_t lanes() const { return world() == 2 ? 2 : 1; }
  // Lane 0 carries what the process with the lower id sends.
  int32_t send_lane(size_t to) const {
    return lanes() == 2 && members[to].process < members[static_cast<size_t>(rank)].process ? 1 : 0;
  }
  int32_t receive_lane(size_t from) const { return lanes() - 1 - send_lane(from); }

  std::vector<Link> links;  // by rank; incomplete until connected
  uint64_t next_ticket = 1;
  std::unordered_map<StreamKey, uint64_t, StreamKeyHash> next_sent;  // point-to-point: sequence = peer rank
  std::unordered_map<StreamKey, uint64_t, StreamKeyHash> next_received;
  std::map<uint64_t, std::shared_ptr<Operation>> in_flight;  // by order
  std::shared_ptr<const Error> failure;
  bool closed = false;
};

}  // namespace mccl
