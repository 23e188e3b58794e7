// Pipelined ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
// All-reduce: 2(N-1) steps, 2(N-1)/N of the bytes each way. All-gather and reduce-scatter: N-1 steps, (N-1)/N of the
// bytes. Every send but the first is gated byte by byte on the receive before it, so hops overlap.
#include <algorithm>

#include "schedule/schedule.hpp"

namespace mccl {

namespace {
int32_t wrap(int32_t rank, int32_t world) { return ((rank % world) + world) % world; }

// Appends a step unless it moves nothing; returns the index that a later gate may name (-1 where it was left out).
int32_t append(Schedule& schedule, Step step) {
  if (step.send.nbytes == 0) step.send_peer = -1;
  if (step.recv.nbytes == 0) step.recv_peer = -1;
  if (step.send_peer < 0 && step.recv_peer < 0) return -1;
  schedule.steps.push_back(step);
  return static_cast<int32_t>(schedule.steps.size()) - 1;
}

Gate received_bytes(int32_t step) { return step < 0 ? Gate{} : Gate{GateKind::kReceivedBytes, step}; }
}  // namespace

Schedule ring_all_reduce(Member me, uint64_t nbytes, uint64_t element_nbytes) {
  const auto [rank, world] = me;
  const int32_t right = wrap(rank + 1, world);
  const int32_t left = wrap(rank - 1, world);
  const Blocks blocks(nbytes, element_nbytes, world);
  Schedule schedule;
  schedule.steps.reserve(static_cast<size_t>(2 * (world - 1)));
  std::vector<int32_t> sent_at;  // the reduce-scatter's steps
  int32_t before = -1;
  for (int32_t k = 0; k < world - 1; ++k) {  // reduce-scatter: rank r ends with block r+1
    Step step = send_step(right, blocks.at(wrap(rank - k, world)), received_bytes(before));
    const Range incoming = blocks.at(wrap(rank - k - 1, world));
    set_reduce(step, left, incoming, incoming.offset, left < rank);
    step.finish = k == world - 2;
    before = append(schedule, step);
    sent_at.push_back(before);
  }
  for (int32_t k = 0; k < world - 1; ++k) {  // all-gather
    Step step = send_step(right, blocks.at(wrap(rank + 1 - k, world)), received_bytes(before));
    // The block that arrives was sent, as a partial sum, in step k of the reduce-scatter.
    const int32_t sent = sent_at[static_cast<size_t>(k)];
    set_copy(step, left, blocks.at(wrap(rank - k, world)), sent < 0 ? Gate{} : Gate{GateKind::kSent, sent});
    before = append(schedule, step);
  }
  return schedule;
}

Schedule ring_all_gather(Member me, uint64_t block_nbytes) {
  const auto [rank, world] = me;
  const auto block = [&](int32_t index) {
    return Range{static_cast<uint64_t>(wrap(index, world)) * block_nbytes, block_nbytes};
  };
  Schedule schedule;
  schedule.steps.reserve(static_cast<size_t>(world - 1));
  int32_t before = -1;
  for (int32_t k = 0; k < world - 1; ++k) {
    Step step = send_step(wrap(rank + 1, world), block(rank - k), received_bytes(before));
    set_copy(step, wrap(rank - 1, world), block(rank - k - 1));
    before = append(schedule, step);
  }
  return schedule;
}

Schedule ring_reduce_scatter(Member me, uint64_t block_nbytes) {
  const auto [rank, world] = me;
  const int32_t right = wrap(rank + 1, world);
  const int32_t left = wrap(rank - 1, world);
  const uint64_t output = static_cast<uint64_t>(world) * block_nbytes;
  // Partial sums on their way through this rank. A slot is taken again once its bytes went out; with four slots that
  // was three steps ago, so the gate is open by the time bytes arrive.
  const int32_t slots = std::min(world - 2, 4);
  Schedule schedule;
  schedule.scratch_nbytes = static_cast<uint64_t>(slots) * block_nbytes;
  for (int32_t k = 0; k < world - 1; ++k) {  // rank r ends with block r
    const auto input = static_cast<uint64_t>(wrap(rank - k - 2, world)) * block_nbytes;
    const bool last = k == world - 2;
    const auto slot = [&](int32_t step_index) {
      return output + block_nbytes + static_cast<uint64_t>(step_index % slots) * block_nbytes;
    };
    const uint64_t source = k == 0 ? static_cast<uint64_t>(wrap(rank - 1, world)) * block_nbytes : slot(k - 1);
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
