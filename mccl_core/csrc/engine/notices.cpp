// How members tell each other that a group has failed, and what is kept of it for a group that is not made here yet.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
// Payload of an error frame: code, culprit's rank, then "host\0detail\0advice". The header has the op and its ticket.
std::string encode_error(const ErrorInfo& info) {
  std::string payload(1, static_cast<char>(info.code));
  const int32_t culprit = info.peer >= 0 ? info.peer : info.rank;
  payload.append(reinterpret_cast<const char*>(&culprit), sizeof culprit);
  payload += info.peer_host;
  payload += '\0';
  payload += info.detail;
  payload += '\0';
  payload += info.advice;
  if (payload.size() > kMaxErrorNbytes) payload.resize(kMaxErrorNbytes);
  return payload;
}
}  // namespace

ControlFrame Engine::error_notice(const Group& group, const Error& error) {
  ControlFrame notice;
  notice.header.type = FrameType::kError;
  notice.header.key.group = group.id;
  if (error.info().ticket != 0) {
    notice.header.key.sequence = error.info().ticket;
    notice.header.fingerprint.kind = kind_of(error.info().op);
  }
  notice.payload = encode_error(error.info());
  return notice;
}

void Engine::on_error_frame(Connection& connection, const FrameHeader& header, const std::byte* payload) {
  const auto found = groups_.find(header.key.group);
  if (header.payload_nbytes < 1 + sizeof(int32_t)) return;
  if (found == groups_.end()) {
    keep_notice(connection, header, payload);
    return;
  }
  Group& group = *found->second;
  ErrorInfo info;
  info.code = static_cast<Code>(std::min(static_cast<uint8_t>(payload[0]), static_cast<uint8_t>(Code::kExcluded)));
  int32_t culprit;
  std::memcpy(&culprit, payload + 1, sizeof culprit);
  info.peer = culprit >= 0 && culprit < group.world() ? culprit : -1;
  const std::string text(reinterpret_cast<const char*>(payload) + 1 + sizeof culprit,
                         header.payload_nbytes - 1 - sizeof culprit);
  const size_t split = std::min(text.find('\0'), text.size());
  info.peer_host = printable(text.substr(0, split));
  const size_t second = std::min(text.find('\0', split + 1), text.size());
  info.detail = split < text.size() ? printable(text.substr(split + 1, second - split - 1)) : "";
  info.advice = second < text.size() ? printable(text.substr(second + 1)) : "";
  if (header.key.sequence != 0) {
    info.op = to_string(header.fingerprint.kind);
    info.ticket = header.key.sequence;
  }
  const int32_t from = group.rank_of(connection.process);
  if (from != info.peer && info.detail.find("(reported by") == std::string::npos) {
    info.detail += " (reported by rank " + std::to_string(from) + ")";
  }
  fail_group(group, std::move(info));
}

// A peer may leave a group, or see it fail, before this process has made it.
void Engine::keep_notice(Connection& connection, const FrameHeader& header, const std::byte* payload) {
  constexpr size_t kMostGroups = 1024;
  constexpr std::ptrdiff_t kMostRounds = 16;  // of an agreement
  const auto found = connections_.find(connection.id);
  if (closed_groups_.contains(header.key.group) || found == connections_.end() || notices_.size() >= kMostGroups)
    return;
  auto& notices = notices_[header.key.group];
  const auto alike = std::ranges::count_if(notices, [&](const Notice& notice) {
    return notice.connection.get() == &connection && notice.header.type == header.type;
  });
  if (alike >= (header.type == FrameType::kAgree ? kMostRounds : 1)) return;
  notices.push_back({found->second, header, {payload, payload + header.payload_nbytes}});
}

void Engine::replay_notices(uint64_t group) {
  const auto found = notices_.find(group);
  if (found == notices_.end()) return;
  const std::vector<Notice> notices = std::move(found->second);
  notices_.erase(found);
  for (const Notice& notice : notices) {
    if (notice.header.type == FrameType::kGoodbye) {
      on_goodbye(*notice.connection, notice.header);
    } else if (notice.header.type == FrameType::kAgree) {
      on_agree(*notice.connection, notice.header, notice.payload.data());
    } else {
      on_error_frame(*notice.connection, notice.header, notice.payload.data());
    }
  }
}

}  // namespace mccl
