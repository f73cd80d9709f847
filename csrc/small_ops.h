// The ops around the products: the norm before the MLP, the direction that the readers share, and the gated product.
#pragma once

#include "rows.h"

namespace icl_patch {

// y = (offset + scale) x / sqrt(mean(x²) + eps), row by row. With `delta` the rows are those of two streams, the first half with the
// context: of every pair delta = x_ctx - x, and the direction of its reduced row of y.
struct Norm {
  int64_t rows = 0, n = 0;
  Matrix x, scale;
  float eps = 0, offset = 0;
  bool cast_first = false;  // whether the normed row is rounded to y's dtype before it is scaled, too
  void* y = nullptr;        // (rows, n) contiguous, x's dtype
  float* delta = nullptr;   // (rows / 2, n) contiguous
  float* v = nullptr;       // (rows / 2, n) contiguous
  float* inverse_norm2 = nullptr;  // (rows / 2,)
};

// y = act(gate) up: the activation is rounded to y's dtype before the product, as its module does.
struct Gated {
  int64_t rows = 0, n = 0;
  Matrix gate, up;
  bool gelu = false;  // tanh's GELU, else SiLU
  void* y = nullptr;  // (rows, n) contiguous, gate's dtype
};

}  // namespace icl_patch
