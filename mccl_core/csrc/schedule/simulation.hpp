// The state of one simulation (see simulate.hpp): its queue of events, and per rank and op how far things are.
// simulate.cpp sees to ops, arrivals and gates, simulate_transmit.cpp to what is sent next.
#pragma once

#include <memory>
#include <queue>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "schedule/simulate.hpp"
#include "schedule/simulated_ports.hpp"
#include "schedule/streams.hpp"

namespace mccl {

// At the same time, in this order: what has arrived counts before a rank chooses what to send.
enum class EventKind : uint8_t {
  kAtDownlink,
  kAtPort,
  kDelivered,
  kReady,
  kGate,
  kGranted,
  kCredit,
  kSettles,
  kEgress
};

struct Event {
  Ticks at;
  uint64_t order;  // kind, then first come first served
  uint32_t a;      // a slot in flying_ for what moves; the rank otherwise
  uint32_t b;      // the op, where there is one
  EventKind kind() const { return static_cast<EventKind>(order >> 56); }
  bool operator>(const Event& other) const { return std::tie(at, order) > std::tie(other.at, other.order); }
};

// A segment on its way, or credit on its way back.
struct Flying {
  int32_t op, from, to, channel, stream;  // the last of `to`'s plan
  uint64_t nbytes;
  uint64_t on_credit;
  Ticks last;  // when its last byte gets there
};

struct ReadyStream {
  int32_t op, stream;
};

// One rank's plan, while ops that share it are still to be done.
struct SharedPlan {
  std::shared_ptr<const StreamPlan> plan;
  int32_t ops_left = 0;
};

struct RankState {
  Ticks delay = 0;
  size_t next_op = 0;                                    // to be posted
  std::vector<int32_t> in_flight;                        // in the order of ops
  std::vector<ReadyStream> ready;                        // may have sendable bytes; in the order of ops
  std::vector<std::pair<int32_t, int32_t>> connections;  // that it has sent on: peer, channel
  std::vector<uint64_t> served_at;                       // by connection: when it had its last turn, counted in turns
  bool egress_event = false;
};

class Simulation {
 public:
  Simulation(const Network& network, std::span<const SimulatedOp> ops, const SimulationOptions& options);
  SimulationResult run();

 private:
  using ProgressPtr = std::unique_ptr<OpProgress>;

  void push(Ticks at, EventKind kind, uint32_t a, uint32_t b = 0) {
    events_.push({at, static_cast<uint64_t>(kind) << 56 | next_order_++, a, b});
  }
  uint32_t fly(const Flying& flying);
  Flying land(uint32_t slot);
  RankState& rank_state(int32_t rank) { return ranks_[static_cast<size_t>(rank)]; }
  OpProgress& progress(int32_t op, int32_t rank);
  ProgressPtr& progress_ptr(int32_t op, int32_t rank) {
    return progress_[static_cast<size_t>(op)][static_cast<size_t>(rank)];
  }
  SharedPlan& plan(int32_t op, int32_t rank) {
    return plans_[ops_[static_cast<size_t>(op)].generator.get()][static_cast<size_t>(rank)];
  }

  void handle(const Event& event);
  void post_ready(int32_t rank);
  void post(int32_t op, int32_t rank);
  void delivered(const Flying& segment);
  void drain(OpProgress& p, int32_t op, int32_t rank, size_t index);
  void return_credit(OpProgress& p, int32_t rank, size_t index, uint64_t taken);
  void credit_returned(const Flying& credit);
  void granted(int32_t op, int32_t rank);
  void look_again(int32_t op, int32_t rank);
  void await(OpProgress& p, int32_t op, int32_t rank, const Part& part);
  void settle_if_complete(int32_t op, int32_t rank);

  void mark_ready(int32_t op, int32_t rank, size_t stream);
  uint64_t sendable_nbytes(int32_t op, int32_t rank, size_t stream, bool& on_credit);
  void send_next(int32_t rank);
  bool send_one(int32_t rank);
  void put(int32_t rank, ReadyStream chosen, uint64_t nbytes, bool on_credit);
  void route(const Flying& segment, Passage leaving);
  int32_t turn_of(RankState& state, const Stream& stream) const;
  uint64_t& credit_used(int32_t from, int32_t to, int32_t channel) {
    const auto world = static_cast<uint64_t>(network_.world);
    return credit_used_[(static_cast<uint64_t>(channel) * world + static_cast<uint64_t>(from)) * world +
                        static_cast<uint64_t>(to)];
  }
  SimulationResult result();
  std::string describe_deadlock() const;

  const Network& network_;
  std::span<const SimulatedOp> ops_;
  const SimulationOptions& options_;
  Ports ports_;
  Ticks now_ = 0;
  uint64_t next_order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<Flying> flying_;
  std::vector<uint32_t> free_slots_;
  std::vector<RankState> ranks_;
  std::vector<std::vector<ProgressPtr>> progress_;  // by op and rank; null before its first byte and once it is done
  std::unordered_map<const Generator*, std::vector<SharedPlan>> plans_;  // by rank
  std::unordered_map<uint64_t, uint64_t> credit_used_;
  std::vector<Ticks> ready_at_, posted_at_, finish_;
  std::vector<int32_t> left_ranks_;  // by op: ranks that have not finished it
  uint64_t turns_ = 0;
  uint64_t segments_ = 0;
};

}  // namespace mccl
