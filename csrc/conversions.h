// Rows of numbers between the model's dtype and fp32, for the CPU drivers; with the same bits on every instruction set.
#pragma once

#ifdef ICL_PATCH_X86
#include <immintrin.h>
#endif

#include <algorithm>

#include "rows.h"

namespace icl_patch::ICL_PATCH_ISA {

// Beyond the whole vectors of the instruction set, one by one.
ICL_PATCH_CALLABLE void from_halves(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16)
    _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < count; ++i) to[i] = from_half(from[i]);
}

ICL_PATCH_CALLABLE void to_halves(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; ++i) to[i] = to_half(from[i]);
}

// `count` numbers, rounded once, from element `at` of `to` on.
ICL_PATCH_CALLABLE void store(const float* from, int64_t count, Float dtype, void* to, int64_t at) {
  uint16_t* narrow = static_cast<uint16_t*>(to) + at;
  switch (dtype) {
    case Float::kSingle: memcpy(static_cast<float*>(to) + at, from, count * sizeof(float)); break;
    case Float::kBrain:
      for (int64_t i = 0; i < count; ++i) narrow[i] = to_brain(from[i]);
      break;
    default: to_halves(from, count, narrow);
  }
}

// To the nearest number of a dtype, still in fp32.
ICL_PATCH_CALLABLE void round_to(Float dtype, int64_t count, float* x) {
  constexpr int64_t kBlock = 256;
  uint16_t halves[kBlock];
  switch (dtype) {
    case Float::kSingle: break;
    case Float::kBrain:
      for (int64_t i = 0; i < count; ++i) x[i] = round_to_brain(x[i]);
      break;
    default:
      for (int64_t i = 0; i < count; i += kBlock) {
        to_halves(x + i, std::min(kBlock, count - i), halves);
        from_halves(halves, std::min(kBlock, count - i), x + i);
      }
  }
}

}  // namespace icl_patch::ICL_PATCH_ISA
