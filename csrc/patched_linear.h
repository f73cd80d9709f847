// The patched linear map on the CPU: y = z Wᵀ + bias + Σ_r (z·v_r) u_r.
#pragma once

#include "rows.h"

namespace icl_patch {

constexpr int64_t kMaxLinearRows = 16;  // of one pass over W

// (P, R, ·) factors of any strides.
struct Factor {
  Matrix of_rank;  // its rows are the ranks of one patch
  int64_t patch = 0;

  ICL_PATCH_CALLABLE Matrix rows(int64_t p) const {
    Matrix rows = of_rank;
    rows.data = static_cast<const char*>(rows.data) + p * patch * size_of(rows.dtype);
    return rows;
  }
};

// The low-rank factors of a call; a row without a patch has index -1.
struct Factors {
  int64_t rank = 0;  // 0: none
  Factor u, v;
  bool shared = false;             // all rows take patch 0
  const int64_t* index = nullptr;  // else row m takes patch index[m], or m where there is no index

  ICL_PATCH_CALLABLE int64_t patch_of(int64_t m) const { return rank == 0 ? -1 : shared ? 0 : index ? index[m] : m; }
};

// One pass: as many rows as it takes, out of all.
struct Linear {
  int64_t rows = 0, n = 0, k = 0;
  int64_t first = 0, all = 0;  // where the pass begins among all rows
  Matrix z;                   // (M, K)
  const void* weight = nullptr;
  Float weight_dtype = Float::kSingle;
  int64_t weight_stride = 0;  // between rows of what lies contiguous
  bool transposed = false;    // weight lies as (K, N), as Conv1D keeps it
  Matrix bias;                // (1, N), data null for none
  Factors factors;
  void* y = nullptr;          // (M, N) contiguous
  Float y_dtype = Float::kSingle;
  // Two streams: the first half of the rows sees the context. y is that of both, the reduced rows patched with u = W z_ctx - W z and
  // the direction factors.v.
  float* u = nullptr;         // (M / 2, N) contiguous
  Matrix plain;               // (M, N), in place of z Wᵀ + bias where there is no weight
  const int64_t* slots = nullptr;  // where the rows stand among all, if not side by side: those that chose one expert

  // Of the pass's rows, how many see the context; of both streams the pass takes the same.
  ICL_PATCH_CALLABLE int64_t context_rows() const { return u ? rows / 2 : 0; }
  // Where row m of the pass stands among all rows.
  ICL_PATCH_CALLABLE int64_t row_of(int64_t m) const {
    if (slots) return slots[first + m];
    return m < context_rows() || !u ? first + m : all / 2 + first + m - context_rows();
  }
};

}  // namespace icl_patch
