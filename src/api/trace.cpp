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
  if (p.causal_by_sequence.given()) text += " causal_by_sequence";
  if (p.softcap > 0.0F) text += " softcap";
  if (p.sink != nullptr) text += " sink";
  if (p.precision != Precision::exact) text += fmt::format(" {}", name_of(p.precision));
  if (p.deterministic && backward) text += " deterministic";
  return text;
}

std::string summary(const QuantizeProblem& problem) {
  const char* const groups[] = {"tensor", "head", "block", "row", "channel"};
  std::string text = fmt::format("quantize {} to {} b{} n{} h{} d{} {}", name_of(problem.x.dtype),
                                 name_of(problem.codes.dtype), problem.batch, problem.rows, problem.heads,
                                 problem.head_dim, groups[static_cast<int>(problem.group)]);
  if (problem.rotate) text += " hadamard";
  if (problem.mean.given()) text += " mean";
  if (problem.cos.given()) text += " rotary";
  return text;
}

std::string summary(const AppendProblem& problem) {
  std::string text = fmt::format("append {} to {} b{} n{} h{} d{}/{}", name_of(problem.k_new.dtype),
                                 name_of(problem.k_cache.dtype), problem.batch, problem.rows_new,
                                 problem.heads_kv, problem.head_dim_k, problem.head_dim_v);
  if (problem.slot_mapping.given()) text += " slots";
  if (problem.cu_seqlens_new.given()) text += " packed";
  if (problem.pages.given()) text += " paged";
  if (problem.cos.given()) text += " rotary";
  return text;
}

std::string summary(const MergeProblem& problem) {
  return fmt::format("merge {} to {} parts {} b{} n{} h{} d{}", name_of(problem.parts.front().out.dtype),
                     name_of(problem.out.dtype), problem.parts.size(), problem.batch, problem.rows,
                     problem.heads, problem.head_dim);
}

bool Trace::ranges_are_watched() {
  return gpu::ranges_are_watched();
}

bool Trace::is_logged() {
  return logs(LogLevel::debug);
}

void Trace::begin(const std::string& text) const {
  log(LogLevel::debug, "{}", text);
  if (range_) gpu::begin_range("tandem " + text);
}

Trace::~Trace() {
  if (range_) gpu::end_range();
}

}  // namespace tandem
