// Functions of the caller's own: where they run, and that what they read is there.
#include <array>

#include "api/problem_builder.hpp"
#include "problem/mask_window.hpp"

namespace tandem {

using check::invalid;

namespace {

constexpr const char* tensor_names[] = {"t0", "t1", "t2",  "t3",  "t4",  "t5",  "t6",  "t7",
                                        "t8", "t9", "t10", "t11", "t12", "t13", "t14", "t15"};
static_assert(std::size(tensor_names) == Function::max_captured);

constexpr const char* gradient_names[] = {
    "captured_gradients[0]",  "captured_gradients[1]",  "captured_gradients[2]",  "captured_gradients[3]",
    "captured_gradients[4]",  "captured_gradients[5]",  "captured_gradients[6]",  "captured_gradients[7]",
    "captured_gradients[8]",  "captured_gradients[9]",  "captured_gradients[10]", "captured_gradients[11]",
    "captured_gradients[12]", "captured_gradients[13]", "captured_gradients[14]", "captured_gradients[15]"};
static_assert(std::size(gradient_names) == Function::max_captured);

/// What an index that is a leaf runs over; 0: not known here.
std::int64_t extent_of(const Problem& p, FunctionOp leaf) {
  switch (leaf) {
    case FunctionOp::batch: return p.batch;
    case FunctionOp::head: return p.heads_q;
    case FunctionOp::query: return p.packed_q || p.seqused_q.given() ? 0 : p.rows_q;
    case FunctionOp::key: return p.packed_k || p.seqused_k.given() || p.of_cache() ? 0 : p.rows_k;
    default: return 0;
  }
}

/// An index that is a leaf and runs past the end of what it indexes.
void indices_in_range(const char* name, const Function& f, const Problem& p) {
  for (const FunctionNode& node : f.nodes()) {
    if (node.op != FunctionOp::read) continue;
    const ConstTensor& t = f.captured()[static_cast<std::size_t>(node.captured)];
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.rank); ++d) {
      const FunctionNode& index = f.nodes()[static_cast<std::size_t>(node.args[d])];
      const std::int64_t extent = extent_of(p, index.op);
      if (extent <= t.shape[d]) continue;
      constexpr const char* leaves[] = {"the batch", "the query head", "the query", "the key"};
      const auto leaf = static_cast<std::size_t>(index.op) - static_cast<std::size_t>(FunctionOp::batch);
      invalid(
          "{} reads t{} at {}, up to {}, but dimension {} of t{} has size {}; make it {}, or index another "
          "way",
          name, node.captured, leaves[leaf], extent - 1, d, node.captured, t.shape[d], extent);
    }
  }
}

}  // namespace

void ProblemBuilder::functions() {
  function("score_function", in_.score_function, Function::Kind::score);
  function("mask_function", in_.mask_function, Function::Kind::mask);
  p_.score_function = in_.score_function;
  p_.mask_function = in_.mask_function;
  fold_mask_window(p_);
}

void ProblemBuilder::function(const char* name, const Function* f, Function::Kind kind) const {
  if (f == nullptr) return;
  if (f->nodes().empty()) invalid("{} is empty; make it with a FunctionBuilder or Function::parse", name);
  if (f->kind() != kind) {
    invalid("{} is a {} function; pass it as the other", name,
            f->kind() == Function::Kind::score ? "score" : "mask");
  }
  if (p_.precision != Precision::exact) {
    fail(Status::unsupported, "{} runs with precision exact alone, not with {}; leave the precision exact",
         name, tandem::name_of(p_.precision));
  }
  constexpr std::int64_t most = std::int64_t{1} << 31;
  if (p_.rows_q >= most || p_.rows_k >= most || p_.batch >= most || p_.heads_q >= most) {
    invalid("{} counts in 32 bits, but q has {} rows, k {}, batch {}; use fewer than 2^31 of each", name,
            p_.rows_q, p_.rows_k, p_.batch);
  }
  for (std::size_t n = 0; n < f->captured().size(); ++n) {
    const Argument tensor{tensor_names[n], f->captured()[n]};
    check::same_device(tensor, q_);
    check::extent(tensor);
    if (memory_ == Memory::present) check::memory(tensor);
  }
  indices_in_range(name, *f, p_);
}

void ProblemBuilder::outputs_apart_from_captured(std::initializer_list<Argument> outputs) const {
  std::array<Argument, 2 * Function::max_captured> captured{};  // no call with a workspace allocates
  std::size_t count = 0;
  for (const Function* f : {p_.score_function, p_.mask_function}) {
    if (f == nullptr) continue;
    for (std::size_t n = 0; n < f->captured().size(); ++n) {
      captured[count++] = {tensor_names[n], f->captured()[n]};
    }
  }
  check::separate(outputs, {}, {captured.data(), count});
}

void ProblemBuilder::captured_gradient(const Argument& gradient, std::size_t number) const {
  const Function& f = *p_.score_function;
  const ConstTensor& t = f.captured()[number];
  if (!f.is_differentiated(number)) {
    invalid("{} is given, but score_function does not differentiate t{}; name it where the function is made",
            gradient.name, number);
  }
  check::rank(gradient, t.rank, "of the shape of the captured tensor");
  if (gradient.tensor.shape != t.shape) {
    invalid("{} has shape {}; it must be that of t{}, {}", gradient.name, check::shape_of(gradient.tensor),
            number, check::shape_of(t));
  }
  check::dtype(gradient, {DType::f32});
  check::same_device(gradient, q_);
  check::extent(gradient);
  if (memory_ == Memory::present) check::memory(gradient);
  check::no_self_overlap(gradient);
}

void ProblemBuilder::captured_gradients(std::initializer_list<Argument> others) const {
  if (!p_.wants_captured_gradients()) return;
  const std::span<const Tensor> gradients = p_.captured_gradients;
  const std::size_t captured = p_.score_function != nullptr ? p_.score_function->captured().size() : 0;
  if (gradients.size() > captured) {
    invalid("captured_gradients has {} tensors, but score_function captures {}; pass one for each at most",
            gradients.size(), captured);
  }
  for (std::size_t n = 0; n < gradients.size(); ++n) {
    const Argument gradient{gradient_names[n], gradients[n]};
    check::consistent(gradient);
    if (!gradient.given()) continue;
    captured_gradient(gradient, n);
    check::separate({gradient}, others, inputs_);
    outputs_apart_from_captured({gradient});
    for (std::size_t m = 0; m < n; ++m) {
      check::separate({gradient, {gradient_names[m], gradients[m]}}, {});
    }
  }
}

}  // namespace tandem
