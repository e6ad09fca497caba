// The Python module's functions for mutants: recording sites, and choosing the one that changes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "twin/mutation.h"

namespace py = pybind11;

void bind_mutation(py::module_& m) {
  namespace mutation = twin::mutation;
  py::class_<mutation::Site>(m, "Site", "A place in a kernel's source that a mutant can change.")
      .def_readonly("kernel", &mutation::Site::kernel)
      .def_readonly("file", &mutation::Site::file)
      .def_readonly("line", &mutation::Site::line)
      .def_property_readonly("kind", [](const mutation::Site& s) { return mutation::kind_name(s.kind); })
      .def_readonly("detail", &mutation::Site::detail)
      .def_readonly("count", &mutation::Site::count)
      .def_readonly("lowest", &mutation::Site::lowest)
      .def_readonly("highest", &mutation::Site::highest);
  m.def("record_sites", &mutation::record, "Forgets the sites recorded, and records from here on.");
  m.def("recorded_sites", &mutation::recorded);
  m.def(
      "recorded_partners",
      [] {
        py::list found;
        const auto place = [](twin::Where w) { return std::string(w.file) + ":" + std::to_string(w.line); };
        for (const mutation::Partners& p : mutation::recorded_partners())
          found.append(py::make_tuple(place(p.first), place(p.second), p.event < 0 ? "" : mutation::event_name(p.event)));
        return found;
      },
      "Tuples (file:line, file:line, event): what was set, filled or freed at the first was waited for at the second.");
  m.def(
      "mutate",
      [](const std::vector<mutation::Site>& sites, const std::string& change) {
        const char* const names[] = {"", "drop", "forget", "up", "down"};
        for (int i = 1; i < 5; ++i)
          if (change == names[i]) return mutation::choose(sites, static_cast<mutation::Change>(i));
        throw py::value_error("a change is drop, forget, up or down, got " + change);
      },
      "mutate(sites, change): kernels run with that change at these sites, drop, forget, up or down, until stop_mutation.");
  m.def("stop_mutation", &mutation::stop);
}
