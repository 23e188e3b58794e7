// Ranks as threads, each with an engine of its own, over socket pairs: many ops of random kinds and sizes in flight,
// checked element by element. Built with a sanitizer by tests/core/test_engine_sanitized.py.
//   engine_stress WORLD ROUNDS SEED [CREDIT_NBYTES]
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "engine/engine.hpp"
#include "op/sparse.hpp"
#include "small_engine.hpp"

using namespace mccl;

namespace {

constexpr int kInFlight = 12;
constexpr int kChannels = 3;

void check(bool condition, const char* what, int rank, int round) {
  if (condition) return;
  std::fprintf(stderr, "rank %d, round %d: %s\n", rank, round, what);
  std::abort();
}

Options options(uint64_t credit_nbytes) {
  Options o = small_engine();
  o.credit_nbytes = credit_nbytes;
  return o;
}

// Each algorithm in its turn, on one channel or several.
Planner planner(int world, int round) {
  Planner p{};
  p.profile = {round % 2 == 0 ? 1e-3 : 1e-9, 0, 1e9, 0, 1};
  static constexpr Algorithm kAlgorithms[] = {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant,
                                              Algorithm::kTwoLevel};
  p.all_reduce_algorithm = kAlgorithms[round % 4];
  p.recursive_doubling_max_nbytes = 32 << 10;
  p.chunk_nbytes = 8 << 10;
  for (int r = 0; r < world; ++r) p.group_of_rank.push_back(r % 2);
  p.channels = 1 + round % kChannels;
  p.channel_nbytes = 4 << 10;
  return p;
}

float value(int rank, int round, size_t i) {
  return static_cast<float>((rank * 7 + round * 3 + static_cast<int>(i)) % 97);
}

// One op that this rank has started, and how to check its result.
struct Started {
  OperationPtr op;
  std::vector<float> data;
  std::vector<float> result;
  int kind;
  int root;
  int round;
  size_t count;

  void verify(int rank, int world) const {
    if (kind == 0) {
      for (size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int r = 0; r < world; ++r) sum += value(r, round, i);
        check(data[i] == sum, "all_reduce", rank, round);
      }
    } else if (kind == 1) {
      for (size_t i = 0; i < count; ++i) check(data[i] == value(root, round, i), "broadcast", rank, round);
    } else if (kind == 2) {
      for (size_t i = 0; i < count * static_cast<size_t>(world); ++i) {
        const int from = static_cast<int>(i / count);
        check(result[i] == value(from, round, i % count), "all_gather", rank, round);
      }
    } else {
      for (size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int r = 0; r < world; ++r) sum += value(r, round, static_cast<size_t>(rank) * count + i);
        check(result[i] == sum, "reduce_scatter", rank, round);
      }
    }
  }
};

Buffer buffer_of(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
}

std::vector<Buffer> slices(std::vector<float>& values, int world, size_t count) {
  std::vector<Buffer> parts;
  for (int r = 0; r < world; ++r) {
    parts.push_back(
        {reinterpret_cast<std::byte*>(values.data() + static_cast<size_t>(r) * count), count * sizeof(float)});
  }
  return parts;
}

// All ranks draw the same kinds and sizes from the same seed.
std::unique_ptr<Started> start(Engine& engine, const std::shared_ptr<Group>& group, std::mt19937& random, int round) {
  const Member me{group->rank, group->world()};
  auto s = std::make_unique<Started>();
  s->kind = static_cast<int>(random() % 4);
  s->root = static_cast<int>(random() % static_cast<unsigned>(me.world));
  s->count = random() % 3 == 0 ? random() % 40'000 : random() % 300;
  s->round = round;
  const unsigned form = random() % 3;  // exact as well: fp16 holds the sums, and all elements are sent
  static const auto wire = std::make_shared<WireState>();
  const bool blocks_in = s->kind == 3;
  s->data.resize(blocks_in ? s->count * static_cast<size_t>(me.world) : s->count);
  for (size_t i = 0; i < s->data.size(); ++i) s->data[i] = value(me.rank, round, i);
  const Elements sum{DType::kFloat32, ReduceOp::kSum};
  if (s->kind == 0 && form == 1 && s->count > 0) {
    s->op = compressed_all_reduce(planner(me.world, round), me, {buffer_of(s->data)}, sum, Compression::kFloat16, wire);
  } else if (s->kind == 0 && form == 2 && s->count > 0) {
    s->op = sparse_all_reduce(planner(me.world, round), me, {buffer_of(s->data)},
                              std::make_shared<Residual>(s->count, DType::kFloat32), s->count, sum, wire);
  } else if (s->kind == 0) {
    s->op = all_reduce(planner(me.world, round), me, {buffer_of(s->data)}, sum);
  } else if (s->kind == 1) {
    s->op = broadcast(me, s->root, buffer_of(s->data), DType::kFloat32);
  } else if (s->kind == 2) {
    s->result.resize(s->count * static_cast<size_t>(me.world));
    s->op = all_gather(planner(me.world, round), me, {buffer_of(s->data)}, slices(s->result, me.world, s->count),
                       DType::kFloat32);
  } else if (form == 1 && s->count > 0) {
    s->result.resize(s->count);
    s->op = compressed_reduce_scatter(planner(me.world, round), me, slices(s->data, me.world, s->count),
                                      buffer_of(s->result), sum, Compression::kFloat16, wire);
  } else {
    s->result.resize(s->count);
    s->op =
        reduce_scatter(planner(me.world, round), me, slices(s->data, me.world, s->count), {buffer_of(s->result)}, sum);
  }
  engine.submit(group, s->op);
  return s;
}

void run_rank(Engine& engine, const std::shared_ptr<Group>& group, int rounds, unsigned seed) {
  std::mt19937 shared(seed);
  std::mt19937 own(seed + 1000 + static_cast<unsigned>(group->rank));
  std::deque<std::unique_ptr<Started>> in_flight;
  const auto finish_one = [&] {
    in_flight.front()->op->wait(-1);
    in_flight.front()->verify(group->rank, group->world());
    in_flight.pop_front();
  };
  for (int round = 0; round < rounds; ++round) {
    in_flight.push_back(start(engine, group, shared, round));
    while (in_flight.size() > own() % kInFlight) finish_one();
  }
  while (!in_flight.empty()) finish_one();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int world = std::atoi(argv[1]);
  const int rounds = std::atoi(argv[2]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[3]));
  const uint64_t credit = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 1 << 20;

  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<MemberInfo> members;
  for (int r = 0; r < world; ++r) {
    engines.push_back(std::make_unique<Engine>(options(credit)));
    members.push_back({std::string(16, static_cast<char>('a' + r)), "host" + std::to_string(r)});
  }
  for (int a = 0; a < world; ++a) {
    for (int b = a + 1; b < world; ++b) {
      for (int lane = 0; lane < kChannels * kLanesPerChannel; lane += world == 2 ? 1 : kLanesPerChannel) {
        int pair[2];
        if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 3;
        engines[static_cast<size_t>(a)]->add_connection(Fd(pair[0]), members[static_cast<size_t>(b)].process, lane,
                                                        "peer");
        engines[static_cast<size_t>(b)]->add_connection(Fd(pair[1]), members[static_cast<size_t>(a)].process, lane,
                                                        "peer");
      }
    }
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      Engine& engine = *engines[static_cast<size_t>(r)];
      const auto group = engine.create_group(42, r, members, kChannels);
      run_rank(engine, group, rounds, seed);
      engine.close_group(group);
      engine.shutdown();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d ranks, %d rounds: exact\n", world, rounds);
  return 0;
}
