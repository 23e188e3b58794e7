#include "torch/plan_bindings.hpp"

#include <pybind11/stl.h>

#include <map>

#include "base/error.hpp"
#include "schedule/algorithms.hpp"
#include "schedule/simulate.hpp"

namespace py = pybind11;

namespace mccl {

namespace {

// Ops of one size share a generator, and so their schedules.
std::vector<SimulatedOp> simulated_ops(const std::string& algorithm, const std::vector<uint64_t>& nbytes,
                                       const std::vector<double>& ready_s, uint64_t element_nbytes,
                                       const std::vector<int32_t>& groups, int32_t chunk_count, int32_t channel_count) {
  if (nbytes.size() != ready_s.size()) {
    throw_usage("simulate: " + std::to_string(nbytes.size()) + " sizes and " + std::to_string(ready_s.size()) +
                " ready times");
  }
  std::map<uint64_t, std::shared_ptr<const Generator>> generators;
  std::vector<SimulatedOp> ops;
  for (size_t i = 0; i < nbytes.size(); ++i) {
    auto& generator = generators[nbytes[i]];
    if (!generator) {
      generator = std::make_shared<const Generator>(
          all_reduce_generator(algorithm, {nbytes[i], element_nbytes, chunk_count, groups, channel_count}));
    }
    ops.push_back({generator, ready_s[i]});
  }
  return ops;
}

py::dict to_dict(const SimulationResult& result) {
  py::dict values;
  values["posted_s"] = result.posted_s;
  values["finish_s"] = result.finish_s;
  values["last_finish_s"] = result.last_finish_s;
  values["egress_busy_share"] = result.egress_busy_share;
  values["uplink_busy_share"] = result.uplink_busy_share;
  values["segments"] = result.segments;
  values["deadlock"] = result.deadlock;
  return values;
}

}  // namespace

void bind_plans(py::module_& m) {
  m.def("all_reduce_algorithms", &all_reduce_algorithms);
  m.def(
      "simulate",
      [](const std::string& collective, const std::string& algorithm, int32_t world,
         const std::vector<uint64_t>& nbytes, const std::vector<double>& ready_s, double alpha_s,
         double goodput_bytes_per_s, uint64_t segment_nbytes, uint64_t forward_nbytes, uint64_t credit_nbytes,
         uint64_t element_nbytes, int32_t chunk_count, int32_t channel_count, double segment_cost_s,
         uint64_t burst_nbytes, std::vector<int32_t> groups, double uplink_goodput_bytes_per_s, double uplink_latency_s,
         int32_t max_in_flight, std::vector<double> delay_s, double skew_s, uint64_t seed) {
        if (collective != "all_reduce") throw_usage("simulate: " + collective + " is not known", "Say all_reduce");
        SimulationResult result;
        {
          const py::gil_scoped_release free_gil;
          const auto ops =
              simulated_ops(algorithm, nbytes, ready_s, element_nbytes, groups, chunk_count, channel_count);
          const Network network{world,        alpha_s,           goodput_bytes_per_s,        segment_cost_s,
                                burst_nbytes, std::move(groups), uplink_goodput_bytes_per_s, uplink_latency_s};
          const SimulationOptions options{segment_nbytes,     forward_nbytes, credit_nbytes, max_in_flight,
                                          std::move(delay_s), skew_s,         seed};
          result = simulate(network, ops, options);
        }
        return to_dict(result);
      },
      py::arg("collective"), py::arg("algorithm"), py::kw_only(), py::arg("world"), py::arg("nbytes"),
      py::arg("ready_s"), py::arg("alpha_s"), py::arg("goodput_bytes_per_s"), py::arg("segment_nbytes"),
      py::arg("forward_nbytes"), py::arg("credit_nbytes"), py::arg("element_nbytes") = 4, py::arg("chunk_count") = 1,
      py::arg("channel_count") = 1, py::arg("segment_cost_s") = 0.0, py::arg("burst_nbytes") = 0,
      py::arg("groups") = std::vector<int32_t>{}, py::arg("uplink_goodput_bytes_per_s") = 0.0,
      py::arg("uplink_latency_s") = 0.0, py::arg("max_in_flight") = 0, py::arg("delay_s") = std::vector<double>{},
      py::arg("skew_s") = 0.0, py::arg("seed") = 0);
}

}  // namespace mccl
