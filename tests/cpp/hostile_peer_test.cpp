// A peer that has authenticated and then breaks the rules: it gets an error that names it, and what it makes this
// process keep is bounded by the credit pool, whatever it sends.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <sys/socket.h>
#if defined(__APPLE__)
#include <malloc/malloc.h>
#else
#include <malloc.h>
#endif

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <new>
#include <string>
#include <thread>

#include "base/crc32c.hpp"
#include "engine/engine.hpp"
#include "op/collective.hpp"

namespace {
std::atomic<long> live_nbytes{0};
std::atomic<long> most_nbytes{0};

void* counted(void* data) {
  if (data == nullptr) throw std::bad_alloc();
#if defined(__APPLE__)
  const auto nbytes = static_cast<long>(malloc_size(data));
#else
  const auto nbytes = static_cast<long>(malloc_usable_size(data));
#endif
  const long now = live_nbytes += nbytes;
  for (long most = most_nbytes; now > most && !most_nbytes.compare_exchange_weak(most, now);) {
  }
  return data;
}
void discount(void* data) {
  if (data == nullptr) return;
#if defined(__APPLE__)
  live_nbytes -= static_cast<long>(malloc_size(data));
#else
  live_nbytes -= static_cast<long>(malloc_usable_size(data));
#endif
  std::free(data);
}
}  // namespace

void* operator new(std::size_t nbytes) { return counted(std::malloc(nbytes)); }
void* operator new(std::size_t nbytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(align, (nbytes + align - 1) / align * align));
}
void operator delete(void* data) noexcept { discount(data); }
void operator delete(void* data, std::size_t) noexcept { discount(data); }
void operator delete(void* data, std::align_val_t) noexcept { discount(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { discount(data); }

using namespace mccl;

namespace {

constexpr uint64_t kCredit_nbytes = 4 << 20;
constexpr Fingerprint kAllReduce{OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, -1, 4000, Algorithm::kRing, 1};

Options options() {
  Options o{};
  o.segment_nbytes = 1 << 20;
  o.scratch_nbytes = 256 << 10;
  o.inline_nbytes = 256 << 10;
  o.credit_nbytes = kCredit_nbytes;
  o.eager_grant_nbytes = 4 << 20;
  o.linger_ms = 100;
  o.heartbeat_interval_ms = 60'000;
  return o;
}

// An engine as rank 0 of three, and the other ends of its connections.
struct Victim {
  explicit Victim(Options o = options()) : engine(o) {
    std::vector<MemberInfo> members;
    for (int rank = 0; rank < 3; ++rank) {
      members.push_back({std::string(16, static_cast<char>('a' + rank)), "host" + std::to_string(rank)});
    }
    for (size_t rank = 1; rank < 3; ++rank) {
      int pair[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
      engine.add_connection(Fd(pair[0]), members[rank].process, 0, members[rank].host);
      peers[rank] = Fd(pair[1]);
    }
    group = engine.create_group(1, 0, members);
  }

  // False once the engine has cut the connection.
  bool send(const FrameHeader& header, const std::string& payload = "", size_t rank = 1) {
    return send_bytes(frame(header, payload), rank);
  }
  static std::string frame(const FrameHeader& header, const std::string& payload) {
    std::string bytes(kHeaderNbytes, '\0');
    encode(header, reinterpret_cast<std::byte*>(bytes.data()));
    return bytes + payload;
  }
  bool send_bytes(const std::string& bytes, size_t rank) {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::send(peers[rank].get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (n < 0) return false;
      done += static_cast<size_t>(n);
    }
    return true;
  }

  FrameHeader data(uint64_t ticket, uint64_t offset, uint32_t nbytes, bool on_credit = true) const {
    FrameHeader header;
    header.type = FrameType::kData;
    header.on_credit = on_credit;
    header.key = {group->id, ticket, 0, false};
    header.fingerprint = kAllReduce;
    header.offset = offset;
    header.payload_nbytes = nbytes;
    return header;
  }

  // An all-reduce of 1,000 floats by ring.
  OperationPtr post() {
    Planner planner{};
    planner.profile = {1e-5, 0, 1e9, 0, 1};
    planner.all_reduce_algorithm = Algorithm::kRing;
    planner.chunk_nbytes = 64 << 10;
    memory.emplace_back(1000, 1.0f);
    const Buffer buffer{reinterpret_cast<std::byte*>(memory.back().data()), 4000};
    auto op = all_reduce(planner, {0, 3}, {buffer}, {DType::kFloat32, ReduceOp::kSum});
    engine.submit(group, op);
    return op;
  }

  // Blocks until the engine has read all that was sent so far: a request that follows is answered with a grant.
  void settle_reading() {
    const auto op = post_receive();
    FrameHeader request;
    request.type = FrameType::kRequest;
    request.key = {group->id, op->ticket, 9, true};
    request.fingerprint = op->fingerprint;
    REQUIRE(send(request));
    await_grant(op->ticket);
  }
  void await_grant(uint64_t ticket) {
    FrameHeader header;
    while (header.type != FrameType::kGrant || header.key.sequence != ticket) header = read_header();
  }

  OperationPtr post_receive() {
    memory.emplace_back(1000, 1.0f);
    auto op = receive({0, 3}, 1, {reinterpret_cast<std::byte*>(memory.back().data()), 4000}, DType::kFloat32);
    const PointToPoint from{1, 9, false};
    engine.submit(group, op, &from);
    return op;
  }

  FrameHeader read_header() {
    HeaderBytes bytes;
    read(bytes.data(), bytes.size());
    const FrameHeader header = decode(bytes.data());
    std::vector<std::byte> payload(header.payload_nbytes);
    read(payload.data(), payload.size());
    return header;
  }
  void read(void* out, size_t nbytes) {
    if (nbytes > 0) REQUIRE(::recv(peers[1].get(), out, nbytes, MSG_WAITALL) == static_cast<ssize_t>(nbytes));
  }

  // Blocks until the connection is cut.
  void expect_cut() {
    char byte;
    while (::recv(peers[1].get(), &byte, 1, 0) > 0) {
    }
  }

  std::string failure() const {
    const auto error = engine.failure(*group);
    return error ? error->what() : "";
  }

  std::deque<std::vector<float>> memory;  // outlives the ops
  Engine engine;
  Fd peers[3];
  std::shared_ptr<Group> group;
};

template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// How much more was on the heap at most while `body` ran.
template <class Body>
long growth_nbytes(Body body) {
  const long before = live_nbytes;
  most_nbytes = before;
  body();
  return most_nbytes - before;
}

// Twice the pool, as what is parked lies in blocks of powers of two, and what goes with it.
constexpr long kMost_nbytes = 3 * static_cast<long>(kCredit_nbytes);

}  // namespace

TEST_CASE("frames of one byte for ops that nobody posted end at the credit") {
  Victim victim;
  uint64_t sent = 0;
  const long grown = growth_nbytes([&] {
    while (victim.send(victim.data(1 + sent, 0, 1), "x") && sent < 10'000'000) ++sent;
    victim.expect_cut();
  });
  CHECK(sent < 1'000'000);
  CHECK(victim.failure().find("rank 1 on host1 sent more than it has credit for") != std::string::npos);
  MESSAGE("heap grew by " << grown << " bytes");
  CHECK(grown < kMost_nbytes);
}

TEST_CASE("frames of one byte for one op end at the credit") {
  Victim victim;
  uint64_t sent = 0;
  const long grown = growth_nbytes([&] {
    while (victim.send(victim.data(1, sent, 1), "x") && sent < 10'000'000) ++sent;
    victim.expect_cut();
  });
  CHECK(victim.failure().find("more than it has credit for") != std::string::npos);
  CHECK(grown < kMost_nbytes);
}

TEST_CASE("a large payload that nobody asked for is refused before anything is allocated for it") {
  Victim victim;
  const long grown = growth_nbytes([&] {
    victim.send(victim.data(1, 0, kMaxPayloadNbytes));
    victim.expect_cut();
  });
  CHECK(victim.failure().find("more than it has credit for") != std::string::npos);
  CHECK(grown < 64 << 10);
}

TEST_CASE("bytes without credit or grant are refused") {
  Victim victim;
  victim.send(victim.data(1, 0, 100, false));
  victim.expect_cut();
  CHECK(victim.failure().find("rank 1 on host1 sent bytes that it had no grant for") != std::string::npos);
}

TEST_CASE("bytes out of order are refused, also for an op that is not posted yet") {
  Victim victim;
  victim.send(victim.data(1, 4, 4), "abcd");
  victim.expect_cut();
  CHECK(victim.failure().find("out of their order") != std::string::npos);
}

TEST_CASE("a payload without a byte is malformed") {
  Victim victim;
  victim.send(victim.data(1, 0, 0));
  victim.expect_cut();
  CHECK(victim.failure().find("malformed frame: data frame without data") != std::string::npos);
}

TEST_CASE("bytes beyond an op's end fail the group, whether they come before the post or after") {
  for (const bool posted_first : {true, false}) {
    Victim victim;
    OperationPtr op = posted_first ? victim.post() : nullptr;
    victim.send(victim.data(1, 0, 6000), std::string(6000, 'x'), 2);  // a ring has 5,332 bytes from there
    if (!posted_first) {
      wait_until([&] { return victim.engine.parked_nbytes() > 0; });
      op = victim.post();
    }
    CHECK_THROWS_AS(op->wait(20'000), Error);
    CHECK(victim.failure().find("rank 2 on host2 sent bytes beyond the end") != std::string::npos);
  }
}

TEST_CASE("a part of an element fails the group, whether it comes before the post or after") {
  for (const bool posted_first : {true, false}) {
    Victim victim;
    OperationPtr op = posted_first ? victim.post() : nullptr;
    victim.send(victim.data(1, 0, 7), "1234567", 2);
    if (!posted_first) {
      wait_until([&] { return victim.engine.parked_nbytes() > 0; });
      op = victim.post();
    }
    CHECK_THROWS_AS(op->wait(20'000), Error);
    CHECK(victim.failure().find("rank 2 on host2 sent a part of an element") != std::string::npos);
  }
}

TEST_CASE("an error of another group between an op's bytes and its post harms nobody") {
  Victim victim;
  FrameHeader notice;
  notice.type = FrameType::kError;
  notice.key.group = 12345;
  notice.payload_nbytes = 7;  // no whole number of floats
  // Together, so that the engine reads both before it can be asked.
  const std::string block(1332, '\0');
  victim.send_bytes(Victim::frame(victim.data(1, 0, 1332), block) + Victim::frame(notice, "1234567"), 2);
  wait_until([&] { return victim.engine.parked_nbytes() > 0; });
  const OperationPtr op = victim.post();
  CHECK_FALSE(op->wait(10));
  CHECK(victim.failure() == "");
}

TEST_CASE("requests for ops that nobody posted are kept up to a limit, and what was not kept is granted all the same") {
  Victim victim;
  FrameHeader request = victim.data(0, 0, 0);
  request.type = FrameType::kRequest;
  const long grown = growth_nbytes([&] {
    for (uint64_t i = 0; i < 200'000; ++i) {
      request.key.sequence = 1'000 + i;
      REQUIRE(victim.send(request));
    }
    victim.settle_reading();
  });
  MESSAGE("heap grew by " << grown << " bytes");
  CHECK(grown < kMost_nbytes);
  // The request for this one, the third from there, came too late to be kept.
  request.key = {victim.group->id, 3, 9, true};
  REQUIRE(victim.send(request));
  victim.settle_reading();
  victim.await_grant(victim.post_receive()->ticket);
  CHECK(victim.failure().empty());
}

TEST_CASE("grants for ops that nobody posted are kept up to a limit") {
  Victim victim;
  FrameHeader grant = victim.data(0, 4, 0);
  grant.type = FrameType::kGrant;
  const long grown = growth_nbytes([&] {
    for (uint64_t i = 0; i < 200'000; ++i) {
      grant.key.sequence = 1'000 + i;
      REQUIRE(victim.send(grant));
    }
    victim.settle_reading();
  });
  CHECK(grown < kMost_nbytes);
  CHECK(victim.failure().empty());
}

TEST_CASE("errors and goodbyes of groups that do not exist are kept up to a limit") {
  Victim victim;
  FrameHeader notice;
  notice.type = FrameType::kError;
  notice.payload_nbytes = kMaxErrorNbytes;
  const std::string payload(kMaxErrorNbytes, 'x');
  const long grown = growth_nbytes([&] {
    for (uint64_t i = 0; i < 20'000; ++i) {
      notice.key.group = 100 + i / 2;
      REQUIRE(victim.send(notice, payload));
    }
    victim.settle_reading();
  });
  MESSAGE("heap grew by " << grown << " bytes");
  CHECK(grown < kMost_nbytes);
}

TEST_CASE("a peer that asks and does not read the answers is cut off") {
  Victim victim;
  const auto op = victim.post_receive();
  FrameHeader request = victim.data(0, 0, 0);
  request.type = FrameType::kRequest;
  request.key = {victim.group->id, op->ticket, 9, true};
  request.fingerprint = op->fingerprint;
  const long grown = growth_nbytes([&] {
    uint64_t sent = 0;
    while (victim.send(request) && sent < 1'000'000) ++sent;
    CHECK(sent < 1'000'000);
  });
  CHECK(victim.failure().find("rank 1 on host1 asks and does not read the answers") != std::string::npos);
  MESSAGE("heap grew by " << grown << " bytes");
  CHECK(grown < kMost_nbytes);
}

TEST_CASE("a verdict that leaves nobody in the group is survived") {
  Victim victim;
  FrameHeader verdict;
  verdict.type = FrameType::kAgree;
  verdict.key.group = victim.group->id;
  const std::string payload = std::string("\3\0\1\0\0\0", 6) + std::string(8, '\0') + "\x07\x07";
  verdict.payload_nbytes = static_cast<uint32_t>(payload.size());
  REQUIRE(victim.send(verdict, payload));
  wait_until([&] { return !victim.failure().empty(); });
  CHECK(victim.failure().find("without rank(s) 0, 1, 2") != std::string::npos);
}

TEST_CASE("a vote in a round that nobody has begun is dropped") {
  Victim victim;
  FrameHeader vote;
  vote.type = FrameType::kAgree;
  vote.key.group = victim.group->id;
  vote.payload_nbytes = 16;
  REQUIRE(victim.send(vote, "\1" + std::string(15, '\0')));
  victim.settle_reading();
  CHECK(victim.failure().empty());
}

TEST_CASE("credit comes back: many times the pool passes through small frames of ops in a row") {
  Victim victim;
  for (int i = 0; i < 20'000; ++i) {
    const auto op = victim.post_receive();
    FrameHeader header = victim.data(op->ticket, 0, 4000);
    header.key = {victim.group->id, op->ticket, 9, true};
    header.fingerprint = op->fingerprint;
    REQUIRE(victim.send(header, std::string(4000, '\0')));
    REQUIRE(op->wait(20'000));
    victim.memory.clear();
  }
  CHECK(victim.failure().empty());
}

TEST_CASE("control characters in a peer's words do not reach the message") {
  Victim victim;
  FrameHeader notice;
  notice.type = FrameType::kError;
  notice.key.group = victim.group->id;
  const std::string payload = std::string("\0\1\0\0\0", 5) + "h\x1b[2J\0ost\nline\xff" + std::string(20, '\x80');
  notice.payload_nbytes = static_cast<uint32_t>(payload.size());
  REQUIRE(victim.send(notice, payload));
  wait_until([&] { return !victim.failure().empty(); });
  for (const char c : victim.failure()) CHECK((c >= ' ' && c <= '~'));
}

TEST_CASE("a payload is checked where that is asked for") {
  Options o = options();
  o.transport_crc = true;
  const std::string payload(4000, 'x');
  for (const bool damaged : {false, true}) {
    Victim victim(o);
    const auto op = victim.post_receive();
    FrameHeader header = victim.data(op->ticket, 0, 4000);
    header.key = {victim.group->id, op->ticket, 9, true};
    header.fingerprint = op->fingerprint;
    header.checked = true;
    header.payload_crc = crc32c(payload.data(), payload.size()) ^ (damaged ? 1 : 0);
    REQUIRE(victim.send(header, payload));
    if (damaged) {
      CHECK_THROWS_AS(op->wait(20'000), Error);
      CHECK(victim.failure().find("rank 1 on host1 sent a payload that arrived damaged") != std::string::npos);
    } else {
      CHECK(op->wait(20'000));
    }
  }
}

TEST_CASE("ranks that do not agree on checksums are told") {
  Options o = options();
  o.transport_crc = true;
  Victim victim(o);
  victim.send(victim.data(1, 0, 4), "abcd");
  victim.expect_cut();
  CHECK(victim.failure().find("MCCL_TRANSPORT_CRC alike on all ranks") != std::string::npos);
}

TEST_CASE("CRC-32C: the check value of its definition, by instruction and by tables, whole and in parts") {
  CHECK(crc32c("123456789", 9) == 0xE3069283);
  CHECK(crc32c_by_tables("123456789", 9) == 0xE3069283);
  std::string bytes(1000, '\0');
  uint32_t state = 1;
  for (char& c : bytes) c = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  for (size_t begin = 0; begin < 16; ++begin) {
    for (size_t nbytes = 0; nbytes < 100; ++nbytes) {
      const uint32_t whole = crc32c(bytes.data() + begin, nbytes);
      CHECK(whole == crc32c_by_tables(bytes.data() + begin, nbytes));
      const size_t half = nbytes / 2;
      const uint32_t first = crc32c(bytes.data() + begin, half);
      CHECK(whole == crc32c(bytes.data() + begin + half, nbytes - half, first));
    }
  }
}
