#include "plan/quantize_plan.hpp"

#include "gpu/param_fields.hpp"
#include "problem/effective.hpp"

namespace tandem {
namespace {

QuantizeConfig choose_arrange_config(const Problem& p, const Recipe& r) {
  QuantizeConfig c = with_recipe(QuantizeConfig{}, r);
  c.head_dim_qk = gpu::as_int(p.head_dim_qk);
  c.head_dim_v = gpu::as_int(p.head_dim_v);
  c.varlen = has_lengths(p);
  c.vectors = gpu::allows_code_vectors(p.q, p.head_dim_qk) && gpu::allows_code_vectors(p.k, p.head_dim_qk) &&
              gpu::allows_code_vectors(p.v, p.head_dim_v);
  return c;
}

}  // namespace

QuantizeConfig choose_quantize_config(const Problem& p, const Recipe& r) {
  if (p.of_codes()) return choose_arrange_config(p, r);
  QuantizeConfig c = with_recipe(QuantizeConfig{}, r);
  c.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = gpu::as_int(p.head_dim_qk);
  c.head_dim_v = gpu::as_int(p.head_dim_v);
  c.varlen = has_lengths(p);
  c.vectors = gpu::allows_vectors(p.q, p.head_dim_qk) && gpu::allows_vectors(p.k, p.head_dim_qk) &&
              (r.pv == Codes::input || gpu::allows_vectors(p.v, p.head_dim_v));
  return c;
}

QuantizeConfig choose_dequantize_config(const Problem& p) {
  QuantizeConfig c;
  c.element = p.q.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = gpu::as_int(p.head_dim_qk);
  c.head_dim_v = gpu::as_int(p.head_dim_v);
  c.qk = c.pv = p.k.dtype == DType::s8 ? Codes::s8 : Codes::e4m3;
  c.varlen = has_lengths(p);
  c.vectors = gpu::allows_code_vectors(p.k, p.head_dim_qk) && gpu::allows_code_vectors(p.v, p.head_dim_v);
  return c;
}

QuantizeConfig choose_tensor_config(const QuantizeJob& job) {
  QuantizeConfig c;
  c.element = job.x.dtype == DType::f16 ? Element::f16 : Element::bf16;
  c.head_dim_qk = gpu::as_int(job.head_dim);
  c.head_dim_v = c.head_dim_qk;
  c.qk = job.codes.dtype == DType::s8 ? Codes::s8 : Codes::e4m3;
  c.pv = Codes::input;
  c.qk_scales = job.group;
  c.rotate_qk = job.rotate;
  c.smooth_k = job.mean.given();
  c.rotary = job.cos.given();
  c.interleaved = c.rotary && job.interleaved;
  c.vectors = gpu::allows_vectors(job.x, job.head_dim) && gpu::allows_code_vectors(job.codes, job.head_dim);
  return c;
}

int quantize_local_bytes_allowed(const QuantizeConfig& c) {
  return c.varlen && c.qk == Codes::s8 && c.head_dim_qk == 128 ? 28 : 0;
}

std::vector<QuantizeConfig> shipped_quantize_configs() {
  std::vector<QuantizeConfig> configs;
  for (const int head_dim : {64, 128, 256}) {
    for (const Recipe& recipe : {fp8_recipe, int8_recipe, int8_accurate_recipe}) {
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
