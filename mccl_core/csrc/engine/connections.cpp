// Connections: how they come, which links of which groups they serve, and how they end.
#include <algorithm>
#include <utility>

#include "engine/engine.hpp"
#include "io/socket.hpp"

namespace mccl {

// The threads of a further channel start with its first connection.
Channel& Engine::channel(int32_t index) {
  while (channels_.size() <= static_cast<size_t>(index)) {
    Channel& added = *channels_.emplace_back(std::make_unique<Channel>(pool_.get()));
    added.receive_thread = std::thread([this, &added] { receive_loop(added); });
    added.transmit_thread = std::thread([this, &added] { transmit_loop(added); });
  }
  return *channels_[static_cast<size_t>(index)];
}

void Engine::wake_receivers() {
  for (const auto& channel : channels_) channel->receive_poller.wake();
}

void Engine::add_connection(Fd socket, const ProcessId& process, int32_t lane, std::string host) {
  configure_stream_socket(socket.get(), static_cast<int>(options_.socket_buffer_nbytes));
  const uint64_t whole_frame = options_.transport_crc ? 2 * kMaxCheckedNbytes : 0;
  const uint64_t scratch_nbytes = std::max(options_.scratch_nbytes, whole_frame);
  Lock lock(*this);
  if (stopping_) return;
  const int fd = socket.get();
  Channel& channel = this->channel(channel_of_lane(lane));
  const uint64_t id = next_connection_++;
  auto connection = std::make_shared<Connection>(id, channel, std::move(socket), process, lane, std::move(host),
                                                 options_.credit_nbytes, scratch_nbytes, pool_);
  connection->waits = metrics_.peer(process);
  connections_[id] = connection;
  by_process_[{process, lane}] = connection;
  for (const auto& [group_id, group] : groups_) attach(*group);
  channel.receive_poller.add(fd, reinterpret_cast<void*>(id), Interest::kRead);
  queue_heartbeat(*connection);  // it tells the interval
  next_deadline_ = now_ns();
  channels_.front()->receive_poller.wake();
}

// A group holds its connections even after their end: what a peer sent before it left can still be received.
void Engine::attach(Group& group) {
  const auto find = [&](int32_t rank, int32_t lane) {
    const auto found = by_process_.find({group.members[static_cast<size_t>(rank)].process, lane});
    return found == by_process_.end() ? nullptr : found->second;
  };
  for (int32_t channel = 0; channel < group.channels; ++channel) {
    for (int32_t rank = 0; rank < group.world(); ++rank) {
      Link& link = group.link(rank, channel);
      if (!link.send) link.send = find(rank, group.send_lane(rank, channel));
      if (!link.receive) link.receive = find(rank, group.receive_lane(rank, channel));
    }
  }
}

bool Engine::connected(const ProcessId& process, int32_t lane) const {
  const std::lock_guard guard(mutex_);
  return by_process_.contains({process, lane});
}

std::vector<Engine::Missing> Engine::missing_links(const Group& group, const Operation& op) const {
  std::vector<Missing> missing;
  const std::lock_guard guard(mutex_);
  for (const Step& step : op.steps) {
    for (const int32_t peer : {step.send_peer, step.recv_peer}) {
      if (peer < 0 || group.link(peer, step.channel).complete()) continue;
      const Missing link{peer, step.channel};
      if (std::find(missing.begin(), missing.end(), link) == missing.end()) missing.push_back(link);
    }
  }
  return missing;
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

}  // namespace mccl
