// New tensors of PyTorch's, from its allocator, without a step in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <span>

#include "tandem/tensor.hpp"

namespace tandem::python {

/// A new tensor and its view.
struct Made {
  nanobind::object tensor;
  Tensor view;
};

/// An uninitialised, contiguous tensor. None where PyTorch lacks the interface for it, or refuses: it raises
/// an exception of its own where Python asks for the same.
std::optional<Made> made_by_interface(std::span<const std::int64_t> shape, DType dtype, Device device);

}  // namespace tandem::python
