#include "emulated_forward.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "functions/any_function.hpp"
#include "gpu/function_source.hpp"
#include "ops/forward/plan.hpp"

namespace tandem::kernel_tests {

using harness::Call;
using harness::Case;
using harness::Random;

namespace {

/// Puts the keys of a case where the Config looks for them.
void make_cache(Case& c, KeySource keys, Random& random) {
  c.packed_k = false;
  c.lengths_k.clear();
  if (in_pages(keys)) {
    c.page_size = keys == KeySource::gathered_pages ? random.pick<std::int64_t>({1, 2, 6, 16, 24})
                                                    : random.pick<std::int64_t>({2, 6, 16, 24, 64});
    c.seqlen_k = (c.seqlen_k / c.page_size + 1) * c.page_size;
  } else {
    c.cache_batch = c.batch + 1;
    for (std::int64_t b = 0; b < c.batch; ++b) c.cache_index.push_back(random.between(0, c.batch));
  }
  c.used_k.clear();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    c.used_k.push_back(random.between(0, c.seqlen_k));
    if (keys == KeySource::entries || keys == KeySource::padded_pages)
      c.leftpad.push_back(random.between(0, c.used_k.back()));
  }
}

/// Whether the tiles of a KV head's query heads are an even number.
bool are_pairs(const Case& c) {
  Problem p;
  p.batch = c.batch;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.rows_q = c.rows_q();
  p.packed_q = c.packed_q;
  return c.heads_kv > 0 && best_head_rows(p).tile_heads(p) / c.heads_kv % 2 == 0;
}

/// Groups whose tiles are pairs: one pair or two, of tiles that are full or not.
void take_pairs(Case& c, Random& random) {
  const auto take = [&](std::int64_t group) { c.heads_q = c.heads_kv * group; };
  if (random.chance(0.3)) {  // tiles of several queries
    c.seqlen_q = 3;
    for (std::int64_t& length : c.lengths_q) length = std::min<std::int64_t>(length, 3);
    for (std::int64_t& used : c.used_q) used = std::min<std::int64_t>(used, 3);
  }
  take(random.pick<std::int64_t>({40, 71, 96, 127, 250}));
  if (!are_pairs(c)) take(128);
}

/// Few queries of groups of any size, so that tiles have several heads of each.
void take_few_queries(Case& c, Random& random) {
  constexpr std::int64_t most = 20;
  c.heads_q = c.heads_kv * random.pick<std::int64_t>({1, 2, 3, 4, 7, 8, 12, 40, 71});
  c.seqlen_q = random.between(1, most);
  for (std::int64_t& length : c.lengths_q) length %= most;
  for (std::size_t b = 0; b < c.used_q.size(); ++b) {
    c.used_q[b] = std::min(c.used_q[b] % most, c.packed_q ? c.lengths_q[b] : c.seqlen_q);
  }
}

}  // namespace

std::uint64_t digest_of(const Call& call, Pass pass) {
  static constexpr Dropout any{};
  gpu::CallFunctions functions{.score = call.score_of(),
                               .mask = call.mask_of(),
                               .dropout = call.spec.options.dropout_p > 0.0F ? &any : nullptr};
  if (pass == Pass::backward) {
    for (const int n : call.spec.differentiated) functions.gradients |= 1U << n;
  }
  return gpu::functions_config(functions).digest;
}

harness::Case random_forward_case(std::uint64_t seed, const EmulatedConfig& config) {
  Random random(seed + 1000);
  Case c = harness::random_case(seed, 300);
  c.dtype = c.out_dtype = config.tiling.element == Element::f16 ? DType::f16 : DType::bf16;
  c.scales = 0;
  if (config.has_byte_keys()) {
    c.key_dtype = config.key_type == OperandType::e4m3 ? DType::e4m3 : DType::s8;
    c.scales = config.row_scales                      ? 3
               : config.key_type == OperandType::e4m3 ? static_cast<int>(random.between(0, 2))
                                                      : 2;
    if (config.row_scales && random.chance(0.5)) c.scale_layout.order = {0, 2, 1};
  }
  c.batch = std::min<std::int64_t>(c.batch, 2);
  c.heads_kv = std::min<std::int64_t>(c.heads_kv, 2);
  c.heads_q = c.heads_kv * random.between(1, 2);
  c.head_dim_qk = config.tiling.head_dim_qk - 8 * random.between(0, 3);
  c.head_dim_v = config.tiling.head_dim_v - 8 * random.between(0, 3);
  c.seqlen_q = std::max<std::int64_t>(c.seqlen_q, 1);
  const auto batch = static_cast<std::size_t>(c.batch);
  choose_lengths(c, config.mask.varlen, random);
  if (config.keys != KeySource::rows) make_cache(c, config.keys, random);
  for (std::vector<std::int64_t>* lengths : {&c.lengths_q, &c.lengths_k, &c.used_q, &c.used_k}) {
    if (lengths->size() > batch) lengths->resize(batch);
  }
  if (config.tiling.heads_as_rows) take_few_queries(c, random);
  if (config.pairs) take_pairs(c, random);
  c.options.causal = config.mask.causal && c.options.causal;
  if (!config.mask.causal) c.options.window_right = -1;
  if (!config.mask.local) c.options.window_left = -1;
  if (config.mask.causal && !config.mask.local) c.options.causal = true;
  if (config.mask.local && c.options.window_left < 0) c.options.window_left = random.between(0, 80);
  c.options.softcap = config.transform == ScoreTransform::softcap ? random.pick({0.5F, 2.0F, 15.0F}) : 0.0F;
  c.options.split_size = config.invariant ? random.pick<std::int64_t>({128, 256}) : 0;
  if (config.transform == ScoreTransform::scaled) c.options.scale = random.pick({0.0F, -0.125F});
  if (config.transform == ScoreTransform::raw && c.options.scale.value_or(1.0F) <= 0.0F)
    c.options.scale = 0.3F;
  c.lse = random.chance(0.8);
  c.f32_out = config.tiling.f32_out;
  c.gate = config.tiling.gate;
  c.causal_by_sequence.clear();
  if (config.mask.by_sequence) {
    c.options.causal = false;
    for (std::int64_t b = 0; b < c.batch; ++b) c.causal_by_sequence.push_back(random.between(0, 1));
  }
  if (config.has_byte_keys()) {
    c.head_dim_qk = config.tiling.head_dim_qk - 16 * random.between(0, 2);
    c.head_dim_v = config.tiling.head_dim_v - 16 * random.between(0, 2);
    // Of packed keys scales by row go with other queries alone.
    const bool takes_queries = !config.row_scales || !c.packed_k;
    if (config.key_type == OperandType::e4m3 && !config.tiling.f32_out && takes_queries && !c.gate &&
        seed % 3 == 2) {
      c.dtype = DType::e4m3;  // queries, too
      c.key_dtype = {};
    }
  }
  const int rank_q = c.packed_q ? 3 : 4;
  const int rank_k = c.packed_k ? 3 : 4;
  c.q = harness::random_layout(random, rank_q, true);
  c.k = harness::random_layout(random, rank_k, true);
  c.v = harness::random_layout(random, rank_k, true);
  if (config.keys != KeySource::rows) c.k.expanded = c.v.expanded = 0;
  if (config.has_byte_keys()) {
    for (harness::Layout* layout : {&c.k, &c.v}) {
      layout->pad = layout->pad / 16 * 16;
      layout->base_offset = layout->base_offset / 16 * 16;
    }
  }
  c.v_in_k = config.v_in_k;
  if (c.v_in_k) c.head_dim_v = std::min(c.head_dim_v, c.head_dim_qk);
  c.out = harness::random_layout(random, rank_q, false);
  if (c.gate) c.gate_layout = harness::random_layout(random, rank_q, false);
  c.dout = c.dq = c.dk = c.dv = {};
  return c;
}

namespace {

/// Whether TMA can read k and v of a case as they lie: 8-bit ones are not copied.
bool tma_reads_keys(const Case& c, const Tiling& tiling) {
  Call call(c);
  Problem p = problem_of(call.forward_args());
  if (p.quantized_inputs()) p.q.dtype = p.out.dtype;
  return tma_can_read(gpu::forward_tensor_map(p, tiling, gpu::Loaded::k)) &&
         tma_can_read(gpu::forward_tensor_map(p, tiling, gpu::Loaded::v));
}

/// Whether a kernel has functions of a case's kind, and those were printed.
std::string refuses_functions(const Case& c, const Functions& functions) {
  const bool scored = !c.score_function.empty();
  const bool dropout = c.options.dropout_p > 0.0F;
  const bool given = scored || dropout || !c.mask_function.empty();
  if (given != functions.given() || scored != functions.score_function || dropout != functions.dropout ||
      functions.dropout_places == c.dropout_places.empty())
    return "other functions";
  if (!given) return {};
  if (functions.block_lists && c.mask_function.empty()) return "lists are of a mask function";
  return printed_functions(digest_of(Call(c))) == nullptr ? "its functions were not printed" : "";
}

}  // namespace

std::string EmulatorRunner::refuses(const Case& c) const {
  const EmulatedConfig& config = kernel_.config;
  if ((c.options.split_size > 0) != config.invariant) return "a split size takes a Config of its own";
  if (std::string objection = refuses_functions(c, config.functions); !objection.empty()) return objection;
  const DType keys_dtype = c.key_dtype.value_or(c.dtype);
  const OperandType key_type = keys_dtype == DType::e4m3 ? OperandType::e4m3
                               : keys_dtype == DType::s8 ? OperandType::s8
                                                         : OperandType::input;
  if (key_type != config.key_type || c.options.precision != Precision::exact) return "other keys";
  if ((config.has_byte_keys() && c.scales == 3) != config.row_scales) return "scales of another kind";
  // e4m3 queries become what out is.
  const DType queries = c.dtype == DType::e4m3 ? c.out_dtype : c.dtype;
  if (queries != (config.tiling.element == Element::f16 ? DType::f16 : DType::bf16))
    return "another element type";
  if (c.head_dim_qk > config.tiling.head_dim_qk || c.head_dim_v > config.tiling.head_dim_v)
    return "larger head dimensions";
  if ((c.options.causal || c.options.window_right >= 0) && !config.mask.causal)
    return "the Config has no right edge";
  if (c.options.window_left >= 0 && !config.mask.local) return "the Config has no left edge";
  const float scale = c.options.scale.value_or(1.0F);
  const bool raw = scale > 0.0F && !config.has_byte_keys() && !config.functions.score_function;
  const ScoreTransform needed = c.options.softcap > 0.0F ? ScoreTransform::softcap
                                : raw                    ? ScoreTransform::raw
                                                         : ScoreTransform::scaled;
  if (needed != config.transform) return "another score transform";
  if (c.f32_out != config.tiling.f32_out) return "out has another type";
  if (c.gate != config.tiling.gate) return "a gate takes a Config of its own";
  if (!c.causal_by_sequence.empty() && !config.mask.by_sequence) return "the mask is one for all sequences";
  if (c.causal_by_sequence.empty() && config.mask.by_sequence) return "the mask is by sequence";
  if (config.v_in_k && !c.v_in_k) return "v is not in k";
  if (config.pairs && !are_pairs(c)) return "its tiles are no pairs";
  const KeySource keys = c.page_size > 0 ? (c.leftpad.empty() ? KeySource::pages : KeySource::padded_pages)
                         : c.of_cache()  ? KeySource::entries
                                         : KeySource::rows;
  const bool gathered = keys == KeySource::pages && config.keys == KeySource::gathered_pages;
  if (keys != config.keys && !gathered) return "keys lie elsewhere";
  if (gathered && (c.page_size > most_gathered_page || c.head_dim_qk % 8 != 0 || c.head_dim_v % 8 != 0))
    return "TMA loads such pages";
  const bool varlen = c.of_cache() || c.packed_q || c.packed_k || !c.used_q.empty() || !c.used_k.empty();
  if (varlen && !config.mask.varlen) return "lengths differ";
  if (config.has_byte_keys()) {
    const bool single_rows = keys == KeySource::padded_pages || c.page_size % 2 != 0;
    const bool wide = config.tiling.head_dim_qk % 128 == 0 && config.tiling.head_dim_v % 128 == 0;
    if (single_rows && !wide) return "single rows of pages take 128 columns";
    if (!tma_reads_keys(c, config.tiling)) return "TMA cannot read the keys";
  }
  return {};
}

ForwardParams EmulatorRunner::launch_forward(const Problem& p, const gpu::SplitParts& parts,
                                             unsigned int* tile_counter, const emulator::Options& options) {
  const Tiling& tiling = kernel_.config.tiling;
  const gpu::BlockShape shape = gpu::forward_block(kernel_.config.of_kernel);
  emulator::Grid grid{.blocks = static_cast<unsigned>(parts.division.ctas),
                      .threads = static_cast<unsigned>(shape.threads),
                      .shared_bytes = static_cast<std::size_t>(shape.shared_bytes),
                      .cluster = static_cast<unsigned>(shape.cluster)};
  gpu::LoadedMaps maps = gpu::forward_maps(p, tiling);
  if (kernel_.config.v_in_k) maps[gpu::index_of(gpu::Loaded::v)] = maps[gpu::index_of(gpu::Loaded::k)];
  const bool sm80 = kernel_.config.family == Family::sm80;
  // Where a CTA can have any tiles, some have several, as in a grid that is at its limit.
  if (sm80 && parts.division.part_outputs == 0 && seed % 2 == 1) grid.blocks = std::min(grid.blocks, blocks);
  const ForwardParams params =
      gpu::make_forward_params(p, tiling, maps, sm80 ? &gpu::no_tensor_map : &emulator::encode, sms,
                               sm80 ? nullptr : tile_counter, parts);
  if (kernel_.config.functions.given()) {
    launch_with_functions(p, params, grid, options);
  } else {
    kernel_.launch(p, params, nullptr, grid, options);
  }
  return params;
}

void EmulatorRunner::launch_with_functions(const Problem& p, const ForwardParams& params,
                                           const emulator::Grid& grid, emulator::Options options) {
  FunctionParams functions_of_call = gpu::function_params(gpu::functions_of(p));
  if (kernel_.lists != nullptr) {
    const gpu::ListedBlocks listed = gpu::listed_blocks(p, kernel_.config.tiling);
    lists.assign(static_cast<std::size_t>(listed.bytes()) / sizeof(unsigned int), ~0U);
    functions_of_call.lists = listed.lists;
    functions_of_call.lists.data = lists.data();
    emulator::Options listing = options;
    listing.buffers.push_back(emulator::writable(lists));
    kernel_.lists(p, params, &functions_of_call,
                  {.blocks = static_cast<unsigned>(listed.count),
                   .threads = list_threads,
                   .shared_bytes = list_shared_bytes},
                  listing);
    options.buffers.push_back(emulator::readable(lists));
  }
  kernel_.launch(p, params, &functions_of_call, grid, options);
}

void EmulatorRunner::forward(Call& call) {
  Problem p = problem_of(call.forward_args());
  fold_heads_into_rows(p);
  const std::int64_t tiles = gpu::forward_tile_count(p, kernel_.config.tiling);
  if (tiles == 0) return;
  emulator::Options options{.seed = seed, .unordered = call.rows_overlap};
  add_buffers(options, call.inputs(), false);
  add_buffers(options, call.outputs(Pass::forward), true);
  std::array<std::vector<std::uint16_t>, 3> packed;
  std::vector<float> scales;
  if (p.quantized_inputs()) widen_in_emulator(p, packed[gpu::index_of(gpu::Loaded::q)], scales, options);
  for (const gpu::Loaded which : gpu::forward_loaded_tensors) {
    if (which == gpu::Loaded::v && kernel_.config.v_in_k) continue;
    if (tma_can_read(gpu::forward_tensor_map(p, kernel_.config.tiling, which))) continue;
    auto& target = packed[gpu::index_of(which)];
    const gpu::LoadedTensor tensor = gpu::loaded_tensor(p, which);
    pack_in_emulator(gpu::operand_of(p, which), target, tensor.batch, tensor.rows, tensor.heads,
                     tensor.head_dim, options);
    options.buffers.push_back(emulator::readable(target));
  }
  std::vector<unsigned int> tile_counter(1, 0);
  options.buffers.push_back(emulator::writable(tile_counter));
  const bool split = kernel_.config.split;
  const auto ctas = static_cast<int>(split ? split_blocks : blocks);
  gpu::WorkDivision work = gpu::visit_forward(
      kernel_.config.of_kernel, [&](const auto& c) { return gpu::divide_work(p, c, ctas / ctas_per_sm(c)); });
  if (seed % 2 == 1) work.gain = 0;  // where the device decides, it decides against clusters
  // NaN: nothing may be read that no CTA has written.
  std::vector<float> part_out(static_cast<std::size_t>(work.part_outputs), std::nanf(""));
  std::vector<PartSum> part_sums(static_cast<std::size_t>(work.part_sums), {std::nanf(""), std::nanf("")});
  emulator::Options merging = options;
  if (work.part_outputs > 0) {
    options.buffers.push_back(emulator::writable(part_out));
    options.buffers.push_back(emulator::writable(part_sums));
    merging.of_previous_grid = {emulator::readable(part_out), emulator::readable(part_sums)};
    for (const emulator::Buffer& parts : merging.of_previous_grid) merging.buffers.push_back(parts);
  }
  if (kernel_.config.functions.given())
    running = functions != nullptr ? functions : printed_functions(digest_of(call));
  const gpu::SplitParts parts{part_out.data(), part_sums.data(), work};
  const ForwardParams params =
      launch_forward(p, parts, tiles > blocks ? tile_counter.data() : nullptr, options);
  // A flag that is left up would be seen by the next call in this memory.
  for (const PartSum& sum : part_sums) {
    if (std::bit_cast<u64>(sum) == ptx::raised_flag) throw emulator::Fault("a flag is left up");
  }
  if (work.combine_ctas == 0) return;
  kernel_.combine(
      p, params,
      {.blocks = static_cast<unsigned>(work.combine_ctas),
       .threads = 32 * combine_rows,
       .shared_bytes = static_cast<std::size_t>(gpu::visit_forward(
           kernel_.config.of_kernel, [](const auto& c) { return combine_shared_bytes(combine_config(c)); }))},
      merging);
}

void EmulatorRunner::backward(Call& call) {
  tandem::backward(call.backward_args(), Execution{});
}

}  // namespace tandem::kernel_tests
