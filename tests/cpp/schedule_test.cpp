// Proves every schedule for every world up to the given one, for sizes below, at and above the world; then plants one
// fault after another and sees each of them found.
//   schedule_test LARGEST_WORLD
#include <cstdio>
#include <cstdlib>

#include "schedule/schedule.hpp"
#include "schedule/verify.hpp"

using namespace mccl;

namespace {

int64_t proved = 0;

std::vector<uint64_t> sizes(int32_t world) {
  const auto n = static_cast<uint64_t>(world);
  return {0, 1, 2, n - 1, n, n + 1, 2 * n + 3};
}

Cell from_all(int32_t world, uint64_t address) {
  Cell cell;
  for (int32_t r = 0; r < world; ++r) cell.push_back({r, address});
  return cell;
}

template <class Generate>
Problem make(int32_t world, uint64_t nbytes, Generate generate,
             std::function<std::optional<Cell>(int32_t, uint64_t)> expected) {
  Problem problem;
  for (int32_t r = 0; r < world; ++r) problem.schedules.push_back(generate(Member{r, world}));
  problem.nbytes.assign(static_cast<size_t>(world), nbytes);
  problem.expected = std::move(expected);
  return problem;
}

Problem all_reduce(int32_t world, uint64_t nbytes, bool ring) {
  return make(
      world, nbytes,
      [&](Member me) { return ring ? ring_all_reduce(me, nbytes, 1) : recursive_doubling_all_reduce(me, nbytes); },
      [=](int32_t, uint64_t address) { return from_all(world, address); });
}

Problem all_gather(int32_t world, uint64_t block) {
  return make(
      world, block * static_cast<uint64_t>(world), [&](Member me) { return ring_all_gather(me, block); },
      [=](int32_t, uint64_t address) { return Cell{{static_cast<int32_t>(address / block), address}}; });
}

// Input blocks, then the output; the input must be as it was.
Problem reduce_scatter(int32_t world, uint64_t block) {
  const uint64_t output = block * static_cast<uint64_t>(world);
  return make(
      world, output + block, [&](Member me) { return ring_reduce_scatter(me, block); },
      [=](int32_t rank, uint64_t address) {
        if (address < output) return Cell{{rank, address}};
        return from_all(world, static_cast<uint64_t>(rank) * block + address - output);
      });
}

Problem broadcast(int32_t world, int32_t root, uint64_t nbytes) {
  return make(
      world, nbytes, [&](Member me) { return binomial_broadcast(me, root, nbytes); },
      [=](int32_t, uint64_t address) { return Cell{{root, address}}; });
}

Problem reduce(int32_t world, int32_t root, uint64_t nbytes) {
  return make(
      world, nbytes, [&](Member me) { return binomial_reduce(me, root, nbytes); },
      [=](int32_t rank, uint64_t address) { return rank == root ? from_all(world, address) : Cell{{rank, address}}; });
}

Problem gather(int32_t world, int32_t root, uint64_t block) {
  Problem problem = make(
      world, block, [&](Member me) { return direct_gather(me, root, block); },
      [=](int32_t rank, uint64_t address) -> std::optional<Cell> {
        const auto from = static_cast<int32_t>(address / block);
        if (rank != root || from == root) return std::nullopt;
        return Cell{{from, address % block}};
      });
  problem.nbytes[static_cast<size_t>(root)] = block * static_cast<uint64_t>(world);
  return problem;
}

Problem scatter(int32_t world, int32_t root, uint64_t block) {
  Problem problem = make(
      world, block, [&](Member me) { return direct_scatter(me, root, block); },
      [=](int32_t rank, uint64_t address) -> std::optional<Cell> {
        if (rank == root) return std::nullopt;
        return Cell{{root, static_cast<uint64_t>(rank) * block + address}};
      });
  problem.nbytes[static_cast<size_t>(root)] = block * static_cast<uint64_t>(world);
  return problem;
}

// Uneven: rank i sends (i + j) mod 3 bytes to rank j, nothing among them.
Problem all_to_all(int32_t world) {
  const auto nbytes = [](int32_t i, int32_t j) { return static_cast<uint64_t>((i + j) % 3); };
  const auto begin = [=](int32_t i, int32_t j) {
    uint64_t at = 0;
    for (int32_t k = 0; k < j; ++k) at += nbytes(i, k);
    return at;
  };
  const auto total = [=](int32_t i) { return begin(i, world); };
  Problem problem = make(
      world, 0,
      [&](Member me) {
        std::vector<uint64_t> split;
        for (int32_t r = 0; r < world; ++r) split.push_back(nbytes(me.rank, r));
        return pairwise_all_to_all(me, split, split);
      },
      [=](int32_t rank, uint64_t address) -> std::optional<Cell> {
        if (address < total(rank)) return Cell{{rank, address}};
        int32_t from = world - 1;
        while (begin(rank, from) > address - total(rank)) --from;
        if (from == rank) return std::nullopt;
        return Cell{{from, begin(from, rank) + address - total(rank) - begin(rank, from)}};
      });
  for (int32_t r = 0; r < world; ++r) problem.nbytes[static_cast<size_t>(r)] = 2 * total(r);
  return problem;
}

// No rank may end before all have begun; what the bytes are does not matter, so only that it ends is checked here.
Problem barrier(int32_t world) {
  return make(
      world, 0, [](Member me) { return dissemination_barrier(me); },
      [](int32_t, uint64_t) -> std::optional<Cell> { return std::nullopt; });
}

void prove(const char* name, int32_t world, uint64_t nbytes, const Problem& problem) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    if (const auto wrong = verify(problem, seed)) {
      std::fprintf(stderr, "%s, %d ranks, %llu bytes: %s\n", name, world, static_cast<unsigned long long>(nbytes),
                   wrong->c_str());
      std::exit(1);
    }
  }
  ++proved;
}

void prove_world(int32_t world) {
  for (const uint64_t n : sizes(world)) {
    prove("ring all-reduce", world, n, all_reduce(world, n, true));
    prove("recursive doubling", world, n, all_reduce(world, n, false));
  }
  for (const uint64_t n : {0, 1, 3}) {
    prove("all-gather", world, n, all_gather(world, n));
    prove("reduce-scatter", world, n, reduce_scatter(world, n));
    for (const int32_t root : {0, world / 2, world - 1}) {
      prove("broadcast", world, n, broadcast(world, root, n));
      prove("reduce", world, n, reduce(world, root, n));
      prove("gather", world, n, gather(world, root, n));
      prove("scatter", world, n, scatter(world, root, n));
    }
  }
  prove("all-to-all", world, 0, all_to_all(world));
  prove("barrier", world, 0, barrier(world));
}

// Each must be found with one of a few orders of arrival.
void plant(const char* name, Problem problem, const std::function<void(Problem&)>& fault) {
  fault(problem);
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    if (verify(problem, seed)) return;
  }
  std::fprintf(stderr, "not found: %s\n", name);
  std::exit(1);
}

void plant_faults() {
  const auto steps = [](Problem& p, size_t rank) -> std::vector<Step>& { return p.schedules[rank].steps; };
  plant("ring: a send that does not wait for its receive", all_reduce(5, 13, true),
        [&](Problem& p) { steps(p, 2)[1].send_gate = {}; });
  plant("ring: a reduction that copies", all_reduce(5, 13, true),
        [&](Problem& p) { steps(p, 1)[0].action = Action::kCopy; });
  plant("ring: a block sent twice", all_reduce(5, 13, true),
        [&](Problem& p) { steps(p, 3)[1].send = steps(p, 3)[0].send; });
  plant("ring: a step left out", all_reduce(5, 13, true), [&](Problem& p) { steps(p, 4).pop_back(); });
  plant("recursive doubling: a receive that does not wait", all_reduce(6, 4, false), [&](Problem& p) {
    for (Step& step : steps(p, 1)) step.recv_gate = {};
  });
  plant("recursive doubling: partners who wait for each other", all_reduce(4, 4, false), [&](Problem& p) {
    for (size_t r = 0; r < 4; ++r) {
      for (Step& step : steps(p, r)) step.park = false;
    }
  });
  plant("recursive doubling: a folded rank forgotten", all_reduce(5, 4, false),
        [&](Problem& p) { steps(p, 0)[0].action = Action::kCopy; });
  plant("reduce-scatter: a slot taken too early", reduce_scatter(9, 2), [&](Problem& p) {
    for (size_t r = 0; r < 9; ++r) {
      for (Step& step : steps(p, r)) step.recv_gate = {};
    }
  });
  plant("reduce-scatter: another operand", reduce_scatter(4, 2), [&](Problem& p) { steps(p, 0)[1].operand += 2; });
  plant("reduce: a rank that forgets itself", reduce(4, 0, 3),
        [&](Problem& p) { steps(p, 2)[0].action = Action::kCopy; });
  plant("reduce: sent before the last child came", reduce(8, 0, 3),
        [&](Problem& p) { steps(p, 4).back().send_gate = {}; });
  plant("broadcast: forwarded before it came", broadcast(8, 0, 3), [&](Problem& p) { steps(p, 4)[1].send_gate = {}; });
  plant("all-gather: a gate on the wrong step", all_gather(4, 3),
        [&](Problem& p) { steps(p, 2)[2].send_gate.step = 0; });
  plant("all-to-all: blocks in the wrong place", all_to_all(4), [&](Problem& p) {
    for (Step& step : steps(p, 3)) {
      if (step.send_peer == 2) step.send.offset = 0;
    }
  });
  plant("gather: a block in the wrong place", gather(4, 0, 3), [&](Problem& p) { steps(p, 0)[1].recv.offset = 0; });
  plant("scatter: the wrong block", scatter(4, 0, 3), [&](Problem& p) { steps(p, 0)[1].send.offset = 0; });
  plant("barrier: two who wait for each other", barrier(4), [&](Problem& p) {
    for (size_t r = 0; r < 4; ++r) steps(p, r)[0].send_gate = {GateKind::kReceived, 1};
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int32_t largest = argc > 1 ? std::atoi(argv[1]) : 64;
  for (int32_t world = 2; world <= largest; ++world) prove_world(world);
  for (const int32_t world : {100, 200}) prove_world(world);
  plant_faults();
  std::printf("%lld schedules proved, every planted fault found\n", static_cast<long long>(proved));
  return 0;
}
