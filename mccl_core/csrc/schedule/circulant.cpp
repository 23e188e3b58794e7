// Circulant reduce-scatter and all-gather (Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms",
// arXiv 2410.14234). For any N: ⌈log2 N⌉ rounds and (N-1)/N of the bytes each way; an all-reduce is one after the
// other.
//
// Seen from position r, block r+i is block i of its own order. A round of the reduce-scatter halves the blocks that are
// still a rank's: of the first `size` it sends the upper half to the rank that is `half` further, and adds what comes
// to the lower half. The all-gather is the same rounds backwards, with sender and receiver exchanged.
//
// A round waits for the one before it, so several chunks go through the rounds side by side: while one waits, another
// sends. Within a chunk receives are taken in the order of rounds, so that sums do not depend on arrival. What the
// all-gather replaces was sent as a partial sum, in the same round and the same pieces.
#include "schedule/parts.hpp"

namespace mccl {

namespace {
struct Round {
  int32_t size;  // blocks that take part
  int32_t half;  // of which this many are kept; also the distance to the partners
};

std::vector<Round> rounds_of(int32_t size) {
  std::vector<Round> rounds;
  for (; size > 1; size = (size + 1) / 2) rounds.push_back({size, (size + 1) / 2});
  return rounds;
}

// Blocks begin … begin+count-1 of the team (modulo its size): one range, or two where they wrap.
using Pieces = std::array<Range, 2>;
Pieces pieces(const Team& team, const std::vector<Range>& blocks, int32_t begin, int32_t count) {
  const auto span = [&](int32_t from, int32_t to) -> Range {
    if (from == to) return {};
    const Range front = blocks[static_cast<size_t>(from)];
    return {front.offset, blocks[static_cast<size_t>(to - 1)].end() - front.offset};
  };
  const int32_t from = team.wrap(begin);
  const int32_t to = from + count;
  if (to <= team.size()) return {span(from, to), {}};
  return {span(from, team.size()), span(0, to - team.size())};
}

// One block of this size for each rank; not of 0 bytes.
std::vector<Range> equal_blocks(Member me, uint64_t block_nbytes) {
  return blocks_of({0, block_nbytes * static_cast<uint64_t>(me.world)}, block_nbytes, me.world);
}

Gate received(Frontier frontier) { return frontier < 0 ? Gate{} : Gate{GateKind::kReceived, frontier}; }
}  // namespace

CirculantSent append_circulant_reduce_scatter(Schedule& schedule, const Team& team,
                                              const std::vector<std::vector<Range>>& chunks,
                                              std::vector<Frontier>& frontiers, bool finish) {
  CirculantSent sent;
  for (const auto [size, half] : rounds_of(team.size())) {
    const int32_t to = team.rank(team.position + half);
    const int32_t from = team.rank(team.position - half);
    sent.emplace_back(chunks.size(), std::array<int32_t, 2>{-1, -1});
    for (size_t c = 0; c < chunks.size(); ++c) {
      const Pieces out = pieces(team, chunks[c], team.position + half, size - half);
      const Pieces in = pieces(team, chunks[c], team.position, size - half);
      const Gate gate = received(frontiers[c]);
      for (const size_t piece : {0, 1}) {
        Step step = send_step(to, out[piece], gate);
        set_reduce(step, from, in[piece], in[piece].offset, from < team.own_rank(), gate);
        step.finish = finish && half == 1;
        const int32_t index = append(schedule, step);
        if (step.recv.nbytes > 0) frontiers[c] = index;
        if (step.send.nbytes > 0) sent.back()[c][piece] = index;
      }
    }
  }
  return sent;
}

void append_circulant_all_gather(Schedule& schedule, const Team& team, const std::vector<std::vector<Range>>& chunks,
                                 std::vector<Frontier>& frontiers, const CirculantSent& sent_in) {
  const auto rounds = rounds_of(team.size());
  for (size_t round = rounds.size(); round-- > 0;) {
    const auto [size, half] = rounds[round];
    const int32_t to = team.rank(team.position - half);
    const int32_t from = team.rank(team.position + half);
    for (size_t c = 0; c < chunks.size(); ++c) {
      const Pieces out = pieces(team, chunks[c], team.position, size - half);
      const Pieces in = pieces(team, chunks[c], team.position + half, size - half);
      const Gate gate = received(frontiers[c]);
      for (const size_t piece : {0, 1}) {
        Step step = send_step(to, out[piece], gate);
        set_copy(step, from, in[piece], gate);
        if (!sent_in.empty()) step.replaces_sent = sent_in[round][c][piece];
        const int32_t index = append(schedule, step);
        if (step.recv.nbytes > 0) frontiers[c] = index;
      }
    }
  }
}

Schedule circulant_all_reduce(Member me, uint64_t nbytes, uint64_t element_nbytes, int32_t chunk_count) {
  const Team team = everyone(me);
  std::vector<std::vector<Range>> chunks;
  for (const Range chunk : blocks_of({0, nbytes}, element_nbytes, chunk_count)) {
    chunks.push_back(blocks_of(chunk, element_nbytes, me.world));
  }
  std::vector<Frontier> frontiers(chunks.size(), -1);
  Schedule schedule;
  const CirculantSent sent = append_circulant_reduce_scatter(schedule, team, chunks, frontiers, true);
  append_circulant_all_gather(schedule, team, chunks, frontiers, sent);
  return schedule;
}

Schedule circulant_all_gather(Member me, uint64_t block_nbytes) {
  if (block_nbytes == 0) return {};
  const Team team = everyone(me);
  std::vector<Frontier> frontiers{-1};
  Schedule schedule;
  append_circulant_all_gather(schedule, team, {equal_blocks(me, block_nbytes)}, frontiers, {});
  return schedule;
}

Schedule circulant_reduce_scatter(Member me, uint64_t block_nbytes) {
  if (block_nbytes == 0) return {};
  const Team team = everyone(me);
  std::vector<Frontier> frontiers{-1};
  Schedule schedule;
  append_circulant_reduce_scatter(schedule, team, {equal_blocks(me, block_nbytes)}, frontiers, true);
  return schedule;
}

}  // namespace mccl
