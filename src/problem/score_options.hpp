// What a call asks of its scores before the mask, in one record that Problem, the tiles of the CPU's kernels
// and the Params of the GPU's have. Plain: device code includes it, and nothing of the standard library is in
// it.
#pragma once

namespace tandem {

struct ScoreOptions {
  float scale = 1.0F;    ///< multiplies q . k
  float softcap = 0.0F;  ///< a scaled score s becomes softcap * tanh(s / softcap); 0: off
};

/// What scores go through before the mask. `raw` leaves a positive scale to the exponent's multiply-add;
/// `scaled` serves scales <= 0, where the largest raw score would not be the largest scaled one.
enum class ScoreTransform : int { raw, scaled, softcap };

constexpr ScoreTransform transform_of(const ScoreOptions& options) {
  if (options.softcap > 0.0F) return ScoreTransform::softcap;
  return options.scale > 0.0F ? ScoreTransform::raw : ScoreTransform::scaled;
}
/// For kernels that take the scale into the exponent whatever its sign: backward, and forward in 8 bits.
constexpr ScoreTransform transform_of_any_scale(const ScoreOptions& options) {
  const ScoreTransform transform = transform_of(options);
  return transform == ScoreTransform::scaled ? ScoreTransform::raw : transform;
}

}  // namespace tandem
