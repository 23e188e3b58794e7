// All-reduce and reduce-scatter whose elements are fp32 or fp64 in memory and fp16 or bf16 on the wire: half or a
// quarter of the bytes, by the same schedules.
//
// A rank adds what arrives to its own contribution in the memory's type, and rounds only what it sends on. The rank
// that has computed a block rounds it as the others get it, so that all hold the same bits. AVG divides each
// contribution before the first addition: no partial sum is larger than the largest contribution.
//
// Memory beside the tensor: all-reduce: a wire form of the whole tensor; reduce-scatter: of up to five blocks, and an
// input is never changed. Finite values beyond the wire format's range are clipped (reduce/wire.hpp) and counted.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "op/collective.hpp"
#include "op/wire_pool.hpp"

namespace mccl {

// What the compressed ops of a group share.
struct WireState {
  std::shared_ptr<WirePool> pool = std::make_shared<WirePool>();
  std::atomic<uint64_t> clipped_count{0};  // elements
};
using WireStatePtr = std::shared_ptr<WireState>;

// Whether these elements can travel otherwise than they are: fp32 and fp64, SUM, AVG and PREMUL_SUM.
bool is_compressible(Elements elements);

// As all_reduce and reduce_scatter (op/collective.hpp), which serve a world of one. `wire`: fp16 or bf16.
OperationPtr compressed_all_reduce(const Planner& planner, Member me, std::vector<Buffer> data, Elements elements,
                                   Compression wire, const WireStatePtr& state);
OperationPtr compressed_reduce_scatter(const Planner& planner, Member me, std::vector<Buffer> inputs, Buffer output,
                                       Elements elements, Compression wire, const WireStatePtr& state);

}  // namespace mccl
