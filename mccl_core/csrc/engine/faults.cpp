// What goes wrong, and how all ranks of a group come to know it.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/engine.hpp"
#include "io/socket.hpp"

namespace mccl {

namespace {
constexpr const char* kRestart =
    "All ops in flight of this group end with this error; destroy the group and make a new one";
constexpr const char* kDied = "Its process has probably died: see its log. ";
constexpr const char* kMatchOps =
    "All ranks of a group must call the same collectives, with the same sizes and dtypes, in the same order";
constexpr const char* kMatchPlans =
    "All ranks of a group must have the same link profile (MCCL_LINK_PROFILE), MCCL_ALLREDUCE_ALGO and MCCL_CHANNELS";
constexpr const char* kMatchCalls =
    "See that rank's log; all ranks must call the same collectives before they destroy the group";

// Payload of an error frame: code, culprit's rank, then "host\0detail\0advice". The header has the op and its ticket.
std::string encode_error(const ErrorInfo& info) {
  std::string payload(1, static_cast<char>(info.code));
  const int32_t culprit = info.peer >= 0 ? info.peer : info.rank;
  payload.append(reinterpret_cast<const char*>(&culprit), sizeof culprit);
  payload += info.peer_host;
  payload += '\0';
  payload += info.detail;
  payload += '\0';
  payload += info.advice;
  if (payload.size() > kMaxErrorNbytes) payload.resize(kMaxErrorNbytes);
  return payload;
}

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

// The rest of a failed op's payload is copied: its memory goes back to the caller, yet the frame has to be finished, as
// the connection may serve other groups.
void Engine::orphan_frame(Connection& connection) {
  OutFrame& frame = connection.frame;
  std::vector<std::byte> rest(frame.payload.nbytes - frame.payload_sent);
  uint64_t done = 0;
  while (done < rest.size()) {
    const Buffer part = frame.op->buffers.front({frame.payload.offset + frame.payload_sent + done, rest.size() - done});
    std::copy_n(part.data, part.nbytes, rest.data() + done);
    done += part.nbytes;
  }
  frame.orphan = std::move(rest);
  frame.payload = {};
  frame.payload_sent = 0;
  frame.stream = nullptr;
  frame.op.reset();
}

void Engine::fail_operation(const std::shared_ptr<Operation>& op, std::shared_ptr<const Error> error) {
  if (op->finished) return;
  op->failure = std::move(error);
  flight_.failed(*op, culprit(*op).rank);
  for (const auto& stream : op->out) {
    Connection& connection = *stream->connection;
    if (connection.frame.op == op && !connection.tx_busy) orphan_frame(connection);
  }
  leave_tables(*op);
  if (op->pins == 0) settle(op);
}

void Engine::fail_group(Group& group, ErrorInfo info) {
  if (group.failure) return;
  info.rank = group.rank;
  if (info.peer >= 0 && info.peer_host.empty()) info.peer_host = group.members[static_cast<size_t>(info.peer)].host;
  if (info.advice.empty()) info.advice = std::string(info.code == Code::kPeerLost ? kDied : "") + kRestart;
  name_op(group, info);
  fail_group(group, std::make_shared<const Error>(std::move(info)));
}

void Engine::fail(const std::shared_ptr<Group>& group, ErrorInfo info) {
  if (abandoned_) return;
  Lock lock(*this);
  if (!group->closed) fail_group(*group, std::move(info));
}

std::shared_ptr<const Error> Engine::last_failure() const {
  const std::lock_guard guard(mutex_);
  return last_failure_;
}

std::shared_ptr<const Error> Engine::open_failure() const {
  const std::lock_guard guard(mutex_);
  for (const auto& [id, group] : groups_) {
    if (group->failure) return group->failure;
  }
  return nullptr;
}

// An error that concerns no op in particular ends the oldest one.
void Engine::name_op(const Group& group, ErrorInfo& info) {
  if (!info.op.empty() || group.in_flight.empty()) return;
  const Operation& op = *group.in_flight.begin()->second;
  info.op = to_string(op.fingerprint.kind);
  info.ticket = op.ticket;
}

// The group failed while this rank had nothing in flight: the call that hears of it is the one that the error names.
void Engine::name_call(Group& group, const Operation& op, const PointToPoint* point_to_point) {
  ErrorInfo info = group.failure->info();
  if (!info.op.empty()) return;
  info.op = to_string(op.fingerprint.kind);
  info.ticket = group.next_ticket;
  if (point_to_point != nullptr) {
    const auto& next = point_to_point->sends ? group.next_sent : group.next_received;
    const StreamKey counter{group.id, static_cast<uint64_t>(point_to_point->peer), point_to_point->tag, true};
    const auto found = next.find(counter);
    info.ticket = found == next.end() ? 1 : found->second + 1;
  }
  group.failure = std::make_shared<const Error>(std::move(info));
  last_failure_ = group.failure;
}

// Idempotent: the first error is the one that all see, and it is passed on once.
void Engine::fail_group(Group& group, std::shared_ptr<const Error> error) {
  if (group.failure) return;
  ControlFrame notice;
  notice.header.type = FrameType::kError;
  notice.header.key.group = group.id;
  if (error->info().ticket != 0) {
    notice.header.key.sequence = error->info().ticket;
    notice.header.fingerprint.kind = kind_of(error->info().op);
  }
  notice.payload = encode_error(error->info());
  for (const Link& link : group.links) {  // on all channels: each must have it before its end
    if (link.send && !link.left()) queue_control(*link.send, notice);
  }
  end_group(group, std::move(error));
}

// On this rank alone.
void Engine::end_group(Group& group, std::shared_ptr<const Error> error) {
  group.failure = error;
  last_failure_ = error;
  const auto in_flight = group.in_flight;
  for (const auto& [order, op] : in_flight) fail_operation(op, error);
  purge(group.id);
}

// Forgets everything about a group's streams that no op here owns.
void Engine::purge(uint64_t group) {
  for (const auto& [id, connection] : connections_) {
    std::erase_if(connection->early_grants, [&](const auto& entry) { return entry.first.group == group; });
    for (auto it = connection->in.begin(); it != connection->in.end();) {
      InStream& stream = it->second;
      if (stream.key.group != group) {
        ++it;
        continue;
      }
      if (connection->rx_in == &stream) connection->rx_in = nullptr;
      for (const Parked& block : stream.parked) release(*connection, block);
      if (stream.op == nullptr) --connection->unposted;
      it = connection->in.erase(it);
    }
  }
}

void Engine::close_group(const std::shared_ptr<Group>& group, std::shared_ptr<const Error> error) {
  if (abandoned_) return;
  Lock lock(*this);
  if (group->closed) return;
  if (error) fail_group(*group, std::move(error));
  if (!group->failure) {
    ErrorInfo info;
    info.code = Code::kAborted;
    info.rank = group->rank;
    info.detail = "the group was destroyed while this op was in flight";
    info.advice = "Wait for all work before destroy_process_group()";
    const auto aborted = std::make_shared<const Error>(std::move(info));
    const auto in_flight = group->in_flight;
    for (const auto& [order, op] : in_flight) fail_operation(op, aborted);
  }
  // After an error, too: those who shrink the group do not wait for this rank.
  for (const Link& link : group->links) {
    ControlFrame goodbye;
    goodbye.header.type = FrameType::kGoodbye;
    goodbye.header.key.group = group->id;
    if (link.send) queue_control(*link.send, goodbye);
    if (link.receive && link.receive != link.send) queue_control(*link.receive, goodbye);
  }
  keep_verdict(*group);
  purge(group->id);
  group->closed = true;
  groups_.erase(group->id);
  closed_groups_.insert(group->id);
  notices_.erase(group->id);
}

// Peers of the op that are gone though it needs them: it has bytes for them, or lacks bytes from them. One that has
// sent all its bytes before it left is not missed.
std::vector<int32_t> Engine::departed_peers(const Operation& op) {
  std::vector<int32_t> peers;
  if (op.unmatched) {  // any other rank may still send
    for (int32_t rank = 0; rank < op.group->world(); ++rank) {
      const Link& link = op.group->link(rank, 0);
      if (rank == op.group->rank) continue;
      if (!link.receive || !(link.receive_closed || link.receive->lost)) return {};
      peers.push_back(rank);
    }
    return peers;
  }
  for (const auto& stream : op.out) {
    // Bytes that a thread is just handing to the kernel count as sent: the peer may have them and be gone already.
    const Connection& connection = *stream->connection;
    const bool stuck = connection.frame.stream == stream.get() && !connection.tx_busy;
    const bool gone = op.group->link(stream->peer, stream->channel).send_closed || connection.lost;
    if ((stream->offset < stream->nbytes || stuck) && gone) peers.push_back(stream->peer);
  }
  for (const InStream* stream : op.in) {
    const bool gone = op.group->link(stream->peer, stream->channel).receive_closed || stream->connection->lost;
    if (stream->arrived < stream->nbytes && gone) peers.push_back(stream->peer);
  }
  return peers;
}

// Where a peer has left that the op needs, the group fails: the others wait for this op, too.
int32_t Engine::fail_departed(Group& group, const Operation& op) {
  const auto departed = departed_peers(op);
  if (departed.empty()) return -1;
  fail_group(group, std::make_shared<const Error>(peer_left(group, op, departed.front())));
  return departed.front();
}

Error Engine::peer_left(const Group& group, const Operation& op, int32_t peer) {
  ErrorInfo info;
  info.code = Code::kPeerLeft;
  info.rank = group.rank;
  info.op = to_string(op.fingerprint.kind);
  info.ticket = op.ticket;
  info.peer = peer;
  info.peer_host = group.members[static_cast<size_t>(peer)].host;
  info.detail = "destroyed the group or ended before this op";
  info.advice = kMatchCalls;
  return Error(std::move(info));
}

// A peer may leave a group, or see it fail, before this process has made it.
void Engine::keep_notice(Connection& connection, const FrameHeader& header, const std::byte* payload) {
  constexpr size_t kMostGroups = 1024;
  constexpr std::ptrdiff_t kMostRounds = 16;  // of an agreement
  const auto found = connections_.find(connection.id);
  if (closed_groups_.contains(header.key.group) || found == connections_.end() || notices_.size() >= kMostGroups)
    return;
  auto& notices = notices_[header.key.group];
  const auto alike = std::ranges::count_if(notices, [&](const Notice& notice) {
    return notice.connection.get() == &connection && notice.header.type == header.type;
  });
  if (alike >= (header.type == FrameType::kAgree ? kMostRounds : 1)) return;
  notices.push_back({found->second, header, {payload, payload + header.payload_nbytes}});
}

void Engine::replay_notices(uint64_t group) {
  const auto found = notices_.find(group);
  if (found == notices_.end()) return;
  const std::vector<Notice> notices = std::move(found->second);
  notices_.erase(found);
  for (const Notice& notice : notices) {
    if (notice.header.type == FrameType::kGoodbye) {
      on_goodbye(*notice.connection, notice.header);
    } else if (notice.header.type == FrameType::kAgree) {
      on_agree(*notice.connection, notice.header, notice.payload.data());
    } else {
      on_error_frame(*notice.connection, notice.header, notice.payload.data());
    }
  }
}

void Engine::on_goodbye(Connection& connection, const FrameHeader& header) {
  const auto found = groups_.find(header.key.group);
  if (found == groups_.end()) {
    keep_notice(connection, header, nullptr);
    return;
  }
  Group& group = *found->second;
  for (int32_t rank = 0; rank < group.world(); ++rank) {
    const auto index = static_cast<size_t>(rank);
    if (group.members[index].process != connection.process) continue;
    for (int32_t channel = 0; channel < group.channels; ++channel) {
      Link& link = group.link(rank, channel);
      if (link.send.get() == &connection) link.send_closed = true;
      if (link.receive.get() == &connection) link.receive_closed = true;
    }
    for (const auto& [order, op] : group.in_flight) {
      if (fail_departed(group, *op) >= 0) break;
    }
  }
  advance_agreement(group, false);
}

void Engine::on_error_frame(Connection& connection, const FrameHeader& header, const std::byte* payload) {
  const auto found = groups_.find(header.key.group);
  if (header.payload_nbytes < 1 + sizeof(int32_t)) return;
  if (found == groups_.end()) {
    keep_notice(connection, header, payload);
    return;
  }
  Group& group = *found->second;
  ErrorInfo info;
  info.code = static_cast<Code>(std::min(static_cast<uint8_t>(payload[0]), static_cast<uint8_t>(Code::kExcluded)));
  int32_t culprit;
  std::memcpy(&culprit, payload + 1, sizeof culprit);
  info.peer = culprit >= 0 && culprit < group.world() ? culprit : -1;
  const std::string text(reinterpret_cast<const char*>(payload) + 1 + sizeof culprit,
                         header.payload_nbytes - 1 - sizeof culprit);
  const size_t split = std::min(text.find('\0'), text.size());
  info.peer_host = printable(text.substr(0, split));
  const size_t second = std::min(text.find('\0', split + 1), text.size());
  info.detail = split < text.size() ? printable(text.substr(split + 1, second - split - 1)) : "";
  info.advice = second < text.size() ? printable(text.substr(second + 1)) : "";
  if (header.key.sequence != 0) {
    info.op = to_string(header.fingerprint.kind);
    info.ticket = header.key.sequence;
  }
  const int32_t from = group.rank_of(connection.process);
  if (from != info.peer && info.detail.find("(reported by") == std::string::npos) {
    info.detail += " (reported by rank " + std::to_string(from) + ")";
  }
  fail_group(group, std::move(info));
}

void Engine::connection_lost(const ConnectionPtr& connection, std::string detail, int sys_errno, Code code) {
  if (connection->lost) return;
  connection->lost = true;
  connection->channel.receive_poller.remove(connection->fd.get());
  if (connection->tx_blocked) connection->channel.transmit_poller.remove(connection->fd.get());
  connections_.erase(connection->id);
  if (stopping_ && connections_.empty()) wake_receivers();
  const auto current = by_process_.find({connection->process, connection->lane});
  if (current != by_process_.end() && current->second == connection) by_process_.erase(current);

  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    for (int32_t rank = 0; rank < group->world(); ++rank) {
      const auto index = static_cast<size_t>(rank);
      if (group->members[index].process != connection->process) continue;
      const int32_t channel = channel_of_lane(connection->lane);
      const Link link = channel < group->channels ? group->link(rank, channel) : Link{};
      const bool sends = link.send == connection;
      const bool receives = link.receive == connection;
      if (!sends && !receives && group->link(rank, 0).complete()) continue;  // the group's own connection will tell
      if ((sends && link.send_closed) || (receives && link.receive_closed)) continue;
      ErrorInfo info;
      info.code = code;
      info.peer = rank;
      info.detail = detail;
      info.sys_errno = sys_errno;
      fail_group(*group, std::move(info));
    }
    advance_agreement(*group, false);
  }
  shut_down(connection->fd.get());
}

// At shutdown: the sending half of a connection is closed once nothing is left to send.
void Engine::half_close_idle() {
  for (const auto& [id, connection] : connections_) {
    if (!connection->tx_busy && !connection->tx_queued && !connection->tx_blocked && connection->frame.idle() &&
        connection->control.empty() && !std::exchange(connection->tx_broken, true)) {
      half_close(connection->fd.get());
    }
  }
}

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
