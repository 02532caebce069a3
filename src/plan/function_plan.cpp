#include "plan/function_plan.hpp"

#include <fmt/format.h>

#include <array>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "gpu/function_source.hpp"
#include "problem/effective.hpp"
#include "tandem/error.hpp"

namespace tandem {
namespace {

template <typename... Args>
[[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(Status::unsupported, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace

void check_gpu_functions(const Problem& p) {
  if (!p.has_function()) return;
  if (has_wide_heads(p)) {
    unsupported(
        "a score or mask function, or dropout, with head dimensions above {} has no GPU kernel; copy the "
        "tensors to the CPU",
        max_gpu_head_dim);
  }
  if (is_eight_bit(p.k.dtype) && p.of_cache()) {
    unsupported(
        "a score or mask function, or dropout, on a cache in {} has no GPU kernel; keep the cache in {}, or "
        "copy the "
        "tensors to the CPU",
        name_of(p.k.dtype), name_of(p.mixed() ? p.q.dtype : p.out.dtype));
  }
  if (p.causal_by_sequence.given()) {
    unsupported(
        "causal_by_sequence with a score or mask function, or dropout, has no GPU kernel; let a mask "
        "function "
        "read the mask of each batch entry, or copy the tensors to the CPU");
  }
  if (p.wants_captured_gradients() && p.deterministic) {
    unsupported(
        "captured_gradients are added up in any order on a GPU; leave deterministic or captured_gradients "
        "out, or copy the tensors to the CPU");
  }
  for (const Function* f : {p.score_function, p.mask_function}) {
    if (f == nullptr) continue;
    for (std::size_t n = 0; n < f->captured().size(); ++n) {
      const ConstTensor& t = f->captured()[n];
      for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
        if (t.shape[d] <= INT_MAX) continue;
        unsupported("dimension {} of captured tensor t{} has size {}, above the GPU kernels' {}; split it", d,
                    n, t.shape[d], INT_MAX);
      }
    }
  }
}

ForwardConfig with_functions(ForwardConfig c, const Problem& p) {
  if (!p.has_function()) return c;
  constexpr std::int64_t worth_listing = 512;  // keys: the lists are a launch more
  c.functions = gpu::functions_config(gpu::functions_of(p));
  // A score function takes the scaled score itself.
  if (c.functions.score_function && c.transform == ScoreTransform::raw) c.transform = ScoreTransform::scaled;
  if (const char* t = std::getenv("TANDEM_TRY"); t != nullptr && std::strchr(t, 'e') != nullptr)
    c.schedule.output_late = false;  // no registers are left for it
  // Lists are of tiles of one head's queries and of lengths that the host knows.
  const bool whole_tiles = !c.mask.varlen && !c.schedule.split && !c.schedule.invariant &&
                           !c.tiling.heads_as_rows && c.keys == KeySource::rows && !c.converts();
  c.functions.block_lists = c.functions.mask_function && whole_tiles && c.tiling.block_m <= list_rows &&
                            c.schedule.overlap && p.rows_k >= worth_listing;
  return c;
}

namespace {

/// Operations of the function's nodes that the backward pass has for every pair; nothing if it reads an
/// element by query, or by query and key.
std::optional<int> operations_of_pairs(const Function& f) {
  constexpr unsigned by_query = 1, by_key = 2, by_score = 4;
  std::array<unsigned, Function::max_nodes> depends{};
  int operations = 0;
  for (std::size_t n = 0; n < f.nodes().size(); ++n) {
    const FunctionNode& node = f.nodes()[n];
    depends[n] = node.op == FunctionOp::query   ? by_query
                 : node.op == FunctionOp::key   ? by_key
                 : node.op == FunctionOp::score ? by_score
                                                : 0U;
    for (const std::int16_t a : node.args) {
      if (a >= 0) depends[n] |= depends[static_cast<std::size_t>(a)];
    }
    if (node.op == FunctionOp::read && (depends[n] & by_query) != 0) return std::nullopt;
    const bool leaf = node.args[0] < 0;
    if (!leaf && (depends[n] & (by_query | by_score)) != 0) ++operations;
  }
  return operations;
}

}  // namespace

bool has_light_functions(const Problem& p) {
  constexpr int most = 12;
  int operations = 0;
  for (const Function* f : {p.score_function, p.mask_function}) {
    if (f == nullptr) continue;
    const auto more = operations_of_pairs(*f);
    if (!more) return false;
    operations += *more;
  }
  return operations <= most && !p.dropout.on && !p.wants_captured_gradients();
}

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
