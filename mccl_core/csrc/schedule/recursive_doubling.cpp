// Recursive doubling (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
// 2005, section 4.5). With P the largest power of two in N: log2 P rounds of all bytes each way; N-P ranks fold onto
// partners first and get the result last, two rounds more. Few rounds, many bytes: for small messages.
#include <bit>

#include "schedule/schedule.hpp"

namespace mccl {

Schedule recursive_doubling_all_reduce(Member me, uint64_t nbytes) {
  const auto [rank, world] = me;
  const auto power = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(world)));
  const Range all{0, nbytes};
  Schedule schedule;
  if (nbytes == 0) return schedule;

  if (rank >= power) {  // folded: hand over, then take the result
    schedule.steps.push_back(send_step(rank - power, all));
    Step result;
    set_copy(result, rank - power, all, {GateKind::kSent, 0});
    schedule.steps.push_back(result);
    return schedule;
  }

  int32_t before = -1;
  const auto gate = [&] { return before < 0 ? Gate{} : Gate{GateKind::kReceivedBytes, before}; };
  if (rank + power < world) {
    Step fold;
    set_reduce(fold, rank + power, all, 0, false);
    schedule.steps.push_back(fold);
    before = 0;
  }
  for (int32_t distance = 1; distance < power; distance *= 2) {
    const int32_t peer = rank ^ distance;
    const auto index = static_cast<int32_t>(schedule.steps.size());
    Step step = send_step(peer, all, gate());
    // What arrives may not change bytes that this step has still to send: it waits, parked.
    set_reduce(step, peer, all, 0, peer < rank, {GateKind::kSent, index});
    step.park = true;  // two partners who each waited for the other's grant would wait for ever
    step.finish = distance * 2 >= power;
    schedule.steps.push_back(step);
    before = index;
  }
  if (rank + power < world) schedule.steps.push_back(send_step(rank + power, all, gate()));
  return schedule;
}

}  // namespace mccl
