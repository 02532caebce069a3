// The extension module tandem._core: the C++ interface for the Python layer, which knows array libraries.
// Arrays come as pointers with shapes and strides, so that every dtype and layout passes without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "arrays.hpp"
#include "cache.hpp"
#include "calls.hpp"
#include "gpu/device.hpp"
#include "info.hpp"
#include "jax.hpp"
#include "options.hpp"
#include "signals.hpp"
#include "tandem/attention.hpp"
#include "tandem/log.hpp"
#include "tandem/quantize.hpp"
#include "tandem/stats.hpp"
#include "torch_calls.hpp"

namespace nb = nanobind;

namespace tandem::python {
namespace {

Tensor make_tensor(std::uintptr_t data, DType dtype, const std::vector<std::int64_t>& shape,
                   const std::vector<std::int64_t>& strides, Device::Kind kind, int index) {
  Tensor t;
  t.data =
      reinterpret_cast<void*>(data);  // NOLINT(performance-no-int-to-ptr): addresses are integers in Python
  t.dtype = dtype;
  t.rank = static_cast<int>(shape.size());
  std::copy_n(shape.begin(), std::min(shape.size(), t.shape.size()), t.shape.begin());
  std::copy_n(strides.begin(), std::min(strides.size(), t.stride.size()), t.stride.begin());
  t.device = Device{.kind = kind, .index = index};
  one_dimension_at_least(t);
  return t;
}

// What tells one view from another.
std::string_view bytes_of(const Tensor& t) {
  static_assert(std::has_unique_object_representations_v<Tensor>);
  return {reinterpret_cast<const char*>(&t), sizeof t};
}

// The log's messages go to a Python function, kept for ever: Python may be gone when a thread last logs.
std::atomic<PyObject*> log_function = nullptr;

void write_log(LogLevel level, const char* message) {
  if (Py_IsInitialized() == 0) return;
  const nb::gil_scoped_acquire locked;
  try {
    const nb::handle write(log_function);
    write(static_cast<int>(level), message);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("tandem's log");
  }
}

// The library's events go to a Python function, kept as the log's.
std::atomic<PyObject*> event_function = nullptr;

void write_event(const Event& e) {
  if (Py_IsInitialized() == 0) return;
  const nb::gil_scoped_acquire locked;
  try {
    const auto text = [](std::string_view view) { return nb::str(view.data(), view.size()); };
    const nb::handle write(event_function);
    write(text(e.operation), text(e.subject), text(e.backend), text(e.family), text(e.kernel), text(e.plan),
          e.nanoseconds);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("tandem's events");
  }
}

// Raises tandem._errors.error(status, message), so that the exception classes are plain Python.
void translate(const std::exception_ptr& exception, void* /*payload*/) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& e) {
    const nb::object error =
        nb::module_::import_("tandem._errors").attr("error")(static_cast<int>(e.status()), e.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
}

// Python runs this module again where it is imported after its removal from sys.modules, or reloaded.
// nanobind keeps types for the life of the process and ends it where one comes twice, so the first module
// lends its contents. True where it has. Another copy of the library has types of the same names: that is an
// ImportError.
bool is_repeated(nb::module_& m) {
  static PyObject* own = nullptr;  // kept for ever
  const nb::handle modules = PyInterpreterState_GetDict(PyInterpreterState_Get());
  const nb::str key("tandem._core");
  const nb::object first = modules.attr("get")(key);
  if (first.is_none()) {
    own = nb::object(m).release().ptr();
    nb::borrow<nb::dict>(modules)[key] = m;
    return false;
  }
  if (first.ptr() != own) {
    const auto path = [](nb::handle module) { return nb::str(nb::getattr(module, "__file__", nb::none())); };
    const std::string message = std::string("tandem is imported already, from ") + path(first).c_str() +
                                "; this is another copy, " + path(m).c_str() +
                                ", and a process can have one: take one of them off sys.path";
    throw nb::import_error(message.c_str());
  }
  for (const auto& [name, value] : nb::borrow<nb::dict>(first.attr("__dict__"))) {
    if (!nb::cast<std::string>(name).starts_with("__")) nb::setattr(m, name, value);
  }
  return true;
}

void define_enums(nb::module_& m) {
  nb::enum_<DType>(m, "DType")
      .value("f32", DType::f32)
      .value("f16", DType::f16)
      .value("bf16", DType::bf16)
      .value("e4m3", DType::e4m3)
      .value("i32", DType::i32)
      .value("i64", DType::i64)
      .value("s8", DType::s8);
  nb::enum_<Precision>(m, "Precision")
      .value("exact", Precision::exact)
      .value("fp8", Precision::fp8)
      .value("int8", Precision::int8);
  nb::enum_<Granularity>(m, "Granularity")
      .value("tensor", Granularity::tensor)
      .value("head", Granularity::head)
      .value("block", Granularity::block)
      .value("row", Granularity::row);
  nb::enum_<Device::Kind>(m, "DeviceKind").value("cpu", Device::Kind::cpu).value("cuda", Device::Kind::cuda);
}

void define_classes(nb::module_& m) {
  nb::class_<Tensor>(m, "Tensor", "A view: address, dtype, shape, strides in elements, device.")
      .def(nb::new_(&make_tensor), nb::arg("data"), nb::arg("dtype"), nb::arg("shape"), nb::arg("strides"),
           nb::arg("device_kind") = Device::Kind::cpu, nb::arg("device_index") = 0)
      .def(
          "__eq__", [](const Tensor& a, const Tensor& b) { return bytes_of(a) == bytes_of(b); },
          nb::is_operator())
      .def("__hash__", [](const Tensor& t) { return std::hash<std::string_view>()(bytes_of(t)); });
  m.def("view", &exchanged, nb::arg("array"));
  define_options(m);
}

void define_the_rest(nb::module_& m) {
  m.def("jax_handlers", [] {
    nb::dict handlers;  // (target, platform) -> what jax.ffi.register_ffi_target takes
    for (const auto& handler : jax_handlers()) {
      handlers[nb::make_tuple(handler.target, handler.platform)] = nb::capsule(handler.function);
    }
    return handlers;
  });
  m.def("end_calls", &end_calls);
  m.def(
      "set_log",
      [](int level, nb::object write) {
        log_function = write.release().ptr();
        set_log(static_cast<LogLevel>(level), &write_log);
      },
      nb::arg("level"), nb::arg("write"));
  m.def(
      "set_events",
      [](unsigned every, nb::object write) {
        if (every > 0) event_function = write.release().ptr();
        set_events(&write_event, every);
      },
      nb::arg("every"), nb::arg("write").none());
  m.def("stats", &stats_info);
  m.def("stats_text", &stats_text);
  m.def("version", &version);
  m.def("cpu_info", &cpu_info);
  m.def("gpu_info", &gpu_info);
  m.def("described_devices", &described_devices);
  m.def("energy_meter", &energy_meter, nb::arg("device"));
  m.def("measure_peak", &peak_info, nb::arg("threads"), nb::arg("seconds") = 0.2);
}

}  // namespace
}  // namespace tandem::python

NB_MODULE(_core, m) {
  namespace py = tandem::python;
  if (py::is_repeated(m)) return;
  m.doc() = "Tandem's C++ interface; use the package `tandem`.";
  // A daemon thread that is inside a call as the interpreter ends keeps its objects.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(py::translate);
  py::find_main_thread();
  py::define_enums(m);
  py::define_classes(m);
  py::define_calls(m);
  py::define_torch_calls(m);
  py::define_cache(m);
  py::define_the_rest(m);
}
