// Steps of functions on 64-bit integers, whose halves lie apart, each as 32-bit integers do: two registers
// for one. Of cpu/functions/kernel.cpp alone.
#pragma once

#include "cpu/functions/kernel.hpp"

namespace tandem::cpu::TANDEM_TARGET {

TANDEM_INLINE IVec as_integers(Vec v) {
  return hn::BitCast(i32_lanes, v);
}
TANDEM_INLINE Vec as_bits(IVec v) {
  return hn::BitCast(f32_lanes, v);
}
template <typename M>
TANDEM_INLINE Vec all_bits(M mask) {
  return as_bits(hn::VecFromMask(i32_lanes, hn::RebindMask(i32_lanes, mask)));
}
TANDEM_INLINE Mask is_true(Vec v) {
  return hn::RebindMask(f32_lanes, hn::Ne(as_integers(v), hn::Zero(i32_lanes)));
}

/// A step, with its arguments where this evaluation has them.
struct Work {
  const ProgramStep& step;
  FunctionSource a, b, c;
  float* result;
  float* high;               ///< the upper halves of wide integers
  std::int64_t result_step;  ///< from register to register
  int count;                 ///< registers of the result
};

struct Wide {
  IVec low, high;
};

/// Argument i, whose lower halves are at `source`.
TANDEM_INLINE Wide fetch_wide(const Work& w, const FunctionSource& source, int i, int j) {
  const ProgramValue& v = w.step.args[i];
  FunctionSource upper = source;
  upper.p += v.high - v.offset;
  return {as_integers(fetch(source, j)), as_integers(fetch(upper, j))};
}

TANDEM_INLINE void store_wide(const Work& w, int j, const Wide& x) {
  store(as_bits(x.low), w.result + j * w.result_step);
  store(as_bits(x.high), w.high + j * w.result_step);
}

/// -1 where a is less than b as 32 bits without a sign.
TANDEM_INLINE IVec less_unsigned(IVec a, IVec b) {
  const IVec sign = hn::Set(i32_lanes, INT32_MIN);
  return hn::VecFromMask(i32_lanes, hn::Lt(hn::Xor(a, sign), hn::Xor(b, sign)));
}
TANDEM_INLINE Wide add(const Wide& a, const Wide& b) {
  const IVec low = hn::Add(a.low, b.low);
  return {low, hn::Sub(hn::Add(a.high, b.high), less_unsigned(low, a.low))};
}
TANDEM_INLINE Wide subtract(const Wide& a, const Wide& b) {
  return {hn::Sub(a.low, b.low), hn::Add(hn::Sub(a.high, b.high), less_unsigned(a.low, b.low))};
}
TANDEM_INLINE IVec equal(const Wide& a, const Wide& b) {
  return hn::And(hn::VecFromMask(i32_lanes, hn::Eq(a.low, b.low)),
                 hn::VecFromMask(i32_lanes, hn::Eq(a.high, b.high)));
}
TANDEM_INLINE IVec less(const Wide& a, const Wide& b) {
  const IVec same = hn::VecFromMask(i32_lanes, hn::Eq(a.high, b.high));
  return hn::Or(hn::VecFromMask(i32_lanes, hn::Lt(a.high, b.high)),
                hn::And(same, less_unsigned(a.low, b.low)));
}
TANDEM_INLINE Wide select(IVec condition, const Wide& yes, const Wide& no) {
  return {hn::IfVecThenElse(condition, yes.low, no.low), hn::IfVecThenElse(condition, yes.high, no.high)};
}
TANDEM_INLINE Wide widened(IVec x) {
  return {x, hn::ShiftRight<31>(x)};
}

/// Towards 0, to the nearest that 64 bits hold.
TANDEM_INLINE std::int64_t to_wide(float x) {
  if (!(x > -0x1p63F)) return x != x ? 0 : INT64_MIN;
  return x < 0x1p63F ? static_cast<std::int64_t>(x) : INT64_MAX;
}

TANDEM_INLINE std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(a));
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
TANDEM_INLINE std::int64_t rest(std::int64_t a, std::int64_t b) {
  if (b == 0 || b == -1) return 0;
  return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
}
TANDEM_INLINE std::int64_t product(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}

/// A register of numbers of 64 bits, one after the other.
struct WideLanes {
  std::int64_t lane[vec_lanes];

  [[gnu::always_inline]] explicit WideLanes(const Wide& x) {
    std::int32_t low[vec_lanes];
    std::int32_t high[vec_lanes];
    hn::StoreU(x.low, i32_lanes, low);
    hn::StoreU(x.high, i32_lanes, high);
    for (int i = 0; i < vec_lanes; ++i) {
      lane[i] =
          static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high[i])) << 32 |
                                    static_cast<std::uint32_t>(low[i]));
    }
  }
  [[nodiscard, gnu::always_inline]] Wide halves() const {
    std::int32_t low[vec_lanes];
    std::int32_t high[vec_lanes];
    for (int i = 0; i < vec_lanes; ++i) {
      low[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(lane[i]));
      high[i] = static_cast<std::int32_t>(lane[i] >> 32);
    }
    return {hn::LoadU(i32_lanes, low), hn::LoadU(i32_lanes, high)};
  }
};

/// Multiplication and division, which registers of 32-bit lanes have not.
template <typename F>
TANDEM_INLINE void wide_by_lane(const Work& w, F f) {
  for (int j = 0; j < w.count; ++j) {
    WideLanes a(fetch_wide(w, w.a, 0, j));
    const WideLanes b(fetch_wide(w, w.b, 1, j));
    for (int i = 0; i < vec_lanes; ++i) a.lane[i] = f(a.lane[i], b.lane[i]);
    store_wide(w, j, a.halves());
  }
}

template <typename F>
TANDEM_INLINE void wide_binary(const Work& w, F f) {
  for (int j = 0; j < w.count; ++j) store_wide(w, j, f(fetch_wide(w, w.a, 0, j), fetch_wide(w, w.b, 1, j)));
}
template <typename F>
TANDEM_INLINE void wide_unary(const Work& w, F f) {
  for (int j = 0; j < w.count; ++j) store_wide(w, j, f(fetch_wide(w, w.a, 0, j)));
}
/// Comparisons, which give integers of 32 bits.
template <typename F>
TANDEM_INLINE void wide_compare(const Work& w, F f) {
  for (int j = 0; j < w.count; ++j) {
    store(as_bits(f(fetch_wide(w, w.a, 0, j), fetch_wide(w, w.b, 1, j))), w.result + j * w.result_step);
  }
}

inline void convert_to_wide(const Work& w) {
  for (int j = 0; j < w.count; ++j) {
    const Vec a = fetch(w.a, j);
    if (w.step.from == FunctionType::real) {
      WideLanes x(widened(hn::Zero(i32_lanes)));
      float lanes[vec_lanes];
      store(a, lanes);
      for (int i = 0; i < vec_lanes; ++i) x.lane[i] = to_wide(lanes[i]);
      store_wide(w, j, x.halves());
    } else {
      const IVec i = as_integers(a);
      store_wide(w, j, widened(w.step.from == FunctionType::boolean ? hn::Neg(i) : i));
    }
  }
}

inline void convert_wide(const Work& w) {
  for (int j = 0; j < w.count; ++j) {
    const Wide a = fetch_wide(w, w.a, 0, j);
    Vec y = as_bits(a.low);
    if (w.step.op == FunctionOp::to_boolean) {
      y = all_bits(hn::Ne(hn::Or(a.low, a.high), hn::Zero(i32_lanes)));
    } else if (w.step.op == FunctionOp::to_real) {
      const WideLanes x(a);
      float lanes[vec_lanes];
      for (int i = 0; i < vec_lanes; ++i) lanes[i] = static_cast<float>(x.lane[i]);
      y = load(lanes);
    }
    store(y, w.result + j * w.result_step);
  }
}

/// A step that takes or gives wide integers.
inline void run_wide(const Work& w) {
  const auto negative = [](const Wide& a) { return subtract(widened(hn::Zero(i32_lanes)), a); };
  switch (w.step.op) {
    case FunctionOp::to_wide: return convert_to_wide(w);
    case FunctionOp::to_real:
    case FunctionOp::to_integer:
    case FunctionOp::to_boolean: return convert_wide(w);
    case FunctionOp::add: return wide_binary(w, [](const Wide& a, const Wide& b) { return add(a, b); });
    case FunctionOp::subtract:
      return wide_binary(w, [](const Wide& a, const Wide& b) { return subtract(a, b); });
    case FunctionOp::multiply:
      return wide_by_lane(w, [](std::int64_t a, std::int64_t b) { return product(a, b); });
    case FunctionOp::floor_divide:
      return wide_by_lane(w, [](std::int64_t a, std::int64_t b) { return quotient(a, b); });
    case FunctionOp::remainder:
      return wide_by_lane(w, [](std::int64_t a, std::int64_t b) { return rest(a, b); });
    case FunctionOp::negate: return wide_unary(w, negative);
    case FunctionOp::absolute:
      return wide_unary(w, [&](const Wide& a) { return select(hn::ShiftRight<31>(a.high), negative(a), a); });
    case FunctionOp::minimum:
      return wide_binary(w, [](const Wide& a, const Wide& b) { return select(less(b, a), b, a); });
    case FunctionOp::maximum:
      return wide_binary(w, [](const Wide& a, const Wide& b) { return select(less(a, b), b, a); });
    case FunctionOp::less: return wide_compare(w, [](const Wide& a, const Wide& b) { return less(a, b); });
    case FunctionOp::less_equal:
      return wide_compare(w, [](const Wide& a, const Wide& b) { return hn::Not(less(b, a)); });
    case FunctionOp::equal: return wide_compare(w, [](const Wide& a, const Wide& b) { return equal(a, b); });
    case FunctionOp::not_equal:
      return wide_compare(w, [](const Wide& a, const Wide& b) { return hn::Not(equal(a, b)); });
    case FunctionOp::bit_and:
      return wide_binary(w, [](const Wide& a, const Wide& b) -> Wide {
        return {hn::And(a.low, b.low), hn::And(a.high, b.high)};
      });
    case FunctionOp::bit_or:
      return wide_binary(w, [](const Wide& a, const Wide& b) -> Wide {
        return {hn::Or(a.low, b.low), hn::Or(a.high, b.high)};
      });
    case FunctionOp::bit_xor:
      return wide_binary(w, [](const Wide& a, const Wide& b) -> Wide {
        return {hn::Xor(a.low, b.low), hn::Xor(a.high, b.high)};
      });
    case FunctionOp::bit_not:
      return wide_unary(w, [](const Wide& a) -> Wide { return {hn::Not(a.low), hn::Not(a.high)}; });
    default:  // select
      for (int j = 0; j < w.count; ++j) {
        const IVec condition = as_integers(fetch(w.a, j));
        store_wide(w, j, select(condition, fetch_wide(w, w.b, 1, j), fetch_wide(w, w.c, 2, j)));
      }
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
