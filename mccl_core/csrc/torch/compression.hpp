// Which reductions of a group travel compressed (docs/compression.md), and what topk has not sent yet of each tensor.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "op/sparse.hpp"

namespace mccl {

struct CompressionOptions {
  Compression compression;
  bool required;         // asked for by the group's own options: what cannot be compressed is refused
  uint64_t min_nbytes;   // where it is not required, smaller reductions go as they are
  double topk_ratio;     // share of the elements that topk sends
  uint64_t topk_warmup;  // all-reduces of one size that go whole before topk begins
};

// By the name that to_string() gives; throws Error (kUsage) for any other.
Compression compression_of(const std::string& name);

// One a group. Its calls are made in the same order on all ranks.
class Compressor {
 public:
  explicit Compressor(const CompressionOptions& options) : options_(options) {}

  // As the functions of op/collective.hpp. `tensors`: the caller's own, by whose storage topk knows them again.
  // Throw c10's TypeError for what the group refuses.
  OperationPtr all_reduce(const Planner& planner, Member me, const std::vector<at::Tensor>& tensors,
                          std::vector<Buffer> data, Elements elements);
  OperationPtr reduce_scatter(const Planner& planner, Member me, std::vector<Buffer> inputs,
                              const std::vector<Buffer>& output, Elements elements);
  // Whether any reduction may travel compressed: then one op has one output.
  bool is_on() const { return options_.compression != Compression::kNone; }

 private:
  // A part of a storage. While this exists no other storage gets its address.
  struct Slice {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t offset;
    int64_t count;
  };
  struct Known {
    std::vector<Slice> slices;
    DType dtype;
    ResidualPtr residual;
  };
  bool applies(Elements elements, uint64_t nbytes, const char* name) const;
  bool warmed_up(uint64_t count, DType dtype);
  ResidualPtr residual_of(const std::vector<at::Tensor>& tensors, uint64_t count, DType dtype);

  const CompressionOptions options_;
  const WireStatePtr state_ = std::make_shared<WireState>();
  std::mutex mutex_;  // over what follows
  std::map<std::pair<uint64_t, DType>, uint64_t> calls_;
  std::vector<Known> known_;
};

}  // namespace mccl
