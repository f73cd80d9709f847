// The CPU drivers of the norm before the MLP, of the direction that the readers share, and of rotary
// positions.
// Elementwise loops for the compiler to vectorise, sums in fp64 in a fixed number of lanes, and no
// fused multiply-add: every instruction set gives the same bits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/conversions.h"
#include "cpu/drivers.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

constexpr int kLanes = 16;

// f(lane, k) for every element k < count: whole vectors of lanes, then the rest.
template <class F>
ICL_PATCH_INLINE void in_lanes(int64_t count, F f) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes)
    for (int i = 0; i < kLanes; ++i) f(i, k + i);
  for (int i = 0; k + i < count; ++i) f(i, k + i);
}

template <class X>
double norm2(const X* x, int64_t count) {
  double sums[kLanes] = {};
  in_lanes(count, [&](int i, int64_t k)
                      ICL_PATCH_INLINE_LAMBDA { sums[i] += static_cast<double>(x[k]) * x[k]; });
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

template <class X>
double largest_of(const X* x, int64_t count) {
  X largest[kLanes] = {};
  in_lanes(count, [&](int i, int64_t k) ICL_PATCH_INLINE_LAMBDA {
    const X size = x[k] < 0 ? -x[k] : x[k];
    largest[i] = size > largest[i] ? size : largest[i];
  });
  return *std::max_element(largest, largest + kLanes);
}

// v = z / ‖z‖² and 1 / ‖z‖², both 0 where V cannot hold such a v; NaN and 0 where z has a NaN.
template <class V, class Z>
void write_direction(const Z* z, int64_t count, V* v, V* inverse_norm2) {
  constexpr V kLeast = std::numeric_limits<V>::min(), kMost = std::numeric_limits<V>::max();
  const double total = norm2(z, count), largest = largest_of(z, count) / total;
  const double reciprocal = 1 / total;
  if (!(total > 0) || largest < kLeast || largest > kMost) {
    *inverse_norm2 = total != total ? static_cast<V>(total) : 0;
    std::fill(v, v + count, V{});
    return;
  }
  *inverse_norm2 = std::max(static_cast<V>(reciprocal), kLeast);  // 0 says that there is no v
  if constexpr (sizeof(V) < sizeof(double)) {  // V's rounding hides that of the reciprocal
    for (int64_t k = 0; k < count; ++k) v[k] = static_cast<V>(z[k] * reciprocal);
  } else {
    for (int64_t k = 0; k < count; ++k) v[k] = z[k] / total;
  }
}

// Normalises x in place: in fp32, but rounded as y is.
void normalise(const Norm& call, const float* scale, float* x) {
  const float mean = static_cast<float>(norm2(x, call.n) / static_cast<double>(call.n));
  const float reciprocal = 1 / std::sqrt(mean + call.eps);
  for (int64_t i = 0; i < call.n; ++i) x[i] *= reciprocal;
  if (call.cast_first) round_to(call.x.dtype, call.n, x);
  for (int64_t i = 0; i < call.n; ++i) x[i] *= scale[i] + call.offset;
  round_to(call.x.dtype, call.n, x);
}

}  // namespace

void read_direction(const Matrix& z, int64_t row, int64_t count, void* v, void* inverse_norm2,
                    bool wide) {
  std::vector<double> values(count);
  z.shifted(row * z.row).visit([&](const auto* from) {
    for (int64_t k = 0; k < count; ++k) values[k] = from[k * z.column];
  });
  if (wide)
    write_direction(values.data(), count, static_cast<double*>(v),
                    static_cast<double*>(inverse_norm2));
  else
    write_direction(values.data(), count, static_cast<float*>(v),
                    static_cast<float*>(inverse_norm2));
}

// Rows [begin, end); with `delta` pairs of rows.
void norm_rows(const Norm& call, int64_t begin, int64_t end) {
  const int64_t n = call.n;
  std::vector<float> row(n), scale(n), context(call.delta ? n : 0);
  const auto finish = [&](int64_t m, std::vector<float>& x) {
    if (call.scale.row || m == begin) load_fp32(call.scale, m, n, scale.data());
    normalise(call, scale.data(), x.data());
    store(x.data(), n, call.x.dtype, call.y, m * n);
  };
  for (int64_t m = begin; m < end; ++m) {
    const int64_t reduced = call.delta ? call.rows / 2 + m : m;
    load_fp32(call.x, reduced, n, row.data());
    if (call.delta) {
      load_fp32(call.x, m, n, context.data());
      for (int64_t i = 0; i < n; ++i) call.delta[m * n + i] = context[i] - row[i];
      finish(m, context);
    }
    finish(reduced, row);
    if (call.delta) write_direction(row.data(), n, call.v + m * n, call.inverse_norm2 + m);
  }
}

// Rows [begin, end) of y.
void rotary_rows(const Rotary& call, int64_t begin, int64_t end) {
  const int64_t d = call.d, half = d / 2;
  const DType dtype = call.x.dtype;
  std::vector<float> buffer(4 * d);
  float *x = buffer.data(), *y = x + d, *cos = y + d, *sin = cos + d;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t token = item % call.tokens, head = item / call.tokens % call.heads;
    const int64_t row = item / call.tokens / call.heads;
    load_fp32(call.x.shifted(row * call.x_row + head * call.x_head), token, d, x);
    load_fp32(call.cos.shifted(row * call.cos_row), token, d, cos);
    load_fp32(call.sin.shifted(row * call.sin_row), token, d, sin);
    for (int64_t i = 0; i < half; ++i) {
      y[i] = -x[half + i] * sin[i];
      y[half + i] = x[i] * sin[half + i];
    }
    for (int64_t i = 0; i < d; ++i) x[i] *= cos[i];
    round_to(dtype, d, x);
    round_to(dtype, d, y);
    for (int64_t i = 0; i < d; ++i) x[i] += y[i];
    store(x, d, dtype, call.y, item * d);
  }
}

}  // namespace icl_patch::ICL_PATCH_ISA
