#include "schedule/algorithms.hpp"

#include <array>
#include <utility>

#include "base/error.hpp"

namespace mccl {

namespace {
struct Entry {
  const char* name;
  Schedule (*generate)(Member me, const AllReduceRequest& request);
};

// A new algorithm is one more line here.
constexpr std::array kAllReduce = {
    Entry{"recursive_doubling",
          [](Member me, const AllReduceRequest& r) { return recursive_doubling_all_reduce(me, r.nbytes); }},
    Entry{"ring", [](Member me, const AllReduceRequest& r) { return ring_all_reduce(me, r.nbytes, r.element_nbytes); }},
    Entry{"circulant",
          [](Member me, const AllReduceRequest& r) {
            return circulant_all_reduce(me, r.nbytes, r.element_nbytes, r.chunk_count);
          }},
    Entry{"two_level",
          [](Member me, const AllReduceRequest& r) {
            const std::vector<int32_t> one_switch(static_cast<size_t>(me.world), 0);
            const auto& groups = r.group_of_rank.empty() ? one_switch : r.group_of_rank;
            return two_level_all_reduce(me, r.nbytes, r.element_nbytes, groups, r.chunk_count);
          }},
};
}  // namespace

std::vector<std::string> all_reduce_algorithms() {
  std::vector<std::string> names;
  for (const Entry& entry : kAllReduce) names.emplace_back(entry.name);
  return names;
}

Generator all_reduce_generator(const std::string& algorithm, AllReduceRequest request) {
  std::string known;
  for (const Entry& entry : kAllReduce) {
    if (algorithm == entry.name) {
      return [generate = entry.generate, request = std::move(request)](Member me) { return generate(me, request); };
    }
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw_usage("an all-reduce by an unknown algorithm, " + algorithm, "Choose one of " + known);
}

}  // namespace mccl
