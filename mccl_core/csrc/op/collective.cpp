#include "op/collective.hpp"

#include <algorithm>
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

// The part of each block; a block is so many buffers.
void append_parts(std::vector<Buffer>& to, const std::vector<Buffer>& buffers, size_t block_size, Range part) {
  uint64_t at = 0;  // in the block
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (i % block_size == 0) at = 0;
    const uint64_t begin = std::clamp(part.offset, at, at + buffers[i].nbytes);
    const uint64_t end = std::clamp(part.end(), at, at + buffers[i].nbytes);
    if (begin < end) to.push_back({buffers[i].data + (begin - at), end - begin});
    at += buffers[i].nbytes;
  }
}

// An empty message is one element on the wire: whoever receives from any source has to see it.
Schedule message(uint64_t nbytes, DType dtype, Range& range) {
  Schedule schedule;
  schedule.scratch_nbytes = nbytes == 0 ? element_nbytes(dtype) : 0;
  range = {0, nbytes + schedule.scratch_nbytes};
  return schedule;
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

uint64_t total_nbytes(const std::vector<Buffer>& buffers) {
  uint64_t total = 0;
  for (const Buffer& buffer : buffers) total += buffer.nbytes;
  return total;
}

Fingerprint fingerprint_of(OpKind kind, Elements elements, uint64_t nbytes, const Plan& plan, Compression compression) {
  return {kind,
          elements.op,
          elements.dtype,
          -1,
          nbytes,
          plan.algorithm,
          static_cast<uint8_t>(plan.chunk_count),
          static_cast<uint8_t>(plan.channel_count),
          compression};
}

void check_blocks(Member me, const std::vector<Buffer>& blocks, const std::vector<Buffer>& block, const char* what) {
  if (blocks.size() != static_cast<size_t>(me.world) * block.size()) {
    throw_usage(std::string(what) + ": got " + std::to_string(blocks.size()) + " tensors in a group of " +
                    std::to_string(me.world),
                "Give one tensor for each rank");
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    const uint64_t nbytes = block[i % block.size()].nbytes;
    if (blocks[i].nbytes == nbytes) continue;
    throw_usage(std::string(what) + ": the tensor for rank " + std::to_string(i / block.size()) + " has " +
                    std::to_string(blocks[i].nbytes) + " bytes, expected " + std::to_string(nbytes),
                "All tensors must have the same size and dtype");
  }
}

OperationPtr all_reduce(const Planner& planner, Member me, std::vector<Buffer> data, Elements elements) {
  const uint64_t n = total_nbytes(data);
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

OperationPtr all_gather(const Planner& planner, Member me, const std::vector<Buffer>& input,
                        std::vector<Buffer> outputs, DType dtype) {
  check_blocks(me, outputs, input, "all_gather");
  const uint64_t n = total_nbytes(input);
  std::vector<std::pair<Buffer, Buffer>> own_blocks;
  for (size_t j = 0; j < input.size(); ++j) {
    own_blocks.emplace_back(input[j], outputs[static_cast<size_t>(me.rank) * input.size() + j]);
  }
  const Plan plan = planner.plan(OpKind::kAllGather, me.world, n);
  const auto generate = plan.algorithm == Algorithm::kRing ? ring_all_gather : circulant_all_gather;
  const auto world = static_cast<uint64_t>(me.world);
  std::vector<ChannelPart> parts;
  std::vector<Buffer> buffers;
  for (const Range part : blocks_of({0, n}, element_nbytes(dtype), plan.channel_count)) {
    Schedule schedule = plan.algorithm == Algorithm::kOnlyOne ? Schedule{} : generate(me, part.nbytes);
    parts.push_back({std::move(schedule), {part.offset * world, part.nbytes * world}});
    append_parts(buffers, outputs, input.size(), part);
  }
  auto op = make(fingerprint_of(OpKind::kAllGather, {dtype}, n, plan), n, merge_channels(std::move(parts)),
                 std::move(buffers));
  op->own_blocks = std::move(own_blocks);
  op->results = std::move(outputs);
  return op;
}

namespace {
// The sums grow in the output and in a copy of the other blocks.
OperationPtr circulant(Member me, Fingerprint fingerprint, const std::vector<Buffer>& inputs,
                       const std::vector<Buffer>& output, std::vector<std::pair<Buffer, Buffer>> own_copies) {
  const uint64_t n = total_nbytes(output);
  const size_t own = static_cast<size_t>(me.rank) * output.size();
  auto workspace = std::make_shared_for_overwrite<std::byte[]>((static_cast<size_t>(me.world) - 1) * n);
  std::byte* at = workspace.get();
  std::vector<Buffer> blocks;
  std::vector<std::pair<Buffer, Buffer>> copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool mine = i >= own && i < own + output.size();
    blocks.push_back(mine ? output[i - own] : Buffer{at, inputs[i].nbytes});
    if (mine) continue;
    at += inputs[i].nbytes;
    copies.emplace_back(inputs[i], blocks.back());
  }
  // Last, since an output may be one of the inputs.
  copies.insert(copies.end(), own_copies.begin(), own_copies.end());
  auto op = make_reduction(me, fingerprint, n, circulant_reduce_scatter(me, n), std::move(blocks));
  op->own_blocks = std::move(copies);
  op->workspace = std::move(workspace);
  return op;
}
}  // namespace

OperationPtr reduce_scatter(const Planner& planner, Member me, std::vector<Buffer> inputs,
                            const std::vector<Buffer>& output, Elements elements) {
  check_blocks(me, inputs, output, "reduce_scatter");
  const uint64_t n = total_nbytes(output);
  const Plan plan = planner.plan(OpKind::kReduceScatter, me.world, n);
  const Fingerprint fingerprint = fingerprint_of(OpKind::kReduceScatter, elements, n, plan);
  if (plan.algorithm == Algorithm::kRing) {
    std::vector<ChannelPart> parts;
    std::vector<Buffer> buffers;
    const auto blocks = static_cast<uint64_t>(me.world) + 1;  // and the output
    for (const Range part : blocks_of({0, n}, element_nbytes(elements.dtype), plan.channel_count)) {
      parts.push_back({ring_reduce_scatter(me, part.nbytes), {part.offset * blocks, part.nbytes * blocks}});
      append_parts(buffers, inputs, output.size(), part);
      append_parts(buffers, output, output.size(), part);
    }
    return with_results(make_reduction(me, fingerprint, n, merge_channels(std::move(parts)), std::move(buffers)),
                        output);
  }
  std::vector<std::pair<Buffer, Buffer>> own_copies;
  for (size_t j = 0; j < output.size(); ++j) {
    own_copies.emplace_back(inputs[static_cast<size_t>(me.rank) * output.size() + j], output[j]);
  }
  if (plan.algorithm != Algorithm::kOnlyOne) {
    return with_results(circulant(me, fingerprint, inputs, output, std::move(own_copies)), output);
  }
  auto op = with_results(make_reduction(me, fingerprint, n, {}, output), output);
  op->own_blocks = std::move(own_copies);
  return op;
}

OperationPtr gather(Member me, int32_t root, Buffer input, std::vector<Buffer> outputs, DType dtype) {
  check_root(me, root, "gather");
  std::vector<std::pair<Buffer, Buffer>> own_blocks;
  if (me.rank == root) {
    check_blocks(me, outputs, {input}, "gather");
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
    check_blocks(me, inputs, {output}, "scatter");
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
  Range range;
  Schedule schedule = message(data.nbytes, dtype, range);
  schedule.steps.push_back(send_step(to, range));
  return make({OpKind::kPointToPoint, ReduceOp::kSum, dtype, -1, data.nbytes}, data.nbytes, std::move(schedule),
              {data});
}

OperationPtr receive(Member me, int32_t from, Buffer data, DType dtype) {
  check_peer(me, from, "recv");
  Range range;
  Schedule schedule = message(data.nbytes, dtype, range);
  Step step;
  set_copy(step, from, range);
  schedule.steps.push_back(step);
  return with_results(
      make({OpKind::kPointToPoint, ReduceOp::kSum, dtype, -1, data.nbytes}, data.nbytes, std::move(schedule), {data}),
      {data});
}

OperationPtr receive_any(Buffer data, DType dtype) {
  Range range;
  return with_results(make({OpKind::kPointToPoint, ReduceOp::kSum, dtype, -1, data.nbytes}, data.nbytes,
                           message(data.nbytes, dtype, range), {data}),
                      {data});
}

}  // namespace mccl
