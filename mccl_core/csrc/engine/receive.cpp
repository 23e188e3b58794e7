// Receiving: the receive thread reads every connection as soon as it has bytes, whatever the ops are doing. Bytes go
// straight into the op where they are to be copied, through a cache-sized scratch where they are to be reduced, and
// into parking blocks where nobody can use them yet.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

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
