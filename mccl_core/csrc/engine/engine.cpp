#include "engine/engine.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/socket.hpp"

namespace mccl {

Engine::Engine(const Options& options) : options_(options) {
  receive_thread_ = std::thread([this] { receive_loop(); });
  transmit_thread_ = std::thread([this] { transmit_loop(); });
}

Engine::~Engine() { shutdown(); }

void Engine::add_connection(Fd socket, const ProcessId& process, int32_t lane, std::string host) {
  configure_stream_socket(socket.get(), static_cast<int>(options_.socket_buffer_nbytes));
  const uint64_t whole_frame = options_.transport_crc ? 2 * kMaxCheckedNbytes : 0;
  const uint64_t scratch_nbytes = std::max(options_.scratch_nbytes, whole_frame);
  Lock lock(*this);
  const int fd = socket.get();
  const uint64_t id = next_connection_++;
  auto connection = std::make_shared<Connection>(id, std::move(socket), process, lane, std::move(host),
                                                 options_.credit_nbytes, scratch_nbytes, pool_);
  connections_[id] = connection;
  by_process_[{process, lane}] = connection;
  for (const auto& [group_id, group] : groups_) attach(*group);
  receive_poller_.add(fd, reinterpret_cast<void*>(id), Interest::kRead);
}

// A group holds its connections even after their end: what a peer sent before it left can still be received.
void Engine::attach(Group& group) {
  const auto find = [&](size_t rank, int32_t lane) {
    const auto found = by_process_.find({group.members[rank].process, lane});
    return found == by_process_.end() ? nullptr : found->second;
  };
  for (size_t rank = 0; rank < group.links.size(); ++rank) {
    Link& link = group.links[rank];
    if (!link.send) link.send = find(rank, group.send_lane(rank));
    if (!link.receive) link.receive = find(rank, group.receive_lane(rank));
  }
}

bool Engine::connected(const ProcessId& process, int32_t lane) const {
  const std::lock_guard guard(mutex_);
  return by_process_.contains({process, lane});
}

std::shared_ptr<Group> Engine::create_group(uint64_t id, int32_t rank, std::vector<MemberInfo> members) {
  auto group = std::make_shared<Group>(id, rank, std::move(members));
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

std::vector<int32_t> Engine::unconnected_peers(const Group& group, const Operation& op) const {
  std::vector<int32_t> peers;
  const std::lock_guard guard(mutex_);
  for (const Step& step : op.steps) {
    for (const int32_t peer : {step.send_peer, step.recv_peer}) {
      if (peer < 0 || group.links[static_cast<size_t>(peer)].complete()) continue;
      if (std::find(peers.begin(), peers.end(), peer) == peers.end()) peers.push_back(peer);
    }
  }
  return peers;
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

// One stream for each peer that the op sends to, and one for each that it receives from.
void Engine::build_streams(Operation& op, const StreamKey& key) {
  Group& group = *op.group;
  std::unordered_map<int32_t, OutStream*> out;
  std::unordered_map<int32_t, InStream*> in;
  for (size_t i = 0; i < op.steps.size(); ++i) {
    const Step& step = op.steps[i];
    if (step.send_peer >= 0) {
      OutStream*& stream = out[step.send_peer];
      if (!stream) {
        op.out.push_back(std::make_unique<OutStream>());
        stream = op.out.back().get();
        stream->op = &op;
        stream->peer = step.send_peer;
        stream->connection = group.links[static_cast<size_t>(step.send_peer)].send.get();
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
      InStream*& stream = in[step.recv_peer];
      if (!stream) {
        stream = &in_stream(*group.links[static_cast<size_t>(step.recv_peer)].receive, key);
        stream->op = &op;
        --stream->connection->unposted;
        stream->peer = step.recv_peer;
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
  Lock lock(*this);
  if (group->failure) throw *group->failure;
  if (group->closed) throw_usage("this group was destroyed", "Make a new group with torch.distributed.new_group");
  for (const Step& step : op->steps) {
    for (const int32_t peer : {step.send_peer, step.recv_peer}) {
      if (peer < 0 || group->links[static_cast<size_t>(peer)].complete()) continue;
      fail_group(*group, std::make_shared<const Error>(peer_left(*group, *op, peer)));
      throw *group->failure;
    }
  }

  op->group = group;
  op->order = next_order_++;
  op->posted_at = now_ns();
  StreamKey key{group->id, 0, 0, false};
  if (point_to_point != nullptr) {
    key.tag = point_to_point->tag;
    key.point_to_point = true;
    auto& next = point_to_point->sends ? group->next_sent : group->next_received;
    StreamKey counter = key;
    counter.sequence = static_cast<uint64_t>(point_to_point->peer);
    op->ticket = ++next[counter];
  } else {
    op->ticket = group->next_ticket++;
  }
  key.sequence = op->ticket;
  group->in_flight.emplace(op->order, op);
  build_streams(*op, key);
  if (op->deadline < next_deadline_) {
    next_deadline_ = op->deadline;
    receive_poller_.wake();
  }

  for (const int32_t peer : departed_peers(*op)) {
    // The others wait for this op, too: they are told.
    fail_group(*group, std::make_shared<const Error>(peer_left(*group, *op, peer)));
    throw *group->failure;
  }
  for (InStream* stream : op->in) {
    if (stream->announced && !(matches(*stream) && fits(*stream))) return;  // the group has failed; the op tells
  }
  if (!claims_all(*group, key, point_to_point)) return;
  if (op->ready) start(op, lock);
}

void Engine::set_ready(const std::shared_ptr<Operation>& op) {
  if (abandoned_) return;
  Lock lock(*this);
  if (op->finished || op->ready) return;
  ++op->pins;  // should it fail meanwhile, its buffers stay
  lock.unlock();
  op->copy_own_blocks();
  lock.lock();
  if (!op->finished && !std::exchange(op->ready, true)) start(op, lock);
  unpin(op);
}

void Engine::start(const std::shared_ptr<Operation>& op, Lock& lock) {
  // Sends first: what a peer waits for goes out before what has arrived is looked at.
  for (const auto& stream : op->out) mark_ready(*stream);
  for (size_t i = 0; i < op->out.size() && !op->finished; ++i) {
    kick(*op->out[i]->connection, true, lock);  // the first bytes of any op: no wake-up is as fast
  }
  for (size_t i = 0; i < op->in.size() && !op->finished; ++i) {
    update_grant(*op->in[i]);
    drain(*op->in[i], lock);
  }
  settle_if_complete(op);
}

Counters Engine::counters() const {
  const std::lock_guard guard(mutex_);
  return counters_;
}

void Engine::reset_counters() {
  Lock lock(*this);
  counters_ = {};
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

void Engine::enqueue_completion(Completion completion) {
  constexpr size_t kMostThreads = 64;
  std::lock_guard lock(completion_mutex_);
  completion_queue_.push_back(std::move(completion));
  if (idle_completion_threads_ == 0 && completion_threads_.size() < kMostThreads) {
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
    complete(completion);
    completion = {};  // what it holds ends outside the lock
    lock.lock();
    --running_completions_;
  }
}

void Engine::complete(Completion& completion) {
  Operation& op = *completion.op;
  if (op.finalizer) {
    try {
      op.finalizer();
    } catch (const std::exception& fault) {
      ErrorInfo info;
      info.code = Code::kSystem;
      info.op = to_string(op.fingerprint.kind);
      info.ticket = op.ticket;
      info.detail = std::string("the result could not be copied into the tensor: ") + fault.what();
      op.failure = std::make_shared<const Error>(std::move(info));
    }
    op.finalizer = nullptr;
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

  // The receive thread half-closes each socket once nothing is left to send, and ends when all peers have answered
  // with theirs or the linger has passed. Closing at once could reset a connection whose bytes are still on their way.
  {
    Lock lock(*this);
    stopping_ = true;
  }
  receive_poller_.wake();
  receive_thread_.join();
  transmit_poller_.wake();
  transmit_thread_.join();
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
  receive_poller_.close_descriptors();
  transmit_poller_.close_descriptors();
}

}  // namespace mccl
