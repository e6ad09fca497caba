// The Python class of a world of ranks.
#include <pybind11/pybind11.h>

#include "twin/peer.h"

namespace py = pybind11;

namespace {
py::object failed;
}

void set_world_error(const py::object& type) { failed = type; }

void bind_world(py::module_& m) {
  py::class_<twin::World>(m, "World",
                          "Ranks whose kernels run at the same time, each with a window of global memory that all may touch.")
      .def(py::init<int, int, uint64_t, int, uint64_t>(), py::arg("ranks"), py::arg("cores") = 0,
           py::arg("window_bytes") = 1 << 22, py::arg("flag_kinds") = 4, py::arg("seed") = 1)
      .def_property_readonly("ranks", &twin::World::ranks)
      .def_property_readonly("window_bytes", &twin::World::window_bytes)
      .def_property_readonly("flag_bytes", &twin::World::flag_bytes)
      .def("stream", &twin::World::stream, py::return_value_policy::reference_internal,
           "The stream of a rank; a kernel called on it waits for run().")
      .def("window", [](const twin::World& w, int rank) { return (int64_t)(uintptr_t)w.window(rank); }, "Its address.")
      .def(
          "run",
          [](twin::World& w) {
            const std::string report = w.run();
            if (report.empty()) return;
            PyErr_SetString(failed.ptr(), ("ranks on the twin: " + report).c_str());
            throw py::error_already_set();
          },
          "Runs what was called since the last time, the ranks' n-th launches together. Raises with the full report.");
}
