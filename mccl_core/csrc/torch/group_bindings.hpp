// The backend in Python, and how values of Python become the core's.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

#include "op/plan.hpp"

namespace mccl {

// A field of the dict in which configuration comes; throws KeyError where it is missing.
template <class T>
T take(const pybind11::dict& values, const char* name) {
  if (!values.contains(name)) throw pybind11::key_error(std::string("mccl options lack ") + name);
  return values[name].cast<T>();
}

Planner planner_from(const pybind11::dict& values);
void bind_group(pybind11::module_& m);

}  // namespace mccl
