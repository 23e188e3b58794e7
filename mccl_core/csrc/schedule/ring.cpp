// Pipelined ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
// All-reduce: 2(N-1) steps, 2(N-1)/N of the bytes each way. All-gather and reduce-scatter: N-1 steps, (N-1)/N of the
// bytes. Every send but the first is gated byte by byte on the receive before it, so hops overlap.
//
// In the all-gather of an all-reduce, what arrives replaces a partial sum that this rank has sent on.
#include <algorithm>

#include "schedule/parts.hpp"

namespace mccl {

namespace {
Gate received_bytes(int32_t step) { return step < 0 ? Gate{} : Gate{GateKind::kReceivedBytes, step}; }
Gate received(int32_t step) { return step < 0 ? Gate{} : Gate{GateKind::kReceived, step}; }
}  // namespace

RingReduced append_ring_reduce_scatter(Schedule& schedule, const Team& team, const std::vector<Range>& blocks,
                                       Frontier entry, bool finish) {
  const int32_t right = team.rank(team.position + 1);
  const int32_t left = team.rank(team.position - 1);
  const auto block = [&](int32_t index) { return blocks[static_cast<size_t>(team.wrap(index))]; };
  RingReduced done{entry, std::vector<int32_t>(blocks.size(), -1)};
  int32_t before = -1;
  for (int32_t k = 0; k < team.size() - 1; ++k) {
    const Gate gate = k == 0 ? received(entry) : received_bytes(before);
    Step step = send_step(right, block(team.position - k), gate);
    const Range incoming = block(team.position - k - 1);
    set_reduce(step, left, incoming, incoming.offset, left < team.own_rank(), received(entry));
    step.finish = finish && k == team.size() - 2;
    before = append(schedule, step);
    if (incoming.nbytes > 0) done.frontier = before;
    if (step.send.nbytes > 0) done.sent_in[static_cast<size_t>(team.wrap(team.position - k))] = before;
  }
  return done;
}

void append_ring_all_gather(Schedule& schedule, const Team& team, const std::vector<Range>& blocks, Gate entry,
                            const std::vector<int32_t>& sent_in) {
  const int32_t right = team.rank(team.position + 1);
  const int32_t left = team.rank(team.position - 1);
  const auto block = [&](int32_t index) { return blocks[static_cast<size_t>(team.wrap(index))]; };
  int32_t before = -1;
  for (int32_t k = 0; k < team.size() - 1; ++k) {
    Step step = send_step(right, block(team.position + 1 - k), k == 0 ? entry : received_bytes(before));
    set_copy(step, left, block(team.position - k));
    step.replaces_sent = sent_in[static_cast<size_t>(team.wrap(team.position - k))];
    before = append(schedule, step);
  }
}

Schedule ring_all_reduce(Member me, uint64_t nbytes, uint64_t element_nbytes) {
  const Team team = everyone(me);
  const auto blocks = blocks_of({0, nbytes}, element_nbytes, me.world);
  Schedule schedule;
  schedule.steps.reserve(static_cast<size_t>(2 * (me.world - 1)));
  const RingReduced reduced = append_ring_reduce_scatter(schedule, team, blocks, -1, true);
  // What the all-gather sends first is the very block that was received last.
  append_ring_all_gather(schedule, team, blocks, received_bytes(reduced.frontier), reduced.sent_in);
  return schedule;
}

Schedule ring_all_gather(Member me, uint64_t block_nbytes) {
  const int32_t rank = me.rank;
  const int32_t world = me.world;  // clang 14 lets no lambda have a structured binding
  const auto block = [&](int32_t index) {
    return Range{static_cast<uint64_t>((index + world) % world) * block_nbytes, block_nbytes};
  };
  Schedule schedule;
  schedule.steps.reserve(static_cast<size_t>(world - 1));
  int32_t before = -1;
  for (int32_t k = 0; k < world - 1; ++k) {
    Step step = send_step((rank + 1) % world, block(rank - k), received_bytes(before));
    set_copy(step, (rank + world - 1) % world, block(rank - k - 1));
    before = append(schedule, step);
  }
  return schedule;
}

Schedule ring_reduce_scatter(Member me, uint64_t block_nbytes) {
  const auto [rank, world] = me;
  const int32_t right = (rank + 1) % world;
  const int32_t left = (rank + world - 1) % world;
  const uint64_t output = static_cast<uint64_t>(world) * block_nbytes;
  // Partial sums on their way through this rank. A slot is taken again once its bytes went out; with four slots that
  // was three steps ago, so the gate is open by the time bytes arrive.
  const int32_t slots = std::min(world - 2, 4);
  Schedule schedule;
  schedule.scratch_nbytes = static_cast<uint64_t>(slots) * block_nbytes;
  for (int32_t k = 0; k < world - 1; ++k) {  // rank r ends with block r
    const auto input = static_cast<uint64_t>((rank - k - 2 + 2 * world) % world) * block_nbytes;
    const bool last = k == world - 2;
    const auto slot = [&](int32_t step_index) {
      return output + block_nbytes + static_cast<uint64_t>(step_index % slots) * block_nbytes;
    };
    const uint64_t source = k == 0 ? static_cast<uint64_t>((rank + world - 1) % world) * block_nbytes : slot(k - 1);
    Step step = send_step(right, {source, block_nbytes}, received_bytes(k - 1));
    Gate gate;
    if (!last && k >= slots) gate = {GateKind::kSent, k - slots + 1};
    set_reduce(step, left, {last ? output : slot(k), block_nbytes}, input, left < rank, gate);
    step.finish = last;
    append(schedule, step);
  }
  return schedule;
}

}  // namespace mccl
