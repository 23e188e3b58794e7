// Two levels, for ranks behind several switches or in teams behind one: a ring reduce-scatter within each group leaves
// every shard with one holder in each group; the holders of a shard all-reduce it across the groups (circulant); a ring
// all-gather within the group ends it. Every rank sends (m-1)/m + 2(G-1)/(G·m) + (m-1)/m of the bytes with G groups of
// m, of which only the middle part crosses between groups, and no leader carries what others do not.
//
// Groups may differ in size: there are as many shards as the smallest group has members, and the further members of a
// larger group hold none. Several chunks go through the three phases side by side.
#include <algorithm>
#include <map>

#include "schedule/parts.hpp"

namespace mccl {

namespace {
Gate received(Frontier frontier) { return frontier < 0 ? Gate{} : Gate{GateKind::kReceived, frontier}; }

// Shards for the first positions of a team; the others' are empty.
std::vector<Range> shards_of(Range chunk, uint64_t element_nbytes, int32_t shard_count, int32_t team_size) {
  std::vector<Range> shards = blocks_of(chunk, element_nbytes, shard_count);
  shards.resize(static_cast<size_t>(team_size), Range{chunk.end(), 0});
  return shards;
}
}  // namespace

std::vector<int32_t> even_teams(int32_t world) {
  constexpr int32_t kFewest = 4;  // with fewer, or fewer in each, one level does as well
  int32_t best = 0;
  const auto longer = [=](int32_t size) { return std::max(size, world / size); };
  for (int32_t size = kFewest; size * kFewest <= world; ++size) {
    if (world % size == 0 && (best == 0 || longer(size) <= longer(best))) best = size;
  }
  std::vector<int32_t> team_of_rank;
  // Long and thin teams are worth little.
  if (best == 0 || longer(best) > 4 * (world / longer(best))) return team_of_rank;
  for (int32_t rank = 0; rank < world; ++rank) team_of_rank.push_back(rank / best);
  return team_of_rank;
}

Schedule two_level_all_reduce(Member me, uint64_t nbytes, uint64_t element_nbytes,
                              std::span<const int32_t> group_of_rank, int32_t chunk_count) {
  std::map<int32_t, std::vector<int32_t>> groups;
  for (int32_t rank = 0; rank < me.world; ++rank) {
    groups[group_of_rank[static_cast<size_t>(rank)]].push_back(rank);
  }
  size_t smallest = static_cast<size_t>(me.world);
  for (const auto& [name, members] : groups) smallest = std::min(smallest, members.size());
  const auto shard_count = static_cast<int32_t>(smallest);

  const int32_t own_group = group_of_rank[static_cast<size_t>(me.rank)];
  Team team{groups[own_group], 0};
  team.position =
      static_cast<int32_t>(std::find(team.members.begin(), team.members.end(), me.rank) - team.members.begin());
  const int32_t shard = team.wrap(team.position + 1);  // which the ring's reduce-scatter leaves here
  const bool holder = shard < shard_count;
  Team across;
  if (holder) {
    for (const auto& [name, members] : groups) {
      if (name == own_group) across.position = across.size();
      const auto size = static_cast<int32_t>(members.size());
      across.members.push_back(members[static_cast<size_t>((shard + size - 1) % size)]);
    }
  }

  Schedule schedule;
  const std::vector<Range> chunks = blocks_of({0, nbytes}, element_nbytes, chunk_count);
  std::vector<std::vector<Range>> shards;
  std::vector<Frontier> frontiers;
  std::vector<std::vector<int32_t>> sent_in;
  for (const Range chunk : chunks) {
    shards.push_back(shards_of(chunk, element_nbytes, shard_count, team.size()));
    RingReduced reduced = append_ring_reduce_scatter(schedule, team, shards.back(), -1, groups.size() == 1);
    frontiers.push_back(reduced.frontier);
    sent_in.push_back(std::move(reduced.sent_in));
  }
  if (holder && groups.size() > 1) {
    std::vector<std::vector<Range>> parts;
    for (const auto& of_chunk : shards) {
      parts.push_back(blocks_of(of_chunk[static_cast<size_t>(shard)], element_nbytes, across.size()));
    }
    const CirculantSent sent = append_circulant_reduce_scatter(schedule, across, parts, frontiers, true);
    append_circulant_all_gather(schedule, across, parts, frontiers, sent);
  }
  for (size_t c = 0; c < chunks.size(); ++c) {
    append_ring_all_gather(schedule, team, shards[c], received(frontiers[c]), sent_in[c]);
  }
  return schedule;
}

}  // namespace mccl
