// The CUDA driver of the RMSNorm inversion, and of a recording that contains it.
#pragma once

#include "common/calls.h"

namespace icl_patch::cuda {

// Each queues the call on the device's stream. Returns null, or the error.
const char* invert_rows(const Inversion& call, int32_t device, void* stream);
const char* record_norm(const NormRecording& call, int32_t device, void* stream);  // n <= 2^20

}  // namespace icl_patch::cuda
