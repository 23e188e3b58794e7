#include "device/submit.hpp"

#include <utility>

#include "device/ticket.hpp"

namespace mccl {

namespace {
// A failed op settles at once, perhaps before its kernels have run. Its NaN must come after what they write, so the
// release waits for them; the stream loses nothing by that, since its own wait stands behind the same kernels.
void release_when_settled(const std::shared_ptr<Operation>& op, const TicketPtr& ticket) {
  op->on_settled([op = op.get(), ticket] {
    if (op->state() == OpState::kDone) {
      ticket->release();
      return;
    }
    ticket->on_ready([op = op->shared_from_this(), ticket] {
      op->invalidate_result();
      ticket->release();
    });
  });
}
}  // namespace

TicketPtr submit(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Group>& group,
                 const std::shared_ptr<Operation>& op, HandOff& hand_off, std::vector<HostView> views,
                 std::shared_ptr<void> owner, const PointToPoint* point_to_point) {
  const TicketPtr ticket = hand_off.begin(std::move(views), std::move(owner));
  op->ready = ticket == nullptr;
  op->invalidates = ticket == nullptr;  // else below, after the kernels
  engine->submit(group, op, point_to_point);
  if (!ticket) return nullptr;
  try {
    hand_off.signal_ready(ticket);
  } catch (const std::exception& fault) {
    ErrorInfo info;
    info.rank = group->rank;
    info.op = to_string(op->fingerprint.kind);
    info.ticket = op->ticket;
    info.detail = std::string("the device's stream took no signal: ") + fault.what();
    engine->close_group(group, std::make_shared<const Error>(std::move(info)));
    throw;
  }
  release_when_settled(op, ticket);
  // A device that hangs does not keep the engine alive.
  ticket->on_ready([engine = std::weak_ptr(engine), op] {
    if (const auto alive = engine.lock()) alive->set_ready(op);
  });
  return ticket;
}

}  // namespace mccl
