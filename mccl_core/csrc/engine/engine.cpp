// The engine's life, its groups, and what can be asked of it.
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

Engine::Engine(const Options& options) : options_(options), flight_(options.flight_record_ops) {
  Lock lock(*this);
  channel(0);
}

Engine::~Engine() { shutdown(); }

std::shared_ptr<Group> Engine::create_group(uint64_t id, int32_t rank, std::vector<MemberInfo> members,
                                            int32_t channels) {
  MCCL_ASSERT(channels >= 1 && channels <= kMaxChannels);
  auto group = std::make_shared<Group>(id, rank, std::move(members), channels);
  Lock lock(*this);
  if (!groups_.emplace(id, group).second) throw_usage("a group with this id exists in this process");
  attach(*group);
  replay_notices(id);
  return group;
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

std::shared_ptr<const Error> Engine::failure(const Group& group) const {
  const std::lock_guard guard(mutex_);
  return group.failure;
}

Metrics::Snapshot Engine::metrics() const {
  const std::lock_guard guard(mutex_);
  return metrics_.snapshot(now_ns());
}

void Engine::reset_metrics() {
  Lock lock(*this);
  metrics_.reset(now_ns());
}

uint64_t Engine::parked_nbytes() const {
  const std::lock_guard guard(mutex_);
  uint64_t total = 0;
  for (const auto& [id, connection] : connections_) {
    for (const auto& [key, stream] : connection->in) {
      for (const Parked& block : stream.parked) total += block.nbytes;
    }
  }
  return total;
}

std::vector<FlightEntry> Engine::flight_record() const {
  const std::lock_guard guard(mutex_);
  std::vector<FlightEntry> entries = flight_.entries();
  for (FlightEntry& entry : entries) {
    const auto found = groups_.find(entry.group);
    if (entry.settled_at != 0 || found == groups_.end()) continue;
    const auto op = found->second->in_flight.find(entry.order);
    if (op != found->second->in_flight.end()) entry.peer = culprit(*op->second).rank;
  }
  return entries;
}

void Engine::shutdown() {
  if (abandoned_) return;
  {
    Lock lock(*this);
    if (stopping_) return;
  }
  std::vector<std::shared_ptr<Group>> open;
  {
    Lock lock(*this);
    for (const auto& [id, group] : groups_) open.push_back(group);
  }
  for (const auto& group : open) close_group(group);

  // The receive threads half-close each socket once nothing is left to send, and end when all peers have answered
  // with theirs or the linger has passed. Closing at once could reset a connection whose bytes are still on their way.
  {
    Lock lock(*this);
    stopping_ = true;
  }
  wake_receivers();
  for (const auto& channel : channels_) channel->receive_thread.join();
  for (const auto& channel : channels_) {
    channel->transmit_poller.wake();
    channel->transmit_thread.join();
  }
  {
    std::lock_guard lock(completion_mutex_);
    completion_stopping_ = true;
  }
  completion_wake_.notify_all();
  for (std::thread& thread : completion_threads_) thread.join();
}

// Only the forking thread lives on in a child, and a lock that another thread held stays held: nothing is locked here.
void Engine::close_descriptors_in_child() {
  abandoned_ = true;
  for (const auto& [id, connection] : connections_) connection->fd.reset();
  for (const auto& channel : channels_) {
    channel->receive_poller.close_descriptors();
    channel->transmit_poller.close_descriptors();
  }
}

}  // namespace mccl
