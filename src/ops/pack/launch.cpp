#include "ops/pack/launch.hpp"

#include <algorithm>

#include "gpu/step_params.hpp"
#include "ops/forward/launch.hpp"

namespace tandem::gpu {
namespace {

std::int64_t pitch_of(const LoadedTensor& t) {
  return (t.head_dim + 7) / 8 * 8;
}

std::int64_t elements_of(const LoadedTensor& t) {
  return t.batch * t.rows * t.heads * pitch_of(t);
}

}  // namespace

Operand packed_operand(const LoadedTensor& t) {
  Operand o = t.operand;
  o.head_stride = pitch_of(t);
  o.row_stride = pitch_of(t) * t.heads;
  o.batch_stride = pitch_of(t) * t.heads * t.rows;
  return o;
}

std::int64_t packed_bytes(const LoadedTensor& t) {
  return 2 * elements_of(t);
}

std::int64_t pack_grid(const LoadedTensor& t, int multiprocessors) {
  const std::int64_t vectors = elements_of(t) / 8;
  // Eight CTAs of 256 threads fill an SM.
  return std::min<std::int64_t>((vectors + pack_threads - 1) / pack_threads,
                                std::int64_t{8} * multiprocessors);
}

PackConfig pack_config(const LoadedTensor& t, Element element) {
  const Operand& o = t.operand;
  if (is_eight_bit(o.dtype))
    return {.paired = allows_quantized_vectors(o, t.head_dim), .widens = true, .element = element};
  return {.paired = allows_pairs(o, t.head_dim)};
}

PackParams make_pack_params(const LoadedTensor& t, void* target) {
  return {.source = t.operand.data,
          .stride = strides_of(t.operand),
          .target = target,
          .batch = as_int(t.batch),
          .rows = as_int(t.rows),
          .heads = as_int(t.heads),
          .head_dim = as_int(t.head_dim),
          .pitch = as_int(pitch_of(t))};
}

WidenParams make_widen_params(const Problem& p, const LoadedTensor& q, const Scales& q_scale, void* target,
                              float* product) {
  return {make_pack_params(q, target),
          head_scales_of(q_scale),
          head_scales_of(p.k_scale),
          multiplies_scales(q_scale, p.k_scale) ? product : nullptr,
          as_int(p.batch),
          as_int(p.heads_kv)};
}

void fill_pack(StepParams& call, const Step& step) {
  const Problem& p = call.problem();
  const LoadedTensor copy = loaded_tensor(p, step.tensor);
  const LoadedTensor source{.operand = *call.steps().sources[index_of(step.tensor)],
                            .head_dim = copy.head_dim,
                            .rows = copy.rows,
                            .heads = copy.heads,
                            .batch = copy.batch};
  void* const target = copy.operand.data;
  if (!std::get<PackConfig>(step.config).widens)
    return call.fill([&] { return make_pack_params(source, target); });
  call.fill([&] {
    return make_widen_params(p, source, call.steps().q_scale.value_or(p.q_scale), target,
                             call.at<float>(Region::q_scales));
  });
}

}  // namespace tandem::gpu
