#include "ops/forward/launch.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <utility>

#include "gpu/param_fields.hpp"
#include "gpu/step_params.hpp"
#include "ops/eight_bit/config.hpp"
#include "plan/facts.hpp"
#include "problem/effective.hpp"
#include "problem/mixed.hpp"

namespace tandem::gpu {
namespace {

/// The (batch, query head) pairs whose causal tiles come head by head; those of the others are interleaved.
/// On `sms` SMs of equal speed, the tiles that begin after the last of a sequence's longest should take as
/// long as it does: m_blocks of its work, where a head has m_blocks (m_blocks + 1) / 2. It is twice as many
/// heads, since SMs do not become free all at once.
int heads_in_order(std::int64_t heads, std::int64_t m_blocks, int sms) {
  const std::int64_t interleaved = std::int64_t{2} * sms / (m_blocks + 1) + 1;
  return as_int(std::max<std::int64_t>(0, heads - interleaved));
}

/// What the rows of a tile are.
struct TileRows {
  int unit;  ///< rows that one box of Q fills
  HeadRows of_unit;
  std::int64_t queries;  ///< queries a tile has
  std::int64_t heads;    ///< that tiles have, one each; of a group they may be fewer than its query heads

  TileRows(const Problem& p, const Tiling& tiling)
      : unit(tiling.unit()),
        of_unit(tiling.heads_as_rows ? best_head_rows(p, unit) : HeadRows{.queries = unit}),
        queries(tiling.block_m / unit * of_unit.queries),
        heads(tiling.heads_as_rows ? of_unit.tile_heads(p) : p.heads_q) {}

  /// Rows of a tile that `count` queries take, or as many as there are.
  [[nodiscard]] std::int64_t before(std::int64_t count) const {
    const std::int64_t taken = std::min(count, queries);
    return taken / of_unit.queries * unit + taken % of_unit.queries * of_unit.heads;
  }
  /// Rows of a tile that `combine` merges. Packed sequences may fill any tile.
  [[nodiscard]] std::int64_t to_merge(const Problem& p) const {
    return p.packed_q ? queries / of_unit.queries * unit : before(p.rows_q);
  }
};

}  // namespace

TensorMapSpec forward_tensor_map(const Problem& p, const Tiling& tiling, Loaded which) {
  const int padded = which == Loaded::v ? tiling.head_dim_v : tiling.head_dim_qk;
  const int box_rows = which == Loaded::q ? tiling.unit()
                       : p.pages.given()  ? page_box_rows(p, tiling.block_n)
                                          : tiling.block_n;
  const bool bytes = which != Loaded::q && p.mixed();
  TensorMapSpec spec =
      rows_tensor_map(loaded_tensor(p, which), tiling.element,
                      bytes ? byte_strip_columns(padded) : strip_columns(padded), box_rows, p.out.data);
  // Tiles of few rows wait for memory, and fetches of 128 bytes, a row of a box, reach more of it: on an H200
  // `decode` 4.4 TB/s in place of 4.0, with e4m3 keys and with latent ones up to 9 and 2 % more.
  spec.wide_fetch = which == Loaded::q || tiling.block_m > 64;
  if (which == Loaded::q && tiling.heads_as_rows) {
    const HeadRows rows = TileRows(p, tiling).of_unit;
    std::swap(spec.dims[1], spec.dims[2]);
    std::swap(spec.strides[0], spec.strides[1]);
    spec.box[1] = as_int(rows.heads);
    spec.box[2] = as_int(rows.queries);
  }
  return spec;
}

LoadedMaps forward_maps(const Problem& p, const Tiling& tiling) {
  LoadedMaps maps;
  for (const Loaded which : forward_loaded_tensors) {
    maps[index_of(which)] = {.spec = forward_tensor_map(p, tiling, which)};
  }
  return maps;
}

ForwardParams make_forward_params(const Problem& p, const Tiling& tiling, const LoadedMaps& maps,
                                  EncodeTensorMap encode, int sms, unsigned int* tile_counter,
                                  const SplitParts& parts) {
  const TileRows rows(p, tiling);
  return {.q = encode(maps[index_of(Loaded::q)]->spec),
          .k = encode(maps[index_of(Loaded::k)]->spec),
          .v = encode(maps[index_of(Loaded::v)]->spec),
          .q_data = p.q.data,
          .k_data = p.k.data,
          .out = p.out.data,
          .lse = static_cast<float*>(p.lse.data),
          .sink = p.sink,
          .q_stride = strides_of(p.q),
          .k_stride = strides_of(p.k),
          .out_stride = strides_of(p.out),
          .lse_stride = strides_of(p.lse),
          .sink_stride = p.sink_stride,
          .cu_seqlens_q = lengths_of(p.cu_seqlens_q),
          .cu_seqlens_k = lengths_of(p.cu_seqlens_k),
          .seqused_q = lengths_of(p.seqused_q),
          .seqused_k = lengths_of(p.seqused_k),
          .tile_counter = tile_counter,
          .batch = as_int(p.batch),
          .heads_q = as_int(rows.heads),
          .heads_kv = as_int(p.heads_kv),
          .rows_q = as_int(p.rows_q),
          .rows_k = as_int(p.rows_k),
          .head_dim_qk = as_int(p.head_dim_qk),
          .head_dim_v = as_int(p.head_dim_v),
          .m_blocks = as_int(blocks_of(p.rows_q, rows.queries)),
          .heads_in_order = heads_in_order(rows.heads * p.batch, blocks_of(p.rows_q, rows.queries), sms),
          .window_left = window_of(p.window_left),
          .window_right = window_of(p.window_right),
          .score = p,
          .packed_q = p.packed_q,
          .packed_k = p.packed_k,
          .out_vectors = allows_vectors(p.out, p.head_dim_v),
          .pages = page_table_of(p, tiling.block_n),
          .leftpad_k = lengths_of(p.leftpad_k),
          .cache_batch_idx = lengths_of(p.cache_batch_idx),
          .cache_batch = as_int(p.cache_batch),
          .part_out = parts.out,
          .part_sums = parts.sums,
          .split_ctas = parts.division.most_ctas,
          .part_rows = parts.division.part_rows,
          .split_blocks = parts.division.split_blocks,
          .group = as_int(p.group()),
          .row_heads = as_int(rows.of_unit.heads),
          .row_queries = as_int(rows.of_unit.queries),
          .row_heads_reciprocal = 65536 / as_int(rows.of_unit.heads) + 1,
          .split_few_ctas = static_cast<short>(parts.division.few_ctas),
          .split_least = static_cast<short>(parts.division.least),
          .split_items = parts.division.items,
          .split_levels = static_cast<short>(parts.division.levels),
          .split_gain = static_cast<short>(parts.division.gain)};
}

ForwardParamsWithMaxima with_maxima(const Problem& p, const ForwardParams& params) {
  return {{params, lengths_of(p.causal_by_sequence)},
          static_cast<float*>(p.max_logits.data),
          strides_of(p.max_logits)};
}

ForwardParamsWithGate with_gate(const Problem& p, const ForwardParams& params) {
  return {with_maxima(p, params), p.gate.data, strides_of(p.gate), allows_pairs(p.gate, p.head_dim_v)};
}

HeadScales head_scales_of(const Scales& s) {
  if (is_by_row(s)) return {};
  return {.data = s.data, .batch_stride = s.batch_stride, .head_stride = s.head_stride};
}

HeadScales score_scales_of(const Problem& p) {
  return head_scales_of(p.q_scale.data != nullptr ? p.q_scale : p.k_scale);
}

RowScales row_scales_of(const Scales& s) {
  if (!is_by_row(s)) return {};
  return {.data = s.data, .stride = {.batch = s.batch_stride, .row = s.group_stride, .head = s.head_stride}};
}

TensorMap no_tensor_map(const TensorMapSpec& /*spec*/) {
  return {};
}

namespace {

/// The most items of `item` keys that a tile visits: as many as its sequence has, or as a window shows.
std::int64_t most_items(const Problem& p, const Tiling& tiling, std::int64_t item) {
  const std::int64_t all = blocks_of(p.rows_k, item);
  if (p.window_left < 0 || p.window_right < 0) return std::max<std::int64_t>(1, all);
  const std::int64_t seen = blocks_of(TileRows(p, tiling).queries + p.window_left + p.window_right, item) + 1;
  return std::clamp<std::int64_t>(all, 1, seen);
}

/// Items of all tiles.
std::int64_t split_items(const Problem& p, const Tiling& tiling, std::int64_t item) {
  const std::int64_t of_tiles = forward_tile_count(p, tiling) * most_items(p, tiling, item);
  if (!p.packed_k || p.packed_q) return of_tiles;
  // Sequences whose keys follow each other in k have no more items than these together.
  const TileRows rows(p, tiling);
  const std::int64_t tiles = rows.heads * blocks_of(p.rows_q, rows.queries);
  return std::min(of_tiles, tiles * (p.rows_k / item + p.batch));
}

/// Levels of groups whose splits one CTA merges, if it merges all of a tile's: one at least.
int levels_of(std::int64_t splits) {
  int levels = 1;
  for (std::int64_t most = merged_group; most < splits; most *= merged_group) ++levels;
  return levels;
}

/// CTAs, or clusters, that the device holds at once, where they share keys no more than `combine` can merge.
template <typename Config>
std::int64_t most_ctas(const Config& config, int multiprocessors) {
  const std::int64_t most =
      std::max<std::int64_t>(1, std::int64_t{multiprocessors} * ctas_per_sm(config) / config.cluster());
  const bool merged = config.schedule.split && !config.schedule.invariant;
  return merged ? std::min<std::int64_t>(most, combine_parts) : most;
}

/// How CTAs share a line of key blocks. The kernel `decode` has two an SM, of which the second is worth
/// enough_blocks each, and the first one two: `combine` has to read what they leave. A partial result of wide
/// heads is as large as two blocks of keys.
struct Sharing {
  std::int64_t most;   ///< CTAs, or clusters, of which each has a share
  std::int64_t few;    ///< for a short line
  std::int64_t least;  ///< blocks of a share

  template <typename Config>
  Sharing(const Config& config, int multiprocessors)
      : most(most_ctas(config, multiprocessors)),
        few(std::is_same_v<Config, DecodeConfig> ? multiprocessors : most),
        least(config.least_blocks) {}

  /// How many CTAs, or clusters, share a line of at most `blocks` key blocks.
  [[nodiscard]] int ctas(std::int64_t blocks) const {
    if (blocks >= enough_blocks * most) return as_int(most);
    return as_int(std::min({most, few, blocks_of(blocks, least)}));
  }
};

}  // namespace

template <typename Config>
WorkDivision divide_work(const Problem& p, const Config& config, int multiprocessors) {
  const Tiling& tiling = config.tiling;
  const std::int64_t tiles = forward_tile_count(p, tiling);
  const std::int64_t most = most_ctas(config, multiprocessors);
  const int ctas_of_share = config.pairs ? 2 : 1;
  const auto ctas_of = [&](std::int64_t items) { return static_cast<int>(std::min(items, most)); };
  WorkDivision d{.ctas = ctas_of(tiles), .most_ctas = as_int(most), .few_ctas = as_int(most)};
  // The GPU deals CTAs of a tile each, and begins one where another ends.
  if (Config::family == Family::sm80) d.ctas = static_cast<int>(std::min<std::int64_t>(tiles, INT_MAX));
  if (config.schedule.invariant) {
    constexpr std::int64_t largest = std::int64_t{1} << 30;  // positions are 32-bit numbers
    const std::int64_t split_size = std::min(p.split_size, largest);
    d.split_blocks = as_int(split_size / tiling.block_n);
    if (!config.schedule.split) {
      d.ctas = ctas_of(tiles);  // each has room for what it has merged
      d.part_outputs =
          merged_numbers(tiling, config.column_slices) * d.ctas * levels_of(blocks_of(p.rows_k, split_size));
      return d;
    }
    // How many splits are in use the device knows alone. The places are as many as all of its CTAs need, and
    // items as large as makes them fit; each tile can have one.
    const std::int64_t places = std::max(tiles, splits_per_cta * most);
    std::int64_t item = split_size;
    const auto exceeds = [&] {
      return split_items(p, tiling, item) > places || most_items(p, tiling, item) > combine_items;
    };
    for (; exceeds(); item *= merged_group) ++d.levels;
    const std::int64_t items = std::min(split_items(p, tiling, split_size), places);
    const TileRows rows(p, tiling);
    d.ctas = ctas_of(items);
    d.items = as_int(items);
    d.part_rows = as_int(blocks_of(rows.to_merge(p), combine_rows) * combine_rows);
    const std::int64_t kept = std::int64_t{d.ctas} * d.levels;
    d.part_outputs = (items + kept) * d.part_rows * tiling.head_dim_v;
    d.part_sums = (items + kept * config.column_slices) * d.part_rows;
    if (most_items(p, tiling, split_size) > 1) d.combine_ctas = tiles * (d.part_rows / combine_rows) + 1;
  } else if (!config.schedule.split && config.cluster() > 1) {
    d.ctas *= config.cluster();
    d.part_rows = as_int(TileRows(p, tiling).to_merge(p));
  } else if (config.schedule.split) {
    const std::int64_t blocks = std::max<std::int64_t>(1, blocks_of(p.rows_k, tiling.block_n));
    const Sharing sharing(config, multiprocessors);
    const std::int64_t shared_tiles = tiles / ctas_of_share;
    if (config.cluster() > ctas_of_share) {      // clusters may take whole tiles
      d.ctas = as_int(most) * config.cluster();  // as many as shares want
      d.most_ctas = d.ctas;
      const int bytes_of_key = (config.has_byte_keys() ? 1 : 2) * (tiling.head_dim_qk + tiling.head_dim_v);
      d.gain = as_int(std::llround(sharing_takes * bytes_together / (tiling.block_n * bytes_of_key)));
    } else {
      d.ctas = ctas_of_share * (shared_tiles >= most ? as_int(most) : sharing.ctas(shared_tiles * blocks));
    }
    d.items = as_int(shared_tiles);
    d.few_ctas = as_int(sharing.few);
    d.least = as_int(sharing.least);
    d.part_outputs = partial_outputs(tiling, d.ctas);
    d.part_sums = partial_sums(tiling, d.ctas);
    d.part_rows = as_int(TileRows(p, tiling).to_merge(p));
    if constexpr (requires { Config::merges_parts; }) {
      d.part_sums += partial_results(d.ctas);  // a flag each
    } else {
      // Each CTA of `combine` searches for its tile: many tiles have few each.
      const std::int64_t enough = std::int64_t{8} * multiprocessors;
      d.split_blocks = as_int(
          std::clamp<std::int64_t>(enough / std::max<std::int64_t>(tiles, 1), 4, combine_ctas(tiling)));
      d.split_blocks = std::min(d.split_blocks, std::max(d.part_rows, 1));
      if (d.ctas > ctas_of_share) d.combine_ctas = tiles * d.split_blocks + 1;
    }
  }
  // Sequences that overlap make the line longer than it can be otherwise: those launched share it even so.
  d.most_ctas = std::min(d.most_ctas, d.ctas / ctas_of_share);
  d.few_ctas = std::min(d.few_ctas, d.most_ctas);
  return d;
}
template WorkDivision divide_work(const Problem& p, const ForwardConfig& config, int multiprocessors);
template WorkDivision divide_work(const Problem& p, const Sm80ForwardConfig& config, int multiprocessors);
template WorkDivision divide_work(const Problem& p, const DecodeConfig& config, int multiprocessors);
template WorkDivision divide_work(const Problem& p, const LatentConfig& config, int multiprocessors);

std::int64_t forward_tile_count(const Problem& p, const Tiling& tiling) {
  const TileRows rows(p, tiling);
  return rows.heads * tiles_of(p.rows_q, rows.queries, p.batch, p.packed_q);
}

namespace {

template <typename Config>
void fill_as(const Config& config, StepParams& call) {
  const Problem& p = call.problem();
  const Steps& steps = call.steps();
  constexpr bool sm80 = Config::family == Family::sm80;
  SplitParts parts{.division = steps.work};
  if (config.schedule.split || config.schedule.invariant) {
    parts.out = call.at<float>(Region::part_out);
    parts.sums = call.at<PartSum>(Region::part_sums);
  }
  const ForwardParams params =
      make_forward_params(p, config.tiling, call.maps(), sm80 ? &no_tensor_map : call.encode(),
                          steps.multiprocessors, sm80 ? nullptr : call.tile_counter(), parts);
  const auto fill = [&](const auto& all) { call.fill([&] { return all; }); };
  if (!config.functions.given()) return with_params_of(config, p, params, nullptr, fill);
  const FunctionParams functions =
      call.functions(config.functions.block_lists ? listed_blocks(p, config.tiling) : ListedBlocks{});
  with_params_of(config, p, params, &functions, fill);
}

}  // namespace

// `combine` and `list_blocks` read what lies before additions.
void fill_forward(StepParams& call, const Step& /*step*/) {
  visit_forward(call.steps().config, [&](const auto& config) { fill_as(config, call); });
}

BlockShape forward_block(const KernelConfig& config) {
  return visit_forward(config, [](const auto& c) {
    return BlockShape{
        .threads = c.threads(), .shared_bytes = forward_shared_bytes(c), .cluster = c.cluster()};
  });
}
BlockShape combine_block(const KernelConfig& config) {
  return {.threads = 32 * combine_rows,
          .shared_bytes = combine_shared_bytes(std::get<CombineConfig>(config))};
}

}  // namespace tandem::gpu
