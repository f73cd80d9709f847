// The instruction-set builds of the CPU drivers; which of them exist is up to setup.py.
#pragma once

#include "patched_linear.h"
#include "rows.h"
#include "small_ops.h"

#define ICL_PATCH_DECLARE(isa)                                                                                              \
  namespace icl_patch::isa {                                                                                                \
  void invert_rows(const Inversion& call, int64_t begin, int64_t end);                                                      \
  void linear_outputs(const Linear& call, const float* z, int64_t z_stride, const float* coefficients, int64_t begin, int64_t end); \
  void arrange(Float weight_dtype, float* z, int64_t count);                                                                \
  void low_rank_outputs(const Linear& call, const float* coefficients, int64_t begin, int64_t end);                         \
  void norm_rows(const Norm& call, int64_t begin, int64_t end);                                                             \
  void gated_outputs(const Gated& call, int64_t begin, int64_t end);                                                        \
  void read_direction(const Matrix& z, int64_t row, int64_t count, void* v, void* inverse, bool wide);                      \
  void to_single(const Matrix& x, int64_t row, int64_t count, float* to);                                                   \
  float dot(const float* x, const float* y, int64_t count);                                                                 \
  }
ICL_PATCH_DECLARE(portable)
ICL_PATCH_DECLARE(avx2)
ICL_PATCH_DECLARE(avx512)
ICL_PATCH_DECLARE(avx512_bf16)
#undef ICL_PATCH_DECLARE
