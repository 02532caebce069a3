#include "ops/quantize/plan.hpp"

#include "gpu/param_fields.hpp"

namespace tandem {
namespace {

QuantizeConfig choose_arrange_config(const CallFacts& facts, const Recipe& r) {
  const Problem& p = facts.problem;
  QuantizeConfig c = with_recipe(QuantizeConfig{}, r);
  c.head_dim_qk = gpu::as_int(p.head_dim_qk);
  c.head_dim_v = gpu::as_int(p.head_dim_v);
  c.varlen = facts.mask.varlen;
  c.vectors = gpu::allows_quantized_vectors(p.q, p.head_dim_qk) &&
              gpu::allows_quantized_vectors(p.k, p.head_dim_qk) &&
              gpu::allows_quantized_vectors(p.v, p.head_dim_v);
  return c;
}

}  // namespace

QuantizeConfig choose_quantize_config(const CallFacts& facts, const Recipe& r) {
  const Problem& p = facts.problem;
  if (p.quantized_inputs()) return choose_arrange_config(facts, r);
  QuantizeConfig c = with_recipe(QuantizeConfig{}, r);
  c.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = gpu::as_int(p.head_dim_qk);
  c.head_dim_v = gpu::as_int(p.head_dim_v);
  c.varlen = facts.mask.varlen;
  c.vectors = gpu::allows_vectors(p.q, p.head_dim_qk) && gpu::allows_vectors(p.k, p.head_dim_qk) &&
              gpu::allows_vectors(p.v, p.head_dim_v);
  return c;
}

QuantizeConfig choose_dequantize_config(const Problem& p, bool varlen) {
  QuantizeConfig c;
  c.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = gpu::as_int(p.head_dim_qk);
  c.head_dim_v = gpu::as_int(p.head_dim_v);
  c.qk = c.pv = p.k.dtype == DType::s8 ? OperandType::s8 : OperandType::e4m3;
  c.varlen = varlen;
  c.vectors =
      gpu::allows_quantized_vectors(p.k, p.head_dim_qk) && gpu::allows_quantized_vectors(p.v, p.head_dim_v);
  return c;
}

QuantizeConfig choose_tensor_config(const QuantizeProblem& problem) {
  QuantizeConfig c;
  c.element = problem.x.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = gpu::as_int(problem.head_dim);
  c.head_dim_v = c.head_dim_qk;
  c.qk = problem.codes.dtype == DType::s8 ? OperandType::s8 : OperandType::e4m3;
  c.pv = OperandType::input;
  c.qk_scales = problem.group;
  c.rotate_qk = problem.rotate;
  c.smooth_k = problem.mean.given();
  c.vectors = gpu::allows_vectors(problem.x, problem.head_dim) &&
              gpu::allows_quantized_vectors(problem.codes, problem.head_dim, c.stores_sixteen() ? 16 : 8);
  return c;
}

std::vector<QuantizeConfig> shipped_quantize_configs() {
  std::vector<QuantizeConfig> configs;
  for (const int head_dim : {64, 128, 256}) {
    for (const Recipe& recipe : {fp8_recipe, int8_recipe}) {
      for (const bool varlen : {false, true}) {
        QuantizeConfig c = with_recipe(QuantizeConfig{}, recipe);
        c.head_dim_qk = c.head_dim_v = head_dim;
        c.varlen = varlen;
        configs.push_back(c);
      }
    }
  }
  return configs;
}

}  // namespace tandem
