// The Python module mccl_core._C: the engine and the backend. Its types are described in mccl_core/_C.pyi.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <torch/csrc/utils/pybind.h>

#include "torch/plan_bindings.hpp"
#include "torch/process_group.hpp"
#include "torch/simulated_device.hpp"

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
  options.heartbeat_interval_ms = take<int64_t>(values, "heartbeat_interval_ms");
  options.transport_crc = take<bool>(values, "transport_crc");
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
  planner.channels = take<int32_t>(values, "channels");
  planner.channel_nbytes = take<uint64_t>(values, "channel_nbytes");
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

using NamedPlan = std::tuple<std::string, int32_t, double, int32_t>;

std::vector<NamedPlan> plans(const py::dict& planner_values, const std::string& collective, int32_t world,
                             uint64_t nbytes) {
  const mccl::Planner planner = planner_from(planner_values);
  const auto kind = mccl::kind_of(collective);
  const auto named = [](const mccl::Plan& plan) {
    return NamedPlan{mccl::to_string(plan.algorithm), plan.chunk_count, plan.predicted_s, plan.channel_count};
  };
  std::vector<NamedPlan> all{named(planner.plan(kind, world, nbytes))};
  for (const mccl::Plan& plan : planner.plans(kind, world, nbytes)) all.push_back(named(plan));
  return all;
}

// By the kind's name: a dict for each algorithm that has been used (mccl_core/_C.pyi).
py::dict metrics_of(const Engine& engine) {
  const mccl::Metrics::Snapshot snapshot = [&] {
    py::gil_scoped_release free_gil;
    return engine.metrics();
  }();
  py::dict result;
  for (size_t kind = 0; kind < mccl::kKinds; ++kind) {
    py::list used;
    for (size_t algorithm = 0; algorithm < mccl::kAlgorithms; ++algorithm) {
      const auto name = static_cast<mccl::Algorithm>(algorithm);
      const size_t index = mccl::op_index(static_cast<mccl::OpKind>(kind), name);
      const mccl::OpCounters& counters = snapshot.ops[index];
      py::dict waits;
      for (const auto& [process, waited_ns] : snapshot.waits) {
        if (waited_ns[index] > 0) waits[py::bytes(process)] = waited_ns[index];
      }
      if (counters.count + counters.failed + counters.parked_nbytes + waits.size() == 0) continue;
      py::dict entry;
      entry["algorithm"] = mccl::to_string(name);
      entry["count"] = counters.count;
      entry["failed"] = counters.failed;
      entry["nbytes"] = counters.nbytes;
      entry["sent_nbytes"] = counters.sent_nbytes;
      entry["bus_nbytes"] = counters.bus_nbytes;
      entry["busy_ns"] = counters.busy_ns;
      entry["queued_ns"] = counters.queued_ns;
      entry["parked_nbytes"] = counters.parked_nbytes;
      entry["waited_ns"] = waits;
      used.append(entry);
    }
    result[mccl::to_string(static_cast<mccl::OpKind>(kind))] = used;
  }
  return result;
}

template <class F>
auto without_gil(const F& function) {
  py::gil_scoped_release free_gil;
  return function();
}

py::object fields_of(const std::shared_ptr<const mccl::Error>& error) {
  if (!error) return py::none();
  const mccl::ErrorInfo& info = error->info();
  py::dict fields;
  fields["kind"] = mccl::to_string(info.code);
  fields["op"] = info.op;
  fields["ticket"] = info.ticket;
  fields["rank"] = info.rank;
  fields["peer"] = info.peer;
  fields["peer_host"] = info.peer_host;
  fields["errno"] = info.sys_errno;
  fields["detail"] = info.detail;
  fields["advice"] = info.advice;
  fields["message"] = error->what();
  return fields;
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
      .def("metrics", &metrics_of)
      .def("reset_metrics", &Engine::reset_metrics, free_gil)
      .def("parked_nbytes", &Engine::parked_nbytes, free_gil)
      .def("last_failure",
           [](const Engine& engine) { return fields_of(without_gil([&] { return engine.last_failure(); })); })
      .def("open_failure",
           [](const Engine& engine) { return fields_of(without_gil([&] { return engine.open_failure(); })); })
      .def("shutdown", &Engine::shutdown, free_gil)
      .def("close_descriptors_in_child", [](const std::shared_ptr<Engine>& engine) {
        engine->close_descriptors_in_child();
        // Kept for ever: its destructor would wait for threads that do not exist in the child.
        static std::vector<std::shared_ptr<Engine>>& abandoned = *new std::vector<std::shared_ptr<Engine>>;
        abandoned.push_back(engine);
      });
}

// Destroyed with the interpreter lock held, whichever thread drops the group.
std::shared_ptr<py::function> hold(py::function function) {
  return {new py::function(std::move(function)), [](py::function* f) {
            py::gil_scoped_acquire gil;
            delete f;
          }};
}

[[noreturn]] void throw_unreachable(int32_t peer, const std::string& text) {
  mccl::ErrorInfo info;
  info.code = mccl::Code::kPeerLost;
  info.peer = peer;
  constexpr std::string_view kPrefix = "mccl: ";
  info.detail = "cannot be reached: " + (text.starts_with(kPrefix) ? text.substr(kPrefix.size()) : text);
  throw mccl::Error(std::move(info));
}

c10::intrusive_ptr<ProcessGroupMCCL> make_group(const std::shared_ptr<Engine>& engine, uint64_t id, int32_t rank,
                                                const std::vector<std::pair<py::bytes, std::string>>& members,
                                                const py::dict& planner_values, std::chrono::milliseconds timeout,
                                                py::function connect, py::function regroup,
                                                const py::dict& compression_values) {
  std::vector<MemberInfo> infos;
  for (const auto& [process, host] : members) infos.push_back({std::string(process), host});
  auto connector = [held = hold(std::move(connect))](int32_t peer, int32_t channel) {
    const py::gil_scoped_acquire gil;
    try {
      (*held)(peer, channel);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_RuntimeError)) throw;  // DistBackendError is one
      throw_unreachable(peer, py::str(error.value()));
    }
  };
  auto regrouper = [held = hold(std::move(regroup))](const std::vector<int32_t>& excluded, bool agreed) {
    const py::gil_scoped_acquire gil;
    return (*held)(excluded, agreed).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
  mccl::Planner planner = planner_from(planner_values);
  const mccl::CompressionOptions compression = compression_from(compression_values);
  py::gil_scoped_release free_gil;
  auto group = engine->create_group(id, rank, std::move(infos), planner.channels);
  return c10::make_intrusive<ProcessGroupMCCL>(engine, std::move(group), std::move(planner), timeout,
                                               std::move(connector), std::move(regrouper), compression);
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
  mccl::bind_simulated_device(m);
  py::class_<ProcessGroupMCCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupMCCL>>(m, "ProcessGroupMCCL")
      .def(py::init(&make_group), py::arg("engine"), py::arg("group_id"), py::arg("rank"), py::arg("members"),
           py::arg("planner"), py::arg("timeout"), py::arg("connect"), py::arg("regroup"), py::arg("compression"))
      .def_property_readonly("group_id", &ProcessGroupMCCL::group_id)
      .def("agree", &ProcessGroupMCCL::agree, py::arg("ranks_to_exclude"), py::call_guard<py::gil_scoped_release>());
  m.def("plans", &plans, py::arg("planner"), py::arg("collective"), py::arg("world"), py::arg("nbytes"));
}
