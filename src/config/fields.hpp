// The list of a Config's fields, once: names and values for the C++ expression that NVRTC instantiates, for
// hashes, explain and JSON. Host only.
#pragma once

#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ops/backward/sm80/config.hpp"
#include "ops/cache/config.hpp"
#include "ops/decode/config.hpp"
#include "ops/eight_bit/config.hpp"
#include "ops/eight_bit_backward/config.hpp"
#include "ops/forward/sm80/config.hpp"
#include "ops/latent/config.hpp"
#include "ops/pack/config.hpp"
#include "ops/quantize/config.hpp"
#include "ops/split/config.hpp"

namespace tandem {

/// The name that ends a template argument, out of the name of a function: "[with T = tandem::Element; ...]".
/// GCC writes it without the namespace, Clang with it. At compile time: every launch hashes its Config's
/// members.
consteval std::string_view argument_name(std::string_view function) {
  const std::size_t begin = function.find(" = ") + 3;
  const std::string_view name = function.substr(begin, function.find_first_of(";]", begin) - begin);
  return name.substr(name.rfind(':') + 1);
}
/// "Element"
template <typename T>
consteval std::string_view type_name() {
  return argument_name(__PRETTY_FUNCTION__);
}
static_assert(type_name<Element>() == "Element");
/// "head_dim_qk"
template <auto member>
consteval std::string_view member_name() {
  return argument_name(__PRETTY_FUNCTION__);
}
static_assert(member_name<&Tiling::head_dim_qk>() == "head_dim_qk");
/// "bf16"
template <auto value>
consteval std::string_view enumerator_name() {
  return argument_name(__PRETTY_FUNCTION__);
}
constexpr int most_enumerators = 8;
template <typename Enum>
requires std::is_enum_v<Enum>
constexpr std::string_view name_of(Enum value) {
  std::string_view name = "unknown";
  const auto find = [&]<int... i>(std::integer_sequence<int, i...> /*values*/) {
    ((static_cast<int>(value) == i ? void(name = enumerator_name<static_cast<Enum>(i)>()) : void()), ...);
  };
  find(std::make_integer_sequence<int, most_enumerators>());
  return name;
}
static_assert(name_of(Element::bf16) == "bf16");

/// A member that has members of its own.
template <typename T>
concept is_part = std::is_class_v<std::remove_reference_t<T>>;

/// The members of a Config or of a part of one, in order.
template <auto... members>
struct Members {
  static constexpr std::size_t count = sizeof...(members);

  /// Calls f(name, member...) for every member, of each of xs.
  template <typename F, typename... T>
  static constexpr void visit(F&& f, T&... xs) {
    const auto each = [&]<auto member>() {
      f(member_name<member>(), xs.*member...);
    };
    (each.template operator()<members>(), ...);
  }
};
template <typename T>
struct MembersOf;
template <>
struct MembersOf<Tiling>
    : Members<&Tiling::element, &Tiling::head_dim_qk, &Tiling::head_dim_v, &Tiling::block_m, &Tiling::block_n,
              &Tiling::heads_as_rows, &Tiling::f32_out, &Tiling::max_logits, &Tiling::gate> {};
template <>
struct MembersOf<BackwardTiling>
    : Members<&BackwardTiling::element, &BackwardTiling::head_dim_qk, &BackwardTiling::head_dim_v,
              &BackwardTiling::block_m, &BackwardTiling::block_n> {};
template <>
struct MembersOf<Mask> : Members<&Mask::causal, &Mask::local, &Mask::varlen, &Mask::by_sequence> {};
template <>
struct MembersOf<ForwardSchedule>
    : Members<&ForwardSchedule::dynamic, &ForwardSchedule::specialised, &ForwardSchedule::overlap,
              &ForwardSchedule::pingpong, &ForwardSchedule::output_late, &ForwardSchedule::own_blocks,
              &ForwardSchedule::finds_maxima, &ForwardSchedule::split, &ForwardSchedule::invariant> {};
template <>
struct MembersOf<EightBitSchedule>
    : Members<&EightBitSchedule::dynamic, &EightBitSchedule::overlap, &EightBitSchedule::pingpong> {};
template <>
struct MembersOf<BackwardSchedule>
    : Members<&BackwardSchedule::pingpong, &BackwardSchedule::staggered, &BackwardSchedule::deterministic,
              &BackwardSchedule::overlaps_tiles, &BackwardSchedule::turned> {};
template <>
struct MembersOf<Functions> : Members<&Functions::digest, &Functions::score_function,
                                      &Functions::mask_function, &Functions::block_lists, &Functions::dropout,
                                      &Functions::dropout_places, &Functions::captured_gradients> {};
template <>
struct MembersOf<ForwardConfig>
    : Members<&ForwardConfig::tiling, &ForwardConfig::stages, &ForwardConfig::q_stages, &ForwardConfig::teams,
              &ForwardConfig::mask, &ForwardConfig::keys, &ForwardConfig::transform, &ForwardConfig::schedule,
              &ForwardConfig::key_type, &ForwardConfig::row_scales, &ForwardConfig::functions> {};
template <>
struct MembersOf<Sm80ForwardSchedule>
    : Members<&Sm80ForwardSchedule::split, &Sm80ForwardSchedule::invariant> {};
template <>
struct MembersOf<Sm80ForwardConfig>
    : Members<&Sm80ForwardConfig::tiling, &Sm80ForwardConfig::stages, &Sm80ForwardConfig::mask,
              &Sm80ForwardConfig::keys, &Sm80ForwardConfig::transform, &Sm80ForwardConfig::schedule,
              &Sm80ForwardConfig::functions> {};
template <>
struct MembersOf<DecodeSchedule> : Members<&DecodeSchedule::split, &DecodeSchedule::cluster> {};
template <>
struct MembersOf<DecodeConfig>
    : Members<&DecodeConfig::tiling, &DecodeConfig::stages, &DecodeConfig::q_stages, &DecodeConfig::mask,
              &DecodeConfig::keys, &DecodeConfig::transform, &DecodeConfig::schedule, &DecodeConfig::key_type,
              &DecodeConfig::row_scales> {};
template <>
struct MembersOf<LatentSchedule>
    : Members<&LatentSchedule::dynamic, &LatentSchedule::split, &LatentSchedule::invariant> {};
template <>
struct MembersOf<LatentConfig>
    : Members<&LatentConfig::tiling, &LatentConfig::stages, &LatentConfig::q_stages, &LatentConfig::mask,
              &LatentConfig::keys, &LatentConfig::transform, &LatentConfig::schedule, &LatentConfig::v_in_k,
              &LatentConfig::pairs> {};
template <>
struct MembersOf<CombineConfig> : Members<&CombineConfig::tiling, &CombineConfig::keys,
                                          &CombineConfig::invariant, &CombineConfig::pairs> {};
template <>
struct MembersOf<BackwardConfig>
    : Members<&BackwardConfig::tiling, &BackwardConfig::cluster, &BackwardConfig::q_stages,
              &BackwardConfig::dout_stages, &BackwardConfig::dq_slices, &BackwardConfig::mask,
              &BackwardConfig::transform, &BackwardConfig::schedule, &BackwardConfig::f32_dq,
              &BackwardConfig::f32_dk_dv, &BackwardConfig::functions> {};
template <>
struct MembersOf<Sm80BackwardSchedule> : Members<&Sm80BackwardSchedule::deterministic> {};
template <>
struct MembersOf<Sm80BackwardConfig>
    : Members<&Sm80BackwardConfig::tiling, &Sm80BackwardConfig::q_stages, &Sm80BackwardConfig::dout_stages,
              &Sm80BackwardConfig::mask, &Sm80BackwardConfig::transform, &Sm80BackwardConfig::schedule,
              &Sm80BackwardConfig::ds_in_dout, &Sm80BackwardConfig::halved, &Sm80BackwardConfig::f32_dq,
              &Sm80BackwardConfig::f32_dk_dv, &Sm80BackwardConfig::functions> {};
template <>
struct MembersOf<EightBitBackwardSchedule>
    : Members<&EightBitBackwardSchedule::staggered, &EightBitBackwardSchedule::deterministic> {};
template <>
struct MembersOf<EightBitBackwardConfig>
    : Members<&EightBitBackwardConfig::tiling, &EightBitBackwardConfig::q_stages,
              &EightBitBackwardConfig::mask, &EightBitBackwardConfig::schedule,
              &EightBitBackwardConfig::f32_dq, &EightBitBackwardConfig::f32_dk_dv> {};
template <>
struct MembersOf<EightBitConfig>
    : Members<&EightBitConfig::tiling, &EightBitConfig::qk, &EightBitConfig::pv, &EightBitConfig::stages,
              &EightBitConfig::q_stages, &EightBitConfig::mask, &EightBitConfig::row_scales,
              &EightBitConfig::v_row_scales, &EightBitConfig::rotated_v, &EightBitConfig::slices,
              &EightBitConfig::linear_exp2, &EightBitConfig::in_place, &EightBitConfig::transform,
              &EightBitConfig::schedule> {};
template <>
struct MembersOf<PackConfig> : Members<&PackConfig::paired, &PackConfig::widens, &PackConfig::element> {};
template <>
struct MembersOf<AppendConfig>
    : Members<&AppendConfig::from, &AppendConfig::to, &AppendConfig::rotary, &AppendConfig::interleaved,
              &AppendConfig::f32_tables, &AppendConfig::vectors, &AppendConfig::finds_scales> {};
template <>
struct MembersOf<MergeConfig> : Members<&MergeConfig::from, &MergeConfig::to, &MergeConfig::vectors> {};
template <>
struct MembersOf<QuantizeConfig>
    : Members<&QuantizeConfig::element, &QuantizeConfig::head_dim_qk, &QuantizeConfig::head_dim_v,
              &QuantizeConfig::qk, &QuantizeConfig::pv, &QuantizeConfig::qk_scales, &QuantizeConfig::v_scales,
              &QuantizeConfig::rotate_qk, &QuantizeConfig::rotate_v, &QuantizeConfig::smooth_k,
              &QuantizeConfig::varlen, &QuantizeConfig::vectors> {};

/// Whether T is an aggregate with so many members: what can be initialised with so many values, and no more.
struct AnyValue {
  template <typename T>
  constexpr operator T() const;
};
template <typename T, std::size_t... n>
constexpr bool takes_values(std::index_sequence<n...> /*count*/) {
  return requires {
    T{(static_cast<void>(n), AnyValue{})...};
  };
}
template <typename T, std::size_t count>
constexpr bool has_members = takes_values<T>(std::make_index_sequence<count>()) &&
                             !takes_values<T>(std::make_index_sequence<count + 1>());

/// Calls f(name, member) for every member of a Config or of a part of one, in order.
template <typename T, typename F>
constexpr void for_each_member(T& x, F&& f) {
  using All = MembersOf<std::remove_const_t<T>>;
  static_assert(has_members<std::remove_const_t<T>, All::count>, "a member is missing in MembersOf");
  All::visit(f, x);
}

/// Calls f(name, field) for every field of a Config, those of its parts included, in order. No two fields of
/// a Config have the same name.
template <typename Config, typename F>
constexpr void for_each_field(Config& config, F&& f) {
  for_each_member(config, [&](std::string_view name, auto& member) {
    if constexpr (is_part<decltype(member)>) {
      for_each_field(member, f);
    } else {
      f(name, member);
    }
  });
}

/// Calls f(name, field, other's field) for every field of two Configs, in order.
template <typename Config, typename F>
constexpr void for_each_field(const Config& config, const Config& other, F&& f) {
  const auto each = [&](std::string_view name, const auto& member, const auto& others) {
    if constexpr (is_part<decltype(member)>) {
      for_each_field(member, others, f);
    } else {
      f(name, member, others);
    }
  };
  MembersOf<Config>::visit(each, config, other);
}

}  // namespace tandem
