// An op's address space: the caller's buffers one after the other, then the schedule's scratch. List collectives need
// no flattening copy: a range that crosses buffers becomes several iovecs.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "schedule/step.hpp"

namespace mccl {

struct Buffer {
  std::byte* data = nullptr;
  uint64_t nbytes = 0;
};

class Buffers {
 public:
  Buffers() = default;
  Buffers(std::vector<Buffer> buffers, uint64_t scratch_nbytes);

  uint64_t nbytes() const { return total_; }
  // The contiguous part of `range` that starts at its first byte. Throws nothing; the range must lie inside.
  Buffer front(Range range) const;
  // Fills at most out.size() iovecs; returns how many.
  size_t fill(Range range, std::span<iovec> out) const;

 private:
  size_t find(uint64_t offset) const;

  std::vector<Buffer> buffers_;
  std::vector<uint64_t> begins_;
  std::unique_ptr<std::byte[]> scratch_;
  uint64_t total_ = 0;
};

}  // namespace mccl
