// Python's view of planning: the simulator. No torch type is involved.
#pragma once

#include <pybind11/pybind11.h>

namespace mccl {

void bind_plans(pybind11::module_& m);

}  // namespace mccl
