// What is on the wire: frames of a 72-byte header and a payload.
//
// All bytes that one process sends another in one op form a *stream*, in the order of the schedule's steps. A data
// frame carries the next bytes of a stream; grants and requests name a stream offset. The header repeats what the
// sender believes the op to be (its fingerprint), so that a mismatch can name both sides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "reduce/types.hpp"

namespace mccl {

enum class FrameType : uint8_t {
  kData = 1,       // payload: bytes of a stream
  kGrant = 2,      // the sender may send up to `offset` of this stream without credit
  kRequest = 3,    // out of credit: please grant this stream as soon as you can
  kCredit = 4,     // nothing but the credit field
  kGoodbye = 5,    // the sender left this group in good order
  kError = 6,      // this group failed; payload: who, why (text)
  kHeartbeat = 7,  // the sender lives; `offset`: its interval in ms
  kWait = 8,       // whom the sender waits for in an op, or a question about that (engine/waits.hpp)
  kOver = 9,       // the op that a kWait named is over at the sender
  kAgree = 10,     // agreement on who leaves a group; payload: see engine/agreement.hpp
};

enum class OpKind : uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kPointToPoint,
  kCount,
};
const char* to_string(OpKind kind);
// By the name that to_string() gives; throws Error (kUsage) for any other.
OpKind kind_of(const std::string& name);

enum class Algorithm : uint8_t { kOnlyOne, kRing, kRecursiveDoubling, kCirculant, kTwoLevel, kCount };
const char* to_string(Algorithm algorithm);

// What all members must agree on. All-to-all sends differently sized blocks: its nbytes is 0.
struct Fingerprint {
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce_op = ReduceOp::kSum;
  DType dtype = DType::kUInt8;
  int32_t root = -1;
  uint64_t nbytes = 0;
  Algorithm algorithm = Algorithm::kOnlyOne;
  uint8_t chunk_count = 1;
  uint8_t channel_count = 1;  // at most 16
  Compression compression = Compression::kNone;

  bool operator==(const Fingerprint&) const = default;
  std::string describe() const;
};

// Names a stream between two processes. `sequence` is the group's ticket for collectives; for point-to-point
// messages it counts per (source, destination, tag).
struct StreamKey {
  uint64_t group = 0;
  uint64_t sequence = 0;
  uint32_t tag = 0;
  bool point_to_point = false;

  bool operator==(const StreamKey&) const = default;
};

struct StreamKeyHash {
  size_t operator()(const StreamKey& key) const {
    uint64_t h = key.group ^ (key.sequence * 0x9E3779B97F4A7C15ull) ^ (uint64_t{key.tag} << 1) ^ key.point_to_point;
    h ^= h >> 29;
    return static_cast<size_t>(h * 0xBF58476D1CE4E5B9ull);
  }
};

struct FrameHeader {
  FrameType type = FrameType::kCredit;
  bool on_credit = false;  // the payload was not granted: the receiver returns the credit when it is consumed
  StreamKey key;
  Fingerprint fingerprint;
  uint64_t offset = 0;  // stream offset of the payload's first byte, or of a grant's end
  uint32_t payload_nbytes = 0;
  uint32_t credit_nbytes = 0;  // credit returned to the receiver of this frame
  bool checked = false;        // payload_crc is that of the payload
  uint32_t payload_crc = 0;
};

inline constexpr size_t kHeaderNbytes = 72;
inline constexpr uint32_t kMaxPayloadNbytes = 16u << 20;
inline constexpr uint32_t kMaxErrorNbytes = 4096;
inline constexpr uint32_t kMaxAgreeNbytes = 8192;
// Checked payloads are read whole before any of their bytes is used.
inline constexpr uint32_t kMaxCheckedNbytes = 64u << 10;
// What a frame that nobody has asked for costs its receiver besides its payload: its credit, too, is counted.
inline constexpr uint32_t kFrameCost_nbytes = 1024;

using HeaderBytes = std::array<std::byte, kHeaderNbytes>;
void encode(const FrameHeader& header, std::byte* out);
// Throws Error (kProtocol) for anything that encode() cannot have written.
FrameHeader decode(const std::byte* in);

}  // namespace mccl
