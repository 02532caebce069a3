#include "plan/checks.hpp"

#include <climits>
#include <tuple>

#include "plan/unsupported.hpp"
#include "problem/mixed.hpp"

namespace tandem {
namespace {

/// Heads of more than 256 dimensions are the 16-bit forward kernel's alone.
void check_wide_heads(const Problem& p) {
  const bool forward = p.pass == Pass::forward && p.precision == Precision::exact;
  const std::int64_t most_qk = forward ? max_gpu_wide_head_dim_qk : max_gpu_head_dim;
  const std::int64_t most_v = forward ? max_gpu_wide_head_dim_v : max_gpu_head_dim;
  const char* const kernels = p.pass == Pass::backward          ? "the GPU kernels of gradients"
                              : p.precision != Precision::exact ? "the 8-bit GPU kernels"
                                                                : "the GPU kernels";
  for (const auto& [name, head_dim, most] :
       {std::tuple{"head_dim", p.head_dim_qk, most_qk}, std::tuple{"head_dim_v", p.head_dim_v, most_v}}) {
    if (head_dim <= most) continue;
    unsupported("{} {} is above {}, the most of {}; copy the tensors to the CPU, which takes up to {}", name,
                head_dim, most, kernels, max_head_dim);
  }
  if (p.mixed() || has_exact_quantized_inputs(p)) {
    unsupported(
        "head dimensions {} and {} with k and v in {} have no GPU kernel, those up to {} do; keep k and "
        "v in {}, or copy the tensors to the CPU",
        p.head_dim_qk, p.head_dim_v, p.k.dtype, max_gpu_head_dim, p.mixed() ? p.q.dtype : p.out.dtype);
  }
}

/// What the kernels of gradients by 8-bit products cannot do.
void check_gradients(const Problem& p) {
  if (p.head_dim_qk != p.head_dim_v || (p.head_dim_qk != 64 && p.head_dim_qk != 128)) {
    unsupported(
        "backward_precision {} has GPU kernels for head dimensions 64 and 128 alone, and the head dimensions "
        "are {} and {}; leave it out, for gradients in 16 bits, or copy the tensors to the CPU",
        p.backward_precision, p.head_dim_qk, p.head_dim_v);
  }
  if (p.strict) {
    unsupported(
        "backward_precision {} with strict has no GPU kernel; leave one of both out, or copy the tensors to "
        "the CPU",
        p.backward_precision);
  }
}

/// What the kernels of 8-bit products cannot do.
void check_eight_bits(const Problem& p) {
  if (p.out.dtype == DType::f32) {
    unsupported(
        "out in f32 with precision {} has no GPU kernel; make it bf16 or f16, leave the precision exact, or "
        "copy the tensors to the CPU",
        p.precision);
  }
  if (p.backward_precision != Precision::exact) check_gradients(p);
  if (p.causal_by_sequence.given()) {
    unsupported(
        "causal_by_sequence with precision {} has no GPU kernel; leave the precision exact, or copy the "
        "tensors to the CPU",
        p.precision);
  }
}

/// What they cannot do beside functions.
void check_functions(const Problem& p) {
  if (has_wide_heads(p)) {
    unsupported(
        "a score or mask function, or dropout, with head dimensions above {} has no GPU kernel; copy the "
        "tensors to the CPU",
        max_gpu_head_dim);
  }
  if (is_eight_bit(p.k.dtype) && p.of_cache()) {
    unsupported(
        "a score or mask function, or dropout, on a cache in {} has no GPU kernel; keep the cache in {}, or "
        "copy the "
        "tensors to the CPU",
        p.k.dtype, p.mixed() ? p.q.dtype : p.out.dtype);
  }
  if (p.causal_by_sequence.given()) {
    unsupported(
        "causal_by_sequence with a score or mask function, or dropout, has no GPU kernel; let a mask "
        "function "
        "read the mask of each batch entry, or copy the tensors to the CPU");
  }
  if (p.wants_captured_gradients() && p.deterministic) {
    unsupported(
        "captured_gradients are added up in any order on a GPU; leave deterministic or captured_gradients "
        "out, or copy the tensors to the CPU");
  }
  for (const Function* f : {p.score_function, p.mask_function}) {
    if (f == nullptr) continue;
    for (std::size_t n = 0; n < f->captured().size(); ++n) {
      const ConstTensor& t = f->captured()[n];
      for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
        if (t.shape[d] <= INT_MAX) continue;
        unsupported("dimension {} of captured tensor t{} has size {}, above the GPU kernels' {}; split it", d,
                    n, t.shape[d], INT_MAX);
      }
    }
  }
}

/// The largest logits are the 16-bit forward kernel's, which finds them, and those of products in s8.
void check_max_logits(const Problem& p) {
  const char* const what = p.precision == Precision::fp8 ? "precision fp8"
                           : has_wide_heads(p)           ? "head dimensions above 256"
                           : p.has_function()            ? "a score or mask function, or dropout,"
                                                         : nullptr;
  if (what == nullptr) return;
  unsupported("max_logits with {} has no GPU kernel; leave it out, or copy the tensors to the CPU", what);
}

/// An output gate is the 16-bit kernels'.
void check_gate(const Problem& p) {
  const char* const what = p.pass == Pass::forward && p.precision != Precision::exact ? "an 8-bit precision"
                           : has_wide_heads(p) ? "head dimensions above 256"
                                               : nullptr;
  if (what == nullptr) return;
  unsupported("gate with {} has no GPU kernel; multiply out by its sigmoid, or copy the tensors to the CPU",
              what);
}

}  // namespace

void check_problem(const Problem& p) {
  if (p.indices.given()) {
    unsupported(
        "indices have no GPU kernel yet; on a cache tandem.flash_mla takes them, as pages of one row, or "
        "copy the tensors to the CPU");
  }
  if (p.precision != Precision::exact) check_eight_bits(p);
  if (!p.quantized_inputs() && p.q.dtype != DType::f16 && p.q.dtype != DType::bf16) {
    unsupported("{} has no GPU kernel; convert q, k and v to f16 or bf16, or copy them to the CPU",
                p.q.dtype);
  }
  if (has_wide_heads(p)) check_wide_heads(p);
  if (p.pass == Pass::forward && p.max_logits.given()) check_max_logits(p);
  if (p.gate.given()) check_gate(p);
  for (const std::int64_t extent : {p.rows_q, p.rows_k, p.heads_q, p.batch, p.cache_batch}) {
    if (extent > INT_MAX)
      unsupported("an extent of {} is above the GPU kernels' {}; split the call", extent, INT_MAX);
  }
  if (p.has_function()) check_functions(p);
  if (has_exact_quantized_inputs(p) && p.out.dtype == DType::f32) {
    unsupported(
        "out in f32 of q in {} with precision exact has no GPU kernel; make it bf16 or f16, or copy the "
        "tensors to the CPU",
        p.q.dtype);
  }
}

namespace {

/// 8-bit k and v of a cache are not copied: those that TMA cannot read are an error.
void check_cache(const Problem& asked, const CallFacts& facts) {
  if (facts.unreadable == nullptr || !asked.of_cache()) return;
  unsupported(
      "{} of a cache in {} cannot be read by TMA: {}; lay it out so that it can, keep the cache in {}, or "
      "copy the tensors to the CPU",
      facts.unreadable, asked.k.dtype, facts.objection, facts.problem.q.dtype);
}

/// e4m3 queries by the exact formula: 16-bit ones that the forward kernel takes beside e4m3 k and v.
void check_widened(const Problem& asked, const CallFacts& facts) {
  if (!facts.dequantizes) return;
  unsupported(
      "{} with precision exact has no GPU kernel for more than {} queries a sequence on k and v that are no "
      "cache, for functions, or for rows that are no multiples of 16 bytes; pass precision fp8, or copy the "
      "tensors to the CPU",
      asked.q.dtype, few);
}

/// What the kernels that every GPU from Ampere on runs cannot do yet.
void check_sm80(const Problem& asked, const CallFacts& facts) {
  const char* const missing = asked.precision != Precision::exact ? "no 8-bit kernel"
                              : is_eight_bit(asked.k.dtype)       ? "no kernel for k and v of 8 bits"
                              : facts.wide_heads ? "no kernel for heads of more than 256 dimensions"
                              : asked.pass == Pass::forward && asked.max_logits.given()
                                  ? "no kernel that finds max_logits"
                                  : nullptr;
  if (missing == nullptr) return;
  unsupported("{} takes the kernels sm80 ({}), of which there is {} yet; {}copy the tensors to the CPU",
              gpu::called(asked.device.index), why_family(facts), missing,
              facts.device.wished ? "unset TANDEM_KERNELS, or " : "");
}

}  // namespace

void check_family(const Problem& asked, const CallFacts& facts, int sm_limit) {
  check_cache(asked, facts);
  if (facts.family == Family::sm80) check_sm80(asked, facts);
  if (facts.widens_queries) check_widened(asked, facts);
  const bool limited = sm_limit > 0 && sm_limit < facts.device.multiprocessors;
  if (limited && facts.family == Family::sm80 && asked.pass == Pass::forward) {
    unsupported(
        "sm_limit is {}, but the forward kernels sm80, which {} takes, have a CTA for each tile; leave it "
        "out",
        sm_limit, gpu::called(asked.device.index));
  }
}

}  // namespace tandem
