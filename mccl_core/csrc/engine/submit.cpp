// How an op enters the engine: its place in the order, its streams, its first bytes.
#include <algorithm>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
constexpr size_t kRememberedNested = 1024;
}  // namespace

void Engine::submit(const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& op,
                    const PointToPoint* point_to_point) {
  if (abandoned_) throw_usage("this process was forked from a rank", "Call init_process_group in the child first");
  if (op->ready) op->copy_own_blocks();
  yield_completion();
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

}  // namespace mccl
