// Matrix tiles: registers of 16 rows of 64 bytes, which a processor multiplies. The kernel that
// uses them is written against AmxTiles; ModelTiles computes the same in plain C++, so that the
// kernel's logic can be tested on any processor.
//
// Tiles 0 to 3 hold fp32 sums, 16 rows of `columns` numbers; 4 and 5 hold 16 rows of `columns`
// pairs of bf16; 6 and 7 hold 16 rows of 32 bf16.
#pragma once

#include <cmath>

#include "common/matrix.h"

namespace icl_patch::ICL_PATCH_ISA {

constexpr int kTileRows = 16, kTileBytes = 64, kTileDepth = 32;  // depth: columns of bf16
constexpr int kPairTile = 4, kWideTile = 6;

// Intel's AMX. Assembly, as the compilers' intrinsics do not take template arguments.
class AmxTiles {
 public:
  explicit AmxTiles(int columns) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } layout;
    for (int tile = 0; tile < 8; ++tile) {
      layout.row_bytes[tile] = tile < kWideTile ? 4 * columns : kTileBytes;
      layout.rows[tile] = kTileRows;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(layout));
  }
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles() { __asm__ volatile("tilerelease"); }

  template <int kTile>
  ICL_PATCH_INLINE void load(const void* from, int64_t row_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kTile)
                     : "memory");
  }
  template <int kTile>
  ICL_PATCH_INLINE void store(void* to, int64_t row_bytes) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kTile)
                     : "memory");
  }
  // sums[m][n] += Σ_k wide[m][k] pairs[k / 2][n][k % 2]
  template <int kSum, int kWide, int kPairs>
  ICL_PATCH_INLINE void multiply_add() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kWide), "i"(kPairs));
  }
};

// The same in plain C++, after Intel's description of the instructions.
class ModelTiles {
 public:
  explicit ModelTiles(int columns) : columns_(columns) {}

  template <int kTile>
  void load(const void* from, int64_t row_bytes) {
    for (int row = 0; row < kTileRows; ++row)
      memcpy(tiles_[kTile][row], static_cast<const char*>(from) + row * row_bytes, width(kTile));
  }
  template <int kTile>
  void store(void* to, int64_t row_bytes) {
    for (int row = 0; row < kTileRows; ++row)
      memcpy(static_cast<char*>(to) + row * row_bytes, tiles_[kTile][row], width(kTile));
  }
  // The products of the even and of the odd columns are summed apart, by fused multiply-add.
  // Denormal numbers are 0.
  template <int kSum, int kWide, int kPairs>
  void multiply_add() {
    for (int m = 0; m < kTileRows; ++m) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < kTileDepth / 2; ++k) {
        const uint32_t wide = tiles_[kWide][m][k];
        for (int n = 0; n < columns_; ++n) {
          const uint32_t pair = tiles_[kPairs][k][n];
          even[n] = flushed(std::fma(low(wide), low(pair), even[n]));
          odd[n] = flushed(std::fma(high(wide), high(pair), odd[n]));
        }
      }
      for (int n = 0; n < columns_; ++n) {
        const float sum = flushed(from_bits(tiles_[kSum][m][n]));
        tiles_[kSum][m][n] = bits_of(flushed(sum + flushed(even[n] + odd[n])));
      }
    }
  }

 private:
  static float flushed(float x) {
    const uint32_t bits = bits_of(x);
    return bits & 0x7f800000u ? x : from_bits(bits & 0x80000000u);
  }
  static float low(uint32_t pair) { return flushed(from_bits(pair << 16)); }
  static float high(uint32_t pair) { return flushed(from_bits(pair & 0xffff0000u)); }
  int64_t width(int tile) const { return tile < kWideTile ? 4 * columns_ : kTileBytes; }

  int columns_;
  uint32_t tiles_[8][kTileRows][kTileBytes / 4] = {};
};

}  // namespace icl_patch::ICL_PATCH_ISA
