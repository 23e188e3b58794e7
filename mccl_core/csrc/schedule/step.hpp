// A schedule is data: all steps of one rank for one collective, a pure function of the request. No sockets, no tensors.
//
// Ranges are byte ranges of the op's address space, which is the concatenation of the caller's buffers and the
// schedule's scratch (see schedule.hpp). Two ranks' steps match by order: on each channel the k-th send of A to B
// carries the bytes of B's k-th receive from A, and both have the same length.
#pragma once

#include <cstdint>
#include <vector>

namespace mccl {

struct Range {
  uint64_t offset = 0;
  uint64_t nbytes = 0;
  uint64_t end() const { return offset + nbytes; }
};

enum class GateKind : uint8_t {
  kOpen,
  kReceivedBytes,  // byte i may go once byte i of the gate step has been received (and reduced): cut-through
  kReceived,       // once the gate step's receive is complete
  kSent,           // once the gate step's send is complete (handed to the kernel)
};

struct Gate {
  GateKind kind = GateKind::kOpen;
  int32_t step = -1;  // an index into the same schedule
};

enum class Action : uint8_t { kCopy, kReduce };

struct Step {
  int32_t channel = 0;  // whose connections carry it (see channels.hpp)

  int32_t send_peer = -1;
  Range send;
  Gate send_gate;

  int32_t recv_peer = -1;
  Range recv;      // where the result goes
  Gate recv_gate;  // kReceivedBytes is not allowed here
  // Bytes that the receive replaces are those that this step sends: it waits, as for a gate, until they have been
  // handed to the kernel. What arrives shows that they reached a peer, but not that the system call has returned.
  int32_t replaces_sent = -1;
  bool park = false;  // may be granted before its gate opens: the op keeps these bytes in memory until then
  Action action = Action::kCopy;
  // For kReduce: result = op(lower, higher) of the incoming bytes and those at `operand`.
  uint64_t operand = 0;
  bool incoming_is_lower = false;  // the incoming block is the lower rank's
  bool finish = false;             // the last reduction of these bytes
};

struct Schedule {
  std::vector<Step> steps;
  uint64_t scratch_nbytes = 0;  // follows the caller's buffers in the address space
};

// --- small helpers for the generators ---

inline Gate sent_gate(int32_t step) { return step < 0 ? Gate{} : Gate{GateKind::kSent, step}; }

inline Step send_step(int32_t peer, Range range, Gate gate = {}) {
  Step step;
  step.send_peer = peer;
  step.send = range;
  step.send_gate = gate;
  return step;
}

inline void set_copy(Step& step, int32_t peer, Range range, Gate gate = {}) {
  step.recv_peer = peer;
  step.recv = range;
  step.recv_gate = gate;
  step.action = Action::kCopy;
}

inline void set_reduce(Step& step, int32_t peer, Range range, uint64_t operand, bool incoming_is_lower,
                       Gate gate = {}) {
  step.recv_peer = peer;
  step.recv = range;
  step.recv_gate = gate;
  step.action = Action::kReduce;
  step.operand = operand;
  step.incoming_is_lower = incoming_is_lower;
}

}  // namespace mccl
