// Compiled once for each instruction set (src/cpu/targets/targets.cmake).
#include "cpu/simd_probe.hpp"

#include "cpu/simd/dot.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/matrix_unit.hpp"
#include "cpu/simd/transpose.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

template <typename From, typename To, typename Function>
TANDEM_INLINE void map(const From* x, To* y, int n, Function f) {
  int i = 0;
  for (; i + vec_lanes <= n; i += vec_lanes) store(f(load(x + i)), y + i);
  if (i < n) store_first(f(load_first(x + i, n - i)), y + i, n - i);
}

template <typename From, typename To>
void convert(const From* x, To* y, int n) {
  map(x, y, n, [](Vec v) { return v; });
}

void map_exp2(const float* x, float* y, int n) {
  map(x, y, n, [](Vec v) { return exp2(v); });
}
void map_linear_exp2(const float* x, float* y, int n) {
  map(x, y, n, [](Vec v) { return linear_exp2(v); });
}
void map_tanh(const float* x, float* y, int n) {
  map(x, y, n, [](Vec v) { return tanh(v); });
}
void transpose_rows(const float* src, std::int64_t src_stride, int rows, int columns, float* dst,
                    std::int64_t dst_stride) {
  transpose(src, src_stride, rows, columns, dst, dst_stride);
}

#if defined(__AVX512BF16__)
void dot(const float* a, const float* b, float* sum) {
  float even[2][vec_lanes];
  float odd[2][vec_lanes];
  for (int i = 0; i < vec_lanes; ++i) {
    even[0][i] = a[2 * i];
    odd[0][i] = a[2 * i + 1];
    even[1][i] = b[2 * i];
    odd[1][i] = b[2 * i + 1];
  }
  const UVec pairs_a = pair_bf16(load(even[0]), load(odd[0]));
  const UVec pairs_b = pair_bf16(load(even[1]), load(odd[1]));
  store(dot_bf16(load(sum), pairs_a, pairs_b), sum);
}
constexpr auto dot_or_null = &dot;
#else
constexpr void (*dot_or_null)(const float*, const float*, float*) = nullptr;
#endif

#if defined(TANDEM_MATRIX_UNIT)
template <TileOperands operands, typename A, typename B, typename C>
void multiply(const A* a, const B* b, C* c) {
  const MatrixUnit in_use;
  load_tile<0>(c, 64);
  load_tile<4>(a, 64);
  load_tile<7>(b, 64);
  multiply_tiles<operands, 0, 4, 7>();
  store_tile<0>(c, 64);
}
constexpr bool has_tiles = true;
#else
enum class TileOperands { bf16, s8, s8_u8 };
template <TileOperands operands, typename A, typename B, typename C>
void multiply(const A*, const B*, C*) {}
constexpr bool has_tiles = false;
#endif

}  // namespace

extern const SimdProbe probe;
const SimdProbe probe{
    .target = Target::TANDEM_TARGET,
    .lanes = vec_lanes,
    .exp2 = map_exp2,
    .linear_exp2 = map_linear_exp2,
    .tanh = map_tanh,
    .widen_f16 = convert<f16, float>,
    .widen_bf16 = convert<bf16, float>,
    .widen_e4m3 = convert<e4m3, float>,
    .narrow_f16 = convert<float, f16>,
    .narrow_bf16 = convert<float, bf16>,
    .transpose = transpose_rows,
    .dot_bf16 = dot_or_null,
    .multiply_tiles = has_tiles ? multiply<TileOperands::bf16, bf16, bf16, float> : nullptr,
    .multiply_tiles_s8 =
        has_tiles ? multiply<TileOperands::s8, std::int8_t, std::int8_t, std::int32_t> : nullptr,
    .multiply_tiles_s8_u8 =
        has_tiles ? multiply<TileOperands::s8_u8, std::int8_t, std::uint8_t, std::int32_t> : nullptr};

}  // namespace tandem::cpu::TANDEM_TARGET
