// Proves every schedule for every world up to 64, and for samples above, for sizes below, at and above the world; then
// plants one fault after another and sees each of them found.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <set>

#include "schedule/algorithms.hpp"
#include "schedule/channels.hpp"
#include "schedule/parts.hpp"
#include "schedule/schedule.hpp"
#include "schedule/verify.hpp"

using namespace mccl;

namespace {

// By address, what a cell holds once every rank has added to it.
std::shared_ptr<std::vector<Contents>> sums(int32_t world, uint64_t nbytes) {
  auto cells = std::make_shared<std::vector<Contents>>(nbytes);
  for (uint64_t a = 0; a < nbytes; ++a) {
    for (int32_t r = 0; r < world; ++r) (*cells)[a] += contribution(r, a);
  }
  return cells;
}

using Expected = std::function<std::optional<Contents>(int32_t, uint64_t)>;

template <class Generate>
Problem make(int32_t world, uint64_t nbytes, Generate generate, Expected expected) {
  Problem problem;
  for (int32_t r = 0; r < world; ++r) problem.schedules.push_back(generate(Member{r, world}));
  problem.nbytes.assign(static_cast<size_t>(world), nbytes);
  problem.expected = std::move(expected);
  return problem;
}

template <class Generate>
Problem all_reduce(int32_t world, uint64_t nbytes, Generate generate) {
  Problem problem =
      make(world, nbytes, generate, [all = sums(world, nbytes)](int32_t, uint64_t address) { return (*all)[address]; });
  problem.identical = true;
  return problem;
}

Problem ring(int32_t world, uint64_t nbytes) {
  return all_reduce(world, nbytes, [&](Member me) { return ring_all_reduce(me, nbytes, 1); });
}
Problem recursive_doubling(int32_t world, uint64_t nbytes) {
  return all_reduce(world, nbytes, [&](Member me) { return recursive_doubling_all_reduce(me, nbytes); });
}
Problem circulant(int32_t world, uint64_t nbytes, int32_t chunk_count) {
  return all_reduce(world, nbytes, [&](Member me) { return circulant_all_reduce(me, nbytes, 1, chunk_count); });
}
Problem two_level(int32_t world, uint64_t nbytes, const std::vector<int32_t>& group_of_rank, int32_t chunk_count) {
  return all_reduce(world, nbytes,
                    [&](Member me) { return two_level_all_reduce(me, nbytes, 1, group_of_rank, chunk_count); });
}

// Groups of four, uneven groups in the order of ranks, groups that ranks take turns in.
std::vector<std::vector<int32_t>> groupings(int32_t world) {
  std::vector<std::vector<int32_t>> all(3);
  for (int32_t r = 0; r < world; ++r) {
    all[0].push_back(r / 4);
    all[1].push_back(r < world / 3 ? 0 : r < world / 2 ? 1 : 2);
    all[2].push_back(r % 3);
  }
  return all;
}

// Over channels, as the planner asks for it.
Problem on_channels(const char* algorithm, int32_t world, uint64_t nbytes, int32_t channel_count) {
  AllReduceRequest request{nbytes, 1, 2, groupings(world)[0], channel_count};
  return all_reduce(world, nbytes, all_reduce_generator(algorithm, request));
}

// Over channels: for each one the inputs' parts and then the output's.
Problem ring_scatter_on_channels(int32_t world, uint64_t block, int32_t channel_count) {
  const auto blocks = static_cast<uint64_t>(world) + 1;
  const auto parts = blocks_of({0, block}, 1, channel_count);
  const auto generate = [&](Member me) {
    std::vector<ChannelPart> schedules;
    for (const Range part : parts) {
      schedules.push_back({ring_reduce_scatter(me, part.nbytes), {part.offset * blocks, part.nbytes * blocks}});
    }
    return merge_channels(std::move(schedules));
  };
  return make(world, block * blocks, generate,
              [=, all = sums(world, block * blocks)](int32_t rank, uint64_t address) -> std::optional<Contents> {
                const auto part = *std::find_if(parts.rbegin(), parts.rend(),
                                                [&](Range p) { return address >= p.offset * blocks && p.nbytes > 0; });
                const uint64_t inputs = part.offset * blocks;
                const uint64_t output = inputs + part.nbytes * (blocks - 1);
                if (address < output) return contribution(rank, address);
                return (*all)[inputs + static_cast<uint64_t>(rank) * part.nbytes + address - output];
              });
}

template <class Generate>
Problem all_gather(int32_t world, uint64_t block, Generate generate) {
  return make(
      world, block * static_cast<uint64_t>(world), [&](Member me) { return generate(me, block); },
      [=](int32_t, uint64_t address) { return contribution(static_cast<int32_t>(address / block), address); });
}

// Input blocks, then the output; the input must be as it was.
Problem ring_scatter(int32_t world, uint64_t block) {
  const uint64_t output = block * static_cast<uint64_t>(world);
  return make(
      world, output + block, [&](Member me) { return ring_reduce_scatter(me, block); },
      [=, all = sums(world, output)](int32_t rank, uint64_t address) {
        if (address < output) return contribution(rank, address);
        return (*all)[static_cast<uint64_t>(rank) * block + address - output];
      });
}
Problem circulant_scatter(int32_t world, uint64_t block) {
  const uint64_t nbytes = block * static_cast<uint64_t>(world);
  return make(
      world, nbytes, [&](Member me) { return circulant_reduce_scatter(me, block); },
      [=, all = sums(world, nbytes)](int32_t rank, uint64_t address) -> std::optional<Contents> {
        if (static_cast<int32_t>(address / block) != rank) return std::nullopt;
        return (*all)[address];
      });
}

Problem broadcast(int32_t world, int32_t root, uint64_t nbytes) {
  return make(
      world, nbytes, [&](Member me) { return binomial_broadcast(me, root, nbytes); },
      [=](int32_t, uint64_t address) { return contribution(root, address); });
}

Problem reduce(int32_t world, int32_t root, uint64_t nbytes) {
  return make(
      world, nbytes, [&](Member me) { return binomial_reduce(me, root, nbytes); },
      [=, all = sums(world, nbytes)](int32_t rank, uint64_t address) {
        return rank == root ? (*all)[address] : contribution(rank, address);
      });
}

Problem gather(int32_t world, int32_t root, uint64_t block) {
  Problem problem = make(
      world, block, [&](Member me) { return direct_gather(me, root, block); },
      [=](int32_t rank, uint64_t address) -> std::optional<Contents> {
        const auto from = static_cast<int32_t>(address / block);
        if (rank != root || from == root) return std::nullopt;
        return contribution(from, address % block);
      });
  problem.nbytes[static_cast<size_t>(root)] = block * static_cast<uint64_t>(world);
  return problem;
}

Problem scatter(int32_t world, int32_t root, uint64_t block) {
  Problem problem = make(
      world, block, [&](Member me) { return direct_scatter(me, root, block); },
      [=](int32_t rank, uint64_t address) -> std::optional<Contents> {
        if (rank == root) return std::nullopt;
        return contribution(root, static_cast<uint64_t>(rank) * block + address);
      });
  problem.nbytes[static_cast<size_t>(root)] = block * static_cast<uint64_t>(world);
  return problem;
}

// Uneven: rank i sends (i + j) mod 3 bytes to rank j, nothing among them.
Problem all_to_all(int32_t world) {
  std::vector<std::vector<uint64_t>> split(static_cast<size_t>(world)), begin(static_cast<size_t>(world));
  for (int32_t i = 0; i < world; ++i) {
    uint64_t at = 0;
    for (int32_t j = 0; j < world; ++j) {
      const auto nbytes = static_cast<uint64_t>((i + j) % 3);
      split[static_cast<size_t>(i)].push_back(nbytes);
      begin[static_cast<size_t>(i)].push_back(at);
      at += nbytes;
    }
    begin[static_cast<size_t>(i)].push_back(at);
  }
  const auto generate = [&](Member me) {
    return pairwise_all_to_all(me, split[static_cast<size_t>(me.rank)], split[static_cast<size_t>(me.rank)]);
  };
  Problem problem = make(world, 0, generate, [=](int32_t rank, uint64_t address) -> std::optional<Contents> {
    const auto& own = begin[static_cast<size_t>(rank)];
    if (address < own.back()) return contribution(rank, address);
    const uint64_t offset = address - own.back();
    const auto from = std::upper_bound(own.begin(), own.end(), offset) - own.begin() - 1;
    if (from == rank) return std::nullopt;
    const uint64_t source = begin[static_cast<size_t>(from)][static_cast<size_t>(rank)];
    return contribution(static_cast<int32_t>(from), source + offset - own[static_cast<size_t>(from)]);
  });
  for (size_t r = 0; r < begin.size(); ++r) problem.nbytes[r] = 2 * begin[r].back();
  return problem;
}

Problem barrier(int32_t world) {
  return make(
      world, 0, [](Member me) { return dissemination_barrier(me); },
      [](int32_t, uint64_t) -> std::optional<Contents> { return std::nullopt; });
}

// Whether every rank's end implies that all ranks have begun: what a step's message can tell is what its sender knew
// when its gate opened.
bool tells_everyone(const Problem& barrier) {
  const auto world = static_cast<int32_t>(barrier.schedules.size());
  std::vector<std::set<int32_t>> known(barrier.schedules.size());
  std::vector<std::vector<std::set<int32_t>>> after(barrier.schedules.size());  // by rank and step
  for (size_t i = 0; i < barrier.schedules[0].steps.size(); ++i) {
    for (int32_t r = 0; r < world; ++r) {
      const Step& step = barrier.schedules[static_cast<size_t>(r)].steps[i];
      const auto from = static_cast<size_t>(step.recv_peer);
      const Gate gate = barrier.schedules[from].steps[i].send_gate;
      std::set<int32_t> told{step.recv_peer};
      if (gate.kind == GateKind::kReceived || gate.kind == GateKind::kReceivedBytes) {
        const auto& gated = after[from][static_cast<size_t>(gate.step)];
        told.insert(gated.begin(), gated.end());
      }
      if (step.recv_gate.kind == GateKind::kReceived) {  // by then these have come, too
        const auto& earlier = after[static_cast<size_t>(r)][static_cast<size_t>(step.recv_gate.step)];
        told.insert(earlier.begin(), earlier.end());
      }
      after[static_cast<size_t>(r)].push_back(told);
      known[static_cast<size_t>(r)].insert(told.begin(), told.end());
      known[static_cast<size_t>(r)].insert(r);
    }
  }
  return std::all_of(known.begin(), known.end(),
                     [&](const auto& ranks) { return ranks.size() == static_cast<size_t>(world); });
}

void prove(const char* name, int32_t world, uint64_t nbytes, const Problem& problem) {
  // A thousand ranks take most of the time: one order of arrival there, and below fewer sizes and chunks.
  const auto wrong = verify(problem, world < 1000 ? 2 : 1);
  if (!wrong) return;
  FAIL(name << ", " << world << " ranks, " << nbytes << " bytes: " << *wrong);
}

void prove_all_reduce(int32_t world, uint64_t n) {
  prove("ring all-reduce", world, n, ring(world, n));
  const uint64_t few = std::min<uint64_t>(n, 200);  // it sends all bytes in each round: more would prove no more
  prove("recursive doubling", world, few, recursive_doubling(world, few));
  prove("circulant all-reduce", world, n, circulant(world, n, 1));
  prove("circulant all-reduce in chunks", world, n, circulant(world, n, 3));
  for (const auto& groups : groupings(world)) {
    if (world < 1000) prove("two-level all-reduce", world, n, two_level(world, n, groups, 1));
    prove("two-level all-reduce in chunks", world, n, two_level(world, n, groups, 2));
  }
  const auto teams = even_teams(world);
  if (!teams.empty()) prove("two-level all-reduce in teams", world, n, two_level(world, n, teams, 2));
}

void prove_others(int32_t world, uint64_t n, const std::vector<int32_t>& roots) {
  prove("ring all-gather", world, n, all_gather(world, n, ring_all_gather));
  prove("circulant all-gather", world, n, all_gather(world, n, circulant_all_gather));
  prove("ring reduce-scatter", world, n, ring_scatter(world, n));
  prove("circulant reduce-scatter", world, n, circulant_scatter(world, n));
  for (const int32_t root : roots) {
    prove("broadcast", world, n, broadcast(world, root, n));
    prove("reduce", world, n, reduce(world, root, n));
    prove("gather", world, n, gather(world, root, n));
    prove("scatter", world, n, scatter(world, root, n));
  }
}

// Each must be found with one of a few orders of arrival.
void plant(const char* name, Problem problem, const std::function<void(Problem&)>& fault) {
  REQUIRE_MESSAGE(!verify(problem, 1), std::string(name));
  fault(problem);
  CHECK_MESSAGE(verify(problem, 20).has_value(), std::string(name));
}

std::vector<Step>& steps(Problem& problem, size_t rank) { return problem.schedules[rank].steps; }

}  // namespace

TEST_CASE("teams are even, and neither few nor thin") {
  const auto cut = [](int32_t world) -> std::pair<int32_t, int32_t> {  // teams, and ranks in each
    const auto teams = even_teams(world);
    if (teams.empty()) return {1, world};
    REQUIRE(teams.size() == static_cast<size_t>(world));
    const int32_t count = teams.back() + 1;
    for (int32_t r = 0; r < world; ++r) CHECK(teams[static_cast<size_t>(r)] == r / (world / count));
    CHECK(world % count == 0);
    return {count, world / count};
  };
  CHECK(cut(200) == std::pair{10, 20});
  CHECK(cut(100) == std::pair{10, 10});
  CHECK(cut(24) == std::pair{4, 6});
  CHECK(cut(16) == std::pair{4, 4});
  for (const int32_t world : {1, 2, 8, 12, 15, 199, 4 * 17}) CHECK(cut(world) == std::pair{1, world});
}

TEST_CASE("every schedule is right in every world up to 64") {
  for (int32_t world = 2; world <= 64; ++world) {
    const auto n = static_cast<uint64_t>(world);
    for (const uint64_t nbytes : {uint64_t{0}, uint64_t{1}, uint64_t{2}, n - 1, n, n + 1, 2 * n + 3}) {
      prove_all_reduce(world, nbytes);
    }
    for (const uint64_t nbytes : {0, 1, 3}) prove_others(world, nbytes, {0, world / 2, world - 1});
    prove("all-to-all", world, 0, all_to_all(world));
    prove("barrier", world, 0, barrier(world));
    CHECK(tells_everyone(barrier(world)));
  }
}

TEST_CASE("every schedule is right in large worlds") {
  for (const int32_t world : {100, 200, 1000}) {
    const auto n = static_cast<uint64_t>(world);
    prove_all_reduce(world, n - 1);
    if (world < 1000) prove_all_reduce(world, n + 1);
    prove_others(world, 1, {world / 2});
    prove("all-to-all", world, 0, all_to_all(world));
    prove("barrier", world, 0, barrier(world));
    CHECK(tells_everyone(barrier(world)));
  }
}

TEST_CASE("schedules over channels are right") {
  for (const int32_t world : {2, 3, 5, 8, 13}) {
    const auto n = static_cast<uint64_t>(world);
    for (const int32_t channels : {2, 3, 8}) {
      for (const uint64_t nbytes : {uint64_t{0}, uint64_t{1}, n + 1, 8 * n + 3}) {
        for (const auto& algorithm : all_reduce_algorithms()) {
          prove(algorithm.c_str(), world, nbytes, on_channels(algorithm.c_str(), world, nbytes, channels));
        }
      }
      for (const uint64_t block : {0, 1, 9}) {
        prove("ring reduce-scatter", world, block, ring_scatter_on_channels(world, block, channels));
      }
    }
  }
}

TEST_CASE("channels share nothing but the address space") {
  const Schedule merged =
      merge_channels({{ring_reduce_scatter({1, 4}, 10), {0, 50}}, {ring_reduce_scatter({1, 4}, 6), {50, 30}}});
  for (const Step& step : merged.steps) {
    for (const Gate& gate : {step.send_gate, step.recv_gate}) {
      if (gate.kind != GateKind::kOpen) CHECK(merged.steps[static_cast<size_t>(gate.step)].channel == step.channel);
    }
  }
  CHECK(merged.steps.front().channel == 0);
  CHECK(merged.steps.back().channel == 1);
  CHECK(merged.scratch_nbytes == 2 * 10 + 2 * 6);
}

TEST_CASE("every planted fault is found") {
  plant("channels: a step on the other one", on_channels("ring", 4, 26, 2),
        [](Problem& p) { steps(p, 2)[3].channel = 1; });
  plant("channels: a gate on another one's step", on_channels("ring", 4, 26, 2), [](Problem& p) {
    auto& all = steps(p, 1);
    all.back().send_gate.step -= static_cast<int32_t>(all.size() / 2);
  });
  plant("channels: parts that overlap", on_channels("circulant", 5, 40, 2), [](Problem& p) {
    for (Step& step : steps(p, 3)) {
      if (step.channel == 1) step.recv.offset -= 1;
    }
  });
  plant("channels: scratch that two use", ring_scatter_on_channels(6, 4, 2), [](Problem& p) {
    for (Step& step : steps(p, 2)) {
      if (step.channel == 1 && step.send.offset >= 4 * 7) step.send.offset -= 2;
    }
  });
  plant("ring: a send that does not wait for its receive", ring(5, 13),
        [](Problem& p) { steps(p, 2)[1].send_gate = {}; });
  plant("ring: a reduction that copies", ring(5, 13), [](Problem& p) { steps(p, 1)[0].action = Action::kCopy; });
  plant("ring: a block sent twice", ring(5, 13), [](Problem& p) { steps(p, 3)[1].send = steps(p, 3)[0].send; });
  plant("ring: a step left out", ring(5, 13), [](Problem& p) { steps(p, 4).pop_back(); });
  plant("ring: what is still being sent is replaced", ring(5, 13), [](Problem& p) {
    for (Step& step : steps(p, 2)) step.replaces_sent = -1;
  });
  plant("circulant: what is still being sent is replaced", circulant(7, 21, 2), [](Problem& p) {
    for (Step& step : steps(p, 2)) step.replaces_sent = -1;
  });
  plant("two-level: what is still being sent is replaced", two_level(8, 32, groupings(8)[0], 2), [](Problem& p) {
    for (Step& step : steps(p, 2)) step.replaces_sent = -1;
  });
  plant("recursive doubling: a receive that does not wait", recursive_doubling(6, 4), [](Problem& p) {
    for (Step& step : steps(p, 1)) step.recv_gate = {};
  });
  plant("recursive doubling: partners who wait for each other", recursive_doubling(4, 4), [](Problem& p) {
    for (size_t r = 0; r < 4; ++r) {
      for (Step& step : steps(p, r)) step.park = false;
    }
  });
  plant("recursive doubling: a folded rank forgotten", recursive_doubling(5, 4),
        [](Problem& p) { steps(p, 0)[0].action = Action::kCopy; });
  plant("reduce-scatter: a slot taken too early", ring_scatter(9, 2), [](Problem& p) {
    for (size_t r = 0; r < 9; ++r) {
      for (Step& step : steps(p, r)) step.recv_gate = {};
    }
  });
  plant("reduce-scatter: another operand", ring_scatter(4, 2), [](Problem& p) { steps(p, 0)[1].operand += 2; });
  plant("reduce: a rank that forgets itself", reduce(4, 0, 3),
        [](Problem& p) { steps(p, 2)[0].action = Action::kCopy; });
  plant("reduce: sent before the last child came", reduce(8, 0, 3),
        [](Problem& p) { steps(p, 4).back().send_gate = {}; });
  plant("broadcast: forwarded before it came", broadcast(8, 0, 3), [](Problem& p) { steps(p, 4)[1].send_gate = {}; });
  plant("all-gather: a gate on the wrong step", all_gather(4, 3, ring_all_gather),
        [](Problem& p) { steps(p, 2)[2].send_gate.step = 0; });
  plant("all-to-all: blocks in the wrong place", all_to_all(4), [](Problem& p) {
    for (Step& step : steps(p, 3)) {
      if (step.send_peer == 2) step.send.offset = 0;
    }
  });
  plant("gather: a block in the wrong place", gather(4, 0, 3), [](Problem& p) { steps(p, 0)[1].recv.offset = 0; });
  plant("scatter: the wrong block", scatter(4, 0, 3), [](Problem& p) { steps(p, 0)[1].send.offset = 0; });
  plant("barrier: two who wait for each other", barrier(4), [](Problem& p) {
    for (size_t r = 0; r < 4; ++r) steps(p, r)[0].send_gate = {GateKind::kReceived, 1};
  });
  plant("circulant: a round that does not wait for the one before", circulant(7, 14, 1), [](Problem& p) {
    for (Step& step : steps(p, 3)) step.send_gate = {};
  });
  plant("circulant: sums in the order of arrival", circulant(8, 16, 1), [](Problem& p) {
    for (Step& step : steps(p, 2)) step.recv_gate = {};
  });
  plant("circulant: a reduction that copies", circulant(5, 10, 2),
        [](Problem& p) { steps(p, 1)[0].action = Action::kCopy; });
  plant("circulant: one chunk that waits for another", circulant(6, 24, 2), [](Problem& p) {
    for (Step& step : steps(p, 4)) {
      if (step.send_gate.kind != GateKind::kOpen) step.send_gate.step ^= 1;
    }
  });
  plant("circulant all-gather: forwarded before it came", all_gather(6, 2, circulant_all_gather), [](Problem& p) {
    for (Step& step : steps(p, 0)) step.send_gate = {};
  });
  plant("circulant reduce-scatter: two ranks that add in another order", circulant_scatter(6, 2), [](Problem& p) {
    for (Step& step : steps(p, 5)) step.recv_gate = {};
  });
  plant("two-level: a shard that leaves before its group has added", two_level(8, 16, groupings(8)[0], 1),
        [](Problem& p) {
          for (Step& step : steps(p, 6)) step.send_gate = {};
        });
  plant("two-level: a holder that is left out", two_level(9, 18, groupings(9)[1], 1), [](Problem& p) {
    for (Step& step : steps(p, 3)) step.action = Action::kCopy;
  });
  plant("two-level: a gathered block in the wrong place", two_level(8, 16, groupings(8)[2], 2),
        [](Problem& p) { steps(p, 7).back().recv.offset = 0; });
  Problem untold = barrier(8);
  REQUIRE(tells_everyone(untold));
  for (size_t r = 0; r < 8; ++r) steps(untold, r)[1].recv_gate = {};
  CHECK_FALSE(tells_everyone(untold));
}
