#include "plan/facts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "gpu/kernels.hpp"
#include "gpu/param_fields.hpp"
#include "ops/decode/config.hpp"
#include "plan/unsupported.hpp"
#include "problem/mixed.hpp"

namespace tandem {

static_assert(ctas_at_full_rate * bytes_alone >= bytes_together);

namespace {

/// Shared memory of an SM, of which CTAs have all but the kilobyte that the system takes of each. Of a GPU
/// that is not known, the least that any has.
int shared_bytes_of(const gpu::DeviceProperties& device) {
  constexpr int kilobyte = 1024;
  if (device.major == 8) return (device.minor == 0 || device.minor == 7 ? 164 : 100) * kilobyte;
  return (device.major >= 9 && device.major <= 11 ? 228 : 100) * kilobyte;
}

}  // namespace

DeviceFacts facts_of(const gpu::DeviceProperties& device) {
  const char* const set = std::getenv("TANDEM_KERNELS");
  const std::string_view wish = set == nullptr ? "" : set;
  if (!wish.empty() && wish != "sm80" && wish != "sm90")
    unsupported("TANDEM_KERNELS is {}; it may be sm80, sm90, or unset for the GPU's own", wish);
  if (!gpu::is_supported(device)) {
    unsupported(
        "{} has compute capability {}.{}; the GPU kernels need 8.0 (Ampere) or later; copy the tensors to "
        "the CPU",
        device.name, device.major, device.minor);
  }
  const bool hopper = gpu::is_hopper(device);
  if (!hopper && wish == "sm90") {
    unsupported(
        "TANDEM_KERNELS=sm90 asks for kernels that compute capability 9.0 alone runs, {} has {}.{}; unset it",
        device.name, device.major, device.minor);
  }
  return {.properties = &device,
          .family = hopper && wish != "sm80" ? Family::sm90 : Family::sm80,
          .wished = hopper && wish == "sm80",
          .multiprocessors = device.multiprocessors,
          .shared_bytes_per_sm = shared_bytes_of(device)};
}

namespace {

constexpr int widest_captured = 128;

bool captures_wide_heads(const Problem& p) {
  return p.pass == Pass::backward && p.wants_captured_gradients() &&
         std::max(p.head_dim_qk, p.head_dim_v) > widest_captured;
}

/// Why the kernels sm80 are portable on a GPU; those of a GPU that is only described are planned as if all
/// compiled.
std::string why_portable(const Problem& p, const DeviceFacts& device) {
  if (device.properties == nullptr || p.device.index >= gpu::first_described) return {};
  return gpu::why_portable(gpu::architecture_of(*device.properties));
}

/// Tiles of the few queries, of which a head's are one if heads are not rows.
double tiles_of(const CallFacts& f) {
  const Problem& p = f.problem;
  const int unit = f.decodes ? decode_rows : few;
  const HeadRows rows = !f.heads_as_rows ? HeadRows{.queries = unit}
                        : f.decodes      ? best_head_rows(p, unit)
                                         : f.head_rows;
  const std::int64_t tiles_a_head = (f.queries + rows.queries - 1) / rows.queries;
  return static_cast<double>(std::max<std::int64_t>(p.batch, 1) * rows.tile_heads(p) * tiles_a_head);
}

/// Whether CTAs share the splits of a fixed size of `tiles` of few queries: whole tiles that are many keep
/// all multiprocessors of Hopper busy.
bool shares_splits(const CallFacts& f, double tiles) {
  const Problem& p = f.problem;
  const double enough_tiles = 4.0 * f.device.multiprocessors;  // of 64 rows
  return p.rows_k > p.split_size && !(p.packed_q && p.packed_k) &&
         (f.family == Family::sm80 || tiles < enough_tiles);
}

/// Whether they share the keys (docs/kernels/decode.md has the numbers, of an H200). A tile alone is read at
/// the rate of one multiprocessor; shared ones at that of the memory, and `combine` takes its time. Lengths
/// that only the device knows may be very unequal: whole tiles then wait for the longest, unless they are
/// many.
bool shares_keys(const CallFacts& f, double tiles) {
  const Problem& p = f.problem;
  const double multiprocessors = f.device.multiprocessors;
  if (f.keys < worth_sharing || tiles >= busy_tiles * multiprocessors) return false;
  if (f.mask.varlen) return true;
  // A multiprocessor widens keys of 8 bits more slowly than memory brings them.
  const double alone = p.mixed() && f.decodes ? 22e3 : bytes_alone;
  constexpr double combining = 7;  // microseconds
  const double bytes =
      static_cast<double>(f.keys * (p.head_dim_qk + p.head_dim_v)) * static_cast<double>(size_of(p.k.dtype));
  const double shared = tiles * bytes / bytes_together + combining;
  if (f.decodes) {
    const double ctas = 2 * multiprocessors;  // whose tiles the last round may leave some without
    const double at_once = std::min(tiles, ctas);
    return shared < std::ceil(tiles / ctas) * bytes / std::min(alone, bytes_together / at_once);
  }
  return shared < std::ceil(tiles / multiprocessors) * bytes / alone && tiles < multiprocessors;
}

}  // namespace

namespace {

/// Whether the forward kernel is to read the 8-bit k and v of a mixed problem as they are, if TMA can: a
/// cache's always, and others where few queries read them or a split size has one sequence's bits depend on
/// nothing else. Otherwise they are dequantized first, once for all tiles of queries.
bool reads_eight_bits(const Problem& p) {
  if (has_block_scales(p) || has_wide_heads(p) || p.has_function()) return false;
  return p.of_cache() || p.seqused_k.given() || p.split_size > 0 || queries_of(p) <= few;
}

/// Finds what TMA cannot read of k and v of 8 bits. Which columns and rows a tile has makes no difference.
void find_objection(CallFacts& f) {
  constexpr int strip = 64;
  const Problem& p = f.problem;
  for (const auto& [name, which] : {std::pair{"k", gpu::Loaded::k}, {"v", gpu::Loaded::v}}) {
    f.objection = tma_objection(
        gpu::rows_tensor_map(gpu::loaded_tensor(p, which), Element::bf16, strip, 1, p.out.data));
    if (f.objection == nullptr) continue;
    f.unreadable = name;
    return;
  }
}

/// Makes the problem of a forward call by the exact formula the one that its kernels see.
void see(CallFacts& f) {
  Problem& p = f.problem;
  f.widens_queries = has_exact_quantized_inputs(p);
  if (f.widens_queries) p.q.dtype = p.out.dtype;
  if (p.mixed()) {
    const bool reads = reads_eight_bits(p);
    if (reads && f.family == Family::sm90) find_objection(f);
    f.dequantizes = !reads || f.objection != nullptr;
    if (f.dequantizes) p = dequantized(p);
  }
  fold_heads_into_rows(p);
}

}  // namespace

CallFacts::CallFacts(const Problem& asked, const DeviceFacts& d)
    : problem(asked), device(d), family(d.family) {
  if (captures_wide_heads(asked)) family = Family::sm80;
  if (family == Family::sm80) portable = why_portable(asked, d);
  const bool exact = asked.pass == Pass::forward && asked.precision == Precision::exact;
  if (exact) see(*this);
  const Problem& p = problem;
  mask = {.causal = needs_right_mask(p),
          .local = needs_left_mask(p),
          .varlen = has_lengths(p),
          .by_sequence = p.causal_by_sequence.given()};
  wide_heads = has_wide_heads(p);
  values_in_keys = wide_heads && has_values_in_keys(p);
  queries = queries_of(p);
  keys = p.packed_k ? p.rows_k / std::max<std::int64_t>(p.batch, 1) : p.rows_k;
  has_few_queries = exact && queries <= few;
  if (!has_few_queries) return;
  decodes = !wide_heads && !p.has_function() && !p.max_logits.given() && !p.gate.given() &&
            p.split_size == 0 && p.group() > 0 && queries * p.group() <= decode_rows;
  head_rows = best_head_rows(p);
  heads_as_rows = head_rows.heads > 1;
  const double tiles = tiles_of(*this);
  shares_keys = p.split_size > 0 ? shares_splits(*this, tiles) : tandem::shares_keys(*this, tiles);
}

std::string why_family(const CallFacts& f) {
  const gpu::DeviceProperties& d = *f.device.properties;
  if (f.family != f.device.family)
    return fmt::format("captured_gradients with head dimensions above {} take them on Hopper, too",
                       widest_captured);
  if (f.device.wished) return "TANDEM_KERNELS asks for them";
  if (f.family == Family::sm90) return "compute capability 9.0 has WGMMA and TMA";
  return fmt::format("compute capability {}.{} has no WGMMA", d.major, d.minor);
}

}  // namespace tandem
