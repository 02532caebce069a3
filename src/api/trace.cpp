#include "api/trace.hpp"

#include <algorithm>

#include "gpu/nvtx.hpp"
#include "ops/backward/launch.hpp"
#include "ops/eight_bit/launch.hpp"
#include "ops/eight_bit_backward/launch.hpp"
#include "ops/forward/launch.hpp"
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
  if (p.indices.given()) text += fmt::format(" topk {}", p.indices.count);
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

namespace {

CallKind kind_of_steps(const Plan& plan) {
  const gpu::KernelConfig& config = plan.gpu->config;
  const bool backward = plan.facts->problem.pass == Pass::backward;
  const auto entry = [](const auto& c) { return gpu::kernel_of(c).entry; };
  const char* kernel =
      std::holds_alternative<EightBitBackwardConfig>(config) ? gpu::kernels::eight_bit_backward.entry
      : backward                                             ? gpu::visit_backward(config, entry)
      : std::holds_alternative<EightBitConfig>(config)       ? gpu::kernels::eight_bit_forward.entry
                                                             : gpu::visit_forward(config, entry);
  const char* family = plan.facts->family == Family::sm90 ? "sm90" : "sm80";
  return {.operation = backward ? "backward" : "forward",
          .backend = "cuda",
          .family = plan.facts->portable.empty() ? family : "portable",
          .kernel = plan.gpu->list.empty() ? "none" : kernel};
}

/// For calls whose kernel is called as the operation is, and is written for any GPU.
CallKind plain_kind(const char* operation, Device device) {
  if (device.kind == Device::Kind::cuda) return {operation, "cuda", "common", operation};
  return {operation, "cpu", cpu::name_of(cpu::best_target()), operation};
}

/// Pairs of query and key of a head, without a loop over queries: no mask but causal and a window's width.
std::int64_t pairs_of(const Problem& p, std::int64_t rows_q, std::int64_t rows_k) {
  std::int64_t pairs = rows_q * rows_k;
  if (p.window_right == 0) pairs = rows_q <= rows_k ? pairs - rows_q * rows_q / 2 : rows_k * rows_k / 2;
  if (p.window_left < 0 || p.window_right < 0) return pairs;
  return std::min(pairs, rows_q * (p.window_left + p.window_right + 1));
}

std::uint64_t bytes_of(std::int64_t elements, const Operand& operand) {
  return operand.given() ? static_cast<std::uint64_t>(elements) * size_of(operand.dtype) : 0;
}

}  // namespace

CallKind kind_of(const Plan& plan) {
  if (plan.gpu) return kind_of_steps(plan);
  // As the plan's variant has them.
  constexpr std::array<std::pair<const char*, const char*>, 3> names = {
      {{"forward", "forward"}, {"forward", "eight_bit_forward"}, {"backward", "backward"}}};
  const auto& [operation, kernel] = names[plan.cpu->pass.index()];
  return {operation, "cpu", cpu::name_of(plan.cpu->config.target), kernel};
}
CallKind kind_of(const QuantizeProblem& problem) {
  return plain_kind("quantize", problem.device);
}
CallKind kind_of(const AppendProblem& problem) {
  return plain_kind("append", problem.device);
}
CallKind kind_of(const MergeProblem& problem) {
  return plain_kind("merge", problem.device);
}

CallWork work_of(const Problem& p) {
  const std::int64_t sequences = std::max<std::int64_t>(p.batch, 1);
  const std::int64_t rows_q = p.packed_q ? p.rows_q / sequences : p.rows_q;
  const std::int64_t rows_k = p.indices.given() ? p.indices.count
                              : p.packed_k      ? p.rows_k / sequences
                                                : p.rows_k;
  const std::int64_t width = p.head_dim_qk + p.head_dim_v;
  const std::int64_t operations = 2 * pairs_of(p, rows_q, rows_k) * width * p.heads_q * p.batch;
  const std::int64_t queries = rows_q * p.heads_q * p.batch;
  const std::int64_t keys = rows_k * p.heads_kv * p.batch;
  const std::uint64_t bytes = bytes_of(queries * p.head_dim_qk, p.q) + bytes_of(keys * p.head_dim_qk, p.k) +
                              bytes_of(keys * p.head_dim_v, p.v) + bytes_of(queries * p.head_dim_v, p.out);
  // Backward has five products in place of two, and a gradient for each tensor.
  if (p.pass == Pass::backward)
    return {.bytes = 2 * bytes, .operations = static_cast<std::uint64_t>(operations) / 2 * 5};
  return {.bytes = bytes, .operations = static_cast<std::uint64_t>(operations)};
}
CallWork work_of(const QuantizeProblem& p) {
  const std::int64_t elements = p.batch * p.rows * p.heads * p.head_dim;
  return {.bytes = bytes_of(elements, p.x) + bytes_of(elements, p.codes)};
}
CallWork work_of(const AppendProblem& p) {
  const std::int64_t rows = p.tokens() * p.heads_kv;
  const std::int64_t queries = p.tokens() * p.heads_q * p.head_dim_k;
  return {.bytes = bytes_of(rows * p.head_dim_k, p.k_new) + bytes_of(rows * p.head_dim_k, p.k_cache) +
                   bytes_of(rows * p.head_dim_v, p.v_new) + bytes_of(rows * p.head_dim_v, p.v_cache) +
                   bytes_of(queries, p.q) + bytes_of(queries, p.q_out)};
}
CallWork work_of(const MergeProblem& p) {
  const std::int64_t elements = p.count() * p.head_dim;
  std::uint64_t bytes = bytes_of(elements, p.out);
  for (const MergePart& part : p.parts) bytes += bytes_of(elements, part.out);
  return {.bytes = bytes};
}

bool Trace::ranges_are_watched() {
  return gpu::ranges_are_watched();
}

bool Trace::is_logged() {
  return logs(LogLevel::debug);
}

void Trace::begin(std::string text) {
  log(LogLevel::debug, "{}", text);
  if (range_) gpu::begin_range("tandem " + text);
  if (sampled_) summary_ = std::move(text);
  start_ = ticks();
}

Trace::~Trace() {
  const std::uint64_t spent = ticks() - start_;
  count_call(kind_, work_, spent);
  if (range_) gpu::end_range();
  if (!sampled_) return;
  send_event({.operation = kind_.operation,
              .subject = summary_,
              .backend = kind_.backend,
              .family = kind_.family,
              .kernel = kind_.kernel,
              .plan = plan_,
              .nanoseconds = nanoseconds_of(spent)});
}

}  // namespace tandem
