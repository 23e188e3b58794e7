// Which algorithm a collective uses. A pure function of facts that all ranks share: the collective, its bytes, the
// world, the link profile (measured once by `mccl-fleet tune`, never inside a job) and who is behind which switch.
//
// docs/algorithms.md has the formulas and what they were checked against.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "schedule/schedule.hpp"
#include "transport/frame.hpp"

namespace mccl {

// What a message costs between two ranks on one channel. Seconds and bytes per second.
struct LinkProfile {
  double latency_s;            // from a send to its use on the next rank; other bytes move meanwhile
  double step_s;               // processor time of a step, in which nothing else moves
  double nbytes_per_s;         // a rank's goodput, each way
  double uplink_nbytes_per_s;  // of all that crosses between two switches, each way; 0: no limit of its own
  double circulant_share;      // of the goodput, where a rank's partners change from round to round
};

struct Plan {
  Algorithm algorithm = Algorithm::kOnlyOne;
  int32_t chunk_count = 1;  // on each channel
  double predicted_s = 0;
  int32_t channel_count = 1;
};

// By the name that to_string() gives; nullopt for "auto". Throws Error (kUsage) for any other.
std::optional<Algorithm> algorithm_of(const std::string& name);

struct Planner {
  LinkProfile profile;
  std::optional<Algorithm> all_reduce_algorithm;  // used whatever the profile says
  uint64_t recursive_doubling_max_nbytes;         // it keeps as many bytes parked
  uint64_t chunk_nbytes;                          // of a circulant all-reduce; a two-level one's are no smaller
  std::vector<int32_t> group_of_rank;             // by switch; empty: all behind one, where teams may be cut
  int32_t channels = 1;                           // the most that a collective is spread over
  uint64_t channel_nbytes = 0;                    // of the tensor: the least that a channel gets

  // All that can be used for the collective, the fastest first. `nbytes`: all-reduce: of the tensor; all-gather and
  // reduce-scatter: of one rank's block. Never empty; kOnlyOne for collectives that have no choice.
  std::vector<Plan> plans(OpKind kind, int32_t world, uint64_t nbytes) const;
  // The first of them, or the one that all_reduce_algorithm names.
  Plan plan(OpKind kind, int32_t world, uint64_t nbytes) const;
  Schedule all_reduce(const Plan& plan, Member me, uint64_t nbytes, uint64_t element_nbytes) const;

 private:
  void add_all_reduces(std::vector<Plan>& plans, int32_t world, uint64_t nbytes, int32_t channels) const;
  void add_one_phase(std::vector<Plan>& plans, OpKind kind, int32_t world, uint64_t nbytes, int32_t channels) const;
  // What one of so many channels pays.
  LinkProfile share_of_link(int32_t channels) const;
};

}  // namespace mccl
