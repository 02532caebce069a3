// The host's side of the emulator: launches, the buffers a kernel may touch, tensor maps, faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "config/tensor_map_spec.hpp"
#include "emulator.hpp"
#include "recording.hpp"

namespace tandem::emulator {

/// A kernel did what hardware would punish with a hang, a crash or a wrong result. The text says what, where
/// and who.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Global memory that a kernel may touch.
struct Buffer {
  const void* data = nullptr;
  std::size_t bytes = 0;
  bool writable = false;
};

template <typename T>
Buffer readable(const std::vector<T>& v) {
  return {v.data(), v.size() * sizeof(T), false};
}
template <typename T>
Buffer writable(std::vector<T>& v) {
  return {v.data(), v.size() * sizeof(T), true};
}

struct Grid {
  unsigned blocks = 1;
  unsigned threads = 128;  ///< a multiple of 32, at most 512
  std::size_t shared_bytes = 0;
  unsigned blocks_per_sm = 1;  ///< that share its registers and shared memory
  unsigned cluster = 1;        ///< blocks of a cluster, at most 16
};

struct Options {
  std::uint64_t seed = 0;    ///< 0: round robin and lane 0 elected; others: random order, random elected lane
  unsigned max_delay = 200;  ///< scheduling steps that TMA and the tensor cores may lag
  unsigned host_threads = 1;    ///< blocks, or clusters, run at once
  bool unordered = false;       ///< threads may store over each other's numbers in global memory
  bool skipped_phases = false;  ///< a thread may let a barrier's phases pass without waiting for them
  std::vector<Buffer> buffers = {};
  Recording* recording = nullptr;             ///< takes the steps of its block; seed 0 and no cluster then
  std::vector<Buffer> of_previous_grid = {};  ///< in them, too; only for who has waited for that grid
  /// In them, too: a grid that has not ended writes them. Who has not waited for it reads behind a semaphore.
  std::vector<Buffer> of_running_grid = {};
};

/// Runs `kernel` as every thread of every block. Throws Fault at the first fault. A grid beside a previous or
/// running one has to end behind it, since its end is taken for that of both.
void launch(const std::function<void()>& kernel, const Grid& grid, const Options& options);

template <typename Params>
void launch(void (*kernel)(Params), const Params& params, const Grid& grid, const Options& options) {
  launch([&] { kernel(params); }, grid, options);
}

/// The emulator's own encoding of a tensor map. Throws Fault where the driver would refuse.
TensorMap encode(const TensorMapSpec& spec);

}  // namespace tandem::emulator
