// What a frame says, and whether it may say so: nothing is believed of a header that the rules do not allow.
#include <algorithm>
#include <utility>

#include "base/crc32c.hpp"
#include "engine/engine.hpp"

namespace mccl {

namespace {
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

bool Engine::discarded(uint64_t group) const {
  if (closed_groups_.contains(group)) return true;
  const auto found = groups_.find(group);
  return found != groups_.end() && found->second->failure != nullptr;
}

// Whether what has come of a posted stream, and is coming, lies inside it and holds whole elements. Otherwise the group
// fails.
bool Engine::fits(InStream& stream) {
  const Connection& connection = *stream.connection;
  const uint64_t coming = connection.rx_in == &stream ? connection.left_nbytes : 0;
  const uint64_t element_nbytes = stream.op->element_nbytes;
  const bool inside = stream.arrived + coming <= stream.nbytes;
  // Between frames the header is that of the last one, which may have been a notice.
  const bool whole = coming == 0 || connection.header.payload_nbytes % element_nbytes == 0;
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

}  // namespace mccl
