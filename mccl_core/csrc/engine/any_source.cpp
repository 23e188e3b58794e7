// Receives from any source. Such a receive waits until a message with its tag has been announced that no other receive
// has been promised, and is then an ordinary receive from that rank. A receive from one rank that is posted after one
// from any source, with the same tag, waits behind it: messages of a rank are taken in the order of the receives that
// they fit.
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

// Names the next message from this rank that no receive has been promised.
StreamKey Engine::next_message(const Group& group, int32_t from, uint32_t tag) {
  const auto next = group.next_received.find({group.id, static_cast<uint64_t>(from), tag, true});
  return {group.id, (next == group.next_received.end() ? 0 : next->second) + 1, tag, true};
}

// A rank whose next message with this tag is here, at least its header; -1 where there is none.
int32_t Engine::announced_source(const Group& group, uint32_t tag, const std::vector<bool>& taken) {
  for (int32_t i = 0; i < group.world(); ++i) {
    const int32_t rank = (group.next_source + i) % group.world();
    const auto& connection = group.link(rank, 0).receive;
    if (!connection || taken[static_cast<size_t>(rank)]) continue;
    const auto found = connection->in.find(next_message(group, rank, tag));
    if (found != connection->in.end() && found->second.announced) return rank;
  }
  return -1;
}

void Engine::bind(Group& group, size_t index, int32_t from, Lock& lock) {
  const WaitingReceive receive = group.waiting[index];
  group.waiting.erase(group.waiting.begin() + static_cast<std::ptrdiff_t>(index));
  const std::shared_ptr<Operation>& op = receive.op;
  op->unmatched = false;
  op->source = from;
  op->key = next_message(group, from, receive.tag);
  op->ticket = op->key.sequence;
  ++group.next_received[{group.id, static_cast<uint64_t>(from), receive.tag, true}];
  if (receive.peer < 0) group.next_source = (from + 1) % group.world();
  Step step;
  set_copy(step, from, {0, op->buffers.nbytes()});
  op->steps = {step};
  op->states.resize(1);
  const PointToPoint point{from, receive.tag, false};
  place(op, &point, lock);
}

// Looks for one receive that can have its message. Returns whether there was one.
bool Engine::match_next(Group& group, uint32_t tag, Lock& lock) {
  std::vector<bool> taken(group.members.size());  // the rank's next message is for a receive that was posted earlier
  bool behind_any = false;
  for (size_t i = 0; i < group.waiting.size(); ++i) {
    if (group.waiting[i].tag != tag) continue;
    const int32_t peer = group.waiting[i].peer;
    const int32_t from = peer < 0 ? announced_source(group, tag, taken) : behind_any ? -1 : peer;
    if (from >= 0) {
      bind(group, i, from, lock);
      return true;
    }
    if (peer >= 0) taken[static_cast<size_t>(peer)] = true;
    behind_any = behind_any || peer < 0;
  }
  return false;
}

// One at a time, since the lock is released meanwhile.
void Engine::match_waiting(Group& group, uint32_t tag, Lock& lock) {
  while (match_next(group, tag, lock)) {
  }
}

void Engine::offer(const StreamKey& key, Lock& lock) {
  if (!key.point_to_point) return;
  const auto found = groups_.find(key.group);
  if (found == groups_.end() || found->second->waiting.empty()) return;
  const std::shared_ptr<Group> group = found->second;
  match_waiting(*group, key.tag, lock);
}

}  // namespace mccl
