#include "schedule/streams.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.hpp"

namespace mccl {

namespace {
struct Place {
  int32_t stream = -1;
  int32_t part = -1;
};

using Index = std::map<std::pair<int32_t, int32_t>, int32_t>;  // by peer and channel

Place append(std::vector<Stream>& streams, Index& index, int32_t peer, int32_t channel, Part part) {
  if (part.nbytes == 0) throw_usage("a schedule with an empty step");
  const auto [found, is_new] = index.try_emplace({peer, channel}, static_cast<int32_t>(streams.size()));
  if (is_new) streams.push_back({peer, channel, {}});
  Stream& stream = streams[static_cast<size_t>(found->second)];
  stream.parts.push_back(part);
  return {found->second, static_cast<int32_t>(stream.parts.size()) - 1};
}

void set_gate(const std::vector<Place>& sends, const std::vector<Place>& receives, const Gate& gate, Part& part) {
  part.gate = gate.kind;
  if (gate.kind == GateKind::kOpen) return;
  const auto& places = gate.kind == GateKind::kSent ? sends : receives;
  const auto step = static_cast<size_t>(gate.step);
  if (step >= places.size() || places[step].stream < 0) {
    throw_usage("a gate on step " + std::to_string(gate.step) + ", which has nothing that it could wait for");
  }
  part.gate_stream = places[step].stream;
  part.gate_part = places[step].part;
}

Part& at(std::vector<Stream>& streams, Place place) {
  return streams[static_cast<size_t>(place.stream)].parts[static_cast<size_t>(place.part)];
}
}  // namespace

StreamPlan plan_streams(const Schedule& schedule) {
  StreamPlan plan;
  Index out_index, in_index;
  std::vector<Place> sends(schedule.steps.size()), receives(schedule.steps.size());
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    if (step.send_peer >= 0) sends[i] = append(plan.out, out_index, step.send_peer, step.channel, {step.send.nbytes});
    if (step.recv_peer >= 0) {
      receives[i] = append(plan.in, in_index, step.recv_peer, step.channel, {step.recv.nbytes});
      at(plan.in, receives[i]).park = step.park;
    }
  }
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    if (step.send_peer >= 0) set_gate(sends, receives, step.send_gate, at(plan.out, sends[i]));
    if (step.recv_peer >= 0) set_gate(sends, receives, step.recv_gate, at(plan.in, receives[i]));
    plan.nbytes += (step.send_peer >= 0 ? step.send.nbytes : 0) + (step.recv_peer >= 0 ? step.recv.nbytes : 0);
  }
  for (auto* streams : {&plan.out, &plan.in}) {
    for (Stream& stream : *streams) stream.parts.shrink_to_fit();
  }
  return plan;
}

int32_t find_stream(const std::vector<Stream>& streams, int32_t peer, int32_t channel) {
  const auto found = std::find_if(streams.begin(), streams.end(),
                                  [=](const Stream& s) { return s.peer == peer && s.channel == channel; });
  return found == streams.end() ? -1 : static_cast<int32_t>(found - streams.begin());
}

OpProgress::OpProgress(std::shared_ptr<const StreamPlan> plan)
    : out(plan->out.size()), in(plan->in.size()), plan_(std::move(plan)), todo_nbytes_(plan_->nbytes) {}

Ticks OpProgress::gate_opens_at(const Part& part) const {
  const auto stream = static_cast<size_t>(part.gate_stream);
  const auto index = static_cast<size_t>(part.gate_part);
  switch (part.gate) {
    case GateKind::kOpen: return 0;
    case GateKind::kReceived:
    case GateKind::kReceivedBytes: {
      const InProgress& gate = in[stream];
      if (gate.part <= index) return kNeverTicks;
      // Bytes of a later part come only once this one is complete.
      return gate.part == index + 1 && gate.received == 0 && gate.parked == 0 ? gate.complete_at : 0;
    }
    case GateKind::kSent: {
      const OutProgress& gate = out[stream];
      if (gate.part <= index) return kNeverTicks;
      // A later part of the stream is on the wire only once this one has left.
      return gate.part == index + 1 && gate.sent == 0 ? gate.leaves_at : 0;
    }
  }
  return kNeverTicks;
}

uint64_t OpProgress::open_nbytes(size_t out_index, Ticks now) const {
  const OutProgress& progress = out[out_index];
  const auto& parts = plan_->out[out_index].parts;
  if (progress.part == parts.size()) return 0;
  const Part& part = parts[progress.part];
  if (part.gate == GateKind::kReceivedBytes) {
    const InProgress& gate = in[static_cast<size_t>(part.gate_stream)];
    if (gate.part < static_cast<size_t>(part.gate_part)) return 0;
    if (gate.part == static_cast<size_t>(part.gate_part)) {
      return std::min(part.nbytes, gate.received) - progress.sent;
    }
    return part.nbytes - progress.sent;
  }
  return gate_opens_at(part) <= now ? part.nbytes - progress.sent : 0;
}

bool OpProgress::sent(size_t out_index, uint64_t nbytes, Ticks leaves_at) {
  OutProgress& progress = out[out_index];
  progress.sent += nbytes;
  progress.leaves_at = leaves_at;
  settles_at_ = std::max(settles_at_, leaves_at);
  todo_nbytes_ -= nbytes;
  if (progress.sent < plan_->out[out_index].parts[progress.part].nbytes) return false;
  ++progress.part;
  progress.sent = 0;
  return true;
}

uint64_t OpProgress::drain(size_t in_index, Ticks now) {
  InProgress& progress = in[in_index];
  const auto& parts = plan_->in[in_index].parts;
  uint64_t taken = 0;
  while (progress.parked > 0 && progress.part < parts.size() && gate_opens_at(parts[progress.part]) <= now) {
    const Part& part = parts[progress.part];
    const uint64_t n = std::min(progress.parked, part.nbytes - progress.received);
    progress.parked -= n;
    progress.received += n;
    taken += n;
    if (progress.received == part.nbytes) {
      ++progress.part;
      progress.received = 0;
    }
  }
  if (taken > 0) settles_at_ = std::max(settles_at_, progress.complete_at);
  todo_nbytes_ -= taken;
  return taken;
}

size_t OpProgress::grant(size_t in_index, Ticks now) {
  InProgress& progress = in[in_index];
  const auto& parts = plan_->in[in_index].parts;
  progress.granted = std::max(progress.granted, progress.part);
  while (posted && progress.granted < parts.size()) {
    const Part& part = parts[progress.granted];
    if (!part.park && gate_opens_at(part) > now) break;
    ++progress.granted;
  }
  return progress.granted;
}

}  // namespace mccl
