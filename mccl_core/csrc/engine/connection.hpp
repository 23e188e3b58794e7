// One authenticated connection to another process, shared by all groups that have both as members.
//
// The transmit side is under the engine's lock; whoever set `tx_busy` owns the socket's sending half and `frame` while
// the lock is released. The receive side belongs to its channel's receive thread, but for `in` and `rx_in`, which are
// under the lock.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.hpp"
#include "base/pool.hpp"
#include "engine/channel.hpp"
#include "engine/group.hpp"
#include "engine/operation.hpp"
#include "transport/frame.hpp"

namespace mccl {

struct ControlFrame {
  FrameHeader header;
  std::string payload;
};

// What is being sent: control frames and the header of a data frame, then that frame's payload.
struct OutFrame {
  std::vector<std::byte> head;
  std::shared_ptr<Operation> op;  // null where there is no payload, or where it was copied to `orphan`
  OutStream* stream = nullptr;
  FrameHeader header;             // of the payload
  size_t header_at = 0;           // in the head
  bool checksum_due = false;      // the header still lacks it
  Range payload;                  // in the op's address space
  std::vector<std::byte> orphan;  // the rest of a failed op's payload: the frame must be finished all the same
  size_t head_sent = 0;
  uint64_t payload_sent = 0;
  uint64_t orphan_sent = 0;
  bool encoded = false;  // the op's codec has seen the payload

  bool idle() const {
    return head_sent == head.size() && payload_sent == payload.nbytes && orphan_sent == orphan.size();
  }
  void clear() {
    head.clear();
    op.reset();
    stream = nullptr;
    checksum_due = false;
    payload = {};
    orphan.clear();
    head_sent = 0;
    payload_sent = orphan_sent = 0;
    encoded = false;
  }
};

class Connection {
 public:
  Connection(uint64_t id, Channel& channel, Fd socket, ProcessId peer, int32_t lane, std::string peer_host,
             uint64_t credit, size_t scratch_nbytes, PoolPtr memory)
      : pool(std::move(memory)),
        id(id),
        channel(channel),
        fd(std::move(socket)),
        process(std::move(peer)),
        lane(lane),
        host(std::move(peer_host)),
        credit_nbytes(credit),
        peer_credit_nbytes(credit),
        scratch(scratch_nbytes) {}

  const PoolPtr pool;  // first: what follows lies in it
  const uint64_t id;
  Channel& channel;  // whose threads serve it; the engine's
  Fd fd;
  const ProcessId process;
  const int32_t lane;  // which of the connections with that process (see Link)
  const std::string host;
  bool lost = false;           // the socket is of no use any more
  PeerWaits* waits = nullptr;  // the process's, in the engine's metrics

  // --- signs of life (heartbeat.cpp) ---
  TimePoint sent_at = now_ns();   // when the kernel last took bytes
  TimePoint heard_at = now_ns();  // when bytes last came
  TimePoint beat_at = now_ns();   // when to see whether a heartbeat is due
  int64_t peer_interval_ms = 0;   // the peer's own interval, once it has told
  bool beat_queued = false;       // a heartbeat is among the control frames

  // --- transmit ---
  bool tx_busy = false;     // some thread is sending
  bool tx_queued = false;   // waits in the transmit thread's queue
  bool tx_blocked = false;  // the kernel's buffer is full: the transmit thread waits until it is writable
  bool tx_broken = false;   // sending failed; the receive thread will see the end of the stream
  OutFrame frame;
  template <class T>
  using ByStream = std::pmr::unordered_map<StreamKey, T, StreamKeyHash>;
  ByStream<OutStream*> out{pool.get()};
  std::vector<OutStream*> ready;    // may have sendable bytes; sorted by the op's order
  std::vector<OutStream*> starved;  // had no credit
  std::pmr::deque<ControlFrame> control{pool.get()};
  uint64_t credit_nbytes;                       // what may still be sent without a grant
  uint64_t owed_nbytes = 0;                     // credit to return to the peer
  uint64_t peer_credit_nbytes;                  // what the peer may still send without a grant
  bool credit_queued = false;                   // a frame of type kCredit is among the control frames
  ByStream<uint64_t> early_grants{pool.get()};  // for ops not posted here yet

  // --- receive ---
  std::vector<std::byte> scratch;
  size_t begin = 0;
  size_t end = 0;
  FrameHeader header;         // of the frame whose payload is being read
  uint32_t left_nbytes = 0;   // of that payload
  InStream* rx_in = nullptr;  // its stream; null: the payload is dropped
  bool unverified = false;    // its checksum has not been looked at
  uint32_t cost_nbytes = 0;   // credit of the frame that is being read, where no parked block has taken it over
  // What a peer can make this process keep is bounded: see Engine::most_waiting.
  size_t unposted = 0;          // streams in `in` that belong to no op yet
  size_t parked_granted = 0;    // parked blocks that cost no credit
  bool forgot_request = false;  // from then on all streams are granted as if it had been asked for
  ByStream<InStream> in{pool.get()};
};

}  // namespace mccl
