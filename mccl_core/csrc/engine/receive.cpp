// Receiving: the receive thread reads every connection as soon as it has bytes, whatever the ops are doing. Bytes go
// straight into the op where they are to be copied, through a cache-sized scratch where they are to be reduced, and
// into parking blocks where nobody can use them yet.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/crc32c.hpp"
#include "engine/engine.hpp"
#include "io/socket.hpp"

namespace mccl {

namespace {
constexpr size_t kMaxParts = 32;
constexpr size_t kIdleRead_nbytes = 16 * 1024;  // read where a header is expected: small frames come whole, and a
                                                // large one leaves little to be copied out of the scratch
constexpr size_t kAhead_nbytes = 4 * 1024;      // read beyond a payload that goes straight to its place
constexpr uint32_t kDirect_nbytes = 4 * 1024;   // smaller payloads are not worth a system call of their own
constexpr int kReadsPerTurn = 8;
constexpr size_t kMaxParkedGranted = 64 * 1024;  // blocks; honest peers park a few for each op

[[noreturn]] void broken_rule(std::string detail, std::string advice) {
  ErrorInfo info;
  info.code = Code::kProtocol;
  info.detail = std::move(detail);
  info.advice = std::move(advice);
  throw Error(std::move(info));
}
constexpr const char* kOneRelease = "Check that all ranks run the same release of mccl-fleet";
}  // namespace

// Where the next read puts its bytes: first into `direct` (the op's memory or a parking block), then into the scratch.
struct Engine::Target {
  std::array<iovec, kMaxParts + 1> parts;
  size_t count = 0;
  uint64_t direct_nbytes = 0;
  uint64_t room_nbytes = 0;
  std::shared_ptr<Operation> op;  // pinned where bytes go into its memory
  InStream* stream = nullptr;
  bool parking = false;
  std::shared_ptr<std::byte[]> block;
};

Parked& Engine::parking_block(Connection& connection, InStream& stream) {
  if (stream.parked.empty() || stream.parked.back().filled == stream.parked.back().nbytes) {
    Parked block;
    block.nbytes = connection.left_nbytes;
    metrics_.parked(stream.fingerprint, block.nbytes);
    block.data = allocate(connection.pool, block.nbytes);
    block.on_credit = connection.header.on_credit;
    block.cost_nbytes = std::exchange(connection.cost_nbytes, 0);
    if (!block.on_credit) ++connection.parked_granted;
    stream.parked.push_back(std::move(block));
  }
  return stream.parked.back();
}

Engine::Target Engine::choose_target(Connection& connection) {
  Target target;
  const uint32_t left = connection.left_nbytes;
  InStream* stream = connection.rx_in;
  const auto add = [&](void* data, size_t nbytes) {
    target.parts[target.count++] = {data, nbytes};
    target.room_nbytes += nbytes;
  };
  if (connection.begin == connection.end) connection.begin = connection.end = 0;
  if (left >= kDirect_nbytes && stream != nullptr && connection.end == 0 && !connection.header.checked) {
    if (stream->parked.empty() && can_consume(*stream)) {
      const auto index = static_cast<size_t>(stream->steps[stream->cursor]);
      const Step& step = stream->op->steps[index];
      if (step.action == Action::kCopy && !stream->op->codec) {
        const uint64_t done = stream->op->states[index].received;
        const auto parts = std::span(target.parts).first(kMaxParts);
        const uint64_t n = std::min<uint64_t>(left, step.recv.nbytes - done);
        target.count = stream->op->buffers.fill({step.recv.offset + done, n}, parts);
        for (size_t i = 0; i < target.count; ++i) target.direct_nbytes += target.parts[i].iov_len;
        target.room_nbytes = target.direct_nbytes;
        target.op = stream->op->shared_from_this();
        target.stream = stream;
        stream->busy = true;
        ++target.op->pins;
      }
    } else {
      Parked& block = parking_block(connection, *stream);
      add(block.data.get() + block.filled, left);
      target.direct_nbytes = left;
      target.stream = stream;
      target.parking = true;
      target.block = block.data;
    }
  }
  if (target.direct_nbytes > 0) {
    if (target.direct_nbytes == left) add(connection.scratch.data(), kAhead_nbytes);
    return target;
  }
  // Whole scratch for bytes to reduce; what is left over in it is part of a header or of an element.
  auto* data = connection.scratch.data();
  std::memmove(data, data + connection.begin, connection.end - connection.begin);
  connection.end -= connection.begin;
  connection.begin = 0;
  size_t room = connection.scratch.size() - connection.end;
  if (left == 0) room = std::min(room, kIdleRead_nbytes);
  add(data + connection.end, room);
  return target;
}

// Books what went to the direct part of the target. Returns how many bytes that were.
uint64_t Engine::finish_target(Connection& connection, const Target& target, uint64_t nbytes, Lock& lock) {
  const uint64_t direct = std::min(nbytes, target.direct_nbytes);
  took(connection, direct);
  const bool alive = connection.rx_in == target.stream && target.stream != nullptr;
  if (target.parking) {
    if (alive) {
      target.stream->parked.back().filled += static_cast<uint32_t>(direct);
      target.stream->arrived += direct;
      drain(*target.stream, lock);
    } else if (connection.header.on_credit) {
      return_credit(connection, direct);
    }
  } else if (target.op) {
    if (alive) {
      target.stream->busy = false;
      target.stream->arrived += direct;
      if (connection.header.on_credit) return_credit(connection, direct);
      if (direct > 0) received(*target.stream, direct, lock);
    } else if (connection.header.on_credit) {
      return_credit(connection, direct);
    }
    unpin(target.op);
  }
  return direct;
}

// One turn on a readable connection. Returns false where it came to its end.
bool Engine::receive(Connection& connection) {
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    Lock lock(*this);
    if (connection.lost) return false;
    Target target = choose_target(connection);
    const int fd = connection.fd.get();
    lock.unlock();
    const ssize_t n = receive_some(fd, std::span(target.parts).first(target.count));
    const int error = errno;
    lock.lock();
    const uint64_t got = n > 0 ? static_cast<uint64_t>(n) : 0;
    if (n > 0) connection.heard_at = now_ns();
    connection.end += got - finish_target(connection, target, got, lock);
    if (n == 0 || (n < 0 && error != EAGAIN && error != EWOULDBLOCK)) {
      const auto found = connections_.find(connection.id);
      if (found != connections_.end()) {
        connection_lost(ConnectionPtr(found->second), n == 0 ? "closed the connection" : "cut the connection",
                        n == 0 ? 0 : error);
      }
      return false;
    }
    if (n < 0) return true;
    try {
      parse(connection, lock);
    } catch (const Error& fault) {
      const auto found = connections_.find(connection.id);
      if (found != connections_.end()) {
        connection_lost(ConnectionPtr(found->second), fault.info().detail + ". " + fault.info().advice, 0,
                        Code::kProtocol);
      }
      return false;
    }
    if (got < target.room_nbytes) return true;  // the socket is empty
  }
  return true;
}

void Engine::parse(Connection& connection, Lock& lock) {
  while (connection.begin < connection.end && !connection.lost) {
    const size_t available = connection.end - connection.begin;
    const std::byte* data = connection.scratch.data() + connection.begin;
    if (connection.left_nbytes == 0) {
      if (available < kHeaderNbytes) return;
      connection.header = decode(data);
      const FrameType type = connection.header.type;
      if (type == FrameType::kRequest || type == FrameType::kWait || type == FrameType::kAgree) {
        refuse_if_swamped(connection);
      }
      if (type == FrameType::kError || type == FrameType::kAgree) {
        const size_t whole = kHeaderNbytes + connection.header.payload_nbytes;
        if (available < whole) return;
        connection.begin += whole;
        if (type == FrameType::kError) on_error_frame(connection, connection.header, data + kHeaderNbytes);
        if (type == FrameType::kAgree && whole > kHeaderNbytes) {
          on_agree(connection, connection.header, data + kHeaderNbytes);
        }
        continue;
      }
      connection.begin += kHeaderNbytes;
      on_header(connection, lock);
    } else {
      if (connection.unverified) {
        if (available < connection.left_nbytes) return;
        verify(connection, lock);
        continue;
      }
      const uint64_t n = deliver(connection, data, std::min<uint64_t>(available, connection.left_nbytes), lock);
      if (n == 0) return;
      connection.begin += n;
      took(connection, n);
    }
  }
}

// These frames are answered. Whoever asks on and on and does not read the answers must not fill the memory with them.
void Engine::refuse_if_swamped(const Connection& connection) const {
  constexpr size_t kMostUnread = 16 * 1024;
  for (const auto& [id, other] : connections_) {
    if (other->control.size() < kMostUnread || other->process != connection.process) continue;
    broken_rule("asks and does not read the answers", kOneRelease);
  }
}

bool Engine::discarded(uint64_t group) const {
  if (closed_groups_.contains(group)) return true;
  const auto found = groups_.find(group);
  return found != groups_.end() && found->second->failure != nullptr;
}

void Engine::on_header(Connection& connection, Lock& lock) {
  const FrameHeader& header = connection.header;
  if (header.credit_nbytes > 0) {
    connection.credit_nbytes = std::min(connection.credit_nbytes + header.credit_nbytes, options_.credit_nbytes);
    for (OutStream* stream : connection.starved) mark_ready(*stream);
    connection.starved.clear();
    kick(connection, false, lock);
  }
  switch (header.type) {
    case FrameType::kData: on_data(connection, lock); break;
    case FrameType::kGrant: {
      const auto found = connection.out.find(header.key);
      if (found != connection.out.end()) {
        OutStream& stream = *found->second;
        stream.granted = std::max(stream.granted, header.offset);
        stream.requested = false;
        mark_ready(stream);
        kick(connection, false, lock);
      } else if (!discarded(header.key.group) && !was_posted(header.key, connection.process, true)) {
        // One that is not kept is asked for again.
        const bool known = connection.early_grants.contains(header.key);
        if (known || connection.early_grants.size() < most_waiting()) {
          connection.early_grants[header.key] = header.offset;
        }
      }
      break;
    }
    case FrameType::kRequest: {
      if (discarded(header.key.group) || unexpected(connection)) break;
      if (connection.unposted >= most_waiting() && !connection.in.contains(header.key)) {
        connection.forgot_request = true;
        break;
      }
      InStream& stream = in_stream(connection, header.key);
      stream.requested = true;
      stream.regrant = true;
      stream.fingerprint = header.fingerprint;
      stream.announced = true;
      if (stream.op == nullptr) {
        offer(header.key, lock);
      } else if (matches(stream)) {
        update_grant(stream);
      }
      break;
    }
    case FrameType::kGoodbye: on_goodbye(connection, header); break;
    case FrameType::kHeartbeat: on_heartbeat(connection, header); break;
    case FrameType::kWait: on_wait(connection, header); break;
    case FrameType::kOver: on_over(connection, header); break;
    case FrameType::kCredit:
    case FrameType::kError:
    case FrameType::kAgree: break;
  }
}

// A grant for an op that is over already says nothing new.
bool Engine::was_posted(const StreamKey& key, const ProcessId& process, bool sending) const {
  const auto found = groups_.find(key.group);
  if (found == groups_.end()) return false;
  const Group& group = *found->second;
  if (!key.point_to_point && key.tag != 0) return std::ranges::find(group.nested, key) != group.nested.end();
  if (!key.point_to_point) return key.sequence < group.next_ticket;
  for (size_t rank = 0; rank < group.members.size(); ++rank) {
    if (group.members[rank].process != process) continue;
    StreamKey counter = key;
    counter.sequence = rank;
    const auto& sequences = sending ? group.next_sent : group.next_received;
    const auto next = sequences.find(counter);
    return next != sequences.end() && key.sequence <= next->second;
  }
  return false;
}

// Bytes for an op that is under way or over here and expects none from there: the ranks disagree, and the group fails.
bool Engine::unexpected(Connection& connection) {
  const FrameHeader& header = connection.header;
  if (connection.in.contains(header.key) || !was_posted(header.key, connection.process, false)) return false;
  fail_unexpected(*groups_.at(header.key.group), connection, header.key, header.fingerprint);
  return true;
}

void Engine::on_data(Connection& connection, Lock& lock) {
  const FrameHeader& header = connection.header;
  if (header.checked != options_.transport_crc) {
    broken_rule(header.checked ? "sent a payload with a checksum" : "sent a payload without a checksum",
                "Set MCCL_TRANSPORT_CRC alike on all ranks");
  }
  if (header.on_credit) {
    const uint64_t cost = uint64_t{header.payload_nbytes} + kFrameCost_nbytes;
    if (cost > connection.peer_credit_nbytes) broken_rule("sent more than it has credit for", kOneRelease);
    connection.peer_credit_nbytes -= cost;
    connection.cost_nbytes = kFrameCost_nbytes;
  }
  connection.left_nbytes = header.payload_nbytes;
  connection.unverified = header.checked;
  connection.rx_in = nullptr;
  if (discarded(header.key.group) || unexpected(connection)) return;
  InStream& stream = in_stream(connection, header.key);
  if (header.offset != stream.arrived) broken_rule("sent bytes out of their order", kOneRelease);
  if (!header.on_credit && header.offset + header.payload_nbytes > stream.granted) {
    broken_rule("sent bytes that it had no grant for", kOneRelease);
  }
  if (connection.parked_granted >= kMaxParkedGranted) broken_rule("sent too many small frames", kOneRelease);
  stream.fingerprint = header.fingerprint;
  stream.announced = true;
  connection.rx_in = &stream;
  if (stream.op == nullptr) offer(header.key, lock);
  if (connection.rx_in == nullptr) return;
  if (stream.op == nullptr || !matches(stream) || !fits(stream)) return;  // in error the stream is gone with its group
  if (stream.arrived == 0 && stream.op->ready) Metrics::heard(*stream.op, *connection.waits, now_ns());
}

// Whether what has come of a posted stream, and is coming, lies inside it and holds whole elements. Otherwise the group
// fails.
bool Engine::fits(InStream& stream) {
  const Connection& connection = *stream.connection;
  const uint64_t coming = connection.rx_in == &stream ? connection.left_nbytes : 0;
  const uint64_t element_nbytes = stream.op->element_nbytes;
  const bool inside = stream.arrived + coming <= stream.nbytes;
  const bool whole = connection.header.payload_nbytes % element_nbytes == 0 || connection.rx_in != &stream;
  const bool parked_whole =
      std::ranges::all_of(stream.parked, [&](const Parked& block) { return block.nbytes % element_nbytes == 0; });
  if (inside && whole && parked_whole) return true;
  ErrorInfo info;
  info.code = Code::kProtocol;
  info.detail =
      (inside ? "sent a part of an element of " : "sent bytes beyond the end of ") + stream.fingerprint.describe();
  info.op = to_string(stream.op->fingerprint.kind);
  info.ticket = stream.op->ticket;
  info.peer = stream.peer;
  fail_group(*stream.op->group, std::move(info));
  return false;
}

// Nothing of a payload with a checksum is used before it has been found intact.
void Engine::verify(Connection& connection, Lock& lock) {
  const std::byte* data = connection.scratch.data() + connection.begin;
  lock.unlock();
  const uint32_t crc = crc32c(data, connection.left_nbytes);
  lock.lock();
  connection.unverified = false;
  if (crc == connection.header.payload_crc) return;
  broken_rule("sent a payload that arrived damaged (its CRC-32C is wrong)",
              "Check the cables, adapters and memory of both hosts; then make a new group");
}

// Books payload bytes as read. At a frame's end its own credit goes back, unless a parked block has it.
void Engine::took(Connection& connection, uint64_t nbytes) {
  connection.left_nbytes -= static_cast<uint32_t>(nbytes);
  if (connection.left_nbytes == 0) return_credit(connection, std::exchange(connection.cost_nbytes, 0));
}

// Takes payload bytes from the scratch. Returns how many; 0 where an element is not complete yet.
uint64_t Engine::deliver(Connection& connection, const std::byte* data, uint64_t nbytes, Lock& lock) {
  InStream* stream = connection.rx_in;
  if (stream == nullptr) {
    if (connection.header.on_credit) return_credit(connection, nbytes);
    return nbytes;
  }
  if (!stream->parked.empty() || !can_consume(*stream)) {
    Parked& block = parking_block(connection, *stream);
    std::copy_n(data, nbytes, block.data.get() + block.filled);
    block.filled += static_cast<uint32_t>(nbytes);
    stream->arrived += nbytes;
    drain(*stream, lock);
    return nbytes;
  }
  const Operation& op = *stream->op;
  const auto index = static_cast<size_t>(stream->steps[stream->cursor]);
  nbytes = std::min(nbytes, op.steps[index].recv.nbytes - op.states[index].received);
  if (op.steps[index].action == Action::kReduce || op.codec) nbytes -= nbytes % op.element_nbytes;
  if (nbytes == 0) return 0;
  stream->arrived += nbytes;
  if (connection.header.on_credit) return_credit(connection, nbytes);
  consume(*stream, data, nbytes, lock);
  return nbytes;
}

void Engine::receive_loop(Channel& channel) {
  std::array<PollEvent, 64> events;
  TimePoint linger_until = kNever;
  while (true) {
    TimePoint wake_at;
    {
      Lock lock(*this);
      if (stopping_ && linger_until == kNever) linger_until = deadline_after_ms(options_.linger_ms);
      if (stopping_) half_close_idle();
      if (stopping_ && (connections_.empty() || now_ns() >= linger_until)) {
        for (const auto& [id, connection] : connections_) connection->lost = true;
        connections_.clear();
        by_process_.clear();
        return;
      }
      wake_at = linger_until;
      if (&channel == channels_.front().get()) wake_at = std::min(wake_at, next_deadline_);
    }
    const size_t count = channel.receive_poller.wait(events, wake_at);
    for (size_t i = 0; i < count; ++i) {
      ConnectionPtr connection;
      {
        Lock lock(*this);
        const auto found = connections_.find(reinterpret_cast<uint64_t>(events[i].token));
        if (found == connections_.end()) continue;
        connection = found->second;
      }
      receive(*connection);
    }
    const TimePoint now = now_ns();
    if (now >= wake_at) {
      Lock lock(*this);
      excuse(now - wake_at);
      next_deadline_ = std::min({expire(now), watch(now), beat(now)});
      // Where more than one batch of sockets was readable, some of the silent may just not have been read.
      next_deadline_ = std::min(next_deadline_, count < events.size() ? check_silence(now) : now);
    }
  }
}

}  // namespace mccl
