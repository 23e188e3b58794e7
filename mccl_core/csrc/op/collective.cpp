#include "op/collective.hpp"

#include <string>
#include <utility>

#include "schedule/channels.hpp"
#include "schedule/parts.hpp"

namespace mccl {

namespace {
OperationPtr make(Fingerprint fingerprint, uint64_t nbytes, Schedule schedule, std::vector<Buffer> buffers) {
  const uint64_t scratch_nbytes = schedule.scratch_nbytes;
  auto op = std::make_shared<Operation>(fingerprint, std::move(schedule), Buffers(std::move(buffers), scratch_nbytes));
  op->element_nbytes = element_nbytes(fingerprint.dtype);
  op->nbytes = nbytes;
  return op;
}

OperationPtr with_results(OperationPtr op, std::vector<Buffer> results) {
  op->results = std::move(results);
  return op;
}

OperationPtr make_reduction(Member me, Fingerprint fingerprint, uint64_t nbytes, Schedule schedule,
                            std::vector<Buffer> buffers) {
  auto op = make(fingerprint, nbytes, std::move(schedule), std::move(buffers));
  op->kernels = reduce_kernels(fingerprint.dtype, fingerprint.reduce_op);
  op->divisor = me.world;
  return op;
}

Fingerprint fingerprint_of(OpKind kind, Elements elements, uint64_t nbytes, const Plan& plan) {
  return {kind,
          elements.op,
          elements.dtype,
          -1,
          nbytes,
          plan.algorithm,
          static_cast<uint8_t>(plan.chunk_count),
          static_cast<uint8_t>(plan.channel_count)};
}

// The part of each block.
void append_parts(std::vector<Buffer>& to, const std::vector<Buffer>& blocks, Range part) {
  for (const Buffer& block : blocks) to.push_back({block.data + part.offset, part.nbytes});
}

void check_root(Member me, int32_t root, const char* name) {
  if (root >= 0 && root < me.world) return;
  throw_usage(
      std::string(name) + ": rank " + std::to_string(root) + " is not in this group of " + std::to_string(me.world),
      "Name a rank from 0 to " + std::to_string(me.world - 1));
}

void check_peer(Member me, int32_t peer, const char* name) {
  check_root(me, peer, name);
  if (peer == me.rank) throw_usage(std::string(name) + ": a rank cannot exchange messages with itself");
}
}  // namespace

void check_blocks(Member me, const std::vector<Buffer>& blocks, uint64_t nbytes, const char* what) {
  if (blocks.size() != static_cast<size_t>(me.world)) {
    throw_usage(std::string(what) + ": got " + std::to_string(blocks.size()) + " tensors in a group of " +
                    std::to_string(me.world),
                "Give one tensor for each rank");
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].nbytes == nbytes) continue;
    throw_usage(std::string(what) + ": the tensor for rank " + std::to_string(i) + " has " +
                    std::to_string(blocks[i].nbytes) + " bytes, expected " + std::to_string(nbytes),
                "All tensors must have the same size and dtype");
  }
}

OperationPtr all_reduce(const Planner& planner, Member me, std::vector<Buffer> data, Elements elements) {
  uint64_t n = 0;
  for (const Buffer& buffer : data) n += buffer.nbytes;
  const Plan plan = planner.plan(OpKind::kAllReduce, me.world, n);
  Schedule schedule = planner.all_reduce(plan, me, n, element_nbytes(elements.dtype));
  std::vector<Buffer> results = data;
  return with_results(make_reduction(me, fingerprint_of(OpKind::kAllReduce, elements, n, plan), n, std::move(schedule),
                                     std::move(data)),
                      std::move(results));
}

OperationPtr broadcast(Member me, int32_t root, Buffer data, DType dtype) {
  check_root(me, root, "broadcast");
  Schedule schedule;
  if (me.world > 1) schedule = binomial_broadcast(me, root, data.nbytes);
  auto op =
      make({OpKind::kBroadcast, ReduceOp::kSum, dtype, root, data.nbytes}, data.nbytes, std::move(schedule), {data});
  if (me.rank != root) op->results = {data};
  return op;
}

OperationPtr reduce(Member me, int32_t root, Buffer data, Elements elements) {
  check_root(me, root, "reduce");
  Schedule schedule;
  if (me.world > 1) schedule = binomial_reduce(me, root, data.nbytes);
  auto op = make_reduction(me, {OpKind::kReduce, elements.op, elements.dtype, root, data.nbytes}, data.nbytes,
                           std::move(schedule), {data});
  if (me.rank == root) op->results = {data};
  return op;
}

OperationPtr all_gather(const Planner& planner, Member me, Buffer input, std::vector<Buffer> outputs, DType dtype) {
  check_blocks(me, outputs, input.nbytes, "all_gather");
  const Buffer own = outputs[static_cast<size_t>(me.rank)];
  const Plan plan = planner.plan(OpKind::kAllGather, me.world, input.nbytes);
  const auto generate = plan.algorithm == Algorithm::kRing ? ring_all_gather : circulant_all_gather;
  const auto world = static_cast<uint64_t>(me.world);
  std::vector<ChannelPart> parts;
  std::vector<Buffer> buffers;
  for (const Range part : blocks_of({0, input.nbytes}, element_nbytes(dtype), plan.channel_count)) {
    Schedule schedule = plan.algorithm == Algorithm::kOnlyOne ? Schedule{} : generate(me, part.nbytes);
    parts.push_back({std::move(schedule), {part.offset * world, part.nbytes * world}});
    append_parts(buffers, outputs, part);
  }
  auto op = make(fingerprint_of(OpKind::kAllGather, {dtype}, input.nbytes, plan), input.nbytes,
                 merge_channels(std::move(parts)), std::move(buffers));
  op->own_blocks = {{input, own}};
  op->results = std::move(outputs);
  return op;
}

OperationPtr reduce_scatter(const Planner& planner, Member me, std::vector<Buffer> inputs, Buffer output,
                            Elements elements) {
  check_blocks(me, inputs, output.nbytes, "reduce_scatter");
  const Plan plan = planner.plan(OpKind::kReduceScatter, me.world, output.nbytes);
  const Fingerprint fingerprint = fingerprint_of(OpKind::kReduceScatter, elements, output.nbytes, plan);
  const auto own = static_cast<size_t>(me.rank);
  if (plan.algorithm == Algorithm::kRing) {
    std::vector<ChannelPart> parts;
    std::vector<Buffer> buffers;
    const auto blocks = static_cast<uint64_t>(me.world) + 1;  // and the output
    for (const Range part : blocks_of({0, output.nbytes}, element_nbytes(elements.dtype), plan.channel_count)) {
      parts.push_back({ring_reduce_scatter(me, part.nbytes), {part.offset * blocks, part.nbytes * blocks}});
      append_parts(buffers, inputs, part);
      append_parts(buffers, {output}, part);
    }
    return with_results(
        make_reduction(me, fingerprint, output.nbytes, merge_channels(std::move(parts)), std::move(buffers)), {output});
  }
  if (plan.algorithm == Algorithm::kOnlyOne) {
    auto op = make_reduction(me, fingerprint, output.nbytes, {}, {output});
    op->own_blocks = {{inputs[own], output}};
    return op;
  }
  // The sums grow in the output and in a copy of the other blocks.
  const uint64_t n = output.nbytes;
  auto workspace = std::make_shared_for_overwrite<std::byte[]>((inputs.size() - 1) * n);
  std::vector<Buffer> blocks;
  std::vector<std::pair<Buffer, Buffer>> copies;
  for (size_t i = 0, at = 0; i < inputs.size(); ++i) {
    blocks.push_back(i == own ? output : Buffer{workspace.get() + n * at++, n});
    if (i != own) copies.emplace_back(inputs[i], blocks.back());
  }
  copies.emplace_back(inputs[own], output);  // last, since the output may be one of the inputs
  auto op = make_reduction(me, fingerprint, n, circulant_reduce_scatter(me, n), std::move(blocks));
  op->results = {output};
  op->own_blocks = std::move(copies);
  op->workspace = std::move(workspace);
  return op;
}

OperationPtr gather(Member me, int32_t root, Buffer input, std::vector<Buffer> outputs, DType dtype) {
  check_root(me, root, "gather");
  std::vector<std::pair<Buffer, Buffer>> own_blocks;
  if (me.rank == root) {
    check_blocks(me, outputs, input.nbytes, "gather");
    own_blocks = {{input, outputs[static_cast<size_t>(root)]}};
  }
  std::vector<Buffer> results = outputs;  // none but at the root
  std::vector<Buffer> buffers = me.rank == root ? std::move(outputs) : std::vector<Buffer>{input};
  auto op = make({OpKind::kGather, ReduceOp::kSum, dtype, root, input.nbytes}, input.nbytes,
                 direct_gather(me, root, input.nbytes), std::move(buffers));
  op->results = std::move(results);
  op->own_blocks = std::move(own_blocks);
  return op;
}

OperationPtr scatter(Member me, int32_t root, std::vector<Buffer> inputs, Buffer output, DType dtype) {
  check_root(me, root, "scatter");
  std::vector<std::pair<Buffer, Buffer>> own_blocks;
  if (me.rank == root) {
    check_blocks(me, inputs, output.nbytes, "scatter");
    own_blocks = {{inputs[static_cast<size_t>(root)], output}};
  }
  std::vector<Buffer> buffers = me.rank == root ? std::move(inputs) : std::vector<Buffer>{output};
  auto op = make({OpKind::kScatter, ReduceOp::kSum, dtype, root, output.nbytes}, output.nbytes,
                 direct_scatter(me, root, output.nbytes), std::move(buffers));
  op->results = {output};
  op->own_blocks = std::move(own_blocks);
  return op;
}

OperationPtr all_to_all(Member me, std::vector<Buffer> inputs, std::vector<Buffer> outputs, DType dtype) {
  const auto world = static_cast<size_t>(me.world);
  const auto own = static_cast<size_t>(me.rank);
  if (inputs.size() != world || outputs.size() != world) {
    throw_usage("all_to_all: got " + std::to_string(inputs.size()) + " inputs and " + std::to_string(outputs.size()) +
                    " outputs in a group of " + std::to_string(world),
                "Give one block for each rank on both sides");
  }
  if (inputs[own].nbytes != outputs[own].nbytes) {
    throw_usage("all_to_all: this rank's own block has " + std::to_string(inputs[own].nbytes) + " bytes to send and " +
                    std::to_string(outputs[own].nbytes) + " to receive",
                "Input and output splits must agree between all pairs of ranks");
  }
  std::vector<std::pair<Buffer, Buffer>> own_blocks{{inputs[own], outputs[own]}};
  std::vector<uint64_t> send_nbytes, recv_nbytes;
  uint64_t total = 0;
  for (const Buffer& buffer : inputs) total += buffer.nbytes, send_nbytes.push_back(buffer.nbytes);
  for (const Buffer& buffer : outputs) recv_nbytes.push_back(buffer.nbytes);
  Schedule schedule = pairwise_all_to_all(me, send_nbytes, recv_nbytes);
  std::vector<Buffer> buffers = std::move(inputs);
  buffers.insert(buffers.end(), outputs.begin(), outputs.end());
  auto op = make({OpKind::kAllToAll, ReduceOp::kSum, dtype, -1, 0}, total, std::move(schedule), std::move(buffers));
  op->own_blocks = std::move(own_blocks);
  op->results = std::move(outputs);
  return op;
}

OperationPtr barrier(Member me) {
  return make({OpKind::kBarrier, ReduceOp::kSum, DType::kUInt8, -1, 0}, 0, dissemination_barrier(me), {});
}

OperationPtr send(Member me, int32_t to, Buffer data, DType dtype) {
  check_peer(me, to, "send");
  Schedule schedule;
  if (data.nbytes > 0) schedule.steps.push_back(send_step(to, {0, data.nbytes}));
  return make({OpKind::kPointToPoint, ReduceOp::kSum, dtype, -1, data.nbytes}, data.nbytes, std::move(schedule),
              {data});
}

OperationPtr receive(Member me, int32_t from, Buffer data, DType dtype) {
  check_peer(me, from, "recv");
  Schedule schedule;
  if (data.nbytes > 0) {
    Step step;
    set_copy(step, from, {0, data.nbytes});
    schedule.steps.push_back(step);
  }
  return with_results(
      make({OpKind::kPointToPoint, ReduceOp::kSum, dtype, -1, data.nbytes}, data.nbytes, std::move(schedule), {data}),
      {data});
}

}  // namespace mccl
