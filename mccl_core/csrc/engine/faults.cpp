// What goes wrong: one error ends the group, with all that it has in flight, and is passed on to all members.
#include <algorithm>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
constexpr const char* kDied = "Its process has probably died: see its log. ";
constexpr const char* kShrink = ", or go on without that rank by mccl_core.shrink()";
}  // namespace

void Engine::fail(const std::shared_ptr<Group>& group, ErrorInfo info) {
  if (abandoned_) return;
  Lock lock(*this);
  if (!group->closed) fail_group(*group, std::move(info));
}

void Engine::fail_group(Group& group, ErrorInfo info) {
  if (group.failure) return;
  info.rank = group.rank;
  if (info.peer >= 0 && info.peer_host.empty()) info.peer_host = group.members[static_cast<size_t>(info.peer)].host;
  if (info.advice.empty())
    info.advice = info.code == Code::kPeerLost ? kDied + (kRestart + std::string(kShrink)) : kRestart;
  name_op(group, info);
  fail_group(group, std::make_shared<const Error>(std::move(info)));
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
  const ControlFrame notice = error_notice(group, *error);
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

}  // namespace mccl
