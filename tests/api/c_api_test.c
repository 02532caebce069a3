/* The C interface, used as a C program would: statuses, messages, struct versions, threads, full memory. */
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_buffers.h"
#include "c_check.h"

int failures = 0;

/* The plain formula, for causal attention at the default scale. */
void check_forward_values(const Buffers* b) {
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < seqlen; ++i) {
      double p[seqlen];
      double sum = 0.0;
      for (int j = 0; j <= i; ++j) {
        double s = 0.0;
        for (int d = 0; d < head_dim; ++d) {
          s += (double)b->q[(i * heads + h) * head_dim + d] * (double)b->k[(j * heads + h) * head_dim + d];
        }
        p[j] = exp(s / sqrt((double)head_dim));
        sum += p[j];
      }
      CHECK(fabs((double)b->lse[h * seqlen + i] - log(sum)) < 1e-5);
      for (int d = 0; d < head_dim; ++d) {
        double o = 0.0;
        for (int j = 0; j <= i; ++j) o += p[j] / sum * (double)b->v[(j * heads + h) * head_dim + d];
        CHECK(fabs((double)b->out[(i * heads + h) * head_dim + d] - o) < 1e-5);
      }
    }
  }
}

static void test_computes(void) {
  Buffers b;
  fill(&b);
  tandem_options options = tandem_options_default();
  options.causal = 1;
  tandem_forward_args forward = forward_args(&b);
  forward.options = &options;
  float max_logits[heads * seqlen];
  forward.max_logits = tandem_contiguous(max_logits, tandem_f32, 3, lse_shape);
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  check_forward_values(&b);
  for (int h = 0; h < heads; ++h) {
    CHECK(max_logits[h * seqlen] == b.lse[h * seqlen]); /* the first query sees one key */
    CHECK(max_logits[h * seqlen + 1] < b.lse[h * seqlen + 1]);
  }

  float gate[elements] = {0}; /* whose sigmoid is a half everywhere */
  float half[elements];
  memcpy(half, b.out, sizeof(half));
  forward.gate = tandem_contiguous(gate, tandem_f32, 4, rows_shape);
  CHECK(tandem_forward(&forward, NULL) == tandem_ok);
  for (int n = 0; n < elements; ++n) {
    CHECK(b.out[n] == half[n] / 2);
    b.out[n] = half[n];
  }

  tandem_backward_args backward = backward_args(&b);
  backward.options = &options;
  tandem_execution execution = tandem_execution_default();
  execution.threads = 1;
  CHECK(tandem_backward(&backward, &execution) == tandem_ok);
  /* The last key is seen by the last query alone, with the weight that its softmax gave it: dv = p * dout. */
  for (int h = 0; h < heads; ++h) {
    double s = 0.0;
    const int last = ((seqlen - 1) * heads + h) * head_dim;
    for (int d = 0; d < head_dim; ++d) s += (double)b.q[last + d] * (double)b.k[last + d];
    const double p = exp(s / sqrt((double)head_dim) - (double)b.lse[h * seqlen + seqlen - 1]);
    for (int d = 0; d < head_dim; ++d) {
      CHECK(fabs((double)b.dv[last + d] - p * (double)b.dout[last + d]) < 1e-5);
      CHECK(!isnan(b.dq[last + d]) && !isnan(b.dk[last + d]));
    }
  }
}

static void test_stats_text(void) {
  size_t needed = 0;
  char* text = NULL;
  CHECK(tandem_stats_text(NULL, 0, &needed) == tandem_ok && needed > 1);
  text = malloc(needed + 1000);
  CHECK(text != NULL && tandem_stats_text(text, needed + 1000, NULL) == tandem_ok);
  CHECK(strstr(text, "tandem_calls_total{operation=\"forward\",backend=\"cpu\"") != NULL);
  free(text);
  CHECK_FAILS(tandem_stats_text(NULL, 5, NULL), tandem_invalid_argument,
              "text is NULL but capacity is 5; pass a buffer, or capacity 0");
}

static void test_workspace_and_explain(void) {
  Buffers b;
  fill(&b);
  tandem_forward_args forward = forward_args(&b);
  tandem_backward_args backward = backward_args(&b);
  forward.q.data = NULL; /* described tensors are enough */
  backward.q.data = NULL;
  size_t bytes = SIZE_MAX;
  CHECK(tandem_forward_workspace_bytes(&forward, NULL, &bytes) == tandem_ok && bytes < SIZE_MAX);
  bytes = SIZE_MAX;
  CHECK(tandem_backward_workspace_bytes(&backward, NULL, &bytes) == tandem_ok && bytes < SIZE_MAX);
  CHECK_FAILS(tandem_forward_workspace_bytes(&forward, NULL, NULL), tandem_invalid_argument,
              "bytes is NULL; pass the address of a size_t");

  size_t needed = 0;
  CHECK(tandem_forward_explain(&forward, NULL, NULL, 0, &needed) == tandem_ok && needed > 1);
  char* text = malloc(needed);
  CHECK(text != NULL && tandem_forward_explain(&forward, NULL, text, needed, NULL) == tandem_ok);
  CHECK(text != NULL && strlen(text) == needed - 1 && strncmp(text, "forward f32: batch 1,", 21) == 0);
  char cut[8];
  CHECK(tandem_forward_explain(&forward, NULL, cut, sizeof(cut), &needed) == tandem_ok);
  CHECK(strcmp(cut, "forward") == 0);
  CHECK(tandem_backward_explain(&backward, NULL, cut, sizeof(cut), NULL) == tandem_ok);
  CHECK(strcmp(cut, "backwar") == 0);
  CHECK_FAILS(tandem_forward_explain(&forward, NULL, NULL, 5, NULL), tandem_invalid_argument,
              "text is NULL but capacity is 5; pass a buffer, or capacity 0");
  free(text);
}

static void test_errors(void) {
  Buffers b;
  fill(&b);
  CHECK_FAILS(tandem_forward(NULL, NULL), tandem_invalid_argument,
              "args is NULL; pass the address of a tandem_forward_args");
  CHECK_FAILS(tandem_backward(NULL, NULL), tandem_invalid_argument,
              "args is NULL; pass the address of a tandem_backward_args");
  tandem_forward_args args = forward_args(&b);
  args.k.dtype = tandem_bf16;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "k is bf16 but q is f32; convert it to f32");
  CHECK(isnan(b.out[0]) && isnan(b.lse[0])); /* nothing was written */
  args = forward_args(&b);
  args.q.dtype = 77;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "q is unknown; convert it to f32, f16, bf16, e4m3 or s8");
  tandem_options options = tandem_options_default();
  options.precision = tandem_fp8;
  options.strict = 1;
  args = forward_args(&b);
  args.options = &options;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "precision fp8 rounds f16 or bf16 inputs to 8 bits, but q is f32; convert q, k and v first, or "
              "leave the precision exact");
  args = forward_args(&b);
  args.q.device = 9;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "q is on a device of kind 9; use cpu (0) or cuda (1)");
  args = forward_args(&b);
  args.q.device = args.k.device = args.v.device = args.out.device = args.lse.device = tandem_cuda;
  CHECK(tandem_forward(&args, NULL) == tandem_unsupported);
  args = forward_args(&b);
  args.q = tandem_contiguous(b.q, tandem_f32, 4, (int64_t[]){2, INT64_MAX / 2 + 1, INT64_MAX / 2 + 1, 16});
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "q of shape (2, 4611686018427387904, 4611686018427387904, 16) and strides (0, 0, 16, 1) spans "
              "more than 9223372036854775807 bytes; offsets must fit 63 bits");
  /* More dimensions than a tensor has room for, in the one argument whose rank the call leaves open. */
  args = forward_args(&b);
  args.q.dtype = args.k.dtype = args.v.dtype = tandem_e4m3;
  args.q_scale = tandem_contiguous(b.dq, tandem_f32, 1, (int64_t[]){1});
  args.q_scale.rank = 12;
  options.strict = 0;
  args.options = &options;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "q_scale has 12 dimensions; it must be (1), (batch, heads), (batch, heads, ceil(seqlen / 128)) "
              "or (batch, heads, seqlen)");
}

/* v is heads 0 and 1 of a buffer of four heads, out is two others of them. */
static void test_outputs_have_memory_of_their_own(void) {
  Buffers b;
  float fused[2 * elements];
  fill(&b);
  memset(fused, 0, sizeof(fused));
  tandem_forward_args args = forward_args(&b);
  args.v.data = fused;
  args.v.stride[1] = args.out.stride[1] = 2 * heads * head_dim;
  args.out.data = fused + head_dim;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "out shares memory with v; an output needs memory of its own");
  args.out.data = fused + heads * head_dim;
  CHECK(tandem_forward(&args, NULL) == tandem_ok);
}

static void test_struct_versions(void) {
  Buffers b;
  fill(&b);
  tandem_forward_args args = forward_args(&b);
  args.struct_size = 0;
  CHECK_FAILS(
      tandem_forward(&args, NULL), tandem_invalid_argument,
      "args.struct_size is 0; set it to sizeof the struct, at least 1160 (the _default function does)");
  tandem_options options = tandem_options_default();
  options.struct_size = 8;
  args = forward_args(&b);
  args.options = &options;
  CHECK_FAILS(
      tandem_forward(&args, NULL), tandem_invalid_argument,
      "options.struct_size is 8; set it to sizeof the struct, at least 56 (the _default function does)");

  /* split_size came last; a caller whose options end before it has none. */
  options = tandem_options_default();
  options.split_size = 100;
  CHECK_FAILS(tandem_forward(&args, NULL), tandem_invalid_argument,
              "split_size is 100; it must be a multiple of 128, such as 128, or 0 (off)");
  options.struct_size = offsetof(tandem_options, split_size);
  CHECK(tandem_forward(&args, NULL) == tandem_ok);

  options = tandem_options_default();
  options.backward_precision = tandem_int8;
  CHECK_FAILS(
      tandem_forward(&args, NULL), tandem_invalid_argument,
      "backward_precision int8 takes the values and the LSE of a forward pass in int8, but precision is "
      "exact; pass precision int8, or leave backward_precision out");

  /* A caller of the first version, whose options end before `strict`: it is not read. */
  options = tandem_options_default();
  options.strict = options.backward_precision = -1;
  options.struct_size = 56;
  args = forward_args(&b);
  args.options = &options;
  CHECK(tandem_forward(&args, NULL) == tandem_ok);

  /* A caller from the future, with fields that this library does not know. */
  struct {
    tandem_execution known;
    int64_t unknown;
  } future = {tandem_execution_default(), 0};
  future.known.struct_size = sizeof(future);
  args = forward_args(&b);
  size_t bytes = 0;
  CHECK(tandem_forward_workspace_bytes(&args, &future.known, &bytes) == tandem_ok);
  future.unknown = 1;
  CHECK(tandem_forward_workspace_bytes(&args, &future.known, &bytes) == tandem_invalid_argument);
  CHECK(strstr(tandem_last_error(), "execution uses fields that tandem ") == tandem_last_error());
}

static int stop_at_once(void* times_asked) {
  ++*(int*)times_asked;
  return 1;
}

static void test_a_call_can_be_interrupted(void) {
  const int64_t shape[4] = {1, 16384, 4, 64}; /* some hundred milliseconds */
  const size_t size = (size_t)(shape[1] * shape[2] * shape[3]);
  float* memory = calloc(4 * size, sizeof(float));
  CHECK(memory != NULL);
  tandem_forward_args args = tandem_forward_args_default();
  args.q = tandem_contiguous(memory, tandem_f32, 4, shape);
  args.k = tandem_contiguous(memory + size, tandem_f32, 4, shape);
  args.v = tandem_contiguous(memory + 2 * size, tandem_f32, 4, shape);
  args.out = tandem_contiguous(memory + 3 * size, tandem_f32, 4, shape);
  int times_asked = 0;
  tandem_execution execution = tandem_execution_default();
  execution.threads = 1;
  execution.interrupted = stop_at_once;
  execution.interrupted_context = &times_asked;
  CHECK_FAILS(tandem_forward(&args, &execution), tandem_interrupted,
              "the call was interrupted; its outputs are incomplete: compute them again");
  CHECK(times_asked == 1);

  /* A caller of the first version, whose struct ends before `interrupted`: it is not read. */
  execution.struct_size = 40;
  args.q.shape[1] = args.out.shape[1] = 2;
  CHECK(tandem_forward(&args, &execution) == tandem_ok && times_asked == 1);
  free(memory);
}

static void* other_thread(void* unused) {
  CHECK(strcmp(tandem_last_error(), "") == 0);
  CHECK(tandem_backward(NULL, NULL) == tandem_invalid_argument);
  return unused;
}

static void test_messages_are_per_thread(void) {
  CHECK(tandem_forward(NULL, NULL) == tandem_invalid_argument);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strcmp(tandem_last_error(), "args is NULL; pass the address of a tandem_forward_args") == 0);
}

#ifdef TANDEM_TEST_BAD_ALLOC
/* operator new and new[] of the whole program, by their mangled names, so that the library's allocations can
 * fail. */
void std_throw_bad_alloc(void) __asm__("_ZSt17__throw_bad_allocv") __attribute__((noreturn));
void* operator_new(size_t size) __asm__("_Znwm");
static int memory_is_exhausted = 0;
void* operator_new(size_t size) {
  if (memory_is_exhausted) std_throw_bad_alloc();
  return malloc(size > 0 ? size : 1);
}

/* operator new[](size, align_val_t, nothrow_t const&): what the library takes its workspace with. */
void* aligned_new(size_t size, size_t alignment,
                  const void* nothrow) __asm__("_ZnamSt11align_val_tRKSt9nothrow_t");
static int workspace_is_exhausted = 0;
void* aligned_new(size_t size, size_t alignment, const void* nothrow) {
  (void)nothrow;
  if (workspace_is_exhausted) return NULL;
  return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void test_bad_alloc(void) {
  Buffers b;
  fill(&b);
  tandem_forward_args args = forward_args(&b);
  size_t needed = 0;
  memory_is_exhausted = 1;
  const int status = tandem_forward_explain(&args, NULL, NULL, 0, &needed);
  memory_is_exhausted = 0;
  CHECK(status == tandem_out_of_memory);
  CHECK(strlen(tandem_last_error()) > 0);
  CHECK(tandem_forward_explain(&args, NULL, NULL, 0, &needed) == tandem_ok);

  workspace_is_exhausted = 1;
  CHECK(tandem_forward(&args, NULL) == tandem_out_of_memory);
  workspace_is_exhausted = 0;
  CHECK(strncmp(tandem_last_error(), "cannot allocate ", 16) == 0);
  CHECK(strstr(tandem_last_error(), " bytes of workspace; use fewer threads, or pass a workspace") != NULL);
  CHECK(isnan(b.out[0]));
  CHECK(tandem_forward(&args, NULL) == tandem_ok);
}
#endif

int main(void) {
  int major = -1;
  int minor = -1;
  int patch = -1;
  CHECK(sscanf(tandem_version(), "%d.%d.%d", &major, &minor, &patch) == 3 && major >= 0 && minor >= 0 &&
        patch >= 0);
  CHECK(strcmp(tandem_last_error(), "") == 0);
  test_quantize();
  test_errors();
  test_outputs_have_memory_of_their_own();
  test_struct_versions();
  test_cache();
  test_indices();
  test_functions();
  test_messages_are_per_thread();
  test_a_call_can_be_interrupted();
#ifdef TANDEM_TEST_BAD_ALLOC
  test_bad_alloc();
#endif
  test_workspace_and_explain();
  test_computes();
  test_stats_text();
  if (failures == 0) puts("ok");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
