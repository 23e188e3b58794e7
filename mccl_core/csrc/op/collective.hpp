// From a collective call to an op that the engine can run: checks the sizes, chooses the algorithm, lays out the
// address space. Knows no torch and no sockets.
//
// All functions return an op that is complete for Engine::submit; they touch no buffer, since a device may still be
// writing it (Operation::ready). Buffers must stay valid until the op has settled (Operation::keep_alive). They throw
// Error (kUsage) for sizes that do not fit together.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/operation.hpp"
#include "op/plan.hpp"
#include "schedule/schedule.hpp"

namespace mccl {

using OperationPtr = std::shared_ptr<Operation>;

struct Elements {
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
};

uint64_t total_nbytes(const std::vector<Buffer>& buffers);
// As the plan runs it. `nbytes`: of the tensor, or of one rank's block, before compression.
Fingerprint fingerprint_of(OpKind kind, Elements elements, uint64_t nbytes, const Plan& plan,
                           Compression compression = Compression::kNone);

// Throws Error (kUsage) unless `blocks` has for each rank the buffers of one block, of the sizes of `block`'s.
void check_blocks(Member me, const std::vector<Buffer>& blocks, const std::vector<Buffer>& block, const char* what);

// In place on `data`, one or more buffers taken as their concatenation.
OperationPtr all_reduce(const Planner& planner, Member me, std::vector<Buffer> data, Elements elements);
OperationPtr broadcast(Member me, int32_t root, Buffer data, DType dtype);
// The result is in `data` at the root; elsewhere `data` is left as it is.
OperationPtr reduce(Member me, int32_t root, Buffer data, Elements elements);
// A block is one or more buffers, taken as their concatenation. `outputs`: for each rank the buffers of a block, of the
// input's sizes.
OperationPtr all_gather(const Planner& planner, Member me, const std::vector<Buffer>& input,
                        std::vector<Buffer> outputs, DType dtype);
// `inputs`: for each rank the buffers of a block, of the output's sizes.
OperationPtr reduce_scatter(const Planner& planner, Member me, std::vector<Buffer> inputs,
                            const std::vector<Buffer>& output, Elements elements);
// `outputs`: world buffers of the input's size at the root, none elsewhere.
OperationPtr gather(Member me, int32_t root, Buffer input, std::vector<Buffer> outputs, DType dtype);
// `inputs`: world buffers of the output's size at the root, none elsewhere.
OperationPtr scatter(Member me, int32_t root, std::vector<Buffer> inputs, Buffer output, DType dtype);
// One buffer a rank on both sides; block i of rank j goes to block j of rank i and must have its size.
OperationPtr all_to_all(Member me, std::vector<Buffer> inputs, std::vector<Buffer> outputs, DType dtype);
OperationPtr barrier(Member me);
OperationPtr send(Member me, int32_t to, Buffer data, DType dtype);
OperationPtr receive(Member me, int32_t from, Buffer data, DType dtype);
// Complete once the engine has found a message for it.
OperationPtr receive_any(Buffer data, DType dtype);

}  // namespace mccl
