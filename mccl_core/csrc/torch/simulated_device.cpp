#include "torch/simulated_device.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/pybind.h>

#include <future>
#include <memory>
#include <utility>

#include "device/sim.hpp"
#include "torch/devices.hpp"

namespace py = pybind11;

namespace mccl {

namespace {

class SimulatedDevice {
 public:
  SimulatedDevice(unsigned seed, int longest_delay_us, bool private_memory)
      : stream_(std::make_shared<SimStream>(seed, longest_delay_us, SimWords::k64Bit,
                                            private_memory ? SimMemory::kPrivate : SimMemory::kShared)) {
    simulate_device(stream_);
  }
  void close() { simulate_device(nullptr); }

  void fill(at::Tensor tensor, double value) {
    stream_->encode_kernel([tensor = std::move(tensor), value] {
      const at::NoGradGuard no_grad;
      tensor.fill_(value);
    });
  }
  void copy(at::Tensor to, at::Tensor from) {
    stream_->encode_kernel([to = std::move(to), from = std::move(from)] {
      const at::NoGradGuard no_grad;
      to.copy_(from);
    });
  }
  void hold() {
    const auto opened = gate_.get_future().share();
    stream_->encode_kernel([opened] { opened.wait(); });
  }
  void resume() { std::exchange(gate_, {}).set_value(); }
  void synchronize() { stream_->synchronize(); }

 private:
  const std::shared_ptr<SimStream> stream_;
  std::promise<void> gate_;
};

}  // namespace

void bind_simulated_device(py::module_& m) {
  const auto free_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<SimulatedDevice>(m, "SimulatedDevice")
      .def(py::init<unsigned, int, bool>(), py::kw_only(), py::arg("seed"), py::arg("longest_delay_us"),
           py::arg("private_memory"))
      .def("fill", &SimulatedDevice::fill, free_gil, py::arg("tensor"), py::arg("value"))
      .def("copy", &SimulatedDevice::copy, free_gil, py::arg("to"), py::arg("source"))
      .def("hold", &SimulatedDevice::hold, free_gil)
      .def("resume", &SimulatedDevice::resume, free_gil)
      .def("synchronize", &SimulatedDevice::synchronize, free_gil)
      .def("close", &SimulatedDevice::close, free_gil);
}

}  // namespace mccl
