// A group's state inside the engine: its members and its ops in flight. All fields are under the engine's lock, but
// those that never change.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/agreement.hpp"
#include "engine/channel.hpp"
#include "engine/metrics.hpp"
#include "engine/operation.hpp"
#include "engine/waits.hpp"

namespace mccl {

// What to do about a group that has failed.
inline constexpr const char* kRestart =
    "All ops in flight of this group end with this error; destroy the group and make a new one";

struct MemberInfo {
  ProcessId process;
  std::string host;
};

// How this rank reaches a member on one channel. Where two ranks send each other much at the same time, on one socket,
// the kernel makes the two directions wait for each other: a group of two has a *lane* for each direction.
struct Link {
  std::shared_ptr<Connection> send;
  std::shared_ptr<Connection> receive;
  // The member said goodbye there. It does so on both lanes: on each, all that it sent before comes first.
  bool send_closed = false;
  bool receive_closed = false;

  bool left() const { return send_closed || receive_closed; }
  bool complete() const { return send && receive; }
};

// A receive that waits for its turn: one from any source, or one that was posted after such a one with its tag.
struct WaitingReceive {
  std::shared_ptr<Operation> op;
  int32_t peer;  // -1: any
  uint32_t tag;
};

class Group {
 public:
  Group(uint64_t id, int32_t rank, std::vector<MemberInfo> members, int32_t channels)
      : id(id),
        rank(rank),
        members(std::move(members)),
        channels(channels),
        links(this->members.size() * static_cast<size_t>(channels)),
        reports(this->members.size()) {}

  const uint64_t id;
  const int32_t rank;
  const std::vector<MemberInfo> members;
  const int32_t channels;  // that its ops may use; those after the first are connected when first needed
  int32_t world() const { return static_cast<int32_t>(members.size()); }

  // -1 for a process that is no member.
  int32_t rank_of(const ProcessId& process) const {
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].process == process) return static_cast<int32_t>(i);
    }
    return -1;
  }

  int32_t lanes() const { return world() == 2 ? 2 : 1; }
  // A channel's first lane carries what the process with the lower id sends.
  int32_t send_lane(int32_t to, int32_t channel) const {
    return channel * kLanesPerChannel + (sends_on_second(to) ? 1 : 0);
  }
  int32_t receive_lane(int32_t from, int32_t channel) const {
    return channel * kLanesPerChannel + (lanes() == 2 && !sends_on_second(from) ? 1 : 0);
  }

  Link& link(int32_t to, int32_t channel) {
    return links[static_cast<size_t>(channel) * members.size() + static_cast<size_t>(to)];
  }
  const Link& link(int32_t to, int32_t channel) const { return const_cast<Group*>(this)->link(to, channel); }
  std::vector<Link> links;  // by channel and rank; incomplete until connected
  uint64_t next_ticket = 1;
  std::unordered_map<StreamKey, uint64_t, StreamKeyHash> next_sent;  // point-to-point: sequence = peer rank
  std::unordered_map<StreamKey, uint64_t, StreamKeyHash> next_received;
  std::vector<WaitingReceive> waiting;                       // in the order of posting
  int32_t next_source = 0;                                   // where the next receive from any source looks first
  std::map<uint64_t, std::shared_ptr<Operation>> in_flight;  // by order
  // The latest nested ops that were posted here; late grants for one of them say nothing new.
  std::vector<StreamKey> nested;
  size_t next_nested = 0;
  std::shared_ptr<const Error> failure;
  bool closed = false;

  // --- who waits for whom (waits.cpp) ---
  std::vector<WaitReport> reports;            // by rank
  std::map<uint64_t, AnnouncedOp> announced;  // by ticket: what others have posted and this rank has not yet
  TimePoint asked_at = 0;                     // when this rank last asked all
  Wait told;                                  // what they were told
  int updates_left = 0;                       // until it asks again

  Agreement agreement;

 private:
  bool sends_on_second(int32_t to) const {
    return lanes() == 2 && members[static_cast<size_t>(to)].process < members[static_cast<size_t>(rank)].process;
  }
};

}  // namespace mccl
