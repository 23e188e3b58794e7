#include "engine/buffers.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace mccl {

Buffers::Buffers(std::vector<Buffer> buffers, uint64_t scratch_nbytes) : buffers_(std::move(buffers)) {
  if (scratch_nbytes > 0) {
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(scratch_nbytes);
    buffers_.push_back({scratch_.get(), scratch_nbytes});
  }
  std::erase_if(buffers_, [](const Buffer& b) { return b.nbytes == 0; });
  begins_.reserve(buffers_.size());
  for (const Buffer& buffer : buffers_) {
    begins_.push_back(total_);
    total_ += buffer.nbytes;
  }
}

size_t Buffers::find(uint64_t offset) const {
  if (buffers_.size() == 1) return 0;
  return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin()) - 1;
}

Buffer Buffers::front(Range range) const {
  MCCL_ASSERT(range.nbytes > 0 && range.end() <= total_);
  const size_t i = find(range.offset);
  const uint64_t inside = range.offset - begins_[i];
  return {buffers_[i].data + inside, std::min(range.nbytes, buffers_[i].nbytes - inside)};
}

size_t Buffers::fill(Range range, std::span<iovec> out) const {
  MCCL_ASSERT(range.end() <= total_);
  size_t count = 0;
  if (range.nbytes == 0) return 0;
  for (size_t i = find(range.offset); range.nbytes > 0 && count < out.size(); ++i) {
    const uint64_t inside = range.offset - begins_[i];
    const uint64_t n = std::min(range.nbytes, buffers_[i].nbytes - inside);
    out[count++] = {buffers_[i].data + inside, n};
    range.offset += n;
    range.nbytes -= n;
  }
  return count;
}

}  // namespace mccl
