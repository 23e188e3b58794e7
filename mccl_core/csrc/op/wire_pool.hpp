// Memory for wire forms: taken from the heap once and then reused, since a large block that is fresh from the system
// costs a page fault for every 4 KiB.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace mccl {

// One a group. Never holds more blocks than ops were in flight at once. Any thread may use it.
class WirePool : public std::enable_shared_from_this<WirePool> {
 public:
  // `nbytes` uninitialised bytes, which come back to this pool when their last owner lets go of them.
  std::shared_ptr<std::byte[]> take(size_t nbytes);
  size_t kept_nbytes() const;

 private:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t nbytes;
  };
  void give_back(Block block) noexcept;

  mutable std::mutex mutex_;
  std::vector<Block> free_;
  size_t in_use_ = 0;
};

}  // namespace mccl
