// Who waits for whom. A rank whose op has not moved for a heartbeat, or is near its deadline, asks all members that it
// is connected to. The question says what this rank has called, so that calls that do not fit together are found even
// where neither side sends a byte; the answer says whom the other waits for. Following the answers leads past those
// who starve to the one who is late, and it is that one whom a timeout names.
#include <algorithm>
#include <utility>
#include <vector>

#include "engine/engine.hpp"

namespace mccl {

namespace {
constexpr int kMaxUpdates = 16;  // of one question: ranks that wait in a circle would go on for ever
constexpr uint64_t kQuestion = uint64_t{1} << 40;
constexpr uint64_t kPosted = uint64_t{1} << 41;  // key and fingerprint are those of an op of the sender
constexpr uint64_t kSendsMessage = uint64_t{1} << 42;

uint64_t pack(const Wait& wait, uint64_t flags) {
  return static_cast<uint32_t>(wait.rank) | uint64_t{static_cast<uint8_t>(wait.reason)} << 32 | flags;
}

Wait unpack(uint64_t packed, int32_t world) {
  const auto rank = static_cast<int32_t>(packed);
  const auto reason = static_cast<uint8_t>(packed >> 32);
  if (rank < 0 || rank >= world || reason >= static_cast<uint8_t>(WaitReason::kCount)) return {};
  return {rank, static_cast<WaitReason>(reason)};
}

bool involves(const Operation& op, int32_t peer) {
  return std::ranges::any_of(op.steps, [&](const Step& s) { return s.send_peer == peer || s.recv_peer == peer; });
}

// Messages count for each peer: that of another one has the same key.
bool same_op(const Operation& op, const StreamKey& key, int32_t peer, bool sends_message) {
  return op.key == key && (!key.point_to_point || (op.sends_message == sends_message && involves(op, peer)));
}
}  // namespace

// All that the op lacks.
std::vector<Wait> Engine::direct_waits(const Operation& op) {
  if (!op.ready) return {{op.group->rank, WaitReason::kNotReady}};
  std::vector<Wait> waits;
  for (const InStream* stream : op.in) {
    if (stream->cursor == stream->steps.size()) continue;
    waits.push_back({stream->peer, stream->announced ? WaitReason::kNotSent : WaitReason::kNotJoined});
  }
  for (const auto& stream : op.out) {
    if (stream->cursor < stream->steps.size()) waits.push_back({stream->peer, WaitReason::kNotTaken});
  }
  return waits;
}

// The end of the chain of answers that begins with `wait`; none where the chain is a circle.
Wait Engine::follow(const Group& group, Wait wait) {
  for (int32_t hops = 0; hops <= group.world(); ++hops) {
    if (wait.rank == group.rank) return hops == 0 ? wait : Wait{};
    const WaitReport& report = group.reports[static_cast<size_t>(wait.rank)];
    if (group.asked_at == 0 || report.at < group.asked_at || report.wait.rank < 0) return wait;
    if (report.wait.rank == wait.rank) return report.wait;
    wait = report.wait;
  }
  return {};
}

// Whoever keeps the op and waits for nobody; where all wait for each other, the first that this rank waits for.
Wait Engine::culprit(const Operation& op) {
  const std::vector<Wait> waits = direct_waits(op);
  Wait silent;
  for (const Wait& direct : waits) {
    const Wait end = follow(*op.group, direct);
    if (end.rank < 0) continue;
    const WaitReport& report = op.group->reports[static_cast<size_t>(end.rank)];
    if (report.wait.rank == end.rank && report.at >= op.group->asked_at) return end;
    if (silent.rank < 0) silent = end;
  }
  if (silent.rank >= 0 || waits.empty()) return silent;
  return waits.front();
}

// What keeps this rank, if anything does: an op that a thread waits for, or else the first collective. A message that
// was posted ahead of its time keeps nobody.
const Operation* Engine::waiting_op(const Group& group) {
  const Operation* first = nullptr;
  for (const auto& [order, op] : group.in_flight) {
    if (op->awaited()) return op.get();
    if (first == nullptr && !op->key.point_to_point) first = op.get();
  }
  return first;
}

void Engine::tell(Group& group, int32_t to, const Operation* op, bool question) {
  if (to < 0 || to == group.rank) return;
  const Link& link = group.link(to, 0);
  if (!link.send || link.left()) return;
  ControlFrame frame;
  frame.header.type = FrameType::kWait;
  frame.header.key.group = group.id;
  Wait wait{group.rank, WaitReason::kNotJoined};
  uint64_t flags = question ? kQuestion : 0;
  if (op != nullptr) {
    wait = culprit(*op);
    if (!op->key.point_to_point || involves(*op, to)) {
      frame.header.key = op->key;
      frame.header.fingerprint = op->fingerprint;
      flags |= kPosted | (op->sends_message ? kSendsMessage : 0);
    }
  }
  frame.header.offset = pack(wait, flags);
  queue_control(*link.send, std::move(frame));
}

void Engine::ask(Group& group, const Operation& op) {
  group.asked_at = now_ns();
  group.updates_left = kMaxUpdates;
  group.told = culprit(op);
  for (int32_t rank = 0; rank < group.world(); ++rank) tell(group, rank, &op, true);
}

bool Engine::asked_lately(const Group& group) const {
  return group.asked_at != 0 && now_ns() - group.asked_at < options_.heartbeat_interval_ms * 1'000'000 / 4;
}

void Engine::on_wait(Connection& connection, const FrameHeader& header) {
  const auto found = groups_.find(header.key.group);
  if (found == groups_.end() || found->second->failure) return;
  Group& group = *found->second;
  const int32_t from = group.rank_of(connection.process);
  if (from < 0) return;
  group.reports[static_cast<size_t>(from)] = {unpack(header.offset, group.world()), now_ns()};
  if ((header.offset & kPosted) != 0 && !compare_calls(group, from, header)) return;

  const Operation* op = waiting_op(group);
  if ((header.offset & kQuestion) != 0) {
    if (op != nullptr && !asked_lately(group)) {
      ask(group, *op);  // which answers, too
    } else {
      tell(group, from, op, false);
    }
  }
  if (op == nullptr || group.asked_at == 0 || group.updates_left == 0) return;
  const Wait now = culprit(*op);
  if (now == std::exchange(group.told, now)) return;
  --group.updates_left;
  for (int32_t rank = 0; rank < group.world(); ++rank) tell(group, rank, op, false);
}

// What another rank has called against what was called here. False where they differ: the group has failed.
bool Engine::compare_calls(Group& group, int32_t from, const FrameHeader& header) {
  const StreamKey& key = header.key;
  const bool sends_here = (header.offset & kSendsMessage) == 0;  // the other end of a message
  for (const auto& [order, op] : group.in_flight) {
    if (!same_op(*op, key, from, sends_here)) continue;
    if (op->fingerprint == header.fingerprint) return true;
    fail_mismatch(group, *op, from, header.fingerprint);
    return false;
  }
  const ProcessId& process = group.members[static_cast<size_t>(from)].process;
  if (was_posted(key, process, sends_here)) {
    ControlFrame over;
    over.header.type = FrameType::kOver;
    over.header.key = key;
    over.header.offset = header.offset & kSendsMessage;
    if (group.link(from, 0).send) queue_control(*group.link(from, 0).send, std::move(over));
  } else if (!key.point_to_point && key.tag == 0 && group.announced.size() < 1024) {
    group.announced.try_emplace(key.sequence, AnnouncedOp{header.fingerprint, from});
  }
  return true;
}

// At submission: whether somebody has said that this op is another one.
bool Engine::matches_announced(Operation& op) {
  Group& group = *op.group;
  if (op.key.point_to_point || op.key.tag != 0) return true;
  const auto found = group.announced.find(op.ticket);
  const auto past = group.announced.upper_bound(op.ticket);
  const AnnouncedOp other = found == group.announced.end() ? AnnouncedOp{op.fingerprint, -1} : found->second;
  group.announced.erase(group.announced.begin(), past);
  if (other.fingerprint == op.fingerprint) return true;
  fail_mismatch(group, op, other.rank, other.fingerprint);
  return false;
}

void Engine::on_over(Connection& connection, const FrameHeader& header) {
  const auto found = groups_.find(header.key.group);
  if (found == groups_.end()) return;
  Group& group = *found->second;
  const int32_t from = group.rank_of(connection.process);
  for (const auto& [order, op] : group.in_flight) {
    if (!same_op(*op, header.key, from, (header.offset & kSendsMessage) != 0)) continue;
    for (InStream* stream : op->in) stream->peer_over |= stream->peer == from;
    for (const auto& stream : op->out) stream->peer_over |= stream->peer == from;
  }
}

// A peer's part of the op is over, and what is still missing has not come for a heartbeat: it never will.
bool Engine::fail_if_over(Operation& op) {
  ErrorInfo info;
  const std::string here = " rank " + std::to_string(op.group->rank);
  for (const InStream* stream : op.in) {
    if (!stream->peer_over || stream->arrived == stream->nbytes) continue;
    info.peer = stream->peer;
    info.detail = "finished its part of this op and sent " + std::to_string(stream->arrived) + " of the " +
                  std::to_string(stream->nbytes) + " bytes that" + here + " expects from it";
  }
  for (const auto& stream : op.out) {
    if (!stream->peer_over || stream->cursor == stream->steps.size()) continue;
    info.peer = stream->peer;
    info.detail = "finished its part of this op and expects less than the " + std::to_string(stream->nbytes) +
                  " bytes that" + here + " has for it";
  }
  if (info.peer < 0) return false;
  info.code = Code::kMismatch;
  info.op = to_string(op.fingerprint.kind);
  info.ticket = op.ticket;
  info.advice = "Calls, sizes and splits must agree between all pairs of ranks";
  fail_group(*op.group, std::move(info));
  return true;
}

// Sets when the op will be looked at.
void Engine::begin_watch(Operation& op) const {
  const TimePoint interval = options_.heartbeat_interval_ms * 1'000'000;
  op.watch_at = op.posted_at + interval;
  op.watched_nbytes = op.todo_nbytes;
  if (op.deadline == kNever) return;
  op.ask_at = op.deadline - std::min(interval, (op.deadline - op.posted_at) / 4);
}

// Asks about ops that do not move; returns when to look again.
TimePoint Engine::watch(TimePoint now) {
  TimePoint next = kNever;
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    bool asked = false;
    const auto in_flight = group->in_flight;
    for (const auto& [order, op] : in_flight) {
      if (group->failure) break;
      bool ask_now = op->ask_at <= now;
      if (ask_now) op->ask_at = kNever;
      if (op->watch_at <= now) {
        const bool idle = std::exchange(op->watched_nbytes, op->todo_nbytes) == op->todo_nbytes;
        if (idle && fail_if_over(*op)) break;
        ask_now |= idle;
        op->watch_at = now + options_.heartbeat_interval_ms * 1'000'000;
      }
      if (ask_now && !std::exchange(asked, true)) {
        ask(*group, *op);
      } else if (ask_now && op->key.point_to_point) {
        for (const Wait& wait : direct_waits(*op)) tell(*group, wait.rank, op.get(), false);
      }
      next = std::min({next, op->watch_at, op->ask_at});
    }
  }
  return next;
}

}  // namespace mccl
