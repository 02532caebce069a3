#include "arrays.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace tandem::python {
namespace {

/// Strings and types that every call needs, made once. Never destroyed: Python may be gone by then.
struct Torch {
  std::vector<PyObject*> types;
  PyObject* strided = nullptr;
  std::vector<std::pair<PyObject*, DType>> dtypes;
  PyObject* bytes = nullptr;

  [[nodiscard]] bool reads(nb::handle array) const {
    return std::find(types.begin(), types.end(), reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()))) !=
           types.end();
  }
};

Torch& torch() {
  static auto* known = new Torch;
  return *known;
}

struct Names {
  nb::str data_ptr = interned("data_ptr"), dtype = interned("dtype"), layout = interned("layout"),
          is_neg = interned("is_neg"), is_cpu = interned("is_cpu"), is_cuda = interned("is_cuda"),
          get_device = interned("get_device"), shape = interned("shape"), stride = interned("stride"),
          new_empty = interned("new_empty");

  static nb::str interned(const char* text) { return nb::steal<nb::str>(PyUnicode_InternFromString(text)); }
};

const Names& names() {
  static const auto* made = new Names;
  return *made;
}

bool is_true(const nb::object& value) {
  return value.ptr() == Py_True;
}

/// Fills `to` from a tuple of integers; false where it has more than `to`.
template <typename Array>
bool copy_integers(const nb::object& from, Array& to) {
  const auto size = static_cast<std::size_t>(PyTuple_Size(from.ptr()));
  if (size > to.size()) return false;
  for (std::size_t i = 0; i < size; ++i) {
    to[i] = PyLong_AsLongLong(PyTuple_GetItem(from.ptr(), static_cast<Py_ssize_t>(i)));
  }
  return true;
}

/// Reads a plain tensor; false where there is anything unusual about it.
bool read(Tensor& t, nb::handle array) {
  const Names& n = names();
  const nb::object dtype = array.attr(n.dtype);
  const auto known = std::find_if(torch().dtypes.begin(), torch().dtypes.end(),
                                  [&](const auto& entry) { return entry.first == dtype.ptr(); });
  if (known == torch().dtypes.end()) return false;
  if (nb::object(array.attr(n.layout)).ptr() != torch().strided || is_true(array.attr(n.is_neg)()))
    return false;
  if (is_true(array.attr(n.is_cuda))) {
    t.device = {.kind = Device::Kind::cuda, .index = nb::cast<int>(array.attr(n.get_device)())};
  } else if (!is_true(array.attr(n.is_cpu))) {
    return false;
  }
  const nb::object shape = array.attr(n.shape);
  if (!copy_integers(shape, t.shape) || !copy_integers(array.attr(n.stride)(), t.stride)) return false;
  t.rank = static_cast<int>(PyTuple_Size(shape.ptr()));
  t.dtype = known->second;
  t.data = PyLong_AsVoidPtr(nb::object(array.attr(n.data_ptr)()).ptr());
  return true;
}

}  // namespace

void know_torch(const nb::tuple& types, nb::handle strided, const nb::dict& dtypes, nb::handle bytes) {
  Torch known;
  for (const nb::handle type : types) known.types.push_back(nb::object(nb::borrow(type)).release().ptr());
  for (const auto& [dtype, ours] : dtypes) {
    known.dtypes.emplace_back(nb::object(nb::borrow(dtype)).release().ptr(), nb::cast<DType>(ours));
  }
  known.strided = nb::object(nb::borrow(strided)).release().ptr();
  known.bytes = nb::object(nb::borrow(bytes)).release().ptr();
  torch() = std::move(known);
}

Tensor view_of(const char* name, nb::handle array, nb::handle q, bool writable) {
  Tensor t;
  if (torch().reads(array) && (array.is(q) || torch().reads(q)) && read(t, array)) return t;
  if (nb::try_cast(array, t)) return t;
  return nb::cast<Tensor>(nb::module_::import_("tandem._arrays").attr("view")(name, array, q, writable));
}

nb::object scratch_beside(nb::handle q, std::size_t bytes) {
  if (bytes == 0 || !torch().reads(q)) return {};
  return q.attr(names().new_empty)(bytes, nb::arg("dtype") = nb::handle(torch().bytes));
}

void* address_of(const nb::object& scratch) {
  return scratch.is_valid() ? PyLong_AsVoidPtr(nb::object(scratch.attr(names().data_ptr)()).ptr()) : nullptr;
}

}  // namespace tandem::python
