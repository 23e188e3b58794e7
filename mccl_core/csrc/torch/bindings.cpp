// The Python module mccl_core._C: the engine and the backend. Its types are described in mccl_core/_C.pyi.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <torch/csrc/utils/pybind.h>

#include "engine/engine.hpp"
#include "torch/future_bindings.hpp"
#include "torch/group_bindings.hpp"
#include "torch/plan_bindings.hpp"
#include "torch/simulated_device.hpp"

namespace py = pybind11;
using mccl::Engine;
using mccl::Options;
using mccl::take;

namespace {

Options options_from(const py::dict& values) {
  Options options{};
  options.segment_nbytes = take<uint64_t>(values, "segment_nbytes");
  options.scratch_nbytes = take<uint64_t>(values, "scratch_nbytes");
  options.inline_nbytes = take<uint64_t>(values, "inline_nbytes");
  options.credit_nbytes = take<uint64_t>(values, "credit_nbytes");
  options.eager_grant_nbytes = take<uint64_t>(values, "eager_grant_nbytes");
  options.socket_buffer_nbytes = take<uint64_t>(values, "socket_buffer_nbytes");
  options.flight_record_ops = take<uint64_t>(values, "flight_record_ops");
  options.linger_ms = take<int64_t>(values, "linger_ms");
  options.heartbeat_interval_ms = take<int64_t>(values, "heartbeat_interval_ms");
  options.transport_crc = take<bool>(values, "transport_crc");
  return options;
}

using NamedPlan = std::tuple<std::string, int32_t, double, int32_t>;

std::vector<NamedPlan> plans(const py::dict& planner_values, const std::string& collective, int32_t world,
                             uint64_t nbytes) {
  const mccl::Planner planner = mccl::planner_from(planner_values);
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

const char* to_string(mccl::OpState state) {
  switch (state) {
    case mccl::OpState::kInFlight: return "in flight";
    case mccl::OpState::kDone: return "done";
    case mccl::OpState::kFailed: return "failed";
  }
  return "";
}

py::list flight_record_of(const Engine& engine) {
  const auto entries = [&] {
    py::gil_scoped_release free_gil;
    return engine.flight_record();
  }();
  const mccl::TimePoint now = mccl::now_ns();
  py::list record;
  for (const mccl::FlightEntry& entry : entries) {
    const bool over = entry.settled_at != 0;
    py::dict op;
    op["group"] = entry.group;
    op["ticket"] = entry.ticket;
    op["op"] = mccl::to_string(entry.fingerprint.kind);
    op["call"] = entry.fingerprint.describe();
    op["nbytes"] = entry.nbytes;
    op["state"] = to_string(entry.state);
    op["peer"] = entry.peer < 0 ? py::object(py::none()) : py::object(py::int_(entry.peer));
    op["age_ms"] = static_cast<double>(now - entry.posted_at) / 1e6;
    op["duration_ms"] =
        over ? py::object(py::float_(static_cast<double>(entry.settled_at - entry.posted_at) / 1e6)) : py::none();
    record.append(std::move(op));
  }
  return record;
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
      .def("flight_record", &flight_record_of)
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
  mccl::bind_futures(m);
  mccl::bind_group(m);
  m.def("plans", &plans, py::arg("planner"), py::arg("collective"), py::arg("world"), py::arg("nbytes"));
}
