#include "api/explain.hpp"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "api/trace.hpp"

namespace tandem {
namespace {

std::string bound(std::int64_t window) {
  return window < 0 ? "unbounded" : fmt::format("{}", window);
}

std::string mask(const Problem& p) {
  if (p.causal_by_sequence.given()) {
    return fmt::format("window, left {}, right 0 where causal_by_sequence is not 0 and {} elsewhere",
                       bound(p.window_left), bound(p.window_right));
  }
  if (p.window_left < 0 && p.window_right < 0) return "none";
  if (p.window_left < 0 && p.window_right == 0) return "causal";
  return fmt::format("window, left {}, right {}", bound(p.window_left), bound(p.window_right));
}

std::string features(const Problem& p) {
  std::vector<std::string> names;
  if (p.cu_seqlens_q.given()) names.emplace_back("cu_seqlens_q");
  if (p.cu_seqlens_k.given()) names.emplace_back("cu_seqlens_k");
  if (p.seqused_q.given()) names.emplace_back("seqused_q");
  if (p.seqused_k.given()) names.emplace_back("seqused_k");
  if (p.pages.given()) {
    names.push_back(fmt::format("page_table ({} pages of {} rows)", p.pages.count, p.pages.page_size));
  }
  if (p.leftpad_k.given()) names.emplace_back("leftpad_k");
  if (p.cache_batch_idx.given()) names.emplace_back("cache_batch_idx");
  if (p.indices.given()) names.push_back(fmt::format("indices (topk {})", p.indices.count));
  if (p.sink != nullptr) names.emplace_back("sink");
  if (p.lse.given()) names.emplace_back("lse");
  if (p.dlse.given()) names.emplace_back("dlse");
  if (p.max_logits.given()) names.emplace_back("max_logits");
  if (p.dsink != nullptr) names.emplace_back("dsink");
  if (p.gate.given()) names.emplace_back("gate");
  if (p.dgate.given()) names.emplace_back("dgate");
  if (p.q_scale.data != nullptr || p.k_scale.data != nullptr || p.v_scale.data != nullptr)
    names.emplace_back("scales");
  if (p.pass == Pass::forward && p.out.dtype == DType::f32 && p.q.dtype != DType::f32)
    names.emplace_back("out in f32");
  if (p.deterministic) names.emplace_back("deterministic");
  if (p.dropout.on) names.push_back(fmt::format("dropout {}", p.dropout.p));
  for (std::size_t n = 0; n < p.captured_gradients.size(); ++n) {
    if (p.captured_gradients[n].given()) names.push_back(fmt::format("gradient of t{}", n));
  }
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string explain(const Problem& p, const Plan& plan, const Execution& execution) {
  std::string text =
      fmt::format("{} {}: batch {}, {} {}, {} {}, heads_q {}, heads_kv {}, head_dim {}, head_dim_v {}\n",
                  p.pass == Pass::forward ? "forward" : "backward", dtypes(p), p.batch,
                  p.packed_q ? "total_q" : "seqlen_q", p.rows_q, p.packed_k ? "total_k" : "seqlen_k",
                  p.rows_k, p.heads_q, p.heads_kv, p.head_dim_qk, p.head_dim_v);
  text += fmt::format("scale {}, softcap {}, mask: {}, also: {}\n", p.scale,
                      p.softcap == 0.0F ? "off" : fmt::format("{}", p.softcap), mask(p), features(p));
  if (p.score_function != nullptr) text += fmt::format("score function: {}\n", p.score_function->text());
  if (p.window_of_mask) text += "mask function: its bounds of the window are part of the mask above\n";
  if (p.mask_function != nullptr)
    text +=
        fmt::format("mask function{}: {}\n", p.window_of_mask ? ", the rest" : "", p.mask_function->text());
  for (const std::string& reason : reasons(p, plan, execution)) text += reason + '\n';
  text += fmt::format("workspace {} bytes\n", plan.workspace_bytes);
  return text;
}

}  // namespace tandem
