// The CPU driver of attention for one token a row. The visible keys are taken in parts of a fixed
// number, each with a maximum, a sum and an output of its own, which are then joined in order. So a
// row's bits depend neither on the number of threads nor on keys that the row does not see.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/conversions.h"
#include "cpu/drivers.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

// Sums have kLanes lanes, in as many vectors as the processor needs for them: the compiler keeps no
// wider vector in registers.
constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kWidth = 16, kKeysTogether = 16, kHeadsTogether = 4;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kKeysTogether = 8, kHeadsTogether = 2;
#else
constexpr int kWidth = 4, kKeysTogether = 4, kHeadsTogether = 1;
#endif
constexpr int kParts = kLanes / kWidth;
constexpr int64_t kBlock = 32;  // keys that are in fp32 at a time
constexpr float kLeast = -std::numeric_limits<float>::infinity();

ICL_PATCH_INLINE float larger_of(float a, float b) { return b > a ? b : a; }

// exp(x) for x <= 0, to two units in the last place; 0 below -87. NaN stays NaN.
ICL_PATCH_INLINE float exp_of_negative(float x) {
  constexpr float kLog2e = 0x1.715476p+0f, kRound = 0x1.8p23f;
  constexpr float kRoughLn2 = 0x1.62e4p-1f, kFineLn2 = 0x1.7f7d1cp-20f;
  const float bounded = x < -87 ? -87 : x;
  const float shifted = bounded * kLog2e + kRound, whole = shifted - kRound;
  const uint32_t n = bits_of(shifted) - bits_of(kRound);
  const float r = bounded - whole * kRoughLn2 - whole * kFineLn2;
  const float tail = 0x1.55545cp-5f + r * (0x1.123be4p-7f + r * 0x1.6db4ecp-10f);
  const float p = 1 + (r + r * r * (0.5f + r * (0x1.55548ep-3f + r * tail)));
  return x < -87 ? 0 : p * from_bits((127 + n) << 23);
}

using Vector = float __attribute__((vector_size(kWidth * sizeof(float))));

ICL_PATCH_INLINE Vector vector_at(const float* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}

// The first `count` < kWidth numbers, then zeros.
ICL_PATCH_INLINE Vector vector_at(const float* from, int64_t count) {
  Vector x = {};
  memcpy(&x, from, count * sizeof(float));
  return x;
}

// The sum of the lanes, in pairs.
template <class V>
ICL_PATCH_INLINE float sum_of(V x) {
  if constexpr (sizeof x == sizeof(float)) {
    return x[0];
  } else {
    struct {
      float __attribute__((vector_size(sizeof x / 2))) low, high;
    } halves;
    memcpy(&halves, &x, sizeof x);
    return sum_of(halves.low + halves.high);
  }
}

ICL_PATCH_INLINE float largest_of(const float* x, int64_t count) {
  float most[kLanes], found = kLeast;
  std::fill(most, most + kLanes, kLeast);
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes)
    for (int i = 0; i < kLanes; ++i) most[i] = larger_of(most[i], x[j + i]);
  for (; j < count; ++j) found = larger_of(found, x[j]);
  for (int i = 0; i < kLanes; ++i) found = larger_of(found, most[i]);
  return found;
}

// The sum of the parts, in pairs.
ICL_PATCH_INLINE Vector joined(Vector (&x)[kParts]) {
  for (int half = kParts / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// The sum of `count` numbers, in kLanes partial sums.
ICL_PATCH_INLINE float sum_of(const float* x, int64_t count) {
  Vector sums[kParts] = {};
  for (int part = 0; part < kParts; ++part) {
    int64_t j = part * kWidth;
    for (; j + kWidth <= count; j += kLanes) sums[part] += vector_at(x + j);
    if (j < count) sums[part] += vector_at(x + j, count - j);
  }
  return sum_of(joined(sums));
}

#if defined(__AVX512F__)
// Adds the halves, kHalf lanes each, of what is left of pairs of vectors, and puts both sums into
// one vector.
template <int kHalf, int kCount>
ICL_PATCH_INLINE void add_halves(Vector (&x)[kCount]) {
  const auto half = [](int first) ICL_PATCH_INLINE_LAMBDA {
    alignas(64) int32_t lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = first + i / kHalf * 2 * kHalf + i % kHalf;
    return _mm512_load_si512(lanes);
  };
  const __m512i low = half(0), high = half(kHalf);
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kHalf; i += 2)
    x[i / 2] = _mm512_permutex2var_ps(x[i], low, x[i + 1]) +
               _mm512_permutex2var_ps(x[i], high, x[i + 1]);
}
#endif

// sums[i] = the sum of the lanes of x[i], with the bits of sum_of.
template <int kCount>
ICL_PATCH_INLINE void sums_of(Vector (&x)[kCount], float* sums) {
#if defined(__AVX512F__)
  if constexpr (kCount == kWidth) {
    add_halves<8>(x);
    add_halves<4>(x);
    add_halves<2>(x);
    add_halves<1>(x);
    memcpy(sums, x, sizeof *x);
    return;
  }
#elif defined(__AVX2__)
  if constexpr (kCount == kWidth) {
    for (int i = 0; i < 4; ++i)
      x[i] = _mm256_permute2f128_ps(x[2 * i], x[2 * i + 1], 0x20) +
             _mm256_permute2f128_ps(x[2 * i], x[2 * i + 1], 0x31);
    for (int i = 0; i < 2; ++i) {
      const __m256d a = _mm256_castps_pd(x[2 * i]), b = _mm256_castps_pd(x[2 * i + 1]);
      x[i] = _mm256_castpd_ps(_mm256_shuffle_pd(a, b, 0)) +
             _mm256_castpd_ps(_mm256_shuffle_pd(a, b, 15));
    }
    x[0] = _mm256_shuffle_ps(x[0], x[1], 0x88) + _mm256_shuffle_ps(x[0], x[1], 0xdd);
    // the last two steps have worked within halves of 128 bits
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_ps(sums, _mm256_permutevar8x32_ps(x[0], order));
    return;
  }
#endif
  for (int i = 0; i < kCount; ++i) sums[i] = sum_of(x[i]);
}

// scores[j] = scale q·rows[j].
ICL_PATCH_INLINE void multiply(const float* q, const float* const* rows, int64_t count, int64_t d,
                               float scale, float* scores) {
  const auto some = [&](auto together, int64_t j) ICL_PATCH_INLINE_LAMBDA {
    constexpr int kKeys = decltype(together)::value;
    Vector products[kKeys][kParts] = {}, sums[kKeys];
    for (int part = 0; part < kParts; ++part) {
      int64_t k = part * kWidth;
      for (; k + kWidth <= d; k += kLanes)
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i)
          products[i][part] += vector_at(q + k) * vector_at(rows[j + i] + k);
      if (k < d)
        for (int i = 0; i < kKeys; ++i)
          products[i][part] += vector_at(q + k, d - k) * vector_at(rows[j + i] + k, d - k);
    }
    for (int i = 0; i < kKeys; ++i) sums[i] = joined(products[i]);
    sums_of(sums, scores + j);
    for (int i = 0; i < kKeys; ++i) scores[j + i] *= scale;
  };
  int64_t j = 0;
  for (; j + kKeysTogether <= count; j += kKeysTogether)
    some(std::integral_constant<int, kKeysTogether>{}, j);
  for (; j < count; ++j) some(std::integral_constant<int, 1>{}, j);
}

// y[h] += Σ_j weights[h][j] rows[j] of kHeads heads, which lie `apart` and `y_apart` from each
// other.
template <int kHeads>
ICL_PATCH_INLINE void add_rows(const float* weights, int64_t apart, const float* const* rows,
                               int64_t count, int64_t n, float* y, int64_t y_apart) {
  constexpr int kTogether = 4;  // vectors
  const auto some = [&](auto together, int64_t e) ICL_PATCH_INLINE_LAMBDA {
    constexpr int kVectors = decltype(together)::value;
    Vector sums[kHeads][kVectors];
    for (int h = 0; h < kHeads; ++h) memcpy(sums[h], y + h * y_apart + e, sizeof sums[h]);
    for (int64_t j = 0; j < count; ++j)
      for (int i = 0; i < kVectors; ++i) {
        const Vector x = vector_at(rows[j] + e + i * kWidth);
        for (int h = 0; h < kHeads; ++h) sums[h][i] += weights[h * apart + j] * x;
      }
    for (int h = 0; h < kHeads; ++h) memcpy(y + h * y_apart + e, sums[h], sizeof sums[h]);
  };
  int64_t e = 0;
  for (; e + kTogether * kWidth <= n; e += kTogether * kWidth)
    some(std::integral_constant<int, kTogether>{}, e);
  for (; e + kWidth <= n; e += kWidth) some(std::integral_constant<int, 1>{}, e);
  for (; e < n; ++e)
    for (int h = 0; h < kHeads; ++h)
      for (int64_t j = 0; j < count; ++j)
        y[h * y_apart + e] += weights[h * apart + j] * rows[j][e];
}

// Rows of keys or values in fp32: their addresses, or those of copies.
class Rows {
 public:
  explicit Rows(int64_t width) : copies_(kBlock * width) {}

  // Rows [first, first + count) of those that `visible` lists, if it does.
  const float* const* load(const Matrix& from, const int32_t* visible, int64_t first,
                           int64_t count, int64_t n) {
    from.visit([&](const auto* data) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
      for (int64_t j = 0; j < count; ++j) {
        const auto* row = data + (visible ? visible[first + j] : first + j) * from.row;
        if constexpr (std::is_same_v<T, float>)
          if (from.column == 1) {
            rows_[j] = row;
            continue;
          }
        float* to = &copies_[j * n];
        if (from.column == 1)
          for (int64_t k = 0; k < n; ++k) to[k] = static_cast<float>(row[k]);
        else
          for (int64_t k = 0; k < n; ++k) to[k] = static_cast<float>(row[k * from.column]);
        rows_[j] = to;
      }
    });
    return rows_;
  }

 private:
  std::vector<float> copies_;
  const float* rows_[kBlock];
};

}  // namespace

// Parts [begin, end) of those in `items`, of all rows and heads of keys.
void attention_parts(const Attention& call, int64_t begin, int64_t end) {
  const int64_t d = call.d, e = call.e, shared = call.heads / call.groups;
  std::vector<float> q(shared * d);
  Rows block(std::max(d, e));
  std::vector<float> weights(shared * Attention::kPart);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t item = call.items[i];
    const int64_t part = item % call.parts, group = item / call.parts % call.groups;
    const int64_t row = item / call.parts / call.groups;
    const int32_t* visible = call.visible ? call.visible + row * call.keys : nullptr;
    const int64_t first = part * Attention::kPart;
    const int64_t count = std::min(Attention::kPart, call.counts[row] - first);
    const Matrix key = call.key.shifted(row * call.key_row + group * call.key_group);
    const Matrix value = call.value.shifted(row * call.value_row + group * call.value_group);
    for (int64_t h = 0; h < shared; ++h)
      load_fp32(call.query.shifted(row * call.query_row), group * shared + h, d, &q[h * d]);
    for (int64_t j = 0; j < count; j += kBlock) {
      const int64_t some = std::min(kBlock, count - j);
      const float* const* rows = block.load(key, visible, first + j, some, d);
      for (int64_t h = 0; h < shared; ++h)
        multiply(&q[h * d], rows, some, d, call.scale, &weights[h * Attention::kPart + j]);
    }
    float* outputs = call.partial + item * shared * (e + 2);
    for (int64_t h = 0; h < shared; ++h) {
      float *w = &weights[h * Attention::kPart], *out = outputs + h * (e + 2);
      const float most = largest_of(w, count);
      for (int64_t j = 0; j < count; ++j) w[j] = exp_of_negative(w[j] - most);
      out[0] = most;
      out[1] = sum_of(w, count);
      std::fill(out + 2, out + 2 + e, 0.0f);
    }
    for (int64_t j = 0; j < count; j += kBlock) {
      const int64_t some = std::min(kBlock, count - j);
      const float* const* rows = block.load(value, visible, first + j, some, e);
      const auto add = [&](auto heads, int64_t h) ICL_PATCH_INLINE_LAMBDA {
        add_rows<decltype(heads)::value>(&weights[h * Attention::kPart + j], Attention::kPart, rows,
                                         some, e, outputs + h * (e + 2) + 2, e + 2);
      };
      for (int64_t h = 0; h < shared; h += kHeadsTogether) {
        switch (std::min<int64_t>(kHeadsTogether, shared - h)) {
          case 1: add(std::integral_constant<int, 1>{}, h); break;
          case 2: add(std::integral_constant<int, 2>{}, h); break;
          case 3: add(std::integral_constant<int, 3>{}, h); break;
          default: add(std::integral_constant<int, 4>{}, h);
        }
      }
    }
  }
}

// Rows and heads [begin, end) of y, from their parts.
void attention_outputs(const Attention& call, int64_t begin, int64_t end) {
  const int64_t e = call.e, shared = call.heads / call.groups;
  std::vector<float> y(e);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / call.heads, head = item % call.heads;
    const int64_t parts =
        (call.counts[row] + Attention::kPart - 1) / Attention::kPart;
    const auto output = [&](int64_t part) {
      const int64_t at = (row * call.groups + head / shared) * call.parts + part;
      return call.partial + (at * shared + head % shared) * (e + 2);
    };
    float most = kLeast, sum = 0;
    std::fill(y.begin(), y.end(), 0.0f);
    for (int64_t p = 0; p < parts; ++p) most = larger_of(most, output(p)[0]);
    for (int64_t p = 0; p < parts; ++p) {
      const float* from = output(p);
      const float weight = exp_of_negative(from[0] - most);
      sum += weight * from[1];
      for (int64_t i = 0; i < e; ++i) y[i] += weight * from[2 + i];
    }
    if (parts)
      for (int64_t i = 0; i < e; ++i) y[i] /= sum;
    store(y.data(), e, call.query.dtype, call.y, item * e);
  }
}

}  // namespace icl_patch::ICL_PATCH_ISA
