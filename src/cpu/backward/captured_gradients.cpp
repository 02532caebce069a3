#include "cpu/backward/captured_gradients.hpp"

#include <algorithm>

namespace tandem::cpu {
namespace {

/// Elements of a tensor that has copies.
constexpr std::int64_t most_copied = 1 << 16;
/// Parts of the work at most: more than most machines have cores, and so few that copies stay small.
constexpr std::int64_t most_parts = 64;
constexpr std::int64_t least_parts = 8;
/// Memory of all copies, unless there are fewer parts than the least.
constexpr std::size_t most_copy_bytes = std::size_t{64} << 20;

/// f(offset in elements) of each element of a tensor, in logical order.
template <typename F>
void for_each_element(const Tensor& t, F&& f) {
  std::array<std::int64_t, Tensor::max_rank> at{};
  const std::int64_t count = t.numel();
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) offset += at[d] * t.stride[d];
    f(offset);
    for (auto d = static_cast<std::size_t>(t.rank); d-- > 0;) {
      if (++at[d] < t.shape[d]) break;
      at[d] = 0;
    }
  }
}

/// Whether every read of a captured tensor has the leaf, never clamped, as the index of one dimension.
bool has_index(const Problem& p, std::size_t captured, FunctionOp leaf, std::int64_t extent) {
  const Function& f = *p.score_function;
  const std::span<const FunctionNode> nodes = f.all_nodes();
  const Tensor& t = p.captured_gradients[captured];
  for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
    if (t.shape[d] < extent) continue;
    const bool always =
        std::all_of(f.gradients().begin(), f.gradients().end(), [&](const FunctionGradient& g) {
          const FunctionNode& read = nodes[static_cast<std::size_t>(g.read)];
          return static_cast<std::size_t>(read.captured) != captured ||
                 nodes[static_cast<std::size_t>(read.args[d])].op == leaf;
        });
    if (always) return true;
  }
  return false;
}

}  // namespace

CapturedSchedule::CapturedSchedule(const Problem& p, std::int64_t block_q)
    : batch_(p.batch), heads_(p.heads_q) {
  copy_at_.fill(-1);
  if (!p.wants_captured_gradients()) return;
  for (std::size_t n = 0; n < p.captured_gradients.size(); ++n) {
    const Tensor& t = p.captured_gradients[n];
    if (!t.given()) continue;
    if (t.numel() <= most_copied) {
      copy_at_[n] = static_cast<std::int64_t>(copy_numbers_);
      copy_numbers_ += static_cast<std::size_t>(t.numel());
      continue;
    }
    by_batch_ = by_batch_ && has_index(p, n, FunctionOp::batch, p.batch);
    by_head_ = by_head_ && has_index(p, n, FunctionOp::head, p.heads_q);
    by_block_ = by_block_ && has_index(p, n, FunctionOp::query, p.rows_q);
  }
  blocks_ = (p.rows_q + block_q - 1) / block_q;  // lengths are not read where memory is asked for
  class_heads_ = by_head_ ? p.heads_q : 1;
  class_blocks_ = by_block_ ? blocks_ : 1;
  classes_ = (by_batch_ ? p.batch : 1) * class_heads_ * class_blocks_;
  parts_ = classes_;
  if (copy_numbers_ == 0) return;
  const auto fitting = static_cast<std::int64_t>(most_copy_bytes / (copy_numbers_ * sizeof(double)));
  parts_ = std::min(classes_, std::clamp(fitting, least_parts, most_parts));
  copies_ = static_cast<std::size_t>(std::max<std::int64_t>(parts_, 1));
}

void CapturedSchedule::clear(const Problem& p, double* workspace) const {
  std::fill_n(workspace, copies_ * copy_numbers_, 0.0);
  for (std::size_t n = 0; n < p.captured_gradients.size(); ++n) {
    const Tensor& t = p.captured_gradients[n];
    auto* const data = static_cast<float*>(t.data);
    if (t.given() && copy_at_[n] < 0) for_each_element(t, [&](std::int64_t offset) { data[offset] = 0.0F; });
  }
}

CapturedGradients CapturedSchedule::targets(const Problem& p, std::int64_t part, double* workspace) const {
  CapturedGradients targets;
  const Function& f = *p.score_function;
  for (std::size_t g = 0; g < f.gradients().size(); ++g) {
    const auto read = static_cast<std::size_t>(f.gradients()[g].read);
    const auto n = static_cast<std::size_t>(f.all_nodes()[read].captured);
    if (n >= p.captured_gradients.size() || !p.captured_gradients[n].given()) continue;
    const Tensor& t = p.captured_gradients[n];
    CapturedGradient& to = targets.of[g];
    to.rank = t.rank;
    std::copy(t.shape.begin(), t.shape.end(), to.shape);
    if (copy_at_[n] < 0) {
      to.data = t.data;
      std::copy(t.stride.begin(), t.stride.end(), to.stride);
      continue;
    }
    to.wide = true;
    to.data = workspace + static_cast<std::size_t>(part) * copy_numbers_ + copy_at_[n];
    std::int64_t step = 1;
    for (int d = t.rank; d-- > 0;) {
      to.stride[d] = step;
      step *= to.shape[d];
    }
  }
  return targets;
}

void CapturedSchedule::finish(const Problem& p, const double* workspace) const {
  for (std::size_t n = 0; n < p.captured_gradients.size(); ++n) {
    const Tensor& t = p.captured_gradients[n];
    if (!t.given() || copy_at_[n] < 0) continue;
    auto* const data = static_cast<float*>(t.data);
    const double* from = workspace + copy_at_[n];
    for_each_element(t, [&](std::int64_t offset) {
      double sum = 0.0;
      for (std::size_t copy = 0; copy < copies_; ++copy) sum += from[copy * copy_numbers_];
      data[offset] = static_cast<float>(sum);
      ++from;
    });
  }
}

}  // namespace tandem::cpu
