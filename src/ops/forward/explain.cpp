// The forward kernel's Config in words.
#include <fmt/format.h>

#include "config/fields.hpp"
#include "ops/decode/plan.hpp"
#include "ops/forward/launch.hpp"
#include "ops/forward/plan.hpp"
#include "ops/latent/plan.hpp"

namespace tandem {
namespace {

constexpr const char* keeps_maxima = "unmasked blocks keep their rows' maxima, and are checked";
constexpr const char* few_rows = "few queries a sequence, and too many tiles, or too few keys, to share them";
constexpr const char* gathered_tiles = "blocks of as many keys as without pages, and so the same bits";
constexpr const char* converted_tiles =
    "k and v of 8 bits: what shared memory holds of them beside the 16-bit tiles that they become";

}  // namespace

std::string words_of_rows(const Problem& p, const Tiling& tiling) {
  if (!tiling.heads_as_rows) return fmt::format("{} queries", tiling.block_m);
  const HeadRows rows = best_head_rows(p, tiling.unit());
  return fmt::format("{} queries of {} heads that share keys", tiling.block_m / tiling.unit() * rows.queries,
                     rows.heads);
}

template <typename Config>
std::vector<std::string> explain_tiles(const CallFacts& facts, const Config& c, const char* why,
                                       const char* maxima) {
  const Problem& problem = facts.problem;
  std::string at_once;
  if constexpr (requires { c.teams; }) {
    if (c.teams > 1) at_once = fmt::format(", {} at a time", c.teams);
  }
  std::vector<std::string> lines = {
      fmt::format("kernel {}: {}, head_dim {} padded to {}, head_dim_v {} to {}", gpu::kernel_of(c).entry,
                  name_of(c.tiling.element), problem.head_dim_qk, c.tiling.head_dim_qk, problem.head_dim_v,
                  c.tiling.head_dim_v),
      fmt::format("tile {} x {} keys{}, {} stages, ping-pong {}: {}", words_of_rows(problem, c.tiling),
                  c.tiling.block_n, at_once, c.stages, c.schedule.pingpong ? "on" : "off", why),
      fmt::format("{} persistent scheduler; {}{}", c.schedule.dynamic ? "dynamic" : "static", maxima,
                  c.schedule.output_late ? "; the output is waited for behind the exponentials" : ""),
      fmt::format("{} bytes of shared memory, {} registers a consumer thread", forward_shared_bytes(c),
                  forward_register_limit(c)),
  };
  if (c.has_byte_keys()) {
    lines.push_back(
        fmt::format("k and v are read in {} and become {} in {}; scales are factors of the scores and of {}",
                    name_of(c.key_type), name_of(c.tiling.element),
                    c.byte_stages() > 0 ? "shared memory, by a warpgroup of its own" : "registers",
                    c.row_scales ? "v, by row" : "out"));
  }
  if (c.keys == KeySource::gathered_pages)
    lines.push_back(fmt::format("pages of {} keys are gathered row by row, by the threads of a warpgroup",
                                problem.pages.page_size));
  if (c.keys == KeySource::padded_pages) {
    lines.emplace_back(
        "keys are loaded a row of a page at a time, behind leftpad_k: pages that begin with a key "
        "are loaded in larger boxes");
  }
  return lines;
}
template std::vector<std::string> explain_tiles(const CallFacts&, const DecodeConfig&, const char*,
                                                const char*);
template std::vector<std::string> explain_tiles(const CallFacts&, const LatentConfig&, const char*,
                                                const char*);

std::vector<std::string> explain_forward(const CallFacts& facts, const ForwardConfig& c) {
  const char* const why = c.schedule.invariant     ? (c.schedule.split ? fixed_parts : fixed_tiles)
                          : c.schedule.split       ? shared_keys
                          : c.tiling.heads_as_rows ? few_rows
                          : c.has_byte_keys()      ? converted_tiles
                          : c.gathers()            ? gathered_tiles
                                                   : forward_tile(facts, c).why;
  const bool moves = c.schedule.invariant || c.functions.given() || c.tiling.max_logits;
  return explain_tiles(facts, c, why, moves ? moves_maxima : keeps_maxima);
}

}  // namespace tandem
