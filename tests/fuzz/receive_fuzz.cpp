// A wrong but authenticated peer: whatever it sends, the engine's receive side neither crashes nor hangs, keeps no more
// than it has granted and given credit for, and every op settles.
//
// An input is a little program. It posts ops of a group of three in which this process is rank 0, sends frames as ranks
// 1 and 2 (by default honest ones, with the right checksums, of which single fields are then changed; or raw bytes),
// and posts more ops in between.
#include <sys/socket.h>
#include <sys/time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "base/crc32c.hpp"
#include "engine/engine.hpp"
#include "input.hpp"
#include "op/collective.hpp"

using namespace mccl;

namespace {

constexpr int kWorld = 3;
constexpr Member kMe{0, kWorld};
constexpr size_t kMostOps = 8;
constexpr uint64_t kCredit_nbytes = 128 << 10;
constexpr int kPatience_ms = 20'000;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "receive_fuzz: %s\n", what);
  std::abort();
}

Options options(bool transport_crc) {
  Options o{};
  o.segment_nbytes = 32 << 10;
  o.scratch_nbytes = 16 << 10;
  o.inline_nbytes = 16 << 10;
  o.credit_nbytes = kCredit_nbytes;
  o.eager_grant_nbytes = 32 << 10;
  o.linger_ms = 1000;
  o.heartbeat_interval_ms = 60'000;
  o.transport_crc = transport_crc;
  return o;
}

// Reused, as its threads cost more than an input; made anew now and then, as it remembers the groups that it had.
Engine& engine_for(bool transport_crc) {
  constexpr int kInputs = 2000;
  static std::unique_ptr<Engine> engines[2];
  static int used[2];
  auto& engine = engines[transport_crc];
  if (!engine || ++used[transport_crc] % kInputs == 0) engine = std::make_unique<Engine>(options(transport_crc));
  return *engine;
}

struct Posted {
  OperationPtr op;
  std::vector<std::vector<float>> memory;
  StreamKey key;
};

Buffer buffer_of(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
}

class Session {
 public:
  explicit Session(bool transport_crc) : engine_(engine_for(transport_crc)), checked_(transport_crc) {
    static uint64_t sessions = 0;
    const uint64_t number = ++sessions;
    std::vector<MemberInfo> members;
    for (int rank = 0; rank < kWorld; ++rank) {
      ProcessId process(16, static_cast<char>('a' + rank));
      std::memcpy(process.data(), &number, sizeof number);
      members.push_back({process, "host" + std::to_string(rank)});
    }
    for (int rank = 1; rank < kWorld; ++rank) {
      int pair[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) fail("socketpair");
      const timeval limit{kPatience_ms / 1000, 0};
      ::setsockopt(pair[1], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
      engine_.add_connection(Fd(pair[0]), members[static_cast<size_t>(rank)].process, 0, "host");
      peers_[rank - 1] = Fd(pair[1]);
    }
    group_ = engine_.create_group(number, 0, members);
  }

  void post(fuzz::Input& input) {
    if (posted_.size() == kMostOps) return;
    static constexpr size_t kCounts[] = {1, 63, 1000, 20'000};
    const auto what = input.take<uint8_t>();
    const size_t count = kCounts[input.take<uint8_t>() % 4];
    auto posted = std::make_unique<Posted>();
    auto& memory = posted->memory;
    const auto make = [&] {
      memory.emplace_back(count, 1.0f);
      return buffer_of(memory.back());
    };
    memory.reserve(2 * kWorld);
    const auto three = [&] { return std::vector<Buffer>{make(), make(), make()}; };
    Planner planner{};
    planner.profile = {1e-5, 0, 1e9, 0, 1};
    planner.recursive_doubling_max_nbytes = 64 << 10;
    planner.chunk_nbytes = 8 << 10;
    static constexpr Algorithm kAlgorithms[] = {Algorithm::kRing, Algorithm::kRecursiveDoubling, Algorithm::kCirculant};
    planner.all_reduce_algorithm = kAlgorithms[(what >> 4) % 3];
    const Elements sum{DType::kFloat32, ReduceOp::kSum};
    PointToPoint direct{1 + (what >> 4) % 2, 7, false};
    const bool point_to_point = what % 8 >= 6;
    switch (what % 8) {
      case 0: posted->op = all_reduce(planner, kMe, {make(), make()}, sum); break;
      case 1: posted->op = broadcast(kMe, (what >> 4) % kWorld, make(), DType::kFloat32); break;
      case 2: posted->op = all_gather(planner, kMe, {make()}, three(), DType::kFloat32); break;
      case 3: posted->op = reduce_scatter(planner, kMe, three(), {make()}, sum); break;
      case 4: posted->op = all_to_all(kMe, three(), three(), DType::kFloat32); break;
      case 5: posted->op = barrier(kMe); break;
      case 6:
        if ((what & 0x80) != 0) direct.peer = -1;  // from any source
        posted->op =
            direct.peer < 0 ? receive_any(make(), DType::kFloat32) : receive(kMe, direct.peer, make(), DType::kFloat32);
        break;
      case 7:
        direct.sends = true;
        posted->op = send(kMe, direct.peer, make(), DType::kFloat32);
        break;
    }
    posted_nbytes_ += 2 * kWorld * count * sizeof(float);
    try {
      engine_.submit(group_, posted->op, point_to_point ? &direct : nullptr);
    } catch (const Error&) {  // the group has failed already
    }
    posted->key = {group_->id, posted->op->ticket, point_to_point ? direct.tag : 0, point_to_point};
    posted_.push_back(std::move(posted));
  }

  void send_raw(fuzz::Input& input) {
    const int peer = input.take<uint8_t>() % 2;
    const auto bytes = input.take_bytes(input.take<uint8_t>());
    write(peer, bytes.data(), bytes.size());
  }

  void send_frame(fuzz::Input& input) {
    const auto changes = input.take<uint16_t>();
    const int peer = input.take<uint8_t>() % 2;
    FrameHeader header;
    header.type = static_cast<FrameType>(1 + input.take<uint8_t>() % 10);
    header.key.group = group_->id;
    uint64_t stream_nbytes = 0;
    const auto which = input.take<uint8_t>();
    if (which < posted_.size()) {
      const Posted& posted = *posted_[which];
      header.key = posted.key;
      header.fingerprint = posted.op->fingerprint;
      for (const Step& step : posted.op->steps) {
        if (step.recv_peer == peer + 1) stream_nbytes += step.recv.nbytes;
      }
      if (header.fingerprint.kind == OpKind::kAllToAll) header.fingerprint.nbytes = stream_nbytes;
    } else {  // for one that is not posted yet, or never
      header.key.sequence = which;
      header.fingerprint = {OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, -1, 4000, Algorithm::kRing, 1};
      stream_nbytes = 4000;
    }
    uint64_t& sent = sent_[{peer, header.key.sequence, header.key.point_to_point}];
    header.offset = header.type == FrameType::kGrant ? stream_nbytes : sent;
    const uint64_t rest = stream_nbytes > sent ? stream_nbytes - sent : 4;
    header.on_credit = stream_nbytes < (32 << 10);
    if (header.type == FrameType::kData) {
      header.payload_nbytes = static_cast<uint32_t>(std::min<uint64_t>(rest, 4u << (input.take<uint8_t>() % 14)));
      header.checked = checked_;
    }
    if (header.type == FrameType::kError) header.payload_nbytes = input.take<uint8_t>();
    if (header.type == FrameType::kAgree) header.payload_nbytes = kAgreeNbytes;
    if (header.type == FrameType::kWait || header.type == FrameType::kOver) header.offset = wait_of(input);
    change(header, changes, input);
    std::vector<std::byte> frame(kHeaderNbytes + header.payload_nbytes);
    for (uint32_t i = 0; i < header.payload_nbytes; ++i) frame[kHeaderNbytes + i] = static_cast<std::byte>(i * 7);
    if (header.type == FrameType::kAgree && header.payload_nbytes == kAgreeNbytes) {
      write_agreement(input, frame.data() + kHeaderNbytes);
    }
    if (header.checked) header.payload_crc = crc32c(frame.data() + kHeaderNbytes, header.payload_nbytes);
    if (changes & 0x1000) header.payload_crc ^= 1;
    encode(header, frame.data());
    if (header.type == FrameType::kData) sent += header.payload_nbytes;
    const bool short_of_some = (changes & 0x2000) != 0;
    write(peer, frame.data(), short_of_some ? frame.size() - 1 : frame.size());
    check_memory();
  }

  void finish() {
    for (Fd& peer : peers_) peer.reset();
    for (const auto& posted : posted_) {
      try {
        if (posted->op->posted_at != 0 && !posted->op->wait(kPatience_ms)) fail("an op did not settle");
      } catch (const Error&) {
      }
    }
    engine_.close_group(group_);
  }

 private:
  static constexpr uint32_t kAgreeNbytes = 16;  // of a group of three: see engine/agreement.cpp

  static void write_agreement(fuzz::Input& input, std::byte* out) {
    out[0] = static_cast<std::byte>(1 + input.take<uint8_t>() % 3);
    out[1] = static_cast<std::byte>(input.take<uint8_t>() % 2);
    const uint32_t round = input.take<uint8_t>() % 4;
    const uint64_t ballot = input.take<uint8_t>();
    std::memcpy(out + 2, &round, sizeof round);
    std::memcpy(out + 2 + sizeof round, &ballot, sizeof ballot);
    out[14] = static_cast<std::byte>(input.take<uint8_t>());
    out[15] = static_cast<std::byte>(input.take<uint8_t>());
  }

  // Whom it waits for, why, and the flags: see engine/waits.cpp.
  static uint64_t wait_of(fuzz::Input& input) {
    const uint64_t rank = input.take<uint8_t>() % 4;
    const uint64_t reason = input.take<uint8_t>() % 8;
    return rank | reason << 32 | uint64_t{input.take<uint8_t>()} << 40;
  }

  static void change(FrameHeader& header, uint16_t changes, fuzz::Input& input) {
    if (changes & 0x001) header.key.sequence = input.take<uint64_t>();
    if (changes & 0x002) header.key.group ^= input.take<uint16_t>();
    if (changes & 0x004) header.key.tag = input.take<uint32_t>();
    if (changes & 0x008) header.key.point_to_point = !header.key.point_to_point;
    if (changes & 0x010) header.offset = input.take<uint64_t>() & (UINT64_MAX >> 1);
    if (changes & 0x020) header.on_credit = !header.on_credit;
    if (changes & 0x040) header.fingerprint.nbytes = input.take<uint32_t>();
    if (changes & 0x080) header.fingerprint.kind = static_cast<OpKind>(input.take<uint8_t>() % 10);
    if (changes & 0x100) header.credit_nbytes = input.take<uint32_t>();
    if (changes & 0x200) header.payload_nbytes = input.take<uint32_t>() % (256 << 10);
    if (changes & 0x400) header.checked = !header.checked;
    if (changes & 0x800) header.fingerprint.dtype = static_cast<DType>(input.take<uint8_t>() % 8);
  }

  void write(int peer, const void* data, size_t nbytes) {
    const auto* bytes = static_cast<const char*>(data);
    while (nbytes > 0) {
      const ssize_t n = ::send(peers_[peer].get(), bytes, nbytes, MSG_NOSIGNAL);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) fail("the engine has stopped reading");
      if (n < 0) return;  // it has cut the connection
      bytes += n;
      nbytes -= static_cast<size_t>(n);
    }
  }

  void check_memory() const {
    if (engine_.parked_nbytes() > 2 * kCredit_nbytes + posted_nbytes_) fail("more is parked than may be");
  }

  Engine& engine_;
  const bool checked_;
  Fd peers_[2];
  std::shared_ptr<Group> group_;
  std::vector<std::unique_ptr<Posted>> posted_;
  std::map<std::tuple<int, uint64_t, bool>, uint64_t> sent_;
  uint64_t posted_nbytes_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  fuzz::Input input(data, nbytes);
  Session session(input.take<uint8_t>() % 2 == 1);
  while (!input.empty()) {
    switch (input.take<uint8_t>() % 8) {
      case 0: session.send_raw(input); break;
      case 1:
      case 2: session.post(input); break;
      default: session.send_frame(input);
    }
  }
  session.finish();
  return 0;
}
