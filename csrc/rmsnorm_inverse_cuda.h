// The CUDA driver of the RMSNorm inversion.
#pragma once

#include "rows.h"

namespace icl_patch::cuda {

// Queues the call on the stream of the device. Returns null, or what went wrong.
const char* invert_rows(const Inversion& call, int32_t device, void* stream);

}  // namespace icl_patch::cuda
