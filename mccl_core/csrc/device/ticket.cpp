#include "device/ticket.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace mccl {

Ticket::Ticket(std::shared_ptr<SlotPool> slots, std::vector<HostView> views, std::shared_ptr<void> owner)
    : slots_(std::move(slots)), slot_(&slots_->acquire()), views_(std::move(views)), owner_(std::move(owner)) {
  ready_value_ = ++slot_->device_value;
  done_value_ = ++slot_->device_value;
  release_word_ = slot_->host.get();
  release_value_ = ++slot_->host_value;
}

Ticket::~Ticket() { retire(); }

void Ticket::on_ready(std::function<void()> callback) {
  {
    const std::lock_guard guard(mutex_);
    if (!ready_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Ticket::reached() {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard guard(mutex_);
    ready_ = true;
    callbacks.swap(callbacks_);
  }
  for (const auto& callback : callbacks) callback();
}

void Ticket::release() {
  const std::lock_guard guard(mutex_);  // held while the word is raised: the slot stays ours until it has been
  MCCL_ASSERT(ready_);
  if (!std::exchange(released_, true)) release_word_->raise(release_value_);
}

void Ticket::retire() {
  std::vector<HostView> views;
  std::shared_ptr<void> owner;  // both end outside the lock: a tensor's end may call the framework
  const std::lock_guard guard(mutex_);
  views.swap(views_);
  owner.swap(owner_);
  if (slot_ != nullptr) slots_->give_back(*std::exchange(slot_, nullptr));
}

bool Ticket::copies_back() const {
  return std::ranges::any_of(views_, [](const HostView& view) { return view.staging && view.tensor.written; });
}

}  // namespace mccl
