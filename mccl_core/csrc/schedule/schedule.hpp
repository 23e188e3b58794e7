// The generators. Each file's head says steps, bytes and source; `world` is at least 2 and nbytes may be smaller than
// the world. Steps without bytes are left out, on both sides alike.
#pragma once

#include <cstdint>
#include <span>

#include "schedule/step.hpp"

namespace mccl {

struct Member {
  int32_t rank;
  int32_t world;
};

// Elements cut into `world` blocks that differ by one element at most.
class Blocks {
 public:
  Blocks(uint64_t nbytes, uint64_t element_nbytes, int32_t world)
      : count_(nbytes / element_nbytes), element_nbytes_(element_nbytes), world_(static_cast<uint64_t>(world)) {}
  Range at(int32_t block) const {
    const uint64_t begin = first(static_cast<uint64_t>(block));
    return {begin * element_nbytes_, (first(static_cast<uint64_t>(block) + 1) - begin) * element_nbytes_};
  }

 private:
  uint64_t first(uint64_t block) const {
    const uint64_t larger = count_ % world_;
    return block * (count_ / world_) + (block < larger ? block : larger);
  }
  uint64_t count_;
  uint64_t element_nbytes_;
  uint64_t world_;
};

// In place on [0, nbytes).
Schedule ring_all_reduce(Member me, uint64_t nbytes, uint64_t element_nbytes);
Schedule recursive_doubling_all_reduce(Member me, uint64_t nbytes);
Schedule circulant_all_reduce(Member me, uint64_t nbytes, uint64_t element_nbytes, int32_t chunk_count);
// Teams for a two-level all-reduce among ranks behind one switch: consecutive ranks, all teams of one size, at least
// four of at least four, as near to the square root of `world` as divisors allow. Empty where it cannot be cut so.
// A function of the world alone, so that ranks cannot differ in it.
std::vector<int32_t> even_teams(int32_t world);
// group_of_rank: one entry a rank, equal for the ranks behind one switch, or in one team.
Schedule two_level_all_reduce(Member me, uint64_t nbytes, uint64_t element_nbytes,
                              std::span<const int32_t> group_of_rank, int32_t chunk_count);

// In place on world blocks of block_nbytes; the caller has put its own block at its place.
Schedule ring_all_gather(Member me, uint64_t block_nbytes);
Schedule circulant_all_gather(Member me, uint64_t block_nbytes);

// Address space: input (world blocks of block_nbytes), output (one block), scratch. The input is left as it is.
Schedule ring_reduce_scatter(Member me, uint64_t block_nbytes);
// In place on world blocks of block_nbytes, all of which change; block `rank` ends reduced.
Schedule circulant_reduce_scatter(Member me, uint64_t block_nbytes);

// In place on [0, nbytes).
Schedule binomial_broadcast(Member me, int32_t root, uint64_t nbytes);

// Address space: [0, nbytes) is the input, and at the root also the result; scratch on inner ranks of the tree.
Schedule binomial_reduce(Member me, int32_t root, uint64_t nbytes);

// Root's address space: world blocks; other ranks': one block. The root's own block is the caller's to copy.
Schedule direct_gather(Member me, int32_t root, uint64_t block_nbytes);
Schedule direct_scatter(Member me, int32_t root, uint64_t block_nbytes);

// Address space: the blocks to send in the order of ranks, then the blocks to receive. One's own block is the caller's
// to copy.
Schedule pairwise_all_to_all(Member me, std::span<const uint64_t> send_nbytes, std::span<const uint64_t> recv_nbytes);

Schedule dissemination_barrier(Member me);

}  // namespace mccl
