// Floating dtypes and matrices as they lie in memory. No torch header, so that nvcc and every
// instruction-set build of the CPU drivers can include it.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ICL_PATCH_INLINE __host__ __device__ __forceinline__
#else
#define ICL_PATCH_INLINE inline __attribute__((always_inline))
#endif
#define ICL_PATCH_INLINE_LAMBDA __attribute__((always_inline))

namespace icl_patch {

enum class DType : int8_t { kFp64, kFp32, kBf16, kFp16 };

ICL_PATCH_INLINE int64_t size_of(DType dtype) {
  return dtype == DType::kFp64 ? 8 : dtype == DType::kFp32 ? 4 : 2;
}

ICL_PATCH_INLINE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

ICL_PATCH_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ICL_PATCH_INLINE float bf16_to_fp32(uint16_t bits) {
  return from_bits(static_cast<uint32_t>(bits) << 16);
}

ICL_PATCH_INLINE float fp16_to_fp32(uint16_t bits) {
#ifdef __CUDA_ARCH__
  float exact;
  asm("cvt.f32.f16 %0, %1;" : "=f"(exact) : "h"(bits));
  return exact;
#else
  const uint32_t magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
  // Move exponent and mantissa into place, then correct the bias: 2^112 also normalises denormal
  // numbers. Infinity and NaN keep the largest exponent.
  const float finite = from_bits(magnitude << 13) * 0x1p112f;
  const float special =
      from_bits((magnitude << 13) | (magnitude > 0x7c00u ? 0x7fc00000u : 0x7f800000u));
  return from_bits(bits_of(magnitude < 0x7c00u ? finite : special) | sign);
#endif
}

// Rounds to the nearest bf16, ties to even, and returns it in fp32; NaN stays NaN.
ICL_PATCH_INLINE float round_to_bf16(float value) {
  const uint32_t bits = bits_of(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return from_bits((is_nan ? bits | 0x400000u : rounded) & 0xffff0000u);
}

ICL_PATCH_INLINE uint16_t fp32_to_bf16(float value) {
  return static_cast<uint16_t>(bits_of(round_to_bf16(value)) >> 16);
}

// Rounds to the nearest fp16, ties to even.
ICL_PATCH_INLINE uint16_t fp32_to_fp16(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (magnitude > 0x7f800000u) {  // NaN
    rounded = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to infinity
    rounded = 0x7c00u;
  } else if (magnitude <
             0x38800000u) {  // below 2^-14 fp32 addition rounds to fp16's spacing, 2^-24
    rounded = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {  // integer arithmetic rounds to 11 bits
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>((bits & 0x80000000u) >> 16 | rounded);
}

// Elements of a matrix, which convert to fp32.
struct bf16 {
  uint16_t bits;
  ICL_PATCH_INLINE operator float() const { return bf16_to_fp32(bits); }
};

struct fp16 {
  uint16_t bits;
  ICL_PATCH_INLINE operator float() const { return fp16_to_fp32(bits); }
};

// A (rows, columns) matrix of any dtype. `row` and `column` are its strides in elements; a vector
// that all rows share has row stride 0.
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::kFp32;
  int64_t row = 0, column = 0;

  template <class T>
  ICL_PATCH_INLINE const T* as() const {
    return static_cast<const T*>(data);
  }

  // The same matrix, beginning `elements` later in memory.
  ICL_PATCH_INLINE Matrix shifted(int64_t elements) const {
    return {as<char>() + elements * size_of(dtype), dtype, row, column};
  }

  // f(data), with data in the element type of the matrix.
  template <class F>
  ICL_PATCH_INLINE auto visit(F f) const {
    switch (dtype) {
      case DType::kFp64: return f(as<double>());
      case DType::kFp32: return f(as<float>());
      case DType::kBf16: return f(as<bf16>());
      default: return f(as<fp16>());
    }
  }

  ICL_PATCH_INLINE double at(int64_t b, int64_t k) const {
    const int64_t i = b * row + k * column;
    switch (dtype) {
      case DType::kFp64: return as<double>()[i];
      case DType::kFp32: return as<float>()[i];
      case DType::kBf16: return as<bf16>()[i];
      default: return as<fp16>()[i];
    }
  }
};

}  // namespace icl_patch
