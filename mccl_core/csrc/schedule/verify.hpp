// The verifier: runs the schedules of all ranks symbolically, element by element, in a random order, on links that hold
// nothing (every element waits for its receiver's grant), and says what is wrong. An element may arrive while the
// system call that sends it, and others, is still running: until it returns, their bytes must stay as they are.
//
// A cell of a rank's address space knows the multiset of the contributions in it, each named by the rank and the
// address that it came from, and the expression that put them together. Both are kept as 64-bit fingerprints: the sum
// of the contributions' hashes, and a hash of the expression's tree in which order and grouping count. So a missing, a
// doubled or a wrong contribution shows in the first, and a result that depends on which message came first, or that
// two ranks computed differently, in the second.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "schedule/step.hpp"

namespace mccl {

// What a cell is made of.
struct Contents {
  uint64_t sum = 0;
  uint32_t count = 0;

  bool operator==(const Contents&) const = default;
  Contents& operator+=(const Contents& other) {
    sum += other.sum;
    count += other.count;
    return *this;
  }
};
// What rank `rank` has at `address` before the collective.
Contents contribution(int32_t rank, uint64_t address);

struct Cell {
  Contents contents;
  uint64_t expression = 0;
};

struct Problem {
  std::vector<Schedule> schedules;  // by rank; elements of one byte
  std::vector<uint64_t> nbytes;     // by rank: the address space without scratch
  // What must be in a cell at the end; nullopt where nothing is asked.
  std::function<std::optional<Contents>(int32_t rank, uint64_t address)> expected;
  // All ranks must have computed a cell in the same way, as an all-reduce's must.
  bool identical = false;
};

// Null where the schedules are right: they end, every expected cell is as expected, nothing that could have been sent
// was overwritten before it was, and `orders` random orders gave the same expressions. Otherwise what is wrong, where.
std::optional<std::string> verify(const Problem& problem, int orders = 2);

}  // namespace mccl
