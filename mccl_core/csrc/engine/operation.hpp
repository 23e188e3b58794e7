// One op in flight: its schedule, how far each step is, and how a caller waits for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "engine/buffers.hpp"
#include "engine/codec.hpp"
#include "reduce/reduce.hpp"
#include "schedule/step.hpp"
#include "transport/frame.hpp"

namespace mccl {

class Connection;
class Group;
class Operation;

// The bytes that this rank sends one peer on one channel in one op, in the order of the steps.
struct OutStream {
  Operation* op = nullptr;
  Connection* connection = nullptr;
  int32_t peer = -1;
  int32_t channel = 0;
  StreamKey key;
  std::vector<int32_t> steps;
  size_t cursor = 0;       // index into steps; == size() when all is sent
  uint64_t nbytes = 0;     // all bytes of the stream
  uint64_t offset = 0;     // stream bytes put into frames
  uint64_t granted = 0;    // stream offset up to which the peer wants the bytes
  bool requested = false;  // a grant was asked for at this offset
  bool queued = false;     // in the connection's ready list
  bool peer_over = false;  // the peer's part of the op is over
};

// Payload that came before it could be used. One block a frame, allocated whole, filled as bytes arrive.
struct Parked {
  std::shared_ptr<std::byte[]> data;  // shared with a thread that reads or fills it outside the lock
  uint32_t nbytes = 0;
  uint32_t filled = 0;
  uint32_t consumed = 0;
  bool on_credit = false;
  uint32_t cost_nbytes = 0;  // credit of the frame itself, returned with the block
};

// The bytes that one peer sends this rank on one channel in one op. Exists from the first frame or the post, whichever
// is first.
struct InStream {
  explicit InStream(std::pmr::memory_resource* pool) : steps(pool), parked(pool) {}

  Operation* op = nullptr;  // null until the op is posted
  Connection* connection = nullptr;
  int32_t peer = -1;
  int32_t channel = 0;
  StreamKey key;
  Fingerprint fingerprint;  // as the sender states it
  bool announced = false;   // a data frame or request has come
  std::pmr::vector<int32_t> steps;
  size_t cursor = 0;
  uint64_t arrived = 0;  // stream bytes taken from the socket
  uint64_t granted = 0;  // stream offset that the sender was told
  uint64_t nbytes = 0;   // all bytes of the stream, once posted
  bool requested = false;
  bool regrant = false;    // the sender asks again: an earlier grant may not have been kept
  bool draining = false;   // a thread is taking parked bytes into the op
  bool peer_over = false;  // the peer's part of the op is over
  bool busy = false;       // a thread is reading parked or arriving bytes into the op, outside the lock
  std::pmr::deque<Parked> parked;
};

struct StepState {
  uint64_t sent = 0;
  uint64_t received = 0;
};

// Names an op that is started by the callback of another one, so that its name does not depend on when the callback
// runs: the ticket of the op that the chain of callbacks began with, and a tag of the path from there. See
// docs/torch-distributed.md, "Callbacks that communicate".
struct NestedName {
  uint64_t ticket = 0;
  uint32_t tag = 0;  // 0: the op is not nested
};

enum class OpState : uint8_t { kInFlight, kDone, kFailed };

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  Operation(Fingerprint fingerprint, Schedule schedule, Buffers buffers);

  // --- for callers; any thread ---

  // Blocks until the op has settled or the timeout has passed (negative: none). Returns false on timeout; throws
  // Error where the op failed. The op itself goes on after a timeout of the wait.
  bool wait(int64_t timeout_ms);
  // Whether a thread is in wait() now.
  bool awaited() const { return waiters_ > 0; }
  OpState state() const;
  // What made it fail; null otherwise.
  std::shared_ptr<const Error> error() const;
  // Runs `callback` on the engine's completion thread, or here and now if the op has settled already.
  void on_settled(std::function<void()> callback);

  // Copies `own_blocks` and lets the codec begin. On the thread that submits the op or makes it ready.
  void copy_own_blocks() const;
  // Fills the result with NaN, if it is floating-point: nobody shall take what a failed op has left for a result. Only
  // once no thread of the engine uses the buffers.
  void invalidate_result() const;

  // --- set before submission ---
  Fingerprint fingerprint;
  std::vector<Step> steps;
  Buffers buffers;
  uint64_t nbytes = 0;  // of the caller's tensor
  ReduceKernels kernels{};
  size_t element_nbytes = 1;
  double divisor = 1;
  TimePoint deadline = kNever;
  // Runs on the completion thread before the op settles as done (copying a staged result back).
  std::function<void()> finalizer;
  // What stays on this rank: copied, in this order, once the op is ready. Both sides of a pair have the same size.
  std::vector<std::pair<Buffer, Buffer>> own_blocks;  // from, to
  // Owners of the caller's buffers. They may end on a thread of the engine, under its lock: they must wait for nobody.
  std::shared_ptr<void> keep_alive;
  std::vector<Buffer> results;        // what the caller reads afterwards
  std::optional<std::byte> nan_byte;  // an element of nothing but these is NaN; none: no such element
  // A failed op is invalidated before it settles; false where a device may still write its buffers.
  bool invalidates = true;
  std::shared_ptr<std::byte[]> workspace;  // memory of the op's own that is among its buffers
  // Where elements travel in another form than they have in memory. The buffers are those of the wire, all in
  // `workspace`, which is let go of when the op settles.
  std::unique_ptr<Codec> codec;
  // False while kernels on a device are still to write the buffers: the op takes its place in the group's order, but
  // nothing reads or writes the buffers before Engine::set_ready. Under the engine's lock from submission on.
  bool ready = true;
  NestedName nested;

  // --- owned by the engine, under its lock ---
  std::shared_ptr<Group> group;
  uint64_t ticket = 0;
  bool unmatched = false;  // a receive that has not been given a message yet
  int32_t source = -1;     // of a receive from any source, once it has a message
  uint64_t order = 0;      // priority on the wire: order of posting in this process
  std::vector<StepState> states;
  std::vector<std::unique_ptr<OutStream>> out;
  std::vector<InStream*> in;  // owned by the connections
  uint64_t todo_nbytes = 0;   // to send and to receive
  int pins = 0;               // threads that use the buffers outside the lock
  bool finished = false;      // left the engine's tables
  std::shared_ptr<const Error> failure;
  TimePoint posted_at = 0;
  TimePoint settled_at = 0;
  uint64_t flight = 0;  // its entry in the flight record
  // For the metrics: when it could begin (0: not yet), up to when its waiting is booked, and whether bytes that could
  // have gone out at once had to queue.
  TimePoint started_at = 0;
  TimePoint waited_until = 0;
  bool queued = false;
  // --- waits.cpp ---
  TimePoint ask_at = kNever;    // so long before the deadline that the answers come in time
  TimePoint watch_at = 0;       // when to see whether it has moved
  uint64_t watched_nbytes = 0;  // todo_nbytes then
  StreamKey key;
  bool sends_message = false;  // point-to-point: it is the sender's

 private:
  friend class Engine;
  // Marks the op done or failed and wakes its waiters; returns the callbacks that are still to be run.
  std::vector<std::function<void()>> settle();

  mutable std::mutex mutex_;
  std::condition_variable settled_;
  OpState state_ = OpState::kInFlight;
  std::atomic<int> waiters_{0};
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace mccl
