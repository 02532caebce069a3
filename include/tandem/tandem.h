/* Exact attention, forward and backward: the C interface. It is attention.hpp in plain C11; shapes, units and
 * rules are documented there.
 *
 * Every function but tandem_version, tandem_last_error and tandem_set_log returns a tandem_status: 0 is
 * success. After a failure tandem_last_error() has the message, and nothing was written. Functions may be
 * called from any number of threads.
 *
 * Structs that may grow begin with struct_size: set it to sizeof the struct (the _default functions do). A
 * library that knows more fields than the caller takes their defaults; one that knows fewer refuses non-zero
 * values it cannot read.
 *
 *   tandem_forward_args args = tandem_forward_args_default();
 *   args.q = tandem_contiguous(q, tandem_f32, 4, (int64_t[]){batch, seqlen_q, heads_q, head_dim});
 *   ...
 *   if (tandem_forward(&args, NULL) != tandem_ok) fputs(tandem_last_error(), stderr);
 */
#ifndef TANDEM_H
#define TANDEM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tandem/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a call returns: 0, or what kind of failure it was. */
typedef enum tandem_status {
  tandem_ok = 0,
  tandem_invalid_argument = 1, /* an argument breaks a rule; the message names rule, value and remedy */
  tandem_unsupported = 2,      /* a legal wish that no backend here can meet */
  tandem_out_of_memory = 3,    /* host or device memory is exhausted */
  tandem_runtime = 4,          /* the driver, the compiler or the operating system failed */
  tandem_internal = 5,         /* a bug in Tandem */
  tandem_interrupted = 6       /* execution->interrupted ended the call; its outputs hold anything */
} tandem_status;

/* Element types. */
typedef enum tandem_dtype {
  tandem_f32 = 0,
  tandem_f16 = 1,
  tandem_bf16 = 2,
  tandem_e4m3 = 3,
  tandem_i32 = 4,
  tandem_i64 = 5,
  tandem_s8 = 6
} tandem_dtype;

/* What the products of a forward pass are computed in; attention.hpp has the meaning. */
typedef enum tandem_precision { tandem_exact = 0, tandem_fp8 = 1, tandem_int8 = 2 } tandem_precision;

/* Where a tensor's memory lives. */
typedef enum tandem_device { tandem_cpu = 0, tandem_cuda = 1 } tandem_device;

/* A strided view of up to four dimensions. All zero: "not given". Strides are in elements; the last dimension
 * must be contiguous. Inputs are not written, whatever the type of `data` says. This struct never changes. */
typedef struct tandem_tensor {
  void* data;
  int32_t dtype; /* a tandem_dtype */
  int32_t rank;
  int64_t shape[4];
  int64_t stride[4];
  int32_t device;       /* a tandem_device */
  int32_t device_index; /* CUDA device ordinal; 0 on the CPU */
} tandem_tensor;

/* Options that forward and backward share. tandem_options_default() computes plain full attention. */
typedef struct tandem_options {
  size_t struct_size;
  int32_t has_scale; /* 0: scale is head_dim^-0.5 */
  float scale;
  int32_t causal;
  float softcap;        /* 0: off; at most 1e30 */
  int64_t window_left;  /* -1: unbounded */
  int64_t window_right; /* -1: unbounded */
  int32_t deterministic;
  int32_t reserved_pad;
  int32_t check;              /* check the contents of cu_seqlens and seqused */
  int32_t precision;          /* a tandem_precision */
  int32_t strict;             /* 8-bit precisions: no scale and no mean looks at a later row */
  int32_t backward_precision; /* tandem_exact, or, with precision tandem_int8, tandem_int8 */
  int64_t split_size; /* keys of a split, a multiple of 128; bits then do not depend on the batch; 0: off */
  float dropout_p;    /* attention dropout, in [0, 1), of these seed and offset; 0: off */
  int32_t reserved_dropout;
  uint64_t dropout_seed;
  uint64_t dropout_offset;
} tandem_options;

/* Functions on scores, and masks, as text (docs/functions.md has the grammar), and the tensors t0, t1, ...
 * that both read. They are parsed by every call. */
typedef struct tandem_functions {
  const char* score; /* from the scaled score to the logit; NULL: none */
  const char* mask;  /* which pairs are visible; NULL: none */
  const tandem_tensor* captured;
  int64_t captured_count;
} tandem_functions;

/* Arguments of tandem_forward: ForwardArgs of attention.hpp, which has shapes and dtypes. A tensor that is
 * all zero is not given. */
typedef struct tandem_forward_args {
  size_t struct_size;
  const tandem_options* options; /* NULL: defaults */
  tandem_tensor q, k, v;
  tandem_tensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k; /* optional */
  tandem_tensor sink;                                             /* optional */
  tandem_tensor q_scale, k_scale, v_scale;                        /* optional, of 8-bit tensors */
  tandem_tensor out;                                              /* written */
  tandem_tensor lse;                                              /* optional, written */
  tandem_tensor page_table, leftpad_k, cache_batch_idx;           /* optional: k and v are a cache */
  tandem_tensor causal_by_sequence;                               /* optional */
  tandem_functions functions;                                     /* optional */
  tandem_tensor dropout_places;                                   /* optional, with dropout_p */
  tandem_tensor max_logits;                                       /* optional, written */
  tandem_tensor indices, topk_length;                             /* optional: the keys of each query */
  tandem_tensor gate;                                             /* optional: out *= sigmoid(gate) */
} tandem_forward_args;

/* Arguments of tandem_backward: BackwardArgs of attention.hpp. */
typedef struct tandem_backward_args {
  size_t struct_size;
  const tandem_options* options; /* NULL: defaults */
  tandem_tensor q, k, v;
  tandem_tensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k; /* optional */
  tandem_tensor sink;                                             /* optional */
  tandem_tensor out, lse, dout;
  tandem_tensor dlse; /* optional */
  /* Written, in q's dtype or f32; all zero where not wanted, as dsink, but one of them is needed. */
  tandem_tensor dq, dk, dv;
  tandem_tensor dsink;        /* optional, written */
  tandem_functions functions; /* optional */
  /* Optional, written: gradients of functions.captured, f32, as many as captured_count; all zero where not
   * wanted. NULL: none is. On a GPU not with options.deterministic. */
  const tandem_tensor* captured_gradients;
  tandem_tensor dropout_places; /* optional, with dropout_p */
  int32_t accumulate_dq;        /* dq, or dk and dv, are added to what they hold, f32 */
  int32_t accumulate_dk_dv;
  tandem_tensor max_logits;           /* from forward; with backward_precision tandem_int8 */
  tandem_tensor indices, topk_length; /* optional: the keys of each query */
  tandem_tensor gate;                 /* optional: forward's */
  tandem_tensor dgate;                /* optional, written, with gate */
} tandem_backward_args;

/* How and where a call runs. NULL, or tandem_execution_default(), follows the tensors' device. */
typedef struct tandem_execution {
  size_t struct_size;
  int32_t threads;  /* CPU; 0: OMP_NUM_THREADS, or every core this process may use */
  int32_t sm_limit; /* GPU: persistent grids are those of a GPU with so many SMs at most; 0: all */
  void* stream;     /* GPU: a CUstream; NULL is the default stream */
  void* workspace;  /* 256-byte aligned; NULL: the call allocates for itself */
  size_t workspace_bytes;
  /* CPU: asked some 20 times a second, by the thread that called, whether the call is to end before it is
   * done. Once it returns other than 0 the call fails with tandem_interrupted, and its outputs hold anything.
   * NULL: nothing is asked. A GPU call is queued and not asked about. */
  int (*interrupted)(void* context);
  void* interrupted_context;
} tandem_execution;

/* Writes args->out, and args->lse where given. Outputs have memory of their own, here and below: no element
 * of one shares memory with another tensor's, but they may be slices of a buffer whose other slices are
 * inputs. */
TANDEM_API int tandem_forward(const tandem_forward_args* args, const tandem_execution* execution);

/* Writes those of dq, dk, dv and dsink that are given. */
TANDEM_API int tandem_backward(const tandem_backward_args* args, const tandem_execution* execution);

/* Scratch bytes that the call needs, into *bytes. Tensors need shapes, dtypes and devices; their data is not
 * read. */
TANDEM_API int tandem_forward_workspace_bytes(const tandem_forward_args* args,
                                              const tandem_execution* execution, size_t* bytes);
TANDEM_API int tandem_backward_workspace_bytes(const tandem_backward_args* args,
                                               const tandem_execution* execution, size_t* bytes);

/* Which kernel and tiles would run the call and why, as NUL-terminated text of a few lines in `text`, cut
 * where it is longer than `capacity` bytes. *needed (where not NULL) becomes the capacity that holds all of
 * it. `text` may be NULL if capacity is 0. Tensors' data is not read. */
TANDEM_API int tandem_forward_explain(const tandem_forward_args* args, const tandem_execution* execution,
                                      char* text, size_t capacity, size_t* needed);
TANDEM_API int tandem_backward_explain(const tandem_backward_args* args, const tandem_execution* execution,
                                       char* text, size_t capacity, size_t* needed);

/* The elements that share a scale. This and what follows turns tensors into 8-bit values and scales:
 * quantize.hpp, which has shapes, defaults and errors, in plain C. */
typedef enum tandem_granularity {
  tandem_granularity_tensor = 0,
  tandem_granularity_head = 1,
  tandem_granularity_block = 2,
  tandem_granularity_row = 3
} tandem_granularity;

/* Arguments of tandem_quantize. */
typedef struct tandem_quantize_args {
  size_t struct_size;
  int32_t granularity;         /* a tandem_granularity */
  int32_t hadamard;            /* rotate the rows first */
  tandem_tensor x;             /* f32, f16 or bf16 */
  tandem_tensor codes, scales; /* written: the quantized values and their scales */
  tandem_tensor mean;          /* optional, written: subtracted first */
} tandem_quantize_args;

/* Writes `codes`, `scales` and, where given, `mean`. */
TANDEM_API int tandem_quantize(const tandem_quantize_args* args, const tandem_execution* execution);

/* Arguments of tandem_append_kv: AppendArgs of cache.hpp, which has shapes, dtypes, defaults and errors. A
 * tensor that is all zero is not given. */
typedef struct tandem_append_args {
  size_t struct_size;
  int32_t rotary_interleaved;     /* pairs are channels 2 c and 2 c + 1, not c and c + rotary_dim / 2 */
  int32_t check;                  /* check what the integers contain */
  tandem_tensor k_new, v_new;     /* v_new and v_cache are optional, together */
  tandem_tensor k_cache, v_cache; /* written in place */
  tandem_tensor cu_seqlens_new, seqused_new;            /* optional */
  tandem_tensor page_table, cache_batch_idx, leftpad_k; /* optional */
  tandem_tensor cache_seqlens;                          /* rows before the append */
  tandem_tensor slot_mapping;     /* in place of the lengths, tables and indices above */
  tandem_tensor k_scale, v_scale; /* optional, of codes */
  tandem_tensor rotary_cos, rotary_sin, rotary_offsets; /* optional */
  tandem_tensor q;                                      /* optional, with a rotary embedding */
  tandem_tensor q_out;                                  /* written, with q */
  tandem_tensor k_scale_cache, v_scale_cache; /* written: scales by row, in place of k_scale and v_scale */
} tandem_append_args;

/* Writes new keys and values into a cache, in place; every other byte of it stays as it was. */
TANDEM_API int tandem_append_kv(const tandem_append_args* args, const tandem_execution* execution);

/* Arguments of tandem_merge: MergeArgs of cache.hpp. */
typedef struct tandem_merge_args {
  size_t struct_size;
  int64_t parts;
  const tandem_tensor* outs; /* `parts` of them, of one shape and dtype */
  const tandem_tensor* lses; /* `parts` of them */
  tandem_tensor out;         /* written */
  tandem_tensor lse;         /* optional, written */
} tandem_merge_args;

/* Writes attention over all keys from that over parts of them. */
TANDEM_API int tandem_merge(const tandem_merge_args* args, const tandem_execution* execution);

/* What the library is doing: messages up to `level` (0 off, 1 a kernel's first use, 2 every call) go to
 * `sink`, for the whole process. log.hpp in plain C. */
typedef void (*tandem_log_sink)(int level, const char* message);
TANDEM_API void tandem_set_log(int level, tandem_log_sink sink);

/* What the library has done in this process, by stats.hpp's counters, as NUL-terminated text in Prometheus's
 * format; text, capacity and needed as tandem_forward_explain has them. The text may have grown between two
 * calls. */
TANDEM_API int tandem_stats_text(char* text, size_t capacity, size_t* needed);

/* The message of this thread's last call that failed; "" if none did. Valid until this thread's next call. */
TANDEM_API const char* tandem_last_error(void);

/* "major.minor.patch" */
TANDEM_API const char* tandem_version(void);

/* Full attention, without a mask, in the dtype of the inputs. */
static inline tandem_options tandem_options_default(void) {
  tandem_options options = {sizeof(tandem_options), 0, 0.0F, 0, 0.0F, -1, -1, 0, 0, 0,
                            tandem_exact,           0, 0,    0, 0.0F, 0,  0,  0};
  return options;
}

/* No tensor given, and default options. */
static inline tandem_forward_args tandem_forward_args_default(void) {
  tandem_forward_args args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}

/* No tensor given, and default options. */
static inline tandem_backward_args tandem_backward_args_default(void) {
  tandem_backward_args args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}

/* No tensor given, a scale for each head. */
static inline tandem_quantize_args tandem_quantize_args_default(void) {
  tandem_quantize_args args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.granularity = tandem_granularity_head;
  return args;
}

/* No tensor given. */
static inline tandem_append_args tandem_append_args_default(void) {
  tandem_append_args args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}

/* No parts and no tensor given. */
static inline tandem_merge_args tandem_merge_args_default(void) {
  tandem_merge_args args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}

/* Every core, the default stream, and memory that the call allocates for itself. */
static inline tandem_execution tandem_execution_default(void) {
  tandem_execution execution = {sizeof(tandem_execution), 0, 0, NULL, NULL, 0, NULL, NULL};
  return execution;
}

/* A row-major view of CPU memory. `rank` is 1 to 4. */
static inline tandem_tensor tandem_contiguous(void* data, tandem_dtype dtype, int32_t rank,
                                              const int64_t* shape) {
  tandem_tensor t = {NULL, 0, 0, {0, 0, 0, 0}, {0, 0, 0, 0}, tandem_cpu, 0};
  uint64_t step = 1; /* unsigned: sizes are checked by the call, and may overflow here */
  int32_t i = 0;
  t.data = data;
  t.dtype = (int32_t)dtype;
  t.rank = rank;
  for (i = rank < 4 ? rank - 1 : 3; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = (int64_t)step;
    step *= (uint64_t)shape[i];
  }
  return t;
}

#ifdef __cplusplus
}
#endif

#endif
