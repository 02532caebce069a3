// A case by what is special about it: the names of its fields, and of its options, on one line.
#pragma once

#include <utility>

#include "call.hpp"

namespace tandem::harness {

/// What is not given, or is an empty list, stays as it is. `heads`, `head_dim`, `seqlen`, `packed` and
/// `window` are both of their two fields.
struct Changes {
  std::optional<DType> dtype = {}, out_dtype = {}, key_dtype = {};
  std::optional<std::int64_t> batch = {}, heads = {}, heads_q = {}, heads_kv = {};
  std::optional<std::int64_t> head_dim = {}, head_dim_qk = {}, head_dim_v = {}, seqlen = {}, seqlen_q = {},
                              seqlen_k = {};
  std::optional<bool> packed = {}, packed_q = {}, packed_k = {};
  std::vector<std::int64_t> lengths_q = {}, lengths_k = {};
  std::optional<std::int64_t> slack_q = {}, slack_k = {};
  std::vector<std::int64_t> used_q = {}, used_k = {};
  std::optional<DType> metadata = {};
  std::optional<std::int64_t> page_size = {};
  std::optional<bool> v_in_k = {};
  std::vector<std::int64_t> leftpad = {};
  std::optional<std::int64_t> topk = {};
  std::optional<bool> topk_by_head = {}, topk_lengths = {};
  std::optional<float> scale = {}, softcap = {};
  std::optional<bool> causal = {};
  std::optional<std::int64_t> window = {}, window_left = {}, window_right = {}, split_size = {};
  std::optional<bool> deterministic = {}, check = {};
  std::optional<Precision> precision = {};
  std::optional<bool> strict = {};
  std::optional<std::string> score_function = {}, mask_function = {};
  std::optional<bool> sink = {}, gate = {}, lse = {}, dlse = {};
  std::optional<unsigned> unwanted = {};
  std::optional<int> scales = {};
  std::optional<bool> f32_out = {};
  std::optional<double> amplitude = {};
  std::optional<std::uint64_t> seed = {};
  std::optional<int> threads = {};
  std::optional<bool> workspace = {};
};

void change(Case& c, const Changes& changes);

inline Case with(Case c, const Changes& changes) {
  change(c, changes);
  return c;
}

}  // namespace tandem::harness
