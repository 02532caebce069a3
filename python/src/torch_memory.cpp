#include "torch_memory.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

namespace nb = nanobind;

namespace tandem::python {
namespace {

/// PyTorch's C interface for libraries (torch/csrc/inductor/aoti_torch/c/shim.h), which keeps its names and
/// meanings from version to version. A handle is an at::Tensor on the heap; functions return 0, or an error.
struct Interface {
  int (*empty_strided)(std::int64_t rank, const std::int64_t* shape, const std::int64_t* strides,
                       std::int32_t dtype, std::int32_t device_kind, std::int32_t device_index,
                       void** handle) = nullptr;
  int (*get_data_ptr)(void* handle, void** address) = nullptr;
  int (*delete_handle)(void* handle) = nullptr;
  /// THPVariable_Wrap(const at::TensorBase&), by which PyTorch's extension modules in C++ return tensors:
  /// what the interface lacks.
  PyObject* (*wrap)(const void* handle) = nullptr;
  std::array<std::int32_t, 7> dtypes{};   ///< by DType
  std::array<std::int32_t, 2> devices{};  ///< by Device::Kind
};

std::optional<Interface> load() {
  void* const library = dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD);  // and those that it needs
  if (library == nullptr) return {};
  Interface found;
  bool whole = true;
  const auto get = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    whole = whole && function != nullptr;
  };
  const auto number = [&](const std::string& name) {
    std::int32_t (*function)() = nullptr;
    get(function, name.c_str());
    return function == nullptr ? 0 : function();
  };
  get(found.empty_strided, "aoti_torch_empty_strided");
  get(found.get_data_ptr, "aoti_torch_get_data_ptr");
  get(found.delete_handle, "aoti_torch_delete_tensor_object");
  get(found.wrap, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
  constexpr std::array dtypes = {"float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "int64", "int8"};
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    found.dtypes[i] = number(std::string("aoti_torch_dtype_") + dtypes[i]);
  }
  found.devices = {number("aoti_torch_device_type_cpu"), number("aoti_torch_device_type_cuda")};
  if (!whole) return {};
  return found;
}

}  // namespace

std::optional<Made> made_by_interface(std::span<const std::int64_t> shape, DType dtype, Device device) {
  static const std::optional<Interface> interface = load();
  Made made;
  Tensor& t = made.view;
  if (!interface || shape.size() > t.shape.size()) return {};
  t.dtype = dtype;
  t.device = device;
  t.rank = static_cast<int>(shape.size());
  std::ranges::copy(shape, t.shape.begin());
  std::int64_t step = 1;  // of a dimension without elements it is 1, as PyTorch has it
  for (std::size_t i = shape.size(); i-- > 0; step *= std::max<std::int64_t>(shape[i], 1)) t.stride[i] = step;
  void* handle = nullptr;
  if (interface->empty_strided(
          t.rank, t.shape.data(), t.stride.data(), interface->dtypes[static_cast<std::size_t>(dtype)],
          interface->devices[static_cast<std::size_t>(device.kind)], device.index, &handle) != 0) {
    return {};
  }
  const bool has_address = interface->get_data_ptr(handle, &t.data) == 0;
  made.tensor = nb::steal(interface->wrap(handle));
  interface->delete_handle(handle);
  if (!made.tensor.is_valid()) throw nb::python_error();
  if (!has_address) return {};
  return made;
}

}  // namespace tandem::python
