#include "transport/frame.hpp"

#include <bit>
#include <cstring>

#include "base/crc32c.hpp"
#include "base/error.hpp"

namespace mccl {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian, and so are all our hosts");

namespace {
constexpr uint32_t kMagic = 0x4C43434D;  // "MCCL"
constexpr uint8_t kVersion = 2;
constexpr uint8_t kFlagOnCredit = 1;
constexpr uint8_t kFlagPointToPoint = 2;
constexpr uint8_t kFlagChecked = 4;
constexpr uint8_t kFlags = kFlagOnCredit | kFlagPointToPoint | kFlagChecked;

struct Wire {
  uint32_t magic;
  uint8_t version;
  uint8_t type;
  uint8_t flags;
  uint8_t kind;
  uint64_t group;
  uint64_t sequence;
  uint32_t tag;
  int32_t root;
  uint64_t offset;
  uint64_t nbytes;
  uint32_t payload_nbytes;
  uint32_t credit_nbytes;
  uint8_t reduce_op;  // and in the upper four bits the compression
  uint8_t dtype;
  uint8_t algorithm;  // in the lower half; in the upper one the number of channels, less one
  uint8_t chunk_count;
  uint32_t payload_crc;
  uint32_t reserved;
  uint32_t crc;
};
static_assert(sizeof(Wire) == kHeaderNbytes);

constexpr uint32_t max_payload_nbytes(FrameType type) {
  switch (type) {
    case FrameType::kData: return kMaxPayloadNbytes;
    case FrameType::kError: return kMaxErrorNbytes;
    case FrameType::kAgree: return kMaxAgreeNbytes;
    default: return 0;
  }
}

[[noreturn]] void malformed(const std::string& what) {
  ErrorInfo info;
  info.code = Code::kProtocol;
  info.detail = "sent a malformed frame: " + what;
  info.advice = "Check that all ranks run the same release of mccl-fleet";
  throw Error(std::move(info));
}
}  // namespace

const char* to_string(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce: return "all_reduce";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kReduce: return "reduce";
    case OpKind::kAllGather: return "all_gather";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kGather: return "gather";
    case OpKind::kScatter: return "scatter";
    case OpKind::kAllToAll: return "all_to_all";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kPointToPoint: return "send/recv";
    case OpKind::kCount: break;
  }
  return "unknown op";
}

OpKind kind_of(const std::string& name) {
  for (uint8_t i = 0; i < static_cast<uint8_t>(OpKind::kCount); ++i) {
    if (name == to_string(static_cast<OpKind>(i))) return static_cast<OpKind>(i);
  }
  throw_usage("no collective is called " + name);
}

const char* to_string(Algorithm algorithm) {
  static constexpr const char* kNames[] = {"", "ring", "recursive_doubling", "circulant", "two_level"};
  return algorithm < Algorithm::kCount ? kNames[static_cast<size_t>(algorithm)] : "unknown algorithm";
}

std::string Fingerprint::describe() const {
  std::string text = to_string(kind);
  text += "(";
  if (kind != OpKind::kBarrier) {
    text += to_string(dtype);
    if (compression != Compression::kNone) text += std::string(" as ") + to_string(compression);
    text += ", " + std::to_string(nbytes) + " bytes";
    if (kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter) {
      text += std::string(", ") + to_string(reduce_op);
    }
    if (algorithm != Algorithm::kOnlyOne) text += std::string(", ") + to_string(algorithm);
    if (channel_count != 1) text += " on " + std::to_string(channel_count) + " channels";
    if (chunk_count != 1) text += " in " + std::to_string(chunk_count) + " chunks";
    if (root >= 0) text += ", root " + std::to_string(root);
  }
  return text + ")";
}

void encode(const FrameHeader& header, std::byte* out) {
  Wire wire{};
  wire.magic = kMagic;
  wire.version = kVersion;
  wire.type = static_cast<uint8_t>(header.type);
  wire.flags =
      static_cast<uint8_t>((header.on_credit ? kFlagOnCredit : 0) |
                           (header.key.point_to_point ? kFlagPointToPoint : 0) | (header.checked ? kFlagChecked : 0));
  wire.kind = static_cast<uint8_t>(header.fingerprint.kind);
  wire.group = header.key.group;
  wire.sequence = header.key.sequence;
  wire.tag = header.key.tag;
  wire.root = header.fingerprint.root;
  wire.offset = header.offset;
  wire.nbytes = header.fingerprint.nbytes;
  wire.payload_nbytes = header.payload_nbytes;
  wire.credit_nbytes = header.credit_nbytes;
  wire.reduce_op = static_cast<uint8_t>(static_cast<unsigned>(header.fingerprint.reduce_op) |
                                        static_cast<unsigned>(header.fingerprint.compression) << 4);
  wire.dtype = static_cast<uint8_t>(header.fingerprint.dtype);
  wire.algorithm = static_cast<uint8_t>(static_cast<unsigned>(header.fingerprint.algorithm) |
                                        (header.fingerprint.channel_count - 1u) << 4);
  wire.chunk_count = header.fingerprint.chunk_count;
  wire.payload_crc = header.payload_crc;
  wire.crc = crc32c(&wire, offsetof(Wire, crc));
  std::memcpy(out, &wire, sizeof wire);
}

FrameHeader decode(const std::byte* in) {
  Wire wire;
  std::memcpy(&wire, in, sizeof wire);
  if (wire.magic != kMagic) malformed("wrong magic number");
  if (wire.crc != crc32c(&wire, offsetof(Wire, crc))) malformed("header checksum");
  if (wire.version != kVersion) malformed("version " + std::to_string(wire.version));
  if (wire.type < static_cast<uint8_t>(FrameType::kData) || wire.type > static_cast<uint8_t>(FrameType::kAgree)) {
    malformed("type " + std::to_string(wire.type));
  }
  if ((wire.flags & ~kFlags) != 0 || wire.reserved != 0) malformed("flags");
  if (wire.kind >= static_cast<uint8_t>(OpKind::kCount)) malformed("op kind " + std::to_string(wire.kind));
  const auto reduce_op = static_cast<ReduceOp>(wire.reduce_op & 0xF);
  const auto compression = static_cast<Compression>(wire.reduce_op >> 4);
  if (reduce_op >= ReduceOp::kCount) malformed("reduce op");
  if (compression >= Compression::kCount) malformed("compression");
  if (wire.dtype >= static_cast<uint8_t>(DType::kCount)) malformed("dtype");
  if ((wire.algorithm & 0xF) >= static_cast<uint8_t>(Algorithm::kCount)) malformed("algorithm");
  const auto type = static_cast<FrameType>(wire.type);
  const uint32_t most = max_payload_nbytes(type);
  if (wire.payload_nbytes > most) malformed("payload of " + std::to_string(wire.payload_nbytes) + " bytes");
  if (type == FrameType::kData && wire.payload_nbytes == 0) malformed("data frame without data");
  if (wire.payload_nbytes > kMaxCheckedNbytes && (wire.flags & kFlagChecked) != 0) malformed("too large to be checked");
  if (wire.offset > UINT64_MAX - wire.payload_nbytes) malformed("offset");

  FrameHeader header;
  header.type = type;
  header.on_credit = (wire.flags & kFlagOnCredit) != 0;
  header.key = {wire.group, wire.sequence, wire.tag, (wire.flags & kFlagPointToPoint) != 0};
  header.fingerprint = {static_cast<OpKind>(wire.kind),
                        reduce_op,
                        static_cast<DType>(wire.dtype),
                        wire.root,
                        wire.nbytes,
                        static_cast<Algorithm>(wire.algorithm & 0xF),
                        wire.chunk_count,
                        static_cast<uint8_t>((wire.algorithm >> 4) + 1),
                        compression};
  header.offset = wire.offset;
  header.payload_nbytes = wire.payload_nbytes;
  header.credit_nbytes = wire.credit_nbytes;
  header.checked = (wire.flags & kFlagChecked) != 0;
  header.payload_crc = wire.payload_crc;
  return header;
}

}  // namespace mccl
