#include "op/wire_pool.hpp"

#include <algorithm>
#include <utility>

namespace mccl {

std::shared_ptr<std::byte[]> WirePool::take(size_t nbytes) {
  Block block{nullptr, nbytes};
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [&](const Block& b) { return b.nbytes >= nbytes; };
    const auto smaller = [](const Block& a, const Block& b) { return a.nbytes < b.nbytes; };
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (fits(*it) && (best == free_.end() || smaller(*it, *best))) best = it;
    }
    // One that does not fit makes way for one that does.
    if (best == free_.end() && !free_.empty()) best = std::max_element(free_.begin(), free_.end(), smaller);
    if (best != free_.end()) {
      if (fits(*best)) block = std::move(*best);
      free_.erase(best);
    }
    free_.reserve(++in_use_ + free_.size());  // so that giving back allocates nothing
  }
  try {
    if (!block.data) block.data = std::make_unique_for_overwrite<std::byte[]>(nbytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    --in_use_;
    throw;
  }
  std::byte* data = block.data.release();
  const auto back = [pool = shared_from_this(), capacity = block.nbytes](std::byte* bytes) {
    pool->give_back({std::unique_ptr<std::byte[]>(bytes), capacity});
  };
  return std::shared_ptr<std::byte[]>(data, back);
}

void WirePool::give_back(Block block) noexcept {
  const std::lock_guard lock(mutex_);
  --in_use_;
  free_.push_back(std::move(block));
}

size_t WirePool::kept_nbytes() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (const Block& block : free_) total += block.nbytes;
  return total;
}

}  // namespace mccl
