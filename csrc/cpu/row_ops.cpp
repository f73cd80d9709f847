// The CPU drivers of the ops around the products: the norm before the MLP, the direction that the
// readers share, and the gated product. Elementwise loops for the compiler to vectorise, sums in
// fp64 in a fixed number of lanes, and no fused multiply-add: every instruction set gives the same
// bits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/conversions.h"
#include "cpu/drivers.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kBlock = 512;  // elements of a row that stay in the first-level cache

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

// 2^n; 0 for n = -127.
ICL_PATCH_INLINE float power_of_two(int32_t n) {
  return from_bits(static_cast<uint32_t>(127 + n) << 23);
}

// x / (1 + exp(a)), where a = rough + fine, to two units in the last place of every x, denormal
// results included.
ICL_PATCH_INLINE float over_one_and_exp(float x, float rough, float fine) {
  constexpr float kLog2e = 0x1.715476p+0f, kRound = 0x1.8p23f;
  constexpr float kRoughLn2 = 0x1.62e4p-1f, kFineLn2 = 0x1.7f7d1cp-20f;
  const float shifted = rough * kLog2e + kRound, whole = shifted - kRound;
  const int32_t n = static_cast<int32_t>(bits_of(shifted) - bits_of(kRound));
  // The first product and the first difference are exact.
  const float r = rough - whole * kRoughLn2 - whole * kFineLn2 + fine;
  const float tail = 0x1.55545cp-5f + r * (0x1.123be4p-7f + r * 0x1.6db4ecp-10f);
  const float p = r + r * r * (0.5f + r * (0x1.55548ep-3f + r * tail));
  // exp(a) = 2^n (1 + p); where 2^n is large, x and the sum are divided by it.
  const int32_t down = std::min(n, 0), up = std::max(n, 0), most = std::min(up, 126);
  const float low = power_of_two(down), high = power_of_two(-most);
  const float small = low * high, one = 1 + small, change = low * p, sum = one + change;
  const float lost = (small - (one - 1)) + (change - (sum - one));
  const float y = x * high * power_of_two(most - up) / sum;
  // 1.52 - 0.49 sum is close enough to 1 / sum for the rounding error of the sum.
  const float corrected = y - y * (lost * (1.52f - 0.49f * sum));
  return y != 0 && corrected == corrected ? corrected : y;  // keeps infinities and the sign of 0
}

// act(x) = x / (1 + exp(-s)) with s = x for SiLU and s = 2 sqrt(2/π) (x + 0.044715 x³) for GELU,
// which is x (1 + tanh(s / 2)) / 2 without its cancellation.
template <bool kGelu>
void activate(float* x, int64_t count) {
  constexpr double kSlope = -2 * 0x1.9884533d43651p-1;
  for (int64_t i = 0; i < count; ++i) {
    using A = std::conditional_t<kGelu, double, float>;
    const A wide = x[i];
    A a = kGelu ? static_cast<A>(wide * (kSlope + kSlope * 0.044715 * (wide * wide))) : -wide;
    // Beyond these bounds the activation is x or 0, or NaN for -∞. NaN becomes the lower one.
    a = a > -87 ? a : -87;
    a = a < static_cast<A>(175.3f) ? a : static_cast<A>(175.3f);
    const float rough = static_cast<float>(a);
    x[i] = over_one_and_exp(x[i], rough, static_cast<float>(a - rough));
  }
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

// Elements [begin, end) of y in memory order.
void gated_outputs(const Gated& call, int64_t begin, int64_t end) {
  float gate[kBlock], up[kBlock];
  while (begin < end) {
    const int64_t m = begin / call.n, first = begin % call.n;
    const int64_t count = std::min({kBlock, call.n - first, end - begin});
    load_fp32(call.gate.shifted(first * call.gate.column), m, count, gate);
    load_fp32(call.up.shifted(first * call.up.column), m, count, up);
    (call.gelu ? activate<true> : activate<false>)(gate, count);
    round_to(call.gate.dtype, count, gate);
    for (int64_t i = 0; i < count; ++i) gate[i] *= up[i];
    store(gate, count, call.gate.dtype, call.y, begin);
    begin += count;
  }
}

}  // namespace icl_patch::ICL_PATCH_ISA
