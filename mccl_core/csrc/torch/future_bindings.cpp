#include "torch/future_bindings.hpp"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <utility>

#include "torch/work.hpp"

namespace py = pybind11;

namespace mccl {

namespace {
using PythonFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;

// Completes `to` as `from` completes, with the same value or the same error.
void forward(const PythonFuture& from, const PythonFuture& to) {
  from->fut->addCallback([target = to->fut](c10::ivalue::Future& source) {
    if (source.hasError()) {
      target->setError(source.exception_ptr());
    } else {
      target->markCompleted(source.value());
    }
  });
}

py::object callback_place(const OpWork& work) {
  const Place place = work.place();
  if (place.tag == 0) return py::none();
  return py::cast(std::make_pair(place.ticket, place.tag));
}

// `with InCallback(ticket, tag):`
struct PythonInCallback {
  Place place;
  std::unique_ptr<InCallback> entered;
};
}  // namespace

void bind_futures(py::module_& m) {
  py::class_<OpWork, c10d::Work, c10::intrusive_ptr<OpWork>>(m, "Work")
      .def("get_future",
           [](const py::object& self) { return py::module_::import("mccl_core._futures").attr("future_of")(self); })
      .def("_plain_future",
           [](OpWork& work) { return std::make_shared<torch::jit::PythonFutureWrapper>(work.getFuture()); })
      .def("_callback_place", &callback_place);
  m.def("forward_future", &forward, py::arg("from_"), py::arg("to"), py::call_guard<py::gil_scoped_release>());
  m.def("child_place", [](uint64_t ticket, uint32_t tag, uint64_t index) {
    const Place place = Place{ticket, tag}.child(index);
    return std::make_pair(place.ticket, place.tag);
  });
  py::class_<PythonInCallback>(m, "InCallback")
      .def(py::init([](uint64_t ticket, uint32_t tag) {
             return std::make_unique<PythonInCallback>(PythonInCallback{{ticket, tag}, nullptr});
           }),
           py::arg("ticket"), py::arg("tag"))
      .def("__enter__", [](PythonInCallback& self) { self.entered = std::make_unique<InCallback>(self.place); })
      .def("__exit__", [](PythonInCallback& self, const py::args&) { self.entered.reset(); });
}

}  // namespace mccl
