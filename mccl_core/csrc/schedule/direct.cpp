// Direct exchanges. Gather and scatter: one step a member, (N-1) blocks at the root. All-to-all, pairwise: N-1 steps,
// in step k rank r sends to r+k and receives from r-k, so that no rank is met by two at once.
#include "base/error.hpp"
#include "schedule/schedule.hpp"

namespace mccl {

Schedule direct_gather(Member me, int32_t root, uint64_t block_nbytes) {
  Schedule schedule;
  if (block_nbytes == 0) return schedule;
  if (me.rank != root) {
    schedule.steps.push_back(send_step(root, {0, block_nbytes}));
    return schedule;
  }
  for (int32_t k = 1; k < me.world; ++k) {
    const int32_t peer = (root + k) % me.world;
    Step step;
    set_copy(step, peer, {static_cast<uint64_t>(peer) * block_nbytes, block_nbytes});
    schedule.steps.push_back(step);
  }
  return schedule;
}

Schedule direct_scatter(Member me, int32_t root, uint64_t block_nbytes) {
  Schedule schedule;
  if (block_nbytes == 0) return schedule;
  if (me.rank != root) {
    Step step;
    set_copy(step, root, {0, block_nbytes});
    schedule.steps.push_back(step);
    return schedule;
  }
  for (int32_t k = 1; k < me.world; ++k) {
    const int32_t peer = (root + k) % me.world;
    schedule.steps.push_back(send_step(peer, {static_cast<uint64_t>(peer) * block_nbytes, block_nbytes}));
  }
  return schedule;
}

Schedule pairwise_all_to_all(Member me, std::span<const uint64_t> send_nbytes, std::span<const uint64_t> recv_nbytes) {
  const auto world = static_cast<size_t>(me.world);
  MCCL_ASSERT(send_nbytes.size() == world && recv_nbytes.size() == world);
  std::vector<Range> send(world), recv(world);
  uint64_t at = 0;
  for (size_t i = 0; i < world; at += send_nbytes[i++]) send[i] = {at, send_nbytes[i]};
  for (size_t i = 0; i < world; at += recv_nbytes[i++]) recv[i] = {at, recv_nbytes[i]};
  Schedule schedule;
  for (int32_t k = 1; k < me.world; ++k) {
    const int32_t to = (me.rank + k) % me.world;
    const int32_t from = (me.rank - k + me.world) % me.world;
    Step step;
    if (send_nbytes[static_cast<size_t>(to)] > 0) step = send_step(to, send[static_cast<size_t>(to)]);
    if (recv_nbytes[static_cast<size_t>(from)] > 0) set_copy(step, from, recv[static_cast<size_t>(from)]);
    if (step.send_peer >= 0 || step.recv_peer >= 0) schedule.steps.push_back(step);
  }
  return schedule;
}

}  // namespace mccl
