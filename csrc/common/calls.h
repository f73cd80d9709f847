// The arguments of one call of each driver.
#pragma once

#include "common/matrix.h"

namespace icl_patch {

// One call of either inversion op; B rows of n elements. With `delta` it is the stable update:
// the target is g = delta + m ⊙ Norm(h) with h = fallback, the radius is h's, the scale m is
// floored, and the result is x - h in place of the inverse x.
struct Inversion {
  int64_t rows = 0, n = 0;
  Matrix target, scale, rms, fallback, delta;
  double eps = 0;
  void* hidden = nullptr;  // (B, n) contiguous, fp64 or fp32
  bool hidden_is_fp64 = false;
  double* shift = nullptr;         // (B,)
  double* new_scale = nullptr;     // (B, n) contiguous
  int8_t* status = nullptr;        // (B,)
  int32_t* evaluations = nullptr;  // (B,)
};

// A recording of the norm behind a block's MLP: the stable update of M rows, with the norm's weight
// as its scale, and both streams' outputs. `fallback` is the reduced stream's plain output of the
// matrix before the norm, `rms` is not read, and `hidden` takes u. The reduced rows go through the
// norm with the matrix changed by u vᵀ, and the scale m'.
struct NormRecording : Inversion {
  int64_t k = 0;
  Matrix context;                   // (M, n), the matrix's output with the context
  Matrix h;                         // (M, K), its input without the context
  float offset = 0;                 // the scale is offset + weight
  bool cast_first = false;          // as for Norm
  float* v = nullptr;               // (M, K) contiguous
  float* inverse_norm2 = nullptr;   // (M,)
  float* new_scale_fp32 = nullptr;  // (M, n) contiguous, in place of new_scale
  void* y = nullptr;                // (2 M, n) contiguous
  DType y_dtype = DType::kFp32;
};

// Patches (P, R, ·) of any strides.
struct Factor {
  Matrix patch;  // (R, ·), the first patch
  int64_t patch_stride = 0;

  Matrix operator[](int64_t p) const { return patch.shifted(p * patch_stride); }
};

struct Factors {
  int64_t rank = 0;  // 0: no patch
  Factor u, v;
  bool shared = false;             // all rows take patch 0
  const int64_t* index = nullptr;  // row m takes patch index[m]; without an index, patch m

  // The patch of row m, or -1 if it has none.
  int64_t patch_of(int64_t m) const { return rank == 0 ? -1 : shared ? 0 : index ? index[m] : m; }
};

// The patched linear map y = z Wᵀ + bias + Σ_r (z·v_r) u_r, or one pass of it: some of its rows.
struct Linear {
  int64_t rows = 0, n = 0, k = 0;  // of the pass: z (rows, K) -> y (rows, N)
  int64_t first = 0, all = 0;      // the pass's first row, out of so many
  Matrix z;                        // (all, K)
  Matrix weight;                   // rows are contiguous: (N, K), or (K, N) if transposed
  bool transposed = false;
  Matrix bias;  // (1, N), data null for none
  Factors factors;
  void* y = nullptr;  // (all, N) contiguous
  DType y_dtype = DType::kFp32;
  // Recording: the first half of the rows sees the context. y holds both streams' outputs; the
  // reduced rows are patched with u = W z_ctx - W z and the direction factors.v.
  float* u = nullptr;              // (all / 2, N) contiguous
  Matrix plain;                    // (all, N), replaces z Wᵀ + bias where there is no weight
  const int64_t* slots = nullptr;  // experts: the slots of the pass's rows are slots[first + m]
  int64_t slots_per_row = 1, z_slot = 0;  // experts: slot s reads row s / slots_per_row of z

  // How many of the pass's rows see the context.
  int64_t context_rows() const { return u ? rows / 2 : 0; }

  // The row of y that row m of the pass writes.
  int64_t row_of(int64_t m) const {
    if (slots) return slots[first + m];
    return m < context_rows() || !u ? first + m : all / 2 + first + m - context_rows();
  }

  // The elements of z that row m of the pass reads.
  Matrix input(int64_t m) const {
    const int64_t slot = row_of(m);
    return z.shifted(slot / slots_per_row * z.row + slot % slots_per_row * z_slot);
  }
};

// y = (offset + scale) x / sqrt(mean(x²) + eps), row by row. With `delta` the rows are pairs, the
// first half with the context; each pair gives delta = x_ctx - x and the direction of its reduced
// row of y.
struct Norm {
  int64_t rows = 0, n = 0;
  Matrix x, scale;
  float eps = 0, offset = 0;
  bool cast_first = false;         // whether the normalised row is also rounded before it is scaled
  void* y = nullptr;               // (rows, n) contiguous, x's dtype
  float* delta = nullptr;          // (rows / 2, n) contiguous
  float* v = nullptr;              // (rows / 2, n) contiguous
  float* inverse_norm2 = nullptr;  // (rows / 2,)
};

// y = act(gate) up; the activation is rounded to y's dtype before the product.
struct Gated {
  int64_t rows = 0, n = 0;
  Matrix gate, up;
  bool gelu = false;  // GELU in its tanh form, else SiLU
  void* y = nullptr;  // (rows, n) contiguous, gate's dtype
};

// Rotary positions: y = x cos + (-x₂, x₁) sin, where x₁ and x₂ are the halves of x; the products and
// their sum are rounded to x's dtype.
struct Rotary {
  int64_t heads = 0, tokens = 0, d = 0;
  Matrix x;         // (tokens, d) of a row and a head
  Matrix cos, sin;  // (tokens, d) of a row
  int64_t x_row = 0, x_head = 0, cos_row = 0, sin_row = 0;  // strides
  void* y = nullptr;  // (rows, heads, tokens, d) contiguous, x's dtype
};

// Attention of one token a row: y = softmax(scale q·k) v over the keys that the row sees.
struct Attention {
  static constexpr int64_t kPart = 256;  // visible keys that are summed apart
  int64_t heads = 0, groups = 0, keys = 0, d = 0, e = 0, parts = 0;  // groups: heads of keys
  Matrix query;       // (heads, d) of a row
  Matrix key, value;  // (keys, d) and (keys, e) of a row and a group
  int64_t query_row = 0, key_row = 0, key_group = 0, value_row = 0, value_group = 0;  // strides
  const int32_t* visible = nullptr;  // (rows, keys): the keys that a row sees; null for all
  const int64_t* counts = nullptr;   // (rows,): how many they are
  const int64_t* items = nullptr;    // the parts with keys, in the order (rows, groups, parts)
  float scale = 0;
  float* partial = nullptr;  // (rows, groups, parts, heads / groups, 2 + e)
  void* y = nullptr;         // (rows, heads, e) contiguous, the query's dtype
};

}  // namespace icl_patch
