// What moves an op on: gates, grants, parked bytes, completion.
#include <algorithm>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

bool Engine::gate_open(const Operation& op, const Gate& gate) {
  if (gate.kind == GateKind::kOpen) return true;
  const auto index = static_cast<size_t>(gate.step);
  const Step& step = op.steps[index];
  return gate.kind == GateKind::kSent ? op.states[index].sent == step.send.nbytes
                                      : op.states[index].received == step.recv.nbytes;
}

bool Engine::receive_open(const Operation& op, const Step& step) {
  return gate_open(op, step.recv_gate) && gate_open(op, sent_gate(step.replaces_sent));
}

// How many bytes of the stream's current step may be sent now.
uint64_t Engine::open_nbytes(const OutStream& stream) {
  const Operation& op = *stream.op;
  if (stream.cursor == stream.steps.size() || !op.ready) return 0;
  const auto index = static_cast<size_t>(stream.steps[stream.cursor]);
  const Step& step = op.steps[index];
  const uint64_t sent = op.states[index].sent;
  if (step.send_gate.kind == GateKind::kReceivedBytes) {
    return std::min(step.send.nbytes, op.states[static_cast<size_t>(step.send_gate.step)].received) - sent;
  }
  return gate_open(op, step.send_gate) ? step.send.nbytes - sent : 0;
}

// Bytes of the op could be sent, and none has been: others go first, or the socket takes no more.
bool Engine::must_queue(const Operation& op) {
  bool sendable = false;
  for (const auto& stream : op.out) {
    if (stream->offset > 0) return false;
    sendable = sendable || open_nbytes(*stream) > 0;
  }
  return sendable;
}

bool Engine::can_consume(const InStream& stream) {
  if (stream.op == nullptr || !stream.op->ready || stream.busy || stream.cursor == stream.steps.size()) return false;
  const Step& step = stream.op->steps[static_cast<size_t>(stream.steps[stream.cursor])];
  return receive_open(*stream.op, step);
}

// Tells the sender up to where it may send without credit: all steps whose gates are open, one after another; nothing
// while the op is not ready.
void Engine::update_grant(InStream& stream) {
  if (stream.op == nullptr || !stream.op->ready || stream.cursor == stream.steps.size()) return;
  const bool asked = stream.requested || stream.connection->forgot_request;
  if (stream.nbytes < options_.eager_grant_nbytes && !asked) return;
  // First what is parked: bytes granted meanwhile would be parked behind it, as many as were granted. drain() comes
  // back here when it is done.
  if (stream.draining || (!stream.parked.empty() && can_consume(stream))) return;
  uint64_t end = 0;
  for (size_t i = 0; i < stream.steps.size(); ++i) {
    const Step& step = stream.op->steps[static_cast<size_t>(stream.steps[i])];
    if (i >= stream.cursor && !step.park && !receive_open(*stream.op, step)) break;
    end += step.recv.nbytes;
  }
  if (end <= stream.arrived || (end <= stream.granted && !stream.regrant)) return;
  stream.regrant = false;
  stream.granted = end;
  ControlFrame grant;
  grant.header.type = FrameType::kGrant;
  grant.header.key = stream.key;
  grant.header.offset = end;
  queue_control(*stream.connection, std::move(grant));
}

void Engine::return_credit(Connection& connection, uint64_t nbytes) {
  connection.owed_nbytes += nbytes;
  // Less than this rides on the next frame that goes there anyway.
  if (connection.owed_nbytes >= options_.credit_nbytes / 4 && !std::exchange(connection.credit_queued, true)) {
    queue_control(connection, {});
  }
}

uint32_t Engine::take_owed(Connection& connection) {
  const uint64_t owed = std::exchange(connection.owed_nbytes, 0);
  connection.peer_credit_nbytes += owed;
  return static_cast<uint32_t>(owed);
}

// Books the end of a parked block: its bytes are used, or nobody wants them any more.
void Engine::release(Connection& connection, const Parked& block) {
  if (block.on_credit) {
    return_credit(connection, block.filled + block.cost_nbytes);
  } else {
    --connection.parked_granted;
  }
}

void Engine::drain(InStream& stream, Lock& lock) {
  const std::shared_ptr<Operation> op = stream.op ? stream.op->shared_from_this() : nullptr;
  if (!op) return;
  const bool outermost = !std::exchange(stream.draining, true);
  bool drained = false;
  while (!op->finished && !stream.parked.empty() && can_consume(stream)) {
    Parked& block = stream.parked.front();
    const auto index = static_cast<size_t>(stream.steps[stream.cursor]);
    uint64_t n = block.filled - block.consumed;
    n = std::min(n, op->steps[index].recv.nbytes - op->states[index].received);
    n -= n % op->element_nbytes;
    if (n == 0) break;
    drained = true;
    Connection& connection = *stream.connection;
    // The block is booked before consume(), whose progress may complete the op and end the stream.
    const std::shared_ptr<std::byte[]> data = block.data;
    const uint32_t begin = block.consumed;
    block.consumed += static_cast<uint32_t>(n);
    if (block.consumed == block.nbytes) {
      release(connection, block);
      stream.parked.pop_front();
    }
    consume(stream, data.get() + begin, n, lock);
  }
  if (op->finished || !outermost) return;  // the stream is gone, or another call here goes on
  stream.draining = false;
  if (drained) update_grant(stream);
}

namespace {
void apply(const Operation& op, const Step& step, uint64_t done, const std::byte* data, uint64_t nbytes) {
  if (op.codec) {
    op.codec->take(step, done, data, nbytes);
    return;
  }
  while (nbytes > 0) {
    const Buffer to = op.buffers.front({step.recv.offset + done, nbytes});
    uint64_t n = to.nbytes;
    if (step.action == Action::kCopy) {
      std::copy_n(data, n, to.data);
    } else {
      const Buffer operand = op.buffers.front({step.operand + done, n});
      n = operand.nbytes;
      const ReduceFn fn = step.finish ? op.kernels.finish : op.kernels.combine;
      const std::byte* lower = step.incoming_is_lower ? data : operand.data;
      const std::byte* higher = step.incoming_is_lower ? operand.data : data;
      fn(to.data, lower, higher, n / op.element_nbytes, op.divisor);
    }
    data += n;
    done += n;
    nbytes -= n;
  }
}
}  // namespace

// Takes the next bytes of the stream into the op, outside the lock.
void Engine::consume(InStream& stream, const std::byte* data, uint64_t nbytes, Lock& lock) {
  const std::shared_ptr<Operation> op = stream.op->shared_from_this();
  const auto index = static_cast<size_t>(stream.steps[stream.cursor]);
  const uint64_t done = op->states[index].received;
  stream.busy = true;
  ++op->pins;
  lock.unlock();
  apply(*op, op->steps[index], done, data, nbytes);
  lock.lock();
  if (!op->finished) {
    stream.busy = false;
    received(stream, nbytes, lock);
  }
  unpin(op);
}

void Engine::received(InStream& stream, uint64_t nbytes, Lock& lock) {
  const std::shared_ptr<Operation> op = stream.op->shared_from_this();
  const auto index = static_cast<size_t>(stream.steps[stream.cursor]);
  op->states[index].received += nbytes;
  op->todo_nbytes -= nbytes;
  const bool done = op->states[index].received == op->steps[index].recv.nbytes;
  if (done) ++stream.cursor;
  for (size_t i = 0; i < op->out.size() && !op->finished; ++i) {
    OutStream& out = *op->out[i];
    if (open_nbytes(out) == 0) continue;
    mark_ready(out);
    kick(*out.connection, inline_allowed(*op), lock);
  }
  if (done && !op->finished) step_done(op, lock);
  settle_if_complete(op);
}

void Engine::sent(OutStream& stream, uint64_t nbytes, Lock& lock) {
  const std::shared_ptr<Operation> op = stream.op->shared_from_this();
  const auto index = static_cast<size_t>(stream.steps[stream.cursor]);
  op->states[index].sent += nbytes;
  op->todo_nbytes -= nbytes;
  if (op->states[index].sent == op->steps[index].send.nbytes) {
    ++stream.cursor;
    step_done(op, lock);
  }
  settle_if_complete(op);
}

// A gate may have opened: more can be granted, and what is parked behind it can be used.
void Engine::step_done(const std::shared_ptr<Operation>& op, Lock& lock) {
  for (size_t i = 0; i < op->in.size() && !op->finished; ++i) {
    update_grant(*op->in[i]);
    drain(*op->in[i], lock);
  }
}

void Engine::leave_tables(Operation& op) {
  op.finished = true;
  metrics_.ended(op, now_ns());
  for (const auto& stream : op.out) {
    std::erase(stream->connection->ready, stream.get());
    std::erase(stream->connection->starved, stream.get());
    stream->connection->out.erase(stream->key);
  }
  for (InStream* stream : op.in) {
    Connection& connection = *stream->connection;
    if (connection.rx_in == stream) connection.rx_in = nullptr;
    for (const Parked& block : stream->parked) release(connection, block);
    connection.in.erase(StreamKey(stream->key));
  }
  op.in.clear();
  if (op.unmatched)
    std::erase_if(op.group->waiting, [&](const WaitingReceive& other) { return other.op.get() == &op; });
  op.group->in_flight.erase(op.order);
}

void Engine::settle_if_complete(const std::shared_ptr<Operation>& op) {
  if (op->finished || op->todo_nbytes > 0) return;
  leave_tables(*op);
  if (op->pins == 0) settle(op);
}

void Engine::unpin(const std::shared_ptr<Operation>& op) {
  if (--op->pins == 0 && op->finished) settle(op);
}

// The one place where an op ends, for its waiters, its future and its callbacks.
void Engine::settle(const std::shared_ptr<Operation>& op) {
  op->settled_at = now_ns();
  flight_.settled(*op);
  // What takes time, on a thread of its own: a result that is decoded or copied back, or one that must not be taken for
  // one.
  const bool decodes = op->codec && op->codec->finishes();
  if (op->failure ? op->invalidates : decodes || op->finalizer != nullptr) {
    enqueue_completion({op, {}, true});
    return;
  }
  if (op->codec && op->workspace) trash_.push_back(std::move(op->workspace));
  op->keep_alive.reset();  // its end takes no lock but its own (Operation::keep_alive)
  if (op->finalizer) trash_.push_back(std::make_shared<std::function<void()>>(std::move(op->finalizer)));
  auto callbacks = op->settle();
  if (!callbacks.empty()) enqueue_completion({op, std::move(callbacks)});
}

}  // namespace mccl
