// The list of a Config's fields, once: names and values for the C++ expression that NVRTC instantiates, for
// hashes, explain and JSON. Host only.
#pragma once

#include <type_traits>

#include "kernels/config/backward.hpp"
#include "kernels/config/eight_bit.hpp"
#include "kernels/config/forward.hpp"
#include "kernels/config/pack.hpp"
#include "kernels/config/quantize.hpp"

namespace tandem {

/// The enumerators' names, as config/types.hpp and config/recipe.hpp have them.
constexpr const char* name_of(Element element) {
  return element == Element::f16 ? "f16" : "bf16";
}
constexpr const char* name_of(ScoreTransform transform) {
  switch (transform) {
    case ScoreTransform::raw: return "raw";
    case ScoreTransform::scaled: return "scaled";
    case ScoreTransform::softcap: return "softcap";
  }
  return "unknown";
}
constexpr const char* name_of(Codes codes) {
  switch (codes) {
    case Codes::e4m3: return "e4m3";
    case Codes::s8: return "s8";
    case Codes::input: return "input";
  }
  return "unknown";
}
constexpr const char* name_of(ScaleGroup group) {
  switch (group) {
    case ScaleGroup::tensor: return "tensor";
    case ScaleGroup::head: return "head";
    case ScaleGroup::block: return "block";
    case ScaleGroup::row: return "row";
    case ScaleGroup::channel: return "channel";
  }
  return "unknown";
}
template <typename Enum>
constexpr const char* type_name();
template <>
constexpr const char* type_name<Element>() {
  return "Element";
}
template <>
constexpr const char* type_name<ScoreTransform>() {
  return "ScoreTransform";
}

template <>
constexpr const char* type_name<Codes>() {
  return "Codes";
}
template <>
constexpr const char* type_name<ScaleGroup>() {
  return "ScaleGroup";
}

/// Calls f(name, field) for every field, in order. The structured binding stops the build when a field is
/// missing here.
template <typename Config, typename F>
requires std::is_same_v<std::remove_const_t<Config>, ForwardConfig>
constexpr void for_each_field(Config& config, F&& f) {
  auto& [element, head_dim_qk, head_dim_v, block_m, block_n, stages, q_stages, causal, local, transform,
         varlen, output_late, dynamic, specialised, overlap, pingpong] = config;
  f("element", element);
  f("head_dim_qk", head_dim_qk);
  f("head_dim_v", head_dim_v);
  f("block_m", block_m);
  f("block_n", block_n);
  f("stages", stages);
  f("q_stages", q_stages);
  f("causal", causal);
  f("local", local);
  f("transform", transform);
  f("varlen", varlen);
  f("output_late", output_late);
  f("dynamic", dynamic);
  f("specialised", specialised);
  f("overlap", overlap);
  f("pingpong", pingpong);
}

template <typename Config, typename F>
requires std::is_same_v<std::remove_const_t<Config>, BackwardConfig>
constexpr void for_each_field(Config& config, F&& f) {
  auto& [element, head_dim_qk, head_dim_v, block_m, block_n, cluster, q_stages, dout_stages, dq_parts,
         pingpong, staggered, causal, local, softcap, varlen, deterministic] = config;
  f("element", element);
  f("head_dim_qk", head_dim_qk);
  f("head_dim_v", head_dim_v);
  f("block_m", block_m);
  f("block_n", block_n);
  f("cluster", cluster);
  f("q_stages", q_stages);
  f("dout_stages", dout_stages);
  f("dq_parts", dq_parts);
  f("pingpong", pingpong);
  f("staggered", staggered);
  f("causal", causal);
  f("local", local);
  f("softcap", softcap);
  f("varlen", varlen);
  f("deterministic", deterministic);
}

template <typename Config, typename F>
requires std::is_same_v<std::remove_const_t<Config>, PackConfig>
constexpr void for_each_field(Config& config, F&& f) {
  auto& [paired] = config;
  f("paired", paired);
}

template <typename Config, typename F>
requires std::is_same_v<std::remove_const_t<Config>, QuantizeConfig>
constexpr void for_each_field(Config& config, F&& f) {
  auto& [element, head_dim_qk, head_dim_v, qk, pv, qk_scales, v_scales, rotate_qk, rotate_v, smooth_k, rotary,
         interleaved, varlen, vectors] = config;
  f("element", element);
  f("head_dim_qk", head_dim_qk);
  f("head_dim_v", head_dim_v);
  f("qk", qk);
  f("pv", pv);
  f("qk_scales", qk_scales);
  f("v_scales", v_scales);
  f("rotate_qk", rotate_qk);
  f("rotate_v", rotate_v);
  f("smooth_k", smooth_k);
  f("rotary", rotary);
  f("interleaved", interleaved);
  f("varlen", varlen);
  f("vectors", vectors);
}

template <typename Config, typename F>
requires std::is_same_v<std::remove_const_t<Config>, EightBitConfig>
constexpr void for_each_field(Config& config, F&& f) {
  auto& [element, qk, pv, head_dim_qk, head_dim_v, block_m, stages, q_stages, causal, local, varlen,
         row_scales, v_row_scales, rotated_v, dynamic, overlap, pingpong, parts, linear_exp2, transpose_v,
         softcap] = config;
  f("element", element);
  f("qk", qk);
  f("pv", pv);
  f("head_dim_qk", head_dim_qk);
  f("head_dim_v", head_dim_v);
  f("block_m", block_m);
  f("stages", stages);
  f("q_stages", q_stages);
  f("causal", causal);
  f("local", local);
  f("varlen", varlen);
  f("row_scales", row_scales);
  f("v_row_scales", v_row_scales);
  f("rotated_v", rotated_v);
  f("dynamic", dynamic);
  f("overlap", overlap);
  f("pingpong", pingpong);
  f("parts", parts);
  f("linear_exp2", linear_exp2);
  f("transpose_v", transpose_v);
  f("softcap", softcap);
}

}  // namespace tandem
