#include "schedule/verify.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <random>

namespace mccl {

namespace {

struct Progress {
  uint64_t sent = 0;
  uint64_t received = 0;
};

// The bytes that one rank sends another, as both sides see them.
struct Channel {
  int32_t from, to;
  std::vector<int32_t> sends;     // steps of `from`
  std::vector<int32_t> receives;  // steps of `to`
  size_t send_cursor = 0;
  size_t receive_cursor = 0;  // where the next arriving element belongs
  uint64_t arrived = 0;       // of that step
  size_t apply_cursor = 0;    // where the next parked element belongs
  std::deque<Cell> parked;
  bool slow = false;
};

class Run {
 public:
  Run(const Problem& problem, uint64_t seed) : problem_(problem), random_(seed) {
    for (size_t rank = 0; rank < problem.schedules.size(); ++rank) {
      const Schedule& schedule = problem.schedules[rank];
      progress_.emplace_back(schedule.steps.size());
      std::vector<Cell> memory(problem.nbytes[rank] + schedule.scratch_nbytes);
      for (uint64_t a = 0; a < problem.nbytes[rank]; ++a) memory[a] = {{static_cast<int32_t>(rank), a}};
      memory_.push_back(std::move(memory));
    }
    make_channels();
  }

  std::optional<std::string> run() {
    if (auto wrong = bounds()) return wrong;
    for (const Channel& channel : channels_) {
      if (auto wrong = lengths(channel)) return wrong;
    }
    std::vector<size_t> order(channels_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (Channel& channel : channels_) channel.slow = random_() % 4 == 0;
    while (!wrong_) {
      std::shuffle(order.begin(), order.end(), random_);
      // A slow link moves only when no other can: it is as late as it can be.
      if (!pass(order, false) && !pass(order, true)) break;
    }
    if (wrong_) return wrong_;
    for (const Channel& channel : channels_) {
      if (channel.apply_cursor < channel.receives.size()) {
        return "ranks wait for each other: rank " + std::to_string(channel.to) + " for rank " +
               std::to_string(channel.from) + " in step " + std::to_string(channel.receives[channel.apply_cursor]);
      }
    }
    return results();
  }

 private:
  bool pass(const std::vector<size_t>& order, bool slow) {
    bool moved = false;
    for (const size_t i : order) {
      if (channels_[i].slow != slow) continue;
      for (auto n = 1 + random_() % 3; n > 0 && !wrong_ && advance(channels_[i]); --n) moved = true;
    }
    return moved;
  }

  const Step& step(int32_t rank, int32_t index) const {
    return problem_.schedules[static_cast<size_t>(rank)].steps[static_cast<size_t>(index)];
  }
  Progress& progress(int32_t rank, int32_t index) {
    return progress_[static_cast<size_t>(rank)][static_cast<size_t>(index)];
  }

  void make_channels() {
    std::map<std::pair<int32_t, int32_t>, Channel> channels;
    const auto at = [&](int32_t from, int32_t to) -> Channel& {
      Channel& channel = channels[{from, to}];
      channel.from = from;
      channel.to = to;
      return channel;
    };
    for (size_t rank = 0; rank < problem_.schedules.size(); ++rank) {
      const auto r = static_cast<int32_t>(rank);
      for (size_t i = 0; i < problem_.schedules[rank].steps.size(); ++i) {
        const auto index = static_cast<int32_t>(i);
        const Step& s = problem_.schedules[rank].steps[i];
        if (s.send_peer >= 0) at(r, s.send_peer).sends.push_back(index);
        if (s.recv_peer >= 0) at(s.recv_peer, r).receives.push_back(index);
      }
    }
    for (auto& [key, channel] : channels) channels_.push_back(std::move(channel));
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

  std::optional<std::string> lengths(const Channel& channel) const {
    const std::string pair = "rank " + std::to_string(channel.from) + " to rank " + std::to_string(channel.to);
    if (channel.sends.size() != channel.receives.size()) return pair + ": sends and receives differ in number";
    for (size_t i = 0; i < channel.sends.size(); ++i) {
      const uint64_t nbytes = step(channel.from, channel.sends[i]).send.nbytes;
      if (nbytes == 0) return pair + ": an empty step";
      if (nbytes != step(channel.to, channel.receives[i]).recv.nbytes) return pair + ": steps differ in length";
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

  bool advance(Channel& channel) {
    if (!channel.parked.empty()) {
      const int32_t index = channel.receives[channel.apply_cursor];
      const uint64_t offset = progress(channel.to, index).received;
      if (open(channel.to, step(channel.to, index).recv_gate, offset)) {
        apply(channel, channel.parked.front());
        channel.parked.pop_front();
        return true;
      }
    }
    return transfer(channel);
  }

  bool transfer(Channel& channel) {
    if (channel.send_cursor == channel.sends.size()) return false;
    const int32_t send_index = channel.sends[channel.send_cursor];
    const int32_t recv_index = channel.receives[channel.receive_cursor];
    const Step& sending = step(channel.from, send_index);
    const Step& receiving = step(channel.to, recv_index);
    Progress& done = progress(channel.from, send_index);
    if (!open(channel.from, sending.send_gate, done.sent)) return false;
    const bool usable = open(channel.to, receiving.recv_gate, channel.arrived);
    if (!usable && !receiving.park) return false;  // not granted
    const Cell value = memory_[static_cast<size_t>(channel.from)][sending.send.offset + done.sent];
    if (++done.sent == sending.send.nbytes) ++channel.send_cursor;
    if (++channel.arrived == receiving.recv.nbytes) {
      ++channel.receive_cursor;
      channel.arrived = 0;
    }
    if (usable && channel.parked.empty()) {
      apply(channel, value);
    } else {
      channel.parked.push_back(value);
    }
    return true;
  }

  void apply(Channel& channel, const Cell& value) {
    const int32_t index = channel.receives[channel.apply_cursor];
    const Step& s = step(channel.to, index);
    Progress& done = progress(channel.to, index);
    auto& memory = memory_[static_cast<size_t>(channel.to)];
    const uint64_t address = s.recv.offset + done.received;
    check_overwrite(channel.to, index, address);
    Cell result = value;
    if (s.action == Action::kReduce) {
      const Cell& operand = memory[s.operand + done.received];
      result.insert(result.end(), operand.begin(), operand.end());
      std::sort(result.begin(), result.end());
    }
    memory[address] = std::move(result);
    if (++done.received == s.recv.nbytes) ++channel.apply_cursor;
  }

  // A send whose gate is open may have read this cell or not: what it sends would depend on timing.
  void check_overwrite(int32_t rank, int32_t by, uint64_t address) {
    const auto& steps = problem_.schedules[static_cast<size_t>(rank)].steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      const Range& range = steps[i].send;
      if (steps[i].send_peer < 0 || address < range.offset || address >= range.end()) continue;
      const uint64_t offset = address - range.offset;
      const auto index = static_cast<int32_t>(i);
      if (progress(rank, index).sent <= offset && open(rank, steps[i].send_gate, offset)) {
        wrong_ = "rank " + std::to_string(rank) + ": step " + std::to_string(by) + " overwrites byte " +
                 std::to_string(address) + ", which step " + std::to_string(i) + " has not sent yet";
        return;
      }
    }
  }

  std::optional<std::string> results() const {
    for (size_t rank = 0; rank < memory_.size(); ++rank) {
      for (uint64_t address = 0; address < problem_.nbytes[rank]; ++address) {
        const auto expected = problem_.expected(static_cast<int32_t>(rank), address);
        if (expected && memory_[rank][address] != *expected) {
          return "rank " + std::to_string(rank) + ": byte " + std::to_string(address) + " holds " +
                 std::to_string(memory_[rank][address].size()) + " contributions, which are not the " +
                 std::to_string(expected->size()) + " expected";
        }
      }
    }
    return std::nullopt;
  }

  const Problem& problem_;
  std::mt19937_64 random_;
  std::vector<std::vector<Progress>> progress_;
  std::vector<std::vector<Cell>> memory_;
  std::vector<Channel> channels_;
  std::optional<std::string> wrong_;
};

}  // namespace

std::optional<std::string> verify(const Problem& problem, uint64_t seed) { return Run(problem, seed).run(); }

}  // namespace mccl
