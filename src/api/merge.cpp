// merge: arguments -> problem -> backend.
#include "cpu/cache/merge.hpp"

#include <array>
#include <cstdio>

#include "api/check.hpp"
#include "api/make_merge_problem.hpp"
#include "api/operand_of.hpp"
#include "api/trace.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/run.hpp"
#include "problem/append_problem.hpp"
#include "tandem/cache.hpp"

namespace tandem {
namespace {

using check::Argument;
using check::invalid;

constexpr const char* out_symbols =
    "(batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v)";

/// The argument outs[i] or lses[i], with memory for its name.
struct Part {
  std::array<char, 32> name{};
  Argument argument;

  Part(const char* list, std::size_t i, const ConstTensor& tensor) : argument{name.data(), tensor} {
    std::snprintf(name.data(), name.size(), "%s[%zu]", list, i);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
};

class MergeBuilder {
 public:
  explicit MergeBuilder(const MergeArgs& args) : args_(args) {}

  void sizes() {
    if (args_.outs.empty()) invalid("outs has no parts; pass one at least");
    if (args_.outs.size() != args_.lses.size()) {
      invalid("outs has {} parts and lses {}; each part has both", args_.outs.size(), args_.lses.size());
    }
    check::given(first_.argument, out_symbols);
    const Argument& a = first_.argument;
    if (a.tensor.rank != 3) check::rank(a, 4, out_symbols);
    check::extent(a);
    check::dtype(a, {DType::f32, DType::f16, DType::bf16});
    d_ = a.tensor.rank - 3;
    problem_.batch = d_ == 1 ? a.size(0) : 1;
    problem_.rows = a.size(d_);
    problem_.heads = a.size(d_ + 1);
    problem_.head_dim = a.size(d_ + 2);
    if (problem_.head_dim < 1 || problem_.head_dim > max_row) {
      invalid("head_dim of outs is {}; it must be from 1 to {}", problem_.head_dim, max_row);
    }
    problem_.device = check::device(a);
  }

  void operands() {
    for (std::size_t i = 0; i < args_.outs.size(); ++i) {
      const Part out("outs", i, args_.outs[i]);
      const Part lse("lses", i, args_.lses[i]);
      check::given(out.argument, out_symbols);
      MergePart& part = problem_.parts.emplace_back();
      part.out = like_out(out.argument);
      check::same_dtype(out.argument, first_.argument);
      part.lse = like_lse(lse.argument);
    }
    const Argument out{"out", args_.out};
    check::given(out, out_symbols);
    problem_.out = like_out(out);
    check::dtype(out, {DType::f32, DType::f16, DType::bf16});
    const Argument lse{"lse", args_.lse};
    check::consistent(lse);
    if (lse.given()) problem_.lse = like_lse(lse);
    for (const Argument& a : {out, lse}) {
      if (a.given()) check::no_self_overlap(a);
    }
    for (std::size_t i = 0; i < args_.outs.size(); ++i) {
      const Part from("outs", i, args_.outs[i]);
      const Part from_lse("lses", i, args_.lses[i]);
      check::separate({out, lse}, {from.argument, from_lse.argument});
    }
  }

  MergeProblem& problem() { return problem_; }

 private:
  void common(const Argument& a) const {
    check::same_device(a, first_.argument);
    check::extent(a);
    check::memory(a);
  }

  Operand like_out(const Argument& a) const {
    check::shape(a, d_ == 0, {problem_.batch, problem_.rows, problem_.heads, problem_.head_dim},
                 {"the shape of outs[0]", "the shape of outs[0]"});
    common(a);
    check::last_dimension_contiguous(a);
    return operand_of(a.tensor, d_ - 1, d_, d_ + 1);
  }

  Operand like_lse(const Argument& a) const {
    constexpr check::Symbols symbols{"(heads_q, total_q)", "(batch, heads_q, seqlen_q)"};
    check::given(a, d_ == 0 ? symbols.packed : symbols.batched);
    check::shape(a, d_ == 0, {problem_.batch, problem_.heads, problem_.rows}, symbols);
    check::dtype(a, {DType::f32});
    common(a);
    return operand_of(a.tensor, d_ - 1, d_ + 1, d_);
  }

  const MergeArgs& args_;
  const Part first_{"outs", 0, args_.outs.empty() ? ConstTensor{} : args_.outs.front()};
  MergeProblem problem_;
  int d_ = 0;  ///< dimensions before the rows
};

}  // namespace

MergeProblem make_merge_problem(const MergeArgs& args) {
  MergeBuilder builder(args);
  builder.sizes();
  builder.operands();
  return builder.problem();
}

void merge(const MergeArgs& args, const Execution& execution) {
  const MergeProblem problem = make_merge_problem(args);
  check::threads(execution.threads);
  if (problem.device.kind == Device::Kind::cuda) {
    const gpu::MergeSteps steps = plan_merge(problem);
    const Trace trace(problem);
    gpu::run(steps, execution.stream);
    return;
  }
  const Trace trace(problem);
  cpu::merge(problem, cpu::best_target(), execution.threads);
}

}  // namespace tandem
