// The simulator: runs the schedules of all ranks on a modelled network and says when each op ends. It follows the
// executor's rules (engine/progress.cpp, engine/transmit.cpp): gates, grants and credit, on each connection the lowest
// op first, several ops in flight; the wire is Hockney's: alpha seconds of latency, then so many bytes a second.
//
// Every port passes one segment at a time, in the order of arrival, each way on its own; the switch between them stores
// without limit. What has arrived of a segment can be sent on in pieces, while the rest arrives.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "schedule/schedule.hpp"

namespace mccl {

struct Network {
  int32_t world = 0;
  double alpha_s = 0;              // from a byte's leaving its rank to its arrival at the peer's port
  double goodput_bytes_per_s = 0;  // of each rank's port, each way
  double segment_cost_s = 0;       // of the receiving rank's processor, for each segment
  // What an idle port saves up and then passes at once, as a token bucket that shapes it does; 0: a wire, which saves
  // nothing. Buckets start empty, as after a long time of sending.
  uint64_t burst_nbytes = 0;
  // The switch that each rank is plugged into; empty: one switch for all.
  std::vector<int32_t> group_of_rank;
  // Of the link between a switch and all others, each way, shared by its ranks; and what that way adds to alpha.
  double uplink_goodput_bytes_per_s = 0;
  double uplink_latency_s = 0;
};

// The schedule of one rank. Asked once for each rank, and kept while an op that shares it is under way.
using Generator = std::function<Schedule(Member)>;

struct SimulatedOp {
  std::shared_ptr<const Generator> generator;  // ops alike share one
  double ready_s = 0;                          // when every rank wants to start it, before delay and skew
};

struct SimulationOptions {
  uint64_t segment_nbytes = 0;  // the most that moves as one
  uint64_t forward_nbytes = 0;  // the pieces in which it can be sent on: 0 byte by byte, segment_nbytes as a whole
  uint64_t credit_nbytes = 0;   // of one connection, for bytes that are sent before they are granted
  int32_t max_in_flight = 0;    // ops that a rank has under way at once; 0: all that are ready
  std::vector<double> delay_s;  // by rank: it is ready that much later for all ops; empty: none
  double skew_s = 0;            // each rank is later by a random part of this, drawn once from `seed`
  uint64_t seed = 0;
};

struct SimulationResult {
  std::vector<double> posted_s;           // by op: when the first rank started it
  std::vector<double> finish_s;           // by op: when the last rank had finished it
  double last_finish_s = 0;               // of all ops
  std::vector<double> egress_busy_share;  // by rank: part of the time until last_finish_s in which it sent
  std::vector<double> uplink_busy_share;  // by switch, upwards; empty where there is one switch
  uint64_t segments = 0;                  // that crossed the network
  std::optional<std::string> deadlock;    // who waits for whom, where ops could not end; their finish_s is infinite
};

// Deterministic for its arguments. Throws Error (kUsage) where they make no sense, or where a rank sends what its peer
// does not expect.
SimulationResult simulate(const Network& network, std::span<const SimulatedOp> ops, const SimulationOptions& options);

}  // namespace mccl
