// Which shim reaches a tensor's memory. The CPU's tensors have none; those of a Mac's GPU have Metal's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "device/shim.hpp"

namespace mccl {

class SimStream;

// Whether this build can move tensors of that device.
bool reaches(const at::Device& device);
// Null where nothing has to be ordered. One a process and device; lives for ever. The first call for an MPS tensor
// checks what the hand-off takes for granted about PyTorch's MPS tensors, and throws where it does not hold.
Shim* shim_of(const at::Tensor& tensor);
DeviceTensor device_tensor(const at::Tensor& contiguous, bool written);
// Lets a thread of autograd's encode: the caller's, which stands for the bound one, is blocked in backward() meanwhile.
void adopt_autograd_thread(HandOff& hand_off);

// For tests, on machines without a device: from here on the CPU's tensors are those of `stream`. Null ends it.
void simulate_device(std::shared_ptr<SimStream> stream);

#ifdef __APPLE__
Shim& mps_shim();  // torch/mps.cpp
#endif

}  // namespace mccl
