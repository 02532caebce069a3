#include "gpu/eight_bit_forward_params.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "gpu/code_axes.hpp"
#include "gpu/param_fields.hpp"

namespace tandem::gpu {
namespace {

/// A map of bytes whose innermost dimension has rows of `pitch` bytes; `lines` of them a head, of which
/// `lines_read` are read. An empty tensor's map describes `nearby`.
TensorMapSpec codes_map(const void* data, const CodeAxes& axes, std::int64_t columns, std::int64_t pitch,
                        std::int64_t lines_read, std::int64_t lines, int strip, int box_lines,
                        const void* nearby) {
  const bool empty = data == nullptr || axes.entries * axes.heads * columns * lines == 0;
  const auto near = reinterpret_cast<std::uintptr_t>(nearby) / 16 * 16;
  const auto at_least = [](std::int64_t n, std::int64_t low) { return std::max(n, low); };
  TensorMapSpec spec;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): rounding an address down takes the way through an integer
  spec.base = empty ? reinterpret_cast<const void*>(near) : data;
  spec.rank = 4;
  spec.element_bytes = 1;
  spec.dims = {at_least(columns, 1), at_least(lines_read, 1), at_least(axes.heads, 1),
               at_least(axes.entries, 1)};
  spec.strides = {at_least(pitch, 16), at_least(pitch * lines, 16), at_least(pitch * lines * axes.heads, 16)};
  spec.box = {strip, box_lines, 1, 1};
  spec.swizzle = strip == 128 ? Swizzle::b128 : Swizzle::b64;
  return spec;
}

ScaleArray array_of(const float* data, const CodeAxes& axes, bool by_row) {
  return {.data = data, .stride = scale_strides(axes, by_row)};
}

/// The caller's codes, in boxes of a strip of columns by 64 rows (q) or a block of keys.
TensorMapSpec brought_map(const Problem& p, const EightBitConfig& config, Loaded which) {
  const bool is_q = which == Loaded::q;
  const bool is_v = which == Loaded::v;
  const Operand& o = is_q ? p.q : is_v ? p.v : p.k;
  return rows_tensor_map({.operand = o,
                          .head_dim = is_v ? p.head_dim_v : p.head_dim_qk,
                          .rows = is_q ? p.rows_q : p.rows_k,
                          .heads = is_q ? p.heads_q : p.heads_kv,
                          .batch = (is_q ? p.packed_q : p.packed_k) ? 1 : p.batch},
                         config.element, byte_strip_columns(is_v ? config.head_dim_v : config.head_dim_qk),
                         is_q ? 64 : quant_block, p.out.data);
}

ScaleArray array_of(const Scales& s) {
  return {.data = s.data,
          .stride = {.batch = s.batch_stride, .head = s.head_stride, .group = s.group_stride}};
}

}  // namespace

bool can_read_codes(const Problem& problem, const EightBitConfig& config) {
  return std::ranges::all_of(std::array{Loaded::q, Loaded::k, Loaded::v},
                             [&](Loaded which) { return tma_can_read(brought_map(problem, config, which)); });
}

EightBitParams make_brought_params(const Problem& problem, const EightBitConfig& config,
                                   EncodeTensorMap encode, int processors, unsigned int* tile_counter) {
  Problem p = problem;
  p.q = p.k = p.v = {};  // their maps are of codes, below
  EightBitParams params{.forward = make_forward_params(p, config.tiling(), encode, processors, tile_counter),
                        .q_scales = array_of(problem.q_scale),
                        .k_scales = array_of(problem.k_scale),
                        .v_scales = array_of(problem.v_scale),
                        .shift = {},
                        .q_scale_heads = as_int(problem.q_scale.heads)};
  params.forward.q = encode(brought_map(problem, config, Loaded::q));
  params.forward.k = encode(brought_map(problem, config, Loaded::k));
  params.forward.v = encode(brought_map(problem, config, Loaded::v));
  return params;
}

QuantizedOperands operands_of(const QuantizeParams& params) {
  return {.q = params.q.codes,
          .k = params.k.codes,
          .v = params.v.codes,
          .q_scales = params.q.scales,
          .k_scales = params.k.scales,
          .v_scales = params.v.scales,
          .shift = params.shift};
}

EightBitParams make_eight_bit_params(const Problem& problem, const EightBitConfig& config,
                                     const QuantizedOperands& operands, EncodeTensorMap encode,
                                     int processors, unsigned int* tile_counter) {
  Problem p = problem;
  p.q = p.k = {};  // their maps are of codes, below
  if (config.pv != Codes::input) p.v = {};
  p.scale = std::abs(p.scale);
  const CodeAxes q = query_axes(p);
  const CodeAxes k = key_axes(p);
  const std::int64_t padded_keys = k.blocks * quant_block;
  const std::int64_t pitch = code_pitch(p.head_dim_qk);
  const int strip = byte_strip_columns(config.head_dim_qk);

  EightBitParams params{// Codes take half the room that 16 bits do.
                        .forward = make_forward_params(p, config.tiling(), encode, processors, tile_counter),
                        .q_scales = array_of(operands.q_scales, q, config.row_scales),
                        .k_scales = array_of(operands.k_scales, k, config.row_scales),
                        .v_scales = array_of(operands.v_scales, k, config.v_row_scales),
                        .shift = array_of(operands.shift, q, true),
                        .q_scale_heads = 1};
  params.forward.q =
      encode(codes_map(operands.q, q, p.head_dim_qk, pitch, q.rows, q.rows, strip, 64, p.out.data));
  params.forward.k =
      encode(codes_map(operands.k, k, p.head_dim_qk, pitch, k.rows, k.rows, strip, quant_block, p.out.data));
  if (config.pv != Codes::input) {
    params.forward.v =
        encode(codes_map(operands.v, k, padded_keys, padded_keys, p.head_dim_v, code_pitch(p.head_dim_v),
                         quant_block, config.head_dim_v, p.out.data));
  }
  return params;
}

}  // namespace tandem::gpu
