#include "schedule/verify.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <random>
#include <utility>

namespace mccl {

namespace {

uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

Cell original(int32_t rank, uint64_t address) {
  const Contents contents = contribution(rank, address);
  return {contents, contents.sum};
}

Cell combined(const Cell& lower, const Cell& higher) {
  Cell cell = lower;
  cell.contents += higher.contents;
  cell.expression = mix(mix(lower.expression) + 3 * higher.expression);
  return cell;
}

struct Progress {
  uint64_t sent = 0;
  uint64_t received = 0;
};

// The bytes that one rank sends another on one channel, as both sides see them.
struct Flow {
  int32_t from, to;
  std::vector<int32_t> sends;     // steps of `from`
  std::vector<int32_t> receives;  // steps of `to`
  size_t send_cursor = 0;
  size_t receive_cursor = 0;  // where the next arriving element belongs
  uint64_t arrived = 0;       // of that step
  uint64_t unbooked = 0;      // elements that have left, in a system call that has not returned
  size_t apply_cursor = 0;    // where the next parked element belongs
  std::deque<Cell> parked;
  bool slow = false;
  bool waiting = false;  // in one of the pools
};

// Flows that may be able to move, taken out in a random order.
class Pool {
 public:
  void add(size_t flow) { flows_.push_back(flow); }
  bool empty() const { return flows_.empty(); }
  size_t take(std::mt19937_64& random) {
    std::swap(flows_[random() % flows_.size()], flows_.back());
    const size_t flow = flows_.back();
    flows_.pop_back();
    return flow;
  }

 private:
  std::vector<size_t> flows_;
};

class Run {
 public:
  Run(const Problem& problem, uint64_t seed) : problem_(problem), random_(seed) {
    for (size_t rank = 0; rank < problem.schedules.size(); ++rank) {
      const Schedule& schedule = problem.schedules[rank];
      progress_.emplace_back(schedule.steps.size());
      dependents_.emplace_back(schedule.steps.size());
      std::vector<Cell> memory(problem.nbytes[rank] + schedule.scratch_nbytes);
      for (uint64_t a = 0; a < problem.nbytes[rank]; ++a) memory[a] = original(static_cast<int32_t>(rank), a);
      memory_.push_back(std::move(memory));
    }
    make_flows();
  }

  std::optional<std::string> run() {
    if (auto wrong = bounds()) return wrong;
    for (const Flow& flow : flows_) {
      if (auto wrong = lengths(flow)) return wrong;
    }
    find_readers();
    for (size_t i = 0; i < flows_.size(); ++i) {
      flows_[i].slow = random_() % 4 == 0;
      enqueue(i);
    }
    while (!wrong_ && !(fast_.empty() && slow_.empty())) {
      // A slow link moves only when no other can: it is as late as it can be.
      const size_t i = fast_.empty() ? slow_.take(random_) : fast_.take(random_);
      flows_[i].waiting = false;
      bool moved = false;
      for (auto n = 1 + random_() % 3; n > 0 && !wrong_ && advance(flows_[i]); --n) moved = true;
      if (moved) enqueue(i);
    }
    if (wrong_) return wrong_;
    for (const Flow& flow : flows_) {
      if (flow.apply_cursor < flow.receives.size()) {
        return "ranks wait for each other: rank " + std::to_string(flow.to) + " for rank " + std::to_string(flow.from) +
               " in step " + std::to_string(flow.receives[flow.apply_cursor]);
      }
    }
    return results();
  }

  const std::vector<std::vector<Cell>>& memory() const { return memory_; }

 private:
  void enqueue(size_t i) {
    Flow& flow = flows_[i];
    if (std::exchange(flow.waiting, true)) return;
    (flow.slow ? slow_ : fast_).add(i);
  }
  void enqueue_dependents(int32_t rank, int32_t index) {
    for (const uint32_t i : dependents_[static_cast<size_t>(rank)][static_cast<size_t>(index)]) enqueue(i);
  }

  const Step& step(int32_t rank, int32_t index) const {
    return problem_.schedules[static_cast<size_t>(rank)].steps[static_cast<size_t>(index)];
  }
  Progress& progress(int32_t rank, int32_t index) {
    return progress_[static_cast<size_t>(rank)][static_cast<size_t>(index)];
  }

  void make_flows() {
    std::map<std::array<int32_t, 3>, uint32_t> index;
    const auto at = [&](int32_t from, int32_t to, int32_t channel) {
      const auto [found, added] = index.try_emplace({from, to, channel}, static_cast<uint32_t>(flows_.size()));
      if (added) {
        flows_.emplace_back();
        flows_.back().from = from;
        flows_.back().to = to;
      }
      return found->second;
    };
    const auto depend = [&](size_t rank, const Gate& gate, uint32_t flow) {
      if (gate.kind != GateKind::kOpen) dependents_[rank][static_cast<size_t>(gate.step)].push_back(flow);
    };
    for (size_t rank = 0; rank < problem_.schedules.size(); ++rank) {
      const auto r = static_cast<int32_t>(rank);
      for (size_t i = 0; i < problem_.schedules[rank].steps.size(); ++i) {
        const auto step_index = static_cast<int32_t>(i);
        const Step& s = problem_.schedules[rank].steps[i];
        if (s.send_peer >= 0) {
          const uint32_t flow = at(r, s.send_peer, s.channel);
          flows_[flow].sends.push_back(step_index);
          depend(rank, s.send_gate, flow);
        }
        if (s.recv_peer >= 0) {
          const uint32_t flow = at(s.recv_peer, r, s.channel);
          flows_[flow].receives.push_back(step_index);
          depend(rank, s.recv_gate, flow);
          depend(rank, sent_gate(s.replaces_sent), flow);
        }
      }
    }
  }

  // Which sends read a byte: for each rank a list of steps for each address, one after the other.
  void find_readers() {
    for (size_t rank = 0; rank < memory_.size(); ++rank) {
      const auto& steps = problem_.schedules[rank].steps;
      Readers readers;
      readers.begins.assign(memory_[rank].size() + 1, 0);
      const auto each = [&](auto visit) {
        for (size_t i = 0; i < steps.size(); ++i) {
          if (steps[i].send_peer < 0) continue;
          for (uint64_t a = steps[i].send.offset; a < steps[i].send.end(); ++a) visit(a, static_cast<int32_t>(i));
        }
      };
      each([&](uint64_t a, int32_t) { ++readers.begins[a + 1]; });
      for (size_t a = 1; a < readers.begins.size(); ++a) readers.begins[a] += readers.begins[a - 1];
      readers.steps.resize(readers.begins.back());
      std::vector<uint32_t> next(readers.begins);
      each([&](uint64_t a, int32_t index) { readers.steps[next[a]++] = index; });
      readers_.push_back(std::move(readers));
    }
  }

  std::optional<std::string> bounds() const {
    for (size_t rank = 0; rank < memory_.size(); ++rank) {
      const uint64_t end = memory_[rank].size();
      for (const Step& s : problem_.schedules[rank].steps) {
        const bool outside = (s.send_peer >= 0 && s.send.end() > end) || (s.recv_peer >= 0 && s.recv.end() > end) ||
                             (s.action == Action::kReduce && s.operand + s.recv.nbytes > end);
        if (outside) return "rank " + std::to_string(rank) + ": a step reaches beyond the address space";
      }
    }
    return std::nullopt;
  }

  std::optional<std::string> lengths(const Flow& flow) const {
    const std::string pair = "rank " + std::to_string(flow.from) + " to rank " + std::to_string(flow.to);
    if (flow.sends.size() != flow.receives.size()) return pair + ": sends and receives differ in number";
    for (size_t i = 0; i < flow.sends.size(); ++i) {
      const uint64_t nbytes = step(flow.from, flow.sends[i]).send.nbytes;
      if (nbytes == 0) return pair + ": an empty step";
      if (nbytes != step(flow.to, flow.receives[i]).recv.nbytes) return pair + ": steps differ in length";
    }
    return std::nullopt;
  }

  // Whether element `offset` behind the gate may go.
  bool open(int32_t rank, const Gate& gate, uint64_t offset) {
    switch (gate.kind) {
      case GateKind::kOpen: return true;
      case GateKind::kReceivedBytes: return progress(rank, gate.step).received > offset;
      case GateKind::kReceived: return progress(rank, gate.step).received == step(rank, gate.step).recv.nbytes;
      case GateKind::kSent: return progress(rank, gate.step).sent == step(rank, gate.step).send.nbytes;
    }
    return false;
  }

  bool receive_open(int32_t rank, const Step& s, uint64_t offset) {
    return open(rank, s.recv_gate, offset) && open(rank, sent_gate(s.replaces_sent), offset);
  }

  bool advance(Flow& flow) {
    if (flow.unbooked > 0 && random_() % 2 == 0) return book(flow);
    if (!flow.parked.empty()) {
      const int32_t index = flow.receives[flow.apply_cursor];
      const uint64_t offset = progress(flow.to, index).received;
      if (receive_open(flow.to, step(flow.to, index), offset)) {
        apply(flow, flow.parked.front());
        flow.parked.pop_front();
        return true;
      }
    }
    return transfer(flow) || book(flow);
  }

  // The system call has returned: the sender knows what has left.
  bool book(Flow& flow) {
    if (flow.unbooked == 0) return false;
    const int32_t index = flow.sends[flow.send_cursor];
    Progress& done = progress(flow.from, index);
    done.sent += std::exchange(flow.unbooked, 0);
    if (done.sent == step(flow.from, index).send.nbytes) ++flow.send_cursor;
    enqueue_dependents(flow.from, index);
    return true;
  }

  bool transfer(Flow& flow) {
    if (flow.send_cursor == flow.sends.size()) return false;
    const int32_t send_index = flow.sends[flow.send_cursor];
    const int32_t recv_index = flow.receives[flow.receive_cursor];
    const Step& sending = step(flow.from, send_index);
    const Step& receiving = step(flow.to, recv_index);
    const uint64_t sent = progress(flow.from, send_index).sent + flow.unbooked;
    if (sent == sending.send.nbytes) return false;
    if (!open(flow.from, sending.send_gate, sent)) return false;
    const bool usable = receive_open(flow.to, receiving, flow.arrived);
    if (!usable && !receiving.park) return false;  // not granted
    const Cell value = memory_[static_cast<size_t>(flow.from)][sending.send.offset + sent];
    ++flow.unbooked;
    if (++flow.arrived == receiving.recv.nbytes) {
      ++flow.receive_cursor;
      flow.arrived = 0;
    }
    if (usable && flow.parked.empty()) {
      apply(flow, value);
    } else {
      flow.parked.push_back(value);
    }
    return true;
  }

  void apply(Flow& flow, const Cell& value) {
    const int32_t index = flow.receives[flow.apply_cursor];
    const Step& s = step(flow.to, index);
    Progress& done = progress(flow.to, index);
    auto& memory = memory_[static_cast<size_t>(flow.to)];
    const uint64_t address = s.recv.offset + done.received;
    check_overwrite(flow.to, index, address);
    if (s.action == Action::kReduce) {
      const Cell operand = memory[s.operand + done.received];
      memory[address] = s.incoming_is_lower ? combined(value, operand) : combined(operand, value);
    } else {
      memory[address] = value;
    }
    if (++done.received == s.recv.nbytes) ++flow.apply_cursor;
    enqueue_dependents(flow.to, index);
  }

  // A send whose gate is open may have read this cell or not: what it sends would depend on timing.
  void check_overwrite(int32_t rank, int32_t by, uint64_t address) {
    const Readers& readers = readers_[static_cast<size_t>(rank)];
    for (uint32_t i = readers.begins[address]; i < readers.begins[address + 1]; ++i) {
      const int32_t index = readers.steps[i];
      const Step& s = step(rank, index);
      const uint64_t offset = address - s.send.offset;
      if (progress(rank, index).sent <= offset && open(rank, s.send_gate, offset)) {
        wrong_ = "rank " + std::to_string(rank) + ": step " + std::to_string(by) + " overwrites byte " +
                 std::to_string(address) + ", which step " + std::to_string(index) + " has not sent yet";
        return;
      }
    }
  }

  std::optional<std::string> results() const {
    for (size_t rank = 0; rank < memory_.size(); ++rank) {
      const std::string where = "rank " + std::to_string(rank) + ": byte ";
      for (uint64_t address = 0; address < problem_.nbytes[rank]; ++address) {
        const Cell& cell = memory_[rank][address];
        const auto expected = problem_.expected(static_cast<int32_t>(rank), address);
        if (expected && cell.contents != *expected) {
          return where + std::to_string(address) + " holds " + std::to_string(cell.contents.count) +
                 " contributions, which are not the " + std::to_string(expected->count) + " expected";
        }
        if (problem_.identical && cell.expression != memory_[0][address].expression) {
          return where + std::to_string(address) + " was computed in another way than on rank 0";
        }
      }
    }
    return std::nullopt;
  }

  struct Readers {
    std::vector<uint32_t> begins;  // by address, into `steps`
    std::vector<int32_t> steps;
  };

  const Problem& problem_;
  std::mt19937_64 random_;
  std::vector<std::vector<Progress>> progress_;
  std::vector<std::vector<Cell>> memory_;
  std::vector<std::vector<std::vector<uint32_t>>> dependents_;  // by rank and step: flows with a gate on it
  std::vector<Readers> readers_;                                // by rank
  std::vector<Flow> flows_;
  Pool fast_, slow_;
  std::optional<std::string> wrong_;
};

}  // namespace

Contents contribution(int32_t rank, uint64_t address) {
  return {mix(mix(static_cast<uint64_t>(rank) + 1) + address), 1};
}

std::optional<std::string> verify(const Problem& problem, int orders) {
  std::vector<std::vector<Cell>> first;
  for (int seed = 1; seed <= orders; ++seed) {
    Run run(problem, static_cast<uint64_t>(seed));
    if (auto wrong = run.run()) return wrong;
    if (seed == 1) first = run.memory();
    for (size_t rank = 0; rank < first.size(); ++rank) {
      for (uint64_t address = 0; address < problem.nbytes[rank]; ++address) {
        if (!problem.expected(static_cast<int32_t>(rank), address)) continue;
        if (first[rank][address].expression == run.memory()[rank][address].expression) continue;
        return "rank " + std::to_string(rank) + ": byte " + std::to_string(address) +
               " depends on the order in which messages arrive";
      }
    }
  }
  return std::nullopt;
}

}  // namespace mccl
