// How many threads a call has.
#pragma once

namespace tandem::cpu {

/// How many threads a call has that wants so many; 0 means OMP_NUM_THREADS or every core the process may use.
/// No more than there are cores, or 16 where there are fewer.
/// 1 in the child of a process that had more: a child has only the thread that forked, and libgomp would wait
/// for the others for ever.
int usable_threads(int wanted);

}  // namespace tandem::cpu
