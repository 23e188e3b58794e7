#include "schedule/simulate.hpp"

#include <algorithm>
#include <queue>
#include <random>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "schedule/simulated_ports.hpp"
#include "schedule/streams.hpp"

namespace mccl {

namespace {

// At the same time, in this order: what has arrived counts before a rank chooses what to send.
enum class EventKind : uint8_t { kAtDownlink, kAtPort, kDelivered, kReady, kGate, kGranted, kCredit, kLeft, kEgress };

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
  int32_t op, from, to, stream;  // of `to`'s plan
  uint64_t nbytes;
  uint64_t on_credit;
  Ticks last;
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
  size_t next_op = 0;               // to be posted
  std::vector<int32_t> in_flight;   // in the order of ops
  std::vector<ReadyStream> ready;   // may have sendable bytes; in the order of ops
  std::vector<int32_t> peers;       // that it has sent to
  std::vector<uint64_t> served_at;  // by peer: when its connection had its last turn, counted in turns
  bool egress_event = false;
};

class Run {
 public:
  Run(const Network& network, std::span<const SimulatedOp> ops, const SimulationOptions& options);
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
  int32_t turn_of(RankState& state, int32_t peer) const;
  uint64_t& credit_used(int32_t from, int32_t to) {
    return credit_used_[static_cast<uint64_t>(from) * static_cast<uint64_t>(network_.world) +
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

Run::Run(const Network& network, std::span<const SimulatedOp> ops, const SimulationOptions& options)
    : network_(network), ops_(ops), options_(options), ports_(network) {
  const auto world = static_cast<size_t>(network.world);
  if (options.segment_nbytes == 0) throw_usage("segments of no bytes");
  if (options.max_in_flight < 0) throw_usage("a negative number of ops in flight", "0 sets no limit");
  if (!options.delay_s.empty() && options.delay_s.size() != world) {
    throw_usage("delays for " + std::to_string(options.delay_s.size()) + " ranks in a world of " +
                std::to_string(world));
  }
  ranks_.resize(world);
  std::mt19937_64 random(options.seed);
  for (size_t rank = 0; rank < world; ++rank) {
    // Not std::uniform_real_distribution, whose results are the library's own.
    const double part = static_cast<double>(random() >> 11) * 0x1p-53;
    const double delay_s = options.delay_s.empty() ? 0 : options.delay_s[rank];
    ranks_[rank].delay = to_ticks(delay_s) + to_ticks(options.skew_s * part);
  }
  for (const SimulatedOp& op : ops) {
    ready_at_.push_back(to_ticks(op.ready_s));
    progress_.emplace_back(world);
    auto& plans = plans_[op.generator.get()];
    plans.resize(world);
    for (SharedPlan& shared : plans) ++shared.ops_left;
  }
  if (!std::is_sorted(ready_at_.begin(), ready_at_.end())) {
    throw_usage("ops that become ready out of order", "Give them in the order in which ranks start them");
  }
  posted_at_.assign(ops.size(), kNeverTicks);
  finish_.assign(ops.size(), 0);
  left_ranks_.assign(ops.size(), network.world);
}

SimulationResult Run::run() {
  for (int32_t rank = 0; rank < network_.world; ++rank) post_ready(rank);
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.at;
    handle(event);
  }
  return result();
}

SimulationResult Run::result() {
  SimulationResult result;
  result.segments = segments_;
  const Ticks end = ops_.empty() ? 0 : *std::max_element(finish_.begin(), finish_.end());
  for (size_t op = 0; op < ops_.size(); ++op) {
    const double never = std::numeric_limits<double>::infinity();
    result.posted_s.push_back(posted_at_[op] == kNeverTicks ? never : to_seconds(posted_at_[op]));
    result.finish_s.push_back(left_ranks_[op] > 0 ? never : to_seconds(finish_[op]));
    result.last_finish_s = std::max(result.last_finish_s, result.finish_s.back());
    if (left_ranks_[op] > 0 && !result.deadlock) result.deadlock = describe_deadlock();
  }
  for (int32_t rank = 0; rank < network_.world; ++rank) {
    result.egress_busy_share.push_back(ports_.egress_busy_share(rank, end));
  }
  result.uplink_busy_share = ports_.uplink_busy_share(end);
  return result;
}

void Run::handle(const Event& event) {
  const auto rank = static_cast<int32_t>(event.a);
  const auto op = static_cast<int32_t>(event.b);
  switch (event.kind()) {
    case EventKind::kAtDownlink: {
      Flying& segment = flying_[event.a];
      const Passage passed = ports_.descend(segment.to, segment.nbytes, {now_, segment.last});
      const Passage travelled = ports_.travel(passed);
      segment.last = travelled.last;
      push(travelled.first, EventKind::kAtPort, event.a);
      break;
    }
    case EventKind::kAtPort: {
      const Flying& segment = flying_[event.a];
      push(ports_.arrive(segment.to, segment.nbytes, {now_, segment.last}), EventKind::kDelivered, event.a);
      break;
    }
    case EventKind::kDelivered: delivered(land(event.a)); break;
    case EventKind::kReady: post_ready(rank); break;
    case EventKind::kGate: look_again(op, rank); break;
    case EventKind::kGranted: granted(op, rank); break;
    case EventKind::kCredit: credit_returned(land(event.a)); break;
    case EventKind::kLeft: settle_if_complete(op, rank); break;
    case EventKind::kEgress:
      rank_state(rank).egress_event = false;
      send_next(rank);
      break;
  }
}

uint32_t Run::fly(const Flying& flying) {
  if (free_slots_.empty()) {
    flying_.push_back(flying);
    return static_cast<uint32_t>(flying_.size() - 1);
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  flying_[slot] = flying;
  return slot;
}

Flying Run::land(uint32_t slot) {
  free_slots_.push_back(slot);
  return flying_[slot];
}

OpProgress& Run::progress(int32_t op, int32_t rank) {
  ProgressPtr& progress = progress_ptr(op, rank);
  if (!progress) {
    SharedPlan& shared = plan(op, rank);
    if (!shared.plan) {
      const Generator& generate = *ops_[static_cast<size_t>(op)].generator;
      const Member me{rank, network_.world};
      shared.plan = std::make_shared<StreamPlan>(plan_streams(me.world > 1 ? generate(me) : Schedule{}));
    }
    progress = std::make_unique<OpProgress>(shared.plan);
  }
  return *progress;
}

// Starts what is ready, as far as the number of ops in flight allows.
void Run::post_ready(int32_t rank) {
  RankState& state = rank_state(rank);
  const auto limit = static_cast<size_t>(options_.max_in_flight);
  while (state.next_op < ops_.size() && (limit == 0 || state.in_flight.size() < limit)) {
    const Ticks ready_at = ready_at_[state.next_op] + state.delay;
    if (ready_at > now_) {
      push(ready_at, EventKind::kReady, static_cast<uint32_t>(rank));
      return;
    }
    post(static_cast<int32_t>(state.next_op++), rank);
  }
}

void Run::post(int32_t op, int32_t rank) {
  rank_state(rank).in_flight.push_back(op);
  Ticks& posted_at = posted_at_[static_cast<size_t>(op)];
  posted_at = std::min(posted_at, now_);
  OpProgress& p = progress(op, rank);
  p.posted = true;
  for (size_t i = 0; i < p.out.size(); ++i) mark_ready(op, rank, i);
  push(now_, p.complete() ? EventKind::kLeft : EventKind::kGate, static_cast<uint32_t>(rank),
       static_cast<uint32_t>(op));
}

void Run::delivered(const Flying& segment) {
  OpProgress& p = progress(segment.op, segment.to);
  InProgress& in = p.in[static_cast<size_t>(segment.stream)];
  in.parked += segment.nbytes;
  in.on_credit += segment.on_credit;
  if (!p.posted) return;
  drain(p, segment.op, segment.to, static_cast<size_t>(segment.stream));
  if (p.waits) look_again(segment.op, segment.to);
  send_next(segment.to);
  settle_if_complete(segment.op, segment.to);
}

// Takes what a stream has parked, and marks what this lets go.
void Run::drain(OpProgress& p, int32_t op, int32_t rank, size_t index) {
  InProgress& in = p.in[index];
  const Stream& stream = p.plan().in[index];
  const uint64_t taken = p.drain(index, now_);
  if (in.parked > 0 && in.part == stream.parts.size()) {
    throw_usage("rank " + std::to_string(rank) + " receives more from rank " + std::to_string(stream.peer) +
                " than it expects");
  }
  if (in.parked > 0) await(p, op, rank, stream.parts[in.part]);
  if (taken == 0) return;
  return_credit(p, rank, index, taken);
  for (size_t i = 0; i < p.out.size(); ++i) {
    const auto& parts = p.plan().out[i].parts;
    if (p.out[i].part == parts.size()) continue;
    const Part& part = parts[p.out[i].part];
    const bool on_receive = part.gate == GateKind::kReceived || part.gate == GateKind::kReceivedBytes;
    if (on_receive && static_cast<size_t>(part.gate_stream) == index) mark_ready(op, rank, i);
  }
}

void Run::return_credit(OpProgress& p, int32_t rank, size_t index, uint64_t taken) {
  InProgress& in = p.in[index];
  const uint64_t nbytes = std::min(taken, in.on_credit);
  if (nbytes == 0) return;
  in.on_credit -= nbytes;
  push(now_ + ports_.alpha(), EventKind::kCredit, fly({-1, p.plan().in[index].peer, rank, -1, nbytes, 0, 0}));
}

void Run::credit_returned(const Flying& credit) {
  credit_used(credit.from, credit.to) -= credit.nbytes;
  for (const int32_t op : rank_state(credit.from).in_flight) {
    OpProgress& p = progress(op, credit.from);
    for (size_t i = 0; i < p.out.size(); ++i) {
      if (p.plan().out[i].peer == credit.to && std::exchange(p.out[i].starved, false)) mark_ready(op, credit.from, i);
    }
  }
  send_next(credit.from);
}

void Run::granted(int32_t op, int32_t rank) {
  if (!progress_ptr(op, rank)) return;  // it went on credit meanwhile
  OpProgress& p = progress(op, rank);
  for (size_t i = 0; i < p.out.size(); ++i) {
    if (std::exchange(p.out[i].starved, false)) mark_ready(op, rank, i);
  }
  send_next(rank);
}

// Has the rank look again once the gate of something that waits may have opened.
void Run::await(OpProgress& p, int32_t op, int32_t rank, const Part& part) {
  p.waits = true;
  const Ticks opens_at = p.gate_opens_at(part);
  if (opens_at > now_ && opens_at != kNeverTicks) {
    push(opens_at, EventKind::kGate, static_cast<uint32_t>(rank), static_cast<uint32_t>(op));
  }
}

// A gate may have opened: parked bytes can be used, more can be granted, more can be sent.
void Run::look_again(int32_t op, int32_t rank) {
  if (!progress_ptr(op, rank)) return;  // done meanwhile
  OpProgress& p = progress(op, rank);
  if (!p.posted) return;
  p.waits = false;
  for (size_t i = 0; i < p.in.size(); ++i) {
    if (p.in[i].parked > 0) drain(p, op, rank, i);
  }
  for (size_t i = 0; i < p.in.size(); ++i) {
    if (!p.in[i].starved) continue;
    const Stream& stream = p.plan().in[i];
    const size_t before = p.in[i].granted;
    if (p.grant(i, now_) > before) {
      p.in[i].starved = false;
      push(now_ + ports_.alpha(), EventKind::kGranted, static_cast<uint32_t>(stream.peer), static_cast<uint32_t>(op));
    } else if (before < stream.parts.size()) {
      await(p, op, rank, stream.parts[before]);
    }
  }
  for (size_t i = 0; i < p.out.size(); ++i) {
    const auto& parts = p.plan().out[i].parts;
    if (p.out[i].part < parts.size() && parts[p.out[i].part].gate == GateKind::kSent) mark_ready(op, rank, i);
  }
  send_next(rank);
  settle_if_complete(op, rank);
}

void Run::settle_if_complete(int32_t op, int32_t rank) {
  ProgressPtr& p = progress_ptr(op, rank);
  if (!p || !p->posted || !p->complete()) return;
  if (p->left_at() > now_) {
    push(p->left_at(), EventKind::kLeft, static_cast<uint32_t>(rank), static_cast<uint32_t>(op));
    return;
  }
  p.reset();
  if (SharedPlan& shared = plan(op, rank); --shared.ops_left == 0) shared.plan.reset();
  RankState& state = rank_state(rank);
  std::erase(state.in_flight, op);
  std::erase_if(state.ready, [=](const ReadyStream& ready) { return ready.op == op; });
  --left_ranks_[static_cast<size_t>(op)];
  finish_[static_cast<size_t>(op)] = std::max(finish_[static_cast<size_t>(op)], now_);
  post_ready(rank);
}

void Run::mark_ready(int32_t op, int32_t rank, size_t stream) {
  if (std::exchange(progress(op, rank).out[stream].queued, true)) return;
  auto& ready = rank_state(rank).ready;
  const auto later = [](int32_t value, const ReadyStream& other) { return value < other.op; };
  ready.insert(std::upper_bound(ready.begin(), ready.end(), op, later), {op, static_cast<int32_t>(stream)});
}

// How many bytes of the stream may go as the next segment. Without a grant they need credit, and a stream that has
// neither waits. A grant that is there already is taken as known; one that is waited for travels for alpha.
uint64_t Run::sendable_nbytes(int32_t op, int32_t rank, size_t index, bool& on_credit) {
  OpProgress& mine = progress(op, rank);
  OutProgress& out = mine.out[index];
  const Stream& stream = mine.plan().out[index];
  const uint64_t open = mine.open_nbytes(index, now_);
  if (open == 0) {
    const bool on_send = out.part < stream.parts.size() && stream.parts[out.part].gate == GateKind::kSent;
    if (on_send) await(mine, op, rank, stream.parts[out.part]);  // drain() sees to the others
    return 0;
  }
  const uint64_t n = std::min(open, options_.segment_nbytes);
  OpProgress& theirs = progress(op, stream.peer);
  if (out.peer_index < 0) out.peer_index = find_stream(theirs.plan().in, rank);
  if (out.peer_index < 0) {
    throw_usage("rank " + std::to_string(rank) + " sends to rank " + std::to_string(stream.peer) +
                ", which expects nothing from it");
  }
  const auto peer_index = static_cast<size_t>(out.peer_index);
  const auto& parts = theirs.plan().in[peer_index].parts;
  const size_t granted = theirs.grant(peer_index, now_);
  on_credit = out.part >= granted;
  if (!on_credit) return n;
  const uint64_t usable = std::min(n, options_.credit_nbytes - credit_used(rank, stream.peer));
  if (usable > 0) return usable;
  out.starved = true;
  theirs.in[peer_index].starved = true;
  if (theirs.posted && granted < parts.size()) await(theirs, op, stream.peer, parts[granted]);
  return 0;
}

int32_t Run::turn_of(RankState& state, int32_t peer) const {
  const auto found = std::find(state.peers.begin(), state.peers.end(), peer);
  if (found == state.peers.end()) {
    state.peers.push_back(peer);
    state.served_at.push_back(0);
    return static_cast<int32_t>(state.peers.size()) - 1;
  }
  return static_cast<int32_t>(found - state.peers.begin());
}

void Run::send_next(int32_t rank) {
  RankState& state = rank_state(rank);
  while (!state.ready.empty()) {
    const Ticks free_at = ports_.egress_free_at(rank);
    if (free_at > now_) {
      if (!std::exchange(state.egress_event, true)) push(free_at, EventKind::kEgress, static_cast<uint32_t>(rank));
      return;
    }
    if (!send_one(rank)) return;
  }
}

// Puts the next segment on the wire: connections take turns, and on each the lowest op goes first.
bool Run::send_one(int32_t rank) {
  RankState& state = rank_state(rank);
  ReadyStream chosen{-1, -1};
  uint64_t chosen_nbytes = 0;
  bool chosen_on_credit = false;
  int32_t chosen_turn = -1;
  for (size_t i = 0; i < state.ready.size();) {
    const ReadyStream candidate = state.ready[i];
    const auto stream = static_cast<size_t>(candidate.stream);
    OpProgress& p = progress(candidate.op, rank);
    int32_t& turn = p.out[stream].turn;
    if (turn < 0) turn = turn_of(state, p.plan().out[stream].peer);
    const auto served_at = [&](int32_t t) { return state.served_at[static_cast<size_t>(t)]; };
    if (chosen_turn >= 0 && (turn == chosen_turn || served_at(turn) >= served_at(chosen_turn))) {
      ++i;
      continue;
    }
    bool on_credit = false;
    const uint64_t n = sendable_nbytes(candidate.op, rank, stream, on_credit);
    if (n == 0) {
      p.out[stream].queued = false;
      state.ready.erase(state.ready.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    chosen = candidate;
    chosen_nbytes = n;
    chosen_on_credit = on_credit;
    chosen_turn = turn;
    ++i;
  }
  if (chosen_turn < 0) return false;
  state.served_at[static_cast<size_t>(chosen_turn)] = ++turns_;
  put(rank, chosen, chosen_nbytes, chosen_on_credit);
  return true;
}

void Run::put(int32_t rank, ReadyStream chosen, uint64_t nbytes, bool on_credit) {
  OpProgress& p = progress(chosen.op, rank);
  const auto index = static_cast<size_t>(chosen.stream);
  const int32_t peer = p.plan().out[index].peer;
  const Passage leaving = ports_.leave(rank, nbytes, now_);
  if (on_credit) credit_used(rank, peer) += nbytes;
  const bool part_done = p.sent(index, nbytes, leaving.last);
  const auto a = static_cast<uint32_t>(rank);
  const auto b = static_cast<uint32_t>(chosen.op);
  if (part_done && p.waits) push(leaving.last, EventKind::kGate, a, b);
  if (p.complete()) push(leaving.last, EventKind::kLeft, a, b);
  ++segments_;
  route({chosen.op, rank, peer, p.out[index].peer_index, nbytes, on_credit ? nbytes : 0, 0}, leaving);
}

void Run::route(const Flying& segment, Passage leaving) {
  const uint32_t slot = fly(segment);
  if (ports_.one_switch()) {
    const Passage travelled = ports_.travel(leaving);
    push(ports_.arrive(segment.to, segment.nbytes, travelled), EventKind::kDelivered, slot);
    return;
  }
  const bool crosses = ports_.crosses(segment.from, segment.to);
  const Passage way = crosses ? ports_.climb(segment.from, segment.nbytes, leaving) : ports_.travel(leaving);
  flying_[slot].last = way.last;
  push(way.first, crosses ? EventKind::kAtDownlink : EventKind::kAtPort, slot);
}

std::string Run::describe_deadlock() const {
  for (size_t op = 0; op < ops_.size(); ++op) {
    for (size_t rank = 0; rank < progress_[op].size(); ++rank) {
      const ProgressPtr& p = progress_[op][rank];
      if (!p || !p->posted) continue;
      for (size_t i = 0; i < p->in.size(); ++i) {
        const Stream& stream = p->plan().in[i];
        if (p->in[i].part == stream.parts.size()) continue;
        return "ranks wait for each other: in op " + std::to_string(op) + " rank " + std::to_string(rank) +
               " for rank " + std::to_string(stream.peer) + ", with " + std::to_string(p->in[i].part) + " of " +
               std::to_string(stream.parts.size()) + " steps received from it";
      }
    }
  }
  return "a rank cannot send what its peer has never asked for";
}

}  // namespace

SimulationResult simulate(const Network& network, std::span<const SimulatedOp> ops, const SimulationOptions& options) {
  return Run(network, ops, options).run();
}

}  // namespace mccl
