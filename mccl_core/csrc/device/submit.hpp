// A collective on a device's tensors: the op takes its place in the group's order at the call, starts when the stream
// has written its buffers, and gives them back to the stream when it has settled.
#pragma once

#include <memory>

#include "device/handoff.hpp"
#include "engine/engine.hpp"

namespace mccl {

// Submits `op`, whose buffers are the memory of `views`. `owner` keeps the tensors alive. On the framework's thread;
// does not block. Returns the ticket for HandOff::wait_released, null where there is nothing to order.
//
// The result of an op that fails is filled with NaN before the stream goes on. Throws as Engine::submit; Error (kSystem
// or the shim's own) where the stream refuses the signal, and then the group has failed.
TicketPtr submit(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Group>& group,
                 const std::shared_ptr<Operation>& op, HandOff& hand_off, std::vector<HostView> views,
                 std::shared_ptr<void> owner, const PointToPoint* point_to_point = nullptr);

}  // namespace mccl
