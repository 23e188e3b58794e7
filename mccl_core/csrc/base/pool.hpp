// Memory for what the engine's threads make and drop for every op: it is taken from the heap once and then reused, so
// that steady work allocates nothing there. Any thread may use it.
#pragma once

#include <cstddef>
#include <memory>
#include <memory_resource>

namespace mccl {

using Pool = std::pmr::synchronized_pool_resource;
using PoolPtr = std::shared_ptr<Pool>;

inline PoolPtr make_pool() {
  // Parking blocks are the largest; few at a time, so that a burst of them does not double what is kept.
  return std::make_shared<Pool>(
      std::pmr::pool_options{.max_blocks_per_chunk = 16, .largest_required_pool_block = 1u << 20});
}

// `nbytes` uninitialised bytes of the pool, which lives at least as long as they do.
inline std::shared_ptr<std::byte[]> allocate(const PoolPtr& pool, size_t nbytes) {
  auto* data = static_cast<std::byte*>(pool->allocate(nbytes));
  return std::shared_ptr<std::byte[]>(
      data, [pool, nbytes](std::byte* block) { pool->deallocate(block, nbytes); },
      std::pmr::polymorphic_allocator<std::byte>(pool.get()));
}

}  // namespace mccl
