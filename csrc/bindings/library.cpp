// The schemas of all native ops, and what icl_patch.ops.native asks about the build.
#include <torch/csrc/stable/library.h>

#include "bindings/cpu_driver.h"

STABLE_TORCH_LIBRARY(icl_patch, m) {
  m.def(
      "invert_rmsnorm(Tensor target, Tensor scale, Tensor rms, float eps=0.0,"
      " Tensor? fallback=None)"
      " -> (Tensor hidden, Tensor shift, Tensor new_scale, Tensor status, Tensor evaluations)");
  m.def(
      "stable_scale(Tensor delta, Tensor scale, Tensor hidden_down, float eps=0.0)"
      " -> (Tensor u, Tensor shift, Tensor new_scale, Tensor status, Tensor evaluations)");
  m.def(
      "patched_linear(Tensor z, Tensor weight, Tensor? u=None, Tensor? v=None, Tensor? bias=None,"
      " Tensor? index=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("linear_maps(Tensor z, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
  m.def(
      "add_low_rank(Tensor y, Tensor z, Tensor u, Tensor v, Tensor? index=None,"
      " ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "expert_linear(Tensor x, Tensor weight, Tensor expert, Tensor? bias=None,"
      " ScalarType? out_dtype=None) -> Tensor");
  m.def("read_direction(Tensor z, bool wide=False) -> (Tensor v, Tensor inverse_norm2)");
  m.def(
      "record_linear(Tensor z_pair, Tensor weight, Tensor v, Tensor? bias=None)"
      " -> (Tensor y, Tensor u)");
  m.def(
      "record_linears(Tensor z_pair, Tensor[] weights, Tensor v, Tensor?[] biases) -> Tensor[]");
  m.def(
      "rms_norm(Tensor x, Tensor scale, float eps, float scale_offset=0.0, bool cast_first=True)"
      " -> Tensor");
  m.def(
      "norm_pair(Tensor hidden, Tensor weight, float eps, float scale_offset=0.0,"
      " bool cast_first=True)"
      " -> (Tensor z_pair, Tensor delta, Tensor v, Tensor inverse_norm2)");
  m.def("gated_product(Tensor gate, Tensor up, str activation) -> Tensor");
  m.def(
      "rotary_embedding(Tensor query, Tensor key, Tensor cos, Tensor sin)"
      " -> (Tensor query, Tensor key)");
  m.def(
      "decode_attention(Tensor query, Tensor key, Tensor value, float scale, Tensor? mask=None)"
      " -> Tensor");
  m.def(
      "attention_pair(Tensor query, Tensor key, Tensor value, Tensor slot, float scale,"
      " Tensor? mask=None) -> Tensor");
  m.def(
      "write_and_attend(Tensor query, Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value,"
      " Tensor slot, float scale, Tensor? mask=None) -> Tensor");
  m.def(
      "record_norm(Tensor y_pair, Tensor h, Tensor delta, Tensor weight, float eps,"
      " ScalarType? out_dtype=None, float scale_offset=0.0, bool cast_first=True)"
      " -> (Tensor y, Tensor u, Tensor v, Tensor inverse_norm2, Tensor new_scale, Tensor status)");
}

extern "C" __attribute__((visibility("default"))) const char* icl_patch_cpu_instructions() {
  const icl_patch::CpuDriver* driver = icl_patch::find_cpu_driver();
  return driver ? driver->instructions : "";
}

#ifndef ICL_PATCH_CUDA
#define ICL_PATCH_CUDA ""
#endif
extern "C" __attribute__((visibility("default"))) const char* icl_patch_cuda_architectures() {
  return ICL_PATCH_CUDA;
}
