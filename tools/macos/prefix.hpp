// The headers of PyTorch and pybind11 that most of torch/*.cpp include, compiled once for each release of PyTorch. Each source
// includes what it needs, too: the build for Linux has no such header.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
