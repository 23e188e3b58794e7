#include "device/cpu.hpp"

namespace mccl {

HostView CpuHandOff::host_view(const DeviceTensor& tensor) {
  return {{static_cast<std::byte*>(tensor.storage) + tensor.offset_nbytes, tensor.nbytes}, tensor, nullptr};
}

}  // namespace mccl
