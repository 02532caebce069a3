#include "ops/backward/launch.hpp"

#include "gpu/step_params.hpp"
#include "ops/eight_bit_backward/config.hpp"

namespace tandem::gpu {
namespace {

/// Query blocks of a head in the workspace. Packed sequences may each begin inside a block of q's, and the
/// rows past the last are one more.
std::int64_t query_blocks(const Problem& p, int block_m) {
  return p.packed_q ? p.rows_q / block_m + p.batch + 2 : p.batch * blocks_of(p.rows_q, block_m);
}

/// Elements of a row that no one reads: whole vectors.
std::int64_t unwanted_row(std::int64_t head_dim) {
  return (head_dim + 7) / 8 * 8;
}

/// The kernel writes dk and dv. One that the caller does not want goes to the rows of one head in the
/// workspace, where every head overwrites what the one before it left.
Operand kept_or_discarded(const Operand& wanted, char* discarded, std::int64_t head_dim) {
  if (wanted.given()) return wanted;
  return {.data = discarded, .row_stride = unwanted_row(head_dim)};
}

/// One that goes to the workspace is written.
unsigned char added_of(const Problem& p) {
  const unsigned dq = p.adds_dq && p.dq.given() ? added_dq : 0;
  const unsigned dk = p.adds_dk_dv && p.dk.given() ? added_dk : 0;
  const unsigned dv = p.adds_dk_dv && p.dv.given() ? added_dv : 0;
  return static_cast<unsigned char>(dq | dk | dv);
}

}  // namespace

template <typename Config>
TensorMapSpec backward_tensor_map(const Problem& p, const Config& c, Loaded which) {
  const bool keys = which == Loaded::k || which == Loaded::v;
  const bool values = which == Loaded::v || which == Loaded::dout;
  return rows_tensor_map(loaded_tensor(p, which), c.tiling.element, values ? c.strip_v() : c.strip_qk(),
                         keys ? c.tiling.block_n : c.tiling.block_m, p.out.data);
}

template <typename Config>
LoadedMaps backward_maps(const Problem& p, const Config& c) {
  LoadedMaps maps;
  for (const Loaded which : backward_loaded_tensors) {
    maps[index_of(which)] = {.spec = backward_tensor_map(p, c, which)};
  }
  return maps;
}

template <typename Config>
Workspace backward_workspace(const Problem& p, const Config& c) {
  const std::int64_t blocks = p.heads_q * query_blocks(p, c.tiling.block_m);
  Workspace w;
  w.reserve(Region::lse_log2, blocks * c.tiling.block_m * 4);
  w.reserve(Region::delta, blocks * c.tiling.block_m * 4);
  w.reserve(Region::dq_sum, blocks * c.tiling.block_m * c.tiling.head_dim_qk * 4);
  w.reserve(Region::dq_semaphores, blocks * c.dq_pieces() * 4);
  w.reserve(Region::tiles_added, (p.batch + 2) * p.heads_kv * 4);
  const std::int64_t bytes = c.f32_dk_dv ? 4 : 2;
  w.reserve(Region::dk, p.dk.given() ? 0 : p.rows_k * unwanted_row(p.head_dim_qk) * bytes);
  w.reserve(Region::dv, p.dv.given() ? 0 : p.rows_k * unwanted_row(p.head_dim_v) * bytes);
  return w;
}

template <typename Config>
BackwardParams make_backward_params(const Problem& p, const Config& c, const LoadedMaps& maps,
                                    EncodeTensorMap encode, const Workspace& w, char* memory) {
  const Operand dk = kept_or_discarded(p.dk, w.at(Region::dk, memory), p.head_dim_qk);
  const Operand dv = kept_or_discarded(p.dv, w.at(Region::dv, memory), p.head_dim_v);
  return {.q = encode(maps[index_of(Loaded::q)]->spec),
          .k = encode(maps[index_of(Loaded::k)]->spec),
          .v = encode(maps[index_of(Loaded::v)]->spec),
          .dout_map = encode(maps[index_of(Loaded::dout)]->spec),
          .out = p.out.data,
          .dout = p.dout.data,
          .dq = p.dq.data,
          .dk = dk.data,
          .dv = dv.data,
          .lse = static_cast<const float*>(p.lse.data),
          .dlse = static_cast<const float*>(p.dlse.data),
          .sink = p.sink,
          .dsink = p.dsink,
          .out_stride = strides_of(p.out),
          .dout_stride = strides_of(p.dout),
          .dq_stride = strides_of(p.dq),
          .dk_stride = strides_of(dk),
          .dv_stride = strides_of(dv),
          .lse_stride = strides_of(p.lse),
          .dlse_stride = strides_of(p.dlse),
          .sink_stride = p.sink_stride,
          .dsink_stride = p.dsink_stride,
          .cu_seqlens_q = lengths_of(p.cu_seqlens_q),
          .cu_seqlens_k = lengths_of(p.cu_seqlens_k),
          .seqused_q = lengths_of(p.seqused_q),
          .seqused_k = lengths_of(p.seqused_k),
          .lse_log2 = w.at<float>(Region::lse_log2, memory),
          .delta = w.at<float>(Region::delta, memory),
          .dq_sum = w.at<float>(Region::dq_sum, memory),
          .dq_semaphores = w.at<unsigned int>(Region::dq_semaphores, memory),
          .tiles_added = w.at<unsigned int>(Region::tiles_added, memory),
          .batch = as_int(p.batch),
          .heads_q = as_int(p.heads_q),
          .heads_kv = as_int(p.heads_kv),
          .rows_q = as_int(p.rows_q),
          .rows_k = as_int(p.rows_k),
          .head_dim_qk = as_int(p.head_dim_qk),
          .head_dim_v = as_int(p.head_dim_v),
          .m_blocks = as_int(blocks_of(p.rows_q, c.tiling.block_m)),
          .n_blocks = as_int(blocks_of(p.rows_k, c.tile_keys())),
          .q_blocks = as_int(query_blocks(p, c.tiling.block_m)),
          .window_left = window_of(p.window_left),
          .window_right = window_of(p.window_right),
          .score = p,
          .packed_q = p.packed_q,
          .packed_k = p.packed_k,
          .pairs = causal_pairs(p, c.tile_keys()),
          .rows_vectors = allows_vectors(p.out, p.head_dim_v) && allows_vectors(p.dout, p.head_dim_v),
          .dq_vectors = allows_vectors(p.dq, p.head_dim_qk),
          .dk_vectors = allows_vectors(dk, p.head_dim_qk),
          .dv_vectors = allows_vectors(dv, p.head_dim_v),
          .added = added_of(p)};
}

Sm80BackwardParams make_sm80_backward_params(const Problem& p, const Sm80BackwardConfig& c,
                                             const LoadedMaps& maps, const Workspace& w, char* memory) {
  const auto no_map = [](const TensorMapSpec& /*spec*/) { return TensorMap{}; };
  return {make_backward_params(p, c, maps, no_map, w, memory),
          p.q.data,
          p.k.data,
          p.v.data,
          strides_of(p.q),
          strides_of(p.k),
          strides_of(p.v)};
}

GatedBackwardParams with_gate(const Problem& p, const Operand& gated_dout, const BackwardParams& params) {
  const auto vectors = [&](const Operand& x) { return !x.given() || allows_vectors(x, p.head_dim_v); };
  return {params,
          p.gate.data,
          gated_dout.data,
          p.dgate.data,
          strides_of(p.gate),
          strides_of(gated_dout),
          strides_of(p.dgate),
          vectors(p.gate) && vectors(gated_dout) && vectors(p.dgate)};
}

WithFunctions<BackwardParams> with_functions(const BackwardParams& p, const FunctionParams& functions) {
  return {p, functions};
}
WithAddresses<WithFunctions<BackwardParams>> with_functions(const Sm80BackwardParams& p,
                                                            const FunctionParams& functions) {
  return {{p, functions}, p.q_data, p.k_data, p.v_data, p.q_stride, p.k_stride, p.v_stride};
}

bool causal_pairs(const Problem& p, int tile_keys) {
  if (p.rows_k <= p.rows_q + p.rows_q / 8) return true;
  // Singly, all heads are computed at the same time. Eight heads of 32,768 queries then lose a fifth on an
  // H100, four of them nothing; and over many rounds pairs even out.
  constexpr int heads_at_once = 4;
  constexpr int few_tiles = 20 * 132;
  return p.heads_kv * p.batch > heads_at_once && backward_tile_count(p, tile_keys) > few_tiles;
}

std::int64_t backward_tile_count(const Problem& p, int tile_keys) {
  return p.heads_kv * tiles_of(p.rows_k, tile_keys, p.batch, p.packed_k);
}

std::int64_t backward_rows_count(const Problem& p, int block_m) {
  return p.rows_q == 0 ? 0 : p.heads_q * query_blocks(p, block_m);
}

template <typename Config>
std::int64_t backward_grid(const Problem& p, const Config& c, int multiprocessors) {
  const std::int64_t tiles = backward_tile_count(p, c.tile_keys());
  std::int64_t blocks = std::max(multiprocessors / c.cluster, 1);  // clusters, from here on
  if (c.mask.causal && c.schedule.deterministic && !c.mask.varlen && tiles > 0) {
    // Rounds run forwards and backwards alternately. Tiles of descending work then even out if the CTAs of a
    // round have whole heads, or whole parts of one.
    const std::int64_t head = blocks_of(p.rows_k, c.tile_keys());
    const std::int64_t rounds = (head + blocks - 1) / blocks;
    const std::int64_t even = rounds == 1 ? blocks - blocks % head : (head + rounds - 1) / rounds;
    if (even > blocks * 9 / 10) blocks = even;
  }
  return std::min(tiles, blocks) * c.cluster;
}

namespace {

template <typename Config>
void fill_as(const Config& config, StepParams& call) {
  const Problem& p = call.problem();
  const Workspace& workspace = call.steps().workspace;
  const auto plain = [&] {
    if constexpr (Config::family == Family::sm80) {
      return make_sm80_backward_params(p, config, call.maps(), workspace, call.memory());
    } else {
      return make_backward_params(p, config, call.maps(), call.encode(), workspace, call.memory());
    }
  };
  if (!config.functions.given()) return call.fill(plain);
  const FunctionParams functions = call.functions(
      config.functions.block_lists ? listed_query_blocks(p, config.tile_keys(), config.tiling.block_m)
                                   : ListedBlocks{});
  const auto with = [&] { return with_functions(plain(), functions); };
  if (!config.functions.captured_gradients) return call.fill(with);
  call.fill([&] {
    WithCapturedGradients<decltype(with())> params{with(), {}};
    set_captured_gradients(p, params.gradients);
    return params;
  });
}

}  // namespace

template TensorMapSpec backward_tensor_map(const Problem&, const BackwardConfig&, Loaded);
template TensorMapSpec backward_tensor_map(const Problem&, const Sm80BackwardConfig&, Loaded);
template LoadedMaps backward_maps(const Problem&, const BackwardConfig&);
template LoadedMaps backward_maps(const Problem&, const Sm80BackwardConfig&);
template Workspace backward_workspace(const Problem&, const BackwardConfig&);
template Workspace backward_workspace(const Problem&, const Sm80BackwardConfig&);
template BackwardParams make_backward_params(const Problem&, const BackwardConfig&, const LoadedMaps&,
                                             EncodeTensorMap, const Workspace&, char*);
template BackwardParams make_backward_params(const Problem&, const Sm80BackwardConfig&, const LoadedMaps&,
                                             EncodeTensorMap, const Workspace&, char*);
template Workspace backward_workspace(const Problem&, const EightBitBackwardConfig&);
template BackwardParams make_backward_params(const Problem&, const EightBitBackwardConfig&, const LoadedMaps&,
                                             EncodeTensorMap, const Workspace&, char*);
template std::int64_t backward_grid(const Problem&, const BackwardConfig&, int);
template std::int64_t backward_grid(const Problem&, const EightBitBackwardConfig&, int);
template std::int64_t backward_grid(const Problem&, const Sm80BackwardConfig&, int);

// The kernels around the main one read what lies before functions.
void fill_backward(StepParams& call, const Step& /*step*/) {
  visit_backward(call.steps().config, [&](const auto& config) { fill_as(config, call); });
}

void fill_gated_preprocess(StepParams& call, const Step& /*step*/) {
  visit_backward(call.steps().config, [&](const auto& config) {
    call.fill([&] {
      const Problem& p = call.problem();
      return with_gate(
          p, *call.steps().sources[index_of(Loaded::dout)],
          make_backward_params(p, config, call.maps(), call.encode(), call.steps().workspace, call.memory()));
    });
  });
}

void fill_clear_gradients(StepParams& call, const Step& /*step*/) {
  call.fill([&] { return make_clear_params(call.problem()); });
}

BlockShape backward_block(const KernelConfig& config) {
  return visit_backward(config, [](const auto& c) {
    return BlockShape{.threads = c.threads(), .shared_bytes = backward_shared_bytes(c), .cluster = c.cluster};
  });
}
BlockShape backward_rows_block(const KernelConfig& config) {
  return visit_backward(config,
                        [](const auto& c) { return BlockShape{.threads = backward_rows_threads(c)}; });
}

}  // namespace tandem::gpu
