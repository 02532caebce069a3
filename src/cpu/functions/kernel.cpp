// Functions of the user's own, compiled once for each instruction set: a step of a program is a loop over
// keys, so that choosing what to do costs once for all of them.
#include "cpu/functions/kernel.hpp"

#include "cpu/functions/reads.hpp"
#include "cpu/functions/wide.hpp"
#include "cpu/simd/math.hpp"

namespace tandem::cpu::TANDEM_TARGET {
namespace {

/// Stores value(j) for each register j. Only a step that is a constant lets the compiler unroll the loop.
template <typename F>
TANDEM_INLINE void store_each(const Work& w, F value) {
  if (w.result_step == vec_lanes) {
    for (int j = 0; j < w.count; ++j) store(value(j), w.result + j * vec_lanes);
  } else {
    for (int j = 0; j < w.count; ++j) store(value(j), w.result + j * w.result_step);
  }
}

template <typename F>
TANDEM_INLINE void unary(const Work& w, F f) {
  store_each(
      w, [&](int j) __attribute__((always_inline)) { return f(fetch(w.a, j)); });
}
template <typename F>
TANDEM_INLINE void binary(const Work& w, F f) {
  store_each(
      w, [&](int j) __attribute__((always_inline)) { return f(fetch(w.a, j), fetch(w.b, j)); });
}
/// Operations on integers.
template <typename F>
TANDEM_INLINE void unary_integer(const Work& w, F f) {
  unary(
      w, [&](Vec a) __attribute__((always_inline)) { return as_bits(f(as_integers(a))); });
}
template <typename F>
TANDEM_INLINE void binary_integer(const Work& w, F f) {
  binary(
      w, [&](Vec a, Vec b)
             __attribute__((always_inline)) { return as_bits(f(as_integers(a), as_integers(b))); });
}
/// Comparisons of either type.
template <typename F>
TANDEM_INLINE void compare(const Work& w, F f) {
  if (w.step.from == FunctionType::real) {
    binary(
        w, [&](Vec a, Vec b) __attribute__((always_inline)) { return all_bits(f(a, b)); });
  } else {
    binary(
        w, [&](Vec a, Vec b)
               __attribute__((always_inline)) { return all_bits(f(as_integers(a), as_integers(b))); });
  }
}

/// Quotients of 32-bit integers in f64 are exact once rounded down.
TANDEM_INLINE double floor_quotient(std::int32_t a, std::int32_t b) {
  return b == 0 ? 0.0 : __builtin_floor(static_cast<double>(a) / static_cast<double>(b));
}

template <bool remainder>
void divide_integers(const Work& w) {
  for (int j = 0; j < w.count; ++j) {
    std::int32_t a[vec_lanes];
    std::int32_t b[vec_lanes];
    std::int32_t y[vec_lanes];
    hn::StoreU(as_integers(fetch(w.a, j)), i32_lanes, a);
    hn::StoreU(as_integers(fetch(w.b, j)), i32_lanes, b);
    for (int i = 0; i < vec_lanes; ++i) {
      const double quotient = floor_quotient(a[i], b[i]);
      const double value = remainder ? (b[i] == 0 ? 0.0 : a[i] - quotient * b[i]) : quotient;
      y[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(value));
    }
    store(as_bits(hn::LoadU(i32_lanes, y)), w.result + j * w.result_step);
  }
}

void floor_divide(const Work& w) {
  if (w.step.integer == 0) return divide_integers<false>(w);
  const int shift = __builtin_ctz(static_cast<unsigned>(w.step.integer));
  unary_integer(
      w, [&](IVec a) __attribute__((always_inline)) { return hn::ShiftRightSame(a, shift); });
}

void remainder(const Work& w) {
  if (w.step.integer == 0) return divide_integers<true>(w);
  const IVec low = hn::Set(i32_lanes, static_cast<std::int32_t>(w.step.integer) - 1);
  unary_integer(
      w, [&](IVec a) __attribute__((always_inline)) { return hn::And(a, low); });
}

/// Keeps a NaN of either argument, as PyTorch's minimum and maximum do.
template <bool least>
TANDEM_INLINE Vec extreme(Vec a, Vec b) {
  const Vec y = hn::IfThenElse(least ? hn::Lt(b, a) : hn::Lt(a, b), b, a);
  return hn::IfThenElse(hn::And(hn::Eq(a, a), hn::Eq(b, b)), y, hn::Add(a, b));
}

/// Also where either is NaN, which hn::Ne tells of some targets alone.
TANDEM_INLINE auto differ(Vec a, Vec b) {
  return hn::Not(hn::Eq(a, b));
}
TANDEM_INLINE auto differ(IVec a, IVec b) {
  return hn::Ne(a, b);
}

TANDEM_INLINE Vec natural_exp(Vec x) {
  return exp2(hn::Mul(x, broadcast(log2_e)));
}

TANDEM_INLINE Vec sigmoid(Vec x) {
  return hn::Div(broadcast(1.0F), hn::Add(broadcast(1.0F), natural_exp(hn::Neg(x))));
}

void convert(const Work& w) {
  const FunctionType from = w.step.from;
  if (w.step.op == FunctionOp::to_boolean) {
    if (from == FunctionType::real) {
      unary(
          w, [](Vec a) __attribute__((always_inline)) { return all_bits(differ(a, zero())); });
    } else {
      unary_integer(
          w, [](IVec a) __attribute__((always_inline)) {
            return hn::VecFromMask(i32_lanes, hn::Ne(a, hn::Zero(i32_lanes)));
          });
    }
  } else if (w.step.op == FunctionOp::to_integer) {
    unary_integer(
        w, [&](IVec a) __attribute__((always_inline)) {
          return from == FunctionType::real ? hn::ConvertTo(i32_lanes, hn::BitCast(f32_lanes, a))
                                            : hn::Neg(a);
        });
  } else {
    const bool negative = from == FunctionType::boolean;  // true is -1
    unary(
        w, [&](Vec a) __attribute__((always_inline)) {
          const IVec i = as_integers(a);
          return hn::ConvertTo(f32_lanes, negative ? hn::Neg(i) : i);
        });
  }
}

/// One lane after the other: functions that are rare beside those that have registers' arithmetic.
template <typename F>
void by_lane(const Work& w, F f) {
  for (int j = 0; j < w.count; ++j) {
    float a[vec_lanes];
    float b[vec_lanes] = {};
    store(fetch(w.a, j), a);
    if (w.step.arguments > 1) store(fetch(w.b, j), b);
    for (int i = 0; i < vec_lanes; ++i) a[i] = f(a[i], b[i]);
    store(load(a), w.result + j * w.result_step);
  }
}

/// What reals and integers both have.
void arithmetic(const Work& w) {
  const bool real = w.step.type == FunctionType::real;
  const auto both = [&](auto f) { real ? binary(w, f) : binary_integer(w, f); };
  const auto one = [&](auto f) { real ? unary(w, f) : unary_integer(w, f); };
  switch (w.step.op) {
    case FunctionOp::add: return both([](auto a, auto b) { return hn::Add(a, b); });
    case FunctionOp::subtract: return both([](auto a, auto b) { return hn::Sub(a, b); });
    case FunctionOp::multiply: return both([](auto a, auto b) { return hn::Mul(a, b); });
    case FunctionOp::negate: return one([](auto a) { return hn::Neg(a); });
    case FunctionOp::absolute: return one([](auto a) { return hn::Abs(a); });
    case FunctionOp::minimum:
      return real ? binary(w, [](Vec a, Vec b) { return extreme<true>(a, b); })
                  : binary_integer(w, [](IVec a, IVec b) { return hn::Min(a, b); });
    default:
      return real ? binary(w, [](Vec a, Vec b) { return extreme<false>(a, b); })
                  : binary_integer(w, [](IVec a, IVec b) { return hn::Max(a, b); });
  }
}

void run_step(const Work& w) {
  const bool wide = w.step.from == FunctionType::wide || w.step.type == FunctionType::wide;
  if (wide) return run_wide(w);
  switch (w.step.op) {
    case FunctionOp::to_real:
    case FunctionOp::to_integer:
    case FunctionOp::to_boolean: return convert(w);
    case FunctionOp::divide: return binary(w, [](Vec a, Vec b) { return hn::Div(a, b); });
    case FunctionOp::floor_divide: return floor_divide(w);
    case FunctionOp::remainder: return remainder(w);
    case FunctionOp::exp: return unary(w, [](Vec a) { return natural_exp(a); });
    case FunctionOp::log: return unary(w, [](Vec a) { return natural_log(a); });
    case FunctionOp::sqrt: return unary(w, [](Vec a) { return hn::Sqrt(a); });
    case FunctionOp::tanh: return unary(w, [](Vec a) { return tanh(a); });
    case FunctionOp::sigmoid: return unary(w, [](Vec a) { return sigmoid(a); });
    case FunctionOp::sine: return by_lane(w, [](float a, float) { return __builtin_sinf(a); });
    case FunctionOp::cosine: return by_lane(w, [](float a, float) { return __builtin_cosf(a); });
    case FunctionOp::erf: return by_lane(w, [](float a, float) { return __builtin_erff(a); });
    case FunctionOp::log2: return by_lane(w, [](float a, float) { return __builtin_log2f(a); });
    case FunctionOp::log1p: return by_lane(w, [](float a, float) { return __builtin_log1pf(a); });
    case FunctionOp::fmod: return by_lane(w, [](float a, float b) { return __builtin_fmodf(a, b); });
    case FunctionOp::floor: return unary(w, [](Vec a) { return hn::Floor(a); });
    case FunctionOp::round: return unary(w, [](Vec a) { return hn::Round(a); });
    case FunctionOp::stop: return unary(w, [](Vec a) { return a; });
    case FunctionOp::less: return compare(w, [](auto a, auto b) { return hn::Lt(a, b); });
    case FunctionOp::less_equal:  // a NaN is not less than anything
      return w.step.from == FunctionType::real
                 ? binary(w, [](Vec a, Vec b) { return all_bits(hn::Le(a, b)); })
                 : binary(w, [](Vec a, Vec b) {
                     return all_bits(hn::Not(hn::Lt(as_integers(b), as_integers(a))));
                   });
    case FunctionOp::equal: return compare(w, [](auto a, auto b) { return hn::Eq(a, b); });
    case FunctionOp::not_equal: return compare(w, [](auto a, auto b) { return differ(a, b); });
    case FunctionOp::bit_and: return binary_integer(w, [](IVec a, IVec b) { return hn::And(a, b); });
    case FunctionOp::bit_or: return binary_integer(w, [](IVec a, IVec b) { return hn::Or(a, b); });
    case FunctionOp::bit_xor: return binary_integer(w, [](IVec a, IVec b) { return hn::Xor(a, b); });
    case FunctionOp::bit_not: return unary_integer(w, [](IVec a) { return hn::Not(a); });
    case FunctionOp::select:
      return store_each(
          w, [&](int j) __attribute__((always_inline)) {
            return hn::IfThenElse(is_true(fetch(w.a, j)), fetch(w.b, j), fetch(w.c, j));
          });
    default: return arithmetic(w);
  }
}

/// Leaves, which have no arguments.
void run_leaf(const ProgramStep& step, const FunctionPlace& place, float* result, float* high) {
  const auto all = [&](std::int32_t x) { store(as_bits(hn::Set(i32_lanes, x)), result); };
  switch (step.op) {
    case FunctionOp::constant:
      if (step.type == FunctionType::real) return store(broadcast(step.real), result);
      if (step.type == FunctionType::wide) {
        store(as_bits(hn::Set(i32_lanes, static_cast<std::int32_t>(step.integer >> 32))), high);
      }
      return all(static_cast<std::int32_t>(step.integer));
    case FunctionOp::batch: return all(place.batch);
    case FunctionOp::seqlen_q: return all(place.seqlen_q);
    case FunctionOp::seqlen_k: return all(place.seqlen_k);
    case FunctionOp::head: return store(as_bits(hn::LoadU(i32_lanes, place.head)), result);
    case FunctionOp::query: return store(as_bits(hn::LoadU(i32_lanes, place.query)), result);
    default:  // key
      for (int j = 0; j < place.keys; j += vec_lanes) {
        store(as_bits(hn::Iota(i32_lanes, place.first_key + j)), result + j);
      }
  }
}

/// The registers of a value of distances that `keys` keys need: the first, and how many there are.
struct DistanceRegisters {
  explicit DistanceRegisters(int keys)
      : first((function_keys - keys) / vec_lanes), count(function_keys / vec_lanes + 1 - first) {}
  int first;
  int count;
};

/// The registers of an argument of such a value; those that are linear in query and key are made of their
/// number for the first of either, in `made`.
FunctionSource distances_of(const ProgramValue& v, std::int32_t by_key, const DistanceRegisters& registers,
                            const FunctionPlace& place, const float* memory, float* made) {
  if (v.shape == ValueShape::uniform) return source_of(v, place, memory);
  if (v.shape == ValueShape::distances) {
    return {memory + v.offset + registers.first * vec_lanes, vec_lanes, false};
  }
  if (by_key == 0) return {memory + v.offset, 0, true};
  const IVec first = as_integers(broadcast(memory[v.offset]));
  for (int r = 0; r < registers.count; ++r) {
    const IVec at = hn::Iota(i32_lanes, (registers.first + r) * vec_lanes);
    const IVec keys = hn::Sub(hn::Set(i32_lanes, function_keys - 1), at);
    store(as_bits(hn::Add(first, hn::Mul(keys, hn::Set(i32_lanes, by_key)))), made + r * vec_lanes);
  }
  return {made, vec_lanes, false};
}

void run_by_distance(const FunctionProgram& program, const ProgramStep& step, const FunctionPlace& place,
                     float* memory) {
  const DistanceRegisters registers(place.keys);
  float made[2][function_keys + function_lanes];
  FunctionSource sources[4] = {};
  for (int i = 0; i < step.arguments; ++i) {
    const int linear = i < 2 ? i : 1;  // of more arguments none is linear
    sources[i] = distances_of(step.args[i], step.by_key[linear], registers, place, memory, made[linear]);
  }
  const std::int64_t first = registers.first * vec_lanes;
  float* const result = memory + step.result.offset + first;
  float* const high = memory + step.result.high + first;
  if (step.op == FunctionOp::read)
    return read_tensor(program.tensors[step.captured], sources, registers.count, result, high);
  run_step({step, sources[0], sources[1], sources[2], result, high, vec_lanes, registers.count});
}

/// A step whose keys are in lanes, or that is computed once for all keys, or for each.
void run_by_key(const FunctionProgram& program, const ProgramStep& step, const FunctionPlace& place,
                float* memory) {
  float* const result = memory + step.result.offset;
  float* const high = memory + step.result.high;
  if (step.arguments == 0) return run_leaf(step, place, result, high);
  const bool by_keys = step.result.shape == ValueShape::keys;
  const int key_vecs = (place.keys + vec_lanes - 1) / vec_lanes;
  const int count = by_keys ? key_vecs : step.result.shape == ValueShape::pairs ? place.keys : 1;
  FunctionSource sources[4] = {};
  for (int i = 0; i < step.arguments; ++i) {
    sources[i] = source_of(step.args[i], place, memory);
    // Where keys are in lanes, those of an argument are, too.
    if (by_keys && sources[i].broadcast) sources[i] = {sources[i].p, vec_lanes, false};
  }
  if (step.op == FunctionOp::read)
    return read_tensor(program.tensors[step.captured], sources, count, result, high);
  const bool in_place = step.result.is_score;
  run_step({step, sources[0], sources[1], sources[2], in_place ? place.scores : result, high,
            in_place ? place.score_step : vec_lanes, count});
}

}  // namespace

void evaluate_uniform(const FunctionProgram& program, const FunctionPlace& place, float* memory) {
  for (int n = 0; n < program.count; ++n) {
    const ProgramStep& step = program.steps[n];
    if (step.result.shape == ValueShape::uniform) run_by_key(program, step, place, memory);
  }
}

void evaluate(const FunctionProgram& program, const FunctionPlace& place, float* memory) {
  for (int n = 0; n < program.count; ++n) {
    const ProgramStep& step = program.steps[n];
    switch (step.result.shape) {
      case ValueShape::uniform: break;
      case ValueShape::distances: run_by_distance(program, step, place, memory); break;
      default: run_by_key(program, step, place, memory);
    }
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
