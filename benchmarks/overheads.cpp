// What metrics and the flight record do for one small op of two ranks, and nothing else, in a loop. Prints ns an op as
// JSON. Each part reads the clock as often as the engine does for it alone.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <vector>

#include "engine/flight_record.hpp"
#include "engine/group.hpp"
#include "engine/metrics.hpp"
#include "op/collective.hpp"

using namespace mccl;

namespace {
constexpr int kLoops = 1'000'000;
constexpr int kRepeats = 7;

// Processor time, so that whatever else the machine does is not counted; the median over the repeats.
template <class Body>
double ns_of(Body body) {
  std::vector<double> results;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const std::clock_t begin = std::clock();
    for (int i = 0; i < kLoops; ++i) body();
    results.push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC * 1e9 / kLoops);
  }
  std::ranges::sort(results);
  return results[kRepeats / 2];
}
}  // namespace

int main() {
  std::vector<float> data(256);
  Planner planner{};
  planner.profile = {1e-5, 0, 1e9, 0, 1};
  planner.recursive_doubling_max_nbytes = 256 << 10;
  planner.chunk_nbytes = 64 << 10;
  const Buffer buffer{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
  const OperationPtr op = all_reduce(planner, {0, 2}, {buffer}, {DType::kFloat32, ReduceOp::kSum});
  const std::vector<MemberInfo> members{{std::string(16, 'a'), "a"}, {std::string(16, 'b'), "b"}};
  op->group = std::make_shared<Group>(1, 0, members, 1);
  op->out.push_back(std::make_unique<OutStream>());
  op->out.back()->nbytes = buffer.nbytes;

  Metrics metrics;
  PeerWaits* waits = metrics.peer(members[1].process);
  const double metrics_ns = ns_of([&] {
    metrics.started(*op, now_ns());
    Metrics::heard(*op, *waits, now_ns());
    metrics.left_queue(*op, now_ns());  // most small ops never queue: counted all the same
    metrics.ended(*op, now_ns());
  });
  FlightRecord record(1024);
  const double flight_ns = ns_of([&] {
    ++op->order;
    op->flight = record.add(*op);
    record.started(*op);
    record.settled(*op);
  });
  // What has been counted is used, so that no compiler leaves it out.
  const auto counted = metrics.snapshot(now_ns()).ops[op_index(op->fingerprint.kind, op->fingerprint.algorithm)];
  if (counted.count != uint64_t{kLoops} * kRepeats || record.entries().size() != 1024) return 1;
  std::printf("{\"metrics\": %.1f, \"flight_record\": %.1f}\n", metrics_ns, flight_ns);
  return 0;
}
