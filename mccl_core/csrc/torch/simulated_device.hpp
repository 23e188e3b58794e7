// A device for tests on machines that have none: kernels on the CPU's tensors run late, on a stream of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace mccl {

void bind_simulated_device(pybind11::module_& m);

}  // namespace mccl
