// Groups made from a group: split, merged, or shrunk to those who are left.
#include <algorithm>
#include <utility>

#include "torch/process_group.hpp"

namespace mccl {

ProcessGroupMCCL::BackendPtr ProcessGroupMCCL::split(const StorePtr& store, const std::vector<int>& ranks,
                                                     const OptionsPtr& opts) {
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "mccl: split: rank ", rank, " is not in this group of ", size_);
  }
  const auto mine = std::ranges::find(ranks, rank_);
  if (mine == ranks.end()) return nullptr;
  const auto timeout = opts ? opts->timeout : options_->timeout;
  return maker_(store, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()), timeout,
                opts ? opts->group_name : "");
}

ProcessGroupMCCL::BackendPtr ProcessGroupMCCL::merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                                                     const int& size) {
  return maker_(store, rank, size, opts ? opts->timeout : options_->timeout, opts ? opts->group_name : "");
}

Verdict ProcessGroupMCCL::agree_on(const std::vector<int64_t>& ranks_to_exclude) {
  RankSet named(static_cast<size_t>(size_));
  for (const int64_t rank : ranks_to_exclude) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "mccl: shrink: rank ", rank, " is not in this group of ", size_);
    TORCH_CHECK_VALUE(rank != rank_, "mccl: shrink: rank ", rank, " cannot exclude itself; those who stay call shrink");
    named[static_cast<size_t>(rank)] = true;
  }
  try {
    return engine_->agree(group_, named, deadline_after_ms(options_->timeout.count()),
                          [&](int32_t rank) { connector_(rank, 0); });
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(error.info().code != Code::kUsage, error.what());
    throw_dist_backend_error(error);
  }
}

namespace {
std::vector<int32_t> ranks_in(const RankSet& set) {
  std::vector<int32_t> ranks;
  for (size_t i = 0; i < set.size(); ++i) {
    if (set[i]) ranks.push_back(static_cast<int32_t>(i));
  }
  return ranks;
}
}  // namespace

std::vector<int32_t> ProcessGroupMCCL::agree(const std::vector<int64_t>& ranks_to_exclude) {
  return ranks_in(agree_on(ranks_to_exclude).excluded);
}

ProcessGroupMCCL::BackendPtr ProcessGroupMCCL::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                                      const OptionsPtr& opts_override) {
  TORCH_CHECK_TYPE(!opts_override, "the backend 'mccl' takes no pg_options; set MCCL_* variables instead");
  const std::vector<int32_t> named(ranks_to_exclude.begin(), ranks_to_exclude.end());
  if (auto prepared = regrouper_(named, false)) return prepared;
  constexpr int kAbort = 1;  // torch's SHRINK_ABORT
  if ((shrink_flags & kAbort) != 0) {
    ErrorInfo info;
    info.code = Code::kAborted;
    info.peer = rank_;
    info.detail = "aborted the group in order to shrink it";
    info.advice = "All who stay must call shrink";
    engine_->fail(group_, std::move(info));
  }
  const Verdict verdict = agree_on(ranks_to_exclude);
  if (!verdict.unanimous) {
    ErrorInfo info;
    info.code = Code::kMismatch;
    info.rank = rank_;
    info.detail = "the ranks did not all name the same ones to exclude, or others were lost; they agreed on " +
                  describe(verdict.excluded);
    info.advice = "Call shrink_group again on all who stay with just these, or mccl_core.shrink(), which needs no list";
    throw_dist_backend_error(Error(std::move(info)));
  }
  return regrouper_(ranks_in(verdict.excluded), true);
}

}  // namespace mccl
