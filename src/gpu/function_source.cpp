#include "gpu/function_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "gpu/bounds_printer.hpp"

#include "gpu/function_printer.hpp"
#include "gpu/gradient_printer.hpp"
#include "gpu/param_fields.hpp"
#include "gpu/sources.hpp"

namespace tandem::gpu {
namespace {

static_assert(most_captured == static_cast<int>(Function::max_captured));

/// The mask function's numbers have the first places, and what only gradients need the last ones: no other
/// number's place depends on whether those are wanted.
struct CallNumbers {
  explicit CallNumbers(const CallFunctions& functions)
      : mask(functions.mask, 0), score(functions.score, mask.end()) {}
  FunctionNumbers mask;
  FunctionNumbers score;
};

/// What the text of a function is made from, and nothing else of it. `wanted`: of which tensors' gradients.
std::uint64_t digest_of(const Function& f, const FunctionNumbers& numbers, std::uint32_t wanted,
                        std::uint64_t h) {
  const auto add = [&h](const auto& value) {
    h = fnv1a({reinterpret_cast<const char*>(&value), sizeof value}, h);
  };
  bool differentiates = false;
  for (const FunctionGradient& g : f.gradients()) {
    if (!is_wanted(f, g, wanted)) continue;
    differentiates = true;
    add(g.read);
    add(g.slope);
  }
  add(f.kind());
  const std::span<const FunctionNode> nodes = differentiates ? f.all_nodes() : f.nodes();
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    const FunctionNode& node = nodes[n];
    add(node.op);
    add(node.type);
    add(node.args);
    add(node.captured);
    add(numbers.place_of(n));
    if (numbers.place_of(n) < 0) add(node.value);
  }
  add(f.result());
  add(f.slope());
  for (const ConstTensor& t : f.captured()) {
    add(t.dtype);
    add(t.rank);
    add(has_wide_strides(t));
  }
  return h;
}

}  // namespace

Functions functions_config(const CallFunctions& functions) {
  if (!functions.given()) return {};
  std::uint64_t h = fnv_offset;
  const CallNumbers numbers(functions);
  if (functions.score != nullptr) h = digest_of(*functions.score, numbers.score, functions.gradients, h);
  if (functions.mask != nullptr) h = digest_of(*functions.mask, numbers.mask, 0, h);
  return {
      .digest = std::max<std::uint64_t>(h, 1),
      .score_function = functions.score != nullptr,
      .mask_function = functions.mask != nullptr,
      .dropout = functions.dropout != nullptr,
      .dropout_places = functions.dropout != nullptr && functions.dropout->places != nullptr,
      .captured_gradients = functions.gradients != 0 && any_wanted(*functions.score, functions.gradients)};
}

CallFunctions functions_of(const Problem& p) {
  CallFunctions functions{
      .score = p.score_function, .mask = p.mask_function, .dropout = p.dropout.on ? &p.dropout : nullptr};
  for (std::size_t n = 0; n < p.captured_gradients.size(); ++n) {
    if (p.captured_gradients[n].given()) functions.gradients |= 1U << n;
  }
  return functions;
}

std::string function_source(const CallFunctions& functions) {
  if (!functions.given()) return {};
  const CallNumbers numbers(functions);
  std::vector<FunctionPrinter> printers;
  const bool differentiates = functions_config(functions).captured_gradients;
  if (differentiates) {
    printers.push_back(GradientPrinter(*functions.score, numbers.score, 's', 0, functions.gradients));
  } else if (functions.score != nullptr) {
    printers.emplace_back(*functions.score, numbers.score, 's', 0);
  }
  if (functions.mask != nullptr) printers.emplace_back(*functions.mask, numbers.mask, 'm', most_captured);
  const auto all = [&](const char* separator, auto&& text_of) {
    std::string text;
    for (const FunctionPrinter& printer : printers) {
      const std::string part = text_of(printer);
      if (!part.empty()) text += (text.empty() ? "" : separator) + part;
    }
    return text;
  };
  const auto made = [&](Shape shape) {
    return all("", [&](const FunctionPrinter& p) { return p.statements(shape); }) +
           fmt::format("    return {{{}}};\n  }}\n",
                       all(", ", [&](const FunctionPrinter& p) { return p.values(shape); }));
  };
  std::string text =
      fmt::format("namespace tandem::tile {{\ntemplate <>\nstruct UserFunctions<{:#x}ULL> {{\n",
                  functions_config(functions).digest);
  for (const auto& [name, shape] : {std::pair{"Row", Shape::row}, {"Key", Shape::key}}) {
    text += fmt::format("  struct {} {{\n{}  }};\n", name,
                        all("", [&, shape = shape](const FunctionPrinter& p) { return p.members(shape); }));
  }
  constexpr const char* sequence = "[[maybe_unused]] const FunctionSequence& sequence, [[maybe_unused]] ";
  text += fmt::format("  static TANDEM_DEVICE Row row({}i32 head, [[maybe_unused]] i32 query) {{\n{}",
                      sequence, made(Shape::row));
  text += fmt::format("  static TANDEM_DEVICE Key key({}i32 key) {{\n{}", sequence, made(Shape::key));
  text += fmt::format(
      "  static TANDEM_DEVICE Logit pair({}const Row& row, [[maybe_unused]] const Key& key,\n"
      "                                  float score) {{\n{}",
      sequence, all("", [](const FunctionPrinter& p) { return p.statements(Shape::pair); }));
  const bool scored = functions.score != nullptr;
  text += fmt::format("    return {{{}, {}, {}}};\n  }}\n", scored ? printers.front().result() : "score",
                      scored ? printers.front().slope() : "1.0F",
                      functions.mask != nullptr ? printers.back().result() : "true");
  if (differentiates)
    text += GradientPrinter(*functions.score, numbers.score, 's', 0, functions.gradients).text();
  if (functions.mask != nullptr)
    text += BoundsPrinter(*functions.mask, numbers.mask, 'm', most_captured).text();
  return text + "};\n}  // namespace tandem::tile\n";
}

namespace {

std::optional<int> operations_of_pairs(const Function& f) {
  constexpr unsigned by_query = 1, by_score = 2;
  std::array<unsigned, Function::max_nodes> depends{};
  int operations = 0;
  for (std::size_t n = 0; n < f.nodes().size(); ++n) {
    const FunctionNode& node = f.nodes()[n];
    depends[n] = node.op == FunctionOp::query ? by_query : node.op == FunctionOp::score ? by_score : 0U;
    for (const std::int16_t a : node.args) {
      if (a >= 0) depends[n] |= depends[static_cast<std::size_t>(a)];
    }
    if (node.op == FunctionOp::read && (depends[n] & by_query) != 0) return std::nullopt;
    const bool special = node.op >= FunctionOp::exp && node.op <= FunctionOp::fmod;
    if (node.args[0] >= 0 && depends[n] != 0) operations += special ? 3 : 1;
  }
  return operations;
}

}  // namespace

std::optional<int> operations_of_pairs(const CallFunctions& functions) {
  int operations = 0;
  for (const Function* f : {functions.score, functions.mask}) {
    if (f == nullptr) continue;
    const std::optional<int> more = operations_of_pairs(*f);
    if (!more) return std::nullopt;
    operations += *more;
  }
  return operations;
}

FunctionParams function_params(const CallFunctions& functions) {
  FunctionParams params{};
  int first = 0;
  for (const Function* f : {functions.score, functions.mask}) {
    const std::span<const ConstTensor> captured =
        f != nullptr ? f->captured() : std::span<const ConstTensor>();
    for (std::size_t n = 0; n < captured.size(); ++n) {
      CapturedTensor& t = params.tensors[static_cast<std::size_t>(first) + n];
      t.data = captured[n].data;
      for (std::size_t d = 0; d < static_cast<std::size_t>(captured[n].rank); ++d) {
        t.strides[d] = captured[n].stride[d] * static_cast<std::int64_t>(size_of(captured[n].dtype));
        t.last[d] = as_int(captured[n].shape[d]) - 1;
      }
    }
    first += most_captured;
  }
  const CallNumbers numbers(functions);
  numbers.mask.set(params);
  numbers.score.set(params);
  params.dropout.scale = 1.0F;
  if (const Dropout* const d = functions.dropout; d != nullptr) {
    params.dropout = {.threshold = d->threshold,
                      .scale = d->scale,
                      .key = {d->key[0], d->key[1]},
                      .offset = d->offset,
                      .heads = d->heads,
                      .places = d->places,
                      .place_stride = d->place_stride};
  }
  return params;
}

void set_captured_gradients(const Problem& p, CapturedGradient (&gradients)[most_captured]) {
  std::fill_n(gradients, most_captured, CapturedGradient{});
  for (std::size_t n = 0; n < p.captured_gradients.size(); ++n) {
    const Tensor& t = p.captured_gradients[n];
    if (!t.given()) continue;
    gradients[n].data = static_cast<float*>(t.data);
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d)
      gradients[n].strides[d] = t.stride[d] * static_cast<std::int64_t>(sizeof(float));
  }
}

ClearParams make_clear_params(const Problem& p) {
  ClearParams params{};
  set_captured_gradients(p, params.gradients);
  for (std::size_t n = 0; n < most_captured; ++n) {
    const bool given = n < p.captured_gradients.size() && p.captured_gradients[n].given();
    params.counts[n] = given ? p.captured_gradients[n].numel() : 0;
    for (std::size_t d = 0; d < std::size(params.extents[n]); ++d) {
      const bool has = given && d < static_cast<std::size_t>(p.captured_gradients[n].rank);
      params.extents[n][d] = has ? as_int(p.captured_gradients[n].shape[d]) : 1;
    }
  }
  return params;
}

std::int64_t clear_grid(const Problem& p, int multiprocessors) {
  std::int64_t most = 1;
  for (const Tensor& t : p.captured_gradients) most = std::max(most, t.given() ? t.numel() : 0);
  constexpr int ctas_of_multiprocessor = 8;
  return std::min<std::int64_t>((most + clear_threads - 1) / clear_threads,
                                std::int64_t{ctas_of_multiprocessor} * multiprocessors);
}

namespace {

/// Lists of `tiles` tiles with `blocks` blocks each, for all heads and batch entries unless the mask function
/// depends on them.
ListedBlocks lists_of(const Problem& p, std::int64_t tiles, std::int64_t blocks) {
  const auto depends = [&](FunctionOp leaf) {
    const std::span<const FunctionNode> nodes = p.mask_function->nodes();
    return std::any_of(nodes.begin(), nodes.end(), [&](const FunctionNode& n) { return n.op == leaf; });
  };
  const std::int64_t stride = blocks + 1;
  const std::int64_t heads = depends(FunctionOp::head) ? p.heads_q : 1;
  const std::int64_t batch = depends(FunctionOp::batch) ? p.batch : 1;
  return {.lists = {.data = nullptr,
                    .batch_stride = batch > 1 ? heads * tiles * stride : 0,
                    .head_stride = heads > 1 ? tiles * stride : 0,
                    .stride = as_int(stride),
                    .heads = as_int(heads)},
          .count = batch * heads * tiles};
}

}  // namespace

ListedBlocks listed_blocks(const Problem& p, const Tiling& tiling) {
  return lists_of(p, blocks_of(p.rows_q, tiling.block_m), blocks_of(p.rows_k, tiling.block_n));
}

ListedBlocks listed_query_blocks(const Problem& p, int tile_keys, int block_m) {
  return lists_of(p, blocks_of(p.rows_k, tile_keys), blocks_of(p.rows_q, block_m));
}

}  // namespace tandem::gpu
