// Ranks as threads, each with an engine of its own, over socket pairs, and in each round a fault of one of them at
// random: every other rank must get the right error, agree with the others on who is left, and go on with them. Another
// group of the same ranks is in use beside it all the time, and an observer reads whatever an engine tells. Built with
// a sanitizer by tests/core/test_engine_sanitized.py.
//   engine_faults WORLD ROUNDS SEED
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <latch>
#include <random>
#include <thread>

#include "engine/engine.hpp"
#include "op/collective.hpp"
#include "small_engine.hpp"

using namespace mccl;

namespace {

constexpr uint64_t kMain = 1, kBeside = 2, kSuccessor = 3;  // groups
constexpr int kInFlight = 6;
constexpr int kHealthySteps = 60;
constexpr int kBesideSteps = 80;
constexpr int64_t kPatience_ms = 60'000;  // nothing may take as long
constexpr int64_t kTimeout_ms = 400;      // of the ops in rounds in which one is late

enum class Fault {
  kNone,
  kSlow,      // away for many heartbeats of the others: no fault
  kCut,       // its sockets break
  kLeave,     // it closes the group and ends
  kAbort,     // it ends the group, perhaps before others have made it
  kMismatch,  // it calls something else
  kLate,      // it comes after the ops' timeout
  kMute,      // nobody reads or writes its sockets
  kCount
};
constexpr const char* kNames[] = {"none", "slow", "cut", "leave", "abort", "mismatch", "late", "mute"};

struct Round {
  int world;
  int number;
  Fault fault;
  int victim;
  int second;   // cuts its own sockets instead of agreeing with the others; -1: nobody does
  int at_step;  // when the fault strikes
  unsigned seed;

  bool fails() const { return fault != Fault::kNone && fault != Fault::kSlow; }
  // The victim takes part in the agreement: only the group has failed.
  bool victim_stays() const { return fault == Fault::kAbort || fault == Fault::kMismatch || fault == Fault::kLate; }
  RankSet gone() const {
    RankSet set(static_cast<size_t>(world));
    if (fails() && !victim_stays()) set[static_cast<size_t>(victim)] = true;
    if (fails() && second >= 0) set[static_cast<size_t>(second)] = true;
    return set;
  }
};

[[noreturn]] void wrong(const Round& round, int rank, const std::string& what) {
  std::fprintf(stderr, "round %d (%s, victim %d, second %d), rank %d: %s\n", round.number,
               kNames[static_cast<int>(round.fault)], round.victim, round.second, rank, what.c_str());
  std::abort();
}

Options options(int64_t heartbeat_interval_ms) {
  Options o = small_engine();
  o.flight_record_ops = 32;
  o.heartbeat_interval_ms = heartbeat_interval_ms;
  return o;
}

// Of two the longer interval counts: rank 0 may speak and ask all the time, and yet nobody is taken for silent.
int64_t heartbeat_interval_ms(const Round& round, int rank) {
  if (round.fault == Fault::kMute) return 500;
  return rank == 0 ? 3 : 5000;
}

Planner planner(int world) {
  Planner p{};
  p.profile = {1e-3, 0, 1e9, 0, 1};
  p.all_reduce_algorithm = Algorithm::kRing;
  p.recursive_doubling_max_nbytes = 4 << 10;
  p.chunk_nbytes = 8 << 10;
  p.group_of_rank.assign(static_cast<size_t>(world), 0);
  p.channels = 1;
  p.channel_nbytes = 4 << 10;
  return p;
}

Buffer buffer_of(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
}

// An op in flight, and what its elements must be in the end.
struct Started {
  OperationPtr op;
  std::vector<float> data;
  float expected = 0;
  bool result = true;  // data is one: NaN if the op fails
  bool any_source = false;
};

class Rank {
 public:
  Rank(Engine& engine, const Round& round, int rank, std::vector<MemberInfo> members, std::vector<int> sockets,
       std::latch& made)
      : engine_(engine),
        round_(round),
        rank_(rank),
        members_(std::move(members)),
        sockets_(std::move(sockets)),
        made_(made) {}

  void run() {
    std::atomic<bool> over{false};
    std::thread observer([&] { observe(over); });
    std::mt19937 own(round_.seed * 31 + static_cast<unsigned>(rank_));
    std::this_thread::sleep_for(std::chrono::microseconds(own() % 5000));
    const auto beside = engine_.create_group(kBeside, rank_, members_);
    std::thread other([&] { run_beside(beside); });
    group_ = engine_.create_group(kMain, rank_, members_);
    made_.count_down();
    if (round_.fault != Fault::kAbort) made_.wait();  // what is lost before would have to be dialled
    const std::shared_ptr<const Error> error = run_program(own);
    check(error.get());
    const RankSet gone = round_.gone();
    if (error && gone[static_cast<size_t>(rank_)]) {
      if (rank_ == round_.second && rank_ != round_.victim) cut();
    } else if (error) {
      go_on(gone);
    }
    other.join();
    engine_.close_group(group_);
    engine_.close_group(beside);
    over = true;
    observer.join();
    engine_.shutdown();
  }

 private:
  Member me(const Group& group) const { return {group.rank, group.world()}; }

  void cut() {
    for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
  }

  void observe(const std::atomic<bool>& over) {
    while (!over) {
      engine_.metrics();
      engine_.parked_nbytes();
      engine_.flight_record();
      engine_.last_failure();
      engine_.open_failure();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  Started all_reduce_of(const std::shared_ptr<Group>& group, size_t count, float value, float expected) {
    Started s;
    s.data.assign(count, value);
    s.expected = expected;
    s.op = all_reduce(planner(group->world()), me(*group), {buffer_of(s.data)}, {DType::kFloat32, ReduceOp::kSum});
    return s;
  }

  void submit(const std::shared_ptr<Group>& group, Started& s, const PointToPoint* point = nullptr) {
    s.op->nan_byte = std::byte{0xff};
    s.op->deadline = deadline_after_ms(round_.fault == Fault::kLate ? kTimeout_ms : kPatience_ms);
    engine_.submit(group, s.op, point);
  }

  float total(int step) const {
    return static_cast<float>(round_.world * (round_.world - 1) / 2 + round_.world * step);
  }

  // Throws Error where it failed.
  void finish(Started& s) {
    try {
      if (!s.op->wait(kPatience_ms)) wrong(round_, rank_, "an op hangs");
    } catch (const Error&) {
      const auto nan = [](float value) { return std::isnan(value); };
      if (s.result && !std::ranges::all_of(s.data, nan)) wrong(round_, rank_, "a failed op has left numbers");
      throw;
    }
    const float expected = s.any_source ? static_cast<float>(s.op->source) : s.expected;
    for (const float value : s.data) {
      if (value != expected) wrong(round_, rank_, "a wrong result");
    }
  }

  // Collectives, and messages to the next two ranks that are received from any source, several in flight.
  std::shared_ptr<const Error> run_program(std::mt19937& own) {
    std::mt19937 shared(round_.seed);
    std::deque<Started> in_flight;
    const bool endless = round_.fails() && !(rank_ == round_.victim && round_.fault == Fault::kLeave);
    try {
      for (int step = 0; endless || step < kHealthySteps; ++step) {
        if (rank_ == round_.victim && step == round_.at_step && !strike(own)) {
          while (!in_flight.empty()) {
            finish(in_flight.front());
            in_flight.pop_front();
          }
          return nullptr;
        }
        begin(in_flight, step, shared);
        while (in_flight.size() > own() % kInFlight) {
          Started s = std::move(in_flight.front());
          in_flight.pop_front();
          finish(s);
        }
      }
      while (!in_flight.empty()) {
        Started s = std::move(in_flight.front());
        in_flight.pop_front();
        finish(s);
      }
      return nullptr;
    } catch (const Error& error) {
      const auto first = std::make_shared<const Error>(error);
      for (Started& s : in_flight) {
        try {
          if (s.op->group) finish(s);  // it was submitted
        } catch (const Error& other) {
          if (other.info().code != first->info().code) wrong(round_, rank_, std::string("two errors: ") + other.what());
        }
      }
      return first;
    }
  }

  void begin(std::deque<Started>& in_flight, int step, std::mt19937& shared) {
    const unsigned kind = shared() % (round_.fault == Fault::kMismatch ? 6 : 8);
    const size_t count = shared() % 4 == 0 ? 1 + shared() % 30'000 : 1 + shared() % 300;
    const int root = static_cast<int>(shared() % static_cast<unsigned>(round_.world));
    const auto value = static_cast<float>(rank_ + step);
    if (kind < 5) {
      in_flight.push_back(all_reduce_of(group_, count, value, total(step)));
      submit(group_, in_flight.back());
    } else if (kind == 5) {
      Started& s = in_flight.emplace_back();
      s.data.assign(count, value);
      s.expected = static_cast<float>(root + step);
      s.result = rank_ != root;
      s.op = broadcast(me(*group_), root, buffer_of(s.data), DType::kFloat32);
      submit(group_, s);
    } else {
      const size_t message_count = kind == 6 ? 100 : 5000;  // of any step: they are taken in the order of their arrival
      for (int distance = 1; distance <= std::min(2, round_.world - 1); ++distance) {
        Started& s = in_flight.emplace_back();
        s.data.assign(message_count, -1.0F);
        s.any_source = true;
        s.op = receive_any(buffer_of(s.data), DType::kFloat32);
        const PointToPoint any{-1, kind, false};
        submit(group_, s, &any);
      }
      for (int distance = 1; distance <= std::min(2, round_.world - 1); ++distance) {
        Started& s = in_flight.emplace_back();
        s.data.assign(message_count, static_cast<float>(rank_));
        s.expected = static_cast<float>(rank_);
        s.result = false;
        const int to = (rank_ + distance) % round_.world;
        s.op = send(me(*group_), to, buffer_of(s.data), DType::kFloat32);
        const PointToPoint point{to, kind, true};
        submit(group_, s, &point);
      }
    }
  }

  // The victim's fault. False where its program ends with it.
  bool strike(std::mt19937& own) {
    switch (round_.fault) {
      case Fault::kSlow: std::this_thread::sleep_for(std::chrono::milliseconds(50)); return true;
      case Fault::kLate: std::this_thread::sleep_for(std::chrono::milliseconds(2 * kTimeout_ms)); return true;
      case Fault::kCut: cut(); return true;
      case Fault::kLeave: return false;
      case Fault::kAbort: {
        ErrorInfo info;
        info.code = Code::kAborted;
        info.peer = rank_;
        info.detail = "aborted the group";
        engine_.fail(group_, std::move(info));
        return true;
      }
      case Fault::kMismatch: {
        Started s = all_reduce_of(group_, 40'000 + own() % 100, 1, 0);
        submit(group_, s);
        finish(s);
        wrong(round_, rank_, "a mismatch went unnoticed");
      }
      case Fault::kNone:
      case Fault::kMute:
      case Fault::kCount: return true;
    }
    return true;
  }

  void check(const Error* error) const {
    const bool leaver = rank_ == round_.victim && round_.fault == Fault::kLeave;
    if ((error != nullptr) != (round_.fails() && !leaver)) {
      wrong(round_, rank_, error != nullptr ? error->what() : "no error");
    }
    if (error == nullptr) return;
    const Code code = error->info().code;
    const auto expected = [&] {
      switch (round_.fault) {
        case Fault::kLeave: return Code::kPeerLeft;
        case Fault::kAbort: return Code::kAborted;
        case Fault::kMismatch: return Code::kMismatch;
        case Fault::kLate: return Code::kTimeout;
        default: return Code::kPeerLost;
      }
    }();
    // Whoever cuts its sockets at once may be seen to be gone before the first fault is.
    if (round_.second >= 0 && code == Code::kPeerLost && error->info().peer == round_.second) return;
    if (code != expected) wrong(round_, rank_, error->what());
    // Of a mismatch either side may be named; of an op that is late, under a sanitizer, whoever has not answered yet.
    const bool open = code == Code::kMismatch || code == Code::kTimeout || rank_ == round_.victim;
    if (!open && error->info().peer != round_.victim) wrong(round_, rank_, error->what());
  }

  void go_on(const RankSet& gone) {
    const RankSet nobody(static_cast<size_t>(round_.world));
    const Verdict verdict = engine_.agree(group_, nobody, deadline_after_ms(kPatience_ms), [](int32_t) {});
    if (verdict.excluded != gone) wrong(round_, rank_, "agreed on " + describe(verdict.excluded));
    std::vector<MemberInfo> members;
    int number = 0;
    float sum = 0;
    for (int rank = 0; rank < round_.world; ++rank) {
      if (gone[static_cast<size_t>(rank)]) continue;
      if (rank < rank_) ++number;
      sum += static_cast<float>(rank);
      members.push_back(members_[static_cast<size_t>(rank)]);
    }
    const auto successor = engine_.create_group(kSuccessor, number, members);
    try {
      for (int i = 0; i < 5; ++i) {
        Started s = all_reduce_of(successor, 3000, static_cast<float>(rank_), sum);
        s.op->deadline = deadline_after_ms(kPatience_ms);
        engine_.submit(successor, s.op);
        finish(s);
      }
    } catch (const Error& error) {
      wrong(round_, rank_, std::string("the successor failed: ") + error.what());
    }
    engine_.close_group(successor);
  }

  // It fails only with its connections.
  void run_beside(const std::shared_ptr<Group>& group) {
    try {
      for (int step = 0; step < kBesideSteps; ++step) {
        Started s =
            all_reduce_of(group, 1 + static_cast<size_t>(step) * 7, static_cast<float>(rank_ + step), total(step));
        s.op->nan_byte = std::byte{0xff};
        s.op->deadline = deadline_after_ms(kPatience_ms);
        engine_.submit(group, s.op);
        finish(s);
      }
    } catch (const Error& error) {
      const bool lost = round_.fails() && (!round_.victim_stays() || round_.second >= 0);
      const Code code = error.info().code;
      if (!lost || (code != Code::kPeerLost && code != Code::kPeerLeft)) {
        wrong(round_, rank_, std::string("the other group failed: ") + error.what());
      }
    }
  }

  Engine& engine_;
  const Round& round_;
  const int rank_;
  const std::vector<MemberInfo> members_;
  const std::vector<int> sockets_;  // not owned: the engine's
  std::latch& made_;                // all ranks have their groups
  std::shared_ptr<Group> group_;
};

void tell_interval(int socket, int64_t interval_ms) {
  FrameHeader beat;
  beat.type = FrameType::kHeartbeat;
  beat.offset = static_cast<uint64_t>(interval_ms);
  std::array<std::byte, kHeaderNbytes> bytes;
  encode(beat, bytes.data());
  if (::send(socket, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) std::abort();
}

void run_round(const Round& round) {
  const auto world = static_cast<size_t>(round.world);
  std::vector<MemberInfo> members;
  std::vector<std::unique_ptr<Engine>> engines(world);
  std::vector<std::vector<int>> sockets(world);
  std::vector<Fd> mute;
  for (int rank = 0; rank < round.world; ++rank) {
    members.push_back({std::string(16, static_cast<char>('a' + rank)), "host" + std::to_string(rank)});
    if (round.fault == Fault::kMute && rank == round.victim) continue;
    engines[static_cast<size_t>(rank)] = std::make_unique<Engine>(options(heartbeat_interval_ms(round, rank)));
  }
  for (size_t a = 0; a < world; ++a) {
    for (size_t b = a + 1; b < world; ++b) {
      for (int lane = 0; lane < kLanesPerChannel; ++lane) {  // a group of two uses both
        int pair[2];
        if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) std::abort();
        // The first thing to be read, so that no rank takes its own interval for the other's.
        tell_interval(pair[0], heartbeat_interval_ms(round, static_cast<int>(a)));
        tell_interval(pair[1], heartbeat_interval_ms(round, static_cast<int>(b)));
        for (const auto& [end, here, there] : {std::tuple(pair[0], a, b), std::tuple(pair[1], b, a)}) {
          sockets[here].push_back(end);
          if (engines[here]) {
            engines[here]->add_connection(Fd(end), members[there].process, lane, "peer");
          } else {
            mute.emplace_back(end);
          }
        }
      }
    }
  }
  std::latch made(round.world - (round.fault == Fault::kMute ? 1 : 0));
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < world; ++rank) {
    if (!engines[rank]) continue;
    ranks.push_back(
        std::make_unique<Rank>(*engines[rank], round, static_cast<int>(rank), members, std::move(sockets[rank]), made));
    threads.emplace_back([&run = *ranks.back()] { run.run(); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int world = std::atoi(argv[1]);
  const int rounds = std::atoi(argv[2]);
  std::mt19937 random(static_cast<unsigned>(std::atoi(argv[3])));
  const auto draw = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
  int struck = 0;
  for (int number = 0; number < rounds; ++number) {
    Round round{};
    round.world = world;
    round.number = number;
    round.fault = static_cast<Fault>(number % static_cast<int>(Fault::kCount));
    round.victim = draw(world);
    round.second = draw(3) == 0 ? draw(world) : -1;
    if (round.second == round.victim || world < 3) round.second = -1;
    round.at_step = draw(3) == 0 ? 0 : draw(kHealthySteps);
    round.seed = random();
    run_round(round);
    struck += round.fails() ? 1 : 0;
  }
  std::printf("%d ranks, %d rounds, %d faults: all as it should be\n", world, rounds, struck);
  return 0;
}
