#include "ops/functions/plan.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "gpu/function_source.hpp"
#include "ops/forward/sm80/config.hpp"

namespace tandem {
namespace {

/// The schedule of Hopper's kernel beside functions.
ForwardSchedule with_functions(ForwardSchedule s, const Problem& p, bool score_function) {
  // Beside functions that read for a pair, take many operations or drop out no registers are left for it.
  const std::optional<int> operations = gpu::operations_of_pairs(gpu::functions_of(p));
  s.output_late = s.output_late && gpu::are_light(operations) && !p.dropout.on;
  // With ALiBi finding maxima is 3 to 8 % faster than to ask of each block whether it has outgrown them, with
  // a tanh 1 to 7 % slower, with a table 40 to 55 % (records/runs/gpu-functions-h200.md).
  constexpr int few_operations = 4;
  const bool few = operations.has_value() && *operations <= few_operations;
  s.finds_maxima = score_function && (few || p.dropout.on);
  return s;
}

}  // namespace

template <typename Config>
Config with_functions(Config c, const Problem& p) {
  if (!p.has_function()) return c;
  constexpr std::int64_t worth_listing = 512;  // keys: the lists are a launch more
  c.functions = gpu::functions_config(gpu::functions_of(p));
  // A score function takes the scaled score itself.
  if (c.functions.score_function && c.transform == ScoreTransform::raw) c.transform = ScoreTransform::scaled;
  if constexpr (std::is_same_v<Config, ForwardConfig>)
    c.schedule = with_functions(c.schedule, p, c.functions.score_function);
  // Lists are of tiles of one head's queries and of lengths that the host knows.
  const bool whole_tiles = !c.mask.varlen && !c.schedule.split && !c.schedule.invariant &&
                           !c.tiling.heads_as_rows && c.keys == KeySource::rows && !c.has_byte_keys();
  c.functions.block_lists =
      c.functions.mask_function && whole_tiles && c.tiling.block_m <= list_rows && p.rows_k >= worth_listing;
  return c;
}
template ForwardConfig with_functions(ForwardConfig config, const Problem& problem);
template Sm80ForwardConfig with_functions(Sm80ForwardConfig config, const Problem& problem);

namespace {

std::string explain_blocks(const Problem& p, bool lists) {
  const Functions functions = gpu::functions_config(gpu::functions_of(p));
  if (p.score_function == nullptr && p.mask_function == nullptr)
    return "dropout: the random bits are made where P is, and made again backward";
  const std::string first =
      fmt::format("functions {:016x}: compiled into the kernel at its first call; ", functions.digest);
  if (!lists) {
    return first +
           fmt::format("every block that causal and window leave is computed, and every pair's {} evaluated",
                       !functions.score_function ? "mask is"
                       : functions.mask_function ? "score and mask are"
                                                 : "score is");
  }
  return first + fmt::format(
                     "blocks that the mask hides whole are left out, by lists that a kernel makes first; "
                     "the mask is evaluated where it hides a part of a block{}",
                     functions.score_function ? ", and every pair's score" : "");
}

}  // namespace

std::string explain_gpu_functions(const Problem& p, bool lists) {
  std::string blocks = explain_blocks(p, lists);
  if (!p.wants_captured_gradients()) return blocks;
  return std::move(blocks) +
         "; gradients of what the score function reads are added up by atomic operations, in any order";
}

}  // namespace tandem
