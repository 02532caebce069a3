// What the warps of one block did, in program order and without time: what a model of time starts from
// (cli/trace). Lane 0 of each warp speaks for the warp: it is the lane that elect_one elects, and kernels
// arrive at barriers by it.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem::emulator {

/// Instructions of a warp between two other steps. Operators of C++ (a + b) are not seen by the emulator and
/// not counted.
struct Work {
  std::uint32_t special = 0;     ///< of the special function unit: exponentials, logarithms, reciprocals
  std::uint32_t arithmetic = 0;  ///< f32 multiply-adds, maxima, conversions
  std::uint32_t exchanges = 0;   ///< shuffles, votes, elections
  std::uint32_t shared = 0;      ///< loads and stores of shared memory
  std::uint32_t loads = 0;       ///< of global memory
  std::uint32_t stored = 0;      ///< bytes a lane stores to global memory

  bool operator==(const Work&) const = default;
};

/// A step of a warp.
struct Step {
  enum class Kind : std::uint8_t {
    work,           ///< `work`
    wait,           ///< at the mbarrier at offset `thing` until its phase `number` (from 0) has completed
    arrive,         ///< there, in phase `number`
    load,           ///< a copy of `amount` bytes into shared memory begins; it ends in that barrier and phase
    issue_product,  ///< WGMMA `number` (from 1) of the warpgroup begins: `amount` operations
    wait_products,  ///< until WGMMA `number` of the warpgroup is done
    join_named,     ///< named barrier `thing`, its generation `number`: waits
    arrive_named,   ///< the same without waiting
    store,          ///< bulk store `number` (from 1) of this warp begins: `amount` bytes
    wait_stores,    ///< until that store has read shared memory
  };
  Kind kind = Kind::work;
  bool registers = false;  ///< of a product: A is in registers
  std::uint32_t thing = 0;
  std::uint64_t number = 0;
  std::uint64_t amount = 0;
  Work work = {};
};

/// By warp.
struct Recording {
  unsigned block = 0;  ///< that is recorded
  std::vector<std::vector<Step>> warps = {};
};

/// Where the running thread's instructions are counted, where anybody counts them.
class Tally {
 public:
  void count(std::uint32_t Work::*what, std::uint32_t amount = 1);
  /// A step other than work: what was counted before comes first.
  void add(const Step& step);
  void flush();

  std::vector<Step>* steps = nullptr;

 private:
  /// Work is cut into pieces so that warps that work at one time can share units in turn.
  static constexpr std::uint32_t piece = 16;

  Work pending_;
  std::uint32_t instructions_ = 0;
};

/// That of the running thread; null: nobody counts.
extern constinit thread_local Tally* tally;

inline void count(std::uint32_t Work::*what, std::uint32_t amount = 1) {
  if (tally != nullptr) tally->count(what, amount);
}
inline void record(const Step& step) {
  if (tally != nullptr) tally->add(step);
}

}  // namespace tandem::emulator
