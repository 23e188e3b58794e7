// Ops that take longer than their timeout, and whom their error names.
#include <algorithm>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

ErrorInfo Engine::describe_wait(const Operation& op) const {
  ErrorInfo info;
  info.code = Code::kTimeout;
  info.op = to_string(op.fingerprint.kind);
  info.ticket = op.ticket;
  if (!op.ready) {
    info.peer = op.group->rank;
    info.detail = "has not computed this op's tensor in time";
    info.advice =
        "See what keeps its device busy; for slow work raise the timeout of init_process_group or new_group. " +
        std::string(kRestart);
    return info;
  }
  if (op.unmatched) {
    info.detail = "no rank has sent a message with the tag of this receive from any source";
    info.advice = "See the logs of the ranks that should have; for slow work raise the timeout of the group. " +
                  std::string(kRestart);
    return info;
  }
  const std::vector<Wait> waits = direct_waits(op);
  const Wait wait = culprit(op);
  info.peer = wait.rank;
  switch (wait.reason) {
    case WaitReason::kNotJoined: info.detail = "has not joined this op in time"; break;
    case WaitReason::kNotSent: info.detail = "has not sent all its data in time"; break;
    case WaitReason::kNotTaken: info.detail = "has not taken the data in time"; break;
    case WaitReason::kNotReady: info.detail = "has not computed this op's tensor in time"; break;
    case WaitReason::kCount: break;
  }
  const auto direct = [&](const Wait& own) { return own.rank == wait.rank; };
  if (!waits.empty() && std::ranges::none_of(waits, direct)) {
    info.detail += "; rank " + std::to_string(waits.front().rank) + " waits for it in turn";
  }
  info.advice = "See that rank's log; for slow work raise the timeout of init_process_group or new_group. " +
                std::string(kRestart);
  return info;
}

// Fails what is past its deadline; returns the next deadline.
TimePoint Engine::expire(TimePoint now) {
  TimePoint next = kNever;
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    for (const auto& [order, op] : group->in_flight) {
      if (op->deadline <= now) {
        if (!fail_if_over(*op)) fail_group(*group, describe_wait(*op));
        break;
      }
      next = std::min(next, op->deadline);
    }
  }
  return next;
}

}  // namespace mccl
