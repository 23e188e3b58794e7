// Steady all-reduces allocate nothing on the engine's threads: operator new is counted on every thread but those that
// say they are callers.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

#include "engine/engine.hpp"
#include "op/collective.hpp"

namespace {
std::atomic<long> allocations{0};
std::atomic<bool> counting{false};
thread_local bool is_caller = false;
}  // namespace

void* operator new(std::size_t nbytes) {
  if (counting && !is_caller) ++allocations;
  if (void* data = std::malloc(nbytes)) return data;
  throw std::bad_alloc();
}
void* operator new(std::size_t nbytes, std::align_val_t alignment) {
  if (counting && !is_caller) ++allocations;
  const auto align = static_cast<std::size_t>(alignment);
  if (void* data = std::aligned_alloc(align, (nbytes + align - 1) / align * align)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }

using namespace mccl;

namespace {

constexpr int kWorld = 3;

Options options() {
  Options o{};
  o.segment_nbytes = 256 << 10;
  o.scratch_nbytes = 64 << 10;
  o.inline_nbytes = 64 << 10;
  o.credit_nbytes = 1 << 20;
  o.eager_grant_nbytes = 1 << 20;
  o.linger_ms = 2000;
  o.heartbeat_interval_ms = 5000;
  return o;
}

Planner planner(Algorithm algorithm) {
  Planner p{};
  p.profile = {1e-5, 0, 1e9, 0, 1};
  p.all_reduce_algorithm = algorithm;
  p.recursive_doubling_max_nbytes = 256 << 10;
  p.chunk_nbytes = 64 << 10;
  return p;
}

// Several all-reduces in flight at a time, many times over, with and without somebody who waits by callback.
void all_reduce_many(Engine& engine, const std::shared_ptr<Group>& group, int rounds) {
  is_caller = true;
  const Member me{group->rank, group->world()};
  std::vector<std::vector<float>> tensors;
  for (const size_t count : {1u, 1000u, 60'000u, 400'000u}) tensors.emplace_back(count, 1.0f);
  for (int round = 0; round < rounds; ++round) {
    std::vector<OperationPtr> ops;
    for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kCirculant, Algorithm::kRecursiveDoubling}) {
      auto& data = tensors[static_cast<size_t>(round + static_cast<int>(algorithm)) % tensors.size()];
      if (std::find_if(ops.begin(), ops.end(), [&](const auto& op) {
            return op->buffers.front({0, 4}).data == reinterpret_cast<std::byte*>(data.data());
          }) != ops.end()) {
        continue;
      }
      const Buffer buffer{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
      ops.push_back(all_reduce(planner(algorithm), me, {buffer}, {DType::kFloat32, ReduceOp::kMax}));
      ops.back()->on_settled([] {});
      engine.submit(group, ops.back());
    }
    for (const auto& op : ops) op->wait(-1);
  }
}

}  // namespace

TEST_CASE("the engine's threads allocate nothing in steady work") {
  is_caller = true;
  std::vector<MemberInfo> members;
  for (int r = 0; r < kWorld; ++r) members.push_back({std::string(16, static_cast<char>('a' + r)), "host"});
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < kWorld; ++r) engines.push_back(std::make_unique<Engine>(options()));
  for (size_t a = 0; a < kWorld; ++a) {
    for (size_t b = a + 1; b < kWorld; ++b) {
      int pair[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
      engines[a]->add_connection(Fd(pair[0]), members[b].process, 0, members[b].host);
      engines[b]->add_connection(Fd(pair[1]), members[a].process, 0, members[a].host);
    }
  }
  std::vector<std::shared_ptr<Group>> groups;
  for (int r = 0; r < kWorld; ++r) groups.push_back(engines[static_cast<size_t>(r)]->create_group(1, r, members));
  const auto everyone_runs = [&](int rounds) {
    std::vector<std::thread> ranks;
    for (size_t r = 0; r < kWorld; ++r) {
      ranks.emplace_back([&, r] { all_reduce_many(*engines[r], groups[r], rounds); });
    }
    for (std::thread& rank : ranks) rank.join();
  };
  // What is kept for reuse grows with the most that was ever needed at once, which depends on timing: after some time
  // nothing is new any more. One allocation an op would be hundreds each time.
  long last = -1;
  for (int attempt = 0; attempt < 20 && last != 0; ++attempt) {
    everyone_runs(300);
    allocations = 0;
    counting = true;
    everyone_runs(300);
    counting = false;
    last = allocations.load();
  }
  CHECK(last == 0);
  groups.clear();
  std::vector<std::thread> leaving;
  for (auto& engine : engines) leaving.emplace_back([&] { engine->shutdown(); });
  for (std::thread& thread : leaving) thread.join();
}
