#include "schedule/algorithms.hpp"

#include <array>
#include <utility>

#include "base/error.hpp"
#include "schedule/channels.hpp"
#include "schedule/parts.hpp"

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
            auto groups = r.group_of_rank.empty() ? even_teams(me.world) : r.group_of_rank;
            groups.resize(static_cast<size_t>(me.world));  // no teams: all are one
            return two_level_all_reduce(me, r.nbytes, r.element_nbytes, groups, r.chunk_count);
          }},
};

Schedule generate_on_channels(const Entry& entry, Member me, const AllReduceRequest& request) {
  std::vector<ChannelPart> parts;
  for (const Range range : blocks_of({0, request.nbytes}, request.element_nbytes, request.channel_count)) {
    AllReduceRequest part = request;
    part.nbytes = range.nbytes;
    parts.push_back({entry.generate(me, part), range});
  }
  return merge_channels(std::move(parts));
}
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
      return [entry, request = std::move(request)](Member me) { return generate_on_channels(entry, me, request); };
    }
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw_usage("an all-reduce by an unknown algorithm, " + algorithm, "Choose one of " + known);
}

}  // namespace mccl
