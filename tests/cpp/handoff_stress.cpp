// Many buckets over the simulated stream, a few in flight, completed out of order by threads that play the network,
// checked by kernels on the stream, and freed as early as the rules allow. With one of the rules broken
// (MCCL_HANDOFF_MUTATION) the program must fail.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/stream_handoff.hpp"
#include "stream_under_test.hpp"

using namespace mccl;

namespace {

struct BreaksO1 : AllRules {
  static constexpr bool kReadAfterKernels = false;
};
struct BreaksO2 : AllRules {
  static constexpr bool kWaitForRelease = false;
};
struct BreaksO3 : AllRules {
  static constexpr bool kOneThread = false;
};
struct OneCounter : AllRules {
  static constexpr bool kWordPerOp = false;
};
struct ReusesEarly : AllRules {
  static constexpr bool kReuseAfterWait = false;
};
struct HoldsNothing : AllRules {
  static constexpr bool kHoldBuffers = false;
};

constexpr int kInFlight = 8;
constexpr size_t kFloats = 32;
constexpr int kLongestDelay_us = 30;
constexpr float kFreed = -7;

// The first fault is kept; everybody stops early then.
class Faults {
 public:
  void add(const std::string& what, int bucket) {
    const std::lock_guard guard(mutex_);
    if (!any_.exchange(true)) first_ = what + ", bucket " + std::to_string(bucket);
  }
  bool any() const { return any_; }
  std::string first() const {
    const std::lock_guard guard(mutex_);
    return first_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::string first_;
};

// Buckets whose memory is overwritten when it is freed and serves the next one at once.
class Memory {
 public:
  std::shared_ptr<float[]> take() {
    float* data = nullptr;
    {
      const std::lock_guard guard(mutex_);
      if (free_.empty()) {
        all_.push_back(std::make_unique<float[]>(kFloats));
        free_.push_back(all_.back().get());
      }
      data = free_.back();
      free_.pop_back();
    }
    return {data, [this](float* freed) {
              std::fill_n(freed, kFloats, kFreed);
              const std::lock_guard guard(mutex_);
              free_.push_back(freed);
            }};
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<float[]>> all_;
  std::vector<float*> free_;
};

float gradient(int bucket, size_t i) { return static_cast<float>(bucket % 10'000) + static_cast<float>(i); }
float reduced(int bucket, size_t i) { return 2 * gradient(bucket, i) + 1; }
bool fails(int bucket) { return bucket % 16 == 5; }

// Two threads that finish what is ready in any order.
class Network {
 public:
  Network(Faults& faults, unsigned seed) : faults_(faults) {
    for (unsigned i = 0; i < 2; ++i) threads_.emplace_back([this, i, seed] { run(seed + i); });
  }
  ~Network() {
    {
      const std::lock_guard guard(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void add(int bucket, TicketPtr ticket, float* data) {
    const std::lock_guard guard(mutex_);
    jobs_.push_back({bucket, std::move(ticket), data});
    wake_.notify_one();
  }
  void await_released(int count) {
    std::unique_lock lock(mutex_);
    progress_.wait(lock, [&] { return released_ >= count; });
  }
  int overtaken() const {
    const std::lock_guard guard(mutex_);
    return overtaken_;
  }

 private:
  struct Job {
    int bucket;
    TicketPtr ticket;
    float* data;
  };

  void run(unsigned seed) {
    std::mt19937 random(seed);
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const size_t pick = random() % 2 == 0 ? jobs_.size() - 1 : random() % jobs_.size();  // the newest, often
      const auto at = jobs_.begin() + static_cast<std::ptrdiff_t>(pick);
      const auto older = [&](const Job& job) { return job.bucket < at->bucket; };
      if (std::ranges::any_of(jobs_, older)) ++overtaken_;
      Job job = std::move(*at);
      jobs_.erase(at);
      lock.unlock();
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % kLongestDelay_us));
      transfer(job);
      job.ticket->release();
      job.ticket.reset();
      lock.lock();
      ++released_;
      progress_.notify_all();
    }
  }

  void transfer(const Job& job) {
    for (size_t i = 0; i < kFloats; ++i) {
      if (job.data[i] != gradient(job.bucket, i)) faults_.add("the engine read what no kernel had written", job.bucket);
      job.data[i] = fails(job.bucket) ? std::numeric_limits<float>::quiet_NaN() : reduced(job.bucket, i);
    }
  }

  Faults& faults_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;      // for these threads
  std::condition_variable progress_;  // for the framework's
  std::vector<Job> jobs_;
  int released_ = 0;
  int overtaken_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

struct Setting {
  int buckets;
  SimWords words;
  SimMemory memory;
  uint64_t first_value;
};

struct Outcome {
  std::string fault;
  int overtaken;
  size_t slots;
};

// The framework's thread.
template <class Rules>
class Program {
 public:
  explicit Program(const Setting& setting)
      : setting_(setting),
        stream_(7, kLongestDelay_us, setting.words, setting.memory),
        network_(faults_, 11),
        hand_off_(stream_, setting.first_value) {}

  Outcome run() {
    for (int bucket = 0; bucket < setting_.buckets && !faults_.any(); ++bucket) {
      start(bucket);
      while (open_.size() > random_() % kInFlight) finish(random_() % open_.size());
      network_.await_released(bucket + 2 - kInFlight);
      if (bucket % 1000 == 500) intrude(bucket);
    }
    while (!open_.empty()) finish(open_.size() - 1);
    stream_.synchronize();
    network_.await_released(started_);
    return {faults_.first(), network_.overtaken(), hand_off_.slot_count()};
  }

 private:
  struct Open {
    int bucket;
    TicketPtr ticket;
    std::shared_ptr<float[]> data;  // null where the framework has let go of it
  };

  void start(int bucket) {
    auto data = memory_.take();
    stream_.encode_kernel([bucket, out = data.get()] {
      for (size_t i = 0; i < kFloats; ++i) out[i] = gradient(bucket, i);
    });
    const HostView view = hand_off_.host_view({data.get(), 0, kFloats * sizeof(float)});
    TicketPtr ticket = hand_off_.begin({view}, data);
    hand_off_.signal_ready(ticket);
    ++started_;
    ticket->on_ready(
        [this, bucket, ticket, to = reinterpret_cast<float*>(view.memory.data)] { network_.add(bucket, ticket, to); });
    const auto draw = random_() % 8;
    if (draw < 2) data.reset();  // from here on the ticket alone holds it
    if (draw > 0) open_.push_back({bucket, std::move(ticket), std::move(data)});  // else nobody ever waits
  }

  // The optimizer's kernel holds what it reads, as a framework's allocator does for its stream.
  void finish(size_t index) {
    Open open = std::move(open_[index]);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(index));
    hand_off_.wait_released(open.ticket);
    if (random_() % 8 == 0) hand_off_.wait_released(open.ticket);
    if (open.data) {
      stream_.encode_kernel([this, bucket = open.bucket, data = std::move(open.data)] {
        for (size_t i = 0; i < kFloats; ++i) {
          const bool right = fails(bucket) ? data[i] != data[i] : data[i] == reduced(bucket, i);
          if (!right) faults_.add("the stream read what the engine had not written", bucket);
        }
      });
    }
    if (random_() % 4 == 0) stream_.commit();
  }

  void intrude(int bucket) {
    std::thread([&] {
      try {
        hand_off_.begin({}, nullptr);
        faults_.add("a call from another thread was taken", bucket);
      } catch (const Error&) {
      }
    }).join();
  }

  const Setting setting_;
  std::mt19937 random_{3};
  Faults faults_;
  Memory memory_;
  StreamUnderTest stream_;
  Network network_;
  BasicStreamHandOff<Rules> hand_off_;
  std::vector<Open> open_;
  int started_ = 0;
};

int buckets() {
  const char* text = std::getenv("MCCL_HANDOFF_BUCKETS");
  return text != nullptr ? std::atoi(text) : 20'000;
}

Outcome run(const std::string& mutation, const Setting& setting) {
  if (mutation == "O1") return Program<BreaksO1>(setting).run();
  if (mutation == "O2") return Program<BreaksO2>(setting).run();
  if (mutation == "O3") return Program<BreaksO3>(setting).run();
  if (mutation == "one-counter") return Program<OneCounter>(setting).run();
  if (mutation == "early-reuse") return Program<ReusesEarly>(setting).run();
  if (mutation == "no-hold") return Program<HoldsNothing>(setting).run();
  REQUIRE_MESSAGE(mutation.empty(), "unknown MCCL_HANDOFF_MUTATION: ", mutation);
  return Program<AllRules>(setting).run();
}

void check(const Setting& setting) {
  const char* mutation = std::getenv("MCCL_HANDOFF_MUTATION");
  const Outcome outcome = run(mutation != nullptr ? mutation : "", setting);
  REQUIRE(outcome.fault == "");
  CHECK(outcome.overtaken > setting.buckets / 20);  // else this has proved little
  CHECK(outcome.slots <= 64);
  MESSAGE(setting.buckets, " buckets, ", outcome.overtaken, " overtaken, ", outcome.slots, " slots");
}

}  // namespace

TEST_CASE("stress: shared memory, 64-bit events") { check({buckets(), SimWords::k64Bit, SimMemory::kShared, 0}); }

TEST_CASE("stress: staging, 32-bit words that wrap") {
  check({buckets() / 10, SimWords::k32Bit, SimMemory::kPrivate, 0xFFFF'FF00u});
}
