// The Python module: streams, and C ABI kernels as callables that take a card's arguments.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <stdlib.h>

#include <memory>

#include "di_launch.h"
#include "dlpack_exchange.h"
#include "lanes.h"
#include "replay.h"

namespace py = pybind11;

namespace twin {

int finish_call(void* stream, di_error* e) {
  const Stream& s = *stream_of(stream);
  if (s.problems == 0) return DI_OK;
  snprintf(e->message, sizeof e->message, "%.*s", (int)sizeof e->message - 1, s.report.c_str());
  return DI_FAILED;
}

}  // namespace twin

namespace {

di::TensorReader reader;
PyTypeObject* tensor_type = nullptr;
py::object bad_call, failed;

// What a call is told of a weight: its values and scales, with logical shapes.
struct Packed {
  di_tensor values, scales;
  di_tensor memory[2];  // the same as they lie in memory
  py::object keep[2];
};

const std::pair<const char*, int64_t> kCodes[] = {{"fp8_32", DI_FP8_32},     {"fp4_16", DI_FP4_16},
                                                  {"mxfp4_32", DI_MXFP4_32}, {"f32", DI_ROW_F32},
                                                  {"coupled", DI_COUPLED},   {"rejection", DI_REJECTION}};

int64_t item_bytes(int dtype) {
  return dtype == DI_U8 ? 1 : dtype == DI_BF16 ? 2 : dtype == DI_I64 || dtype == DI_F64 ? 8 : 4;
}

// Memory that a call may touch. Reading arguments can run Python, which lets calls of other threads in between, so it is
// kept by the call and handed over when all is read.
struct Allowed {
  void* data;
  uint64_t bytes;
  const char* what;
};

void allow(std::vector<Allowed>& all, const di_tensor& t, const char* what) {
  if (t.data == nullptr) return;
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return;
    last += (t.shape[i] - 1) * t.stride[i];
  }
  all.push_back({t.data, (uint64_t)((last + 1) * item_bytes(t.dtype)), what});
}

[[noreturn]] void raise(const py::object& type, const std::string& text) {
  PyErr_SetString(type.ptr(), text.c_str());
  throw py::error_already_set();
}

class Kernel {
 public:
  Kernel(std::string op, std::string kinds, std::vector<std::string> names, di_kernel kernel)
      : op_(std::move(op)), kinds_(std::move(kinds)), names_(std::move(names)), kernel_(kernel) {}

  void call(const py::args& args, const py::kwargs& kwargs) const {
    twin::Stream* stream = twin::stream_of(nullptr);
    std::vector<py::object> values(names_.size(), py::none());
    if (args.size() > names_.size())
      raise(bad_call,
            op_ + ": takes " + std::to_string(names_.size()) + " arguments, got " + std::to_string(args.size()));
    for (size_t i = 0; i < args.size(); ++i) values[i] = args[i];
    for (const auto& item : kwargs) {
      const std::string name = py::str(item.first);
      if (name == "stream") {
        stream = item.second.cast<twin::Stream*>();
        continue;
      }
      size_t i = 0;
      while (i < names_.size() && names_[i] != name) ++i;
      if (i == names_.size()) raise(bad_call, op_ + ": unknown argument " + name);
      values[i] = py::reinterpret_borrow<py::object>(item.second);
    }
    run(values, stream);
  }

 private:
  void run(const std::vector<py::object>& values, twin::Stream* stream) const {
    std::vector<di_tensor> tensors;
    std::vector<int64_t> ints;
    std::vector<double> reals;
    twin::Seat* seat = stream->seat;
    std::vector<Allowed> allowed;
    for (size_t i = 0; i < values.size(); ++i) read(values[i], i, tensors, ints, reals, allowed);
    if (seat == nullptr) twin::forget_regions();
    else seat->world->keep(std::make_shared<std::vector<py::object>>(values));
    for (const Allowed& one : allowed) {
      if (seat == nullptr) twin::add_region(one.data, one.bytes, one.what);
      else seat->world->allow(seat->rank, one.data, one.bytes, one.what);
    }
    static const size_t kWorkspace = 64u << 20;
    static std::unique_ptr<uint8_t, void (*)(void*)> workspace(static_cast<uint8_t*>(aligned_alloc(512, kWorkspace)),
                                                               free);
    void* space = seat == nullptr ? workspace.get() : seat->world->workspace(seat->rank);
    if (seat == nullptr) twin::add_region(space, kWorkspace, "workspace");
    stream->report.clear();
    stream->problems = 0;
    stream->launch_ms = 0;
    di_error error{};
    const di_params params{ints.data(), reals.data(), (int32_t)ints.size(), (int32_t)reals.size()};
    int status;
    try {
      status = kernel_(tensors.data(), (int)tensors.size(), &params, stream, space, kWorkspace, &error);
    } catch (const std::runtime_error& problem) { raise(failed, op_ + ": " + problem.what()); }
    if (stream->problems != 0) raise(failed, op_ + " on the twin: " + stream->report);
    if (status != DI_OK) raise(status == DI_BAD_CALL ? bad_call : failed, error.message);
  }

  void read(const py::object& value, size_t i, std::vector<di_tensor>& tensors, std::vector<int64_t>& ints,
            std::vector<double>& reals, std::vector<Allowed>& allowed) const {
    const auto refuse = [&](const char* what) { raise(bad_call, op_ + ": " + names_[i] + " must be " + what); };
    di_tensor t{};
    switch (kinds_[i]) {
      case 't':
        if (!value.is_none() && (!PyObject_TypeCheck(value.ptr(), tensor_type) || !reader.read(value.ptr(), &t)))
          refuse("a dense tensor in host memory");
        tensors.push_back(t);
        return allow(allowed, t, names_[i].c_str());
      case 'w': {
        if (value.is_none()) return tensors.insert(tensors.end(), 2, t), void();
        if (!py::hasattr(value, "native") || !py::isinstance<Packed>(value.attr("native")))
          refuse("a weight handle that this backend prepared");
        const auto& packed = value.attr("native").cast<const Packed&>();
        tensors.push_back(packed.values), tensors.push_back(packed.scales);
        allow(allowed, packed.memory[0], names_[i].c_str());
        return allow(allowed, packed.memory[1], names_[i].c_str());
      }
      case 'i':
        if (value.is_none()) refuse("an integer");
        return ints.push_back(value.cast<int64_t>());
      case 'd':
        if (value.is_none()) refuse("a number");
        return reals.push_back(value.cast<double>());
      default:
        for (const auto& code : kCodes)
          if (!value.is_none() && value.cast<std::string>() == code.first) return ints.push_back(code.second);
        refuse("a known format or rule name");
    }
  }

  std::string op_, kinds_;
  std::vector<std::string> names_;
  di_kernel kernel_;
};

di_kernel find(const std::string& op) {
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&find), &self) == 0) return nullptr;
  static void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<di_kernel>(dlsym(library, ("di_" + op).c_str()));
}

std::unique_ptr<twin::Stream> make_stream(const std::string& soc, int cores, uint64_t seed, bool trace,
                                          bool ordered_atomics) {
  const twin::Soc* chip = twin::find_soc(soc.c_str());
  if (chip == nullptr) throw py::value_error("no chip is named " + soc);
  if (cores < 0 || cores > chip->cubes)
    throw py::value_error(soc + " has " + std::to_string(chip->cubes) + " cube cores, " + std::to_string(cores) +
                          " were asked for");
  return std::unique_ptr<twin::Stream>(
      new twin::Stream{chip, cores == 0 ? chip->cubes : cores, seed, trace, ordered_atomics, {}, {}, 0, 0.0});
}

template <class T> py::bytes bytes_of(const std::vector<T>& items) {
  return py::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
}

// The items of a bytes object, or ValueError.
template <class T> std::pair<const T*, size_t> items_of(const py::bytes& bytes, const char* what) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  PyBytes_AsStringAndSize(bytes.ptr(), &data, &size);
  if ((size_t)size % sizeof(T) != 0) throw py::value_error(std::string(what) + " has a broken length");
  return {reinterpret_cast<const T*>(data), (size_t)size / sizeof(T)};
}

py::dict replay(const py::bytes& rows, const py::bytes& extents, const py::bytes& costs, const py::dict& memory) {
  const auto r = items_of<twin::TraceRow>(rows, "rows");
  const auto e = items_of<twin::TraceExtent>(extents, "extents");
  const auto c = items_of<twin::RowCost>(costs, "costs");
  if (c.second != r.second) throw py::value_error("replay: one cost a row is needed");
  const auto number = [&](const char* name) { return memory[name].cast<double>(); };
  const twin::SharedMemory shared{number("hbm_bytes"),    number("l2_bytes"),      number("hbm_latency"),
                                  number("l2_latency"),   number("write_latency"), (uint32_t)number("line"),
                                  (uint32_t)number("in_flight")};
  const twin::Replayed out = twin::replay(r.first, r.second, e.first, e.second, c.first, shared);
  py::dict result;
  result["rows"] = bytes_of(out.rows);
  result["launch_cycles"] = out.launch_cycles;
  result["active"] = bytes_of(out.active);
  result["scalar_critical"] = out.scalar_critical;
  result["bandwidth_critical"] = out.bandwidth_critical;
  result["hbm_bytes"] = out.hbm_bytes;
  result["l2_bytes"] = out.l2_bytes;
  result["cores"] = out.cores;
  return result;
}

}  // namespace

void bind_mutation(py::module_& m);  // mutation_module.cpp
// world_module.cpp
void bind_world(py::module_& m);
void set_world_error(const py::object& type);

PYBIND11_MODULE(_twin, m) {
  m.doc() = "AscendC kernels of deepinfer on a functional model of an Ascend 950";
  py::class_<twin::Stream>(m, "Stream",
                           "Where kernels run: a chip by name, its cube cores in use (0 = all), the scheduler's seed.")
      .def(py::init(&make_stream), py::arg("soc") = "Ascend950DT_9591", py::arg("cores") = 0, py::arg("seed") = 1,
           py::arg("trace") = false, py::arg("ordered_atomics") = true)
      .def_readonly("cores", &twin::Stream::groups)
      .def_readonly("report", &twin::Stream::report)
      .def_readonly("problems", &twin::Stream::problems)
      .def_readonly("launch_ms", &twin::Stream::launch_ms)
      .def("take_trace", [](twin::Stream& s) {
        py::tuple taken = py::make_tuple(bytes_of(s.recorded.rows), bytes_of(s.recorded.extents), s.recorded.kernels,
                                         s.recorded.files);
        s.recorded = {};
        return taken;
      });
  bind_world(m);
  py::class_<Packed>(m, "Packed");
  py::class_<Kernel>(m, "Kernel").def("__call__", &Kernel::call);
  m.attr("HAL_VERSION") = DI_HAL_VERSION;
  m.def("setup", [](const py::object& tensor_class, const py::object& bad, const py::object& fail) {
    py::capsule table = tensor_class.attr("__dlpack_c_exchange_api__");
    reader.attach(static_cast<const di::ExchangeTable*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api")));
    tensor_type = reinterpret_cast<PyTypeObject*>(py::object(tensor_class).release().ptr());
    bad_call = bad, failed = fail;
    set_world_error(fail);
  });
  m.def("has", [](const std::string& op) { return find(op) != nullptr; }, "Whether the library exports di_<op>.");
  m.def(
      "bind",
      [](const std::string& op, const std::string& kinds, const std::vector<std::string>& names) {
        const di_kernel kernel = find(op);
        if (kernel == nullptr) throw py::key_error("no kernel is named " + op);
        if (kinds.size() != names.size()) throw py::value_error(op + ": kinds and names differ in length");
        return Kernel(op, kinds, names, kernel);
      },
      "bind(op, kinds, names): a callable; kinds has one of t w i d s for each argument. `stream=` picks a Stream.");
  m.def(
      "packed_ref",
      [](const py::object& values, const py::object& scales, int layout, const std::vector<int64_t>& shape) {
        auto packed = std::make_unique<Packed>();
        *packed = {};
        packed->keep[0] = values, packed->keep[1] = scales;
        if (!reader.read(values.ptr(), &packed->values)) throw py::type_error("values must be a dense tensor");
        if (!scales.is_none() && !reader.read(scales.ptr(), &packed->scales))
          throw py::type_error("scales must be a dense tensor");
        packed->memory[0] = packed->values, packed->memory[1] = packed->scales;
        if (shape.size() > DI_MAX_DIMS) throw py::value_error("a weight has at most 5 dimensions");
        packed->values.layout = packed->scales.layout = layout;
        packed->values.ndim = static_cast<int32_t>(shape.size());
        for (size_t i = 0; i < shape.size(); ++i) packed->values.shape[i] = shape[i];
        return packed;
      },
      "packed_ref(values, scales, layout, logical_shape): what calls see of a weight.");
  m.def(
      "ops",
      [] {
        std::vector<std::string> names;
        for (const char* name : twin::kOpNames) names.emplace_back(name);
        return names;
      },
      "Names of instructions, by the numbers that traces use.");
  m.def("replay", &replay,
        "replay(rows, extents, costs, memory): what a trace, sorted by launch and core, would take; see replay.h.");
  bind_mutation(m);
  m.def("level", [] { return std::string(twin::lanes_level()); });
  m.def("set_level", [](const std::string& name) { return std::string(twin::set_lanes_level(name.c_str())); });
}
