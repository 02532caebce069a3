#include "cpu/common/config.hpp"

#include <omp.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "cpu/backward/backward.hpp"
#include "cpu/targets/kernels.hpp"
#include "problem/log.hpp"
#include "problem/recipe_of.hpp"

namespace tandem::cpu {
namespace {

/// libgomp's threads stay with the parent where a process forks, whoever used them: Tandem or PyTorch. A
/// region in the child would wait for them for ever.
std::atomic<bool> pool_is_lost{false};
std::atomic<bool> forks_threads{true};

/// /proc/self/task has a link for each thread, "." and "..".
void look_for_threads() {
  struct stat task {};
  forks_threads = stat("/proc/self/task", &task) != 0 || task.st_nlink != 3;
}
void note_lost_threads() {
  if (forks_threads) pool_is_lost = true;
}

/// As the library is loaded, since the threads need not be Tandem's.
const bool registered = pthread_atfork(look_for_threads, nullptr, note_lost_threads) == 0;

bool has_matrix_unit(Target target) {
  return target == Target::amx || target == Target::amx_emulated;
}

/// Whether forward's products run on a matrix unit.
bool takes_tiles(const Problem& problem, Target target) {
  return has_matrix_unit(target) && problem.q.dtype == DType::bf16 && problem.head_dim_qk % 2 == 0;
}

/// Doubles the tile up to `most` rows, or all `of_head`, as long as each of several threads has `tiles` of
/// them: larger ones read K and V less often.
void grow_tile(Config& config, const Problem& problem, int most, std::int64_t of_head, std::int64_t tiles) {
  if (problem.indices.given()) of_head = problem.group();  // a tile has one query
  const std::int64_t rows = problem.heads_q * problem.rows_q * (problem.packed_q ? 1 : problem.batch);
  const std::int64_t least = config.threads == 1 ? 1 : tiles * config.threads;
  while (2 * config.block_q <= most && config.block_q < of_head && rows / (2 * config.block_q) >= least) {
    config.block_q *= 2;
  }
}

/// Rows of a tile on a matrix unit, and tiles of each of several threads.
constexpr int most_on_unit = 1024, tiles_on_unit = 4;

}  // namespace

bool takes_tiles(const Recipe& recipe, Target target) {
  return has_matrix_unit(target) && recipe.qk == OperandType::s8 && recipe.pv == OperandType::s8 &&
         recipe.promote_every == 1;
}

int usable_threads(int wanted) {
  // libgomp ends the process where it cannot start a thread, and more than there are processors gain nothing.
  // A few more are started even so: how many share the work must not change a bit of it.
  constexpr int always = 16;
  const int most = std::max(always, omp_get_num_procs());
  int threads = wanted > 0 ? wanted : omp_get_max_threads();
  if (threads > most) {
    log(LogLevel::debug, "cpu: {} threads instead of {}, which {} processors could not run", most, threads,
        omp_get_num_procs());
    threads = most;
  }
  if (threads == 1) return 1;
  if (pool_is_lost || !registered) {
    log(LogLevel::debug, "cpu: 1 thread instead of {}: OpenMP's did not come along as the process forked",
        threads);
    return 1;
  }
  return threads;
}

Config choose(const Problem& problem, int threads) {
  Config config;
  config.target = best_target();
  config.threads = usable_threads(threads);
  if (problem.pass == Pass::backward) {
    config.block_q = backward_block_q;
    config.block_k = backward_block_k;
    return config;
  }
  if (problem.precision != Precision::exact) {
    config.recipe = recipe_of(problem);
    config.block_q = config.block_k = quant_block;
    if (takes_tiles(config.recipe, config.target)) {
      grow_tile(config, problem, most_on_unit, problem.rows_q, tiles_on_unit);
    }
    return config;
  }
  const int stripe = kernels(config.target).forward.stripe;
  config.block_q = stripe * std::max(1, 64 / stripe);
  if (takes_tiles(problem, config.target)) {
    // K and V are brought into tiles once for all rows of a tile: 13 % of the time with 256 rows, 4 % with
    // 1024. O is read and written once a block. A split is whole blocks.
    config.block_k = problem.split_size == 0 ? 256 : 128;
    grow_tile(config, problem, most_on_unit, problem.group() * problem.rows_q, tiles_on_unit);
    return config;
  }
  config.block_k = 128;
  // From about 64 rows a tile up to 256, as long as that leaves each of several threads 8 tiles: the larger,
  // the less often K and V are fetched and converted (1 % in f32 and 2.5 % in bf16 from 128 to 256; from
  // there nothing on an EPYC, and 1 to 3 % in f32 on the Xeons that have the unit). Results do not depend on
  // it.
  const int most = has_matrix_unit(config.target) ? 512 : 256;
  grow_tile(config, problem, most, std::numeric_limits<std::int64_t>::max(), 8);
  return config;
}

}  // namespace tandem::cpu
