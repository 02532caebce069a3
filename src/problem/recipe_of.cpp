#include "problem/recipe_of.hpp"

#include <fmt/format.h>

namespace tandem {
namespace {

const char* name_of(OperandType type) {
  switch (type) {
    case OperandType::e4m3: return "e4m3";
    case OperandType::s8: return "s8";
    case OperandType::input: return "16-bit";
  }
  return "unknown";
}

const char* name_of(ScaleGroup group) {
  switch (group) {
    case ScaleGroup::tensor: return "tensor";
    case ScaleGroup::head: return "head";
    case ScaleGroup::block: return "block of 128 rows";
    case ScaleGroup::row: return "row";
    case ScaleGroup::channel: return "channel of 128 rows";
  }
  return "unknown";
}

}  // namespace

Recipe recipe_of(Precision precision, bool is_strict) {
  const Recipe recipe = precision == Precision::fp8 ? fp8_recipe : int8_recipe;
  return is_strict ? strict(recipe) : recipe;
}

Recipe recipe_of(const Problem& p) {
  if (!p.quantized_inputs()) return recipe_of(p.precision, p.strict);
  const OperandType type = p.q.dtype == DType::s8 ? OperandType::s8 : OperandType::e4m3;
  const auto by_row = [](const Scales& s) { return s.group == ScaleGroup::row; };
  const ScaleGroup group =
      type == OperandType::s8 || by_row(p.q_scale) || by_row(p.k_scale) || by_row(p.v_scale)
          ? ScaleGroup::row
          : ScaleGroup::block;
  return {.qk = type,
          .pv = type,
          .qk_scales = group,
          .v_scales = group,
          .rotate_qk = false,
          .rotate_v = false,
          .smooth_k = false,
          .linear_exp2 = group == ScaleGroup::block};
}

std::string describe(const Recipe& r) {
  std::string text = fmt::format("Q K^T in {}, one scale a {}{}{}", name_of(r.qk), name_of(r.qk_scales),
                                 r.rotate_qk ? ", rotated" : "", r.smooth_k ? ", K's mean removed" : "");
  return text + fmt::format("; P V in {}, one scale a {} of V{}, promoted every {} tile(s){}", name_of(r.pv),
                            name_of(r.v_scales), r.rotate_v ? ", rotated" : "", r.promote_every,
                            r.linear_exp2 ? ", half of the exponentials linear" : "");
}

}  // namespace tandem
