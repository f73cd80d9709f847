// What an op hands to a driver: matrices as they lie in memory, and the arguments of a launch. No torch header, so that nvcc and
// every instruction-set build of the CPU driver can include it.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ICL_PATCH_CALLABLE __host__ __device__ __forceinline__
#else
#define ICL_PATCH_CALLABLE inline __attribute__((always_inline))
#endif

namespace icl_patch {

enum class Float : int8_t { kDouble, kSingle, kBrain, kHalf };

ICL_PATCH_CALLABLE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

ICL_PATCH_CALLABLE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ICL_PATCH_CALLABLE float from_brain(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

ICL_PATCH_CALLABLE float from_half(uint16_t bits) {
#ifdef __CUDA_ARCH__
  float exact;
  asm("cvt.f32.f16 %0, %1;" : "=f"(exact) : "h"(bits));
  return exact;
#else
  const uint32_t magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
  // exponent and mantissa in place, then the bias: 2^112 also normalises what was denormal; infinity and NaN keep their exponent
  const float finite = from_bits(magnitude << 13) * 0x1p112f;
  const float special = from_bits((magnitude << 13) | (magnitude > 0x7c00u ? 0x7fc00000u : 0x7f800000u));
  const float value = magnitude < 0x7c00u ? finite : special;
  return from_bits(bits_of(value) | sign);
#endif
}

// To the nearest bf16, ties to even, still in fp32; NaN stays NaN.
ICL_PATCH_CALLABLE float round_to_brain(float value) {
  const uint32_t bits = bits_of(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return from_bits(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) & 0xffff0000u);
}

ICL_PATCH_CALLABLE uint16_t to_brain(float value) { return static_cast<uint16_t>(bits_of(round_to_brain(value)) >> 16); }

ICL_PATCH_CALLABLE uint16_t to_half(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((bits & 0x80000000u) >> 16);
  if (magnitude >= 0x7f800000u) return sign | (magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : 0x7c00u);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  // below 2^-14 the adder rounds to the spacing of denormals, 2^-24, above it the integer arithmetic to 11 bits
  if (magnitude < 0x38800000u) return sign | static_cast<uint16_t>(bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u);
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

ICL_PATCH_CALLABLE int64_t size_of(Float dtype) { return dtype == Float::kDouble ? 8 : dtype == Float::kSingle ? 4 : 2; }

// A (B, n) matrix of any float dtype and any strides, in elements; a vector that all rows share has row stride 0.
struct Matrix {
  const void* data = nullptr;
  Float dtype = Float::kSingle;
  int64_t row = 0, column = 0;

  // The same from column `first` on.
  ICL_PATCH_CALLABLE Matrix from(int64_t first) const {
    return {static_cast<const char*>(data) + first * column * size_of(dtype), dtype, row, column};
  }

  ICL_PATCH_CALLABLE double at(int64_t b, int64_t k) const {
    const int64_t i = b * row + k * column;
    switch (dtype) {
      case Float::kDouble: return static_cast<const double*>(data)[i];
      case Float::kSingle: return static_cast<const float*>(data)[i];
      case Float::kBrain: return from_brain(static_cast<const uint16_t*>(data)[i]);
      default: return from_half(static_cast<const uint16_t*>(data)[i]);
    }
  }
};

// One call of either op. Where `delta` is given, the target is formed from it (the stable update): g = delta + m ⊙ Norm(h) with
// h = fallback, the radius is h's, m is floored, and what is written is not the inverse x but x - h.
struct Inversion {
  int64_t rows = 0, n = 0;
  Matrix target, scale, rms, fallback, delta;
  double eps = 0;
  bool bisection = false;
  void* hidden = nullptr;  // (B, n) contiguous, fp64 or fp32
  bool hidden_is_double = false;
  double* shift = nullptr;       // (B,)
  double* new_scale = nullptr;   // (B, n) contiguous
  int8_t* status = nullptr;      // (B,)
  int32_t* evaluations = nullptr;  // (B,)
};

}  // namespace icl_patch
