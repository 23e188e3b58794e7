// Works and their futures in Python: mccl_core/_futures.py builds on this.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace mccl {
void bind_futures(pybind11::module_& m);
}  // namespace mccl
