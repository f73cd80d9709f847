// The CUDA driver of the RMSNorm inversion.
#pragma once

#include "common/calls.h"

namespace icl_patch::cuda {

// Queues the call on the device's stream. Returns null, or the error.
const char* invert_rows(const Inversion& call, int32_t device, void* stream);

}  // namespace icl_patch::cuda
