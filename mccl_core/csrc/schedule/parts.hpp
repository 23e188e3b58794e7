// Parts from which the generators put schedules together: a phase among some of the ranks, appended to a schedule.
//
// A *team* is the ranks of a phase, in an order that all of them know. A phase works in place on blocks, one for each
// position in the team; blocks may be empty. Steps without bytes are left out, on both sides alike.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/schedule.hpp"

namespace mccl {

struct Team {
  std::vector<int32_t> members;  // ranks
  int32_t position = 0;          // this rank's

  int32_t size() const { return static_cast<int32_t>(members.size()); }
  int32_t wrap(int32_t at) const { return ((at % size()) + size()) % size(); }
  int32_t rank(int32_t at) const { return members[static_cast<size_t>(wrap(at))]; }
  int32_t own_rank() const { return rank(position); }
};

Team everyone(Member me);

// `base` cut into one block for each position, elements kept whole.
std::vector<Range> blocks_of(Range base, uint64_t element_nbytes, int32_t count);

// Appends the step without its empty halves; returns its index, or -1 where nothing is left of it.
int32_t append(Schedule& schedule, Step step);

// Where a chunk is on its way through the phases: the step whose receive must be complete before what follows.
// -1: nothing has been received yet.
using Frontier = int32_t;

struct RingReduced {
  Frontier frontier;
  std::vector<int32_t> sent_in;  // by block: the step that sends this rank's partial sum of it; -1: none
};
// Ring: position i ends with block i+1 reduced (N-1 steps). `finish`: these are the last reductions of those bytes.
RingReduced append_ring_reduce_scatter(Schedule& schedule, const Team& team, const std::vector<Range>& blocks,
                                       Frontier entry, bool finish);
// Ring: position i starts with block i+1, which `entry` guards, and ends with all (N-1 steps). `sent_in`: as the
// reduce-scatter on the same blocks returns it.
void append_ring_all_gather(Schedule& schedule, const Team& team, const std::vector<Range>& blocks, Gate entry,
                            const std::vector<int32_t>& sent_in);

// By round of the reduce-scatter and chunk: the steps that send the two pieces of a round; -1: none.
using CirculantSent = std::vector<std::vector<std::array<int32_t, 2>>>;
// Circulant: position i ends with block i reduced (⌈log2 N⌉ rounds). One entry in `chunks` and `frontiers` for each
// chunk: the chunks' rounds overlap.
CirculantSent append_circulant_reduce_scatter(Schedule& schedule, const Team& team,
                                              const std::vector<std::vector<Range>>& chunks,
                                              std::vector<Frontier>& frontiers, bool finish);
// Circulant: position i starts with block i and ends with all (⌈log2 N⌉ rounds). `sent_in`: as the reduce-scatter on
// the same chunks returns it; empty where there was none.
void append_circulant_all_gather(Schedule& schedule, const Team& team, const std::vector<std::vector<Range>>& chunks,
                                 std::vector<Frontier>& frontiers, const CirculantSent& sent_in);

}  // namespace mccl
