// Signs of life. A connection on which nothing was sent for an interval carries a heartbeat, a header alone, which
// tells the interval; a process of which nothing was read for three of them is lost. This is the receive thread's
// business: a caller that computes for minutes, with Python's interpreter lock or without, is not silent.
#include <algorithm>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
constexpr int64_t kMissedBeats = 3;
constexpr int64_t kNsPerMs = 1'000'000;
}  // namespace

void Engine::queue_heartbeat(Connection& connection) {
  // A full socket and a waiting frame are signs of life enough, or soon will be.
  if (connection.tx_blocked || std::exchange(connection.beat_queued, true)) return;
  ControlFrame beat;
  beat.header.type = FrameType::kHeartbeat;
  beat.header.offset = static_cast<uint64_t>(options_.heartbeat_interval_ms);
  queue_control(connection, std::move(beat));
}

// Sends what is due; returns when the next one will be. What falls due soon goes at once, so that the beats of many
// connections come to share one wake-up.
TimePoint Engine::beat(TimePoint now) {
  if (stopping_) return kNever;
  const TimePoint interval = options_.heartbeat_interval_ms * kNsPerMs;
  TimePoint next = kNever;
  for (const auto& [id, connection] : connections_) {
    if (connection->beat_at <= now) {
      const bool idle = connection->sent_at <= now - interval / 4 * 3;
      if (idle) queue_heartbeat(*connection);
      connection->beat_at = interval + (idle ? now : connection->sent_at);
    }
    next = std::min(next, connection->beat_at);
  }
  return next;
}

// Where this process did not run for a while (it was stopped, or its machine slept), it has not listened either.
void Engine::excuse(TimePoint late) {
  if (late < options_.heartbeat_interval_ms * kNsPerMs / 2) return;
  for (const auto& [id, connection] : connections_) connection->heard_at += late;
}

// Ends the connections to processes that are silent; returns when the next one would be.
TimePoint Engine::check_silence(TimePoint now) {
  struct Peer {
    TimePoint heard_at = 0;
    int64_t interval_ms = 0;
    std::vector<ConnectionPtr> connections;
  };
  std::map<ProcessId, Peer> peers;
  for (const auto& [id, connection] : connections_) {
    Peer& peer = peers[connection->process];
    peer.heard_at = std::max(peer.heard_at, connection->heard_at);
    peer.interval_ms = std::max({peer.interval_ms, connection->peer_interval_ms, options_.heartbeat_interval_ms});
    peer.connections.push_back(connection);
  }
  const auto silent_from = [](const Peer& peer, int64_t beats) {
    return peer.heard_at + beats * peer.interval_ms * kNsPerMs;
  };
  TimePoint next = kNever;
  bool any = false;
  bool all = peers.size() > 1;
  for (const auto& [process, peer] : peers) {
    if (silent_from(peer, kMissedBeats) <= now) {
      any = true;
    } else {
      next = std::min(next, silent_from(peer, kMissedBeats));
    }
    // A live one is heard once an interval: whoever has missed two fell silent together with the others.
    if (silent_from(peer, kMissedBeats - 1) > now) all = false;
  }
  if (!any) return next;
  if (all) blame_own_network(kMissedBeats * options_.heartbeat_interval_ms);
  for (const auto& [process, peer] : peers) {
    if (!all && silent_from(peer, kMissedBeats) > now) continue;
    const int64_t silence_ms = (now - peer.heard_at) / kNsPerMs;
    for (const ConnectionPtr& connection : peer.connections) {
      connection_lost(connection,
                      "has been silent for " + std::to_string(silence_ms) +
                          " ms: its process is stopped, its machine down or asleep, or a cable or switch between",
                      0);
    }
  }
  return next;
}

// Nobody is heard any more: it is this rank that is cut off.
void Engine::blame_own_network(int64_t silence_ms) {
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    if (group->world() < 3) continue;  // of two, either may be
    ErrorInfo info;
    info.code = Code::kPeerLost;
    info.peer = group->rank;
    info.detail = "has heard from none of the other ranks for " + std::to_string(silence_ms) +
                  " ms: it is cut off from the network";
    info.advice = "See to this machine's cable, switch and network settings";
    fail_group(*group, std::move(info));
  }
}

void Engine::on_heartbeat(Connection& connection, const FrameHeader& header) {
  constexpr uint64_t kLongestInterval_ms = 3'600'000;
  connection.peer_interval_ms = static_cast<int64_t>(std::min(header.offset, kLongestInterval_ms));
}

}  // namespace mccl
