// The algorithms by name, for whoever compares them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/simulate.hpp"

namespace mccl {

struct AllReduceRequest {
  uint64_t nbytes = 0;
  uint64_t element_nbytes = 4;
  int32_t chunk_count = 1;             // of those that go in chunks; on each channel
  std::vector<int32_t> group_of_rank;  // the switch of each rank, for two-level; empty: even_teams()
  int32_t channel_count = 1;           // over which the bytes are spread
};

// In the order of the table.
std::vector<std::string> all_reduce_algorithms();

// Throws Error (kUsage) for a name that is not in the table.
Generator all_reduce_generator(const std::string& algorithm, AllReduceRequest request);

}  // namespace mccl
