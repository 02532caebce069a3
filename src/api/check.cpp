#include "api/check.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>
#include <utility>

#include "api/overlap.hpp"

namespace tandem::check {
namespace {

constexpr std::int64_t max_bytes = std::numeric_limits<std::int64_t>::max();

void equal_shape(const Argument& a, std::span<const std::int64_t> expected, std::string_view symbols) {
  rank(a, static_cast<int>(expected.size()), symbols);
  if (!std::equal(expected.begin(), expected.end(), a.tensor.shape.begin())) {
    invalid("{} has shape {}; it must be {} = {}", a.name, shape_of(a.tensor), symbols,
            tuple(expected.data(), static_cast<int>(expected.size())));
  }
}

bool empty(const ConstTensor& t) {
  return std::any_of(t.shape.begin(), t.shape.begin() + t.rank, [](std::int64_t n) { return n == 0; });
}

}  // namespace

std::string tuple(const std::int64_t* values, int count) {
  return fmt::format("({})", fmt::join(values, values + count, ", "));
}

std::string shape_of(const ConstTensor& tensor) {
  return tuple(tensor.shape.data(), tensor.rank);
}

std::string name_of(Device device) {
  if (device.kind == Device::Kind::cpu) return "cpu";
  return fmt::format("cuda:{}", device.index);
}

void given(const Argument& a, std::string_view symbols) {
  consistent(a);
  if (!a.given()) invalid("{} is missing; pass a tensor of shape {}", a.name, symbols);
}

void consistent(const Argument& a) {
  const ConstTensor& t = a.tensor;
  if (t.rank < 0 || (t.rank == 0 && t.data != nullptr)) {
    invalid("{} has data but {} dimensions; set its shape, or leave it out altogether", a.name, t.rank);
  }
}

void rank(const Argument& a, int rank, std::string_view symbols) {
  if (a.tensor.rank != rank) {
    invalid("{} has {} dimensions; it must be {}", a.name, a.tensor.rank, symbols);
  }
}

void shape(const Argument& a, std::initializer_list<std::int64_t> expected, std::string_view symbols) {
  equal_shape(a, expected, symbols);
}

void shape(const Argument& a, bool packed, std::initializer_list<std::int64_t> batched,
           const Symbols& symbols) {
  const std::span<const std::int64_t> expected(batched);
  equal_shape(a, packed ? expected.subspan(1) : expected, packed ? symbols.packed : symbols.batched);
}

void dtype(const Argument& a, std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), a.tensor.dtype) != allowed.end()) return;
  std::string names;
  for (const DType* d = allowed.begin(); d != allowed.end(); ++d) {
    if (d != allowed.begin()) names += d + 1 == allowed.end() ? " or " : ", ";
    names += tandem::name_of(*d);
  }
  invalid("{} is {}; convert it to {}", a.name, tandem::name_of(a.tensor.dtype), names);
}

void same_dtype(const Argument& a, const Argument& like) {
  if (a.tensor.dtype != like.tensor.dtype) {
    invalid("{} is {} but {} is {}; convert it to {}", a.name, tandem::name_of(a.tensor.dtype), like.name,
            tandem::name_of(like.tensor.dtype), tandem::name_of(like.tensor.dtype));
  }
}

Device device(const Argument& a) {
  const Device d = a.tensor.device;
  if (d.kind != Device::Kind::cpu && d.kind != Device::Kind::cuda) {
    invalid("{} is on a device of kind {}; use cpu (0) or cuda (1)", a.name, static_cast<int>(d.kind));
  }
  if (d.kind == Device::Kind::cuda && d.index < 0) {
    invalid("{} is on cuda device {}; devices count from 0", a.name, d.index);
  }
  return d;
}

void same_device(const Argument& a, const Argument& like) {
  const Device d = a.tensor.device;
  const Device wanted = like.tensor.device;
  const bool same = d.kind == wanted.kind && (d.kind == Device::Kind::cpu || d.index == wanted.index);
  if (!same) {
    invalid("{} is on {} but {} is on {}; move it there", a.name, name_of(d), like.name, name_of(wanted));
  }
}

void extent(const Argument& a) {
  const ConstTensor& t = a.tensor;
  if (std::any_of(t.shape.begin(), t.shape.begin() + t.rank, [](std::int64_t n) { return n < 0; })) {
    invalid("{} has shape {}; no size may be negative", a.name, shape_of(t));
  }
  if (empty(t)) return;
  const auto element = static_cast<std::int64_t>(size_of(t.dtype));
  std::int64_t elements = element;
  std::int64_t reach = element;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) {
    std::int64_t step = 0;
    const std::int64_t stride = t.shape[i] > 1 ? t.stride[i] : 0;
    bool overflow = __builtin_mul_overflow(elements, t.shape[i], &elements);
    overflow |= stride == std::numeric_limits<std::int64_t>::min() ||
                __builtin_mul_overflow(t.shape[i] - 1, std::abs(stride), &step) ||
                __builtin_mul_overflow(step, element, &step) || __builtin_add_overflow(reach, step, &reach);
    if (overflow) {
      invalid("{} of shape {} and strides {} spans more than {} bytes; offsets must fit 63 bits", a.name,
              shape_of(t), tuple(t.stride.data(), t.rank), max_bytes);
    }
  }
}

void memory(const Argument& a) {
  const ConstTensor& t = a.tensor;
  if (empty(t)) return;
  if (t.data == nullptr) {
    invalid("{} has shape {} but no data; its address is NULL", a.name, shape_of(t));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  if (address % size_of(t.dtype) != 0) {
    invalid("{} is at address {:#x}; {} elements need an address that is a multiple of {}", a.name, address,
            tandem::name_of(t.dtype), size_of(t.dtype));
  }
}

void last_dimension_contiguous(const Argument& a) {
  const int last = a.tensor.rank - 1;
  if (empty(a.tensor) || a.size(last) == 1 || a.stride(last) == 1) return;
  invalid(
      "{} has stride {} in its last dimension; the last dimension must be contiguous (stride 1): "
      "copy {} first",
      a.name, a.stride(last), a.name);
}

void no_self_overlap(const Argument& a) {
  const ConstTensor& t = a.tensor;
  if (empty(t)) return;
  // (distance between neighbours, dimension), ascending; in an array, since a call with a workspace does not
  // allocate.
  std::array<std::pair<std::int64_t, std::size_t>, ConstTensor::max_rank> steps;
  std::size_t count = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) {
    if (t.shape[i] <= 1) continue;
    const std::pair step(std::abs(t.stride[i]), i);
    std::size_t at = count++;
    for (; at > 0 && steps[at - 1] > step; --at) steps[at] = steps[at - 1];
    steps[at] = step;
  }
  std::int64_t inner = 0;  // the furthest offset that the dimensions so far reach
  for (const auto& [step, i] : std::span(steps.data(), count)) {
    if (step <= inner) {
      invalid(
          "{} of shape {} and strides {} overlaps itself in dimension {}; every element of an output needs "
          "memory of its own",
          a.name, shape_of(t), tuple(t.stride.data(), t.rank), i);
    }
    inner += (t.shape[i] - 1) * step;
  }
}

void separate(std::initializer_list<Argument> outputs, std::initializer_list<Argument> inputs,
              std::span<const Argument> more_inputs) {
  const auto has_memory = [](const Argument& a) {
    return a.given() && a.tensor.data != nullptr && !empty(a.tensor);
  };
  for (const Argument& output : outputs) {
    if (!has_memory(output)) continue;
    const ByteRange bytes = bytes_of(output.tensor);
    const auto apart = [&](const Argument& a, const Argument& named, const Argument& other) {
      if (!has_memory(a) || !bytes.meets(bytes_of(a.tensor)) || !share_memory(a.tensor, output.tensor))
        return;
      invalid("{} shares memory with {}; an output needs memory of its own", named.name, other.name);
    };
    for (const Argument* later = &output + 1; later != outputs.end(); ++later) apart(*later, *later, output);
    for (const Argument& a : inputs) apart(a, output, a);
    for (const Argument& a : more_inputs) apart(a, output, a);
  }
}

void together(const Argument& a, const Argument& b) {
  if (a.given() == b.given()) return;
  invalid("{} is given without {}; pass both, or neither", (a.given() ? a : b).name,
          (a.given() ? b : a).name);
}

std::int64_t page_table(const Argument& table, const Argument& cache, std::int64_t batch,
                        std::string_view symbols) {
  rank(table, 2, "(batch, max_pages)");
  shape(table, {batch, table.size(1)}, symbols);
  extent(table);
  const std::int64_t page_size = cache.size(1);
  if (page_size < 1) invalid("{} has pages of {} rows; a page has one at least", cache.name, page_size);
  std::int64_t rows = 0;
  if (__builtin_mul_overflow(table.size(1), page_size, &rows)) {
    invalid("{} has {} pages a sequence, of {} rows each; their product must fit 63 bits", table.name,
            table.size(1), page_size);
  }
  return rows;
}

std::int64_t rotary_dim(const Argument& table, std::int64_t head_dim) {
  // Unsigned, since the sizes of a table without elements may be any.
  const std::uint64_t dim = 2 * static_cast<std::uint64_t>(table.size(1));
  if (dim % 16 != 0 || dim > static_cast<std::uint64_t>(head_dim)) {
    invalid("{} has shape {}: rotary_dim is {}; it must be a multiple of 16 and at most head_dim {}",
            table.name, shape_of(table.tensor), dim, head_dim);
  }
  return static_cast<std::int64_t>(dim);
}

void window_bound(const char* name, std::int64_t value) {
  if (value >= -1) return;
  invalid(
      "{} is {}; it must be at least 0, or -1 for unbounded: FlashAttention takes any negative bound for "
      "unbounded, pass -1",
      name, value);
}

void threads(int count) {
  // OpenMP ends the process where the system has no more threads to give, so wild numbers stop here.
  constexpr int most = 4096;
  if (count < 0 || count > most) {
    invalid("threads is {}; it must be from 1 to {}, or 0 for every core", count, most);
  }
}

}  // namespace tandem::check
