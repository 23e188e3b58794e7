// The Python module mccl_core._C: the engine and the backend. Its types are described in mccl_core/_C.pyi.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <torch/csrc/utils/pybind.h>

#include "torch/plan_bindings.hpp"
#include "torch/process_group.hpp"

namespace py = pybind11;
using mccl::Engine;
using mccl::Group;
using mccl::MemberInfo;
using mccl::Options;
using mccl::ProcessGroupMCCL;

namespace {

template <class T>
T take(const py::dict& values, const char* name) {
  if (!values.contains(name)) throw py::key_error(std::string("mccl options lack ") + name);
  return values[name].cast<T>();
}

Options options_from(const py::dict& values) {
  Options options{};
  options.segment_nbytes = take<uint64_t>(values, "segment_nbytes");
  options.scratch_nbytes = take<uint64_t>(values, "scratch_nbytes");
  options.inline_nbytes = take<uint64_t>(values, "inline_nbytes");
  options.credit_nbytes = take<uint64_t>(values, "credit_nbytes");
  options.eager_grant_nbytes = take<uint64_t>(values, "eager_grant_nbytes");
  options.socket_buffer_nbytes = take<uint64_t>(values, "socket_buffer_nbytes");
  options.linger_ms = take<int64_t>(values, "linger_ms");
  return options;
}

mccl::Planner planner_from(const py::dict& values) {
  mccl::Planner planner{};
  planner.profile.latency_s = take<double>(values, "latency_s");
  planner.profile.step_s = take<double>(values, "step_s");
  planner.profile.nbytes_per_s = take<double>(values, "nbytes_per_s");
  planner.profile.uplink_nbytes_per_s = take<double>(values, "uplink_nbytes_per_s");
  planner.profile.circulant_share = take<double>(values, "circulant_share");
  planner.all_reduce_algorithm = mccl::algorithm_of(take<std::string>(values, "all_reduce_algorithm"));
  planner.recursive_doubling_max_nbytes = take<uint64_t>(values, "recursive_doubling_max_nbytes");
  planner.chunk_nbytes = take<uint64_t>(values, "chunk_nbytes");
  planner.group_of_rank = take<std::vector<int32_t>>(values, "group_of_rank");
  return planner;
}

mccl::CompressionOptions compression_from(const py::dict& values) {
  mccl::CompressionOptions options{};
  options.compression = mccl::compression_of(take<std::string>(values, "compression"));
  options.required = take<bool>(values, "required");
  options.min_nbytes = take<uint64_t>(values, "min_nbytes");
  options.topk_ratio = take<double>(values, "topk_ratio");
  options.topk_warmup = take<uint64_t>(values, "topk_warmup");
  return options;
}

using NamedPlan = std::tuple<std::string, int32_t, double>;

std::vector<NamedPlan> plans(const py::dict& planner_values, const std::string& collective, int32_t world,
                             uint64_t nbytes) {
  const mccl::Planner planner = planner_from(planner_values);
  const auto kind = mccl::kind_of(collective);
  const auto named = [](const mccl::Plan& plan) {
    return NamedPlan{mccl::to_string(plan.algorithm), plan.chunk_count, plan.predicted_s};
  };
  std::vector<NamedPlan> all{named(planner.plan(kind, world, nbytes))};
  for (const mccl::Plan& plan : planner.plans(kind, world, nbytes)) all.push_back(named(plan));
  return all;
}

py::dict counters_of(const Engine& engine) {
  py::dict result;
  const mccl::Counters counters = [&] {
    py::gil_scoped_release free_gil;
    return engine.counters();
  }();
  for (size_t kind = 0; kind < counters.size(); ++kind) {
    py::dict entry;
    entry["count"] = counters[kind].count;
    entry["bytes"] = counters[kind].nbytes;
    entry["sent_bytes"] = counters[kind].sent_nbytes;
    result[mccl::to_string(static_cast<mccl::OpKind>(kind))] = entry;
  }
  return result;
}

// Nothing here waits for the engine with Python's interpreter lock held.
void bind_engine(py::module_& m) {
  const auto free_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](const py::dict& options) { return std::make_shared<Engine>(options_from(options)); }),
           py::arg("options"))
      .def(
          "add_connection",
          [](Engine& engine, int fd, const py::bytes& process, int32_t lane, std::string host) {
            const std::string id(process);
            py::gil_scoped_release free_gil;
            engine.add_connection(mccl::Fd(fd), id, lane, std::move(host));
          },
          py::arg("fd"), py::arg("process"), py::arg("lane"), py::arg("host"))
      .def(
          "connected",
          [](const Engine& engine, const py::bytes& process, int32_t lane) {
            const std::string id(process);
            py::gil_scoped_release free_gil;
            return engine.connected(id, lane);
          },
          py::arg("process"), py::arg("lane"))
      .def("counters", &counters_of)
      .def("reset_counters", &Engine::reset_counters, free_gil)
      .def("parked_nbytes", &Engine::parked_nbytes, free_gil)
      .def("shutdown", &Engine::shutdown, free_gil)
      .def("close_descriptors_in_child", [](const std::shared_ptr<Engine>& engine) {
        engine->close_descriptors_in_child();
        // Kept for ever: its destructor would wait for threads that do not exist in the child.
        static std::vector<std::shared_ptr<Engine>>& abandoned = *new std::vector<std::shared_ptr<Engine>>;
        abandoned.push_back(engine);
      });
}

c10::intrusive_ptr<ProcessGroupMCCL> make_group(const std::shared_ptr<Engine>& engine, uint64_t id, int32_t rank,
                                                const std::vector<std::pair<py::bytes, std::string>>& members,
                                                const py::dict& planner_values, std::chrono::milliseconds timeout,
                                                py::function connect, const py::dict& compression_values) {
  std::vector<MemberInfo> infos;
  for (const auto& [process, host] : members) infos.push_back({std::string(process), host});
  // Destroyed with the GIL held, whichever thread drops the group.
  const std::shared_ptr<py::function> held(new py::function(std::move(connect)), [](py::function* f) {
    py::gil_scoped_acquire gil;
    delete f;
  });
  auto connector = [held](const std::vector<int32_t>& ranks) {
    py::gil_scoped_acquire gil;
    (*held)(ranks);
  };
  mccl::Planner planner = planner_from(planner_values);
  const mccl::CompressionOptions compression = compression_from(compression_values);
  py::gil_scoped_release free_gil;
  auto group = engine->create_group(id, rank, std::move(infos));
  return c10::make_intrusive<ProcessGroupMCCL>(engine, std::move(group), std::move(planner), timeout,
                                               std::move(connector), compression);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled core of mccl_core";
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const mccl::Error& error) {
      const bool usage = error.info().code == mccl::Code::kUsage;
      PyErr_SetString(usage ? PyExc_ValueError : PyExc_RuntimeError, error.what());
    }
  });
  py::module_::import("torch.distributed");  // registers c10d::Backend
  bind_engine(m);
  mccl::bind_plans(m);
  py::class_<ProcessGroupMCCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupMCCL>>(m, "ProcessGroupMCCL")
      .def(py::init(&make_group), py::arg("engine"), py::arg("group_id"), py::arg("rank"), py::arg("members"),
           py::arg("planner"), py::arg("timeout"), py::arg("connect"), py::arg("compression"));
  m.def("plans", &plans, py::arg("planner"), py::arg("collective"), py::arg("world"), py::arg("nbytes"));
}
