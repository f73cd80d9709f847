// The CPU drivers: each function is compiled once per instruction set, in a namespace of its name.
// The products are also compiled for matrix tiles (amx).
#pragma once

#include "common/calls.h"

#define ICL_PATCH_DECLARE_PRODUCTS(isa)                                                   \
  namespace icl_patch::isa {                                                              \
  int64_t pass_rows(const Linear& call);                                                  \
  void prepare_rows(const Linear& call, float* z, int64_t z_stride, float* coefficients); \
  void linear_outputs(const Linear& call, const float* z, int64_t z_stride,               \
                      const float* coefficients, int64_t begin, int64_t end);             \
  }
#define ICL_PATCH_DECLARE(isa)                                                                   \
  ICL_PATCH_DECLARE_PRODUCTS(isa)                                                                \
  namespace icl_patch::isa {                                                                     \
  void invert_rows(const Inversion& call, int64_t begin, int64_t end);                           \
  void norm_rows(const Norm& call, int64_t begin, int64_t end);                                  \
  void gated_outputs(const Gated& call, int64_t begin, int64_t end);                             \
  void rotary_rows(const Rotary& call, int64_t begin, int64_t end);                              \
  void attention_parts(const Attention& call, int64_t begin, int64_t end);                       \
  void attention_outputs(const Attention& call, int64_t begin, int64_t end);                     \
  void read_direction(const Matrix& z, int64_t row, int64_t count, void* v, void* inverse_norm2, \
                      bool wide);                                                                \
  }
ICL_PATCH_DECLARE(portable)
ICL_PATCH_DECLARE(avx2)
ICL_PATCH_DECLARE(avx512)
ICL_PATCH_DECLARE(avx512_bf16)
ICL_PATCH_DECLARE_PRODUCTS(amx)
#undef ICL_PATCH_DECLARE
#undef ICL_PATCH_DECLARE_PRODUCTS
