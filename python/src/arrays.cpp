#include "arrays.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "tandem/error.hpp"

namespace nb = nanobind;

namespace tandem::python {
namespace {

namespace dlpack = nb::dlpack;

/// DLPack's C exchange, version 1: how one extension module reads another's tensors. A capsule of the type's
/// attribute __dlpack_c_exchange_api__ has a pointer to it. Functions return 0, or -1 with Python's error
/// set.
struct Exchange {
  std::uint32_t major, minor;
  const void* older;
  int (*allocate)(dlpack::dltensor*, void**, void*, void (*)(void*, const char*, const char*));
  int (*own_from_python)(void*, void**);
  int (*own_to_python)(void*, void**);
  int (*view_of_python)(void* object, dlpack::dltensor* view);
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** stream);
};

/// Strings and types that every call needs, made once. Never destroyed: Python may be gone by then.
struct Torch {
  std::vector<PyObject*> types;
  PyObject *strided = nullptr, *is_neg = nullptr;
  std::vector<std::pair<PyObject*, DType>> dtypes;
  const Exchange* exchange = nullptr;

  [[nodiscard]] bool reads(nb::handle array) const {
    return std::find(types.begin(), types.end(), reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()))) !=
           types.end();
  }
};

// What know_torch made last. Earlier ones are kept: a thread may be reading one.
std::atomic<const Torch*>& known_torch() {
  static std::atomic<const Torch*> known = new Torch;
  return known;
}

const Torch& torch() {
  return *known_torch();
}

struct Names {
  nb::str data_ptr = interned("data_ptr"), dtype = interned("dtype"), layout = interned("layout"),
          is_cpu = interned("is_cpu"), is_cuda = interned("is_cuda"), get_device = interned("get_device"),
          shape = interned("shape"), stride = interned("stride"), requires_grad = interned("requires_grad");

  static nb::str interned(const char* text) { return nb::steal<nb::str>(PyUnicode_InternFromString(text)); }
};

const Names& names() {
  static const auto* made = new Names;
  return *made;
}

bool is_true(const nb::object& value) {
  return value.ptr() == Py_True;
}

/// Whether the numbers of a plain tensor are to be negated as they are read, such as the imaginary part of a
/// conjugate, in any dtype (torch._neg_view).
bool is_negated(nb::handle array) {
  return is_true(nb::handle(torch().is_neg)(array));
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
  if (nb::object(array.attr(n.layout)).ptr() != torch().strided || is_negated(array)) return false;
  if (is_true(array.attr(n.is_cuda))) {
    t.device = {.kind = Device::Kind::cuda, .index = nb::cast<int>(array.attr(n.get_device)())};
  } else if (!is_true(array.attr(n.is_cpu))) {
    return false;
  }
  const nb::object shape = array.attr(n.shape);
  if (!copy_integers(shape, t.shape) || !copy_integers(array.attr(n.stride)(), t.stride)) return false;
  t.rank = static_cast<int>(PyTuple_Size(shape.ptr()));
  one_dimension_at_least(t);
  t.dtype = known->second;
  t.data = PyLong_AsVoidPtr(nb::object(array.attr(n.data_ptr)()).ptr());
  return true;
}

/// The element type; nothing of one that Tandem lacks.
std::optional<DType> dtype_of(dlpack::dtype type) {
  enum Code : std::uint8_t { integer = 0, ieee = 2, bfloat = 4, e4m3fn = 10 };
  if (type.lanes != 1) return {};
  switch (type.code << 8 | type.bits) {
    case ieee << 8 | 32: return DType::f32;
    case ieee << 8 | 16: return DType::f16;
    case bfloat << 8 | 16: return DType::bf16;
    case e4m3fn << 8 | 8: return DType::e4m3;
    case integer << 8 | 64: return DType::i64;
    case integer << 8 | 32: return DType::i32;
    case integer << 8 | 8: return DType::s8;
    default: return {};
  }
}

constexpr std::int32_t dlpack_cpu = 1, dlpack_cuda = 2;

}  // namespace

void one_dimension_at_least(Tensor& t) {
  if (t.rank > 0) return;
  t.rank = 1;
  t.shape[0] = 1;
  t.stride[0] = 1;
}

namespace {

/// As exchanged(), of any tensor whose numbers have the sign that is in memory.
std::optional<Tensor> viewed(nb::handle array) {
  const Exchange* exchange = torch().exchange;
  if (exchange == nullptr || !torch().reads(array)) return {};
  dlpack::dltensor view;
  if (exchange->view_of_python(array.ptr(), &view) != 0) {  // a sparse one, for example
    PyErr_Clear();
    return {};
  }
  Tensor t;
  const std::optional<DType> dtype = dtype_of(view.dtype);
  const bool cuda = view.device.device_type == dlpack_cuda;
  if (!dtype || (!cuda && view.device.device_type != dlpack_cpu) ||
      static_cast<std::size_t>(view.ndim) > t.shape.size()) {
    return {};
  }
  t.dtype = *dtype;
  t.rank = view.ndim;
  t.data = static_cast<char*>(view.data) + view.byte_offset;
  std::copy_n(view.shape, view.ndim, t.shape.begin());
  std::copy_n(view.strides, view.ndim, t.stride.begin());
  one_dimension_at_least(t);
  if (cuda) t.device = {.kind = Device::Kind::cuda, .index = view.device.device_id};
  return t;
}

}  // namespace

std::optional<Tensor> exchanged(nb::handle array) {
  std::optional<Tensor> t = viewed(array);
  if (t && is_negated(array)) return {};  // which DLPack has no word for
  return t;
}

bool requires_gradient(nb::handle tensor) {
  return is_true(tensor.attr(names().requires_grad));
}

void* current_stream(const ConstTensor& t) {
  void* stream = nullptr;
  if (t.device.kind == Device::Kind::cuda &&
      torch().exchange->current_stream(dlpack_cuda, t.device.index, &stream) != 0) {
    throw nb::python_error();
  }
  return stream;
}

bool has_dense_rows(const ConstTensor& t) {
  const auto last = static_cast<std::size_t>(std::max(t.rank, 1)) - 1;
  return t.stride[last] == 1 || t.shape[last] == 1 || !t.given();
}

Made made_beside(nb::handle tensor, std::span<const std::int64_t> shape, DType dtype, Device device) {
  if (std::optional<Made> made = made_by_interface(shape, dtype, device)) return *std::move(made);
  nb::list sizes;
  for (const std::int64_t size : shape) sizes.append(size);
  const auto& dtypes = torch().dtypes;
  const auto known = std::ranges::find(dtypes, dtype, [](const auto& entry) { return entry.second; });
  Made made{.tensor = tensor.attr("new_empty")(sizes, nb::arg("dtype") = nb::handle(known->first)),
            .view = {}};
  if (const std::optional<Tensor> seen = viewed(made.tensor)) {
    made.view = *seen;
  } else if (!read(made.view, made.tensor)) {
    throw Error(Status::internal, "PyTorch has made a tensor that is not plain");
  }
  return made;
}

Made made_like(nb::handle tensor, const ConstTensor& t) {
  auto rank = static_cast<std::size_t>(t.rank);
  // What has no dimension is read as one element.
  if (rank == 1 && t.shape[0] == 1) rank = nb::len(nb::getattr(tensor, names().shape));
  Made made = made_beside(tensor, {t.shape.data(), rank}, t.dtype, t.device);
  one_dimension_at_least(made.view);
  return made;
}

std::optional<Results> results_beside(nb::handle q, const ForwardArgs& args, bool lse, bool max_logits) {
  const bool quantized = args.q.dtype == DType::e4m3 || args.q.dtype == DType::s8;
  if (quantized) return {};
  for (const ConstTensor* t : {&args.q, &args.k, &args.v}) {
    if (t->rank != 3 && t->rank != 4) return {};  // packed queries go with a cache of 4 dimensions
    if (!has_dense_rows(*t)) return {};
  }
  auto shape = args.q.shape;
  const auto rank = static_cast<std::size_t>(args.q.rank);
  shape[rank - 1] = args.v.shape[static_cast<std::size_t>(args.v.rank) - 1];
  Results results;
  results.out = made_beside(q, {shape.data(), rank}, args.q.dtype, args.q.device);
  std::swap(shape[rank - 3], shape[rank - 2]);
  const auto by_row = [&] { return made_beside(q, {shape.data(), rank - 1}, DType::f32, args.q.device); };
  if (lse) results.lse = by_row();
  if (max_logits) results.max_logits = by_row();
  return results;
}

void know_torch(const nb::tuple& types, nb::handle strided, const nb::dict& dtypes, nb::handle exchange) {
  auto made = std::make_unique<Torch>();
  Torch& known = *made;
  for (const nb::handle type : types) known.types.push_back(nb::object(nb::borrow(type)).release().ptr());
  for (const auto& [dtype, ours] : dtypes) {
    known.dtypes.emplace_back(nb::object(nb::borrow(dtype)).release().ptr(), nb::cast<DType>(ours));
  }
  known.strided = nb::object(nb::borrow(strided)).release().ptr();
  known.is_neg = nb::object(nb::getattr(types[0], "is_neg")).release().ptr();
  if (!exchange.is_none()) {
    const void* pointer = PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api");
    if (pointer == nullptr) throw nb::python_error();
    const auto* offered = static_cast<const Exchange*>(pointer);
    if (offered->major == 1) known.exchange = offered;
  }
  known_torch() = made.release();
}

Tensor view_of(const char* name, nb::handle array, nb::handle q, bool writable) {
  if (torch().reads(q)) {
    if (const std::optional<Tensor> seen = exchanged(array)) return *seen;
  }
  Tensor t;
  if (torch().reads(array) && (array.is(q) || torch().reads(q)) && read(t, array)) return t;
  if (nb::try_cast(array, t)) return t;
  return nb::cast<Tensor>(nb::module_::import_("tandem._arrays").attr("view")(name, array, q, writable));
}

Made scratch_beside(nb::handle q, std::size_t bytes, Device device) {
  if (bytes == 0 || !torch().reads(q)) return {};
  return made_beside(q, std::array{static_cast<std::int64_t>(bytes)}, DType::s8, device);
}

}  // namespace tandem::python
