// The ports and uplinks of a modelled network: when what is sent leaves, passes and arrives.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate.hpp"
#include "schedule/streams.hpp"

namespace mccl {

Ticks to_ticks(double seconds);
double to_seconds(Ticks ticks);

// When a segment's first and last byte pass a place.
struct Passage {
  Ticks first;
  Ticks last;
};

struct Arrival {
  Ticks usable_at;    // from now on it can be sent on at the port's rate without running ahead of what arrives
  Ticks complete_at;  // all of it is there
};

// Passes one segment after another, each in one go. With a burst it may be late by as much as that takes: then what it
// has missed passes at once.
class Port {
 public:
  explicit Port(double goodput_bytes_per_s, uint64_t burst_nbytes = 0)
      : ticks_per_byte_(1e12 / goodput_bytes_per_s), burst_(takes(burst_nbytes)) {}
  Ticks takes(uint64_t nbytes) const;
  Passage pass(Passage arriving, uint64_t nbytes);
  Ticks free_at() const { return free_at_; }
  Ticks busy() const { return busy_; }

 private:
  double ticks_per_byte_;
  Ticks burst_;
  Ticks free_at_ = 0;  // before now by what it has saved up
  Ticks busy_ = 0;     // the sum of all passages
};

class Ports {
 public:
  Ports(const Network& network, uint64_t forward_nbytes);  // throws Error (kUsage)

  // With one switch, segments arrive in the order in which they leave: the way to a port needs no event of its own.
  bool one_switch() const { return up_.empty(); }
  bool crosses(int32_t from, int32_t to) const;

  Ticks egress_free_at(int32_t rank) const { return egress_[static_cast<size_t>(rank)].free_at(); }
  Passage leave(int32_t rank, uint64_t nbytes, Ticks now);
  // From a rank to the far end of its switch's uplink, and from there through that of the peer's switch.
  Passage climb(int32_t from, uint64_t nbytes, Passage leaving);
  Passage descend(int32_t to, uint64_t nbytes, Passage crossing);
  // From the last switch to the peer's port.
  Passage travel(Passage leaving) const { return {leaving.first + alpha_, leaving.last + alpha_}; }
  // Through the port and the processor behind it.
  Arrival arrive(int32_t rank, uint64_t nbytes, Passage arriving);

  double egress_busy_share(int32_t rank, Ticks until) const;
  std::vector<double> uplink_busy_share(Ticks until) const;

  Ticks alpha() const { return alpha_; }

 private:
  size_t group(int32_t rank) const { return static_cast<size_t>(group_of_rank_[static_cast<size_t>(rank)]); }

  Ticks alpha_;
  Ticks uplink_latency_;
  Ticks segment_cost_;
  uint64_t forward_nbytes_;
  bool saves_up_;  // a port has a burst
  std::vector<int32_t> group_of_rank_;
  std::vector<Port> egress_, ingress_;  // by rank
  std::vector<Port> up_, down_;         // by switch; empty where there is one
  std::vector<Ticks> processor_free_at_;
};

}  // namespace mccl
