// quantize: arguments -> problem -> backend.
#include "tandem/quantize.hpp"

#include <cstddef>
#include <cstdint>

#include "api/check.hpp"
#include "api/trace.hpp"
#include "cpu/quantize/quantize.hpp"
#include "ops/plan_gpu.hpp"
#include "ops/run.hpp"

namespace tandem {
namespace {

using check::Argument;
using check::invalid;

constexpr std::int64_t max_head_dim = 256;

/// A tensor of QuantizeArgs with the dimensions it should have; `batch` is there where x has rank 4.
void check_tensor(const Argument& a, const Argument& x, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<DType> dtypes, const char* symbols) {
  check::given(a, symbols);
  check::shape(a, shape, symbols);
  check::dtype(a, dtypes);
  check::same_device(a, x);
  check::extent(a);
  check::memory(a);
}

std::int64_t stride(const ConstTensor& t, int dim) {
  const auto at = static_cast<std::size_t>(dim);
  return t.shape[at] > 1 ? t.stride[at] : 0;
}

/// Dimensions of a tensor that stand for batch, row (or block) and head; -1 where it has none.
Operand operand(const ConstTensor& t, int batch, int row, int head) {
  return {.data = const_cast<void*>(t.data),
          .dtype = t.dtype,
          .batch_stride = batch < 0 ? 0 : stride(t, batch),
          .row_stride = row < 0 ? 0 : stride(t, row),
          .head_stride = head < 0 ? 0 : stride(t, head)};
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
    check_tensor(scales, x, {1}, {DType::f32}, "(1)");
    return operand(scales.tensor, -1, -1, -1);
  }
  if (problem.group == ScaleGroup::head) {
    d == 1 ? check_tensor(scales, x, {b, h}, {DType::f32}, "(batch, heads)")
           : check_tensor(scales, x, {h}, {DType::f32}, "(heads)");
    return operand(scales.tensor, d - 1, -1, d);
  }
  const bool block = problem.group == ScaleGroup::block;
  const std::int64_t n = block ? (problem.rows + quant_block - 1) / quant_block : problem.rows;
  if (d == 1) {
    check_tensor(scales, x, {b, h, n}, {DType::f32},
                 block ? "(batch, heads, ceil(seqlen / 128))" : "(batch, heads, seqlen)");
  } else {
    check_tensor(scales, x, {h, n}, {DType::f32}, block ? "(heads, ceil(seqlen / 128))" : "(heads, seqlen)");
  }
  return operand(scales.tensor, d - 1, d + 1, d);
}

/// The rotary embedding's tables.
void take_rotary(QuantizeProblem& problem, const Argument& x, const Argument& cos, const Argument& sin) {
  for (const Argument* table : {&cos, &sin}) check::consistent(*table);
  if (cos.given() != sin.given()) {
    invalid("{} is given without {}; pass both, or neither", (cos.given() ? cos : sin).name,
            (cos.given() ? sin : cos).name);
  }
  if (!cos.given()) return;
  check::rank(cos, 2, "(seqlen, rotary_dim / 2)");
  check::extent(cos);
  // Unsigned, since the sizes of a table without elements may be any.
  const std::uint64_t rotary_dim = 2 * static_cast<std::uint64_t>(cos.size(1));
  if (rotary_dim % 16 != 0 || rotary_dim > static_cast<std::uint64_t>(problem.head_dim)) {
    invalid("cos has shape {}: rotary_dim is {}; it must be a multiple of 16 and at most head_dim {}",
            check::shape_of(cos.tensor), rotary_dim, problem.head_dim);
  }
  problem.rotary_dim = static_cast<std::int64_t>(rotary_dim);
  for (const Argument* table : {&cos, &sin}) {
    check_tensor(*table, x, {problem.rows, problem.rotary_dim / 2}, {DType::f32}, "(seqlen, rotary_dim / 2)");
    check::last_dimension_contiguous(*table);
  }
  problem.cos = operand(cos.tensor, -1, 0, -1);
  problem.sin = operand(sin.tensor, -1, 0, -1);
}

QuantizeProblem make_quantize_problem(const QuantizeArgs& args) {
  const Argument x{"x", args.x};
  const Argument codes{"codes", args.codes};
  const Argument scales{"scales", args.scales};
  const Argument mean{"mean", args.mean};
  const Argument cos{"cos", args.cos};
  const Argument sin{"sin", args.sin};
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
  problem.device = x.tensor.device;
  check::memory(x);
  check::last_dimension_contiguous(x);
  if (d == 1) {
    check_tensor(codes, x, {problem.batch, problem.rows, problem.heads, problem.head_dim},
                 {DType::e4m3, DType::s8}, "(batch, seqlen, heads, head_dim)");
  } else {
    check_tensor(codes, x, {problem.rows, problem.heads, problem.head_dim}, {DType::e4m3, DType::s8},
                 "(seqlen, heads, head_dim)");
  }
  check::last_dimension_contiguous(codes);
  problem.x = operand(x.tensor, d - 1, d, d + 1);
  problem.codes = operand(codes.tensor, d - 1, d, d + 1);
  problem.group = group_of(args.granularity);
  problem.rotate = args.hadamard;
  take_rotary(problem, x, cos, sin);
  problem.interleaved = args.interleaved;
  problem.scales = scales_of(scales, x, problem, d);
  check::consistent(mean);
  if (mean.given()) {
    d == 1 ? check_tensor(mean, x, {problem.batch, problem.heads, problem.head_dim}, {DType::f32},
                          "(batch, heads, head_dim)")
           : check_tensor(mean, x, {problem.heads, problem.head_dim}, {DType::f32}, "(heads, head_dim)");
    check::last_dimension_contiguous(mean);
    problem.mean = operand(mean.tensor, d - 1, -1, d);
  }
  for (const Argument* output : {&codes, &scales, &mean}) {
    if (output->given()) check::no_self_overlap(*output);
  }
  check::separate({codes, scales, mean}, {x, cos, sin});
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
