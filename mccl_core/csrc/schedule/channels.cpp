#include "schedule/channels.hpp"

#include <utility>

#include "base/error.hpp"

namespace mccl {

namespace {
void shift(Gate& gate, int32_t steps) {
  if (gate.kind != GateKind::kOpen) gate.step += steps;
}
}  // namespace

Schedule merge_channels(std::vector<ChannelPart> parts) {
  if (parts.size() == 1) return std::move(parts.front().schedule);
  uint64_t nbytes = 0;
  size_t step_count = 0;
  for (const ChannelPart& part : parts) {
    MCCL_ASSERT(part.range.offset == nbytes);
    nbytes += part.range.nbytes;
    step_count += part.schedule.steps.size();
  }
  Schedule merged;
  merged.steps.reserve(step_count);
  for (size_t channel = 0; channel < parts.size(); ++channel) {
    const Range range = parts[channel].range;
    const uint64_t scratch = nbytes + merged.scratch_nbytes;
    const auto first_step = static_cast<int32_t>(merged.steps.size());
    const auto place = [&](uint64_t address) {
      return address < range.nbytes ? range.offset + address : scratch + (address - range.nbytes);
    };
    for (Step step : parts[channel].schedule.steps) {
      step.channel = static_cast<int32_t>(channel);
      step.send.offset = place(step.send.offset);
      step.recv.offset = place(step.recv.offset);
      step.operand = place(step.operand);
      shift(step.send_gate, first_step);
      shift(step.recv_gate, first_step);
      if (step.replaces_sent >= 0) step.replaces_sent += first_step;
      merged.steps.push_back(step);
    }
    merged.scratch_nbytes += parts[channel].schedule.scratch_nbytes;
  }
  return merged;
}

}  // namespace mccl
