/* tandem_quantize, used as a C program would. */
#include <math.h>

#include "c_check.h"

void test_quantize(void) {
  float x[2][8] = {{1.0F, -2.0F, 127.0F, 0.4F, 0.0F, 3.5F, -127.0F, 64.0F}, {0.0F}};
  int8_t codes[2][8];
  float scales[2];
  tandem_quantize_args args = tandem_quantize_args_default();
  args.granularity = tandem_granularity_row;
  args.x = tandem_contiguous(x, tandem_f32, 3, (int64_t[]){2, 1, 8});
  args.codes = tandem_contiguous(codes, tandem_s8, 3, (int64_t[]){2, 1, 8});
  args.scales = tandem_contiguous(scales, tandem_f32, 2, (int64_t[]){1, 2});
  CHECK(tandem_quantize(&args, NULL) == tandem_ok);
  CHECK(scales[0] == 1.0F && scales[1] == 0.0F);
  CHECK(codes[0][1] == -2 && codes[0][2] == 127 && codes[0][3] == 0 && codes[0][5] == 4 && codes[1][0] == 0);
  CHECK_FAILS(tandem_quantize(NULL, NULL), tandem_invalid_argument,
              "args is NULL; pass the address of a tandem_quantize_args");
}
