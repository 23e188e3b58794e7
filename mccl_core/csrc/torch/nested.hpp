// Names for ops that callbacks start. A callback runs on the completion thread, or at once where its future is complete
// already, so that on each rank it falls between other calls of the program: a ticket by the order of calls would
// differ from rank to rank. Such an op is named by its place in the chain of callbacks instead, which is the same
// everywhere.
#pragma once

#include <cstdint>

#include "engine/operation.hpp"

namespace mccl {

// A callback's place: the op whose future it hangs on, and a hash of the path from there.
struct Place {
  uint64_t ticket = 0;
  uint32_t tag = 0;

  // The place of the `index`-th callback, or op, from here.
  Place child(uint64_t index) const;
};

// Of an op of this group: what hangs on its future.
Place place_of(uint64_t group, uint64_t ticket, uint32_t tag);

// While one lives, the ops that this thread starts are named by their place.
class InCallback {
 public:
  explicit InCallback(Place place);
  ~InCallback();
  InCallback(const InCallback&) = delete;
  InCallback& operator=(const InCallback&) = delete;

 private:
  const Place outer_;
  const uint64_t outer_count_;
};

// The name of the next op on this thread; its tag is 0 outside of callbacks.
NestedName next_nested_name();

}  // namespace mccl
