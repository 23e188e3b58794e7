// PyTorch's MPS tensors: the shim, and what it takes for granted about them. Compiled for macOS alone.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/mps/MPSAllocatorInterface.h>
#include <ATen/mps/MPSStream.h>
#undef nil  // MPSStream.h defines it

#include <torch/version.h>

#include "device/metal/calls.hpp"
#include "device/metal/metal_stream.hpp"
#include "torch/devices.hpp"

namespace mccl {

namespace {

void require(bool holds, const char* what) {
  TORCH_CHECK(holds, "mccl: this PyTorch (", TORCH_VERSION, ") keeps MPS tensors otherwise than mccl expects: ", what,
              ". Install a PyTorch that this release of mccl-fleet names, or train on the CPU (accelerator=\"cpu\")");
}

// The hand-off takes storage().data() for the MTLBuffer, and its contents for what getSharedBufferPtr() gives. A
// PyTorch that changes one of them would have us read the wrong memory, so a small tensor is looked at both ways first.
void check_tensors() {
  const at::NoGradGuard no_grad;
  const at::Tensor whole = at::full({64}, 3.0f, at::TensorOptions().dtype(at::kFloat).device(at::kMPS));
  const at::Tensor tail = whole.slice(0, 32);
  void* const storage = tail.storage().mutable_data();
  const auto* allocator = at::mps::getIMPSAllocator();
  const auto shared = allocator->getSharedBufferPtr(storage);
  if (shared.first == nullptr) {
    // Private storage has no such pointer; but then PyTorch has to know the buffer.
    require(allocator->getUnalignedBufferSize(storage) >= 256, "storage().data() is not a buffer of its allocator");
    return;
  }
  require(shared.first != storage, "storage().data() points to the contents, no longer to the MTLBuffer");
  require(metal::shared_contents(storage) == shared.first, "the contents of the MTLBuffer are elsewhere");
  at::mps::getCurrentMPSStream()->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
  auto* const values = static_cast<float*>(const_cast<void*>(shared.first));
  require(tail.storage_offset() == 32 && values[32] == 3.0f && values[63] == 3.0f,
          "the host does not see what the GPU has written");
  values[40] = 5.0f;
  require(tail.sum().item<float>() == 31 * 3.0f + 5.0f, "the GPU does not see what the host has written");
}

}  // namespace

Shim& mps_shim() {
  static Shim& shim = *new MetalStream;
  static const bool checked = (check_tensors(), true);  // tried again after an exception
  static_cast<void>(checked);
  return shim;
}

}  // namespace mccl
