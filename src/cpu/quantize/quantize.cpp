#include "cpu/quantize/quantize.hpp"
#include "cpu/quantize/mean.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/common/config.hpp"
#include "cpu/common/operand.hpp"
#include "cpu/targets/kernels.hpp"

namespace tandem::cpu {
namespace {

constexpr std::int64_t max_head_dim = 256;

/// One head, with the memory that its rows are prepared in: 128 KiB of the thread's stack.
struct Head {
  const QuantizeProblem& problem;
  const QuantizeKernel& kernel;
  Stop* stop;  ///< may be null
  std::int64_t b;
  std::int64_t head;
  float mean[max_head_dim] = {};
  float rows[quant_block * max_head_dim] = {};

  [[nodiscard]] bool stops() const { return stop != nullptr && stop->wanted(); }
  [[nodiscard]] std::int64_t blocks() const { return (problem.rows + quant_block - 1) / quant_block; }

  [[nodiscard]] QuantizeRows block(std::int64_t n) {
    const std::int64_t first = n * quant_block;
    return rows_at(first, std::min<std::int64_t>(quant_block, problem.rows - first));
  }
  [[nodiscard]] QuantizeRows rows_at(std::int64_t first, std::int64_t count) {
    return {.data = element(problem.x, b, first, head),
            .dtype = problem.x.dtype,
            .stride = problem.x.row_stride,
            .rows = static_cast<int>(count),
            .dim = static_cast<int>(problem.head_dim),
            .mean = problem.mean.given() ? mean : nullptr,
            .rotate = problem.rotate,
            .scratch = rows};
  }

  void find_mean() {
    const MeanKeys keys(problem.rows, problem.sampled_mean);
    double sums[max_head_dim] = {};
    for (std::int64_t n = 0; n < blocks() && !stops(); n += keys.step()) {
      float in_block[max_head_dim] = {};
      keys.add(kernel, n, in_block,
               [this](std::int64_t first, std::int64_t count) { return rows_at(first, count); });
      for (std::int64_t c = 0; c < problem.head_dim; ++c) sums[c] += static_cast<double>(in_block[c]);
    }
    for (std::int64_t c = 0; c < problem.head_dim; ++c) {
      mean[c] = problem.rows > 0 ? static_cast<float>(sums[c] / static_cast<double>(keys.count())) : 0.0F;
    }
  }

  [[nodiscard]] float largest() {
    float result = 0.0F;
    for (std::int64_t n = 0; n < blocks() && !stops(); ++n) {
      result = std::max(result, kernel.largest(block(n)));
    }
    return result;
  }

  /// Quantized values, mean, and scales of blocks or rows; returns the scale that a group of the whole head
  /// has (NaN once an s8 block holds a NaN).
  float write(float largest_of_group) {
    float whole = 0.0F;
    float scales[quant_block];
    for (std::int64_t n = 0; n < blocks() && !stops(); ++n) {
      const QuantizeRows from = block(n);
      const std::int64_t first = n * quant_block;
      kernel.quantize(from, {.type = problem.codes.dtype == DType::s8 ? OperandType::s8 : OperandType::e4m3,
                             .group = problem.group,
                             .largest = largest_of_group,
                             .out = element<std::uint8_t>(problem.codes, b, first, head),
                             .out_stride = problem.codes.row_stride,
                             .scales = scales,
                             .nan_markers = problem.nan_markers && problem.group == ScaleGroup::block});
      if (problem.group == ScaleGroup::row) {
        for (int i = 0; i < from.rows; ++i) *scale(first + i) = scales[i];
      } else if (problem.group == ScaleGroup::block) {
        const bool marked = std::any_of(scales, scales + from.rows, [](float s) { return std::signbit(s); });
        *scale(n) = marked ? -std::abs(scales[0]) : scales[0];
      }
      if (!std::isnan(whole)) whole = scales[0];
    }
    if (problem.mean.given()) {
      std::copy(mean, mean + problem.head_dim,
                static_cast<float*>(problem.mean.data) + problem.mean.offset(b, 0, head));
    }
    return whole;
  }

  [[nodiscard]] float* scale(std::int64_t at) const {
    return static_cast<float*>(problem.scales.data) + problem.scales.offset(b, at, head);
  }
};

}  // namespace

void quantize(const QuantizeProblem& problem, Target target, int wanted_threads, Stop* stop) {
  const QuantizeKernel& kernel = kernels(target).quantize;
  const std::int64_t heads = problem.batch * problem.heads;
  // No more than there are heads: the calling thread, which alone asks whether to stop, then has one too.
  const int threads = static_cast<int>(std::clamp<std::int64_t>(heads, 1, usable_threads(wanted_threads)));
  const auto head_at = [&](std::int64_t n) {
    Head h{.problem = problem,
           .kernel = kernel,
           .stop = stop,
           .b = n / problem.heads,
           .head = n % problem.heads};
    if (problem.mean.given()) h.find_mean();
    return h;
  };
  float largest = 0.0F;
  if (problem.group == ScaleGroup::tensor) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(max : largest)
    for (std::int64_t n = 0; n < heads; ++n) largest = std::max(largest, head_at(n).largest());
  }
  float scale = 0.0F;
  bool has_nan = false;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(max                   \
                                                                             : scale) reduction(|| \
                                                                                                : has_nan)
  for (std::int64_t n = 0; n < heads; ++n) {
    Head h = head_at(n);
    const float whole = h.write(problem.group == ScaleGroup::head ? h.largest() : largest);
    if (problem.group == ScaleGroup::head) *h.scale(0) = whole;
    has_nan = has_nan || std::isnan(whole);
    scale = std::max(scale, std::isnan(whole) ? 0.0F : whole);
  }
  if (problem.group == ScaleGroup::tensor) {
    *static_cast<float*>(problem.scales.data) = has_nan ? std::nanf("") : scale;
  }
}

}  // namespace tandem::cpu
