// The list of a Config's fields, once: names and values for the C++ expression that NVRTC instantiates, for
// hashes, explain and JSON. Host only.
#pragma once

#include <string_view>
#include <type_traits>

#include "ops/backward/sm80/config.hpp"
#include "ops/cache/config.hpp"
#include "ops/decode/config.hpp"
#include "ops/eight_bit/config.hpp"
#include "ops/forward/sm80/config.hpp"
#include "ops/latent/config.hpp"
#include "ops/pack/config.hpp"
#include "ops/quantize/config.hpp"
#include "ops/split/config.hpp"

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
constexpr const char* name_of(OperandType type) {
  switch (type) {
    case OperandType::e4m3: return "e4m3";
    case OperandType::s8: return "s8";
    case OperandType::input: return "input";
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
constexpr const char* name_of(KeySource keys) {
  switch (keys) {
    case KeySource::rows: return "rows";
    case KeySource::entries: return "entries";
    case KeySource::pages: return "pages";
    case KeySource::padded_pages: return "padded_pages";
  }
  return "unknown";
}
constexpr const char* name_of(Stored type) {
  switch (type) {
    case Stored::f32: return "f32";
    case Stored::f16: return "f16";
    case Stored::bf16: return "bf16";
    case Stored::e4m3: return "e4m3";
    case Stored::s8: return "s8";
  }
  return "unknown";
}

/// "Element": a type's name, out of that of this function. GCC writes it without the namespace, Clang with
/// it.
template <typename T>
constexpr std::string_view type_name() {
  constexpr std::string_view function = __PRETTY_FUNCTION__;
  constexpr std::size_t begin = function.find("T = ") + 4;
  const std::string_view name = function.substr(begin, function.find_first_of(";]", begin) - begin);
  return name.substr(name.rfind(':') + 1);
}
static_assert(type_name<Element>() == "Element");

template <typename T, typename U>
concept is = std::is_same_v<std::remove_const_t<T>, U>;

/// A member that has members of its own.
template <typename T>
concept is_part = std::is_class_v<std::remove_reference_t<T>>;

// for_each_member calls f(name, member) for every member of a Config or of a part of one, in order. The
// structured bindings stop the build when a member is missing here.

template <typename T, typename F>
requires is<T, Tiling>
constexpr void for_each_member(T& x, F&& f) {
  auto& [element, head_dim_qk, head_dim_v, block_m, block_n, heads_as_rows, f32_out] = x;
  f("element", element);
  f("head_dim_qk", head_dim_qk);
  f("head_dim_v", head_dim_v);
  f("block_m", block_m);
  f("block_n", block_n);
  f("heads_as_rows", heads_as_rows);
  f("f32_out", f32_out);
}

template <typename T, typename F>
requires is<T, BackwardTiling>
constexpr void for_each_member(T& x, F&& f) {
  auto& [element, head_dim_qk, head_dim_v, block_m, block_n] = x;
  f("element", element);
  f("head_dim_qk", head_dim_qk);
  f("head_dim_v", head_dim_v);
  f("block_m", block_m);
  f("block_n", block_n);
}

template <typename T, typename F>
requires is<T, Mask>
constexpr void for_each_member(T& x, F&& f) {
  auto& [causal, local, varlen, by_sequence] = x;
  f("causal", causal);
  f("local", local);
  f("varlen", varlen);
  f("by_sequence", by_sequence);
}

template <typename T, typename F>
requires is<T, ForwardSchedule>
constexpr void for_each_member(T& x, F&& f) {
  auto& [dynamic, specialised, overlap, pingpong, output_late, finds_maxima, split, invariant] = x;
  f("dynamic", dynamic);
  f("specialised", specialised);
  f("overlap", overlap);
  f("pingpong", pingpong);
  f("output_late", output_late);
  f("finds_maxima", finds_maxima);
  f("split", split);
  f("invariant", invariant);
}

template <typename T, typename F>
requires is<T, EightBitSchedule>
constexpr void for_each_member(T& x, F&& f) {
  auto& [dynamic, overlap, pingpong] = x;
  f("dynamic", dynamic);
  f("overlap", overlap);
  f("pingpong", pingpong);
}

template <typename T, typename F>
requires is<T, BackwardSchedule>
constexpr void for_each_member(T& x, F&& f) {
  auto& [pingpong, staggered, deterministic] = x;
  f("pingpong", pingpong);
  f("staggered", staggered);
  f("deterministic", deterministic);
}

template <typename T, typename F>
requires is<T, Functions>
constexpr void for_each_member(T& x, F&& f) {
  auto& [digest, score_function, mask_function, block_lists, dropout, dropout_places, captured_gradients] = x;
  f("digest", digest);
  f("score_function", score_function);
  f("mask_function", mask_function);
  f("block_lists", block_lists);
  f("dropout", dropout);
  f("dropout_places", dropout_places);
  f("captured_gradients", captured_gradients);
}

template <typename T, typename F>
requires is<T, ForwardConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, stages, q_stages, mask, keys, transform, schedule, key_type, row_scales, functions] = x;
  f("tiling", tiling);
  f("stages", stages);
  f("q_stages", q_stages);
  f("mask", mask);
  f("keys", keys);
  f("transform", transform);
  f("schedule", schedule);
  f("key_type", key_type);
  f("row_scales", row_scales);
  f("functions", functions);
}

template <typename T, typename F>
requires is<T, Sm80ForwardSchedule>
constexpr void for_each_member(T& x, F&& f) {
  auto& [split, invariant] = x;
  f("split", split);
  f("invariant", invariant);
}

template <typename T, typename F>
requires is<T, Sm80ForwardConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, stages, mask, keys, transform, schedule, functions] = x;
  f("tiling", tiling);
  f("stages", stages);
  f("mask", mask);
  f("keys", keys);
  f("transform", transform);
  f("schedule", schedule);
  f("functions", functions);
}

template <typename T, typename F>
requires is<T, DecodeSchedule>
constexpr void for_each_member(T& x, F&& f) {
  auto& [split] = x;
  f("split", split);
}

template <typename T, typename F>
requires is<T, DecodeConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, stages, q_stages, mask, keys, transform, schedule, key_type, row_scales] = x;
  f("tiling", tiling);
  f("stages", stages);
  f("q_stages", q_stages);
  f("mask", mask);
  f("keys", keys);
  f("transform", transform);
  f("schedule", schedule);
  f("key_type", key_type);
  f("row_scales", row_scales);
}

template <typename T, typename F>
requires is<T, LatentSchedule>
constexpr void for_each_member(T& x, F&& f) {
  auto& [dynamic, split, invariant] = x;
  f("dynamic", dynamic);
  f("split", split);
  f("invariant", invariant);
}

template <typename T, typename F>
requires is<T, LatentConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, stages, q_stages, mask, keys, transform, schedule, v_in_k, pairs] = x;
  f("tiling", tiling);
  f("stages", stages);
  f("q_stages", q_stages);
  f("mask", mask);
  f("keys", keys);
  f("transform", transform);
  f("schedule", schedule);
  f("v_in_k", v_in_k);
  f("pairs", pairs);
}

template <typename T, typename F>
requires is<T, CombineConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, keys, invariant, pairs] = x;
  f("tiling", tiling);
  f("keys", keys);
  f("invariant", invariant);
  f("pairs", pairs);
}

template <typename T, typename F>
requires is<T, BackwardConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, cluster, q_stages, dout_stages, dq_parts, mask, softcap, schedule, f32_dq, f32_dk_dv,
         functions] = x;
  f("tiling", tiling);
  f("cluster", cluster);
  f("q_stages", q_stages);
  f("dout_stages", dout_stages);
  f("dq_parts", dq_parts);
  f("mask", mask);
  f("softcap", softcap);
  f("schedule", schedule);
  f("f32_dq", f32_dq);
  f("f32_dk_dv", f32_dk_dv);
  f("functions", functions);
}

template <typename T, typename F>
requires is<T, Sm80BackwardSchedule>
constexpr void for_each_member(T& x, F&& f) {
  auto& [deterministic] = x;
  f("deterministic", deterministic);
}

template <typename T, typename F>
requires is<T, Sm80BackwardConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, q_stages, dout_stages, mask, softcap, schedule, ds_in_dout, halved, f32_dq, f32_dk_dv,
         functions] = x;
  f("tiling", tiling);
  f("q_stages", q_stages);
  f("dout_stages", dout_stages);
  f("mask", mask);
  f("softcap", softcap);
  f("schedule", schedule);
  f("ds_in_dout", ds_in_dout);
  f("halved", halved);
  f("f32_dq", f32_dq);
  f("f32_dk_dv", f32_dk_dv);
  f("functions", functions);
}

template <typename T, typename F>
requires is<T, EightBitConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [tiling, qk, pv, stages, q_stages, mask, row_scales, v_row_scales, rotated_v, parts, linear_exp2,
         in_place, transpose_v, softcap, schedule] = x;
  f("tiling", tiling);
  f("qk", qk);
  f("pv", pv);
  f("stages", stages);
  f("q_stages", q_stages);
  f("mask", mask);
  f("row_scales", row_scales);
  f("v_row_scales", v_row_scales);
  f("rotated_v", rotated_v);
  f("parts", parts);
  f("linear_exp2", linear_exp2);
  f("in_place", in_place);
  f("transpose_v", transpose_v);
  f("softcap", softcap);
  f("schedule", schedule);
}

template <typename T, typename F>
requires is<T, PackConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [paired, widens, element] = x;
  f("paired", paired);
  f("widens", widens);
  f("element", element);
}

template <typename T, typename F>
requires is<T, AppendConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [from, to, rotary, interleaved, f32_tables, vectors, finds_scales] = x;
  f("from", from);
  f("to", to);
  f("rotary", rotary);
  f("interleaved", interleaved);
  f("f32_tables", f32_tables);
  f("vectors", vectors);
  f("finds_scales", finds_scales);
}

template <typename T, typename F>
requires is<T, MergeConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [from, to, vectors] = x;
  f("from", from);
  f("to", to);
  f("vectors", vectors);
}

template <typename T, typename F>
requires is<T, QuantizeConfig>
constexpr void for_each_member(T& x, F&& f) {
  auto& [element, head_dim_qk, head_dim_v, qk, pv, qk_scales, v_scales, rotate_qk, rotate_v, smooth_k, rotary,
         interleaved, varlen, vectors] = x;
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

/// Calls f(name, field) for every field of a Config, those of its parts included, in order. No two fields of
/// a Config have the same name.
template <typename Config, typename F>
constexpr void for_each_field(Config& config, F&& f) {
  for_each_member(config, [&](const char* name, auto& member) {
    if constexpr (is_part<decltype(member)>) {
      for_each_field(member, f);
    } else {
      f(name, member);
    }
  });
}

}  // namespace tandem
