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
constexpr const char* kMatchCalls =
    "See that rank's log; all ranks must call the same collectives before they destroy the group";

// Payload of an error frame: code, culprit's rank, then "host\0detail".
std::string encode_error(const ErrorInfo& info) {
  std::string payload(1, static_cast<char>(info.code));
  const int32_t culprit = info.peer >= 0 ? info.peer : info.rank;
  payload.append(reinterpret_cast<const char*>(&culprit), sizeof culprit);
  payload += info.peer_host;
  payload += '\0';
  payload += info.detail;
  if (payload.size() > kMaxErrorNbytes) payload.resize(kMaxErrorNbytes);
  return payload;
}
}  // namespace

// Compares what the sender believes with what was posted here. On a mismatch the group fails.
bool Engine::matches(InStream& stream) {
  const Operation& op = *stream.op;
  Fingerprint expected = op.fingerprint;
  if (expected.kind == OpKind::kAllToAll) expected.nbytes = stream.nbytes;  // the block that this peer sends
  if (stream.fingerprint == expected) return true;
  ErrorInfo info;
  info.code = Code::kMismatch;
  info.op = to_string(op.fingerprint.kind);
  info.ticket = op.ticket;
  info.peer = stream.peer;
  info.peer_host = stream.connection->host;
  info.detail = "called " + stream.fingerprint.describe() + " where rank " + std::to_string(op.group->rank) +
                " called " + op.fingerprint.describe();
  info.advice =
      "All ranks of a group must call the same collectives, with the same sizes and dtypes, in the same order";
  fail_group(*op.group, std::move(info));
  return false;
}

void Engine::fail_unexpected(Group& group, const Connection& connection, const StreamKey& key,
                             const Fingerprint& fingerprint) {
  ErrorInfo info;
  info.code = Code::kMismatch;
  info.op = to_string(fingerprint.kind);
  info.ticket = key.sequence;
  for (size_t rank = 0; rank < group.members.size(); ++rank) {
    if (group.members[rank].process == connection.process) info.peer = static_cast<int32_t>(rank);
  }
  const std::string here = " where rank " + std::to_string(group.rank);
  info.detail = "sends " + fingerprint.describe() + here + " expects nothing from it";
  info.advice = "Calls, sizes and splits must agree between all pairs of ranks";
  for (const auto& [order, op] : group.in_flight) {
    const bool same = op->fingerprint == fingerprint || fingerprint.kind == OpKind::kAllToAll;
    if (key.point_to_point || op->ticket != key.sequence || same) continue;
    info.detail = "called " + fingerprint.describe() + here + " called " + op->fingerprint.describe();
  }
  fail_group(group, std::move(info));
}

// False where bytes have come for this op from a rank that it expects none from: the group has failed.
bool Engine::claims_all(Group& group, const StreamKey& key, const PointToPoint* point_to_point) {
  if (point_to_point != nullptr && point_to_point->sends) return true;
  for (size_t rank = 0; rank < group.links.size(); ++rank) {
    if (point_to_point != nullptr && static_cast<size_t>(point_to_point->peer) != rank) continue;
    const ConnectionPtr& connection = group.links[rank].receive;
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
  fail_group(group, std::make_shared<const Error>(std::move(info)));
}

// Idempotent: the first error is the one that all see, and it is passed on once.
void Engine::fail_group(Group& group, std::shared_ptr<const Error> error) {
  if (group.failure) return;
  group.failure = error;
  ControlFrame notice;
  notice.header.type = FrameType::kError;
  notice.header.key.group = group.id;
  notice.payload = encode_error(error->info());
  for (int32_t rank = 0; rank < group.world(); ++rank) {
    const auto index = static_cast<size_t>(rank);
    if (group.links[index].send && !group.links[index].left()) queue_control(*group.links[index].send, notice);
  }
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
  const bool healthy = !group->failure;
  if (healthy) {
    ErrorInfo info;
    info.code = Code::kAborted;
    info.rank = group->rank;
    info.detail = "the group was destroyed while this op was in flight";
    info.advice = "Wait for all work before destroy_process_group()";
    const auto aborted = std::make_shared<const Error>(std::move(info));
    const auto in_flight = group->in_flight;
    for (const auto& [order, op] : in_flight) fail_operation(op, aborted);
    for (int32_t rank = 0; rank < group->world(); ++rank) {
      const Link& link = group->links[static_cast<size_t>(rank)];
      ControlFrame goodbye;
      goodbye.header.type = FrameType::kGoodbye;
      goodbye.header.key.group = group->id;
      if (link.send) queue_control(*link.send, goodbye);
      if (link.receive && link.receive != link.send) queue_control(*link.receive, goodbye);
    }
  }
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
  const auto link_of = [&](int32_t peer) -> const Link& { return op.group->links[static_cast<size_t>(peer)]; };
  for (const auto& stream : op.out) {
    // Bytes that a thread is just handing to the kernel count as sent: the peer may have them and be gone already.
    const Connection& connection = *stream->connection;
    const bool stuck = connection.frame.stream == stream.get() && !connection.tx_busy;
    const bool gone = link_of(stream->peer).send_closed || connection.lost;
    if ((stream->offset < stream->nbytes || stuck) && gone) peers.push_back(stream->peer);
  }
  for (const InStream* stream : op.in) {
    const bool gone = link_of(stream->peer).receive_closed || stream->connection->lost;
    if (stream->arrived < stream->nbytes && gone) peers.push_back(stream->peer);
  }
  return peers;
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
  const auto found = connections_.find(connection.id);
  if (closed_groups_.contains(header.key.group) || found == connections_.end() || notices_.size() >= kMostGroups)
    return;
  auto& notices = notices_[header.key.group];
  for (const Notice& notice : notices) {
    if (notice.connection.get() == &connection && notice.header.type == header.type) return;
  }
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
    Link& link = group.links[index];
    if (link.send.get() == &connection) link.send_closed = true;
    if (link.receive.get() == &connection) link.receive_closed = true;
    for (const auto& [order, op] : group.in_flight) {
      const auto departed = departed_peers(*op);
      if (departed.empty()) continue;
      fail_group(group, std::make_shared<const Error>(peer_left(group, *op, departed.front())));
      return;
    }
  }
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
  info.code = static_cast<Code>(std::min(static_cast<uint8_t>(payload[0]), static_cast<uint8_t>(Code::kSystem)));
  int32_t culprit;
  std::memcpy(&culprit, payload + 1, sizeof culprit);
  info.peer = culprit >= 0 && culprit < group.world() ? culprit : -1;
  const std::string text(reinterpret_cast<const char*>(payload) + 1 + sizeof culprit,
                         header.payload_nbytes - 1 - sizeof culprit);
  const size_t split = std::min(text.find('\0'), text.size());
  info.peer_host = printable(text.substr(0, split));
  info.detail = split < text.size() ? printable(text.substr(split + 1)) : "";
  for (size_t rank = 0; rank < group.members.size(); ++rank) {
    if (group.members[rank].process == connection.process && static_cast<int32_t>(rank) != info.peer &&
        info.detail.find("(reported by") == std::string::npos) {
      info.detail += " (reported by rank " + std::to_string(rank) + ")";
      break;
    }
  }
  fail_group(group, std::move(info));
}

void Engine::connection_lost(const ConnectionPtr& connection, std::string detail, int sys_errno, Code code) {
  if (connection->lost) return;
  connection->lost = true;
  receive_poller_.remove(connection->fd.get());
  if (connection->tx_blocked) transmit_poller_.remove(connection->fd.get());
  connections_.erase(connection->id);
  const auto current = by_process_.find({connection->process, connection->lane});
  if (current != by_process_.end() && current->second == connection) by_process_.erase(current);

  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    for (int32_t rank = 0; rank < group->world(); ++rank) {
      const auto index = static_cast<size_t>(rank);
      if (group->members[index].process != connection->process) continue;
      const Link& link = group->links[index];
      const bool sends = link.send == connection;
      const bool receives = link.receive == connection;
      if (link.complete() && !sends && !receives) continue;  // the group's own connection will tell
      if ((sends && link.send_closed) || (receives && link.receive_closed)) continue;
      ErrorInfo info;
      info.code = code;
      info.peer = rank;
      info.detail = detail;
      info.sys_errno = sys_errno;
      fail_group(*group, std::move(info));
    }
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
  for (const InStream* stream : op.in) {
    if (stream->cursor < stream->steps.size()) {
      info.peer = stream->peer;
      info.detail = stream->announced ? "has not sent all its data in time" : "has not joined this op in time";
      break;
    }
  }
  if (info.peer < 0) {
    for (const auto& stream : op.out) {
      if (stream->cursor < stream->steps.size()) {
        info.peer = stream->peer;
        info.detail = "has not taken the data in time";
        break;
      }
    }
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
        fail_group(*group, describe_wait(*op));
        break;
      }
      next = std::min(next, op->deadline);
    }
  }
  return next;
}

}  // namespace mccl
