// Conversions of many numbers between fp32 and the model's dtype. Every instruction set gives the
// same bits.
#pragma once

#ifdef ICL_PATCH_X86
#include <immintrin.h>
#endif

#include <algorithm>

#include "common/matrix.h"

namespace icl_patch::ICL_PATCH_ISA {

#if defined(__AVX512F__)
constexpr int kFp16Step = 16;
ICL_PATCH_INLINE __m512 load_fp16(const uint16_t* from) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
ICL_PATCH_INLINE void store_fp16(const float* from, uint16_t* to) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to),
      _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
constexpr int kFp16Step = 8;
ICL_PATCH_INLINE __m256 load_fp16(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
ICL_PATCH_INLINE void store_fp16(const float* from, uint16_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#else
constexpr int kFp16Step = 1;
ICL_PATCH_INLINE float load_fp16(const uint16_t* from) { return fp16_to_fp32(*from); }
ICL_PATCH_INLINE void store_fp16(const float* from, uint16_t* to) { *to = fp32_to_fp16(*from); }
#endif

ICL_PATCH_INLINE void widen_fp16(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kFp16Step <= count; i += kFp16Step) {
    const auto values = load_fp16(from + i);
    memcpy(to + i, &values, sizeof values);
  }
  for (; i < count; ++i) to[i] = fp16_to_fp32(from[i]);
}

ICL_PATCH_INLINE void narrow_to_fp16(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
  for (; i + kFp16Step <= count; i += kFp16Step) store_fp16(from + i, to + i);
  for (; i < count; ++i) to[i] = fp32_to_fp16(from[i]);
}

// Reads `count` numbers of a row.
inline void load_fp32(const Matrix& x, int64_t row, int64_t count, float* to) {
  if (!count) return;  // without elements there may be no address
  const Matrix from = x.shifted(row * x.row);
  const auto* narrow = from.as<uint16_t>();
  if (x.column == 1 && x.dtype == DType::kFp32) {
    memcpy(to, from.data, count * sizeof(float));
  } else if (x.column == 1 && x.dtype == DType::kBf16) {
    for (int64_t i = 0; i < count; ++i) to[i] = bf16_to_fp32(narrow[i]);
  } else if (x.column == 1 && x.dtype == DType::kFp16) {
    widen_fp16(narrow, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from.at(0, i));
  }
}

// Stores `count` numbers at element `at` of `to`, each rounded once.
ICL_PATCH_INLINE void store(const float* from, int64_t count, DType dtype, void* to, int64_t at) {
  uint16_t* narrow = static_cast<uint16_t*>(to) + at;
  switch (dtype) {
    case DType::kFp32: memcpy(static_cast<float*>(to) + at, from, count * sizeof(float)); break;
    case DType::kBf16:
      for (int64_t i = 0; i < count; ++i) narrow[i] = fp32_to_bf16(from[i]);
      break;
    default: narrow_to_fp16(from, count, narrow);
  }
}

// Rounds numbers in place to the nearest number of a dtype.
ICL_PATCH_INLINE void round_to(DType dtype, int64_t count, float* x) {
  constexpr int64_t kBlock = 256;
  uint16_t narrow[kBlock];
  if (dtype == DType::kBf16)
    for (int64_t i = 0; i < count; ++i) x[i] = round_to_bf16(x[i]);
  if (dtype == DType::kFp16)
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t some = std::min(kBlock, count - i);
      narrow_to_fp16(x + i, some, narrow);
      widen_fp16(narrow, some, x + i);
    }
}

}  // namespace icl_patch::ICL_PATCH_ISA
