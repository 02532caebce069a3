// Where the memory of Python's arrays is. Plain PyTorch tensors are read here, within a fraction of a
// microsecond each; every other array, and whatever is wrong with one, is the Python layer's (_arrays.view).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "tandem/attention.hpp"
#include "torch_memory.hpp"

namespace tandem::python {

/// Makes PyTorch known: the exact types that are read here (a subclass may mean something else by its
/// attributes), torch.strided, {torch dtype: DType}, and the capsule of DLPack's C exchange, or None of a
/// PyTorch before 2.11, whose tensors are read by their attributes.
void know_torch(const nanobind::tuple& types, nanobind::handle strided, const nanobind::dict& dtypes,
                nanobind::handle exchange);

/// The view of a plain PyTorch tensor by DLPack's C exchange, in tens of nanoseconds; nothing of any other
/// object, and without the exchange.
std::optional<Tensor> exchanged(nanobind::handle array);

/// Makes an array without dimensions, as engines keep a scale, one of one element.
void one_dimension_at_least(Tensor& t);

/// Whether autograd tracks a PyTorch tensor.
bool requires_gradient(nanobind::handle tensor);

/// The CUDA stream that work on `t`, a tensor that exchanged() read, belongs on; null on the CPU.
void* current_stream(const ConstTensor& t);

/// Whether the elements of the last dimension lie side by side.
bool has_dense_rows(const ConstTensor& t);

/// An uninitialised, contiguous tensor like the one whose view is `t`.
Made made_like(nanobind::handle tensor, const ConstTensor& t);

/// The results of a call, made beside its q; the latter two only where wanted.
struct Results {
  Made out, lse, max_logits;
};

/// Uninitialised tensors for the results of `args`, whose inputs exchanged() read. None where out's shape or
/// dtype take a closer look than this: 8 bits, ranks that no call has, rows whose elements do not lie side by
/// side.
std::optional<Results> results_beside(nanobind::handle q, const ForwardArgs& args, bool lse, bool max_logits);

/// The view of `array`, the argument called `name` of a call whose q is `q`. A `_core.Tensor` is its own
/// view. Raises what _arrays.view raises: TypeError for an array of another library than q's, for one.
Tensor view_of(const char* name, nanobind::handle array, nanobind::handle q, bool writable);

/// Scratch memory on `device`, where q is a tensor that view_of reads here, from PyTorch's allocator; none
/// where q is anything else. PyTorch's memory is there at once, in graphs too, where the driver's own pool
/// gives its memory back whenever the device is waited for.
Made scratch_beside(nanobind::handle q, std::size_t bytes, Device device);

}  // namespace tandem::python
