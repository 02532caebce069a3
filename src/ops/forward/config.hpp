// What host and device share of the forward kernel: the Config that specialises it and the Params it is
// launched with.
#pragma once

#include "config/types.hpp"
#include "ops/functions/config.hpp"
#include "problem/recipe.hpp"

namespace tandem {

/// The order of work in the forward kernel. `specialised`, `overlap` and `pingpong` are the paper's ablation:
/// each is one idea of FlashAttention-3.
struct ForwardSchedule {
  bool dynamic = false;      ///< dynamic persistent scheduler: CTAs take tiles from a counter; else static
  bool specialised = true;   ///< a producer warpgroup loads; otherwise a consumer thread does
  bool overlap = true;       ///< softmax of one block runs under the products of the next, in one warpgroup
  bool pingpong = true;      ///< one warpgroup's softmax runs under the products of the others
  bool output_late = false;  ///< unmasked blocks wait for P V after their exponentials, not before them
  /// Each warpgroup computes the key blocks that its own queries see, and passes the tile's others by. Else
  /// all of them compute every block of the tile, in step.
  bool own_blocks = false;
  /// A row's maximum is found in every block; else blocks without a mask keep it until they outgrow it.
  bool finds_maxima = false;
  /// CTAs share the key blocks of all tiles evenly (tile/split.cuh), and `combine` merges what is partial;
  /// with varlen. Else a CTA computes whole tiles.
  bool split = false;
  /// A row's bits depend on its keys alone: keys are cut at multiples of ForwardParams::split_blocks, rows
  /// find the maximum of every block, and splits are merged in the order of tile/part_merge.cuh. With `split`
  /// a split, or a group of them, is a work item, else a CTA computes those of a tile.
  bool invariant = false;

  constexpr bool operator==(const ForwardSchedule&) const = default;
};

/// Where K and V have 8 bits in memory: the 16-bit tiles of each that products read (one is read while the
/// other is filled), and the warps that fill them, a warpgroup.
constexpr int converted_stages = 2;
constexpr int converting_warps = 4;

/// Warps that gather K and V where they are KeySource::gathered_pages: the producer warpgroup.
constexpr int gathering_warps = 4;

/// Everything that specialises the forward kernel of Hopper. Constants answer what shared code asks of the
/// Configs of `decode`, `forward_wide` and `sm80_forward`, too.
struct ForwardConfig {
  static constexpr Family family = Family::sm90;
  static constexpr bool v_in_k = false, pairs = false;
  static constexpr int column_slices = 1;  ///< warpgroups that share the columns of O
  static constexpr int least_blocks = 1;   ///< blocks of keys in a share

  Tiling tiling{};   ///< head dimensions: multiples of 32; block_n: a multiple of 16
  int stages = 2;    ///< K tiles, and V tiles, in flight
  int q_stages = 1;  ///< 2: the next tile's Q comes in while this tile's is still read
  int teams = 1;     ///< groups of warpgroups, each with tiles and buffers of its own
  Mask mask{};
  KeySource keys = KeySource::rows;
  ScoreTransform transform = ScoreTransform::raw;
  ForwardSchedule schedule{};
  /// The type of K and V in memory. `input`: Tiling::element. 8-bit ones become such in shared memory;
  /// their scales, by (batch, KV head), are factors of the scores and of O (WithKeyScales<Params>).
  OperandType key_type = OperandType::input;
  /// K and V have 8 bits: a scale for each key and KV head. K's are factors of the columns of S, V's of its
  /// rows, as these become 16-bit ones (WithRowScales<Params>).
  bool row_scales = false;
  Functions functions{};  ///< with them every block moves its rows' maxima (WithFunctions<Params>)

  constexpr bool operator==(const ForwardConfig&) const = default;
  /// K and V have 8 bits in memory, and a warpgroup converts them in shared memory.
  [[nodiscard]] constexpr bool has_byte_keys() const { return key_type != OperandType::input; }
  /// All warps of the producer warpgroup copy K and V, and the first loads Q.
  [[nodiscard]] constexpr bool gathers() const { return keys == KeySource::gathered_pages; }
  /// Tiles of K, and of V, that are converted, and those that products read.
  [[nodiscard]] constexpr int byte_stages() const { return has_byte_keys() ? stages : 0; }
  [[nodiscard]] constexpr int tile_stages() const { return has_byte_keys() ? converted_stages : stages; }
  [[nodiscard]] constexpr int consumers() const { return tiling.block_m / 64; }
  [[nodiscard]] static constexpr int cluster() { return 1; }
  /// Warps that read each tile of K, and of V.
  [[nodiscard]] constexpr int warps_of_k() const { return 4 * consumers(); }
  [[nodiscard]] constexpr int warps_of_v() const { return 4 * consumers(); }
  [[nodiscard]] constexpr int threads() const {
    return 128 * (consumers() * teams + (schedule.specialised ? 1 : 0) + (has_byte_keys() ? 1 : 0));
  }
  [[nodiscard]] constexpr RegisterSplit registers() const {
    if (has_byte_keys()) return split_registers_with_converter(consumers());
    if (gathers() && consumers() == 2) return {.producer = 56, .consumer = 224};
    if (schedule.specialised) return split_registers(consumers() * teams);
    const int each = registers_at_launch(threads());
    return {.producer = each, .consumer = each};
  }
};

/// Dynamic shared memory of what ForwardLoader fills: the tiles of Q, K and V, those of 8 bits that are
/// converted, their pairs of 8-byte barriers, `key_rings` of K's, and a ring of two tiles.
constexpr int loaded_shared_bytes(const auto& c, int key_rings = 1) {
  const int q_tiles = c.q_stages * c.tiling.block_m * c.tiling.head_dim_qk * 2;
  const int kv_elements = c.tiling.block_n * (c.tiling.head_dim_qk + (c.v_in_k ? 0 : c.tiling.head_dim_v));
  const bool converts = c.byte_stages() > 0;
  const int kv_tiles = c.tile_stages() * kv_elements * (c.has_byte_keys() && !converts ? 1 : 2);
  const int byte_tiles = c.byte_stages() * kv_elements;
  const int key_scales = c.row_scales && converts ? converted_stages * c.tiling.block_n * 4 : 0;
  const int rings = (key_rings + 1) * c.tile_stages() + 2 * c.byte_stages();
  const int barriers = 16 * (rings + c.q_stages * c.consumers());
  return (q_tiles + kv_tiles + byte_tiles + barriers + key_scales + 144 + 1023) / 1024 * 1024;
}

/// Dynamic shared memory of the kernel.
constexpr int forward_shared_bytes(const ForwardConfig& c) {
  return c.teams * loaded_shared_bytes(c);
}

/// CTAs of the kernel that an SM holds.
constexpr int ctas_per_sm(const ForwardConfig& /*c*/) {
  return 1;
}

/// A line of fewer blocks for each CTA that the device holds is short: fewer CTAs share it.
constexpr int enough_blocks = 8;
/// CTAs of multiprocessors of their own that together read at the memory's rate (an H200's).
constexpr int ctas_at_full_rate = 96;

/// Partial results that a tile has at most, and so CTAs that may share keys.
constexpr int combine_parts = 512;

/// What a partial result says of a row: the reference of its exponentials (logarithm to base 2), and their
/// sum. An LSE has no room for the sum's logarithm beside a far reference. Of a row that has seen nothing but
/// -inf the reference is -inf and the sum below 0, of one that has seen no key 0.
struct alignas(8) PartSum {
  float reference;
  float sum;
};
/// The partial results of `ctas` CTAs, of two tiles each; numbers of their O, and sums of their rows.
constexpr long long partial_results(int ctas) {
  return 2LL * ctas;
}
constexpr long long partial_outputs(const Tiling& t, int ctas) {
  return partial_results(ctas) * t.block_m * t.head_dim_v;
}
constexpr long long partial_sums(const Tiling& t, int ctas) {
  return partial_results(ctas) * t.block_m;
}

/// With a fixed split size: so many splits, from a multiple of that number on, are merged with each other
/// before they are merged with the rest, and so are groups of so many splits, and groups of these.
constexpr int merged_group = 16;

/// Splits of a line that have places, for each CTA, before an item of the line is a group of splits.
constexpr int splits_per_cta = 16;

/// Levels that `combine` merges, and the parts that a tile has at most for these: its last level has two
/// groups of so many, where the tile begins in one and ends in another.
constexpr int combine_levels = 4;
constexpr int combine_items = merged_group * merged_group * merged_group;

/// Numbers that a CTA which computes whole tiles keeps of a tile's splits that it has merged, on each level
/// of groups: O, and four for each thread. `column_slices`: warpgroups that share the columns of O.
constexpr long long merged_numbers(const Tiling& t, int column_slices = 1) {
  return static_cast<long long>(t.block_m) * (t.head_dim_v + 8 * column_slices);
}

struct ForwardParams {
  /// Dimensions (head_dim, rows, heads, batch), or of q with heads_as_rows (head_dim, heads, rows, batch);
  /// boxes: one strip of a SharedTile.
  TensorMap q, k, v;
  const void* q_data;  ///< what the maps of q and k describe
  const void* k_data;
  void* out;
  float* lse;         ///< may be null
  const float* sink;  ///< may be null; logits by query head
  Strides q_stride;
  Strides k_stride;
  Strides out_stride;
  Strides lse_stride;
  long long sink_stride;
  LengthArray cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  unsigned int* tile_counter;  ///< 0 before the launch (dynamic); null where every tile has a block
  int batch;
  int heads_q;  ///< with heads_as_rows, tiles' heads: those of a KV head may be several
  int heads_kv;
  int rows_q;  ///< rows of q in a batch entry, or in all when packed
  int rows_k;
  int head_dim_qk;     ///< the true one
  int head_dim_v;      ///< the true one, as out has it
  int m_blocks;        ///< tiles in rows_q (dense schedule)
  int heads_in_order;  ///< (batch, head) pairs whose tiles come head by head; the others interleave (causal)
  int window_left;     ///< INT_MAX: unbounded
  int window_right;    ///< INT_MAX: unbounded
  ScoreOptions score;  ///< read as the Config says
  bool packed_q;       ///< q and out have no batch dimension
  bool packed_k;
  bool out_vectors;                        ///< rows of out allow 16-byte stores
  PageTable pages;                         ///< read if the Config's keys are pages
  LengthArray leftpad_k, cache_batch_idx;  ///< read if they are entries, the first behind padding too
  int cache_batch;                         ///< entries of k and v
  float* part_out;     ///< partial results of splits: two of each CTA, (block_m, head_dim_v of the Config)
  PartSum* part_sums;  ///< (block_m) of each
  int split_ctas;      ///< CTAs of the grid, or with `pairs` clusters
  int part_rows;  ///< rows of a tile that `combine` merges; with a split size, a multiple of combine_rows
  // Read if the Config is invariant. part_out and part_sums then have a place of part_rows rows for each
  // part, and behind these for each CTA and each of split_levels. Without split, part_out has
  // merged_numbers() for each CTA and level of groups instead.
  int split_blocks;  ///< key blocks of a split; with splits of any size, CTAs of `combine` a tile
  // Read with heads_as_rows: 64 rows are row_heads heads of each of row_queries queries, as far as these go.
  int group;  ///< query heads that share keys
  int row_heads;
  int row_queries;
  int row_heads_reciprocal;  ///< 65536 / row_heads + 1: divides numbers below 64 by a multiplication
  // How CTAs, or clusters, share the line of key blocks (tile/split.cuh).
  short split_few_ctas;  ///< that share a short line: fewer than enough_blocks for each of split_ctas
  short split_least;     ///< blocks of a share, at least
  int split_items;  ///< tiles that `combine` has CTAs for; with a split size, items with a place in part_out
  short split_levels;  ///< with a split size: an item is merged_group^split_levels splits at most
  short split_gain;    ///< blocks that the device reads in the time that a tile in parts takes more
};

/// f32 scales by (batch, KV head) of K or V; null data stands for 1. Any value, on the device.
struct HeadScales {
  const float* data;
  long long batch_stride;
  long long head_stride;
};

/// What follows adds to ForwardParams for some Configs alone, since the 8-bit kernels' own parameters lie
/// behind those that all have.

/// Where Mask::by_sequence is set.
struct ForwardParamsBySequence : ForwardParams {
  LengthArray causal_by_sequence;  ///< not 0: this sequence's window_right is 0; null: none is
};

/// Where Tiling::max_logits is set.
struct ForwardParamsWithMaxima : ForwardParamsBySequence {
  float* max_logits;
  Strides max_logits_stride;
};

/// Where Tiling::gate is set.
struct ForwardParamsWithGate : ForwardParamsWithMaxima {
  const void* gate;  ///< elements as Tiling has them
  Strides gate_stride;
  bool gate_pairs;  ///< two elements of a row can be loaded as one word
};

/// Where V is read by its address: by the kernel `sm80_forward`, which reads no tensor map, and where keys
/// are gathered. Behind functions, which `list_blocks` reads too.
template <typename Params>
struct WithValueAddress : Params {
  const void* v_data;
  Strides v_stride;
};

/// Where K and V have 8 bits.
template <typename Params>
struct WithKeyScales : Params {
  HeadScales k_scale, v_scale;
};
using MixedForwardParams = WithKeyScales<ForwardParams>;

/// f32 scales by row of K or V, addressed as K and V are.
struct RowScales {
  const float* data;  ///< null: it has none
  Strides stride;
};
/// Where these have a scale for each key and KV head.
template <typename Params>
struct WithRowScales : Params {
  RowScales k_row_scale, v_row_scale;
};

}  // namespace tandem
