#include "box.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "element.hpp"

namespace tandem::harness {
namespace {

constexpr unsigned char poison_byte = 0xFF;   // NaN in every floating-point dtype
constexpr unsigned char pattern_byte = 0xA5;  // around outputs: a stray NaN would not show on NaN
constexpr std::size_t margin = 256;           // bytes of guard zone before and after the elements
constexpr std::int64_t nobodys_stride = (std::int64_t{1} << 40) + 3;

std::size_t page_size() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}
std::size_t round_up(std::size_t n, std::size_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

GuardedBytes::GuardedBytes(std::size_t size) : size_(round_up(std::max<std::size_t>(size, 1), page_size())) {
  const std::size_t page = page_size();
  void* all = mmap(nullptr, size_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(all) + page;
  if (mprotect(data_, size_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
}

GuardedBytes::~GuardedBytes() {
  munmap(data_ - page_size(), size_ + 2 * page_size());
}

Box::Box(DType dtype, std::vector<std::int64_t> shape, const Layout& layout, bool output) : layout_(layout) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape.begin());

  std::vector<int> order = layout.order;
  if (order.empty()) {
    order.resize(shape.size());
    std::iota(order.begin(), order.end(), 0);
  }
  std::int64_t step = 1;
  std::int64_t extent = 1;  // elements from the first to the last
  std::int64_t slice_begin = 0;
  for (std::size_t n = order.size(); n-- > 0;) {
    const auto dim = static_cast<std::size_t>(order[n]);
    const bool expanded = (layout.expanded >> dim & 1U) != 0;
    view_.stride[dim] = expanded ? 0 : step;
    if (!expanded) {
      extent += std::max<std::int64_t>(shape[dim] - 1, 0) * step;
      step *= std::max<std::int64_t>(shape[dim], 1);
    }
    if (n + 1 == order.size()) step += layout.pad;
    if (n + 2 == order.size()) {
      slice_begin = layout.slice * step;
      step *= layout.slices;
    }
    if (layout.odd_unit_strides && shape[dim] == 1 && n + 1 < order.size())
      view_.stride[dim] = nobodys_stride;
  }

  const std::size_t item = size_of(dtype);
  const std::size_t body = static_cast<std::size_t>(view_.numel() > 0 ? extent : 0) * item;
  const std::size_t before = round_up(margin + static_cast<std::size_t>(slice_begin) * item, 64);
  const std::size_t offset_bytes = static_cast<std::size_t>(layout.base_offset) * item;
  bytes_ = std::make_shared<GuardedBytes>(before + offset_bytes + body + (layout.ends_at_guard ? 0 : margin));
  if (!layout.sparse) std::memset(bytes_->data(), output ? pattern_byte : poison_byte, bytes_->size());
  view_.data =
      layout.ends_at_guard ? bytes_->data() + bytes_->size() - body : bytes_->data() + before + offset_bytes;
  poison();
  snapshot();
}

std::int64_t Box::offset(std::int64_t index) const {
  std::int64_t result = 0;
  for (int dim = view_.rank; dim-- > 0;) {
    const auto d = static_cast<std::size_t>(dim);
    result += index % view_.shape[d] * (view_.shape[d] == 1 ? 0 : view_.stride[d]);
    index /= view_.shape[d];
  }
  return result;
}

std::int64_t Box::row_length() const {
  const auto last = static_cast<std::size_t>(view_.rank - 1);
  return view_.stride[last] == 1 ? view_.shape[last] : 1;
}

template <typename F>
void Box::for_each_row(const F& f) const {
  for (std::int64_t n = 0; n < numel(); n += row_length()) f(n, offset(n));
}

double Box::get(std::int64_t index) const {
  return decode(view_.dtype, view_.data, offset(index));
}
void Box::set(std::int64_t index, double value) {
  encode(view_.dtype, view_.data, offset(index), value);
}

Box Box::first_columns(std::int64_t count) const {
  Box columns = *this;
  columns.view_.shape[static_cast<std::size_t>(view_.rank - 1)] = count;
  return columns;
}

std::vector<double> Box::values() const {
  std::vector<double> all(static_cast<std::size_t>(numel()));
  for_each_row([&](std::int64_t index, std::int64_t at) {
    decode(view_.dtype, view_.data, at, row_length(), all.data() + index);
  });
  return all;
}

void Box::set_all(const std::vector<double>& values) {
  for_each_row([&](std::int64_t index, std::int64_t at) {
    for (std::int64_t n = 0; n < row_length(); ++n) {
      encode(view_.dtype, view_.data, at + n, values[static_cast<std::size_t>(index + n)]);
    }
  });
}

std::vector<std::byte> Box::raw() const {
  const auto item = static_cast<std::int64_t>(size_of(view_.dtype));
  std::vector<std::byte> all(static_cast<std::size_t>(numel() * item));
  const auto* data = static_cast<const std::byte*>(view_.data);
  for_each_row([&](std::int64_t index, std::int64_t at) {
    std::memcpy(all.data() + index * item, data + at * item, static_cast<std::size_t>(row_length() * item));
  });
  return all;
}

void Box::poison() {
  const auto item = static_cast<std::int64_t>(size_of(view_.dtype));
  auto* data = static_cast<std::byte*>(view_.data);
  for_each_row([&](std::int64_t, std::int64_t at) {
    std::memset(data + at * item, poison_byte, static_cast<std::size_t>(row_length() * item));
  });
}

void Box::snapshot() {
  if (layout_.sparse) return;
  snapshot_.assign(bytes_->data(), bytes_->data() + bytes_->size());
}

std::string Box::changed_outside() const {
  if (layout_.sparse) return {};
  const auto item = static_cast<std::int64_t>(size_of(view_.dtype));
  std::vector<std::byte> expected = snapshot_;
  const auto* data = static_cast<const std::byte*>(view_.data);
  for_each_row([&](std::int64_t, std::int64_t at) {
    const std::byte* row = data + at * item;
    std::memcpy(expected.data() + (row - bytes_->data()), row, static_cast<std::size_t>(row_length() * item));
  });
  const auto [now, then] = std::mismatch(bytes_->data(), bytes_->data() + bytes_->size(), expected.begin());
  if (now == bytes_->data() + bytes_->size()) return {};
  return "byte " + std::to_string(now - data) +
         " from the first element was written; it belongs to nobody here";
}

bool Box::changed() const {
  return !layout_.sparse && !std::equal(snapshot_.begin(), snapshot_.end(), bytes_->data());
}

}  // namespace tandem::harness
