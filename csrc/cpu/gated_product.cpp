// The CPU driver of the gated product. Elementwise loops for the compiler to vectorise, and no fused
// multiply-add: every instruction set gives the same bits.
#include <algorithm>
#include <type_traits>

#include "cpu/conversions.h"
#include "cpu/drivers.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

constexpr int64_t kBlock = 512;  // elements of a row that stay in the first-level cache

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
