// gated_product, on the CPU.
#include <string>

#include "bindings/tensors.h"

namespace icl_patch {
namespace {

Tensor gated_product(const Tensor& gate, const Tensor& up, std::string activation) {
  check("gate", gate, gate, {-1, -1});
  check("up", up, gate, {gate.size(0), gate.size(1)});
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
  run_rows(&CpuDriver::gated_outputs, call, call.rows * call.n, 2);
  return y;
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) { ICL_PATCH_IMPL(gated_product); }
