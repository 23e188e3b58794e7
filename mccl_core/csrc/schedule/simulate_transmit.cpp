// What a simulated rank sends next, by the rules of engine/transmit.cpp.
#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "schedule/simulation.hpp"

namespace mccl {

void Simulation::mark_ready(int32_t op, int32_t rank, size_t stream) {
  if (std::exchange(progress(op, rank).out[stream].queued, true)) return;
  auto& ready = rank_state(rank).ready;
  const auto later = [](int32_t value, const ReadyStream& other) { return value < other.op; };
  ready.insert(std::upper_bound(ready.begin(), ready.end(), op, later), {op, static_cast<int32_t>(stream)});
}

// How many bytes of the stream may go as the next segment. Without a grant they need credit, and a stream that has
// neither waits. A grant that is there already is taken as known; one that is waited for travels for alpha.
uint64_t Simulation::sendable_nbytes(int32_t op, int32_t rank, size_t index, bool& on_credit) {
  OpProgress& mine = progress(op, rank);
  OutProgress& out = mine.out[index];
  const Stream& stream = mine.plan().out[index];
  const uint64_t open = mine.open_nbytes(index, now_);
  if (open == 0) {
    if (out.part == stream.parts.size()) return 0;
    const Part& part = stream.parts[out.part];
    if (part.gate != GateKind::kReceivedBytes) await(mine, op, rank, part);  // drain() sees to those
    return 0;
  }
  const uint64_t n = std::min(open, options_.segment_nbytes);
  OpProgress& theirs = progress(op, stream.peer);
  if (out.peer_index < 0) out.peer_index = find_stream(theirs.plan().in, rank, stream.channel);
  if (out.peer_index < 0) {
    throw_usage("rank " + std::to_string(rank) + " sends to rank " + std::to_string(stream.peer) +
                ", which expects nothing from it");
  }
  const auto peer_index = static_cast<size_t>(out.peer_index);
  const auto& parts = theirs.plan().in[peer_index].parts;
  const size_t granted = theirs.grant(peer_index, now_);
  on_credit = out.part >= granted;
  if (!on_credit) return n;
  const uint64_t usable = std::min(n, options_.credit_nbytes - credit_used(rank, stream.peer, stream.channel));
  if (usable > 0) return usable;
  out.starved = true;
  theirs.in[peer_index].starved = true;
  if (theirs.posted && granted < parts.size()) await(theirs, op, stream.peer, parts[granted]);
  return 0;
}

int32_t Simulation::turn_of(RankState& state, const Stream& stream) const {
  auto& connections = state.connections;
  const auto found = std::find(connections.begin(), connections.end(), std::pair(stream.peer, stream.channel));
  if (found == connections.end()) {
    connections.emplace_back(stream.peer, stream.channel);
    state.served_at.push_back(0);
    return static_cast<int32_t>(connections.size()) - 1;
  }
  return static_cast<int32_t>(found - connections.begin());
}

void Simulation::send_next(int32_t rank) {
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
bool Simulation::send_one(int32_t rank) {
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
    if (turn < 0) turn = turn_of(state, p.plan().out[stream]);
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

void Simulation::put(int32_t rank, ReadyStream chosen, uint64_t nbytes, bool on_credit) {
  OpProgress& p = progress(chosen.op, rank);
  const auto index = static_cast<size_t>(chosen.stream);
  const auto [peer, channel] = std::pair(p.plan().out[index].peer, p.plan().out[index].channel);
  const Passage leaving = ports_.leave(rank, nbytes, now_);
  if (on_credit) credit_used(rank, peer, channel) += nbytes;
  const bool part_done = p.sent(index, nbytes, leaving.last);
  const auto a = static_cast<uint32_t>(rank);
  const auto b = static_cast<uint32_t>(chosen.op);
  if (part_done && p.waits) push(leaving.last, EventKind::kGate, a, b);
  if (p.complete()) push(leaving.last, EventKind::kSettles, a, b);
  ++segments_;
  route({chosen.op, rank, peer, channel, p.out[index].peer_index, nbytes, on_credit ? nbytes : 0, 0}, leaving);
}

void Simulation::route(const Flying& segment, Passage leaving) {
  const uint32_t slot = fly(segment);
  if (ports_.one_switch()) {
    const Passage travelled = ports_.travel(leaving);
    const Arrival arrival = ports_.arrive(segment.to, segment.nbytes, travelled);
    flying_[slot].last = arrival.complete_at;
    push(arrival.usable_at, EventKind::kDelivered, slot);
    return;
  }
  const bool crosses = ports_.crosses(segment.from, segment.to);
  const Passage way = crosses ? ports_.climb(segment.from, segment.nbytes, leaving) : ports_.travel(leaving);
  flying_[slot].last = way.last;
  push(way.first, crosses ? EventKind::kAtDownlink : EventKind::kAtPort, slot);
}

}  // namespace mccl
