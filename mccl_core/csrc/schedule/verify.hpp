// The verifier: runs the schedules of all ranks symbolically, element by element, in a random order, on links that hold
// nothing (every element waits for its receiver's grant), and says what is wrong.
//
// A cell of a rank's address space holds the multiset of the contributions that are in it, each named by the rank and
// the address that it came from. A copy replaces a cell, a reduction adds to it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "schedule/step.hpp"

namespace mccl {

struct Contribution {
  int32_t rank;
  uint64_t address;
  auto operator<=>(const Contribution&) const = default;
};
using Cell = std::vector<Contribution>;  // sorted

struct Problem {
  std::vector<Schedule> schedules;  // by rank; elements of one byte
  std::vector<uint64_t> nbytes;     // by rank: the address space without scratch
  // What must be in a cell at the end; nullopt where nothing is asked.
  std::function<std::optional<Cell>(int32_t rank, uint64_t address)> expected;
};

// Null where the schedules are right: they end, every expected cell is as expected, and nothing that could have been
// sent was overwritten before it was. Otherwise what is wrong, and where.
std::optional<std::string> verify(const Problem& problem, uint64_t seed);

}  // namespace mccl
