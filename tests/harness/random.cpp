// Random numbers. Compiled with -ffast-math, for which the C library has logarithms and cosines of vectors:
// an eighth of the emulator's tests was spent in those of one number.
#include <cmath>
#include <numbers>
#include <vector>

#include "call.hpp"
#include "cpu/common/vector_clones.hpp"

namespace tandem::harness {
namespace {

/// By Box and Muller's method, in place of `x`, of which each is in (0, 1] as `turn` in [0, 1).
TANDEM_VECTOR_CLONES void make_normal(double* x, const double* turn, std::size_t count) {
#pragma omp simd
  for (std::size_t n = 0; n < count; ++n)
    x[n] = std::sqrt(-2.0 * std::log(x[n])) * std::cos(2.0 * std::numbers::pi * turn[n]);
}

}  // namespace

std::uint64_t Random::bits() {  // splitmix64
  std::uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

double Random::uniform() {
  return static_cast<double>(bits() >> 11) * 0x1p-53;
}

std::int64_t Random::between(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
}

double Random::normal() {
  double x = 1.0 - uniform();
  const double turn = uniform();
  make_normal(&x, &turn, 1);
  return x;
}

std::vector<double> Random::normals(std::int64_t count) {
  std::vector<double> x(static_cast<std::size_t>(count));
  std::vector<double> turn(x.size());
  for (std::size_t n = 0; n < x.size(); ++n) {
    x[n] = 1.0 - uniform();
    turn[n] = uniform();
  }
  make_normal(x.data(), turn.data(), x.size());
  return x;
}

void fill(Box& box, Random& random, double amplitude) {
  std::vector<double> values = random.normals(box.numel());
  for (double& x : values) x *= amplitude;
  box.set_all(values);
}

}  // namespace tandem::harness
