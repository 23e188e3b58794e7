// How the members of a group agree on who leaves it (agreement.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace mccl {

using RankSet = std::vector<bool>;  // by rank

struct Verdict {
  RankSet excluded;
  bool unanimous = false;  // all who stay had named just these
};

// One rank's part in it, and what it knows of the others. Several agreements may follow each other in a group.
struct Agreement {
  struct Vote {
    bool cast = false;
    RankSet named;         // by that rank's caller
    uint64_t adopted = 0;  // ballot
  };

  uint32_t round = 0;
  bool started = false;   // this rank's caller takes part
  RankSet named;          // by the caller
  RankSet excluded;       // by anybody, as far as is known, and all who are lost
  uint64_t adopted = 0;   // the highest ballot that this rank has said yes to
  uint64_t proposed = 0;  // this rank's own, as coordinator
  RankSet proposal;
  std::vector<Vote> votes;  // by rank
  std::optional<Verdict> verdict;
  std::map<uint32_t, Verdict> verdicts;  // of this and earlier rounds: others may begin the next one first
};

// "2, 5"
std::string describe(const RankSet& set);

}  // namespace mccl
