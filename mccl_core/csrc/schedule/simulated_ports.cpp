#include "schedule/simulated_ports.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace mccl {

Ticks to_ticks(double seconds) {
  if (!(seconds >= 0 && seconds < 1e6)) {
    throw_usage("a simulated time of " + std::to_string(seconds) + " s", "Give times from 0 to a million seconds");
  }
  return std::llround(seconds * 1e12);
}

double to_seconds(Ticks ticks) { return static_cast<double>(ticks) * 1e-12; }

Ticks Port::takes(uint64_t nbytes) const { return std::llround(static_cast<double>(nbytes) * ticks_per_byte_); }

Passage Port::pass(Passage arriving, uint64_t nbytes) {
  free_at_ = std::max(free_at_, arriving.first - burst_);
  const Ticks first = std::max(arriving.first, free_at_);
  free_at_ += takes(nbytes);
  busy_ += takes(nbytes);
  // A port faster than the one before it still waits for the last byte; it is free for others in between.
  return {first, std::max({first, free_at_, arriving.last})};
}

Ports::Ports(const Network& network, uint64_t forward_nbytes)
    : alpha_(to_ticks(network.alpha_s)),
      uplink_latency_(to_ticks(network.uplink_latency_s)),
      segment_cost_(to_ticks(network.segment_cost_s)),
      forward_nbytes_(forward_nbytes),
      saves_up_(network.burst_nbytes > 0),
      group_of_rank_(network.group_of_rank) {
  if (network.world < 1) throw_usage("a simulated world of " + std::to_string(network.world) + " ranks");
  const auto world = static_cast<size_t>(network.world);
  const auto check_goodput = [](double goodput, const char* name) {
    if (!(goodput > 0)) throw_usage(std::string("the ") + name + " must be above 0 bytes/s");
  };
  check_goodput(network.goodput_bytes_per_s, "goodput");
  egress_.assign(world, Port(network.goodput_bytes_per_s, network.burst_nbytes));
  ingress_ = egress_;
  processor_free_at_.assign(world, 0);
  if (group_of_rank_.empty()) return;
  if (group_of_rank_.size() != world) {
    throw_usage("groups for " + std::to_string(group_of_rank_.size()) + " ranks in a world of " +
                std::to_string(world));
  }
  const auto [lowest, highest] = std::minmax_element(group_of_rank_.begin(), group_of_rank_.end());
  if (*lowest < 0 || *highest >= network.world) throw_usage("groups are numbered from 0, and below the world");
  if (*highest == 0) return;
  check_goodput(network.uplink_goodput_bytes_per_s, "uplink's goodput");
  up_.assign(static_cast<size_t>(*highest) + 1, Port(network.uplink_goodput_bytes_per_s));
  down_ = up_;
}

bool Ports::crosses(int32_t from, int32_t to) const { return !one_switch() && group(from) != group(to); }

Passage Ports::leave(int32_t rank, uint64_t nbytes, Ticks now) {
  return egress_[static_cast<size_t>(rank)].pass({now, now}, nbytes);
}

Passage Ports::climb(int32_t from, uint64_t nbytes, Passage leaving) {
  const Passage passed = up_[group(from)].pass(leaving, nbytes);
  return {passed.first + uplink_latency_, passed.last + uplink_latency_};
}

Passage Ports::descend(int32_t to, uint64_t nbytes, Passage crossing) {
  return down_[group(to)].pass(crossing, nbytes);
}

Arrival Ports::arrive(int32_t rank, uint64_t nbytes, Passage arriving) {
  Port& port = ingress_[static_cast<size_t>(rank)];
  Ticks complete_at = port.pass(arriving, nbytes).last;
  if (segment_cost_ > 0) {
    Ticks& free_at = processor_free_at_[static_cast<size_t>(rank)];
    complete_at = free_at = std::max(free_at, complete_at) + segment_cost_;
  }
  // What the next port has saved up could send it on faster than it comes.
  if (saves_up_) return {complete_at, complete_at};
  // The last piece is sent on once it is there, and those before it right before it.
  return {complete_at - port.takes(nbytes - std::min(nbytes, forward_nbytes_)), complete_at};
}

double Ports::egress_busy_share(int32_t rank, Ticks until) const {
  const Ticks busy = egress_[static_cast<size_t>(rank)].busy();
  return until > 0 ? static_cast<double>(busy) / static_cast<double>(until) : 0;
}

std::vector<double> Ports::uplink_busy_share(Ticks until) const {
  std::vector<double> shares;
  for (const Port& port : up_) {
    shares.push_back(until > 0 ? static_cast<double>(port.busy()) / static_cast<double>(until) : 0);
  }
  return shares;
}

}  // namespace mccl
