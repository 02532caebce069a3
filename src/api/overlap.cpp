#include "api/overlap.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <span>

namespace tandem::check {
namespace {

/// The sums 0, step, 2 step, ... of `count` terms.
struct Progression {
  std::uint64_t step = 0;
  std::uint64_t count = 0;
  [[nodiscard]] std::uint64_t reach() const { return step * (count - 1); }
};

/// Distances between an element of one tensor and an element of another. With the lowest byte of x as origin
/// and the indices of y counted from its far end, bytes coincide where
///
///   sum of x's stride * index  +  sum of y's stride * index  +  byte of x  +  byte of y  =  target
///
/// in which every term is at least 0. The bytes run over 0, 1, ..., run - 1 together; each dimension is a
/// progression. Sums of integers below 2^63 twice: unsigned 64 bits hold them.
class Distances {
 public:
  Distances(const ConstTensor& x, const ConstTensor& y) : run_(size_of(x.dtype) + size_of(y.dtype) - 1) {
    add(x);
    add(y);
    std::ranges::sort(steps(), {}, &Progression::step);
    merge();
    std::ranges::reverse(steps());
    std::uint64_t reach = 0;
    std::uint64_t divisor = 0;
    for (std::size_t i = count_; i-- > 0;) {
      reach_[i] = reach += steps_[i].reach();
      divisor_[i] = divisor = std::gcd(divisor, steps_[i].step);
    }
  }

  [[nodiscard]] bool include(std::uint64_t target) { return search(0, target); }

 private:
  std::span<Progression> steps() { return {steps_.data(), count_}; }

  void add(const ConstTensor& t) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) {
      if (t.shape[i] <= 1 || t.stride[i] == 0) continue;
      const std::int64_t distance = t.stride[i] < 0 ? -t.stride[i] : t.stride[i];
      steps_[count_++] = {.step = static_cast<std::uint64_t>(distance) * size_of(t.dtype),
                          .count = static_cast<std::uint64_t>(t.shape[i])};
    }
  }

  /// Two progressions are one where the step of the wider is a multiple of the finer's that the finer
  /// bridges: contiguous dimensions join the run of bytes, and equal strides of x and y each other. What
  /// stays of slices of one buffer nests, so that the search has a way or two to go in each dimension.
  void merge() {
    std::size_t kept = 0;
    for (const Progression p : steps()) {
      if (p.step <= run_) {
        run_ += p.reach();
        continue;
      }
      const auto bridges = [&p](const Progression& finer) {
        return p.step % finer.step == 0 && p.step / finer.step <= finer.count;
      };
      const auto before = std::span(steps_.data(), kept);
      const auto finer = std::ranges::find_if(before, bridges);
      if (finer == before.end()) {
        steps_[kept++] = p;
      } else {
        finer->count += p.step / finer->step * (p.count - 1);
      }
    }
    count_ = kept;
  }

  /// Do the progressions from `at` on, the widest steps first, come to within the run below `target`?
  bool search(std::size_t at, std::uint64_t target) {
    if (at == count_) return target < run_;
    // The highest sum there can be at or below target; all are multiples of the divisor.
    const std::uint64_t most = std::min(target, reach_[at]);
    if (target - (most - most % divisor_[at]) >= run_) return false;
    if (++searched_ > most_steps) return true;
    const Progression& p = steps_[at];
    const std::uint64_t rest = at + 1 < count_ ? reach_[at + 1] : 0;
    for (std::uint64_t n = std::min(target / p.step, p.count - 1) + 1; n-- > 0;) {
      const std::uint64_t left = target - n * p.step;
      if (left >= run_ && left - run_ >= rest) return false;  // farther than what is left can reach
      if (search(at + 1, left)) return true;
    }
    return false;
  }

  static constexpr std::size_t most_dimensions = 2 * static_cast<std::size_t>(ConstTensor::max_rank);
  std::array<Progression, most_dimensions> steps_{};
  std::array<std::uint64_t, most_dimensions> reach_{};    ///< what the progressions from here on reach
  std::array<std::uint64_t, most_dimensions> divisor_{};  ///< the greatest common divisor of their steps
  std::size_t count_ = 0;
  std::uint64_t run_;
  int searched_ = 0;
};

}  // namespace

ByteRange bytes_of(const ConstTensor& t) {
  const auto element = static_cast<std::int64_t>(size_of(t.dtype));
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  ByteRange range{.low = address, .high = address + static_cast<std::uintptr_t>(element)};
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) {
    const std::int64_t reach = t.shape[i] > 1 ? (t.shape[i] - 1) * t.stride[i] * element : 0;
    (reach < 0 ? range.low : range.high) += static_cast<std::uintptr_t>(reach);
  }
  return range;
}

bool share_memory(const ConstTensor& x, const ConstTensor& y) {
  const ByteRange a = bytes_of(x);
  const ByteRange b = bytes_of(y);
  return a.meets(b) && Distances(x, y).include(b.high - 1 - a.low);
}

}  // namespace tandem::check
