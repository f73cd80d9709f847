// read_direction, rms_norm, norm_pair and rotary_embedding, on the CPU.
#include <tuple>

#include "bindings/tensors.h"

namespace icl_patch {
namespace {

std::tuple<Tensor, Tensor> read_direction(const Tensor& z, bool wide) {
  check("z", z, z, {-1, -1});
  const int64_t rows = z.size(0), k = z.size(1), size = wide ? 8 : 4;
  const Matrix from = matrix("z", z, z, rows, k, true);
  const ScalarType dtype = wide ? ScalarType::Double : ScalarType::Float;
  char *v_data, *inverse_data;
  Tensor v = allocate(z, {rows, k}, dtype, v_data);
  Tensor inverse_norm2 = allocate(z, {rows}, dtype, inverse_data);
  const CpuDriver& driver = cpu_driver();
  parallel(rows, k, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      driver.read_direction(from, m, k, v_data + m * k * size, inverse_data + m * size, wide);
  });
  return {v, inverse_norm2};
}

Norm norm(const char* name, const Tensor& x, const char* scale_name, const Tensor& scale,
          double eps, double offset, bool cast_first) {
  check(name, x, x, {-1, -1});
  STD_TORCH_CHECK(x.size(1) > 0, "expected ", name, " (M, d) with d >= 1");
  check_eps(eps);
  Norm call;
  call.rows = x.size(0);
  call.n = x.size(1);
  call.x = matrix(name, x, x, call.rows, call.n);
  call.scale = matrix(scale_name, scale, x, call.rows, call.n);
  call.eps = static_cast<float>(eps);
  call.offset = static_cast<float>(offset);
  call.cast_first = cast_first;
  return call;
}

Tensor rms_norm(const Tensor& x, const Tensor& scale, double eps, double scale_offset,
                bool cast_first) {
  Norm call = norm("x", x, "scale", scale, eps, scale_offset, cast_first);
  Tensor y = allocate(x, {call.rows, call.n}, x.scalar_type(), call.y);
  run_rows(&CpuDriver::norm_rows, call, call.rows, call.n);
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_pair(const Tensor& hidden, const Tensor& weight,
                                                     double eps, double scale_offset,
                                                     bool cast_first) {
  Norm call = norm("hidden", hidden, "weight", weight, eps, scale_offset, cast_first);
  const int64_t pairs = call.rows / 2;
  STD_TORCH_CHECK(call.rows == 2 * pairs, "expected hidden (2 M, d), got ", call.rows, " rows");
  check("weight", weight, hidden, {call.n});
  Tensor z_pair = allocate(hidden, {call.rows, call.n}, hidden.scalar_type(), call.y);
  Tensor delta = allocate(hidden, {pairs, call.n}, call.delta);
  Tensor v = allocate(hidden, {pairs, call.n}, call.v);
  Tensor inverse_norm2 = allocate(hidden, {pairs}, call.inverse_norm2);
  run_rows(&CpuDriver::norm_rows, call, pairs, 2 * call.n);
  return {z_pair, delta, v, inverse_norm2};
}

// One of query and key.
Tensor rotated(const char* name, const Tensor& x, const Tensor& first, const Tensor& cos,
               const Tensor& sin) {
  check(name, x, first, {first.size(0), -1, first.size(2), first.size(3)});
  STD_TORCH_CHECK(x.scalar_type() == first.scalar_type() &&
                      cos.scalar_type() == first.scalar_type() &&
                      sin.scalar_type() == first.scalar_type(),
                  "expected query, key, cos and sin of one dtype");
  const int64_t rows = x.size(0);
  Rotary call;
  call.heads = x.size(1);
  call.tokens = x.size(2);
  call.d = x.size(3);
  STD_TORCH_CHECK(call.d % 2 == 0, "expected an even width, got ", call.d);
  call.x = {x.const_data_ptr(), dtype_of(name, x), x.stride(2), x.stride(3)};
  call.x_row = x.stride(0);
  call.x_head = x.stride(1);
  const bool shared = cos.dim() && cos.size(0) == 1;
  const auto of_tokens = [&](const char* name, const Tensor& from, int64_t& row) {
    check(name, from, first, {shared ? 1 : rows, call.tokens, call.d});
    row = shared ? 0 : from.stride(0);
    return Matrix{from.const_data_ptr(), call.x.dtype, from.stride(1), from.stride(2)};
  };
  call.cos = of_tokens("cos", cos, call.cos_row);
  call.sin = of_tokens("sin", sin, call.sin_row);
  Tensor y = allocate(x, {rows, call.heads, call.tokens, call.d}, x.scalar_type(), call.y);
  run_rows(&CpuDriver::rotary_rows, call, rows * call.heads * call.tokens, call.d);
  return y;
}

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& query, const Tensor& key,
                                            const Tensor& cos, const Tensor& sin) {
  check("query", query, query, {-1, -1, -1, -1});
  return {rotated("query", query, query, cos, sin), rotated("key", key, query, cos, sin)};
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  ICL_PATCH_IMPL(read_direction);
  ICL_PATCH_IMPL(rms_norm);
  ICL_PATCH_IMPL(norm_pair);
  ICL_PATCH_IMPL(rotary_embedding);
}
