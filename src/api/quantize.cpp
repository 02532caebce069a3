// quantize: arguments -> problem -> backend.
#include "tandem/quantize.hpp"

#include <cstdint>

#include "api/check.hpp"
#include "api/operand_of.hpp"
#include "api/trace.hpp"
#include "cpu/quantize/quantize.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/run.hpp"

namespace tandem {
namespace {

using check::Argument;
using check::invalid;

constexpr std::int64_t max_head_dim = 256;

/// A tensor of QuantizeArgs with the dimensions it should have; `packed` leaves out the first of `batched`.
void check_tensor(const Argument& a, const Argument& x, bool packed,
                  std::initializer_list<std::int64_t> batched, std::initializer_list<DType> dtypes,
                  const check::Symbols& symbols) {
  check::given(a, packed ? symbols.packed : symbols.batched);
  check::shape(a, packed, batched, symbols);
  check::dtype(a, dtypes);
  check::same_device(a, x);
  check::extent(a);
  check::memory(a);
}

ScaleGroup group_of(Granularity granularity) {
  switch (granularity) {
    case Granularity::tensor: return ScaleGroup::tensor;
    case Granularity::head: return ScaleGroup::head;
    case Granularity::block: return ScaleGroup::block;
    case Granularity::row: return ScaleGroup::row;
  }
  invalid("granularity is {}; it must be tensor (0), head (1), block (2) or row (3)",
          static_cast<int>(granularity));
}

/// scales of x's granularity, checked; `d` is 1 where x has a batch dimension.
Operand scales_of(const Argument& scales, const Argument& x, const QuantizeProblem& problem, int d) {
  const std::int64_t b = problem.batch;
  const std::int64_t h = problem.heads;
  if (problem.group == ScaleGroup::tensor) {
    check_tensor(scales, x, false, {1}, {DType::f32}, {"(1)", "(1)"});
    return operand_of(scales.tensor, -1, -1, -1);
  }
  if (problem.group == ScaleGroup::head) {
    check_tensor(scales, x, d == 0, {b, h}, {DType::f32}, {"(heads)", "(batch, heads)"});
    return operand_of(scales.tensor, d - 1, -1, d);
  }
  const bool block = problem.group == ScaleGroup::block;
  const std::int64_t n = block ? (problem.rows + quant_block - 1) / quant_block : problem.rows;
  constexpr check::Symbols by_block{"(heads, ceil(seqlen / 128))", "(batch, heads, ceil(seqlen / 128))"};
  constexpr check::Symbols by_row{"(heads, seqlen)", "(batch, heads, seqlen)"};
  check_tensor(scales, x, d == 0, {b, h, n}, {DType::f32}, block ? by_block : by_row);
  return operand_of(scales.tensor, d - 1, d + 1, d);
}

QuantizeProblem make_quantize_problem(const QuantizeArgs& args) {
  const Argument x{"x", args.x};
  const Argument codes{"codes", args.codes};
  const Argument scales{"scales", args.scales};
  const Argument mean{"mean", args.mean};
  check::given(x, "(batch, seqlen, heads, head_dim)");
  if (x.tensor.rank != 3) check::rank(x, 4, "(batch, seqlen, heads, head_dim) or (seqlen, heads, head_dim)");
  const int d = x.tensor.rank - 3;
  QuantizeProblem problem;
  check::extent(x);
  problem.batch = d == 1 ? x.size(0) : 1;
  problem.rows = x.size(d);
  problem.heads = x.size(d + 1);
  problem.head_dim = x.size(d + 2);
  if (problem.head_dim < 1 || problem.head_dim > max_head_dim) {
    invalid("head_dim is {}; it must be from 1 to {}", problem.head_dim, max_head_dim);
  }
  check::dtype(x, {DType::f32, DType::f16, DType::bf16});
  problem.device = check::device(x);
  check::memory(x);
  check::last_dimension_contiguous(x);
  check_tensor(codes, x, d == 0, {problem.batch, problem.rows, problem.heads, problem.head_dim},
               {DType::e4m3, DType::s8}, {"(seqlen, heads, head_dim)", "(batch, seqlen, heads, head_dim)"});
  check::last_dimension_contiguous(codes);
  problem.x = operand_of(x.tensor, d - 1, d, d + 1);
  problem.codes = operand_of(codes.tensor, d - 1, d, d + 1);
  problem.group = group_of(args.granularity);
  problem.rotate = args.hadamard;
  problem.scales = scales_of(scales, x, problem, d);
  check::consistent(mean);
  if (mean.given()) {
    check_tensor(mean, x, d == 0, {problem.batch, problem.heads, problem.head_dim}, {DType::f32},
                 {"(heads, head_dim)", "(batch, heads, head_dim)"});
    check::last_dimension_contiguous(mean);
    problem.mean = operand_of(mean.tensor, d - 1, -1, d);
  }
  for (const Argument* output : {&codes, &scales, &mean}) {
    if (output->given()) check::no_self_overlap(*output);
  }
  check::separate({codes, scales, mean}, {x});
  return problem;
}

}  // namespace

void quantize(const QuantizeArgs& args, const Execution& execution) {
  const QuantizeProblem problem = make_quantize_problem(args);
  check::threads(execution.threads);
  if (problem.device.kind == Device::Kind::cuda) {
    const gpu::QuantizeSteps steps = plan_quantize(problem);
    const Trace trace(problem);
    gpu::run(steps, execution.stream);
    return;
  }
  const Trace trace(problem);
  cpu::Stop stop(execution.interrupted, execution.interrupted_context);
  cpu::quantize(problem, cpu::best_target(), execution.threads, &stop);
  stop.throw_if_heard();
}

}  // namespace tandem
