#include "schedule/parts.hpp"

#include <numeric>

namespace mccl {

Team everyone(Member me) {
  Team team{std::vector<int32_t>(static_cast<size_t>(me.world)), me.rank};
  std::iota(team.members.begin(), team.members.end(), 0);
  return team;
}

std::vector<Range> blocks_of(Range base, uint64_t element_nbytes, int32_t count) {
  const Blocks blocks(base.nbytes, element_nbytes, count);
  std::vector<Range> ranges;
  for (int32_t i = 0; i < count; ++i) {
    const Range block = blocks.at(i);
    ranges.push_back({base.offset + block.offset, block.nbytes});
  }
  return ranges;
}

int32_t append(Schedule& schedule, Step step) {
  if (step.send.nbytes == 0) step.send_peer = -1;
  if (step.recv.nbytes == 0) step.recv_peer = -1;
  if (step.send_peer < 0 && step.recv_peer < 0) return -1;
  schedule.steps.push_back(step);
  return static_cast<int32_t>(schedule.steps.size()) - 1;
}

}  // namespace mccl
