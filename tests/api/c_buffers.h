/* Tensors of a small call, for the C interface's tests. */
#pragma once

#include <math.h>

#include "tandem/tandem.h"

enum { seqlen = 3, heads = 2, head_dim = 8, elements = seqlen * heads * head_dim };

typedef struct Buffers {
  float q[elements], k[elements], v[elements], out[elements], lse[heads * seqlen];
  float dout[elements], dq[elements], dk[elements], dv[elements];
} Buffers;

static const int64_t rows_shape[4] = {1, seqlen, heads, head_dim};
static const int64_t lse_shape[3] = {1, heads, seqlen};

static inline void fill(Buffers* b) {
  for (int i = 0; i < elements; ++i) {
    b->q[i] = (float)(i % 7) * 0.25F - 0.5F;
    b->k[i] = (float)(i % 5) * 0.5F - 1.0F;
    b->v[i] = (float)(i % 11) - 5.0F;
    b->dout[i] = (float)(i % 3) - 1.0F;
    b->out[i] = b->dq[i] = b->dk[i] = b->dv[i] = NAN;
  }
  for (int i = 0; i < heads * seqlen; ++i) b->lse[i] = NAN;
}

static inline tandem_forward_args forward_args(Buffers* b) {
  tandem_forward_args args = tandem_forward_args_default();
  args.q = tandem_contiguous(b->q, tandem_f32, 4, rows_shape);
  args.k = tandem_contiguous(b->k, tandem_f32, 4, rows_shape);
  args.v = tandem_contiguous(b->v, tandem_f32, 4, rows_shape);
  args.out = tandem_contiguous(b->out, tandem_f32, 4, rows_shape);
  args.lse = tandem_contiguous(b->lse, tandem_f32, 3, lse_shape);
  return args;
}

static inline tandem_backward_args backward_args(Buffers* b) {
  tandem_backward_args args = tandem_backward_args_default();
  args.q = tandem_contiguous(b->q, tandem_f32, 4, rows_shape);
  args.k = tandem_contiguous(b->k, tandem_f32, 4, rows_shape);
  args.v = tandem_contiguous(b->v, tandem_f32, 4, rows_shape);
  args.out = tandem_contiguous(b->out, tandem_f32, 4, rows_shape);
  args.lse = tandem_contiguous(b->lse, tandem_f32, 3, lse_shape);
  args.dout = tandem_contiguous(b->dout, tandem_f32, 4, rows_shape);
  args.dq = tandem_contiguous(b->dq, tandem_f32, 4, rows_shape);
  args.dk = tandem_contiguous(b->dk, tandem_f32, 4, rows_shape);
  args.dv = tandem_contiguous(b->dv, tandem_f32, 4, rows_shape);
  return args;
}

/* Compares out and lse with the formula's (c_api_test.c). */
void check_forward_values(const Buffers* b);
