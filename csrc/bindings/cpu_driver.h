// The CPU drivers of the instruction set that is used here.
#pragma once

#include "cpu/drivers.h"

namespace icl_patch {

struct CpuDriver {
  const char* instructions;
  bool supported;
  decltype(&portable::pass_rows) pass_rows;
  decltype(&portable::prepare_rows) prepare_rows;
  decltype(&portable::linear_outputs) linear_outputs;
  decltype(&portable::invert_rows) invert_rows;
  decltype(&portable::norm_rows) norm_rows;
  decltype(&portable::gated_outputs) gated_outputs;
  decltype(&portable::rotary_rows) rotary_rows;
  decltype(&portable::read_direction) read_direction;
  decltype(&portable::attention_parts) attention_parts;
  decltype(&portable::attention_outputs) attention_outputs;
};

// The widest instruction set of this processor, or the one that ICL_PATCH_CPU names; null if that
// is none of this processor's.
const CpuDriver* find_cpu_driver();

// The same, checked.
const CpuDriver& cpu_driver();

}  // namespace icl_patch
