// The CPU drivers of the small ops, compiled once per instruction set. Elementwise loops for the compiler to make vectors of, sums in
// fp64 in lanes of one number, and no fused multiply-add: every instruction set gives the same bits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "conversions.h"
#include "cpu_drivers.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kBlock = 512;  // of a row, in the first-level cache

// Numbers of a row into lanes: whole vectors, then what is left.
template <class F>
ICL_PATCH_CALLABLE void in_lanes(int64_t count, F f) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes)
    for (int i = 0; i < kLanes; ++i) f(i, k + i);
  for (int i = 0; k + i < count; ++i) f(i, k + i);
}

ICL_PATCH_CALLABLE double across(double* sums) {
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

template <class X>
double norm2(const X* x, int64_t count) {
  double sums[kLanes] = {};
  in_lanes(count, [&](int i, int64_t k) __attribute__((always_inline)) { sums[i] += static_cast<double>(x[k]) * x[k]; });
  return across(sums);
}

template <class X>
double largest_of(const X* x, int64_t count) {
  X largest[kLanes] = {};
  in_lanes(count, [&](int i, int64_t k) __attribute__((always_inline)) {
    const X size = x[k] < 0 ? -x[k] : x[k];
    largest[i] = size > largest[i] ? size : largest[i];
  });
  return *std::max_element(largest, largest + kLanes);
}

// v = z / ‖z‖² and 1 / ‖z‖², both 0 where there is no such v that V can hold.
template <class V, class Z>
void write_direction(const Z* z, int64_t count, V* v, V* inverse) {
  const double total = norm2(z, count), most = largest_of(z, count) / total;
  const bool none = !(total > 0) || most < std::numeric_limits<V>::min() || most > std::numeric_limits<V>::max();
  const V least = std::numeric_limits<V>::min();  // 0 says that there is no v
  *inverse = total != total ? static_cast<V>(total) : none ? 0 : std::max(static_cast<V>(1 / total), least);
  if (none) {
    std::fill(v, v + count, V{});
  } else if constexpr (sizeof(V) < sizeof(double)) {  // what the reciprocal's rounding adds is lost in V's
    const double reciprocal = 1 / total;
    for (int64_t k = 0; k < count; ++k) v[k] = static_cast<V>(z[k] * reciprocal);
  } else {
    for (int64_t k = 0; k < count; ++k) v[k] = z[k] / total;
  }
}

template <class Z>
void write_direction(const Z* z, int64_t count, void* v, void* inverse, bool wide) {
  if (wide)
    write_direction(z, count, static_cast<double*>(v), static_cast<double*>(inverse));
  else
    write_direction(z, count, static_cast<float*>(v), static_cast<float*>(inverse));
}

// x becomes y, in fp32 but rounded as y is.
void normalise(const Norm& call, const float* scale, float* x) {
  const float mean = static_cast<float>(norm2(x, call.n) / static_cast<double>(call.n));
  const float reciprocal = 1 / std::sqrt(mean + call.eps);
  for (int64_t i = 0; i < call.n; ++i) x[i] *= reciprocal;
  if (call.cast_first) round_to(call.x.dtype, call.n, x);
  for (int64_t i = 0; i < call.n; ++i) x[i] *= scale[i] + call.offset;
  round_to(call.x.dtype, call.n, x);
}

ICL_PATCH_CALLABLE float power_of_two(int32_t n) { return from_bits(static_cast<uint32_t>(127 + n) << 23); }  // -127: 0

// x / (1 + exp(a)), where a = rough + fine, to two units in the last place of every x, denormal results too.
ICL_PATCH_CALLABLE float over_one_and_exp(float x, float rough, float fine) {
  constexpr float kLog2e = 0x1.715476p+0f, kWhole = 0x1.8p23f, kRoughLn2 = 0x1.62e4p-1f, kFineLn2 = 0x1.7f7d1cp-20f;
  const float shifted = rough * kLog2e + kWhole, whole = shifted - kWhole;
  const int32_t n = static_cast<int32_t>(bits_of(shifted) - bits_of(kWhole));
  const float r = rough - whole * kRoughLn2 - whole * kFineLn2 + fine;  // the first product and difference are exact
  const float p = r + r * r * (0.5f + r * (0x1.55548ep-3f + r * (0x1.55545cp-5f + r * (0x1.123be4p-7f + r * 0x1.6db4ecp-10f))));
  // exp(a) = 2^n (1 + p), and x and the sum are divided by 2^n where it is large
  const int32_t down = std::min(n, 0), up = std::max(n, 0), most = std::min(up, 126);
  const float low = power_of_two(down), high = power_of_two(-most);
  const float small = low * high, one = 1 + small, change = low * p, sum = one + change;
  const float lost = (small - (one - 1)) + (change - (sum - one));
  const float y = x * high * power_of_two(most - up) / sum;
  const float better = y - y * (lost * (1.52f - 0.49f * sum));  // near enough to 1 / sum for what the sum has lost
  return y != 0 && better == better ? better : y;               // an infinity and the sign of 0 stay
}

// act(x) = x / (1 + exp(-s)), with s = x for SiLU and 2 sqrt(2/π) (x + 0.044715 x³) for GELU: 1 + tanh(s / 2) without its cancellation.
template <bool kGelu>
ICL_PATCH_CALLABLE float activation(float x) {
  constexpr float kLeast = -87, kMost = 175.3f;  // beyond, the activation is x or 0, or NaN for -∞
  if constexpr (!kGelu) {
    float a = -x > kLeast ? -x : kLeast;  // for NaN too
    a = a < kMost ? a : kMost;
    return over_one_and_exp(x, a, 0);
  }
  constexpr double kSlope = -2 * 0x1.9884533d43651p-1;
  const double wide = x;
  double a = wide * (kSlope + kSlope * 0.044715 * (wide * wide));
  a = a > kLeast ? a : kLeast;
  a = a < kMost ? a : kMost;
  const float rough = static_cast<float>(a);
  return over_one_and_exp(x, rough, static_cast<float>(a - rough));
}

template <bool kGelu>
void activate(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = activation<kGelu>(x[i]);
}

}  // namespace

void read_direction(const Matrix& z, int64_t row, int64_t count, void* v, void* inverse, bool wide) {
  if (z.dtype == Float::kDouble) {
    std::vector<double> values(count);
    for (int64_t k = 0; k < count; ++k) values[k] = z.at(row, k);
    return write_direction(values.data(), count, v, inverse, wide);
  }
  std::vector<float> values(count);
  to_single(z, row, count, values.data());
  write_direction(values.data(), count, v, inverse, wide);
}

// Of rows, or with `delta` of pairs, [begin, end).
void norm_rows(const Norm& call, int64_t begin, int64_t end) {
  const int64_t n = call.n;
  std::vector<float> row(n), scale(n), context(call.delta ? n : 0);
  const auto finish = [&](int64_t m, std::vector<float>& x) {
    if (call.scale.row || m == begin) to_single(call.scale, m, n, scale.data());
    normalise(call, scale.data(), x.data());
    store(x.data(), n, call.x.dtype, call.y, m * n);
  };
  for (int64_t m = begin; m < end; ++m) {
    if (!call.delta) {
      to_single(call.x, m, n, row.data());
      finish(m, row);
      continue;
    }
    const int64_t reduced = call.rows / 2 + m;
    to_single(call.x, m, n, context.data());
    to_single(call.x, reduced, n, row.data());
    for (int64_t i = 0; i < n; ++i) call.delta[m * n + i] = context[i] - row[i];
    finish(m, context);
    finish(reduced, row);
    write_direction(row.data(), n, call.v + m * n, call.inverse_norm2 + m);
  }
}

// Of elements [begin, end) of y as it lies.
void gated_outputs(const Gated& call, int64_t begin, int64_t end) {
  float gate[kBlock], up[kBlock];
  while (begin < end) {
    const int64_t m = begin / call.n, first = begin % call.n, count = std::min({kBlock, call.n - first, end - begin});
    to_single(call.gate.from(first), m, count, gate);
    to_single(call.up.from(first), m, count, up);
    (call.gelu ? activate<true> : activate<false>)(gate, count);
    round_to(call.gate.dtype, count, gate);
    for (int64_t i = 0; i < count; ++i) gate[i] *= up[i];
    store(gate, count, call.gate.dtype, call.y, begin);
    begin += count;
  }
}

void to_single(const Matrix& x, int64_t row, int64_t count, float* to) {
  const int64_t first = row * x.row;
  if (!count) return;  // of no numbers there may be no address
  if (x.column == 1 && x.dtype == Float::kSingle) {
    memcpy(to, static_cast<const float*>(x.data) + first, count * sizeof(float));
  } else if (x.column == 1 && x.dtype == Float::kBrain) {
    for (int64_t i = 0; i < count; ++i) to[i] = from_brain(static_cast<const uint16_t*>(x.data)[first + i]);
  } else if (x.column == 1 && x.dtype == Float::kHalf) {
    from_halves(static_cast<const uint16_t*>(x.data) + first, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(x.at(row, i));
  }
}

}  // namespace icl_patch::ICL_PATCH_ISA
