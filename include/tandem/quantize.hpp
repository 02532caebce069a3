// Tensors to 8-bit values and scales, for callers who keep them: an 8-bit cache, or attention on e4m3
// tensors. attention() with a precision does all of this inside; docs/numerics.md (Low precision) has the
// method.
#pragma once

#include "tandem/attention.hpp"

namespace tandem {

/// The elements that share a scale. Values are stable: they are part of the C interface.
enum class Granularity : int {
  tensor = 0,  ///< all: scales (1)
  head = 1,    ///< one (batch, head): scales (batch, heads), what attention takes for k and v
  block = 2,   ///< 128 rows of a head, counted from row 0: scales (batch, heads, ceil(seqlen / 128))
  row = 3,     ///< one row of a head: scales (batch, heads, seqlen)
};

/// Arguments of quantize. A tensor of rank 3, (seqlen, heads, head_dim), is one of batch 1 without its first
/// dimension, and so are its scales and mean; head_dim is from 1 to 256. `codes`, `scales` and `mean` have
/// memory of their own, as the outputs in attention.hpp.
struct QuantizeArgs {
  ConstTensor x;  ///< (batch, seqlen, heads, head_dim) f32, f16 or bf16; the last dimension contiguous
  Tensor
      codes;  ///< the quantized values, written: shape of x, e4m3 or s8; x = value * scale, to nearest even
  /// f32, written: the largest finite magnitude of the group / 448 (e4m3) or / 127 (s8). 0, with values 0,
  /// for a group of zeros or one below 2^-100. NaN and infinities become e4m3's NaN; s8 has none, its group's
  /// scale is NaN.
  Tensor scales;
  /// Optional (batch, heads, head_dim) f32: if given, each channel's mean over the rows is subtracted first
  /// and written here. Of K, it changes no softmax, and q . mean * scale of the LSE.
  Tensor mean;
  Granularity granularity = Granularity::head;
  /// Rows are multiplied by random signs (always the same) and Hadamard matrices after the mean is taken off:
  /// done to q and k alike it leaves their products as they are and spreads outliers over the channels.
  bool hadamard = false;
};

/// Writes `codes`, `scales` and `mean`: the same bits on the CPU and on a GPU. On the CPU without allocating;
/// on a GPU (f16 and bf16) in order on execution.stream, where a mean, and scales of a head or a tensor, take
/// scratch memory of the stream's. execution.workspace is not used. Throws Error before anything is written.
TANDEM_API void quantize(const QuantizeArgs& args, const Execution& execution = {});

}  // namespace tandem
