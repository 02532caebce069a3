// How an 8-bit attention rounds its operands: what the quantiser, the kernels and their CPU counterparts
// agree on. Plain aggregates, no includes: the same file serves the host compiler and NVRTC. docs/numerics.md
// has the method.
#pragma once

namespace tandem {

/// What an operand of a product is rounded to. `input` leaves it in the 16 bits it came in.
enum class OperandType : int { e4m3, s8, input };

/// The elements of a head that share a scale: all of the tensor, all of one (batch, head), a block of
/// `quant_block` rows, one row, or one channel of a block.
enum class ScaleGroup : int { tensor, head, block, row, channel };

/// Rows of a scale block, counted from the first row of a sequence, and keys of a tile of P: blocks do not
/// depend on how sequences are batched, packed or tiled.
constexpr int quant_block = 128;

/// The largest magnitudes that quantized values hold.
constexpr float largest_e4m3 = 448.0F;
constexpr float largest_s8 = 127.0F;
/// s8 has no NaN. If a row of Q or K shares its scale with others and holds a NaN or an infinity, its first
/// channel holds this marker, which no value is rounded to. The scale of its group is then negative, so that
/// kernels look for markers only where there are some.
constexpr unsigned char nan_marker = 0x80;
/// What P, at most 1, is multiplied by before it is rounded: a power of two for e4m3, all of u8's range for
/// s8.
constexpr float e4m3_p_range = 256.0F;
/// The factor with lazy rescaling, where the running maximum may exceed the reference by what is left of
/// e4m3's range. P of the maximum itself must be an e4m3 number, so that rows dominated by one key lose
/// nothing: 28 = 1.75 * 2^4 is one, and linear_exp2 has it too.
constexpr float e4m3_lazy_p_range = 28.0F;
constexpr float e4m3_lazy_p_range_log2 = 4.807354922F;
/// log2 of the factor by which P may exceed that range before its reference must move: 448 / 28 = 2^4.
constexpr float lazy_headroom_log2 = 4.0F;
constexpr float u8_p_range = 255.0F;

/// `linear_exp2`: the exponentials of half of the keys are linear within an octave, 2^(n + f) is (1 + f) *
/// 2^n, where n + f is the exponent to so many bits behind the point, less the offset (N. Schraudolph, "A
/// fast, compact approximation of the exponential function", 1999). It errs by -3.9 to +2.0 %, 1.8 % in the
/// root mean square, e4m3's own rounding by 2.7 %.
constexpr bool takes_linear_exp2(int key) {
  return key % 16 >= 8;
}
constexpr int linear_exp2_bits = 13;
/// log2(1.75) - 0.75 in the last of those bits: 1.75 * 2^n comes out as it is. The mean of (1 + f) / 2^f
/// is 1.0407, whose log2 this also is, so that neither half of the keys gains.
constexpr int linear_exp2_offset = 470;

/// Products that one 8-bit WGMMA instruction adds up along the depth before its accumulator is truncated.
constexpr int e4m3_depth_step = 32;
/// The bits of an f32 that such an accumulator keeps: sign, exponent and 13 of 23 bits behind the point.
constexpr unsigned e4m3_accumulator_mask = 0xFFFFFC00U;

/// Any vector may be taken off all keys, so K's mean need not be exact: of sequences of more keys than this
/// it is that of a sample, one key of each eight (64 at least: a mean within an eighth of the keys' spread).
constexpr int mean_all_keys = 512;
constexpr int mean_step = 8;
/// The i-th key of the sample. It stands at another place in each eight, so that it follows no period.
constexpr int sampled_key(int i) {
  return mean_step * i + (5 * i + 3) % mean_step;
}
/// How many keys of the first `keys` are in the sample.
constexpr int sampled_keys(int keys) {
  return keys / mean_step + (sampled_key(keys / mean_step) < keys ? 1 : 0);
}

struct Recipe {
  OperandType qk = OperandType::e4m3;
  OperandType pv = OperandType::e4m3;
  ScaleGroup qk_scales = ScaleGroup::block;  ///< groups of q and of k, each by its own rows
  ScaleGroup v_scales = ScaleGroup::block;
  bool rotate_qk = true;  ///< random signs and a Hadamard matrix, which leave Q K^T as it is
  bool rotate_v = false;  ///< the same along V's channels, undone on O
  bool smooth_k = true;   ///< K's mean over the sequence is removed, and the LSE corrected
  /// On the CPU, which can tell what it costs in accuracy: tiles, at most, whose products stay in a
  /// truncating accumulator before f32 has them. GPU kernels promote every tile.
  int promote_every = 1;
  bool linear_exp2 = false;  ///< half of P's exponentials are (e4m3, scales of V by block or larger)

  constexpr bool operator==(const Recipe&) const = default;
};

constexpr Recipe fp8_recipe{.linear_exp2 = true};
constexpr Recipe int8_recipe{.qk = OperandType::s8, .pv = OperandType::s8, .rotate_v = true};

/// The recipe without a scale or a mean that looks at rows of the future: every row has its own, V's too,
/// which joins P before P is rounded. A key of much weight and little value (an attention sink) then leaves
/// P's range to the others.
constexpr Recipe strict(Recipe recipe) {
  recipe.qk_scales = ScaleGroup::row;
  recipe.v_scales = ScaleGroup::row;
  recipe.smooth_k = false;
  recipe.promote_every = 1;  // each tile's P has units of its own
  recipe.linear_exp2 = false;
  return recipe;
}

/// The sign that channel `c` is multiplied by before the Hadamard matrix: bits of splitmix64, seed 0.
__attribute__((always_inline)) constexpr float rotation_sign(int c) {
  unsigned long long z = (static_cast<unsigned long long>(c) + 1) * 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return ((z ^ (z >> 31)) & 1U) != 0 ? -1.0F : 1.0F;
}

/// The size of the Hadamard matrix for the channels from `first` on: head dimensions are cut into powers of
/// two, the largest first (96 = 64 + 32).
__attribute__((always_inline)) constexpr int rotation_block(int first, int head_dim) {
  int size = 1;
  while (2 * size <= head_dim - first) size *= 2;
  return size;
}

}  // namespace tandem
