// The Python module: binds a C symbol to a callable that takes a card's arguments.
//
// A bound call costs about a hundred nanoseconds a tensor: torch hands out shape and pointer through DLPack's exchange
// table, so no torch header is needed and nothing is allocated.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "dispatch.h"
#include "dlpack_exchange.h"
#include "pool.h"

namespace py = pybind11;

namespace {

constexpr int kMostTensors = 48, kMostScalars = 24, kMostArgs = 48;

di::TensorReader reader;
PyTypeObject* tensor_type = nullptr;
PyObject* bad_call = nullptr;
PyObject* failed = nullptr;
PyObject* native_name = nullptr;  // interned "native": the attribute of a weight handle that holds a PackedRef

struct PackedRef {
  PyObject_HEAD
  di_tensor values, scales;
};
PyTypeObject* packed_type = nullptr;

struct Bound {
  PyObject_HEAD
  vectorcallfunc call;
  di_kernel kernel;
  PyObject* op;     // str, for messages
  PyObject* kinds;  // bytes: one of t w i d s for each argument
  PyObject* names;  // tuple of interned str
};

struct Code {
  const char* name;
  int64_t value;
};
const Code kCodes[] = {{"fp8_32", DI_FP8_32}, {"fp4_16", DI_FP4_16},   {"mxfp4_32", DI_MXFP4_32},
                       {"f32", DI_ROW_F32},   {"bf16", DI_ROW_BF16}, {"coupled", DI_COUPLED}, {"rejection", DI_REJECTION}};
PyObject* code_names[sizeof kCodes / sizeof kCodes[0]];

bool read_code(PyObject* text, int64_t* value) {
  for (size_t i = 0; i < sizeof kCodes / sizeof kCodes[0]; ++i) {
    if (text == code_names[i] || (PyUnicode_Check(text) && PyUnicode_Compare(text, code_names[i]) == 0)) {
      *value = kCodes[i].value;
      return true;
    }
  }
  return false;
}

PyObject* refuse(const Bound* self, int argument, const char* what, PyObject* got) {
  PyErr_Format(bad_call, "%U: %U must be %s, got %s", self->op, PyTuple_GET_ITEM(self->names, argument), what,
               got == nullptr ? "nothing" : Py_TYPE(got)->tp_name);
  return nullptr;
}

bool read_weight(PyObject* handle, di_tensor* to) {
  PyObject* ref = PyObject_GetAttr(handle, native_name);
  if (ref == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool good = Py_TYPE(ref) == packed_type;
  if (good) to[0] = reinterpret_cast<PackedRef*>(ref)->values, to[1] = reinterpret_cast<PackedRef*>(ref)->scales;
  Py_DECREF(ref);  // the handle keeps it, and its tensors, alive during the call
  return good;
}

PyObject* call_bound(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  auto* self = reinterpret_cast<Bound*>(callable);
  const Py_ssize_t given = PyVectorcall_NARGS(nargsf), wanted = PyTuple_GET_SIZE(self->names);
  if (given > wanted) {
    PyErr_Format(bad_call, "%U: takes %zd arguments, got %zd", self->op, wanted, given);
    return nullptr;
  }
  PyObject* values[kMostArgs] = {};
  for (Py_ssize_t i = 0; i < given; ++i) values[i] = args[i];
  for (Py_ssize_t k = 0; kwnames != nullptr && k < PyTuple_GET_SIZE(kwnames); ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    Py_ssize_t i = 0;
    while (i < wanted && name != PyTuple_GET_ITEM(self->names, i)) ++i;
    if (i == wanted)
      for (i = 0; i < wanted && PyUnicode_Compare(name, PyTuple_GET_ITEM(self->names, i)) != 0;) ++i;
    if (i == wanted || values[i] != nullptr) {
      PyErr_Format(bad_call, i == wanted ? "%U: unknown argument %R" : "%U: argument %R given twice", self->op, name);
      return nullptr;
    }
    values[i] = args[given + k];
  }

  di_tensor tensors[kMostTensors];
  int64_t ints[kMostScalars];
  double reals[kMostScalars];
  int nt = 0;
  di_params params{ints, reals, 0, 0};
  const char* kinds = PyBytes_AS_STRING(self->kinds);
  for (int i = 0; i < wanted; ++i) {
    PyObject* value = values[i];
    const bool none = value == nullptr || value == Py_None;
    switch (kinds[i]) {
      case 't':
        if (none)
          tensors[nt] = di_tensor{};
        else if (!PyObject_TypeCheck(value, tensor_type))
          return refuse(self, i, "a tensor", value);
        else if (!reader.read(value, &tensors[nt]))
          return PyErr_Occurred() ? nullptr : refuse(self, i, "a plain dense tensor", value);
        ++nt;
        break;
      case 'w':
        if (none)
          tensors[nt] = tensors[nt + 1] = di_tensor{};
        else if (!read_weight(value, &tensors[nt]))
          return refuse(self, i, "a weight handle that this backend prepared", value);
        nt += 2;
        break;
      case 'i':
        if (none || !(PyLong_Check(value) || PyIndex_Check(value))) return refuse(self, i, "an integer", value);
        ints[params.n_i++] = PyLong_AsLongLong(value);
        break;
      case 'd':
        if (none || !(PyFloat_Check(value) || PyLong_Check(value))) return refuse(self, i, "a number", value);
        reals[params.n_d++] = PyFloat_AsDouble(value);
        break;
      default:
        if (none || !read_code(value, &ints[params.n_i++]))
          return refuse(self, i, "a known format or rule name", value);
    }
  }
  if (PyErr_Occurred()) return nullptr;

  di_error error;
  error.message[0] = 0;
  int status;
  try {
    status = self->kernel(tensors, nt, &params, nullptr, nullptr, 0, &error);
  } catch (const std::bad_alloc&) { return PyErr_NoMemory(); }
  if (status == DI_OK) Py_RETURN_NONE;
  PyErr_SetString(status == DI_BAD_CALL ? bad_call : failed, error.message);
  return nullptr;
}

void free_bound(PyObject* self) {
  auto* bound = reinterpret_cast<Bound*>(self);
  Py_XDECREF(bound->op), Py_XDECREF(bound->kinds), Py_XDECREF(bound->names);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* show_bound(PyObject* self) {
  return PyUnicode_FromFormat("<native op %U>", reinterpret_cast<Bound*>(self)->op);
}

PyMemberDef bound_members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Bound, call), READONLY, nullptr}, {}};
PyType_Slot bound_slots[] = {{Py_tp_dealloc, (void*)free_bound},
                             {Py_tp_call, (void*)PyVectorcall_Call},
                             {Py_tp_repr, (void*)show_bound},
                             {Py_tp_members, bound_members},
                             {0, nullptr}};
PyType_Spec bound_spec = {"deepinfer_cpu._native.Bound", sizeof(Bound), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, bound_slots};
PyTypeObject* bound_type = nullptr;

void free_packed(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}
PyType_Slot packed_slots[] = {{Py_tp_dealloc, (void*)free_packed}, {0, nullptr}};
PyType_Spec packed_spec = {"deepinfer_cpu._native.PackedRef", sizeof(PackedRef), 0, Py_TPFLAGS_DEFAULT, packed_slots};

py::object bind(const std::string& op, const std::string& kinds, const py::tuple& names) {
  di_kernel kernel = nullptr;
  for (int i = 0; i < di::kernel_count(); ++i)
    if (op == di::kernel_name(i)) kernel = di::kernel(i);
  if (kernel == nullptr) throw py::key_error("no native kernel is named " + op);
  int tensors = 0, scalars = 0;
  for (char kind : kinds) kind == 't' ? ++tensors : kind == 'w' ? tensors += 2 : ++scalars;
  if (kinds.size() != names.size() || kinds.size() > kMostArgs || tensors > kMostTensors || scalars > kMostScalars)
    throw py::value_error(op + ": the signature does not fit");
  auto* self = PyObject_New(Bound, bound_type);
  if (self == nullptr) throw py::error_already_set();
  self->call = call_bound;
  self->kernel = kernel;
  self->op = PyUnicode_InternFromString(op.c_str());
  self->kinds = PyBytes_FromStringAndSize(kinds.data(), kinds.size());
  self->names = PyTuple_New(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    PyObject* name = py::str(names[i]).release().ptr();
    PyUnicode_InternInPlace(&name);
    PyTuple_SET_ITEM(self->names, i, name);
  }
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

// What a call is told of a weight: its logical shape and layout on top of the packed tensors' memory.
py::object packed_ref(const py::object& values, const py::object& scales, int layout,
                      const std::vector<int64_t>& shape) {
  auto* self = PyObject_New(PackedRef, packed_type);
  if (self == nullptr) throw py::error_already_set();
  auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
  self->scales = di_tensor{};
  if (!reader.read(values.ptr(), &self->values)) throw py::error_already_set();
  if (!scales.is_none() && !reader.read(scales.ptr(), &self->scales)) throw py::error_already_set();
  if (shape.size() > DI_MAX_DIMS) throw py::value_error("a weight has at most 5 dimensions");
  self->values.layout = self->scales.layout = layout;
  self->values.ndim = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) self->values.shape[i] = shape[i];
  return owner;
}

void setup(const py::object& tensor_class, const py::object& bad, const py::object& fail) {
  py::capsule table = tensor_class.attr("__dlpack_c_exchange_api__");
  reader.attach(static_cast<const di::ExchangeTable*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api")));
  tensor_type = reinterpret_cast<PyTypeObject*>(tensor_class.inc_ref().ptr());
  bad_call = bad.inc_ref().ptr();
  failed = fail.inc_ref().ptr();
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of deepinfer behind the HAL's C ABI";
  bound_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&bound_spec));
  packed_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&packed_spec));
  if (bound_type == nullptr || packed_type == nullptr) throw py::error_already_set();
  native_name = PyUnicode_InternFromString("native");
  for (size_t i = 0; i < sizeof kCodes / sizeof kCodes[0]; ++i)
    code_names[i] = PyUnicode_InternFromString(kCodes[i].name);
  m.attr("HAL_VERSION") = DI_HAL_VERSION;
  m.def("setup", &setup, "Once, before anything else: torch.Tensor and the errors to raise.");
  m.def("bind", &bind, "bind(op, kinds, names): a callable; kinds has one of t w i d s for each argument.");
  m.def("packed_ref", &packed_ref, "packed_ref(values, scales, layout, logical_shape): what calls see of a weight.");
  m.def("ops", [] {
    std::vector<std::string> names;
    for (int i = 0; i < di::kernel_count(); ++i) names.emplace_back(di::kernel_name(i));
    return names;
  });
  m.def("level", [] { return std::string(di::level()); }, "The instruction level in use: base, avx2 or avx512.");
  m.def("set_level", [](const std::string& name) { return std::string(di::set_level(name.c_str())); });
  m.def("set_num_threads", &di::set_num_threads);
  m.def("num_threads", &di::num_threads);
}
