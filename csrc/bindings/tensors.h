// Checks of an op's arguments, and its outputs, on torch's stable ABI.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "bindings/cpu_driver.h"
#include "common/matrix.h"

namespace icl_patch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const char* name, const Tensor& x, bool allow_fp64 = false) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return DType::kFp32;
    case ScalarType::BFloat16: return DType::kBf16;
    case ScalarType::Half: return DType::kFp16;
    case ScalarType::Double:
      if (allow_fp64) return DType::kFp64;
      [[fallthrough]];
    default:
      STD_TORCH_CHECK(false, "expected ", name, " in ", allow_fp64 ? "fp64, " : "",
                      "fp32, bf16 or fp16");
  }
}

inline int32_t device_type_of(const Tensor& x) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  return type;
}

// Checks x's sizes (-1: any) and that it is on the device of the first argument: the dispatcher
// accepts tensors of several devices.
inline void check(const char* name, const Tensor& x, const Tensor& first,
                  std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(device_type_of(x) == device_type_of(first) &&
                      x.get_device_index() == first.get_device_index(),
                  "expected ", name, " on the device of the first argument");
  bool fits = x.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i)
    fits = sizes.begin()[i] < 0 || sizes.begin()[i] == x.size(i);
  if (fits) return;
  std::string expected, got;
  for (const int64_t size : sizes) expected += (size < 0 ? "*" : std::to_string(size)) + ", ";
  for (int64_t i = 0; i < x.dim(); ++i) got += std::to_string(x.size(i)) + ", ";
  expected.resize(expected.size() - 2);
  got.resize(got.size() - std::min<size_t>(got.size(), 2));
  STD_TORCH_CHECK(false, "expected ", name, " (", expected, "), got (", got, ")");
}

inline void check_eps(double eps) {
  STD_TORCH_CHECK(eps >= 0 && eps - eps == 0, "expected a finite eps >= 0, got ", eps);
}

// x (rows, n), or a vector (n,) that all rows share.
inline Matrix matrix(const char* name, const Tensor& x, const Tensor& first, int64_t rows,
                     int64_t n, bool allow_fp64 = false) {
  const bool shared = x.dim() == 1;
  if (shared)
    check(name, x, first, {n});
  else
    check(name, x, first, {rows, n});
  return {x.const_data_ptr(), dtype_of(name, x, allow_fp64), shared ? 0 : x.stride(0),
          x.stride(shared ? 0 : 1)};
}

// A new contiguous tensor of up to four dimensions on the device of `like`; sets `data` to its
// address. new_empty would be looked up by its name at every call.
template <class T>
Tensor allocate(const Tensor& like, std::initializer_list<int64_t> size, ScalarType dtype,
                T*& data) {
  int64_t strides[4] = {1, 1, 1, 1};
  for (size_t i = size.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<int64_t>(size.begin()[i], 1);
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(size.size(), size.begin(), strides, code,
                                                  device_type_of(like), like.get_device_index(),
                                                  &handle));
  Tensor x(handle);
  data = static_cast<T*>(x.mutable_data_ptr());
  return x;
}

inline Tensor allocate(const Tensor& like, std::initializer_list<int64_t> size, float*& data) {
  return allocate(like, size, ScalarType::Float, data);
}

inline Tensor allocate(const Tensor& like, std::initializer_list<int64_t> size, double*& data) {
  return allocate(like, size, ScalarType::Double, data);
}

// f(begin, end) on several threads for parts of [0, count), each of about `work` units or more.
template <class F>
void parallel(int64_t count, int64_t units_each, int64_t work, const F& f) {
  const int64_t grain = std::max<int64_t>(1, work / std::max<int64_t>(units_each, 1));
  torch::stable::parallel_for(0, count, grain, f);
}

// Runs rows [0, count) of a call by one of the CPU drivers.
template <class Call>
void run_rows(void (*CpuDriver::*rows)(const Call&, int64_t, int64_t), const Call& call,
              int64_t count, int64_t units_each) {
  const auto run = cpu_driver().*rows;
  parallel(count, units_each, 16384, [&](int64_t begin, int64_t end) { run(call, begin, end); });
}

}  // namespace icl_patch

#define ICL_PATCH_IMPL(op) m.impl(#op, TORCH_BOX(&icl_patch::op))
