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

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int64_t kMaxRows = kMaxLinearRows;
constexpr int64_t kChunk = 2048;   // bytes of a row of W: what a block of them takes of the first-level cache while the rows of z pass by
constexpr int64_t kLead = 8192;    // bytes of W, at least: how far ahead it is asked for
constexpr int64_t kColumns = 512;  // of N, where W lies as (K, N)

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using Bits = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

template <class Vector, class Scalar>
ICL_PATCH_CALLABLE Vector vector_at(const Scalar* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}

// What W may be kept in. A step multiplies kStep of its numbers, a Lot, with as many of a row of z, which is kept as Row; its order among
// them is the kind's own (arrange). The sums of kTall rows of W and kWide rows of z fit the registers. `widen` takes kLanes numbers in order.

struct Single {
  using Type = float;
  using Row = float;
  using Lot = Lanes;
  static constexpr int kStep = kLanes, kTall = 4, kWide = kLanes == 16 ? 4 : 2;
  static ICL_PATCH_CALLABLE Lanes widen(const float* from) { return vector_at<Lanes>(from); }
  static ICL_PATCH_CALLABLE Lot load(const float* from) { return widen(from); }
  static ICL_PATCH_CALLABLE Lot row(const float* from) { return widen(from); }
  static ICL_PATCH_CALLABLE Lanes multiply_add(Lot w, Lot z, Lanes sum) { return sum + w * z; }
};

struct Half {
  using Type = uint16_t;
  using Row = float;
  using Lot = Lanes;
  static constexpr int kStep = kLanes, kTall = kLanes == 16 ? 6 : 4, kWide = kLanes == 16 ? 4 : 2;
  static ICL_PATCH_CALLABLE Lanes widen(const uint16_t* from) {
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
  static ICL_PATCH_CALLABLE Lot load(const uint16_t* from) { return widen(from); }
  static ICL_PATCH_CALLABLE Lot row(const float* from) { return Single::widen(from); }
  static ICL_PATCH_CALLABLE Lanes multiply_add(Lot w, Lot z, Lanes sum) { return sum + w * z; }
};

ICL_PATCH_CALLABLE Lanes widen_brain(const uint16_t* from) {
  return reinterpret_cast<Lanes>(__builtin_convertvector(vector_at<Halves>(from), Bits) << 16);
}

#if defined(__AVX512BF16__)
// The processor multiplies pairs of bf16 and adds both products in fp32.
struct Brain {
  using Type = uint16_t;
  using Row = uint16_t;
  using Lot = __m512bh;
  static constexpr int kStep = 2 * kLanes, kTall = 8, kWide = 2;
  static ICL_PATCH_CALLABLE Lanes widen(const uint16_t* from) { return widen_brain(from); }
  static ICL_PATCH_CALLABLE Lot load(const uint16_t* from) { return vector_at<Lot>(from); }
  static ICL_PATCH_CALLABLE Lot row(const uint16_t* from) { return load(from); }
  static ICL_PATCH_CALLABLE Lanes multiply_add(Lot w, Lot z, Lanes sum) {
    return reinterpret_cast<Lanes>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), w, z));
  }
  static void arrange(float* z, int64_t count) {
    auto* narrow = reinterpret_cast<unsigned char*>(z);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = to_brain(z[i]);
      memcpy(narrow + i * sizeof bits, &bits, sizeof bits);
    }
  }
};
#else
// Two numbers of a word at a time: the even ones are its low halves, the odd ones its high halves.
struct Brain {
  using Type = uint16_t;
  using Row = float;
  struct Lot {
    Lanes even, odd;
  };
  static constexpr int kStep = 2 * kLanes, kTall = kLanes == 16 ? 6 : 4, kWide = kLanes == 16 ? 3 : 2;
  static ICL_PATCH_CALLABLE Lanes widen(const uint16_t* from) { return widen_brain(from); }
  static ICL_PATCH_CALLABLE Lot load(const uint16_t* from) {
    const auto words = vector_at<Bits>(from);
    return {reinterpret_cast<Lanes>(words << 16), reinterpret_cast<Lanes>(words & 0xffff0000u)};
  }
  static ICL_PATCH_CALLABLE Lot row(const float* from) { return {Single::widen(from), Single::widen(from + kLanes)}; }
  static ICL_PATCH_CALLABLE Lanes multiply_add(Lot w, Lot z, Lanes sum) { return sum + w.even * z.even + w.odd * z.odd; }
  static void arrange(float* z, int64_t count) {
    for (int64_t k = 0; k < count; k += kStep) {
      float parts[kStep];
      for (int lane = 0; lane < kLanes; ++lane) parts[lane] = z[k + 2 * lane], parts[kLanes + lane] = z[k + 2 * lane + 1];
      memcpy(z + k, parts, sizeof parts);
    }
  }
};
#endif

using Quad = float __attribute__((vector_size(4 * sizeof(float))));

template <class Vector>
ICL_PATCH_CALLABLE Quad fold(Vector x) {  // the lanes added in halves, down to four
  if constexpr (sizeof x == sizeof(Quad)) {
    return x;
  } else {
    struct Halved {
      float __attribute__((vector_size(sizeof x / 2))) low, high;
    } halves;
    memcpy(&halves, &x, sizeof x);
    return fold(halves.low + halves.high);
  }
}

// totals[i] is the sum of the lanes of sums[i], added in halves; for `count` of them, and up to the next multiple of four.
ICL_PATCH_CALLABLE void across(const Lanes* sums, int64_t count, float* totals) {
  for (int64_t i = 0; i < count; i += 4) {
    const Quad a = fold(sums[i]), b = fold(sums[i + 1]), c = fold(sums[i + 2]), d = fold(sums[i + 3]);
    const auto sum = [](Quad x) { return (x[0] + x[2]) + (x[1] + x[3]); };
    const Quad all = {sum(a), sum(b), sum(c), sum(d)};
    memcpy(totals + i, &all, sizeof all);
  }
}

// The last numbers of a row of W, of which there are `count`; beyond them z is 0.
template <class W>
ICL_PATCH_CALLABLE typename W::Lot load_some(const typename W::Type* from, int64_t count) {
  typename W::Type padded[W::kStep] = {};
  memcpy(padded, from, count * sizeof(typename W::Type));
  return W::load(padded);
}

// sums[m][n] += z[m] · w[n] over [begin, end); begin is a multiple of the step. `ahead` is what lies behind w's place there in the order
// in which W is read, or null: rows are too short for the hardware to run ahead.
template <class W, int kRows, bool kAhead>
ICL_PATCH_CALLABLE void accumulate(const typename W::Type* w, int64_t stride, const typename W::Row* z, int64_t z_stride, int64_t begin,
                                   int64_t end, const typename W::Type* ahead, Lanes (*sums)[W::kTall]) {
  Lanes local[kRows][W::kTall];
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < W::kTall; ++n) local[m][n] = sums[m][n];
  const auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
    typename W::Lot rows[kRows];
    for (int m = 0; m < kRows; ++m) rows[m] = W::row(z + m * z_stride + k);
    for (int n = 0; n < W::kTall; ++n) {
      const typename W::Lot weights = load(w + n * stride + k);
      if (kAhead) __builtin_prefetch(ahead + n * stride + k, 0, 2);
      for (int m = 0; m < kRows; ++m) local[m][n] = W::multiply_add(weights, rows[m], local[m][n]);
    }
  };
  int64_t k = begin;
  for (; k + W::kStep <= end; k += W::kStep) step(k, [](const typename W::Type* from) __attribute__((always_inline)) { return W::load(from); });
  if (k < end) step(k, [=](const typename W::Type* from) __attribute__((always_inline)) { return load_some<W>(from, end - k); });
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < W::kTall; ++n) sums[m][n] = local[m][n];
}

template <class W, bool kAhead, int kRows = W::kWide>
ICL_PATCH_CALLABLE void accumulate_some(int64_t rows, const typename W::Type* w, int64_t stride, const typename W::Row* z, int64_t z_stride,
                                        int64_t begin, int64_t end, const typename W::Type* ahead, Lanes (*sums)[W::kTall]) {
  if constexpr (kRows > 1)
    if (rows < kRows) return accumulate_some<W, kAhead, kRows - 1>(rows, w, stride, z, z_stride, begin, end, ahead, sums);
  accumulate<W, kRows, kAhead>(w, stride, z, z_stride, begin, end, ahead, sums);
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
void rows_of_weight(const Linear& call, const float* arranged, int64_t arranged_stride, const Epilogue& epilogue, int64_t begin, int64_t end) {
  constexpr int64_t kTall = W::kTall, kWide = W::kWide, kDepth = kChunk / sizeof(typename W::Type), kTile = 16 * kTall;
  const auto* weight = static_cast<const typename W::Type*>(call.weight);
  const auto* z = reinterpret_cast<const typename W::Row*>(arranged);
  const int64_t z_stride = arranged_stride * (sizeof(float) / sizeof(typename W::Row)), stride = call.weight_stride;
  const int64_t block = kTall * call.k * sizeof(typename W::Type), ahead = (kLead / std::max<int64_t>(block, 1) + 1) * kTall * stride;
  Lanes sums[kMaxRows][kTall] = {};
  float totals[kMaxRows][kTall], products[kMaxRows][kTall + kTile];  // what stands before a tile is not its own
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t tile_end = std::min(tile + kTile, end);
    for (int64_t n = tile; n < tile_end; n += kTall) {
      // The last block steps back so as to be whole; what it computes twice comes out the same.
      const int64_t first = std::max<int64_t>(std::min<int64_t>(n, tile_end - kTall), 0);
      const int64_t count = std::min(kTall, call.n);
      const auto* w = weight + first * stride;
      memset(sums, 0, call.rows * sizeof sums[0]);
      if (count == kTall) {
        for (int64_t k = 0; k < call.k; k += kDepth) {
          const int64_t to = std::min(k + kDepth, call.k);
          accumulate_some<W, true>(std::min(kWide, call.rows), w, stride, z, z_stride, k, to, w + ahead, sums);
          for (int64_t m = kWide; m < call.rows; m += kWide)
            accumulate_some<W, false>(std::min(kWide, call.rows - m), w, stride, z + m * z_stride, z_stride, k, to, nullptr, sums + m);
        }
      } else {  // fewer than kTall outputs in all
        for (int64_t m = 0; m < call.rows; ++m)
          for (int64_t i = 0; i < count; ++i) {
            Lanes alone[1][kTall] = {};
            accumulate<W, 1, false>(w + i * stride, 0, z + m * z_stride, z_stride, 0, call.k, nullptr, alone);
            sums[m][i] = alone[0][0];
          }
      }
      across(sums[0], call.rows * kTall, totals[0]);
      for (int64_t m = 0; m < call.rows; ++m) memcpy(&products[m][kTall + first - tile], totals[m], count * sizeof(float));
    }
    epilogue(&products[0][kTall], kTall + kTile, tile, tile_end - tile);
  }
}

template <class W>
ICL_PATCH_CALLABLE Lanes widen_some(const typename W::Type* from, int64_t count) {
  typename W::Type padded[kLanes] = {};
  memcpy(padded, from, count * sizeof(typename W::Type));
  return W::widen(padded);
}

// totals[m] += z[m] · w over `depth` rows of W, for kStrip vectors of columns; of the last one `count` columns are there. `ahead` is what
// is read next, at the same stride: what lies beside the strip is too far from it for the hardware to guess.
template <class W, int kRows, int kStrip>
ICL_PATCH_CALLABLE void accumulate_strip(const typename W::Type* w, int64_t stride, const float* z, int64_t z_stride, int64_t depth,
                                         int64_t count, const typename W::Type* ahead, float* totals, int64_t totals_stride) {
  Lanes sums[kRows][kStrip] = {};
  const auto step = [&](int64_t k, auto load) __attribute__((always_inline)) {
    for (int i = 0; i < kStrip; ++i) {
      const Lanes weights = load(w + k * stride + i * kLanes);
      if (ahead) __builtin_prefetch(ahead + k * stride + i * kLanes, 0, 3);
      for (int m = 0; m < kRows; ++m) sums[m][i] += weights * z[m * z_stride + k];
    }
  };
  if (count == kLanes)
    for (int64_t k = 0; k < depth; ++k) step(k, [](const typename W::Type* from) __attribute__((always_inline)) { return W::widen(from); });
  else
    for (int64_t k = 0; k < depth; ++k) step(k, [=](const typename W::Type* from) __attribute__((always_inline)) { return widen_some<W>(from, count); });
  for (int m = 0; m < kRows; ++m)
    for (int i = 0; i < kStrip; ++i) {
      float* to = totals + m * totals_stride + i * kLanes;
      const Lanes total = vector_at<Lanes>(to) + sums[m][i];
      memcpy(to, &total, sizeof total);
    }
}

constexpr int kColumnRows = kLanes == 16 ? 4 : 2;  // rows of z whose sums of a strip fit the registers

template <class W, int kStrip, int kRows = kColumnRows>
ICL_PATCH_CALLABLE void accumulate_strips(int64_t rows, const typename W::Type* w, int64_t stride, const float* z, int64_t z_stride,
                                          int64_t depth, int64_t count, const typename W::Type* ahead, float* totals, int64_t totals_stride) {
  if constexpr (kRows > 1)
    if (rows < kRows) return accumulate_strips<W, kStrip, kRows - 1>(rows, w, stride, z, z_stride, depth, count, ahead, totals, totals_stride);
  accumulate_strip<W, kRows, kStrip>(w, stride, z, z_stride, depth, count, ahead, totals, totals_stride);
}

// W as (K, N): kDepth rows of it after the others, over as many columns as the sums of the rows of z leave room for in the first-level
// cache, so that few rows of z read whole rows of W. In strips, whose sums stay in registers.
template <class W>
void columns_of_weight(const Linear& call, const float* z, int64_t z_stride, const Epilogue& epilogue, int64_t begin, int64_t end) {
  constexpr int64_t kDepth = 16, kStrip = 4, kWidth = kStrip * kLanes;
  const auto* weight = static_cast<const typename W::Type*>(call.weight);
  const int64_t stride = call.weight_stride, columns = kMaxRows / call.rows * kColumns;
  alignas(sizeof(Lanes)) float totals[kMaxRows * kColumns];
  for (int64_t first = begin; first < end; first += columns) {
    const int64_t count = std::min(columns, end - first);
    memset(totals, 0, call.rows * columns * sizeof totals[0]);
    for (int64_t k = 0; k < call.k; k += kDepth) {
      const int64_t depth = std::min(kDepth, call.k - k);
      const auto* w = weight + k * stride + first;
      const auto* below = w + (k + 2 * kDepth <= call.k ? depth * stride : 0);
      for (int64_t column = 0; column < count;) {
        const bool whole = column + kWidth <= count;
        const int64_t width = whole ? kWidth : std::min<int64_t>(kLanes, count - column);
        const auto* ahead = column + width < count ? w + column + width : below;
        for (int64_t m = 0; m < call.rows; m += kColumnRows) {
          const int64_t rows = std::min<int64_t>(kColumnRows, call.rows - m);
          const float* from = z + m * z_stride + k;
          float* to = totals + m * columns + column;
          if (whole)
            accumulate_strips<W, kStrip>(rows, w + column, stride, from, z_stride, depth, kLanes, m ? nullptr : ahead, to, columns);
          else
            accumulate_strips<W, 1>(rows, w + column, stride, from, z_stride, depth, width, m ? nullptr : ahead, to, columns);
        }
        column += width;
      }
    }
    for (int64_t column = 0; column < count; column += kColumns)
      epilogue(totals + column, columns, first + column, std::min(kColumns, count - column));
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

// A row of z, padded with zeros to `count`, in the order that linear_outputs reads beside rows of W.
void arrange(Float weight_dtype, float* z, int64_t count) {
  if (weight_dtype == Float::kBrain) Brain::arrange(z, count);
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
  for (; k + kLanes <= count; k += kLanes) sum += Single::widen(x + k) * Single::widen(y + k);
  if (k < count) sum += widen_some<Single>(x + k, count - k) * widen_some<Single>(y + k, count - k);
  const Lanes alone[4] = {sum};
  float totals[4];
  across(alone, 1, totals);
  return totals[0];
}

}  // namespace icl_patch::ICL_PATCH_ISA
