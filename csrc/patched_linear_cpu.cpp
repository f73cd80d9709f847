// The CPU driver of the patched linear map, compiled once per instruction set. W streams through the cache once for a pass's rows, and
// the low-rank term rides in the epilogue. A row's bits depend on nothing but the row: every dot product is summed in the same lanes
// in the same order, however many rows there are.
#include <algorithm>
#include <cstring>

#include "conversions.h"
#include "cpu_drivers.h"
#include "patched_linear.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

// As many accumulators as the registers hold: kTall rows of W by kWide rows of z.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTall = 4, kWide = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTall = 4, kWide = 2;
#else
constexpr int kLanes = 4, kTall = 4, kWide = 2;
#endif
constexpr int64_t kMaxRows = kMaxLinearRows;
constexpr int64_t kChunk = 2048;   // of K: what kTall rows of W take of the first-level cache while the rows of z pass by
constexpr int64_t kColumns = 512;  // of N, where W lies as (K, N)

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using Bits = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

struct Single {
  using Type = float;
  static ICL_PATCH_CALLABLE Lanes load(const float* from) {
    Lanes x;
    memcpy(&x, from, sizeof x);
    return x;
  }
};

struct Brain {
  using Type = uint16_t;
  static ICL_PATCH_CALLABLE Lanes load(const uint16_t* from) {
    Halves x;
    memcpy(&x, from, sizeof x);
    return reinterpret_cast<Lanes>(__builtin_convertvector(x, Bits) << 16);
  }
};

struct Half {
  using Type = uint16_t;
  static ICL_PATCH_CALLABLE Lanes load(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Lanes>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
    return reinterpret_cast<Lanes>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    Lanes x;
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = from_half(from[lane]);
    return x;
#endif
  }
};

ICL_PATCH_CALLABLE float across(Lanes x) {
  float lanes[kLanes];
  memcpy(lanes, &x, sizeof x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// The last lanes of a row of W, of which there are `count`; beyond them z is 0.
template <class W>
ICL_PATCH_CALLABLE Lanes load_some(const typename W::Type* from, int64_t count) {
  typename W::Type padded[kLanes] = {};
  memcpy(padded, from, count * sizeof(typename W::Type));
  return W::load(padded);
}

// sums[m][n] += z[m] · w[n] over [begin, end); begin is a multiple of the lanes.
template <class W, int kRows>
ICL_PATCH_CALLABLE void accumulate(const typename W::Type* w, int64_t stride, const float* z, int64_t z_stride, int64_t begin, int64_t end,
                                   Lanes (*sums)[kTall]) {
  Lanes local[kRows][kTall];
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kTall; ++n) local[m][n] = sums[m][n];
  const auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
    Lanes weights[kTall];
    for (int n = 0; n < kTall; ++n) {
      weights[n] = load(w + n * stride + k);
      __builtin_prefetch(w + (n + kTall) * stride + k, 0, 2);  // of the next block: rows are too short for the hardware to run ahead
    }
    for (int m = 0; m < kRows; ++m) {
      const Lanes row = Single::load(z + m * z_stride + k);
      for (int n = 0; n < kTall; ++n) local[m][n] += weights[n] * row;
    }
  };
  int64_t k = begin;
  for (; k + kLanes <= end; k += kLanes) step(k, [](const typename W::Type* from) __attribute__((always_inline)) { return W::load(from); });
  if (k < end) step(k, [=](const typename W::Type* from) __attribute__((always_inline)) { return load_some<W>(from, end - k); });
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kTall; ++n) sums[m][n] = local[m][n];
}

template <class W>
ICL_PATCH_CALLABLE void accumulate_some(int64_t rows, const typename W::Type* w, int64_t stride, const float* z, int64_t z_stride,
                                        int64_t begin, int64_t end, Lanes (*sums)[kTall]) {
  switch (rows) {
    case 1: return accumulate<W, 1>(w, stride, z, z_stride, begin, end, sums);
    case 2: return accumulate<W, 2>(w, stride, z, z_stride, begin, end, sums);
#if defined(__AVX512F__)
    case 3: return accumulate<W, 3>(w, stride, z, z_stride, begin, end, sums);
    default: return accumulate<W, 4>(w, stride, z, z_stride, begin, end, sums);
#endif
  }
}

// What becomes of z·w for row m and output n.
class Epilogue {
 public:
  Epilogue(const Linear& call, const float* coefficients) : call_(call), coefficients_(coefficients) {}

  // products: (rows, count) with a stride, of outputs [first, first + count). In this order: + bias, + c_r u_r rank by rank, rounding.
  void operator()(const float* products, int64_t stride, int64_t first, int64_t count) const {
    for (int64_t m = 0; m < call_.rows; ++m) {
      const float* product = products + m * stride;
      float sums[kColumns];
      for (int64_t i = 0; i < count; ++i) sums[i] = call_.bias.data ? product[i] + bias(first + i) : product[i];
      if (m >= call_.context_rows()) patch(products, product, stride, m - call_.context_rows(), first, count, sums);
      store(sums, count, call_.y_dtype, call_.y, call_.row_of(m) * call_.n + first);
    }
  }

 private:
  void patch(const float* context, const float* reduced, int64_t stride, int64_t m, int64_t first, int64_t count, float* sums) const {
    const Factors& factors = call_.factors;
    if (call_.u) {
      const float* own = context + m * stride;
      float* u = call_.u + (call_.first + m) * call_.n + first;
      for (int64_t i = 0; i < count; ++i) u[i] = own[i] - reduced[i];
      add({u, Float::kSingle, 0, 1}, 0, 0, count, coefficients_[m], sums);
      return;
    }
    const int64_t patch = factors.patch_of(call_.first + m);
    if (patch < 0) return;
    const Matrix u = factors.u.rows(patch);
    for (int64_t r = 0; r < factors.rank; ++r) add(u, r, first, count, coefficients_[m * factors.rank + r], sums);
  }

  static void add(const Matrix& u, int64_t row, int64_t first, int64_t count, float coefficient, float* to) {
    if (u.dtype == Float::kSingle && u.column == 1) {
      const float* from = static_cast<const float*>(u.data) + row * u.row + first;
      for (int64_t i = 0; i < count; ++i) to[i] += coefficient * from[i];
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] += coefficient * static_cast<float>(u.at(row, first + i));
    }
  }

  float bias(int64_t i) const { return static_cast<float>(call_.bias.at(0, i)); }

  const Linear& call_;
  const float* coefficients_;
};

template <class W>
void rows_of_weight(const Linear& call, const float* z, int64_t z_stride, const Epilogue& epilogue, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const typename W::Type*>(call.weight);
  Lanes sums[kMaxRows][kTall];
  float products[kMaxRows][kTall];
  for (int64_t n = begin; n < end; n += kTall) {
    // The last block steps back so as to be whole; what it computes twice comes out the same.
    const int64_t first = std::max<int64_t>(std::min<int64_t>(n, call.n - kTall), 0);
    const int64_t count = std::min<int64_t>(kTall, call.n);
    const auto* w = weight + first * call.weight_stride;
    memset(sums, 0, call.rows * sizeof sums[0]);
    if (count == kTall) {
      for (int64_t k = 0; k < call.k; k += kChunk)
        for (int64_t m = 0; m < call.rows; m += kWide)
          accumulate_some<W>(std::min<int64_t>(kWide, call.rows - m), w, call.weight_stride, z + m * z_stride, z_stride, k,
                             std::min(k + kChunk, call.k), sums + m);
    } else {  // fewer than kTall outputs in all
      for (int64_t m = 0; m < call.rows; ++m)
        for (int64_t i = 0; i < count; ++i) {
          Lanes alone[1][kTall] = {};
          accumulate<W, 1>(w + i * call.weight_stride, 0, z + m * z_stride, z_stride, 0, call.k, alone);
          sums[m][i] = alone[0][0];
        }
    }
    for (int64_t m = 0; m < call.rows; ++m)
      for (int64_t i = 0; i < count; ++i) products[m][i] = across(sums[m][i]);
    epilogue(&products[0][0], kTall, first, count);
  }
}

// W as (K, N): a block of columns, the rows of W one after another. Partial sums of kDepth rows, for the rounding's sake.
template <class W>
void columns_of_weight(const Linear& call, const float* z, int64_t z_stride, const Epilogue& epilogue, int64_t begin, int64_t end) {
  constexpr int64_t kDepth = 64;
  const auto* weight = static_cast<const typename W::Type*>(call.weight);
  alignas(sizeof(Lanes)) float totals[kMaxRows][kColumns], parts[kMaxRows][kColumns], row[kColumns];
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t count = std::min(kColumns, end - first);
    memset(totals, 0, call.rows * sizeof totals[0]);
    for (int64_t depth = 0; depth < call.k; depth += kDepth) {
      memset(parts, 0, call.rows * sizeof parts[0]);
      for (int64_t k = depth; k < std::min(depth + kDepth, call.k); ++k) {
        const auto* from = weight + k * call.weight_stride + first;
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) *reinterpret_cast<Lanes*>(row + i) = W::load(from + i);
        if (i < count) *reinterpret_cast<Lanes*>(row + i) = load_some<W>(from + i, count - i);
        for (int64_t m = 0; m < call.rows; ++m) {
          const float factor = z[m * z_stride + k];
          for (int64_t j = 0; j < count; ++j) parts[m][j] += factor * row[j];
        }
      }
      for (int64_t m = 0; m < call.rows; ++m)
        for (int64_t j = 0; j < count; ++j) totals[m][j] += parts[m][j];
    }
    epilogue(&totals[0][0], kColumns, first, count);
  }
}

template <class W>
void outputs(const Linear& call, const float* z, int64_t z_stride, const float* coefficients, int64_t begin, int64_t end) {
  const Epilogue epilogue(call, coefficients);
  (call.transposed ? columns_of_weight<W> : rows_of_weight<W>)(call, z, z_stride, epilogue, begin, end);
}

}  // namespace

void linear_outputs(const Linear& call, const float* z, int64_t z_stride, const float* coefficients, int64_t begin, int64_t end) {
  switch (call.weight_dtype) {
    case Float::kSingle: return outputs<Single>(call, z, z_stride, coefficients, begin, end);
    case Float::kBrain: return outputs<Brain>(call, z, z_stride, coefficients, begin, end);
    default: return outputs<Half>(call, z, z_stride, coefficients, begin, end);
  }
}

// The same epilogue on an output that is there already.
void low_rank_outputs(const Linear& call, const float* coefficients, int64_t begin, int64_t end) {
  const Epilogue epilogue(call, coefficients);
  float plain[kMaxRows][kColumns];
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t count = std::min(kColumns, end - first);
    for (int64_t m = 0; m < call.rows; ++m) to_single(call.plain.from(first), call.row_of(m), count, plain[m]);
    epilogue(&plain[0][0], kColumns, first, count);
  }
}

float dot(const float* x, const float* y, int64_t count) {
  Lanes sum{};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) sum += Single::load(x + k) * Single::load(y + k);
  if (k < count) sum += load_some<Single>(x + k, count - k) * load_some<Single>(y + k, count - k);
  return across(sum);
}

}  // namespace icl_patch::ICL_PATCH_ISA
