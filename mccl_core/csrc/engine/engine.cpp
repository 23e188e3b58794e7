#include "engine/engine.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/socket.hpp"

namespace mccl {

namespace {
constexpr size_t kRememberedNested = 1024;
thread_local bool completing = false;  // this thread runs a completion
thread_local bool yielded = false;     // and has let the next one start
}  // namespace

Engine::Engine(const Options& options) : options_(options), flight_(options.flight_record_ops) {
  Lock lock(*this);
  channel(0);
}

Engine::~Engine() { shutdown(); }

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

std::shared_ptr<const Error> Engine::failure(const Group& group) const {
  const std::lock_guard guard(mutex_);
  return group.failure;
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

InStream& Engine::in_stream(Connection& connection, const StreamKey& key) {
  const auto [found, added] = connection.in.try_emplace(key, connection.pool.get());
  InStream& stream = found->second;
  if (added) {
    stream.connection = &connection;
    stream.key = key;
    ++connection.unposted;
  }
  return stream;
}

// On each channel one stream for each peer that the op sends to, and one for each that it receives from.
void Engine::build_streams(Operation& op, const StreamKey& key) {
  Group& group = *op.group;
  std::map<std::pair<int32_t, int32_t>, OutStream*> out;  // by peer and channel
  std::map<std::pair<int32_t, int32_t>, InStream*> in;
  for (size_t i = 0; i < op.steps.size(); ++i) {
    const Step& step = op.steps[i];
    if (step.send_peer >= 0) {
      OutStream*& stream = out[{step.send_peer, step.channel}];
      if (!stream) {
        op.out.push_back(std::make_unique<OutStream>());
        stream = op.out.back().get();
        stream->op = &op;
        stream->peer = step.send_peer;
        stream->channel = step.channel;
        stream->connection = group.link(step.send_peer, step.channel).send.get();
        stream->key = key;
        stream->connection->out[key] = stream;
        const auto grant = stream->connection->early_grants.find(key);
        if (grant != stream->connection->early_grants.end()) {
          stream->granted = grant->second;
          stream->connection->early_grants.erase(grant);
        }
      }
      stream->steps.push_back(static_cast<int32_t>(i));
      stream->nbytes += step.send.nbytes;
      op.todo_nbytes += step.send.nbytes;
    }
    if (step.recv_peer >= 0) {
      InStream*& stream = in[{step.recv_peer, step.channel}];
      if (!stream) {
        stream = &in_stream(*group.link(step.recv_peer, step.channel).receive, key);
        stream->op = &op;
        --stream->connection->unposted;
        stream->peer = step.recv_peer;
        stream->channel = step.channel;
        op.in.push_back(stream);
      }
      stream->steps.push_back(static_cast<int32_t>(i));
      stream->nbytes += step.recv.nbytes;
      op.todo_nbytes += step.recv.nbytes;
    }
  }
}

void Engine::submit(const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& op,
                    const PointToPoint* point_to_point) {
  if (abandoned_) throw_usage("this process was forked from a rank", "Call init_process_group in the child first");
  if (op->ready) op->copy_own_blocks();
  if (completing) yield_completion();
  Lock lock(*this);
  if (group->failure) {
    name_call(*group, *op, point_to_point);
    throw *group->failure;
  }
  if (group->closed) throw_usage("this group was destroyed", "Make a new group with torch.distributed.new_group");
  for (const Step& step : op->steps) {
    for (const int32_t peer : {step.send_peer, step.recv_peer}) {
      if (peer < 0 || group->link(peer, step.channel).complete()) continue;
      fail_group(*group, std::make_shared<const Error>(peer_left(*group, *op, peer)));
      throw *group->failure;
    }
  }

  op->group = group;
  op->order = next_order_++;
  op->posted_at = now_ns();
  op->key = {group->id, 0, 0, false};
  op->sends_message = point_to_point != nullptr && point_to_point->sends;
  group->in_flight.emplace(op->order, op);
  op->flight = flight_.add(*op);
  if (point_to_point == nullptr) {
    const bool nested = op->nested.tag != 0;
    op->ticket = nested ? op->nested.ticket : group->next_ticket++;
    op->key.sequence = op->ticket;
    op->key.tag = op->nested.tag;
    if (nested && group->nested.size() < kRememberedNested) group->nested.push_back(op->key);
    if (nested) group->nested[group->next_nested++ % kRememberedNested] = op->key;
  } else if (point_to_point->sends) {
    StreamKey counter{group->id, static_cast<uint64_t>(point_to_point->peer), point_to_point->tag, true};
    op->ticket = ++group->next_sent[counter];
    op->key = {group->id, op->ticket, point_to_point->tag, true};
  } else {
    const auto same_tag = [&](const WaitingReceive& other) { return other.tag == point_to_point->tag; };
    if (point_to_point->peer < 0 || std::ranges::any_of(group->waiting, same_tag)) {
      op->key = {group->id, 0, point_to_point->tag, true};
      op->unmatched = true;
      begin_watch(*op);
      watch_from(*op);
      group->waiting.push_back({op, point_to_point->peer, point_to_point->tag});
      match_waiting(*group, point_to_point->tag, lock);
      if (op->unmatched && !op->finished && fail_departed(*group, *op) >= 0) throw *group->failure;
      return;
    }
    op->key = next_message(*group, point_to_point->peer, point_to_point->tag);
    op->ticket = op->key.sequence;
    ++group->next_received[{group->id, static_cast<uint64_t>(point_to_point->peer), point_to_point->tag, true}];
  }
  if (place(op, point_to_point, lock) >= 0) throw *group->failure;
}

void Engine::watch_from(const Operation& op) {
  if (op.ask_at >= next_deadline_) return;
  next_deadline_ = op.ask_at;
  channels_.front()->receive_poller.wake();
}

int32_t Engine::place(const std::shared_ptr<Operation>& op, const PointToPoint* point_to_point, Lock& lock) {
  Group& group = *op->group;
  build_streams(*op, op->key);
  flight_.started(*op);
  begin_watch(*op);
  watch_from(*op);
  const int32_t departed = fail_departed(group, *op);
  if (departed >= 0) return departed;
  for (InStream* stream : op->in) {
    if (stream->announced && !(matches(*stream) && fits(*stream))) return -1;  // the group has failed; the op tells
  }
  if (!claims_all(group, op->key, point_to_point) || !matches_announced(*op)) return -1;
  if (op->ready) start(op, now_ns(), lock);
  return -1;
}

void Engine::set_ready(const std::shared_ptr<Operation>& op) {
  if (abandoned_) return;
  Lock lock(*this);
  if (op->finished || op->ready) return;
  ++op->pins;  // should it fail meanwhile, its buffers stay
  lock.unlock();
  op->copy_own_blocks();
  lock.lock();
  if (!op->finished && !std::exchange(op->ready, true)) start(op, now_ns(), lock);
  unpin(op);
}

void Engine::start(const std::shared_ptr<Operation>& op, TimePoint now, Lock& lock) {
  metrics_.started(*op, now);
  // Sends first: what a peer waits for goes out before what has arrived is looked at.
  for (const auto& stream : op->out) mark_ready(*stream);
  // The first bytes of any op are sent here and now: no wake-up is as fast. Other channels' threads send beside that.
  for (const auto& stream : op->out) {
    if (stream->channel > 0) kick(*stream->connection, false, lock);
  }
  for (size_t i = 0; i < op->out.size() && !op->finished; ++i) {
    if (op->out[i]->channel == 0) kick(*op->out[i]->connection, true, lock);
  }
  op->queued = !op->finished && must_queue(*op);
  for (size_t i = 0; i < op->in.size() && !op->finished; ++i) {
    update_grant(*op->in[i]);
    drain(*op->in[i], lock);
  }
  settle_if_complete(op);
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

void Engine::enqueue_completion(Completion completion) {
  constexpr size_t kMostThreads = 64;  // that have not yielded
  std::lock_guard lock(completion_mutex_);
  completion_queue_.push_back(std::move(completion));
  if (idle_completion_threads_ == 0 && completion_threads_.size() < kMostThreads + yielded_completions_) {
    completion_threads_.emplace_back([this] { completion_loop(); });
  }
  completion_wake_.notify_one();
}

void Engine::completion_loop() {
  constexpr int64_t kStuck_ms = 50;
  std::unique_lock lock(completion_mutex_);
  while (true) {
    ++idle_completion_threads_;
    while (completion_queue_.empty() ? !completion_stopping_
                                     : running_completions_ > 0 && now_ns() < completion_stuck_at_) {
      if (completion_queue_.empty()) {
        completion_wake_.wait(lock);
      } else {
        completion_wake_.wait_for(lock, std::chrono::nanoseconds(completion_stuck_at_ - now_ns()));
      }
    }
    --idle_completion_threads_;
    if (completion_queue_.empty()) return;
    Completion completion = std::move(completion_queue_.front());
    completion_queue_.pop_front();
    ++running_completions_;
    completion_stuck_at_ = deadline_after_ms(kStuck_ms);
    lock.unlock();
    completing = true;
    complete(completion);
    completion = {};  // what it holds ends outside the lock
    completing = false;
    lock.lock();
    --(std::exchange(yielded, false) ? yielded_completions_ : running_completions_);
  }
}

void Engine::yield_completion() {
  if (std::exchange(yielded, true)) return;
  std::lock_guard lock(completion_mutex_);
  --running_completions_;
  ++yielded_completions_;
  if (completion_queue_.empty()) return;
  if (idle_completion_threads_ == 0) completion_threads_.emplace_back([this] { completion_loop(); });
  completion_wake_.notify_one();
}

void Engine::complete(Completion& completion) {
  Operation& op = *completion.op;
  if (completion.settles) {
    if (op.failure && op.invalidates) op.invalidate_result();
    try {
      if (op.codec && !op.failure) op.codec->finish();
      if (op.finalizer) op.finalizer();
    } catch (const std::exception& fault) {
      ErrorInfo info;
      info.code = Code::kSystem;
      info.op = to_string(op.fingerprint.kind);
      info.ticket = op.ticket;
      info.detail = std::string("the result could not be copied into the tensor: ") + fault.what();
      if (!op.failure) op.failure = std::make_shared<const Error>(std::move(info));
    }
    op.finalizer = nullptr;
    op.keep_alive.reset();
    if (op.codec) op.workspace.reset();
    completion.callbacks = op.settle();
  }
  for (const auto& callback : completion.callbacks) callback();
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
