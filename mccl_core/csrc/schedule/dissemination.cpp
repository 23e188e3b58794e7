// Dissemination barrier (Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988): ceil(log2 N)
// rounds of one byte; in round k rank r signals r + 2^k and waits for r - 2^k. Signals are taken in the order of
// rounds: one that overtook an earlier round's would be passed on without what that one tells.
#include "schedule/schedule.hpp"

namespace mccl {

Schedule dissemination_barrier(Member me) {
  Schedule schedule;
  for (int32_t distance = 1; distance < me.world; distance *= 2) {
    const auto round = static_cast<int32_t>(schedule.steps.size());
    const Gate gate = round == 0 ? Gate{} : Gate{GateKind::kReceived, round - 1};
    Step step = send_step((me.rank + distance) % me.world, {0, 1}, gate);
    set_copy(step, (me.rank - distance + me.world) % me.world, {static_cast<uint64_t>(round) + 1, 1}, gate);
    schedule.steps.push_back(step);
  }
  schedule.scratch_nbytes = schedule.steps.size() + 1;
  return schedule;
}

}  // namespace mccl
