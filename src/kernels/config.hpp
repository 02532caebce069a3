// What host and device share: the Config that specialises a kernel and the Params it is launched with.
// Plain aggregates, no includes: the same file is compiled by the host compiler and by NVRTC.
#pragma once

namespace tandem {

/// 16-bit element types of the matrix products.
enum class Element : int { f16, bf16 };

/// Shared-memory swizzle: 16-byte units are exchanged within rows of this many bytes, so that eight rows of a column
/// fall into different banks.
enum class Swizzle : int { b32, b64, b128 };

/// A copy-engine tensor map (CUtensorMap): 128 opaque bytes that the driver encodes.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

/// Everything that specialises the forward kernel. A tile is block_m queries by block_n keys.
struct ForwardConfig {
  Element element = Element::bf16;
  int head_dim_qk = 128;  ///< padded to a multiple of 32
  int head_dim_v = 128;   ///< padded to a multiple of 32
  int block_m = 128;      ///< 64 x consumer warpgroups
  int block_n = 128;      ///< multiple of 16
  int stages = 2;         ///< K tiles, and V tiles, in flight
  bool causal = false;    ///< window_right is bounded: right edge needs a mask
  bool local = false;     ///< window_left is bounded: left edge needs a mask
  bool softcap = false;
  bool ragged = false;  ///< lengths differ by sequence (cu_seqlens or seqused): rows past the end may hold anything
  // The paper's ablation: each is one idea of FlashAttention-3.
  bool specialised = true;  ///< a producer warpgroup loads; otherwise a consumer thread does
  bool overlap = true;      ///< softmax of one block runs under the products of the next, in one warpgroup
  bool pingpong = true;     ///< warpgroups take turns: one's softmax under the other's products

  constexpr bool operator==(const ForwardConfig&) const = default;
  [[nodiscard]] constexpr int consumers() const { return block_m / 64; }
  [[nodiscard]] constexpr int threads() const { return 128 * (consumers() + 1); }
};

/// Strides in elements, of a tensor addressed by (batch, row, head).
struct Strides {
  long long batch;
  long long row;
  long long head;
};

struct ForwardParams {
  TensorMap q, k, v;  ///< dimensions (head_dim, rows, heads, batch)
  void* out;
  float* lse;         ///< may be null
  const float* sink;  ///< may be null; logits by query head
  Strides out_stride;
  Strides lse_stride;
  const int* cu_seqlens_q;  ///< null: dense
  const int* cu_seqlens_k;
  const int* seqused_q;
  const int* seqused_k;
  int batch;
  int heads_q;
  int heads_kv;
  int seqlen_q;  ///< of the longest sequence
  int seqlen_k;
  int rows_q;  ///< rows of q in a batch entry, or in all when packed
  int rows_k;
  int head_dim_v;  ///< the true one, as out has it
  int window_left;   ///< INT_MAX: unbounded
  int window_right;  ///< INT_MAX: unbounded
  float scale;       ///< multiplies Q K^T
  float softcap;
};

}  // namespace tandem
