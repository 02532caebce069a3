// The forward kernel with timestamps (ptx/trace.cuh), for `tandem trace` on a GPU.
#pragma once

#define TANDEM_TRACED
#include "ops/forward/sm90/forward.cuh"
