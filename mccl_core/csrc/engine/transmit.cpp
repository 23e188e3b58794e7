// Sending: which bytes go next on a connection, and which thread sends them.
//
// Small ops are sent by the thread that made them sendable (the caller's, or the receive thread), since a wake-up costs
// more than the system call; everything else is handed to the transmit thread.
#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/crc32c.hpp"
#include "engine/engine.hpp"
#include "io/socket.hpp"

namespace mccl {

namespace {
constexpr size_t kMaxParts = 64;             // iovecs of one system call
constexpr size_t kMaxControlFrames = 16;     // sent together
constexpr uint64_t kTurn_nbytes = 4u << 20;  // then the transmit thread serves the next connection
}  // namespace

void Engine::mark_ready(OutStream& stream) {
  Connection& connection = *stream.connection;
  if (stream.queued || connection.lost) return;
  stream.queued = true;
  const auto later = [](uint64_t order, const OutStream* other) { return order < other->op->order; };
  const auto at = std::upper_bound(connection.ready.begin(), connection.ready.end(), stream.op->order, later);
  connection.ready.insert(at, &stream);
}

void Engine::queue_control(Connection& connection, ControlFrame frame) {
  if (connection.lost || connection.tx_broken) return;
  connection.control.push_back(std::move(frame));
  hand_to_transmit_thread(connection);
}

void Engine::hand_to_transmit_thread(Connection& connection) {
  // Whoever is sending looks for more before it stops, and a blocked socket is sent to once it is writable.
  if (connection.tx_busy || connection.tx_blocked || std::exchange(connection.tx_queued, true)) return;
  connection.channel.transmit_queue.push_back(connection.id);
  connection.channel.transmit_poller.wake();
}

void Engine::kick(Connection& connection, bool inline_allowed, Lock& lock) {
  if (connection.tx_busy || connection.tx_blocked || connection.tx_broken || connection.lost) return;
  if (inline_allowed) {
    if (transmit(connection, 2 * options_.inline_nbytes, lock)) hand_to_transmit_thread(connection);
  } else if (!connection.ready.empty() || !connection.control.empty()) {
    hand_to_transmit_thread(connection);
  }
}

// How many bytes of the stream may go into the next frame. Asks for a grant where only that is missing.
uint64_t Engine::sendable_nbytes(Connection& connection, OutStream& stream, bool& on_credit) {
  const uint64_t open = open_nbytes(stream);
  if (open == 0) return 0;
  uint64_t n = std::min(open, options_.segment_nbytes);
  if (options_.transport_crc) n = std::min<uint64_t>(n, kMaxCheckedNbytes);
  on_credit = stream.granted <= stream.offset;
  if (!on_credit) {
    n = std::min(n, stream.granted - stream.offset);
  } else {
    n = std::min(n, connection.credit_nbytes - std::min<uint64_t>(connection.credit_nbytes, kFrameCost_nbytes));
  }
  n -= n % stream.op->element_nbytes;
  if (n == 0 && on_credit) {
    auto& starved = connection.starved;
    if (std::find(starved.begin(), starved.end(), &stream) == starved.end()) starved.push_back(&stream);
    if (!std::exchange(stream.requested, true)) {
      ControlFrame request;
      request.header.type = FrameType::kRequest;
      request.header.key = stream.key;
      request.header.fingerprint = stream.op->fingerprint;
      if (request.header.fingerprint.kind == OpKind::kAllToAll) request.header.fingerprint.nbytes = stream.nbytes;
      connection.control.push_back(std::move(request));
    }
  }
  return n;
}

bool Engine::pick_payload(Connection& connection) {
  auto& ready = connection.ready;
  while (!ready.empty()) {
    OutStream& stream = *ready.front();
    bool on_credit = false;
    const uint64_t n = sendable_nbytes(connection, stream, on_credit);
    if (n == 0) {
      stream.queued = false;
      ready.erase(ready.begin());
      continue;
    }
    Operation& op = *stream.op;
    if (op.queued) metrics_.left_queue(op, now_ns());
    const auto index = static_cast<size_t>(stream.steps[stream.cursor]);
    OutFrame& frame = connection.frame;
    frame.op = op.shared_from_this();
    frame.stream = &stream;
    frame.payload = {op.steps[index].send.offset + op.states[index].sent, n};
    FrameHeader header;
    header.type = FrameType::kData;
    header.on_credit = on_credit;
    header.key = stream.key;
    header.fingerprint = op.fingerprint;
    if (header.fingerprint.kind == OpKind::kAllToAll) header.fingerprint.nbytes = stream.nbytes;
    header.offset = stream.offset;
    header.payload_nbytes = static_cast<uint32_t>(n);
    header.credit_nbytes = take_owed(connection);
    header.checked = options_.transport_crc;
    frame.header = header;
    frame.header_at = frame.head.size();
    frame.checksum_due = header.checked;
    frame.head.resize(frame.header_at + kHeaderNbytes);
    encode(header, frame.head.data() + frame.header_at);
    stream.offset += n;
    if (on_credit) connection.credit_nbytes -= n + kFrameCost_nbytes;
    return true;
  }
  return false;
}

// Puts together the next thing to send: waiting control frames, and one data frame.
bool Engine::next_frame(Connection& connection) {
  OutFrame& frame = connection.frame;
  frame.clear();
  const auto take_control = [&] {
    for (size_t i = 0; i < kMaxControlFrames && !connection.control.empty(); ++i) {
      ControlFrame control = std::move(connection.control.front());
      connection.control.pop_front();
      if (control.header.type == FrameType::kCredit) connection.credit_queued = false;
      if (control.header.type == FrameType::kHeartbeat) connection.beat_queued = false;
      control.header.payload_nbytes = static_cast<uint32_t>(control.payload.size());
      control.header.credit_nbytes = take_owed(connection);
      const size_t at = frame.head.size();
      frame.head.resize(at + kHeaderNbytes + control.payload.size());
      encode(control.header, frame.head.data() + at);
      const auto* text = reinterpret_cast<const std::byte*>(control.payload.data());
      std::copy_n(text, control.payload.size(), frame.head.data() + at + kHeaderNbytes);
    }
  };
  take_control();
  if (pick_payload(connection)) return true;
  take_control();  // requests that looking for a payload has made
  return !frame.head.empty();
}

// Sends until nothing is left, the budget is used or the kernel takes no more. Returns true where there is more to send
// that the caller has to see to. The lock is released during system calls.
bool Engine::transmit(Connection& connection, uint64_t budget_nbytes, Lock& lock) {
  connection.tx_busy = true;
  bool more = false;
  while (!connection.lost && !connection.tx_broken) {
    OutFrame& frame = connection.frame;
    if (frame.idle() && !next_frame(connection)) break;
    if (frame.checksum_due) add_checksum(connection, lock);
    if (budget_nbytes == 0) {
      more = true;
      break;
    }
    std::array<iovec, kMaxParts> parts;
    size_t count = 0;
    if (frame.head_sent < frame.head.size()) {
      parts[count++] = {frame.head.data() + frame.head_sent, frame.head.size() - frame.head_sent};
    }
    const std::shared_ptr<Operation> op = frame.op;
    if (op) {
      const Range rest{frame.payload.offset + frame.payload_sent, frame.payload.nbytes - frame.payload_sent};
      count += op->buffers.fill(rest, std::span(parts).subspan(count));
      ++op->pins;
    } else if (frame.orphan_sent < frame.orphan.size()) {
      parts[count++] = {frame.orphan.data() + frame.orphan_sent, frame.orphan.size() - frame.orphan_sent};
    }
    const int fd = connection.fd.get();
    lock.unlock();
    if (op && op->codec && !std::exchange(frame.encoded, true)) op->codec->before_send(frame.payload);
    const ssize_t n = send_some(fd, std::span(parts).first(count));
    const int error = errno;
    lock.lock();
    if (n >= 0) {
      budget_nbytes -= std::min<uint64_t>(budget_nbytes, static_cast<uint64_t>(n));
      if (n > 0) connection.sent_at = now_ns();
      frame_sent(connection, static_cast<uint64_t>(n), lock);
    }
    if ((n < 0 || connection.lost) && op && !op->finished && frame.op == op &&
        frame.op->group->link(frame.stream->peer, frame.stream->channel).left()) {
      const std::shared_ptr<Group> group = frame.op->group;
      fail_group(*group, std::make_shared<const Error>(peer_left(*group, *frame.op, frame.stream->peer)));
    }
    if (op) {
      if (op->finished && frame.op == op) orphan_frame(connection);
      unpin(op);
    }
    if (connection.lost) break;
    if (n < 0 && (error == EAGAIN || error == EWOULDBLOCK)) {
      connection.tx_blocked = true;
      connection.channel.transmit_poller.add(fd, reinterpret_cast<void*>(connection.id), Interest::kWrite);
      break;
    }
    if (n < 0) {  // what the peer still sent is read first; then its end is seen
      connection.tx_broken = true;
      half_close(fd);
    }
  }
  connection.tx_busy = false;
  return more;
}

// Outside the lock, as the payload may be large; then the header is complete.
void Engine::add_checksum(Connection& connection, Lock& lock) {
  OutFrame& frame = connection.frame;
  const std::shared_ptr<Operation> op = frame.op;
  ++op->pins;
  lock.unlock();
  Range left = frame.payload;
  while (left.nbytes > 0) {
    const Buffer part = op->buffers.front(left);
    frame.header.payload_crc = crc32c(part.data, part.nbytes, frame.header.payload_crc);
    left.offset += part.nbytes;
    left.nbytes -= part.nbytes;
  }
  lock.lock();
  encode(frame.header, frame.head.data() + frame.header_at);
  frame.checksum_due = false;
  if (op->finished && frame.op == op) orphan_frame(connection);
  unpin(op);
}

void Engine::frame_sent(Connection& connection, uint64_t nbytes, Lock& lock) {
  OutFrame& frame = connection.frame;
  const uint64_t head = std::min<uint64_t>(nbytes, frame.head.size() - frame.head_sent);
  frame.head_sent += head;
  nbytes -= head;
  if (nbytes == 0) return;
  if (!frame.op) {
    frame.orphan_sent += nbytes;
    return;
  }
  frame.payload_sent += nbytes;
  if (frame.op->finished) return;  // it failed during the call
  OutStream& stream = *frame.stream;
  if (frame.payload_sent == frame.payload.nbytes) {
    frame.op.reset();
    frame.stream = nullptr;
  }
  sent(stream, nbytes, lock);
}

void Engine::transmit_loop(Channel& channel) {
  std::array<PollEvent, 64> events;
  while (true) {
    const size_t count = channel.transmit_poller.wait(events, kNever);
    Lock lock(*this);
    if (stopping_ && connections_.empty()) return;
    for (size_t i = 0; i < count; ++i) {
      const auto found = connections_.find(reinterpret_cast<uint64_t>(events[i].token));
      if (found == connections_.end() || !found->second->tx_blocked) continue;
      Connection& connection = *found->second;
      channel.transmit_poller.remove(connection.fd.get());
      connection.tx_blocked = false;
      hand_to_transmit_thread(connection);
    }
    auto& queue = channel.transmit_queue;
    for (size_t turns = queue.size(); turns > 0 && !queue.empty(); --turns) {
      const uint64_t id = queue.front();
      queue.pop_front();
      const auto found = connections_.find(id);
      if (found == connections_.end()) continue;
      const ConnectionPtr connection = found->second;
      connection->tx_queued = false;
      if (connection->tx_busy || connection->tx_blocked) continue;
      if (transmit(*connection, kTurn_nbytes, lock)) hand_to_transmit_thread(*connection);
      if (stopping_) channel.receive_poller.wake();  // it half-closes what has nothing left to send
    }
  }
}

}  // namespace mccl
