#include "engine/metrics.hpp"

#include "engine/group.hpp"
#include "engine/operation.hpp"

namespace mccl {

namespace {

size_t index_of(const Fingerprint& op) { return op_index(op.kind, op.algorithm); }

// As nccl-tests have it: bus bandwidth is this over the time. `nbytes` as for OpCounters, which for gathers and
// scatters are those of one rank's block.
uint64_t bus_nbytes(OpKind kind, uint64_t nbytes, uint64_t world) {
  if (world < 2) return 0;
  switch (kind) {
    case OpKind::kAllReduce: return 2 * nbytes * (world - 1) / world;
    case OpKind::kAllToAll: return nbytes * (world - 1) / world;
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
    case OpKind::kGather:
    case OpKind::kScatter: return nbytes * (world - 1);
    case OpKind::kBroadcast:
    case OpKind::kReduce:
    case OpKind::kPointToPoint: return nbytes;
    case OpKind::kBarrier:
    case OpKind::kCount: break;
  }
  return 0;
}

}  // namespace

void Metrics::started(Operation& op, TimePoint now) {
  op.started_at = op.waited_until = now;
  UnderWay& under_way = under_way_[index_of(op.fingerprint)];
  if (under_way.count++ == 0) under_way.since = now;
}

void Metrics::heard(Operation& op, PeerWaits& peer, TimePoint now) {
  peer[index_of(op.fingerprint)] += now - op.waited_until;
  op.waited_until = now;
}

void Metrics::left_queue(Operation& op, TimePoint now) {
  op.queued = false;
  ops_[index_of(op.fingerprint)].queued_ns += now - op.started_at;
}

void Metrics::parked(const Fingerprint& op, uint64_t nbytes) { ops_[index_of(op)].parked_nbytes += nbytes; }

void Metrics::ended(const Operation& op, TimePoint now) {
  const size_t index = index_of(op.fingerprint);
  OpCounters& counters = ops_[index];
  if (op.started_at != 0) {
    UnderWay& under_way = under_way_[index];
    if (--under_way.count == 0) counters.busy_ns += now - under_way.since;
  }
  if (op.failure) {
    ++counters.failed;
    return;
  }
  ++counters.count;
  counters.nbytes += op.nbytes;
  for (const auto& stream : op.out) counters.sent_nbytes += stream->nbytes;
  counters.bus_nbytes += bus_nbytes(op.fingerprint.kind, op.nbytes, static_cast<uint64_t>(op.group->world()));
}

Metrics::Snapshot Metrics::snapshot(TimePoint now) const {
  Snapshot snapshot{ops_, waits_};
  for (size_t i = 0; i < under_way_.size(); ++i) {
    if (under_way_[i].count > 0) snapshot.ops[i].busy_ns += now - under_way_[i].since;
  }
  return snapshot;
}

void Metrics::reset(TimePoint now) {
  ops_ = {};
  for (UnderWay& under_way : under_way_) under_way.since = now;
  for (auto& [process, waits] : waits_) waits = {};
}

}  // namespace mccl
