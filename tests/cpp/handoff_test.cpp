// The hand-off's rules, one by one, over the simulated device. Two more files belong to this program:
// handoff_stress.cpp (many random ops, and each rule broken in turn) and handoff_engine.cpp (with the real engine).
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <latch>
#include <optional>
#include <string>

#include "device/cpu.hpp"
#include "device/stream_handoff.hpp"
#include "stream_under_test.hpp"

using namespace mccl;

namespace {

struct Fixture {
  StreamUnderTest stream{1, 0};
  StreamHandOff hand_off{stream};

  // An op over no memory, for what concerns only its slot.
  TicketPtr signalled(std::shared_ptr<void> owner = nullptr) {
    auto ticket = hand_off.begin({}, std::move(owner));
    hand_off.signal_ready(ticket);
    return ticket;
  }
  void release_when_ready(const TicketPtr& ticket) {
    std::latch released(1);
    ticket->on_ready([&] {
      ticket->release();
      released.count_down();
    });
    released.wait();
  }
  bool all_free() const { return hand_off.free_slot_count() == hand_off.slot_count(); }
  // The stream's news come on another thread.
  void await_all_free() const {
    while (!all_free()) std::this_thread::yield();
  }
};

// Tells when the last owner of a buffer has let go of it.
struct Watched {
  std::latch freed{1};
  std::atomic<bool> is_freed{false};
  std::shared_ptr<void> owner() {
    return {this, [](Watched* self) {
              self->is_freed = true;
              self->freed.count_down();
            }};
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "O1: the engine hears of a buffer only after the kernels that write it") {
  std::latch kernel_may_end(1), heard(1);
  std::atomic<bool> early{false}, has_heard{false};
  stream.encode_kernel([&] {
    kernel_may_end.wait();
    early = has_heard.load();
  });
  const auto ticket = hand_off.begin({}, nullptr);
  ticket->on_ready([&] { has_heard = true; });  // before and after the signal: both are kept until the stream is there
  hand_off.signal_ready(ticket);
  ticket->on_ready([&] { heard.count_down(); });
  CHECK_FALSE(has_heard);
  kernel_may_end.count_down();
  heard.wait();  // and signal_ready() has committed: nothing else was called here
  CHECK(has_heard);
  CHECK_FALSE(early);
  bool at_once = false;
  ticket->on_ready([&] { at_once = true; });
  CHECK(at_once);
}

TEST_CASE_FIXTURE(Fixture, "O2: what is encoded after wait_released() runs after the release") {
  int result = 1;
  int seen = 0;
  std::latch stream_is_at_the_wait(1);
  const auto ticket = signalled();
  stream.encode_kernel([&] { stream_is_at_the_wait.count_down(); });
  hand_off.wait_released(ticket);
  stream.encode_kernel([&] { seen = result; });
  stream.commit();
  stream_is_at_the_wait.wait();
  ticket->on_ready([&] {
    result = 2;
    ticket->release();
  });
  stream.synchronize();
  CHECK(seen == 2);
}

TEST_CASE_FIXTURE(Fixture, "ops that are released in reverse order each release their own waits") {
  int results[3] = {1, 1, 1};
  int seen[3] = {};
  TicketPtr tickets[3];
  for (auto& ticket : tickets) ticket = signalled();
  for (int i : {0, 1, 2}) {
    hand_off.wait_released(tickets[i]);
    stream.encode_kernel([&, i] { seen[i] = results[i]; });
  }
  stream.commit();
  for (int i : {2, 1, 0}) {
    std::latch released(1);
    tickets[i]->on_ready([&] {
      results[i] = 2;
      tickets[i]->release();
      released.count_down();
    });
    released.wait();
  }
  stream.synchronize();
  for (int i : {0, 1, 2}) CHECK(seen[i] == 2);
}

TEST_CASE("O3: the thread of the first collective, not that of the construction, is the one that may encode") {
  StreamUnderTest stream(1, 0);
  StreamHandOff hand_off(stream);  // as Ray does: made here, used on another thread
  TicketPtr ticket;
  std::thread([&] {
    ticket = hand_off.begin({}, nullptr);
    hand_off.signal_ready(ticket);
    hand_off.wait_released(ticket);
    ticket->on_ready([&] { ticket->release(); });
    stream.synchronize();
  }).join();
  const auto refused = [&](auto&& call) {
    std::string text;
    try {
      call();
    } catch (const Error& error) {
      CHECK(error.info().code == Code::kUsage);
      text = error.what();
    }
    return text.find("another thread") != std::string::npos && text.find("on one thread") != std::string::npos;
  };
  CHECK(refused([&] { hand_off.begin({}, nullptr); }));
  CHECK(refused([&] { hand_off.signal_ready(ticket); }));
  CHECK(refused([&] { hand_off.wait_released(ticket); }));

  hand_off.adopt_this_thread();  // as for autograd's thread
  CHECK_NOTHROW(hand_off.wait_released(ticket));
}

TEST_CASE_FIXTURE(Fixture, "O3: an adopted thread may come first and does not take the place of the bound one") {
  std::latch has_called(1), may_end(1);  // it lives on: a later thread could get its id
  std::thread adopted([&] {
    hand_off.adopt_this_thread();
    signalled();
    has_called.count_down();
    may_end.wait();
  });
  has_called.wait();
  CHECK_NOTHROW(signalled());  // binds this thread
  std::thread([&] { CHECK_THROWS_AS(signalled(), Error); }).join();
  may_end.count_down();
  adopted.join();
}

TEST_CASE_FIXTURE(Fixture, "wait_released() before signal_ready() is an error, not a stream that waits for ever") {
  const auto ticket = hand_off.begin({}, nullptr);
  CHECK_THROWS_AS(hand_off.wait_released(ticket), Error);
}

TEST_CASE_FIXTURE(Fixture, "an op that completes before wait_released() leaves nothing to wait for") {
  Watched buffer;
  const auto ticket = signalled(buffer.owner());
  release_when_ready(ticket);
  CHECK_FALSE(buffer.is_freed);  // wait_released() has not returned
  hand_off.wait_released(ticket);
  CHECK(buffer.is_freed);
  CHECK(all_free());
  stream.synchronize();
}

TEST_CASE_FIXTURE(Fixture, "a second wait_released() does nothing, also once the slot serves another op") {
  const auto ticket = signalled();
  hand_off.wait_released(ticket);
  hand_off.wait_released(ticket);
  release_when_ready(ticket);
  stream.synchronize();
  await_all_free();
  CHECK(hand_off.slot_count() == 1);

  const auto next = signalled();
  CHECK(hand_off.slot_count() == 1);
  hand_off.wait_released(ticket);
  stream.synchronize();  // does not wait for `next`
  CHECK(hand_off.free_slot_count() == 0);
  release_when_ready(next);
  hand_off.wait_released(next);
  CHECK(hand_off.free_slot_count() == 1);
}

TEST_CASE_FIXTURE(Fixture, "a ticket that nobody waits for is recycled once the engine has let go of it") {
  Watched buffer;
  std::latch kernel_may_end(1);
  stream.encode_kernel([&] { kernel_may_end.wait(); });
  auto ticket = signalled(buffer.owner());
  ticket->on_ready([engine = ticket] { engine->release(); });
  ticket.reset();
  CHECK_FALSE(buffer.is_freed);
  CHECK(hand_off.free_slot_count() == 0);
  kernel_may_end.count_down();
  buffer.freed.wait();
  await_all_free();

  ticket = hand_off.begin({}, nullptr);  // and one that is never even signalled
  ticket.reset();
  CHECK(all_free());
  CHECK(hand_off.slot_count() == 1);
}

TEST_CASE_FIXTURE(Fixture, "the calling thread never blocks for a slot") {
  constexpr size_t kCount = 100;
  std::latch kernel_may_end(1);
  stream.encode_kernel([&] { kernel_may_end.wait(); });
  std::vector<TicketPtr> tickets;
  for (size_t i = 0; i < kCount; ++i) {
    tickets.push_back(signalled());
    hand_off.wait_released(tickets.back());
  }
  stream.commit();
  CHECK(hand_off.slot_count() == kCount);
  kernel_may_end.count_down();
  for (const auto& ticket : tickets) release_when_ready(ticket);  // each signal stands behind the wait before it
  stream.synchronize();
  await_all_free();
  signalled();
  CHECK(hand_off.slot_count() == kCount);
}

TEST_CASE_FIXTURE(Fixture, "a buffer is held until the stream has executed the wait") {
  Watched buffer;
  std::latch stream_may_go_on(1);
  auto ticket = signalled(buffer.owner());
  stream.encode_kernel([&] {
    stream_may_go_on.wait();
    CHECK_FALSE(buffer.is_freed);
  });
  hand_off.wait_released(ticket);
  stream.commit();
  release_when_ready(ticket);
  CHECK_FALSE(buffer.is_freed);
  CHECK(hand_off.free_slot_count() == 0);
  stream_may_go_on.count_down();
  buffer.freed.wait();  // while the caller still has the ticket
  await_all_free();
}

TEST_CASE("ops in flight outlive their hand-off") {
  StreamUnderTest stream(1, 0);
  Watched buffer;
  std::optional<StreamHandOff> hand_off(std::in_place, stream);
  auto ticket = hand_off->begin({}, buffer.owner());
  hand_off->signal_ready(ticket);
  hand_off->wait_released(ticket);
  hand_off.reset();
  CHECK_FALSE(buffer.is_freed);
  ticket->on_ready([engine = ticket] { engine->release(); });
  ticket.reset();
  stream.synchronize();
  buffer.freed.wait();
}

TEST_CASE("a stream that ends with ops in flight lets go of their buffers") {
  Watched waited, not_ready;
  std::optional<StreamUnderTest> stream(std::in_place, 1u, 0);
  {
    StreamHandOff hand_off(*stream);
    auto ticket = hand_off.begin({}, waited.owner());
    hand_off.signal_ready(ticket);
    hand_off.wait_released(ticket);
    stream->commit();  // stays in this wait
    hand_off.signal_ready(hand_off.begin({}, not_ready.owner()));
  }
  CHECK_FALSE(waited.is_freed);
  CHECK_FALSE(not_ready.is_freed);
  stream.reset();
  CHECK(waited.is_freed);
  CHECK(not_ready.is_freed);
}

TEST_CASE("32-bit words may wrap") {
  StreamUnderTest stream(1, 0, SimWords::k32Bit);
  StreamHandOff hand_off(stream, 0xFFFF'FFF0u);
  int result = 0;
  for (int i = 1; i <= 100; ++i) {
    int seen = 0;
    auto ticket = hand_off.begin({}, nullptr);
    hand_off.signal_ready(ticket);
    hand_off.wait_released(ticket);
    stream.encode_kernel([&] { seen = result; });
    stream.commit();
    ticket->on_ready([&, i] {
      result = i;
      ticket->release();
    });
    stream.synchronize();
    CHECK(seen == i);
    while (hand_off.free_slot_count() < 1) std::this_thread::yield();
  }
  CHECK(hand_off.slot_count() == 1);
}

TEST_CASE("private memory goes through a staging copy on either side of the engine's turn") {
  StreamUnderTest stream(1, 0, SimWords::k32Bit, SimMemory::kPrivate);
  StreamHandOff hand_off(stream);
  int device[3] = {0, 0, 0};
  const HostView input = hand_off.host_view({device, sizeof(int), sizeof(int), false});
  const HostView output = hand_off.host_view({device, 2 * sizeof(int), sizeof(int), true});
  CHECK(input.memory.data != reinterpret_cast<std::byte*>(device + 1));
  std::latch kernel_may_end(1);
  stream.encode_kernel([&] {
    kernel_may_end.wait();
    device[1] = 20;
  });
  const auto ticket = hand_off.begin({input, output}, nullptr);
  hand_off.signal_ready(ticket);
  ticket->on_ready([&] {
    int value = 0;
    std::memcpy(&value, input.memory.data, sizeof value);
    ++value;
    std::memcpy(output.memory.data, &value, sizeof value);
    value = -1;
    std::memcpy(input.memory.data, &value, sizeof value);  // not a result: stays where it is
    ticket->release();
  });
  int seen = 0;
  hand_off.wait_released(ticket);
  stream.encode_kernel([&] { seen = device[2]++; });
  hand_off.wait_released(ticket);  // must not copy back a second time
  kernel_may_end.count_down();
  stream.synchronize();
  CHECK(seen == 21);
  CHECK(device[2] == 22);
  CHECK(device[1] == 20);
}

TEST_CASE("on the CPU there is nothing to order") {
  CpuHandOff hand_off;
  float data[4];
  const HostView view = hand_off.host_view({data, 4, 8});
  CHECK(view.memory.data == reinterpret_cast<std::byte*>(data + 1));
  CHECK(view.memory.nbytes == 8);
  CHECK(hand_off.begin({view}, nullptr) == nullptr);
}
