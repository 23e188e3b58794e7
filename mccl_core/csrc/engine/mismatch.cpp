// Calls that do not fit together: what a peer believes an op to be against what was posted here.
#include <algorithm>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
constexpr const char* kMatchOps =
    "All ranks of a group must call the same collectives, with the same sizes and dtypes, in the same order";
constexpr const char* kMatchPlans =
    "All ranks of a group must have the same link profile (MCCL_LINK_PROFILE), MCCL_ALLREDUCE_ALGO and MCCL_CHANNELS";

// What to do about two ops that differ: the user's call, or only how it is carried out?
const char* match_advice(Fingerprint theirs, const Fingerprint& ours) {
  theirs.algorithm = ours.algorithm;
  theirs.chunk_count = ours.chunk_count;
  theirs.channel_count = ours.channel_count;
  return theirs == ours ? kMatchPlans : kMatchOps;
}
}  // namespace

// Compares what the sender believes with what was posted here. On a mismatch the group fails.
bool Engine::matches(InStream& stream) {
  const Operation& op = *stream.op;
  Fingerprint expected = op.fingerprint;
  if (expected.kind == OpKind::kAllToAll) expected.nbytes = stream.nbytes;  // the block that this peer sends
  if (stream.fingerprint == expected) return true;
  fail_mismatch(*op.group, op, stream.peer, stream.fingerprint);
  return false;
}

void Engine::fail_mismatch(Group& group, const Operation& op, int32_t peer, const Fingerprint& theirs) {
  ErrorInfo info;
  info.code = Code::kMismatch;
  info.op = to_string(op.fingerprint.kind);
  info.ticket = op.ticket;
  info.peer = peer;
  info.detail = "called " + theirs.describe() + " where rank " + std::to_string(group.rank) + " called " +
                op.fingerprint.describe();
  info.advice = match_advice(theirs, op.fingerprint);
  fail_group(group, std::move(info));
}

void Engine::fail_unexpected(Group& group, const Connection& connection, const StreamKey& key,
                             const Fingerprint& fingerprint) {
  ErrorInfo info;
  info.code = Code::kMismatch;
  info.op = to_string(fingerprint.kind);
  info.ticket = key.sequence;
  info.peer = group.rank_of(connection.process);
  const std::string here = " where rank " + std::to_string(group.rank);
  info.detail = "sends " + fingerprint.describe() + here + " expects nothing from it";
  info.advice = "Calls, sizes and splits must agree between all pairs of ranks";
  for (const auto& [order, op] : group.in_flight) {
    const bool same = op->fingerprint == fingerprint || fingerprint.kind == OpKind::kAllToAll;
    if (key.point_to_point || op->key != key || same) continue;
    info.op = to_string(op->fingerprint.kind);
    info.detail = "called " + fingerprint.describe() + here + " called " + op->fingerprint.describe();
    info.advice = match_advice(fingerprint, op->fingerprint);
  }
  fail_group(group, std::move(info));
}

// False where bytes have come for this op from a rank that it expects none from: the group has failed.
bool Engine::claims_all(Group& group, const StreamKey& key, const PointToPoint* point_to_point) {
  if (point_to_point != nullptr && point_to_point->sends) return true;
  for (size_t i = 0; i < group.links.size(); ++i) {
    const size_t rank = i % group.members.size();
    if (point_to_point != nullptr && static_cast<size_t>(point_to_point->peer) != rank) continue;
    const ConnectionPtr& connection = group.links[i].receive;
    if (!connection) continue;
    const auto found = connection->in.find(key);
    if (found == connection->in.end() || found->second.op != nullptr) continue;
    fail_unexpected(group, *connection, key, found->second.fingerprint);
    return false;
  }
  return true;
}

// A grant for an op that is over already says nothing new.
bool Engine::was_posted(const StreamKey& key, const ProcessId& process, bool sending) const {
  const auto found = groups_.find(key.group);
  if (found == groups_.end()) return false;
  const Group& group = *found->second;
  if (!key.point_to_point && key.tag != 0) return std::ranges::find(group.nested, key) != group.nested.end();
  if (!key.point_to_point) return key.sequence < group.next_ticket;
  for (size_t rank = 0; rank < group.members.size(); ++rank) {
    if (group.members[rank].process != process) continue;
    StreamKey counter = key;
    counter.sequence = rank;
    const auto& sequences = sending ? group.next_sent : group.next_received;
    const auto next = sequences.find(counter);
    return next != sequences.end() && key.sequence <= next->second;
  }
  return false;
}

// Bytes for an op that is under way or over here and expects none from there: the ranks disagree, and the group fails.
bool Engine::unexpected(Connection& connection) {
  const FrameHeader& header = connection.header;
  if (connection.in.contains(header.key) || !was_posted(header.key, connection.process, false)) return false;
  fail_unexpected(*groups_.at(header.key.group), connection, header.key, header.fingerprint);
  return true;
}

}  // namespace mccl
