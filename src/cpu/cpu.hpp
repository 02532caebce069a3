// The CPU backend: blocked online softmax, vectorised, threaded. Runs a Problem as a Config says.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "cpu/common/stop.hpp"
#include "problem/problem.hpp"
#include "problem/recipe.hpp"

namespace tandem::cpu {

/// Instruction sets that the kernels are built for, best last.
enum class Target : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, neon = 4 };

const char* name_of(Target target);
/// Whether this processor can run `target` and this build contains it.
bool available(Target target);
/// The best available target; TANDEM_CPU_TARGET (a name) overrides it and is an Error if not available.
Target best_target();

/// How a Problem runs on the CPU. Chosen by src/plan, printed by explain.
struct Config {
  Target target = Target::portable;
  int threads = 1;
  int block_q = 0;
  int block_k = 0;
  Recipe recipe;  ///< read if the problem's precision is not exact
};

/// A call, decided by src/plan.
struct Steps {
  /// What the kernels see. Of a mixed call K and V are in the dtype of Q, at the start of the workspace,
  /// whose address `run` fills in.
  Problem problem;
  std::optional<Problem> mixed;  ///< a mixed call as it was asked for, whose K and V are dequantized first
  Config config;
};

/// Scratch bytes: grows with threads times tile, never with seqlen squared.
std::size_t workspace_bytes(const Problem& problem, const Config& config);
/// The same, and what is copied to the workspace.
std::size_t workspace_bytes(const Steps& steps);

/// How many threads a call has that wants so many; 0 means OMP_NUM_THREADS or every core the process may use.
/// No more than there are cores, or 16 where there are fewer.
/// 1 in the child of a process that had more: a child has only the thread that forked, and libgomp would wait
/// for the others for ever.
int usable_threads(int wanted);

/// The Config for a Problem on this machine; threads 0 means OMP_NUM_THREADS or every core the process may
/// use.
Config choose(const Problem& problem, int threads);

/// Once `stop` is wanted these return as they are, and outputs hold anything. `forward` and `backward` take
/// problems that are not mixed.
void run(const Steps& steps, std::span<std::byte> workspace, Stop* stop = nullptr);
void forward(const Problem& problem, const Config& config, std::span<std::byte> workspace,
             Stop* stop = nullptr);
void backward(const Problem& problem, const Config& config, std::span<std::byte> workspace,
              Stop* stop = nullptr);

}  // namespace tandem::cpu
