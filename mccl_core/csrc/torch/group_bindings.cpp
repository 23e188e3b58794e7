#include "torch/group_bindings.hpp"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/process_group.hpp"

namespace py = pybind11;

namespace mccl {

Planner planner_from(const py::dict& values) {
  Planner planner{};
  planner.profile.latency_s = take<double>(values, "latency_s");
  planner.profile.step_s = take<double>(values, "step_s");
  planner.profile.nbytes_per_s = take<double>(values, "nbytes_per_s");
  planner.profile.uplink_nbytes_per_s = take<double>(values, "uplink_nbytes_per_s");
  planner.profile.circulant_share = take<double>(values, "circulant_share");
  planner.all_reduce_algorithm = algorithm_of(take<std::string>(values, "all_reduce_algorithm"));
  planner.recursive_doubling_max_nbytes = take<uint64_t>(values, "recursive_doubling_max_nbytes");
  planner.chunk_nbytes = take<uint64_t>(values, "chunk_nbytes");
  planner.group_of_rank = take<std::vector<int32_t>>(values, "group_of_rank");
  planner.channels = take<int32_t>(values, "channels");
  planner.channel_nbytes = take<uint64_t>(values, "channel_nbytes");
  return planner;
}

namespace {

CompressionOptions compression_from(const py::dict& values) {
  CompressionOptions options{};
  options.compression = compression_of(take<std::string>(values, "compression"));
  options.required = take<bool>(values, "required");
  options.min_nbytes = take<uint64_t>(values, "min_nbytes");
  options.topk_ratio = take<double>(values, "topk_ratio");
  options.topk_warmup = take<uint64_t>(values, "topk_warmup");
  return options;
}

// Destroyed with the interpreter lock held, whichever thread drops the group.
std::shared_ptr<py::function> hold(py::function function) {
  return {new py::function(std::move(function)), [](py::function* f) {
            py::gil_scoped_acquire gil;
            delete f;
          }};
}

[[noreturn]] void throw_unreachable(int32_t peer, const std::string& text) {
  ErrorInfo info;
  info.code = Code::kPeerLost;
  info.peer = peer;
  constexpr std::string_view kPrefix = "mccl: ";
  info.detail = "cannot be reached: " + (text.starts_with(kPrefix) ? text.substr(kPrefix.size()) : text);
  throw Error(std::move(info));
}

struct Callables {
  py::function connect, regroup, make, on_failure;
};

ProcessGroupMCCL::Parts parts_from(Callables callables) {
  ProcessGroupMCCL::Parts parts{};
  parts.connector = [held = hold(std::move(callables.connect))](int32_t peer, int32_t channel) {
    const py::gil_scoped_acquire gil;
    try {
      (*held)(peer, channel);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_RuntimeError)) throw;  // DistBackendError is one
      throw_unreachable(peer, py::str(error.value()));
    }
  };
  parts.regrouper = [held = hold(std::move(callables.regroup))](const std::vector<int32_t>& excluded, bool agreed) {
    const py::gil_scoped_acquire gil;
    return (*held)(excluded, agreed).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
  parts.maker = [held = hold(std::move(callables.make))](const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                         int size, std::chrono::milliseconds timeout,
                                                         const std::string& name) {
    const py::gil_scoped_acquire gil;
    return (*held)(store, rank, size, timeout, name).cast<c10::intrusive_ptr<ProcessGroupMCCL>>();
  };
  parts.on_failure = [held = hold(std::move(callables.on_failure))](const Error& error) {
    const py::gil_scoped_acquire gil;
    (*held)(error.what());
  };
  return parts;
}

c10::intrusive_ptr<ProcessGroupMCCL> make_group(const std::shared_ptr<Engine>& engine, uint64_t id, int32_t rank,
                                                const std::vector<std::pair<py::bytes, std::string>>& members,
                                                const py::dict& planner_values, std::chrono::milliseconds timeout,
                                                py::function connect, py::function regroup,
                                                const py::dict& compression_values, py::function make,
                                                py::function on_failure, std::string name) {
  std::vector<MemberInfo> infos;
  for (const auto& [process, host] : members) infos.push_back({std::string(process), host});
  auto parts = parts_from({std::move(connect), std::move(regroup), std::move(make), std::move(on_failure)});
  parts.planner = planner_from(planner_values);
  parts.compression = compression_from(compression_values);
  parts.engine = engine;
  parts.timeout = timeout;
  parts.name = std::move(name);
  const py::gil_scoped_release free_gil;
  parts.group = engine->create_group(id, rank, std::move(infos), parts.planner.channels);
  return c10::make_intrusive<ProcessGroupMCCL>(std::move(parts));
}

}  // namespace

void bind_group(py::module_& m) {
  py::class_<ProcessGroupMCCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupMCCL>> group(m, "ProcessGroupMCCL");
  group
      .def(py::init(&make_group), py::arg("engine"), py::arg("group_id"), py::arg("rank"), py::arg("members"),
           py::arg("planner"), py::arg("timeout"), py::arg("connect"), py::arg("regroup"), py::arg("compression"),
           py::arg("make"), py::arg("on_failure"), py::arg("name"))
      .def_property_readonly("group_id", &ProcessGroupMCCL::group_id)
      .def("agree", &ProcessGroupMCCL::agree, py::arg("ranks_to_exclude"), py::call_guard<py::gil_scoped_release>())
      // What torch's Backend does not bind, as its own backends have it.
      .def_property_readonly("options", [](ProcessGroupMCCL& self) { return self.getBackendOptions(); })
      .def("_set_default_timeout", &ProcessGroupMCCL::setTimeout, py::arg("timeout"))
      .def("get_error", &ProcessGroupMCCL::getError, py::call_guard<py::gil_scoped_release>())
      // torch calls it on ranks that are not in a new group. Nothing to do: who is in it makes it.
      .def("perform_nocolor_split", [](const ProcessGroupMCCL&, const py::object&) {}, py::arg("device"));
  using GroupOptions = ProcessGroupMCCL::Options;
  const auto copy = [](const GroupOptions& options) { return c10::make_intrusive<GroupOptions>(options); };
  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(group, "Options")
      .def("__copy__", copy)
      .def(
          "__deepcopy__", [copy](const GroupOptions& options, const py::dict&) { return copy(options); },
          py::arg("memo"));
}

}  // namespace mccl
