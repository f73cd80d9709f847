// read_direction, rms_norm, norm_pair and gated_product, on the CPU.
#include <string>
#include <tuple>

#include "bindings/cpu_driver.h"
#include "bindings/tensors.h"

namespace icl_patch {
namespace {

constexpr int64_t kTaskElements = 16384;  // that one thread takes at least

std::tuple<Tensor, Tensor> read_direction(const Tensor& z, bool wide) {
  STD_TORCH_CHECK(z.dim() == 2, "expected z (M, K)");
  const int64_t rows = z.size(0), k = z.size(1), size = wide ? 8 : 4;
  const Matrix from = matrix("z", z, z, rows, k, true);
  const ScalarType dtype = wide ? ScalarType::Double : ScalarType::Float;
  char *v_data, *inverse_data;
  Tensor v = allocate(z, {rows, k}, dtype, v_data);
  Tensor inverse_norm2 = allocate(z, {rows}, dtype, inverse_data);
  const CpuDriver& driver = cpu_driver();
  parallel(rows, k, kTaskElements, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      driver.read_direction(from, m, k, v_data + m * k * size, inverse_data + m * size, wide);
  });
  return {v, inverse_norm2};
}

Norm norm(const char* name, const Tensor& x, const char* scale_name, const Tensor& scale,
          double eps, double offset, bool cast_first) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "expected ", name, " (M, d) with d >= 1");
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

// Runs `count` rows or pairs of rows.
void run(const Norm& call, int64_t count) {
  const CpuDriver& driver = cpu_driver();
  parallel(count, call.delta ? 2 * call.n : call.n, kTaskElements,
           [&](int64_t begin, int64_t end) { driver.norm_rows(call, begin, end); });
}

Tensor rms_norm(const Tensor& x, const Tensor& scale, double eps, double scale_offset,
                bool cast_first) {
  Norm call = norm("x", x, "scale", scale, eps, scale_offset, cast_first);
  Tensor y = allocate(x, {call.rows, call.n}, x.scalar_type(), call.y);
  run(call, call.rows);
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_pair(const Tensor& hidden, const Tensor& weight,
                                                     double eps, double scale_offset,
                                                     bool cast_first) {
  Norm call = norm("hidden", hidden, "weight", weight, eps, scale_offset, cast_first);
  const int64_t pairs = call.rows / 2;
  STD_TORCH_CHECK(call.rows == 2 * pairs, "expected hidden (2 M, d), got ", call.rows, " rows");
  STD_TORCH_CHECK(weight.dim() == 1, "expected weight (", call.n, ",)");
  Tensor z_pair = allocate(hidden, {call.rows, call.n}, hidden.scalar_type(), call.y);
  Tensor delta = allocate(hidden, {pairs, call.n}, call.delta);
  Tensor v = allocate(hidden, {pairs, call.n}, call.v);
  Tensor inverse_norm2 = allocate(hidden, {pairs}, call.inverse_norm2);
  run(call, pairs);
  return {z_pair, delta, v, inverse_norm2};
}

Tensor gated_product(const Tensor& gate, const Tensor& up, std::string activation) {
  STD_TORCH_CHECK(gate.dim() == 2 && up.dim() == 2, "expected gate and up (M, N)");
  Gated call;
  call.rows = gate.size(0);
  call.n = gate.size(1);
  call.gate = matrix("gate", gate, gate, call.rows, call.n);
  call.up = matrix("up", up, gate, call.rows, call.n);
  call.gelu = activation == "gelu_tanh";
  STD_TORCH_CHECK(call.gelu || activation == "silu", "expected activation gelu_tanh or silu, got ",
                  activation);
  STD_TORCH_CHECK(call.gate.dtype == call.up.dtype, "expected gate and up of one dtype");
  Tensor y = allocate(gate, {call.rows, call.n}, gate.scalar_type(), call.y);
  const CpuDriver& driver = cpu_driver();
  parallel(call.rows * call.n, 2, kTaskElements,
           [&](int64_t begin, int64_t end) { driver.gated_outputs(call, begin, end); });
  return y;
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  m.impl("read_direction", TORCH_BOX(&icl_patch::read_direction));
  m.impl("rms_norm", TORCH_BOX(&icl_patch::rms_norm));
  m.impl("norm_pair", TORCH_BOX(&icl_patch::norm_pair));
  m.impl("gated_product", TORCH_BOX(&icl_patch::gated_product));
}
