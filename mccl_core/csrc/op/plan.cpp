#include "op/plan.hpp"

#include <algorithm>
#include <bit>
#include <map>

#include "base/error.hpp"
#include "schedule/algorithms.hpp"

namespace mccl {

namespace {
constexpr uint64_t kMostChunks = 16;
// A circulant reduce-scatter works on a copy of its input: worth it only where latency rules.
constexpr uint64_t kMaxCopied_nbytes = 1u << 20;

double as_double(uint64_t value) { return static_cast<double>(value); }
int32_t rounds(int32_t world) { return static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(world - 1))); }

// What one rank pays; `n` bytes, `world` ranks.
struct Cost {
  const LinkProfile link;

  double message(double nbytes, double nbytes_per_s) const {
    return link.latency_s + link.step_s + nbytes / nbytes_per_s;
  }
  // A step of a ring overlaps with the latency of the one before.
  double ring_phase(int32_t world, double block) const {
    return (world - 1) * (std::max(link.latency_s, block / link.nbytes_per_s) + link.step_s);
  }
  double circulant_phase(int32_t world, double block, double nbytes_per_s, int32_t chunks) const {
    const double own = link.latency_s + chunks * link.step_s;
    return rounds(world) * own + (world - 1) * block / (nbytes_per_s * link.circulant_share);
  }
  double recursive_doubling(int32_t world, double n) const {
    const auto power = std::bit_floor(static_cast<uint32_t>(world));
    const int32_t count = std::bit_width(power) - 1 + (static_cast<int32_t>(power) == world ? 0 : 2);
    return count * message(n, link.nbytes_per_s);
  }
  // Chunks of a ring follow each other, so that their blocks have to outlast the latency; what is exchanged across the
  // groups meanwhile hides all but one chunk's share of the latencies. The smallest group decides on the size of a
  // shard; each place in a larger one that has none costs its chunks a hop's latency.
  double two_level(const std::map<int32_t, int32_t>& sizes, double n, int32_t chunks) const {
    int32_t smallest = sizes.begin()->second, largest = smallest;
    for (const auto& [group, size] : sizes) smallest = std::min(smallest, size), largest = std::max(largest, size);
    const auto groups = static_cast<int32_t>(sizes.size());
    const double shard = n / smallest;
    double rate = link.nbytes_per_s;
    if (link.uplink_nbytes_per_s > 0) rate = std::min(rate, link.uplink_nbytes_per_s / smallest);
    const double ring =
        chunks * (ring_phase(smallest, shard / chunks) + (largest - smallest) * (link.latency_s + link.step_s));
    const double waiting = (rounds(groups) + 1) * link.latency_s / chunks + rounds(groups) * chunks * link.step_s;
    return 2 * (ring + waiting + (groups - 1) * shard / groups / (rate * link.circulant_share));
  }
  Plan fastest_two_level(const std::map<int32_t, int32_t>& sizes, double n, int32_t most_chunks) const {
    Plan best{Algorithm::kTwoLevel, 1, two_level(sizes, n, 1)};
    for (int32_t chunks = 2; chunks <= most_chunks; ++chunks) {
      const double seconds = two_level(sizes, n, chunks);
      if (seconds < best.predicted_s) best = {Algorithm::kTwoLevel, chunks, seconds};
    }
    return best;
  }
};
}  // namespace

std::optional<Algorithm> algorithm_of(const std::string& name) {
  if (name == "auto") return std::nullopt;
  for (uint8_t i = 1; i < static_cast<uint8_t>(Algorithm::kCount); ++i) {
    if (name == to_string(static_cast<Algorithm>(i))) return static_cast<Algorithm>(i);
  }
  throw_usage("no algorithm is called " + name);
}

// Each moves its bytes beside the others'; the steps of all take processor time, and all share an uplink.
LinkProfile Planner::share_of_link(int32_t channels) const {
  LinkProfile share = profile;
  share.step_s *= channels;
  share.uplink_nbytes_per_s /= channels;
  return share;
}

void Planner::add_one_phase(std::vector<Plan>& plans, OpKind kind, int32_t world, uint64_t nbytes,
                            int32_t channels) const {
  const Cost cost{share_of_link(channels)};
  const double n = as_double(nbytes) / channels;
  plans.push_back({Algorithm::kRing, 1, cost.ring_phase(world, n) + profile.latency_s, channels});
  const bool copied = kind == OpKind::kReduceScatter;
  if (!copied || (channels == 1 && nbytes * static_cast<uint64_t>(world) <= kMaxCopied_nbytes)) {
    const double circulant = cost.circulant_phase(world, n, profile.nbytes_per_s, 1);
    plans.push_back({Algorithm::kCirculant, 1, circulant, channels});
  }
}

void Planner::add_all_reduces(std::vector<Plan>& plans, int32_t world, uint64_t nbytes, int32_t channels) const {
  const Cost cost{share_of_link(channels)};
  const double n = as_double(nbytes) / channels;
  const uint64_t chunk = chunk_nbytes * static_cast<uint64_t>(channels);
  const auto chunks = static_cast<int32_t>(std::clamp<uint64_t>((nbytes + chunk - 1) / chunk, 1, kMostChunks));
  double ring = 2 * cost.ring_phase(world, n / world) + profile.latency_s;
  double circulant = 2 * cost.circulant_phase(world, n / world, profile.nbytes_per_s, chunks);
  std::map<int32_t, int32_t> sizes;
  for (const int32_t group : group_of_rank) ++sizes[group];
  if (sizes.size() > 1 && profile.uplink_nbytes_per_s > 0) {
    // Of a circulant nearly all messages cross between switches. A ring in the order of ranks crosses as often as
    // neighbours have different switches.
    int32_t largest = 0;
    for (const auto& [group, size] : sizes) largest = std::max(largest, size);
    int32_t crossings = 0;
    for (size_t r = 0; r < group_of_rank.size(); ++r) {
      crossings += group_of_rank[r] != group_of_rank[(r + 1) % group_of_rank.size()];
    }
    const double bytes = 2.0 * (world - 1) / world * as_double(nbytes);
    circulant = std::max(circulant, bytes * largest / profile.uplink_nbytes_per_s);
    ring = std::max(ring, bytes * crossings / static_cast<double>(sizes.size()) / profile.uplink_nbytes_per_s);
  }
  plans.push_back({Algorithm::kRing, 1, ring, channels});
  if (channels == 1 && nbytes <= recursive_doubling_max_nbytes) {
    plans.push_back({Algorithm::kRecursiveDoubling, 1, cost.recursive_doubling(world, n)});
  }
  if (world > 2)
    plans.push_back({Algorithm::kCirculant, chunks, circulant, channels});  // with two ranks it is the ring
  if (group_of_rank.empty()) {
    for (const int32_t team : even_teams(world)) ++sizes[team];
  }
  if (sizes.size() > 1) {
    plans.push_back(cost.fastest_two_level(sizes, n, chunks));
    plans.back().channel_count = channels;
  }
}

std::vector<Plan> Planner::plans(OpKind kind, int32_t world, uint64_t nbytes) const {
  if (world < 2 || (kind != OpKind::kAllReduce && kind != OpKind::kAllGather && kind != OpKind::kReduceScatter)) {
    return {{}};
  }
  const bool all_reduce = kind == OpKind::kAllReduce;
  const uint64_t whole_nbytes = all_reduce ? nbytes : nbytes * static_cast<uint64_t>(world);
  const uint64_t worth = whole_nbytes / std::max<uint64_t>(channel_nbytes, 1);
  const auto most = static_cast<int32_t>(std::clamp<uint64_t>(worth, 1, static_cast<uint64_t>(channels)));
  std::vector<Plan> plans;
  for (const int32_t count : most > 1 ? std::vector{1, most} : std::vector{1}) {
    if (all_reduce) add_all_reduces(plans, world, nbytes, count);
    if (!all_reduce) add_one_phase(plans, kind, world, nbytes, count);
  }
  std::stable_sort(plans.begin(), plans.end(),
                   [](const Plan& a, const Plan& b) { return a.predicted_s < b.predicted_s; });
  return plans;
}

Plan Planner::plan(OpKind kind, int32_t world, uint64_t nbytes) const {
  const std::vector<Plan> all = plans(kind, world, nbytes);
  if (kind == OpKind::kAllReduce && all_reduce_algorithm && world > 1) {
    for (const Plan& plan : all) {
      if (plan.algorithm == *all_reduce_algorithm) return plan;
    }
  }
  return all.front();
}

Schedule Planner::all_reduce(const Plan& plan, Member me, uint64_t nbytes, uint64_t element_nbytes) const {
  if (plan.algorithm == Algorithm::kOnlyOne) return {};  // a world of one
  return all_reduce_generator(to_string(plan.algorithm),
                              {nbytes, element_nbytes, plan.chunk_count, group_of_rank, plan.channel_count})(me);
}

}  // namespace mccl
