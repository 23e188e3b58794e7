// Buckets that simulated streams produce go through the real engine, two ranks in one process, and are consumed on the
// streams.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <latch>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/stream_handoff.hpp"
#include "device/submit.hpp"
#include "device/ticket.hpp"
#include "op/collective.hpp"
#include "small_engine.hpp"
#include "stream_under_test.hpp"

using namespace mccl;

namespace {

Planner planner() {
  Planner p{};
  p.profile = {1e-6, 0, 1e9, 0, 1};
  p.recursive_doubling_max_nbytes = 32 << 10;
  p.chunk_nbytes = 32 << 10;
  return p;
}

struct Rank {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Group> group;
  Member me() const { return {group->rank, group->world()}; }
};

// Ranks of one group, over socket pairs.
std::vector<Rank> make_ranks(int world) {
  std::vector<Rank> ranks;
  std::vector<MemberInfo> members;
  for (int r = 0; r < world; ++r) {
    ranks.push_back({std::make_shared<Engine>(small_engine()), nullptr});
    members.push_back({std::string(16, static_cast<char>('a' + r)), "host" + std::to_string(r)});
  }
  for (int lane = 0; world == 2 && lane < 2; ++lane) {
    int pair[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    ranks[0].engine->add_connection(Fd(pair[0]), members[1].process, lane, "host1");
    ranks[1].engine->add_connection(Fd(pair[1]), members[0].process, lane, "host0");
  }
  for (int r = 0; r < world; ++r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    rank.group = rank.engine->create_group(42, r, members);
  }
  return ranks;
}

// A goodbye is answered by the peer's: all leave together.
void leave(std::vector<Rank>& ranks) {
  for (Rank& rank : ranks) rank.engine->close_group(rank.group);
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) threads.emplace_back([&] { rank.engine->shutdown(); });
  for (std::thread& thread : threads) thread.join();
}

using Floats = std::shared_ptr<std::vector<float>>;
Floats floats(size_t count, float value) { return std::make_shared<std::vector<float>>(count, value); }
DeviceTensor tensor_of(const Floats& data) { return {data->data(), 0, data->size() * sizeof(float)}; }

// A stream with its hand-off, and collectives on it.
struct Device {
  StreamUnderTest stream;
  StreamHandOff hand_off{stream};

  explicit Device(unsigned seed, SimMemory memory = SimMemory::kShared)
      : stream(seed, 200, memory == SimMemory::kShared ? SimWords::k64Bit : SimWords::k32Bit, memory) {}

  struct Started {
    OperationPtr op;
    TicketPtr ticket;
  };
  Started all_reduce(const Rank& rank, const Floats& data, int64_t timeout_ms = -1) {
    const HostView view = hand_off.host_view(tensor_of(data));
    auto op = mccl::all_reduce(planner(), rank.me(), {view.memory}, {DType::kFloat32, ReduceOp::kSum});
    op->deadline = deadline_after_ms(timeout_ms);
    return {op, submit(rank.engine, rank.group, op, hand_off, {view}, data)};
  }
};

float gradient(int rank, int bucket, size_t i) {
  return static_cast<float>((rank * 7 + bucket * 3 + static_cast<int>(i)) % 97);
}

// Two streams a rank: what is called first is not always ready first.
size_t train(const Rank& rank, SimMemory memory, int buckets) {
  constexpr size_t kInFlight = 8;
  struct Open {
    Device* device;
    int bucket;
    Device::Started started;
    Floats data;
  };
  Device devices[2] = {Device(static_cast<unsigned>(2 * rank.me().rank + 1), memory),
                       Device(static_cast<unsigned>(2 * rank.me().rank + 2), memory)};
  std::mt19937 shared(5), own(static_cast<unsigned>(rank.me().rank));
  std::vector<Open> open;
  std::atomic<size_t> wrong{0};
  const auto finish = [&](size_t index) {
    Open done = std::move(open[index]);
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(index));
    done.device->hand_off.wait_released(done.started.ticket);
    done.device->stream.encode_kernel([&wrong, bucket = done.bucket, data = done.data] {
      for (size_t i = 0; i < data->size(); ++i) {
        if ((*data)[i] != gradient(0, bucket, i) + gradient(1, bucket, i)) ++wrong;
      }
    });
    done.device->stream.commit();
  };
  for (int bucket = 0; bucket < buckets; ++bucket) {
    Device& device = devices[own() % 2];
    const Floats data = floats(shared() % 4 == 0 ? 1 + shared() % 40'000 : 1 + shared() % 500, -1);
    device.stream.encode_kernel([data, bucket, me = rank.me().rank] {
      for (size_t i = 0; i < data->size(); ++i) (*data)[i] = gradient(me, bucket, i);
    });
    open.push_back({&device, bucket, device.all_reduce(rank, data), data});
    while (open.size() >= kInFlight) finish(own() % open.size());
    if (own() % 8 == 0) open.back().started.op->wait(-1);  // the CPU may look, too
  }
  while (!open.empty()) finish(0);
  for (Device& device : devices) device.stream.synchronize();
  return wrong;
}

void train_on_both(SimMemory memory) {
  auto ranks = make_ranks(2);
  size_t wrong[2] = {};
  std::thread other([&] { wrong[1] = train(ranks[1], memory, 600); });
  wrong[0] = train(ranks[0], memory, 600);
  other.join();
  leave(ranks);
  CHECK(wrong[0] == 0);
  CHECK(wrong[1] == 0);
}

}  // namespace

TEST_CASE("engine: buckets are reduced between the streams that produce and consume them") {
  SUBCASE("shared memory") { train_on_both(SimMemory::kShared); }
  SUBCASE("private memory") { train_on_both(SimMemory::kPrivate); }
}

TEST_CASE("engine: an op that is not ready parks no more than the credit, and later ops pass it") {
  auto ranks = make_ranks(2);
  Device early(1), late(2), other(3);
  const size_t count = 1 << 20;
  const Floats first[2] = {floats(count, 1), floats(count, 0)};
  const Floats second[2] = {floats(count, 10), floats(count, 20)};
  std::latch kernel_may_end(1);
  late.stream.encode_kernel([&] {
    kernel_may_end.wait();
    std::ranges::fill(*first[1], 2.0f);
  });
  const auto blocked = late.all_reduce(ranks[1], first[1]);
  const auto eager = early.all_reduce(ranks[0], first[0]);
  // Rank 0 sends what it may without a grant, and no more. Each of the two frames costs a little credit of its own.
  const uint64_t parked_nbytes = small_engine().credit_nbytes - 2 * kFrameCost_nbytes;
  while (ranks[1].engine->parked_nbytes() < parked_nbytes) std::this_thread::yield();

  const auto ready = other.all_reduce(ranks[1], second[1]);
  early.all_reduce(ranks[0], second[0]).op->wait(-1);
  ready.op->wait(-1);
  CHECK(second[0]->front() == 30);
  CHECK(second[1]->back() == 30);
  CHECK(blocked.op->state() == OpState::kInFlight);
  CHECK(eager.op->state() == OpState::kInFlight);
  CHECK(ranks[1].engine->parked_nbytes() == parked_nbytes);

  kernel_may_end.count_down();
  eager.op->wait(-1);
  blocked.op->wait(-1);
  CHECK(first[0]->back() == 3);
  CHECK(first[1]->front() == 3);
  CHECK(ranks[1].engine->parked_nbytes() == 0);
  leave(ranks);
}

TEST_CASE("engine: a deadline ends an op that never gets ready, and the stream goes on with NaN") {
  auto ranks = make_ranks(2);
  Device late(1), early(2);
  const Floats data[2] = {floats(1000, 0), floats(1000, 1)};
  std::latch kernel_may_end(1);
  late.stream.encode_kernel([&] {
    kernel_may_end.wait();
    std::ranges::fill(*data[0], 1.0f);  // after the op has failed: must not hide the NaN
  });
  const auto blocked = late.all_reduce(ranks[0], data[0], 100);
  const auto eager = early.all_reduce(ranks[1], data[1]);
  const auto error_of = [](const OperationPtr& op) -> std::string {
    try {
      op->wait(-1);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string here = error_of(blocked.op);
  const std::string there = error_of(eager.op);
  INFO(here);
  INFO(there);
  for (const std::string& text : {here, there}) {
    CHECK(text.find("rank 0 on host0 has not computed this op's tensor in time") != std::string::npos);
    CHECK(text.find("all_reduce #1") != std::string::npos);
  }

  size_t nan_count[2] = {};
  for (int r : {0, 1}) {
    Device& device = r == 0 ? late : early;
    device.hand_off.wait_released(r == 0 ? blocked.ticket : eager.ticket);
    device.stream.encode_kernel([&, r] {
      nan_count[r] = static_cast<size_t>(std::ranges::count_if(*data[r], [](float x) { return std::isnan(x); }));
    });
  }
  kernel_may_end.count_down();
  late.stream.synchronize();
  early.stream.synchronize();
  CHECK(nan_count[0] == 1000);
  CHECK(nan_count[1] == 1000);
  CHECK_THROWS_AS(late.all_reduce(ranks[0], data[0]), Error);
  leave(ranks);
}

TEST_CASE("engine: an abort with ops in flight, ready and not, lets every stream go on and frees every buffer") {
  auto ranks = make_ranks(2);
  Device device(1);
  std::vector<std::weak_ptr<std::vector<float>>> buffers;
  std::latch kernel_may_end(1);
  size_t nan_count = 0;
  for (int i = 0; i < 6; ++i) {
    const Floats data = floats(100, 1);
    buffers.push_back(data);
    if (i == 3) device.stream.encode_kernel([&] { kernel_may_end.wait(); });
    const auto started = device.all_reduce(ranks[0], data);  // the other rank never calls
    if (i % 3 == 0) {
      device.hand_off.wait_released(started.ticket);
      device.stream.encode_kernel([&, data] { nan_count += std::isnan(data->back()) ? 1 : 0; });
    }
  }
  ErrorInfo info;
  info.code = Code::kAborted;
  info.detail = "enough";
  ranks[0].engine->close_group(ranks[0].group, std::make_shared<const Error>(info));
  kernel_may_end.count_down();
  device.stream.synchronize();
  CHECK(nan_count == 2);
  for (const auto& buffer : buffers) {
    while (!buffer.expired()) std::this_thread::yield();
  }
  while (device.hand_off.free_slot_count() < device.hand_off.slot_count()) std::this_thread::yield();
  leave(ranks);
}

TEST_CASE("engine: an engine that ends before a device is ready leaves the stream free to go on") {
  auto ranks = make_ranks(2);
  Device device(1);
  std::latch kernel_may_end(1);
  const Floats data = floats(100, 1);
  device.stream.encode_kernel([&] { kernel_may_end.wait(); });
  device.hand_off.wait_released(device.all_reduce(ranks[0], data).ticket);
  leave(ranks);
  ranks.clear();
  kernel_may_end.count_down();
  device.stream.synchronize();
  CHECK(std::isnan(data->front()));
}

TEST_CASE("engine: an op that cannot be submitted leaves its slot free") {
  auto ranks = make_ranks(1);
  Device device(1);
  ranks[0].engine->close_group(ranks[0].group);
  CHECK_THROWS_AS(device.all_reduce(ranks[0], floats(10, 1)), Error);
  CHECK(device.hand_off.slot_count() == 1);
  CHECK(device.hand_off.free_slot_count() == 1);
}

TEST_CASE("engine: what stays on a rank is copied after the kernels that write it") {
  for (const int world : {1, 2}) {
    auto ranks = make_ranks(world);
    std::vector<std::unique_ptr<Device>> devices;
    std::vector<Floats> inputs, outputs;
    std::latch kernels_may_end(1);
    std::vector<Device::Started> started;
    for (int r = 0; r < world; ++r) {
      const Rank& rank = ranks[static_cast<size_t>(r)];
      devices.push_back(std::make_unique<Device>(static_cast<unsigned>(r)));
      Device& device = *devices.back();
      inputs.push_back(floats(1000, -1));
      outputs.push_back(floats(1000 * static_cast<size_t>(world), -2));
      device.stream.encode_kernel([&, r, input = inputs.back()] {
        kernels_may_end.wait();
        std::ranges::fill(*input, static_cast<float>(r + 1));
      });
      const HostView in = device.hand_off.host_view(tensor_of(inputs.back()));
      const HostView out = device.hand_off.host_view(tensor_of(outputs.back()));
      std::vector<Buffer> blocks;
      for (int b = 0; b < world; ++b)
        blocks.push_back({out.memory.data + in.memory.nbytes * static_cast<size_t>(b), in.memory.nbytes});
      const auto op = all_gather(planner(), rank.me(), {in.memory}, blocks, DType::kFloat32);
      started.push_back({op, submit(rank.engine, rank.group, op, device.hand_off, {in, out}, inputs.back())});
      CHECK(op->state() == OpState::kInFlight);
      CHECK((*outputs.back())[1000 * static_cast<size_t>(r)] == -2);
    }
    kernels_may_end.count_down();
    for (int r = 0; r < world; ++r) {
      const auto index = static_cast<size_t>(r);
      devices[index]->hand_off.wait_released(started[index].ticket);
      devices[index]->stream.synchronize();
      for (int b = 0; b < world; ++b) {
        CHECK((*outputs[index])[static_cast<size_t>(b) * 1000] == static_cast<float>(b + 1));
        CHECK((*outputs[index])[static_cast<size_t>(b) * 1000 + 999] == static_cast<float>(b + 1));
      }
    }
    leave(ranks);
  }
}

TEST_CASE("engine: every collective copies the block that stays on its rank") {
  auto ranks = make_ranks(1);
  Device device(1);
  const Elements sum{DType::kFloat32, ReduceOp::kSum};
  const auto kinds = std::to_array<std::function<OperationPtr(Buffer, Buffer)>>({
      [&](Buffer in, Buffer out) { return all_gather(planner(), ranks[0].me(), {in}, {out}, DType::kFloat32); },
      [&](Buffer in, Buffer out) { return reduce_scatter(planner(), ranks[0].me(), {in}, {out}, sum); },
      [&](Buffer in, Buffer out) { return gather(ranks[0].me(), 0, in, {out}, DType::kFloat32); },
      [&](Buffer in, Buffer out) { return scatter(ranks[0].me(), 0, {in}, out, DType::kFloat32); },
      [&](Buffer in, Buffer out) { return all_to_all(ranks[0].me(), {in}, {out}, DType::kFloat32); },
  });
  for (const auto& kind : kinds) {
    const Floats input = floats(100, 0), output = floats(100, -1);
    const HostView in = device.hand_off.host_view(tensor_of(input));
    const HostView out = device.hand_off.host_view(tensor_of(output));
    device.stream.encode_kernel([input] { std::ranges::fill(*input, 5.0f); });
    const auto op = kind(in.memory, out.memory);
    CHECK(output->front() == -1);
    const auto ticket = submit(ranks[0].engine, ranks[0].group, op, device.hand_off, {in, out}, output);
    device.hand_off.wait_released(ticket);
    device.stream.synchronize();
    op->wait(-1);
    CHECK(output->front() == 5);
    CHECK(output->back() == 5);
  }
  leave(ranks);
}
