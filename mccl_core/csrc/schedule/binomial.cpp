// Binomial trees (Thakur, Rabenseifner, Gropp, 2005). Broadcast and reduce: ceil(log2 N) rounds; the root sends (or
// receives) up to ceil(log2 N) times all bytes, other ranks fewer. Forwarding is cut-through.
#include "schedule/schedule.hpp"

namespace mccl {

namespace {
// Ranks relative to the root: the parent of v is v without its lowest set bit, its children are v + d for every power
// of two d below that bit.
struct Tree {
  int32_t rank, world, root;
  int32_t relative() const { return (rank - root + world) % world; }
  int32_t absolute(int32_t v) const { return (v + root) % world; }
  int32_t lowest_bit() const {
    const int32_t v = relative();
    if (v != 0) return v & -v;
    int32_t bit = 1;
    while (bit < world) bit *= 2;
    return bit;
  }
  bool has_child(int32_t distance) const { return relative() + distance < world; }
};
}  // namespace

Schedule binomial_broadcast(Member me, int32_t root, uint64_t nbytes) {
  const Tree tree{me.rank, me.world, root};
  const Range all{0, nbytes};
  Schedule schedule;
  if (nbytes == 0) return schedule;
  Gate gate;
  if (tree.relative() != 0) {
    Step from_parent;
    set_copy(from_parent, tree.absolute(tree.relative() - tree.lowest_bit()), all);
    schedule.steps.push_back(from_parent);
    gate = {GateKind::kReceivedBytes, 0};
  }
  for (int32_t distance = tree.lowest_bit() / 2; distance >= 1; distance /= 2) {
    if (tree.has_child(distance)) {
      schedule.steps.push_back(send_step(tree.absolute(tree.relative() + distance), all, gate));
    }
  }
  return schedule;
}

Schedule binomial_reduce(Member me, int32_t root, uint64_t nbytes) {
  const Tree tree{me.rank, me.world, root};
  const bool is_root = tree.relative() == 0;
  Schedule schedule;
  if (nbytes == 0) return schedule;
  // Inner ranks keep their input as it was: the sum grows in scratch.
  const Range sum{is_root ? 0 : nbytes, nbytes};
  uint64_t operand = 0;
  int32_t before = -1;
  for (int32_t distance = 1; distance < tree.lowest_bit() && tree.has_child(distance); distance *= 2) {
    const int32_t child = tree.absolute(tree.relative() + distance);
    Step step;
    // One child after another, so that the order of summation does not depend on arrival.
    const Gate gate = before < 0 ? Gate{} : Gate{GateKind::kReceived, before};
    set_reduce(step, child, sum, operand, child < me.rank, gate);
    step.finish = is_root && !(2 * distance < tree.lowest_bit() && tree.has_child(2 * distance));
    before = static_cast<int32_t>(schedule.steps.size());
    schedule.steps.push_back(step);
    operand = sum.offset;
  }
  if (!is_root) {
    const bool leaf = before < 0;
    schedule.scratch_nbytes = leaf ? 0 : nbytes;
    const Gate gate = leaf ? Gate{} : Gate{GateKind::kReceivedBytes, before};
    const int32_t parent = tree.absolute(tree.relative() - tree.lowest_bit());
    schedule.steps.push_back(send_step(parent, leaf ? Range{0, nbytes} : sum, gate));
  }
  return schedule;
}

}  // namespace mccl
