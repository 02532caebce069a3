#include "changes.hpp"

namespace tandem::harness {

void change(Case& c, const Changes& changes) {
  const auto set = [](const auto& value, auto&... fields) {
    if (value) ((fields = *value), ...);
  };
  const auto set_list = [](const std::vector<std::int64_t>& list, std::vector<std::int64_t>& field) {
    if (!list.empty()) field = list;
  };
  set(changes.dtype, c.dtype);
  set(changes.out_dtype, c.out_dtype);
  set(changes.key_dtype, c.key_dtype);
  set(changes.batch, c.batch);
  set(changes.heads, c.heads_q, c.heads_kv);
  set(changes.heads_q, c.heads_q);
  set(changes.heads_kv, c.heads_kv);
  set(changes.head_dim, c.head_dim_qk, c.head_dim_v);
  set(changes.head_dim_qk, c.head_dim_qk);
  set(changes.head_dim_v, c.head_dim_v);
  set(changes.seqlen, c.seqlen_q, c.seqlen_k);
  set(changes.seqlen_q, c.seqlen_q);
  set(changes.seqlen_k, c.seqlen_k);
  set(changes.packed, c.packed_q, c.packed_k);
  set(changes.packed_q, c.packed_q);
  set(changes.packed_k, c.packed_k);
  set_list(changes.lengths_q, c.lengths_q);
  set_list(changes.lengths_k, c.lengths_k);
  set(changes.slack_q, c.slack_q);
  set(changes.slack_k, c.slack_k);
  set_list(changes.used_q, c.used_q);
  set_list(changes.used_k, c.used_k);
  set(changes.metadata, c.metadata);
  set(changes.page_size, c.page_size);
  set(changes.v_in_k, c.v_in_k);
  set_list(changes.leftpad, c.leftpad);
  set(changes.topk, c.topk);
  set(changes.topk_by_head, c.topk_by_head);
  set(changes.topk_lengths, c.topk_lengths);
  set(changes.scale, c.options.scale);
  set(changes.softcap, c.options.softcap);
  set(changes.causal, c.options.causal);
  set(changes.window, c.options.window_left, c.options.window_right);
  set(changes.window_left, c.options.window_left);
  set(changes.window_right, c.options.window_right);
  set(changes.split_size, c.options.split_size);
  set(changes.deterministic, c.options.deterministic);
  set(changes.check, c.options.check);
  set(changes.precision, c.options.precision);
  set(changes.strict, c.options.strict);
  set(changes.score_function, c.score_function);
  set(changes.mask_function, c.mask_function);
  set(changes.sink, c.sink);
  set(changes.gate, c.gate);
  set(changes.lse, c.lse);
  set(changes.dlse, c.dlse);
  set(changes.unwanted, c.unwanted);
  set(changes.scales, c.scales);
  set(changes.f32_out, c.f32_out);
  set(changes.amplitude, c.amplitude);
  set(changes.seed, c.seed);
  set(changes.threads, c.threads);
  set(changes.workspace, c.workspace);
}

}  // namespace tandem::harness
