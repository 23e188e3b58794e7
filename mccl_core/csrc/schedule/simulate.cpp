#include "schedule/simulate.hpp"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "base/error.hpp"
#include "schedule/simulation.hpp"

namespace mccl {

Simulation::Simulation(const Network& network, std::span<const SimulatedOp> ops, const SimulationOptions& options)
    : network_(network), ops_(ops), options_(options), ports_(network, options.forward_nbytes) {
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

SimulationResult Simulation::run() {
  for (int32_t rank = 0; rank < network_.world; ++rank) post_ready(rank);
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.at;
    handle(event);
  }
  return result();
}

SimulationResult Simulation::result() {
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

void Simulation::handle(const Event& event) {
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
      Flying& segment = flying_[event.a];
      const Arrival arrival = ports_.arrive(segment.to, segment.nbytes, {now_, segment.last});
      segment.last = arrival.complete_at;
      push(arrival.usable_at, EventKind::kDelivered, event.a);
      break;
    }
    case EventKind::kDelivered: delivered(land(event.a)); break;
    case EventKind::kReady: post_ready(rank); break;
    case EventKind::kGate: look_again(op, rank); break;
    case EventKind::kGranted: granted(op, rank); break;
    case EventKind::kCredit: credit_returned(land(event.a)); break;
    case EventKind::kSettles: settle_if_complete(op, rank); break;
    case EventKind::kEgress:
      rank_state(rank).egress_event = false;
      send_next(rank);
      break;
  }
}

uint32_t Simulation::fly(const Flying& flying) {
  if (free_slots_.empty()) {
    flying_.push_back(flying);
    return static_cast<uint32_t>(flying_.size() - 1);
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  flying_[slot] = flying;
  return slot;
}

Flying Simulation::land(uint32_t slot) {
  free_slots_.push_back(slot);
  return flying_[slot];
}

OpProgress& Simulation::progress(int32_t op, int32_t rank) {
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
void Simulation::post_ready(int32_t rank) {
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

void Simulation::post(int32_t op, int32_t rank) {
  rank_state(rank).in_flight.push_back(op);
  Ticks& posted_at = posted_at_[static_cast<size_t>(op)];
  posted_at = std::min(posted_at, now_);
  OpProgress& p = progress(op, rank);
  p.posted = true;
  for (size_t i = 0; i < p.out.size(); ++i) mark_ready(op, rank, i);
  push(now_, p.complete() ? EventKind::kSettles : EventKind::kGate, static_cast<uint32_t>(rank),
       static_cast<uint32_t>(op));
}

void Simulation::delivered(const Flying& segment) {
  OpProgress& p = progress(segment.op, segment.to);
  InProgress& in = p.in[static_cast<size_t>(segment.stream)];
  in.parked += segment.nbytes;
  in.on_credit += segment.on_credit;
  in.complete_at = std::max(in.complete_at, segment.last);
  if (!p.posted) return;
  drain(p, segment.op, segment.to, static_cast<size_t>(segment.stream));
  if (p.waits) look_again(segment.op, segment.to);
  send_next(segment.to);
  settle_if_complete(segment.op, segment.to);
}

// Takes what a stream has parked, and marks what this lets go.
void Simulation::drain(OpProgress& p, int32_t op, int32_t rank, size_t index) {
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
    const bool on_receive = part.gate == GateKind::kReceivedBytes || part.gate == GateKind::kReceived;
    if (on_receive && static_cast<size_t>(part.gate_stream) == index) mark_ready(op, rank, i);
  }
}

void Simulation::return_credit(OpProgress& p, int32_t rank, size_t index, uint64_t taken) {
  InProgress& in = p.in[index];
  const uint64_t nbytes = std::min(taken, in.on_credit);
  if (nbytes == 0) return;
  in.on_credit -= nbytes;
  const Stream& stream = p.plan().in[index];
  push(now_ + ports_.alpha(), EventKind::kCredit, fly({-1, stream.peer, rank, stream.channel, -1, nbytes, 0, 0}));
}

void Simulation::credit_returned(const Flying& credit) {
  credit_used(credit.from, credit.to, credit.channel) -= credit.nbytes;
  for (const int32_t op : rank_state(credit.from).in_flight) {
    OpProgress& p = progress(op, credit.from);
    for (size_t i = 0; i < p.out.size(); ++i) {
      const Stream& stream = p.plan().out[i];
      if (stream.peer != credit.to || stream.channel != credit.channel) continue;
      if (std::exchange(p.out[i].starved, false)) mark_ready(op, credit.from, i);
    }
  }
  send_next(credit.from);
}

void Simulation::granted(int32_t op, int32_t rank) {
  if (!progress_ptr(op, rank)) return;  // it went on credit meanwhile
  OpProgress& p = progress(op, rank);
  for (size_t i = 0; i < p.out.size(); ++i) {
    if (std::exchange(p.out[i].starved, false)) mark_ready(op, rank, i);
  }
  send_next(rank);
}

// Has the rank look again once the gate of something that waits may have opened.
void Simulation::await(OpProgress& p, int32_t op, int32_t rank, const Part& part) {
  p.waits = true;
  const Ticks opens_at = p.gate_opens_at(part);
  if (opens_at > now_ && opens_at != kNeverTicks) {
    push(opens_at, EventKind::kGate, static_cast<uint32_t>(rank), static_cast<uint32_t>(op));
  }
}

// A gate may have opened: parked bytes can be used, more can be granted, more can be sent.
void Simulation::look_again(int32_t op, int32_t rank) {
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
    if (p.out[i].part < parts.size() && parts[p.out[i].part].gate != GateKind::kReceivedBytes) mark_ready(op, rank, i);
  }
  send_next(rank);
  settle_if_complete(op, rank);
}

void Simulation::settle_if_complete(int32_t op, int32_t rank) {
  ProgressPtr& p = progress_ptr(op, rank);
  if (!p || !p->posted || !p->complete()) return;
  if (p->settles_at() > now_) {
    push(p->settles_at(), EventKind::kSettles, static_cast<uint32_t>(rank), static_cast<uint32_t>(op));
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

std::string Simulation::describe_deadlock() const {
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

SimulationResult simulate(const Network& network, std::span<const SimulatedOp> ops, const SimulationOptions& options) {
  return Simulation(network, ops, options).run();
}

}  // namespace mccl
