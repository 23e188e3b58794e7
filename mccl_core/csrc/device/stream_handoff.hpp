// The hand-off over any stream that a shim can reach. Rules that are tested by breaking them are named in `Rules`;
// outside the tests all of them hold.
#pragma once

#include <algorithm>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "device/ticket.hpp"

namespace mccl {

struct AllRules {
  static constexpr bool kReadAfterKernels = true;  // O1
  static constexpr bool kWaitForRelease = true;    // O2
  static constexpr bool kOneThread = true;         // O3
  static constexpr bool kWordPerOp = true;         // else one counter releases all ops
  static constexpr bool kReuseAfterWait = true;    // else a slot is free while its op is in flight
  static constexpr bool kHoldBuffers = true;       // else the framework alone keeps them
};

template <class Rules>
class BasicStreamHandOff final : public HandOff {
 public:
  // Words begin at `first_value`.
  explicit BasicStreamHandOff(Shim& shim, uint64_t first_value = 0)
      : shim_(shim), slots_(std::make_shared<SlotPool>(shim, first_value)) {
    if constexpr (!Rules::kWordPerOp) {
      counter_.word = shim.make_word(first_value);
      counter_.value = first_value;
    }
  }

  HostView host_view(const DeviceTensor& tensor) override { return shim_.host_view(tensor); }

  TicketPtr begin(std::vector<HostView> views, std::shared_ptr<void> owner) override {
    check_thread();
    if constexpr (!Rules::kHoldBuffers) owner.reset();
    auto ticket = std::make_shared<Ticket>(slots_, std::move(views), std::move(owner));
    if constexpr (!Rules::kWordPerOp) {
      ticket->release_word_ = counter_.word.get();
      ticket->release_value_ = ++counter_.value;
    }
    return ticket;
  }

  void signal_ready(const TicketPtr& ticket) override {
    check_thread();
    MCCL_ASSERT(!std::exchange(ticket->signalled_, true));
    for (const HostView& view : ticket->views_) shim_.encode_copy_to_host(view);
    Word& word = *ticket->slot_->device;
    shim_.encode_signal(word, ticket->ready_value_);
    shim_.commit();  // else the engine would wait for what the framework commits at its leisure
    if constexpr (Rules::kReadAfterKernels) {
      shim_.notify(word, ticket->ready_value_, [ticket] { ticket->reached(); });
    } else {
      ticket->reached();
    }
    if constexpr (!Rules::kReuseAfterWait) slots_->give_back(*ticket->slot_);
  }

  void wait_released(const TicketPtr& ticket) override {
    check_thread();
    if (!ticket->signalled_) throw_usage("wait_released() before signal_ready(): the stream would wait for ever");
    if (std::exchange(ticket->waited_, true)) return;
    if (finished(*ticket)) {
      ticket->retire();
      return;
    }
    Word& word = *ticket->slot_->device;
    if constexpr (Rules::kWaitForRelease) shim_.encode_wait(*ticket->release_word_, ticket->release_value_);
    for (const HostView& view : ticket->views_) {
      if (view.tensor.written) shim_.encode_copy_to_device(view);
    }
    shim_.encode_signal(word, ticket->done_value_);
    shim_.notify(word, ticket->done_value_, [ticket] { ticket->retire(); });
  }

  void adopt_this_thread() override {
    const std::lock_guard guard(mutex_);
    const auto self = std::this_thread::get_id();
    if (std::ranges::find(adopted_, self) == adopted_.end()) adopted_.push_back(self);
  }

  size_t slot_count() const { return slots_->count(); }
  size_t free_slot_count() const { return slots_->free_count(); }

 private:
  struct OneCounter {
    std::unique_ptr<Word> word;
    uint64_t value;
  };
  struct Nothing {};

  // Not at construction: groups may be made on another thread than the one that trains.
  void check_thread() {
    if constexpr (!Rules::kOneThread) return;
    const std::lock_guard guard(mutex_);
    const auto self = std::this_thread::get_id();
    if (std::ranges::find(adopted_, self) != adopted_.end()) return;  // which binds nobody
    if (bound_ == std::thread::id()) bound_ = self;
    if (bound_ != self) {
      throw_usage("a collective on a device was called on another thread than the first one was",
                  "Call all collectives of a device's tensors on one thread: only their order on the device's stream "
                  "tells which kernels a collective follows");
    }
  }

  // Nothing is left to wait for or to copy back: the stream need not hear of it.
  static bool finished(Ticket& ticket) {
    const std::lock_guard guard(ticket.mutex_);
    return ticket.released_ && !ticket.copies_back();
  }

  Shim& shim_;
  const std::shared_ptr<SlotPool> slots_;
  std::mutex mutex_;
  std::thread::id bound_;                 // that of the first collective
  std::vector<std::thread::id> adopted_;  // that may encode, too
  [[no_unique_address]] std::conditional_t<Rules::kWordPerOp, Nothing, OneCounter> counter_;
};

using StreamHandOff = BasicStreamHandOff<AllRules>;

}  // namespace mccl
