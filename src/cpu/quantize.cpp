#include "cpu/quantize.hpp"
#include "cpu/mean.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/forward_kernels.hpp"
#include "cpu/operand.hpp"

namespace tandem::cpu {
namespace {

constexpr std::int64_t max_head_dim = 256;

/// One head, with the memory that its rows are prepared in: 128 KiB of the thread's stack.
struct Head {
  const QuantizeJob& job;
  const QuantizeKernel& kernel;
  std::int64_t b;
  std::int64_t head;
  float mean[max_head_dim] = {};
  float rows[quant_block * max_head_dim] = {};

  [[nodiscard]] std::int64_t blocks() const { return (job.rows + quant_block - 1) / quant_block; }

  [[nodiscard]] QuantizeRows block(std::int64_t n) {
    const std::int64_t first = n * quant_block;
    return rows_at(first, std::min<std::int64_t>(quant_block, job.rows - first));
  }
  [[nodiscard]] QuantizeRows rows_at(std::int64_t first, std::int64_t count) {
    return {.data = element(job.x, b, first, head),
            .dtype = job.x.dtype,
            .stride = job.x.row_stride,
            .rows = static_cast<int>(count),
            .dim = static_cast<int>(job.head_dim),
            .mean = job.mean.given() ? mean : nullptr,
            .rotate = job.rotate,
            .scratch = rows,
            .rotary = rotary(first)};
  }

  [[nodiscard]] RotaryRows rotary(std::int64_t first) const {
    if (!job.cos.given()) return {};
    return {.cos = static_cast<const float*>(job.cos.data) + job.cos.offset(0, first, 0),
            .sin = static_cast<const float*>(job.sin.data) + job.sin.offset(0, first, 0),
            .cos_stride = job.cos.row_stride,
            .sin_stride = job.sin.row_stride,
            .dim = static_cast<int>(job.rotary_dim),
            .interleaved = job.interleaved};
  }

  void find_mean() {
    const MeanKeys keys(job.rows, job.sampled_mean);
    double sums[max_head_dim] = {};
    for (std::int64_t n = 0; n < blocks(); n += keys.step()) {
      float in_block[max_head_dim] = {};
      keys.add(kernel, n, in_block,
               [this](std::int64_t first, std::int64_t count) { return rows_at(first, count); });
      for (std::int64_t c = 0; c < job.head_dim; ++c) sums[c] += static_cast<double>(in_block[c]);
    }
    for (std::int64_t c = 0; c < job.head_dim; ++c) {
      mean[c] = job.rows > 0 ? static_cast<float>(sums[c] / static_cast<double>(keys.count())) : 0.0F;
    }
  }

  [[nodiscard]] float largest() {
    float result = 0.0F;
    for (std::int64_t n = 0; n < blocks(); ++n) result = std::max(result, kernel.largest(block(n)));
    return result;
  }

  /// Codes, mean, and scales of blocks or rows; returns the scale that a group of the whole head has (NaN
  /// once an s8 block holds a NaN).
  float write(float largest_of_group) {
    float whole = 0.0F;
    float scales[quant_block];
    for (std::int64_t n = 0; n < blocks(); ++n) {
      const QuantizeRows from = block(n);
      const std::int64_t first = n * quant_block;
      kernel.quantize(from, {.codes = job.codes.dtype == DType::s8 ? Codes::s8 : Codes::e4m3,
                             .group = job.group,
                             .largest = largest_of_group,
                             .out = element<std::uint8_t>(job.codes, b, first, head),
                             .out_stride = job.codes.row_stride,
                             .scales = scales,
                             .nan_markers = job.nan_markers && job.group == ScaleGroup::block});
      if (job.group == ScaleGroup::row) {
        for (int i = 0; i < from.rows; ++i) *scale(first + i) = scales[i];
      } else if (job.group == ScaleGroup::block) {
        const bool marked = std::any_of(scales, scales + from.rows, [](float s) { return std::signbit(s); });
        *scale(n) = marked ? -std::abs(scales[0]) : scales[0];
      }
      if (!std::isnan(whole)) whole = scales[0];
    }
    if (job.mean.given()) {
      std::copy(mean, mean + job.head_dim, static_cast<float*>(job.mean.data) + job.mean.offset(b, 0, head));
    }
    return whole;
  }

  [[nodiscard]] float* scale(std::int64_t at) const {
    return static_cast<float*>(job.scales.data) + job.scales.offset(b, at, head);
  }
};

}  // namespace

void quantize(const QuantizeJob& job, Target target, int wanted_threads) {
  const int threads = usable_threads(wanted_threads);
  const QuantizeKernel& kernel = quantize_kernel(target);
  const std::int64_t heads = job.batch * job.heads;
  const auto head_at = [&](std::int64_t n) {
    Head h{.job = job, .kernel = kernel, .b = n / job.heads, .head = n % job.heads};
    if (job.mean.given()) h.find_mean();
    return h;
  };
  float largest = 0.0F;
  if (job.group == ScaleGroup::tensor) {
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
    const float whole = h.write(job.group == ScaleGroup::head ? h.largest() : largest);
    if (job.group == ScaleGroup::head) *h.scale(0) = whole;
    has_nan = has_nan || std::isnan(whole);
    scale = std::max(scale, std::isnan(whole) ? 0.0F : whole);
  }
  if (job.group == ScaleGroup::tensor) {
    *static_cast<float*>(job.scales.data) = has_nan ? std::nanf("") : scale;
  }
}

}  // namespace tandem::cpu
