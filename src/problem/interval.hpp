// Interval arithmetic on integers of 32 and 64 bits and booleans: what a mask function can give on a whole
// range of pairs. Plain numbers, for kernels of any instruction set and for device code; nothing of the
// standard library.
#pragma once

namespace tandem {

/// Inclusive on both sides. A boolean is 0 or -1.
struct Interval {
  long long low = 0;
  long long high = 0;

  [[nodiscard]] constexpr bool single() const { return low == high; }
};

namespace interval {

constexpr Interval anything{-0x7fffffffLL - 1, 0x7fffffffLL};
/// The range of 64-bit integers.
constexpr Interval everything{-0x7fffffffffffffffLL - 1, 0x7fffffffffffffffLL};
constexpr Interval yes{-1, -1};
constexpr Interval no{0, 0};
constexpr Interval maybe{-1, 0};

constexpr long long lower(long long a, long long b) {
  return a < b ? a : b;
}
constexpr long long higher(long long a, long long b) {
  return a < b ? b : a;
}
constexpr Interval one(long long x) {
  return {x, x};
}
/// Integers have 32 bits: beyond them they wrap, to anything.
constexpr Interval fitted(long long low, long long high) {
  return low < anything.low || high > anything.high ? anything : Interval{low, high};
}
constexpr Interval known(bool is_true, bool is_false) {
  return is_true ? yes : (is_false ? no : maybe);
}
constexpr long long floor_quotient(long long a, long long b) {
  return a / b - (a % b != 0 && a < 0 ? 1 : 0);
}

constexpr Interval sum(const Interval& a, const Interval& b) {
  return fitted(a.low + b.low, a.high + b.high);
}
constexpr Interval difference(const Interval& a, const Interval& b) {
  return fitted(a.low - b.high, a.high - b.low);
}
constexpr Interval product(const Interval& a, const Interval& b) {
  const long long p[3] = {a.low * b.high, a.high * b.low, a.high * b.high};
  long long low = a.low * b.low;
  long long high = low;
  for (const long long x : p) {
    low = lower(low, x);
    high = higher(high, x);
  }
  return fitted(low, high);
}
/// By a positive constant; anything else is not known.
constexpr Interval quotient(const Interval& a, const Interval& b) {
  if (!b.single() || b.low <= 0) return anything;
  return {floor_quotient(a.low, b.low), floor_quotient(a.high, b.low)};
}
constexpr Interval remainder(const Interval& a, const Interval& b) {
  if (!b.single() || b.low <= 0) return anything;
  const long long first = floor_quotient(a.low, b.low);
  if (first != floor_quotient(a.high, b.low)) return {0, b.low - 1};
  return {a.low - first * b.low, a.high - first * b.low};
}
constexpr Interval negative(const Interval& a) {
  return fitted(-a.high, -a.low);
}
constexpr Interval magnitude(const Interval& a) {
  return fitted(higher(0, higher(a.low, -a.high)), higher(-a.low, a.high));
}
constexpr Interval minimum(const Interval& a, const Interval& b) {
  return {lower(a.low, b.low), lower(a.high, b.high)};
}
constexpr Interval maximum(const Interval& a, const Interval& b) {
  return {higher(a.low, b.low), higher(a.high, b.high)};
}

// Arithmetic on integers of 64 bits is followed as far as 32 bits hold operands and result.
constexpr bool is_narrow(const Interval& a) {
  return a.low >= anything.low && a.high <= anything.high;
}
/// What a conversion to 32 bits makes of a range.
constexpr Interval narrowed(const Interval& a) {
  return is_narrow(a) ? a : anything;
}
/// What `result`, of operands a and b narrowed, says of the operation in 64 bits.
constexpr Interval of_wide(const Interval& result, const Interval& a, const Interval& b) {
  const bool fits = result.low > anything.low && result.high < anything.high;
  return fits && is_narrow(a) && is_narrow(b) ? result : everything;
}
/// A range of integers of 64 bits whose ends stand for the nearest of 32.
constexpr Interval unsaturated(const Interval& a) {
  return {a.low == anything.low ? everything.low : a.low, a.high == anything.high ? everything.high : a.high};
}

// Booleans have true as the lower end.
constexpr Interval both(const Interval& a, const Interval& b) {
  return maximum(a, b);
}
constexpr Interval either(const Interval& a, const Interval& b) {
  return minimum(a, b);
}
constexpr Interval differs(const Interval& a, const Interval& b) {
  return a.single() && b.single() ? known(a.low != b.low, a.low == b.low) : maybe;
}
constexpr Interval opposite(const Interval& a) {
  return {-1 - a.high, -1 - a.low};
}
constexpr Interval from_boolean(const Interval& a) {
  return {-a.high, -a.low};
}
constexpr Interval to_boolean(const Interval& a) {
  return known(a.low > 0 || a.high < 0, a.low == 0 && a.high == 0);
}

constexpr Interval less(const Interval& a, const Interval& b) {
  return known(a.high < b.low, a.low >= b.high);
}
constexpr Interval less_equal(const Interval& a, const Interval& b) {
  return known(a.high <= b.low, a.low > b.high);
}
constexpr Interval equal(const Interval& a, const Interval& b) {
  return known(a.single() && b.single() && a.low == b.low, a.high < b.low || b.high < a.low);
}
constexpr Interval not_equal(const Interval& a, const Interval& b) {
  return opposite(equal(a, b));
}
constexpr Interval chosen(const Interval& condition, const Interval& a, const Interval& b) {
  if (condition.single()) return condition.low != 0 ? a : b;
  return {lower(a.low, b.low), higher(a.high, b.high)};
}

}  // namespace interval
}  // namespace tandem
