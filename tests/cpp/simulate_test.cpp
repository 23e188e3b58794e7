// The simulator against answers in closed form. Each network here passes one byte a nanosecond, so that times are
// round.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "schedule/simulate.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "schedule/algorithms.hpp"
#include "schedule/channels.hpp"

using namespace mccl;

namespace {

constexpr double kGoodput = 1e9;  // bytes/s
constexpr double kAlpha_s = 300e-6;

Network network(int32_t world, double alpha_s = kAlpha_s) {
  Network result;
  result.world = world;
  result.alpha_s = alpha_s;
  result.goodput_bytes_per_s = kGoodput;
  return result;
}

// Segments are forwarded as a whole, unless a test says otherwise.
SimulationOptions options(uint64_t segment_nbytes = 64 << 10) {
  SimulationOptions result;
  result.segment_nbytes = segment_nbytes;
  result.forward_nbytes = segment_nbytes;
  result.credit_nbytes = 4 << 20;
  return result;
}

std::vector<SimulatedOp> same_ops(size_t count, Generator generator, double ready_s = 0) {
  const auto shared = std::make_shared<const Generator>(std::move(generator));
  return std::vector<SimulatedOp>(count, SimulatedOp{shared, ready_s});
}

std::vector<SimulatedOp> all_reduce(const char* algorithm, uint64_t nbytes, size_t count = 1) {
  return same_ops(count, all_reduce_generator(algorithm, {nbytes, 4, 1, {}}));
}

// Rank 0 sends rank 1 one message.
Generator message(uint64_t nbytes) {
  return [=](Member me) {
    Schedule schedule;
    if (me.rank == 0) schedule.steps.push_back(send_step(1, {0, nbytes}));
    if (me.rank == 1) set_copy(schedule.steps.emplace_back(), 0, {0, nbytes});
    return schedule;
  };
}

// Each rank of the lower half sends one message to its partner in the upper half.
Generator across(uint64_t nbytes) {
  return [=](Member me) {
    Schedule schedule;
    const int32_t half = me.world / 2;
    if (me.rank < half) {
      schedule.steps.push_back(send_step(me.rank + half, {0, nbytes}));
    } else {
      set_copy(schedule.steps.emplace_back(), me.rank - half, {0, nbytes});
    }
    return schedule;
  };
}

doctest::Approx about(double seconds, double relative = 1e-9) { return doctest::Approx(seconds).epsilon(relative); }

}  // namespace

TEST_CASE("channels share a rank's port") {
  const uint64_t nbytes = 4'000'000;
  const Generator two = all_reduce_generator("ring", {nbytes, 4, 1, {}, 2});
  const auto result = simulate(network(2, 0), same_ops(1, two), options(1000));
  CHECK(result.last_finish_s == about(4e-3, 1e-3));
  CHECK(result.segments == 2 * 2 * nbytes / 2 / 1000);

  // The credit of each channel's connection is its own: a peer that is late by a second finds all bytes there.
  const Generator message_on_two = [=](Member me) {
    const Schedule half = message(nbytes / 2)(me);
    return merge_channels({{half, {0, nbytes / 2}}, {half, {nbytes / 2, nbytes / 2}}});
  };
  SimulationOptions late = options(1000);
  late.credit_nbytes = nbytes / 2;
  late.delay_s = {0, 1};
  CHECK(simulate(network(2, 0), same_ops(1, message_on_two), late).last_finish_s - 1 == about(0));
  CHECK(simulate(network(2, 0), same_ops(1, message(nbytes)), late).last_finish_s - 1 == about(2e-3, 1e-3));
}

TEST_CASE("a step on a channel that its peer does not expect is an error") {
  const Generator crossed = [](Member me) {
    Schedule schedule = message(1000)(me);
    schedule.steps.front().channel = me.rank;
    return schedule;
  };
  CHECK_THROWS_AS(simulate(network(2), same_ops(1, crossed), options()), Error);
}

TEST_CASE("one message takes alpha and its bytes") {
  const auto result = simulate(network(2), same_ops(1, message(1'000'000)), options());
  CHECK(result.last_finish_s == about(kAlpha_s + 1e-3));
  CHECK(result.egress_busy_share[0] == about(1e-3 / result.last_finish_s));
  CHECK(result.egress_busy_share[1] == 0);
  CHECK(result.segments == 16);
  CHECK_FALSE(result.deadlock);
}

TEST_CASE("the processor's cost is paid for each segment, and overlaps the wire where it is the smaller") {
  Network slow = network(2);
  slow.segment_cost_s = 10e-6;
  const auto ops = same_ops(1, message(1'000'000));
  CHECK(simulate(slow, ops, options(100'000)).last_finish_s == about(kAlpha_s + 1e-3 + 10e-6));
  slow.segment_cost_s = 200e-6;
  CHECK(simulate(slow, ops, options(100'000)).last_finish_s == about(kAlpha_s + 100e-6 + 10 * 200e-6));
}

TEST_CASE("a large ring moves 2(N-1)/N of the bytes at the goodput") {
  for (const int32_t world : {2, 4, 24}) {
    CAPTURE(world);
    const uint64_t nbytes = 100'000'000 / 24 / 4 * 24 * 4;
    const double ideal = 2.0 * (world - 1) / world * static_cast<double>(nbytes) / kGoodput;
    const auto result = simulate(network(world), all_reduce("ring", nbytes), options());
    CHECK(result.last_finish_s >= ideal);
    CHECK(result.last_finish_s <= ideal + kAlpha_s + 2 * 64e-6 * 1.024);
    CHECK(result.egress_busy_share[0] > 0.995);
  }
}

TEST_CASE("a ring of small blocks takes 2(N-1) latencies") {
  const int32_t world = 100;
  const auto result = simulate(network(world), all_reduce("ring", 100 * 4), options());
  CHECK(result.last_finish_s == about(2 * (world - 1) * (kAlpha_s + 4e-9)));
}

TEST_CASE("forwarded byte by byte, hops overlap whatever the segment") {
  const int32_t world = 10;
  SimulationOptions fluid = options(1 << 20);
  fluid.forward_nbytes = 0;
  const auto ring_s = [&](double block_s) {
    const auto nbytes = static_cast<uint64_t>(std::llround(block_s * kGoodput)) * world;
    return simulate(network(world), all_reduce("ring", nbytes), fluid).last_finish_s;
  };
  const int32_t hops = 2 * (world - 1);
  CHECK(ring_s(100e-6) == about(hops * kAlpha_s + 100e-6));  // bound by latency
  CHECK(ring_s(500e-6) == about(hops * 500e-6 + kAlpha_s));  // by bandwidth
  fluid.forward_nbytes = 40'000;                             // a hop takes that much longer
  CHECK(ring_s(100e-6) == about(hops * (kAlpha_s + 40e-6) + 60e-6));
  fluid.forward_nbytes = 0;
  fluid.segment_nbytes = 7'000;
  CHECK(ring_s(100e-6) == about(hops * kAlpha_s + 100e-6));
}

TEST_CASE("what waits for the whole waits for its last byte") {
  const auto relay = [](GateKind kind) {
    return [=](Member me) {
      Schedule schedule;
      if (me.rank > 0) set_copy(schedule.steps.emplace_back(), me.rank - 1, {0, 1'000'000});
      const Gate gate = me.rank > 0 ? Gate{kind, 0} : Gate{};
      if (me.rank + 1 < me.world) schedule.steps.push_back(send_step(me.rank + 1, {0, 1'000'000}, gate));
      return schedule;
    };
  };
  SimulationOptions fluid = options(400'000);
  fluid.forward_nbytes = 0;
  const auto relayed_s = [&](GateKind kind) {
    return simulate(network(4), same_ops(1, relay(kind)), fluid).last_finish_s;
  };
  CHECK(relayed_s(GateKind::kReceivedBytes) == about(3 * kAlpha_s + 1e-3));
  CHECK(relayed_s(GateKind::kReceived) == about(3 * (kAlpha_s + 1e-3)));
}

TEST_CASE("recursive doubling takes log2 N rounds of everything") {
  const uint64_t nbytes = 40'000;
  const double round = kAlpha_s + 40e-6;
  for (const int32_t log : {1, 3, 10}) {
    CAPTURE(log);
    const auto result = simulate(network(1 << log), all_reduce("recursive_doubling", nbytes), options());
    CHECK(result.last_finish_s == about(log * round));
  }
  // Ranks beyond the power of two hand over first and get the result last; some of this overlaps.
  const double folded = simulate(network(6), all_reduce("recursive_doubling", nbytes), options()).last_finish_s;
  CHECK(folded > 3 * round);
  CHECK(folded <= 4 * round);
}

TEST_CASE("a rank that waits for its own send adds nothing but that send") {
  // Rounds longer than alpha: what arrives is parked until the send has left, and is then there at once.
  const auto result = simulate(network(2, 0), all_reduce("recursive_doubling", 1'000'000), options(1'000'000));
  CHECK(result.last_finish_s == about(1e-3));
}

TEST_CASE("ops in flight share the link, the earlier first") {
  const auto result = simulate(network(2), same_ops(2, message(1'000'000)), options());
  CHECK(result.finish_s[0] == about(kAlpha_s + 1e-3));
  CHECK(result.finish_s[1] == about(kAlpha_s + 2e-3));
}

TEST_CASE("ops in flight fill what latency leaves idle") {
  const int32_t world = 16;
  const double hop = kAlpha_s + 4e-9;
  const double one = 2 * (world - 1) * hop;
  SimulationOptions limited = options();
  const auto ops = all_reduce("ring", 16 * 4, 4);
  limited.max_in_flight = 1;
  CHECK(simulate(network(world), ops, limited).last_finish_s == about(4 * one));
  limited.max_in_flight = 2;
  CHECK(simulate(network(world), ops, limited).last_finish_s == about(2 * one, 1e-5));
  limited.max_in_flight = 0;
  CHECK(simulate(network(world), ops, limited).last_finish_s == about(one, 1e-5));
}

TEST_CASE("connections of one rank take turns") {
  // Rank 0 owes two peers one op each: neither waits for the whole of the other.
  const auto to = [](int32_t peer) {
    return std::make_shared<const Generator>([=](Member me) {
      Schedule schedule;
      if (me.rank == 0) schedule.steps.push_back(send_step(peer, {0, 1'000'000}));
      if (me.rank == peer) set_copy(schedule.steps.emplace_back(), 0, {0, 1'000'000});
      return schedule;
    });
  };
  const std::vector<SimulatedOp> ops = {{to(1), 0}, {to(2), 0}};
  const auto result = simulate(network(3), ops, options(10'000));
  CHECK(result.finish_s[0] == about(kAlpha_s + 2e-3 - 10e-6));
  CHECK(result.finish_s[1] == about(kAlpha_s + 2e-3));
}

TEST_CASE("what meets at one port is passed one after the other") {
  const auto result =
      simulate(network(9), same_ops(1, [](Member me) { return direct_gather(me, 0, 1'000'000); }), options());
  CHECK(result.last_finish_s == about(kAlpha_s + 8e-3));
}

TEST_CASE("what a bucket has saved up passes at once") {
  Network shaped = network(2);
  shaped.burst_nbytes = 400'000;
  // Buckets start empty, and then fill while nothing is sent.
  CHECK(simulate(shaped, same_ops(1, message(1'000'000)), options(100'000)).last_finish_s == about(kAlpha_s + 1e-3));
  const auto late = same_ops(1, message(1'000'000), 0.25);
  CHECK(simulate(shaped, late, options(100'000)).last_finish_s == about(0.25 + kAlpha_s + 0.6e-3));
  // A gap costs what does not fit the burst.
  const auto generator = std::make_shared<const Generator>(message(500'000));
  for (const double gap_s : {0.1e-3, 0.4e-3, 0.9e-3}) {
    CAPTURE(gap_s);
    const std::vector<SimulatedOp> ops = {{generator, 0}, {generator, 0.5e-3 + gap_s}};
    const double lost_s = std::max(0.0, gap_s - 0.4e-3);
    CHECK(simulate(shaped, ops, options(100'000)).last_finish_s == about(kAlpha_s + 1e-3 + lost_s));
    CHECK(simulate(network(2), ops, options(100'000)).last_finish_s == about(kAlpha_s + 1e-3 + gap_s));
  }
}

TEST_CASE("what passes at once is not sent on before it has come") {
  Network shaped = network(3);
  shaped.burst_nbytes = 1'000'000;
  const auto relay = [](Member me) {
    Schedule schedule;
    if (me.rank > 0) set_copy(schedule.steps.emplace_back(), me.rank - 1, {0, 1'000'000});
    const Gate gate = me.rank > 0 ? Gate{GateKind::kReceivedBytes, 0} : Gate{};
    if (me.rank + 1 < me.world) schedule.steps.push_back(send_step(me.rank + 1, {0, 1'000'000}, gate));
    return schedule;
  };
  SimulationOptions fluid = options(100'000);
  fluid.forward_nbytes = 0;
  // The first link is new and passes the bytes at its rate, the second in the shadow of it: its last segment costs
  // nothing more.
  CHECK(simulate(shaped, same_ops(1, relay), fluid).last_finish_s == about(2 * kAlpha_s + 1e-3));
  // All buckets are full: a segment takes alpha twice and nothing else.
  CHECK(simulate(shaped, same_ops(1, relay, 0.25), fluid).last_finish_s == about(0.25 + 2 * kAlpha_s));
}

TEST_CASE("an uplink shared by g ranks is g times slower") {
  for (const int32_t g : {1, 4, 10}) {
    CAPTURE(g);
    Network two = network(2 * g);
    for (int32_t rank = 0; rank < 2 * g; ++rank) two.group_of_rank.push_back(rank < g ? 0 : 1);
    two.uplink_goodput_bytes_per_s = kGoodput;
    two.uplink_latency_s = 50e-6;
    const auto result = simulate(two, same_ops(1, across(1'000'000)), options(10'000));
    CHECK(result.last_finish_s == about(kAlpha_s + 50e-6 + g * 1e-3));
    CHECK(result.uplink_busy_share[0] == about(g * 1e-3 / result.last_finish_s));
    CHECK(result.uplink_busy_share[1] == 0);
    // One that is g times faster is as good as none.
    two.uplink_goodput_bytes_per_s = kGoodput * g;
    CHECK(simulate(two, same_ops(1, across(1'000'000)), options(10'000)).last_finish_s ==
          about(kAlpha_s + 50e-6 + 1e-3, 0.02));
  }
}

TEST_CASE("within a switch the uplink costs nothing") {
  Network two = network(8);
  two.group_of_rank = {0, 1, 0, 1, 0, 1, 0, 1};
  two.uplink_goodput_bytes_per_s = 1;
  const auto within = [](Member me) {
    Schedule schedule;
    if (me.rank == 0) schedule.steps.push_back(send_step(2, {0, 1'000'000}));
    if (me.rank == 2) set_copy(schedule.steps.emplace_back(), 0, {0, 1'000'000});
    return schedule;
  };
  CHECK(simulate(two, same_ops(1, within), options()).last_finish_s == about(kAlpha_s + 1e-3));
}

TEST_CASE("a straggler delays by exactly its delay") {
  const int32_t world = 16;
  SimulationOptions late = options();
  late.delay_s.assign(world, 0);
  late.delay_s[5] = 0.25;
  for (const char* algorithm : {"ring", "recursive_doubling"}) {
    CAPTURE(algorithm);
    const auto ops = all_reduce(algorithm, world * 4);
    const double alone = simulate(network(world), ops, options()).last_finish_s;
    CHECK(simulate(network(world), ops, late).last_finish_s == about(alone + 0.25));
  }
}

TEST_CASE("what is sent before it is granted draws on credit, then waits for the grant") {
  SimulationOptions late = options(100'000);
  late.delay_s = {0, 0.25};
  const auto ops = same_ops(1, message(1'000'000));
  // All of it is parked by the time rank 1 starts.
  late.credit_nbytes = 1'000'000;
  CHECK(simulate(network(2), ops, late).last_finish_s == about(0.25));
  // 600 kB are left to send, once the grant is there.
  late.credit_nbytes = 400'000;
  CHECK(simulate(network(2), ops, late).last_finish_s == about(0.25 + 2 * kAlpha_s + 0.6e-3));
  late.credit_nbytes = 0;
  CHECK(simulate(network(2), ops, late).last_finish_s == about(0.25 + 2 * kAlpha_s + 1e-3));
}

TEST_CASE("credit comes back, for the next op too") {
  SimulationOptions late = options(100'000);
  late.delay_s = {0, 0.25};
  late.credit_nbytes = 1'000'000;
  // Op 0 uses all the credit; op 1 waits for its own grant.
  const auto result = simulate(network(2), same_ops(2, message(1'000'000)), late);
  CHECK(result.finish_s[0] == about(0.25));
  CHECK(result.finish_s[1] == about(0.25 + 2 * kAlpha_s + 1e-3));
}

TEST_CASE("every algorithm ends without credit, and with one switch or three") {
  for (const std::string& algorithm : all_reduce_algorithms()) {
    for (const int32_t world : {2, 3, 7, 16, 33}) {
      CAPTURE(algorithm);
      CAPTURE(world);
      std::vector<int32_t> groups;
      for (int32_t rank = 0; rank < world; ++rank) groups.push_back(rank * 3 / world);
      const auto ops = same_ops(3, all_reduce_generator(algorithm, {50'000, 4, 1, groups}));
      SimulationOptions strict = options(7'000);
      strict.forward_nbytes = world % 2 == 0 ? 0 : 7'000;
      strict.credit_nbytes = 0;
      strict.skew_s = 2e-3;
      strict.seed = 7;
      const auto flat = simulate(network(world), ops, strict);
      CHECK_FALSE(flat.deadlock);
      Network switches = network(world);
      switches.group_of_rank = groups;
      switches.uplink_goodput_bytes_per_s = kGoodput;
      const auto grouped = simulate(switches, ops, strict);
      CHECK_FALSE(grouped.deadlock);
    }
  }
}

TEST_CASE("the same seed gives the same times, another seed others") {
  SimulationOptions skewed = options();
  skewed.skew_s = 10e-3;
  skewed.seed = 1;
  const auto ops = all_reduce("ring", 1'000'000, 3);
  const auto first = simulate(network(12), ops, skewed);
  CHECK(simulate(network(12), ops, skewed).finish_s == first.finish_s);
  skewed.seed = 2;
  CHECK(simulate(network(12), ops, skewed).finish_s != first.finish_s);
  CHECK(first.last_finish_s > simulate(network(12), ops, options()).last_finish_s);
}

TEST_CASE("ranks that wait for each other are reported") {
  const auto circle = [](Member me) {
    Schedule schedule;
    const int32_t peer = 1 - me.rank;
    Step step = send_step(peer, {0, 100}, {GateKind::kReceived, 0});
    set_copy(step, peer, {100, 100});
    schedule.steps.push_back(step);
    return schedule;
  };
  const auto result = simulate(network(2), same_ops(1, circle), options());
  REQUIRE(result.deadlock);
  CHECK(result.deadlock->find("rank 0 for rank 1") != std::string::npos);
  CHECK(result.finish_s[0] == std::numeric_limits<double>::infinity());
}

TEST_CASE("schedules that do not fit each other are refused") {
  const auto unequal = [](uint64_t sent, uint64_t received) {
    return [=](Member me) {
      Schedule schedule;
      if (me.rank == 0) schedule.steps.push_back(send_step(1, {0, sent}));
      if (me.rank == 1 && received > 0) set_copy(schedule.steps.emplace_back(), 0, {0, received});
      return schedule;
    };
  };
  CHECK_THROWS_AS(simulate(network(2), same_ops(1, unequal(100, 99)), options()), Error);
  CHECK_THROWS_AS(simulate(network(2), same_ops(1, unequal(100, 0)), options()), Error);
  CHECK(simulate(network(2), same_ops(1, unequal(99, 100)), options()).deadlock);
  CHECK_THROWS_AS(all_reduce_generator("guesswork", {}), Error);
}

TEST_CASE("a world of one has nothing to exchange") {
  const auto result = simulate(network(1), all_reduce("ring", 1000, 2), options());
  CHECK(result.last_finish_s == 0);
  CHECK(result.segments == 0);
}
