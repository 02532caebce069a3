#include "api/trace.hpp"

#include "gpu/nvtx.hpp"
#include "problem/log.hpp"

namespace tandem {

std::string dtypes(const Problem& p) {
  if (!p.mixed()) return name_of(p.q.dtype);
  return fmt::format("{} on {}", name_of(p.q.dtype), name_of(p.k.dtype));
}

std::string summary(const Problem& p) {
  const bool backward = p.pass == Pass::backward;
  std::string text =
      fmt::format("{} {} b{} q{} k{} h{}/{} d{}/{}", backward ? "backward" : "forward", dtypes(p), p.batch,
                  p.rows_q, p.rows_k, p.heads_q, p.heads_kv, p.head_dim_qk, p.head_dim_v);
  if (p.packed_q || p.packed_k) text += " packed";
  if (p.window_left >= 0 || p.window_right > 0) {
    text += fmt::format(" window {},{}", p.window_left, p.window_right);
  } else if (p.window_right == 0) {
    text += " causal";
  }
  if (p.softcap > 0.0F) text += " softcap";
  if (p.sink != nullptr) text += " sink";
  if (p.precision != Precision::exact) text += fmt::format(" {}", name_of(p.precision));
  if (p.deterministic && backward) text += " deterministic";
  return text;
}

std::string summary(const QuantizeJob& job) {
  const char* const groups[] = {"tensor", "head", "block", "row", "channel"};
  std::string text =
      fmt::format("quantize {} to {} b{} n{} h{} d{} {}", name_of(job.x.dtype), name_of(job.codes.dtype),
                  job.batch, job.rows, job.heads, job.head_dim, groups[static_cast<int>(job.group)]);
  if (job.rotate) text += " hadamard";
  if (job.mean.given()) text += " mean";
  if (job.cos.given()) text += " rotary";
  return text;
}

Trace::Trace(const Problem& problem) : range_(gpu::ranges_are_watched()) {
  if (range_ || logs(LogLevel::debug)) begin(summary(problem));
}

Trace::Trace(const QuantizeJob& job) : range_(gpu::ranges_are_watched()) {
  if (range_ || logs(LogLevel::debug)) begin(summary(job));
}

void Trace::begin(const std::string& text) const {
  log(LogLevel::debug, "{}", text);
  if (range_) gpu::begin_range("tandem " + text);
}

Trace::~Trace() {
  if (range_) gpu::end_range();
}

}  // namespace tandem
