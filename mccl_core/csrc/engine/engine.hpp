// The engine: one a process, shared by its groups. A transmit thread and a receive thread poll all connections, or
// those of their channel where there are several; completion threads run callbacks. One lock guards the state; system
// calls and reductions run outside it.
//
// Files: engine.cpp (life, groups), connections.cpp, submit.cpp and any_source.cpp (how an op begins), progress.cpp
// (gates, grants, consuming, completing), transmit.cpp, receive.cpp, frames.cpp (what a frame says), completion.cpp
// (callbacks), metrics.cpp (counts). When something goes wrong: faults.cpp (how a group ends), notices.cpp (how all
// come to know), departures.cpp (goodbyes), mismatch.cpp, deadlines.cpp, heartbeat.cpp, waits.cpp (who waits for whom),
// agreement.cpp (who leaves a group).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/options.hpp"
#include "engine/channel.hpp"
#include "engine/connection.hpp"
#include "engine/flight_record.hpp"
#include "engine/group.hpp"
#include "engine/metrics.hpp"
#include "engine/operation.hpp"

namespace mccl {

struct PointToPoint {
  int32_t peer;  // -1: receive from any source
  uint32_t tag;
  bool sends;
};

class Engine {
 public:
  explicit Engine(const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Options& options() const { return options_; }

  // Takes over an authenticated, connected stream socket.
  void add_connection(Fd socket, const ProcessId& process, int32_t lane, std::string host);
  bool connected(const ProcessId& process, int32_t lane) const;

  // `channels`: how many its ops may use, at most kMaxChannels.
  std::shared_ptr<Group> create_group(uint64_t id, int32_t rank, std::vector<MemberInfo> members, int32_t channels = 1);
  // Tells the members goodbye (or, where `error` is given, that the group failed). Ops in flight fail. Idempotent.
  void close_group(const std::shared_ptr<Group>& group, std::shared_ptr<const Error> error = nullptr);
  // Null while the group is healthy.
  std::shared_ptr<const Error> failure(const Group& group) const;

  // What the op needs and has no connection for yet.
  struct Missing {
    int32_t peer;
    int32_t channel;
    bool operator==(const Missing&) const = default;
  };
  std::vector<Missing> missing_links(const Group& group, const Operation& op) const;
  // Starts the op. Never blocks on the network. Throws the group's Error where it failed or a peer has left.
  void submit(const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& op,
              const PointToPoint* point_to_point = nullptr);
  // The buffers of an op that was submitted with `ready` off have been written: it may start. Any thread; idempotent,
  // and nothing happens where the op is over already.
  void set_ready(const std::shared_ptr<Operation>& op);

  // Ends the group on all ranks with this error. Idempotent.
  void fail(const std::shared_ptr<Group>& group, ErrorInfo info);
  // What a group of this process failed with, last; null where none has.
  std::shared_ptr<const Error> last_failure() const;
  // What the first group that is in error, and not destroyed yet, failed with.
  std::shared_ptr<const Error> open_failure() const;

  // Blocks until all who stay have agreed on who leaves the group: whom any of them names, and whoever is lost. All of
  // them must call it. `connect` dials a rank; it may throw Error. Throws Error where this rank is the one to leave
  // (kExcluded), or at the deadline.
  Verdict agree(const std::shared_ptr<Group>& group, const RankSet& named, TimePoint deadline,
                const std::function<void(int32_t)>& connect);

  Metrics::Snapshot metrics() const;
  void reset_metrics();
  uint64_t parked_nbytes() const;
  // The latest ops of all groups, the oldest first.
  std::vector<FlightEntry> flight_record() const;

  // Says goodbye, waits until the peers have taken what was sent (at most options.linger_ms), joins the threads.
  void shutdown();
  // In a forked child: closes the sockets and pollers, so that the parent's death is seen by its peers.
  void close_descriptors_in_child();

 private:
  // Holds the engine's mutex. What ops let go of meanwhile is destroyed once it is released: a tensor's end may need
  // Python's interpreter lock, and whoever has that may be waiting for this mutex.
  class Lock {
   public:
    explicit Lock(Engine& engine) : engine_(engine) { lock(); }
    ~Lock() {
      if (held_) unlock();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    void lock() {
      engine_.mutex_.lock();
      held_ = true;
    }
    void unlock() {
      std::pmr::vector<std::shared_ptr<void>> trash(engine_.pool_.get());
      trash.swap(engine_.trash_);
      held_ = false;
      engine_.mutex_.unlock();
    }

   private:
    Engine& engine_;
    bool held_ = false;
  };
  using ConnectionPtr = std::shared_ptr<Connection>;

  // --- connections.cpp ---
  Channel& channel(int32_t index);
  void wake_receivers();
  void attach(Group& group);
  void connection_lost(const ConnectionPtr& connection, std::string detail, int sys_errno, Code code = Code::kPeerLost);
  void half_close_idle();

  // --- submit.cpp ---
  void build_streams(Operation& op, const StreamKey& key);
  // Gives the op its streams and starts it. Returns a rank that has left though the op needs it; -1 where there is
  // none.
  int32_t place(const std::shared_ptr<Operation>& op, const PointToPoint* point_to_point, Lock& lock);
  void watch_from(const Operation& op);
  void start(const std::shared_ptr<Operation>& op, TimePoint now, Lock& lock);
  InStream& in_stream(Connection& connection, const StreamKey& key);

  // --- completion.cpp ---
  void completion_loop();
  // What is left to do for an op: its finalizer, and then it settles, or only the callbacks of one that has settled.
  struct Completion {
    std::shared_ptr<Operation> op;
    std::vector<std::function<void()>> callbacks;  // which may refer to the op
    bool settles = false;
  };
  // Completions run one after another. One that has not ended for a while may be waiting for the callback of another
  // op, which only a second thread can run: the next one starts beside it.
  void enqueue_completion(Completion completion);
  static void complete(Completion& completion);
  // Where this thread runs a callback: it starts an op, which it will probably wait for, so the next one may start.
  void yield_completion();

  // --- any_source.cpp ---
  static StreamKey next_message(const Group& group, int32_t from, uint32_t tag);
  // Gives messages that have been announced to receives that wait for them.
  void match_waiting(Group& group, uint32_t tag, Lock& lock);
  bool match_next(Group& group, uint32_t tag, Lock& lock);
  void bind(Group& group, size_t index, int32_t from, Lock& lock);
  static int32_t announced_source(const Group& group, uint32_t tag, const std::vector<bool>& taken);
  void offer(const StreamKey& key, Lock& lock);

  // --- progress.cpp ---
  static uint64_t open_nbytes(const OutStream& stream);
  static bool gate_open(const Operation& op, const Gate& gate);
  static bool receive_open(const Operation& op, const Step& step);
  static bool must_queue(const Operation& op);
  static bool can_consume(const InStream& stream);
  void update_grant(InStream& stream);
  void drain(InStream& stream, Lock& lock);
  void consume(InStream& stream, const std::byte* data, uint64_t nbytes, Lock& lock);
  void received(InStream& stream, uint64_t nbytes, Lock& lock);
  void sent(OutStream& stream, uint64_t nbytes, Lock& lock);
  void step_done(const std::shared_ptr<Operation>& op, Lock& lock);
  void settle_if_complete(const std::shared_ptr<Operation>& op);
  void leave_tables(Operation& op);
  void settle(const std::shared_ptr<Operation>& op);
  void unpin(const std::shared_ptr<Operation>& op);
  void return_credit(Connection& connection, uint64_t nbytes);
  uint32_t take_owed(Connection& connection);
  void release(Connection& connection, const Parked& block);

  // --- transmit.cpp ---
  void mark_ready(OutStream& stream);
  void queue_control(Connection& connection, ControlFrame frame);
  void kick(Connection& connection, bool inline_allowed, Lock& lock);
  bool inline_allowed(const Operation& op) const { return op.nbytes <= options_.inline_nbytes; }
  bool transmit(Connection& connection, uint64_t budget_nbytes, Lock& lock);
  bool next_frame(Connection& connection);
  bool pick_payload(Connection& connection);
  uint64_t sendable_nbytes(Connection& connection, OutStream& stream, bool& on_credit);
  void add_checksum(Connection& connection, Lock& lock);
  void frame_sent(Connection& connection, uint64_t nbytes, Lock& lock);
  void hand_to_transmit_thread(Connection& connection);
  void transmit_loop(Channel& channel);

  // --- receive.cpp ---
  struct Target;
  void receive_loop(Channel& channel);
  bool receive(Connection& connection);
  Target choose_target(Connection& connection);
  uint64_t finish_target(Connection& connection, const Target& target, uint64_t nbytes, Lock& lock);
  void took(Connection& connection, uint64_t nbytes);
  uint64_t deliver(Connection& connection, const std::byte* data, uint64_t nbytes, Lock& lock);
  Parked& parking_block(Connection& connection, InStream& stream);

  // --- frames.cpp ---
  void parse(Connection& connection, Lock& lock);
  void on_header(Connection& connection, Lock& lock);
  void on_data(Connection& connection, Lock& lock);
  void verify(Connection& connection, Lock& lock);
  bool fits(InStream& stream);
  // How many grants and requests of ops that are not posted here one connection may leave behind. Data of such ops
  // uses credit, of which each frame costs some: that bounds it alike.
  size_t most_waiting() const { return static_cast<size_t>(options_.credit_nbytes / kFrameCost_nbytes); }
  void refuse_if_swamped(const Connection& connection) const;
  bool discarded(uint64_t group) const;

  // --- faults.cpp ---
  void fail_group(Group& group, std::shared_ptr<const Error> error);
  void fail_group(Group& group, ErrorInfo info);
  void end_group(Group& group, std::shared_ptr<const Error> error);
  void fail_operation(const std::shared_ptr<Operation>& op, std::shared_ptr<const Error> error);
  void orphan_frame(Connection& connection);
  void purge(uint64_t group);
  static void name_op(const Group& group, ErrorInfo& info);
  void name_call(Group& group, const Operation& op, const PointToPoint* point_to_point);

  // --- notices.cpp ---
  static ControlFrame error_notice(const Group& group, const Error& error);
  void on_error_frame(Connection& connection, const FrameHeader& header, const std::byte* payload);
  void keep_notice(Connection& connection, const FrameHeader& header, const std::byte* payload);
  void replay_notices(uint64_t group);

  // --- departures.cpp ---
  void on_goodbye(Connection& connection, const FrameHeader& header);
  static std::vector<int32_t> departed_peers(const Operation& op);
  int32_t fail_departed(Group& group, const Operation& op);
  static Error peer_left(const Group& group, const Operation& op, int32_t peer);

  // --- mismatch.cpp ---
  bool matches(InStream& stream);
  void fail_mismatch(Group& group, const Operation& op, int32_t peer, const Fingerprint& theirs);
  void fail_unexpected(Group& group, const Connection& connection, const StreamKey& key,
                       const Fingerprint& fingerprint);
  bool claims_all(Group& group, const StreamKey& key, const PointToPoint* point_to_point);
  bool was_posted(const StreamKey& key, const ProcessId& process, bool sending) const;
  bool unexpected(Connection& connection);

  // --- deadlines.cpp ---
  ErrorInfo describe_wait(const Operation& op) const;
  TimePoint expire(TimePoint now);

  // --- heartbeat.cpp ---
  void queue_heartbeat(Connection& connection);
  TimePoint beat(TimePoint now);
  void excuse(TimePoint late);
  TimePoint check_silence(TimePoint now);
  void blame_own_network(int64_t silence_ms);
  static void on_heartbeat(Connection& connection, const FrameHeader& header);

  // --- waits.cpp ---
  static std::vector<Wait> direct_waits(const Operation& op);
  static Wait follow(const Group& group, Wait wait);
  static Wait culprit(const Operation& op);
  static const Operation* waiting_op(const Group& group);
  void tell(Group& group, int32_t to, const Operation* op, bool question);
  void ask(Group& group, const Operation& op);
  bool asked_lately(const Group& group) const;
  void on_wait(Connection& connection, const FrameHeader& header);
  bool compare_calls(Group& group, int32_t from, const FrameHeader& header);
  bool matches_announced(Operation& op);
  void on_over(Connection& connection, const FrameHeader& header);
  bool fail_if_over(Operation& op);
  void begin_watch(Operation& op) const;
  TimePoint watch(TimePoint now);

  // --- agreement.cpp ---
  static void begin_round(Group& group, uint32_t round);
  void say(Group& group, int32_t to, const std::string& payload);
  void send_to_members(Group& group, const std::string& payload);
  void cast_vote(Group& group);
  void advance_agreement(Group& group, bool changed);
  void decide(Group& group, Verdict verdict);
  static Error excluded_error(const Group& group, const Verdict& verdict);
  void on_agree(Connection& connection, const FrameHeader& header, const std::byte* payload);
  void keep_verdict(const Group& group);

  const Options options_;
  const PoolPtr pool_ = make_pool();
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Channel>> channels_;  // never shrinks; the first one's receive thread sees to deadlines

  std::unordered_map<uint64_t, ConnectionPtr> connections_;            // by id
  std::map<std::pair<ProcessId, int32_t>, ConnectionPtr> by_process_;  // and lane
  std::unordered_map<uint64_t, std::shared_ptr<Group>> groups_;
  std::unordered_set<uint64_t> closed_groups_;  // late frames of these are dropped
  uint64_t next_connection_ = 1;
  uint64_t next_order_ = 1;
  TimePoint next_deadline_ = kNever;
  Metrics metrics_;
  FlightRecord flight_;
  std::pmr::vector<std::shared_ptr<void>> trash_{pool_.get()};  // see Lock
  // Goodbyes and errors of groups that peers have made already and this process has not.
  struct Notice {
    ConnectionPtr connection;
    FrameHeader header;
    std::vector<std::byte> payload;
  };
  std::unordered_map<uint64_t, std::vector<Notice>> notices_;
  std::shared_ptr<const Error> last_failure_;
  std::condition_variable_any agreement_changed_;
  std::unordered_map<uint64_t, std::string> verdicts_;  // of closed groups, as they are sent
  std::atomic<bool> abandoned_{false};                  // a forked child: the threads do not exist here
  bool stopping_ = false;

  std::mutex completion_mutex_;
  std::condition_variable completion_wake_;
  std::pmr::deque<Completion> completion_queue_{pool_.get()};
  std::vector<std::thread> completion_threads_;
  size_t idle_completion_threads_ = 0;
  size_t running_completions_ = 0;  // without those that have yielded
  size_t yielded_completions_ = 0;
  TimePoint completion_stuck_at_ = 0;
  bool completion_stopping_ = false;
};

}  // namespace mccl
