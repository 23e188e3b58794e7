// Everything that can be configured in the core. It arrives whole from mccl_core/config.py, where each default
// stands once; C++ reads no environment.
#pragma once

#include <cstdint>

namespace mccl {

struct Options {
  uint64_t segment_nbytes;        // largest payload of one frame
  uint64_t scratch_nbytes;        // receive scratch of one connection; reductions read from it while it is in cache
  uint64_t inline_nbytes;         // ops up to this size are sent by the thread that made them sendable
  uint64_t credit_nbytes;         // pool of one connection for bytes sent before they were granted
  uint64_t eager_grant_nbytes;    // streams from this size on are granted without being asked
  uint64_t socket_buffer_nbytes;  // SO_SNDBUF and SO_RCVBUF; 0 leaves the system's autotuning on
  uint64_t flight_record_ops;     // so many of the latest ops are remembered
  int64_t linger_ms;              // longest wait at shutdown for peers to take what was sent
  int64_t heartbeat_interval_ms;  // an idle connection carries a sign of life this often; at least 1
  bool transport_crc;             // payloads carry a checksum
};

}  // namespace mccl
