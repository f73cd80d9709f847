// The CPU driver of the patched linear map. One pass streams W through the cache once for all of
// its rows; the low-rank term is added to each block of outputs. A row's bits depend on nothing but
// the row: every dot product is summed in the same lanes in the same order, however many rows there
// are.
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/conversions.h"
#include "cpu/drivers.h"
#include "cpu/tiles.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int64_t kMaxRows = 16;  // that one pass over W serves, if not on tiles
// Bytes of each row of W in a block, which stays in the first-level cache for all rows of z.
constexpr int64_t kBlockBytes = 2048;
constexpr int64_t kPrefetchBytes = 8192;  // W is prefetched at least this far ahead
constexpr int64_t kColumns = 512;         // columns a block has where W is (K, N)

using Fp32Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
using U32Vector = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using U16Vector = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

template <class V, class T>
ICL_PATCH_INLINE V vector_at(const T* from) {
  V x;
  memcpy(&x, from, sizeof x);
  return x;
}

// f of kCount numbers: `count` of them are read, the others are 0.
template <int kCount, class T, class F>
ICL_PATCH_INLINE auto padded(const T* from, int64_t count, F f) {
  T values[kCount] = {};
  memcpy(values, from, count * sizeof(T));
  return f(values);
}

// Calls f with the constant `count`, which is from 1 to kMax.
template <int kMax, class F>
ICL_PATCH_INLINE void with_constant(int64_t count, F f) {
  if constexpr (kMax > 1)
    if (count < kMax) return with_constant<kMax - 1>(count, f);
  f(std::integral_constant<int, kMax>{});
}

// The dtypes of W. One step multiplies a Vector of kStep weights with as many numbers of a row of
// z, which is stored as Row numbers in an order of the dtype's own (arrange). The sums of a tile,
// kTileN rows of W times kTileM rows of z, fit the registers. `widen` reads kLanes numbers in
// order.

// Dtypes whose weights are widened to fp32, one vector a step.
struct WidenedProduct {
  using Row = float;
  using Vector = Fp32Vector;
  static constexpr int kStep = kLanes;
  static ICL_PATCH_INLINE Vector row(const float* from) { return vector_at<Vector>(from); }
  static ICL_PATCH_INLINE Vector multiply_add(Vector w, Vector z, Vector sum) {
    return sum + w * z;
  }
};

struct Fp32 : WidenedProduct {
  using Type = float;
  static constexpr int kTileN = 4, kTileM = kLanes == 16 ? 4 : 2;
  static ICL_PATCH_INLINE Vector widen(const float* from) { return row(from); }
  static ICL_PATCH_INLINE Vector load(const float* from) { return row(from); }
};

struct Fp16 : WidenedProduct {
  using Type = uint16_t;
  static constexpr int kTileN = kLanes == 16 ? 6 : 4, kTileM = kLanes == 16 ? 4 : 2;
  static ICL_PATCH_INLINE Vector widen(const uint16_t* from) {
    Vector x;
    if constexpr (kFp16Step == kLanes) {
      const auto values = load_fp16(from);
      memcpy(&x, &values, sizeof x);
    } else {
      for (int lane = 0; lane < kLanes; ++lane) x[lane] = fp16_to_fp32(from[lane]);
    }
    return x;
  }
  static ICL_PATCH_INLINE Vector load(const uint16_t* from) { return widen(from); }
};

struct Bf16Weights {
  using Type = uint16_t;
  static constexpr int kStep = 2 * kLanes;
  static ICL_PATCH_INLINE Fp32Vector widen(const uint16_t* from) {
    return reinterpret_cast<Fp32Vector>(
        __builtin_convertvector(vector_at<U16Vector>(from), U32Vector) << 16);
  }
};

#if defined(__AVX512BF16__)
// The processor multiplies pairs of bf16 and adds both products in fp32.
struct Bf16 : Bf16Weights {
  using Row = uint16_t;
  using Vector = __m512bh;
  static constexpr int kTileN = 8, kTileM = 2;
  static ICL_PATCH_INLINE Vector load(const uint16_t* from) { return vector_at<Vector>(from); }
  static ICL_PATCH_INLINE Vector row(const uint16_t* from) { return load(from); }
  static ICL_PATCH_INLINE Fp32Vector multiply_add(Vector w, Vector z, Fp32Vector sum) {
    return reinterpret_cast<Fp32Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), w, z));
  }
  static void arrange(float* z, int64_t count) {
    auto* narrow = reinterpret_cast<unsigned char*>(z);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = fp32_to_bf16(z[i]);
      memcpy(narrow + i * sizeof bits, &bits, sizeof bits);
    }
  }
};
#else
// Each 32-bit word holds two weights: the even one in its low half, the odd one in its high half.
struct Bf16 : Bf16Weights {
  using Row = float;
  struct Vector {
    Fp32Vector even, odd;
  };
  static constexpr int kTileN = kLanes == 16 ? 6 : 4, kTileM = kLanes == 16 ? 3 : 2;
  static ICL_PATCH_INLINE Vector load(const uint16_t* from) {
    const auto words = vector_at<U32Vector>(from);
    return {reinterpret_cast<Fp32Vector>(words << 16),
            reinterpret_cast<Fp32Vector>(words & 0xffff0000u)};
  }
  static ICL_PATCH_INLINE Vector row(const float* from) {
    return {Fp32::row(from), Fp32::row(from + kLanes)};
  }
  static ICL_PATCH_INLINE Fp32Vector multiply_add(Vector w, Vector z, Fp32Vector sum) {
    return sum + w.even * z.even + w.odd * z.odd;
  }
  static void arrange(float* z, int64_t count) {
    for (int64_t k = 0; k < count; k += kStep) {
      float parts[kStep];
      for (int lane = 0; lane < kLanes; ++lane) {
        parts[lane] = z[k + 2 * lane];
        parts[kLanes + lane] = z[k + 2 * lane + 1];
      }
      memcpy(z + k, parts, sizeof parts);
    }
  }
};
#endif

// Adds the upper half of the lanes to the lower one until one is left.
template <class V>
ICL_PATCH_INLINE float add_lanes(V x) {
  if constexpr (sizeof x == sizeof(float)) {
    return x[0];
  } else {
    struct Halves {
      float __attribute__((vector_size(sizeof x / 2))) low, high;
    } halves;
    memcpy(&halves, &x, sizeof x);
    return add_lanes(halves.low + halves.high);
  }
}

// sums[m][n] += z[m] · w[n] over [begin, end); begin is a multiple of the step. `ahead` is
// prefetched if kPrefetch: rows of W are too short for the hardware to run ahead.
template <class W, int kRows, bool kPrefetch>
ICL_PATCH_INLINE void accumulate(const typename W::Type* w, int64_t stride,
                                 const typename W::Row* z, int64_t z_stride, int64_t begin,
                                 int64_t end, const typename W::Type* ahead,
                                 Fp32Vector (*sums)[W::kTileN]) {
  Fp32Vector local[kRows][W::kTileN];
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < W::kTileN; ++n) local[m][n] = sums[m][n];
  const auto step = [&](int64_t k, auto load) ICL_PATCH_INLINE_LAMBDA {
    typename W::Vector rows[kRows];
    for (int m = 0; m < kRows; ++m) rows[m] = W::row(z + m * z_stride + k);
    for (int n = 0; n < W::kTileN; ++n) {
      const typename W::Vector weights = load(w + n * stride + k);
      if (kPrefetch) __builtin_prefetch(ahead + n * stride + k, 0, 2);
      for (int m = 0; m < kRows; ++m) local[m][n] = W::multiply_add(weights, rows[m], local[m][n]);
    }
  };
  const auto load = [](auto* from) ICL_PATCH_INLINE_LAMBDA { return W::load(from); };
  int64_t k = begin;
  for (; k + W::kStep <= end; k += W::kStep) step(k, load);
  if (k < end)  // beyond the last weight z is 0
    step(k,
         [=](auto* from) ICL_PATCH_INLINE_LAMBDA { return padded<W::kStep>(from, end - k, load); });
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < W::kTileN; ++n) sums[m][n] = local[m][n];
}

// to += coefficient u, for the elements [first, first + count) of a row of u.
void add_scaled(const Matrix& u, int64_t row, int64_t first, int64_t count, float coefficient,
                float* to) {
  if (u.dtype == DType::kFp32 && u.column == 1) {
    const float* from = u.as<float>() + row * u.row + first;
    for (int64_t i = 0; i < count; ++i) to[i] += coefficient * from[i];
  } else {
    for (int64_t i = 0; i < count; ++i)
      to[i] += coefficient * static_cast<float>(u.at(row, first + i));
  }
}

// Turns products z·w (rows, count) with a stride into the outputs [first, first + count): + bias,
// + c_r u_r rank by rank, then one rounding.
void finish(const Linear& call, const float* coefficients, const float* products, int64_t stride,
            int64_t first, int64_t count) {
  const Factors& factors = call.factors;
  for (int64_t m = 0; m < call.rows; ++m) {
    const float* product = products + m * stride;
    float sums[kColumns];
    for (int64_t i = 0; i < count; ++i)
      sums[i] =
          call.bias.data ? product[i] + static_cast<float>(call.bias.at(0, first + i)) : product[i];
    const int64_t reduced = m - call.context_rows();
    if (call.u && reduced >= 0) {  // the patch u is the difference that the context makes
      const float* context = products + reduced * stride;
      float* u = call.u + (call.first + reduced) * call.n + first;
      for (int64_t i = 0; i < count; ++i) u[i] = context[i] - product[i];
      add_scaled({u, DType::kFp32, 0, 1}, 0, 0, count, coefficients[reduced], sums);
    } else if (!call.u && factors.patch_of(call.first + m) >= 0) {
      const Matrix u = factors.u[factors.patch_of(call.first + m)];
      for (int64_t r = 0; r < factors.rank; ++r)
        add_scaled(u, r, first, count, coefficients[m * factors.rank + r], sums);
    }
    store(sums, count, call.y_dtype, call.y, call.row_of(m) * call.n + first);
  }
}

// W as (N, K), not on tiles.
template <class W>
void outputs_by_rows(const Linear& call, const float* arranged, int64_t arranged_stride,
                     const float* coefficients, int64_t begin, int64_t end) {
  using Type = typename W::Type;
  using Row = typename W::Row;
  constexpr int64_t kTileN = W::kTileN, kTileM = W::kTileM, kPanel = 16 * kTileN;
  constexpr int64_t kBlockK = kBlockBytes / sizeof(Type);
  const auto* weight = call.weight.as<Type>();
  const auto* z = reinterpret_cast<const Row*>(arranged);
  const int64_t z_stride = arranged_stride * (sizeof(float) / sizeof(Row));
  const int64_t stride = call.weight.row, tile_bytes = kTileN * call.k * sizeof(Type);
  const int64_t tiles_ahead = kPrefetchBytes / std::max<int64_t>(tile_bytes, 1) + 1;
  Fp32Vector sums[kMaxRows][kTileN] = {};
  // The last tile of a panel may begin up to kTileN outputs before the panel.
  float products[kMaxRows][kTileN + kPanel];
  for (int64_t panel = begin; panel < end; panel += kPanel) {
    const int64_t panel_end = std::min(panel + kPanel, end);
    for (int64_t n = panel; n < panel_end; n += kTileN) {
      // The last tile steps back to be whole; the outputs it computes twice come out the same.
      const int64_t first = std::max<int64_t>(std::min<int64_t>(n, panel_end - kTileN), 0);
      const int64_t count = std::min(kTileN, call.n);
      const auto* w = weight + first * stride;
      memset(sums, 0, call.rows * sizeof sums[0]);
      if (count == kTileN) {
        for (int64_t k = 0; k < call.k; k += kBlockK) {
          const int64_t to = std::min(k + kBlockK, call.k);
          const auto add_tile = [&](int64_t m, auto prefetch) ICL_PATCH_INLINE_LAMBDA {
            with_constant<kTileM>(call.rows - m, [&](auto rows) ICL_PATCH_INLINE_LAMBDA {
              accumulate<W, rows, prefetch>(w, stride, z + m * z_stride, z_stride, k, to,
                                            w + tiles_ahead * kTileN * stride, sums + m);
            });
          };
          add_tile(0, std::true_type{});
          for (int64_t m = kTileM; m < call.rows; m += kTileM) add_tile(m, std::false_type{});
        }
      } else {  // fewer than kTileN outputs in all
        for (int64_t m = 0; m < call.rows; ++m)
          for (int64_t i = 0; i < count; ++i) {
            Fp32Vector one[1][kTileN] = {};
            accumulate<W, 1, false>(w + i * stride, 0, z + m * z_stride, z_stride, 0, call.k,
                                    nullptr, one);
            sums[m][i] = one[0][0];
          }
      }
      for (int64_t m = 0; m < call.rows; ++m)
        for (int64_t i = 0; i < count; ++i)
          products[m][kTileN + first - panel + i] = add_lanes(sums[m][i]);
    }
    finish(call, coefficients, &products[0][kTileN], kTileN + kPanel, panel, panel_end - panel);
  }
}

// totals[m] += z[m] · w over `depth` rows of W, for a strip of kVectors vectors of columns; the
// last vector has `count` columns. `ahead` is prefetched unless null, at the same stride: it is too
// far from the strip for the hardware to guess.
template <class W, int kRows, int kVectors>
ICL_PATCH_INLINE void accumulate_strip(const typename W::Type* w, int64_t stride, const float* z,
                                       int64_t z_stride, int64_t depth, int64_t count,
                                       const typename W::Type* ahead, float* totals,
                                       int64_t totals_stride) {
  Fp32Vector sums[kRows][kVectors] = {};
  const auto add_rows = [&](auto load) ICL_PATCH_INLINE_LAMBDA {
    for (int64_t k = 0; k < depth; ++k)
      for (int i = 0; i < kVectors; ++i) {
        const Fp32Vector weights = load(w + k * stride + i * kLanes);
        if (ahead) __builtin_prefetch(ahead + k * stride + i * kLanes, 0, 3);
        for (int m = 0; m < kRows; ++m) sums[m][i] += weights * z[m * z_stride + k];
      }
  };
  const auto widen = [](auto* from) ICL_PATCH_INLINE_LAMBDA { return W::widen(from); };
  if (count == kLanes)
    add_rows(widen);
  else
    add_rows([=](auto* from)
                 ICL_PATCH_INLINE_LAMBDA { return padded<kLanes>(from, count, widen); });
  for (int m = 0; m < kRows; ++m)
    for (int i = 0; i < kVectors; ++i) {
      float* to = totals + m * totals_stride + i * kLanes;
      const Fp32Vector total = vector_at<Fp32Vector>(to) + sums[m][i];
      memcpy(to, &total, sizeof total);
    }
}

// W as (K, N): kDepth rows of W at a time, over as many columns as the sums of all rows of z leave
// room for in the first-level cache, so that few rows of z read whole rows of W. The columns are
// taken in strips whose sums stay in registers.
template <class W>
void outputs_by_columns(const Linear& call, const float* z, int64_t z_stride,
                        const float* coefficients, int64_t begin, int64_t end) {
  constexpr int64_t kDepth = 16, kStripVectors = 4, kStrip = kStripVectors * kLanes;
  constexpr int64_t kStripRows = kLanes == 16 ? 4 : 2;  // of z, whose sums fit the registers
  const auto* weight = call.weight.as<typename W::Type>();
  const int64_t stride = call.weight.row, columns = kMaxRows / call.rows * kColumns;
  alignas(sizeof(Fp32Vector)) float totals[kMaxRows * kColumns];
  for (int64_t first = begin; first < end; first += columns) {
    const int64_t count = std::min(columns, end - first);
    memset(totals, 0, call.rows * columns * sizeof totals[0]);
    for (int64_t k = 0; k < call.k; k += kDepth) {
      const int64_t depth = std::min(kDepth, call.k - k);
      const auto* w = weight + k * stride + first;
      const auto* below = w + (k + 2 * kDepth <= call.k ? depth * stride : 0);
      for (int64_t column = 0; column < count;) {
        const bool whole = column + kStrip <= count;
        const int64_t width = whole ? kStrip : std::min<int64_t>(kLanes, count - column);
        const auto* ahead = column + width < count ? w + column + width : below;
        for (int64_t m = 0; m < call.rows; m += kStripRows)
          with_constant<kStripRows>(call.rows - m, [&](auto rows) ICL_PATCH_INLINE_LAMBDA {
            const auto add_strip = [&](auto vectors, int64_t last) ICL_PATCH_INLINE_LAMBDA {
              accumulate_strip<W, rows, vectors>(w + column, stride, z + m * z_stride + k, z_stride,
                                                 depth, last, m ? nullptr : ahead,
                                                 totals + m * columns + column, columns);
            };
            if (whole)
              add_strip(std::integral_constant<int, kStripVectors>{}, kLanes);
            else
              add_strip(std::integral_constant<int, 1>{}, width);
          });
        column += width;
      }
    }
    for (int64_t column = 0; column < count; column += kColumns)
      finish(call, coefficients, totals + column, columns, first + column,
             std::min(kColumns, count - column));
  }
}

// ---- tiles ----

// Without tiles, Tiles is void and nothing below is called.
#ifdef ICL_PATCH_TILES
using Tiles = ICL_PATCH_TILES;
#else
using Tiles = void;
#endif
constexpr bool kHasTiles = !std::is_void_v<Tiles>;
constexpr int64_t kMaxRowBlocks = 4;   // of 16 rows of z, in one pass over W
constexpr int64_t kWeightTiles = 2;     // of W at a time
constexpr int64_t kTileBlockK = 2048;  // columns of W that stay in the second-level cache

bool on_tiles(const Linear& call) {
  return kHasTiles && !call.plain.data && !call.transposed && call.weight.dtype == DType::kBf16;
}

// Rows of z in a tile.
int64_t tile_columns(const Linear& call) { return std::min<int64_t>(call.rows, kTileRows); }

// Packs the rows of z as the tiles read them: blocks of up to 16 rows, [block][pairs][row][2],
// where a pair is two neighbouring columns. `packed` begins as zeros and is never longer than the
// rows in fp32.
void pack_rows(const Linear& call, int64_t pairs, float* packed) {
  constexpr int64_t kPart = 512;  // columns: what is written stays in the first-level cache
  const int64_t columns = tile_columns(call);
  float part[kPart];
  for (int64_t k = 0; k < call.k; k += kPart) {
    const int64_t count = std::min(kPart, call.k - k);
    for (int64_t m = 0; m < call.rows; ++m) {
      const Matrix row = call.input(m);
      load_fp32(row.shifted(k * row.column), 0, count, part);
      const int64_t first = (m / kTileRows * pairs + k / 2) * columns + m % kTileRows;
      auto* to = reinterpret_cast<unsigned char*>(packed + first);
      for (int64_t i = 0; i < count; ++i) {
        const uint16_t bits = fp32_to_bf16(part[i]);
        memcpy(to + (i / 2 * columns * 2 + i % 2) * sizeof bits, &bits, sizeof bits);
      }
    }
  }
}

// Calls f with each of the constants.
template <int... kIndex, class F>
ICL_PATCH_INLINE void for_each(std::integer_sequence<int, kIndex...>, F f) {
  (f(std::integral_constant<int, kIndex>{}), ...);
}

// A tile of W of which there are only `rows` rows and `depth` columns: the rest are zeros.
const uint16_t* padded_tile(const uint16_t* w, int64_t stride, int64_t rows, int64_t depth,
                            uint16_t (*to)[kTileDepth]) {
  memset(to, 0, kTileRows * kTileBytes);
  for (int64_t row = 0; row < std::min<int64_t>(rows, kTileRows); ++row)
    memcpy(to[row], w + row * stride, std::min<int64_t>(depth, kTileDepth) * sizeof *w);
  return to[0];
}

// Sums of a tile of outputs, (output, row of z).
struct alignas(64) TileSums {
  float values[kTileRows][kTileRows];
};

// sums[p][t] += (rows of W in tile t) · (rows of z in block p) over the columns [begin, end); begin
// is a multiple of a tile's depth. Each sum runs through K in the same order for any numbers of
// tiles. `z` is the first block's, and there are `outputs` rows of W. `ahead` is prefetched unless
// null.
template <class T, int kWide, int kPairs>
void accumulate_tiles(T& tiles, const uint16_t* w, int64_t stride, int64_t outputs, const float* z,
                      int64_t pairs, int64_t columns, int64_t begin, int64_t end,
                      const uint16_t* ahead, TileSums (*sums)[kWeightTiles]) {
  constexpr std::make_integer_sequence<int, kWide> wide_tiles{};
  constexpr std::make_integer_sequence<int, kPairs> pair_tiles{};
  const int64_t line = columns * sizeof(float);
  const auto each_sum = [&](auto f) ICL_PATCH_INLINE_LAMBDA {
    for_each(wide_tiles, [&](auto t) ICL_PATCH_INLINE_LAMBDA {
      for_each(pair_tiles, [&](auto p) ICL_PATCH_INLINE_LAMBDA {
        f(std::integral_constant<int, t * kPairs + p>{}, sums[p][t].values[0]);
      });
    });
  };
  each_sum([&](auto tile, float* sum)
               ICL_PATCH_INLINE_LAMBDA { tiles.template load<tile>(sum, kTileBytes); });
  alignas(64) uint16_t padded[kTileRows][kTileDepth];
  for (int64_t k = begin; k < end; k += kTileDepth) {
    for_each(pair_tiles, [&](auto p) ICL_PATCH_INLINE_LAMBDA {
      tiles.template load<kPairTile + p>(z + (p * pairs + k / 2) * columns, line);
    });
    for_each(wide_tiles, [&](auto t) ICL_PATCH_INLINE_LAMBDA {
      constexpr int kTile = kWideTile + t % 2;
      const int64_t first = t * kTileRows;
      const uint16_t* from = w + first * stride + k;
      if (first + kTileRows <= outputs && k + kTileDepth <= end)
        tiles.template load<kTile>(from, stride * sizeof *w);
      else
        tiles.template load<kTile>(padded_tile(from, stride, outputs - first, end - k, padded),
                                   kTileBytes);
      if (ahead) {
        const uint16_t* line_ahead = ahead + first * stride + k;
        for (const auto* to = line_ahead + kTileRows * stride; line_ahead < to;
             line_ahead += stride)
          __builtin_prefetch(line_ahead, 0, 2);
      }
      for_each(pair_tiles, [&](auto p) ICL_PATCH_INLINE_LAMBDA {
        tiles.template multiply_add<t * kPairs + p, kTile, kPairTile + p>();
      });
    });
  }
  each_sum([&](auto tile, float* sum)
               ICL_PATCH_INLINE_LAMBDA { tiles.template store<tile>(sum, kTileBytes); });
}

// W as (N, K) in bf16, on tiles: outputᵀ = W zᵀ, so that W is read as it lies in memory. Up to 16
// rows of z meet one tile of W at a time, which keeps the memory busiest; for more, two tiles of W
// meet two of z.
template <class T>
void outputs_on_tiles(const Linear& call, const float* z, int64_t z_stride,
                      const float* coefficients, int64_t begin, int64_t end) {
  const int64_t columns = tile_columns(call), pairs = z_stride / 2, stride = call.weight.row;
  const int64_t blocks = (call.rows + kTileRows - 1) / kTileRows;
  const int64_t group = std::min(blocks, kWeightTiles) * kTileRows;
  const int64_t group_bytes = group * call.k * 2;
  const int64_t groups_ahead = kPrefetchBytes / std::max<int64_t>(group_bytes, 1) + 1;
  T tiles(columns);
  TileSums sums[kMaxRowBlocks][kWeightTiles];
  float products[kMaxRowBlocks * kTileRows][kWeightTiles * kTileRows];
  for (int64_t n = begin; n < end; n += group) {
    const int64_t count = std::min(group, end - n);
    const auto* w = call.weight.as<uint16_t>() + n * stride;
    memset(sums, 0, blocks * sizeof sums[0]);
    for (int64_t k = 0; k < call.k; k += kTileBlockK)
      for (int64_t block = 0; block < blocks; block += 2)
        with_constant<2>(blocks - block, [&](auto pair_tiles) ICL_PATCH_INLINE_LAMBDA {
          const int64_t wide = (count + kTileRows - 1) / kTileRows;
          with_constant<kWeightTiles>(wide, [&](auto wide_tiles) ICL_PATCH_INLINE_LAMBDA {
            accumulate_tiles<T, wide_tiles, pair_tiles>(
                tiles, w, stride, count, z + block * pairs * columns, pairs, columns, k,
                std::min(k + kTileBlockK, call.k),
                block ? nullptr : w + groups_ahead * group * stride, sums + block);
          });
        });
    for (int64_t m = 0; m < call.rows; ++m)
      for (int64_t i = 0; i < count; ++i)
        products[m][i] = sums[m / kTileRows][i / kTileRows].values[i % kTileRows][m % kTileRows];
    finish(call, coefficients, products[0], kWeightTiles * kTileRows, n, count);
  }
}

template <class W>
void outputs(const Linear& call, const float* z, int64_t z_stride, const float* coefficients,
             int64_t begin, int64_t end) {
  const auto run = call.transposed ? outputs_by_columns<W> : outputs_by_rows<W>;
  run(call, z, z_stride, coefficients, begin, end);
}

// The low-rank term alone, added to an output that is there already.
void low_rank_outputs(const Linear& call, const float* coefficients, int64_t begin, int64_t end) {
  float plain[kMaxRows][kColumns];
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t count = std::min(kColumns, end - first);
    const Matrix columns = call.plain.shifted(first * call.plain.column);
    for (int64_t m = 0; m < call.rows; ++m) load_fp32(columns, call.row_of(m), count, plain[m]);
    finish(call, coefficients, plain[0], kColumns, first, count);
  }
}

float dot(const float* x, const float* y, int64_t count) {
  Fp32Vector sum{};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) sum += Fp32::row(x + k) * Fp32::row(y + k);
  if (k < count)
    sum +=
        padded<kLanes>(x + k, count - k, Fp32::row) * padded<kLanes>(y + k, count - k, Fp32::row);
  return add_lanes(sum);
}

}  // namespace

// How many rows one pass over W serves.
int64_t pass_rows(const Linear& call) {
  return on_tiles(call) ? kMaxRowBlocks * kTileRows : kMaxRows;
}

// Reads the rows of z in fp32, padded with zeros to z_stride, and computes the coefficients z·v of
// every row and rank. Then puts the rows in the order that linear_outputs reads beside rows of W.
// `z` begins as zeros.
void prepare_rows(const Linear& call, float* z, int64_t z_stride, float* coefficients) {
  const int64_t rank = call.factors.rank;
  const bool tiled = on_tiles(call);
  std::vector<float> direction(rank ? call.k : 0), own(tiled && rank ? call.k : 0);
  for (int64_t m = 0; m < call.rows; ++m) {
    float* values = tiled ? own.data() : z + m * z_stride;
    if (!tiled || rank) load_fp32(call.input(m), 0, call.k, values);
    const int64_t row = m - call.context_rows();
    const int64_t patch = row < 0 ? -1 : call.factors.patch_of(call.first + row);
    for (int64_t r = 0; patch >= 0 && r < rank; ++r) {
      load_fp32(call.factors.v[patch], r, call.k, direction.data());
      coefficients[row * rank + r] = dot(values, direction.data(), call.k);
    }
    const bool by_rows = !call.plain.data && !call.transposed;
    if (!tiled && by_rows && call.weight.dtype == DType::kBf16) Bf16::arrange(values, z_stride);
  }
  if (tiled) pack_rows(call, z_stride / 2, z);
}

// Columns [begin, end) of y.
void linear_outputs(const Linear& call, const float* z, int64_t z_stride, const float* coefficients,
                    int64_t begin, int64_t end) {
  if (call.plain.data) return low_rank_outputs(call, coefficients, begin, end);
  if constexpr (kHasTiles)
    if (on_tiles(call)) return outputs_on_tiles<Tiles>(call, z, z_stride, coefficients, begin, end);
  const auto run = call.weight.dtype == DType::kFp32   ? outputs<Fp32>
                   : call.weight.dtype == DType::kBf16 ? outputs<Bf16>
                                                       : outputs<Fp16>;
  run(call, z, z_stride, coefficients, begin, end);
}

}  // namespace icl_patch::ICL_PATCH_ISA
