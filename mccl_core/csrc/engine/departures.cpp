// Members that leave in good order: they say goodbye, and are missed by ops that still need them.
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
constexpr const char* kMatchCalls =
    "See that rank's log; all ranks must call the same collectives before they destroy the group";
}  // namespace

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

}  // namespace mccl
